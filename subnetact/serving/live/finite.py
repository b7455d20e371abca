"""Which outputs of a batch are not finite. Nearly always none is, so one sum over all of them is enough."""

from __future__ import annotations

import sys
from cmath import isfinite
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

_FEW = 4096
"""Tensors of at most this many numbers are put together for one sum; of larger ones each has its own."""


def not_finite(outputs: Sequence[Any]) -> list[int]:
    """Return the positions of the outputs with a number that is not finite, in tensors, tuples and mappings.

    A sum is finite only if all its numbers are. Where it is not, it may have overflowed: each is looked at.
    """
    first: Any = outputs[0] if outputs else None
    with suppress(RuntimeError, TypeError, ValueError):  # outputs of several kinds are looked at one by one
        if isinstance(first, (Mapping, tuple)):
            rows = (row.values() if isinstance(row, Mapping) else row for row in outputs)
            return sorted(set[int]().union(*(not_finite(part) for part in zip(*rows, strict=True))))
        if isinstance(first, (float, np.ndarray)) and np.isfinite(outputs).all():
            return []
        small = hasattr(first, "isfinite") and first.numel() <= _FEW
        if small and isfinite(sys.modules["torch"].cat(outputs).sum().item()):
            return []
    return [i for i, output in enumerate(outputs) if not _is_finite(output)]


def _is_finite(value: Any) -> bool:
    """Return whether all numbers are finite; what cannot be asked is taken to be."""
    with suppress(RuntimeError, TypeError, ValueError):
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            return not not_finite(list(value))
        if hasattr(value, "isfinite"):
            return isfinite(value.sum().item()) or bool(value.isfinite().all())
        if isinstance(value, (float, complex, np.ndarray, np.generic)):
            return bool(np.isfinite(value).all())
    return True
