"""Reading upstream's own notation: constructor lists and configuration dictionaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subnetact.errors import SpecError

__all__ = ["choices", "is_list", "plain", "upstream_config"]

_NOT_OF_THE_NETWORK = ("image_size", "r")


def upstream_config(
    family: str, config: Any, keys: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a configuration's entries as plain lists and numbers.

    The input's size (`image_size`, `r`) and a null width (`wid`) may stand beside them, as in
    upstream's search results; they say nothing about the network.

    Raises:
        SpecError: it is no mapping, or has other keys.
    """
    if not isinstance(config, Mapping):
        raise SpecError(f"{family}: a configuration is a dictionary of {', '.join(keys)}, got {config!r}")
    allowed = {*keys, *optional, *_NOT_OF_THE_NETWORK, "wid"}
    if not set(keys) <= set(config) or not set(config) <= allowed or config.get("wid") is not None:
        got = sorted(map(str, config))
        raise SpecError(f"{family}: a configuration has exactly the keys {', '.join(keys)}; got {got}")
    return {key: plain(config[key]) for key in (*keys, *optional) if key in config}


def plain(value: Any) -> Any:
    """Return NumPy's arrays and scalars as lists and numbers, anything else as it is."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def is_list(value: Any) -> bool:
    """Tell whether a value is meant slot by slot."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def choices(values: Any) -> tuple[Any, ...]:
    """Return a constructor's list, sorted and distinct; a scalar is a list of one.

    Raises:
        SpecError: it is empty, or not of finite numbers >= 0.
    """
    values = plain(values)
    listed = tuple(values) if is_list(values) else (values,)
    if not listed or not all(type(v) in (int, float) and 0 <= v < math.inf for v in listed):
        raise SpecError(f"a constructor's list is one or more numbers >= 0, got {values!r}")
    return tuple(sorted(set(listed)))
