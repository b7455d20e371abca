"""Checks JSON documents against the part of JSON Schema that this library's schemas are written in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def violation(value: Any, schema: Mapping[str, Any], place: str = "the document") -> str | None:
    """Return, in words, where a value does not follow a schema; None if it does.

    It knows `type`, `const`, `enum`, `pattern`, `required`, `properties`, `additionalProperties`, `items`.
    """
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{place} is {value!r:.60}, not {' or '.join(kinds)}"
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(_same(value, one) for one in allowed):
        return f"{place} is {value!r:.60}, not {' or '.join(map(repr, allowed))}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"{place} is {value!r:.60}, not of the form {schema['pattern']}"
    if isinstance(value, list) and "items" in schema:
        parts = [(f"{place}[{i}]", inner, schema["items"]) for i, inner in enumerate(value)]
    elif isinstance(value, dict):
        missing = [name for name in schema.get("required", ()) if name not in value]
        if missing:
            return f"{place} has no {missing[0]!r}"
        known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
        parts = [(f"{n!r:.60} of {place}", inner, known.get(n, other)) for n, inner in value.items()]
    else:
        parts = []
    return next((found for n, inner, own in parts if (found := violation(inner, own, n))), None)


def _is(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
