"""comparison: whether two outputs are equal, within a tolerance that has a name.

Every question of this kind is asked here: of fused programs, exports, extracted networks, proofs of
`insert_`, reordered weights. A tolerance says why two outputs that should be equal may differ at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["EXACT", "FUSED", "MASKED", "ROUNDED", "SHORT", "Tolerance", "equal", "is_as_near"]


class Tolerance(NamedTuple):
    """How far a number may be from the expected one, as shares.

    Attributes:
        largest: of the largest expected value of the tensor.
        own: of the expected value itself.
        least: the largest expected value counts as at least this one. It is 0.0 where outputs may be tiny and
            right only if they are right in relation to each other.
    """

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
SHORT = Tolerance(5e-2)
"""Computed in 16 bits on one of the two sides. It takes the place of any other tolerance there."""


def equal(found: Any, expected: Any, tolerance: Tolerance = ROUNDED) -> bool:
    """Tell whether two outputs are equal up to rounding: structure, shapes, dtypes, and values.

    Tensors without floating-point numbers and values that are no tensors must be equal. NaN equals NaN.

    Args:
        found: a tensor, any other value, or a tuple, list or dictionary of outputs.
        expected: what the output should be.
        tolerance: how far floating-point numbers may differ. Tensors of 16 bits are compared within `SHORT`
            if that is wider.
    """
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
        tolerance = max(tolerance, SHORT._replace(least=tolerance.least))
        found, expected = found.float(), expected.float()
    finite = expected[expected.isfinite()]
    largest = max(float(finite.abs().max()) if finite.numel() else 0.0, tolerance.least)
    return torch.allclose(found, expected, tolerance.own, tolerance.largest * largest, equal_nan=True)


def is_as_near(found: Any, other: Any, exact: Any, times: float, share: float = 0.01) -> bool:
    """Tell whether an output is nearly as close to an exact one as another output is.

    Two outputs at a low precision may differ by more than any tolerance and still be equally good.

    Args:
        found: a tensor, or a tuple, list or dictionary of tensors.
        other: an output that is not exact either.
        exact: what both are near to.
        times: how many times as far from the exact output it may be, by the norm of every tensor.
        share: of the norm of the exact tensor, which is always allowed.
    """
    leaves = [tree_leaves(one) for one in (found, other, exact)]
    if len({len(one) for one in leaves}) > 1:
        return False
    for mine, others, right in zip(*leaves, strict=True):
        if not isinstance(right, Tensor) or not right.is_floating_point():
            near = equal(mine, right)
        else:
            near = mine.shape == right.shape and mine.dtype == right.dtype
            near = near and bool(
                (mine - right).norm() <= times * (others - right).norm() + share * right.norm()
            )
        if not near:
            return False
    return True
