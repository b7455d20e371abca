"""Makes the options of a command out of the dataclasses and functions that take their values.

Names, types, defaults and help texts are those of the parameters and of their docstrings.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from subnetact.command import json_object

Result = TypeVar("Result")


def add_options(
    parser: ArgumentParser, groups: Mapping[str, Callable[..., Any]], changes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Add a group of options for every target; `changes` are further arguments of `add_argument` by name."""
    for title, target in groups.items():
        group = parser.add_argument_group(title)
        for name, facts in _option_facts(target).items():
            group.add_argument(_option(name), **{**facts, **changes.get(name, {})})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option_facts(target: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of `add_argument` for every parameter of plain data."""
    hints = typing.get_type_hints(target)
    text = inspect.getdoc(target) or ""
    section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?)+)", text, re.MULTILINE)
    entries = re.compile(r"^ {4}(\w+): (.+?)(?=\n {4}\w|\Z)", re.DOTALL | re.MULTILINE)
    documented = dict(entries.findall(section[1] if section else ""))
    found = {}
    for name, parameter in inspect.signature(target).parameters.items():
        kind = _kind(hints[name])
        if kind is not None:
            words = " ".join(documented[name].split()).removesuffix(".").replace("%", "%%")
            words = re.sub(r"`(\w+)`", lambda quoted: _option(quoted[1]), words)
            found[name] = {"default": parameter.default, "help": words, **kind}
    return found


def _kind(hint: Any) -> dict[str, Any] | None:
    """Return how values of a type are read from the command line; None if they are not."""
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Mapping:
        return {"type": json_object, "metavar": "JSON"}
    if typing.get_origin(hint) in (tuple, Sequence):
        return {**(_kind(typing.get_args(hint)[0]) or {}), "nargs": "+"}
    metavars = {int: "N", float: "N", str: None, Path: "PATH"}
    return {"type": hint, "metavar": metavars[hint]} if hint in metavars else None


def arguments_of(args: Namespace, parser: ArgumentParser, without: Sequence[str] = ()) -> list[str]:
    """Return the arguments that are parsed to the same options, in the parser's order, without defaults."""
    found: list[str] = []
    for name, value in vars(args).items():
        if name not in without and value != parser.get_default(name):
            values = value if isinstance(value, list | tuple) else [value] * (value is not True)
            found += [_option(name), *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return found


def call_with_options(target: Callable[..., Result], args: Namespace, **more: Any) -> Result:
    """Call a dataclass or a function with the options that it has parameters for, and with `more`."""
    parameters = inspect.signature(target).parameters
    given = {name: value for name, value in vars(args).items() if name in parameters}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return target(**{**given, **lists, **more})
