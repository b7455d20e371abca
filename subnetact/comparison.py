"""comparison: whether two outputs are equal, within a tolerance whose name says why they may differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = [
    "EXACT",
    "FUSED",
    "LOW_PRECISION",
    "MASKED",
    "ROUNDED",
    "SIXTEEN_BITS",
    "Tolerance",
    "equal",
    "is_as_near",
]


class Tolerance(NamedTuple):
    """How far a number may be off, as shares of the `largest` (or `least`) number and of its `own` value."""

    largest: float
    own: float = 0.0
    least: float = 0.0


EXACT = Tolerance(1e-5)
"""The same float32 kernels on other strides or in another order of channels."""
ROUNDED = Tolerance(5e-5)
"""The same float32 layers by other kernels: extracted and exported networks, and those of upstream."""
MASKED = Tolerance(1e-3)
"""A subnet and the full network with zeros elsewhere, whose sums have more numbers, in all modules."""
FUSED = Tolerance(1e-4, own=1e-3, least=1.0)
"""Layers merged into others, or compiled: sums are taken in another order."""
SIXTEEN_BITS = Tolerance(5e-2)
"""Computed in 16 bits on one of the two sides. It takes the place of any other tolerance there."""
LOW_PRECISION = Tolerance(0.5, least=1e-6)
"""Weights of 8 or 16 bits: it finds what computes something else, not what loses accuracy."""
DISTANCE_RATIO = 2.0
NORM_SHARE = 0.01
"""How much farther an output may be than another one: times its distance, and a share of the exact norm."""


def equal(found: Any, expected: Any, tolerance: Tolerance = ROUNDED) -> bool:
    """Tell whether two outputs are equal: structure, shapes, dtypes, and numbers within a tolerance."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return _equal(found, expected, tolerance)
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return set(found) == set(expected) and all(equal(found[n], expected[n], tolerance) for n in expected)
    if isinstance(found, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(
            equal(one, other, tolerance) for one, other in zip(found, expected, strict=True)
        )
    try:
        return type(found) is type(expected) and bool(found == expected)
    except (RuntimeError, ValueError):  # The values hold arrays, whose comparison is no single bool.
        return False


def _equal(found: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    if expected.dtype.itemsize < 4:
        tolerance = max(tolerance, SIXTEEN_BITS._replace(least=tolerance.least))
        found, expected = found.float(), expected.float()
    finite = expected[expected.isfinite()]
    largest = max(float(finite.abs().max()) if finite.numel() else 0.0, tolerance.least)
    return torch.allclose(found, expected, tolerance.own, tolerance.largest * largest, equal_nan=True)


def is_as_near(found: Any, other: Any, exact: Any) -> bool:
    """Tell whether an output is not much farther from an exact one than another output is."""
    leaves = [tree_leaves(one) for one in (found, other, exact)]
    if len({len(one) for one in leaves}) > 1:
        return False
    for mine, others, right in zip(*leaves, strict=True):
        if not isinstance(right, Tensor) or not right.is_floating_point():
            near = equal(mine, right)
        else:
            near = mine.shape == right.shape and mine.dtype == right.dtype
            allowed = DISTANCE_RATIO * (others - right).norm() + NORM_SHARE * right.norm()
            near = near and bool((mine - right).norm() <= allowed)
        if not near:
            return False
    return True
