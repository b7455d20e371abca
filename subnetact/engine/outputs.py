"""Outputs of a batch: whether two agree up to rounding, and how one is split into single outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["agree", "unstack"]


def agree(output: Any, expected: Any, rtol: float = 1e-3, atol: float = 1e-4) -> bool:
    """Tell whether two outputs are equal, their tensors up to rounding.

    Args:
        output: tensors, other values, and tuples, lists or dictionaries of them.
        expected: likewise.
        rtol: relative difference.
        atol: absolute difference, of the largest expected value where that is above 1.
    """
    if isinstance(output, Tensor) and isinstance(expected, Tensor):
        if output.shape != expected.shape or output.dtype != expected.dtype:
            return False
        if not (expected.is_floating_point() or expected.is_complex()):
            return torch.equal(output, expected)
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        scale = max(1.0, largest if largest < float("inf") else 1.0)
        return torch.allclose(output, expected, rtol, atol * scale, equal_nan=True)
    if isinstance(output, Mapping) and isinstance(expected, Mapping):
        return set(output) == set(expected) and all(
            agree(output[name], expected[name], rtol, atol) for name in expected
        )
    if isinstance(output, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(output) == len(expected) and all(
            agree(one, other, rtol, atol) for one, other in zip(output, expected, strict=True)
        )
    try:
        return type(output) is type(expected) and bool(output == expected)
    except (RuntimeError, ValueError):  # arrays, and objects that hold tensors, have no one answer
        return False


def unstack(output: Any, count: int) -> list[Any]:
    """Return the first `count` rows of a batch's output, each on the CPU and of the batch's structure."""
    if isinstance(output, Tensor):
        return list(output[:count].cpu().unbind(0))
    if isinstance(output, Mapping):
        columns = {name: unstack(part, count) for name, part in output.items() if part is not None}
        return [{name: rows[i] for name, rows in columns.items()} for i in range(count)]
    if isinstance(output, (tuple, list)):
        return list(zip(*(unstack(part, count) for part in output), strict=True))
    raise TypeError(
        f"the network returned {type(output).__name__}; only tensors, and tuples, lists or mappings of them, "
        "can be given back one by one"
    )
