"""Upstream's notation: constructor lists and configuration dictionaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subnetact.errors import SpecError

__all__ = ["choices", "is_list", "plain", "upstream_config"]

MOST = 8192
_NOT_OF_THE_NETWORK = ("image_size", "r")


def upstream_config(
    family: str, config: Any, keys: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the entries of an upstream configuration as plain lists and numbers.

    Upstream's search results also contain the input size (`image_size`, `r`) and the width entry `wid`, which
    is None. These keys do not describe the network, so they are accepted and left out of the result.

    Args:
        family: name of the family, for error messages.
        config: the configuration.
        keys: keys that must be present.
        optional: keys that may be present.

    Returns:
        The entries under `keys`, and those under `optional` that are present.

    Raises:
        SpecError: the configuration is not a mapping, lacks a key, or has an unknown key.
    """
    if not isinstance(config, Mapping):
        raise SpecError(f"{family}: a configuration is a dictionary of {', '.join(keys)}, got {config!r}")
    allowed = {*keys, *optional, *_NOT_OF_THE_NETWORK, "wid"}
    if not set(keys) <= set(config) or not set(config) <= allowed or config.get("wid") is not None:
        got = sorted(map(str, config))
        raise SpecError(f"{family}: a configuration has exactly the keys {', '.join(keys)}; got {got}")
    return {key: plain(config[key]) for key in (*keys, *optional) if key in config}


def plain(value: Any) -> Any:
    """Return NumPy arrays and scalars as lists and numbers, also inside lists; other values are unchanged."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def is_list(value: Any) -> bool:
    """Return whether a value has one entry per slot, instead of being one value for every slot."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def choices(values: Any) -> tuple[Any, ...]:
    """Return the choices in a list that upstream's constructor takes.

    Args:
        values: a list or array of numbers, or one number, which counts as a list of one.

    Returns:
        The distinct choices, ascending.

    Raises:
        SpecError: the list is empty, or contains something other than numbers from 0 to 8192.
    """
    values = plain(values)
    listed = tuple(values) if is_list(values) else (values,)
    if not listed or not all(type(v) in (int, float) and 0 <= v < math.inf for v in listed):
        raise SpecError(f"a constructor's list is one or more numbers >= 0, got {values!r}")
    if max(listed) > MOST or len(listed) > MOST:
        raise SpecError(f"a constructor's list has at most {MOST} numbers up to {MOST}, got {values!r:.60}")
    return tuple(sorted(set(listed)))
