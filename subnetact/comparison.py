"""comparison: whether two outputs are equal, within a tolerance whose name says why they may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from subnetact.errors import InsertError


class Tolerance(NamedTuple):
    """How far a number may be off, as shares of the `largest` (or `least`) number and of its `own` value.

    A share of whole numbers may be `unequal`, where rounding decides the ties of an argmax.
    """

    largest: float
    own: float = 0.0
    least: float = 0.0
    unequal: float = 0.0


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
    if type(found) is not type(expected):
        return False
    try:
        if tensors := tensors_in(expected):  # an object that holds them
            return equal(tensors_in(found), tensors, tolerance)
        return bool(found == expected)
    except (InsertError, RuntimeError, ValueError):
        return False


def _equal(found: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    differing = found != expected
    if not (expected.is_floating_point() or expected.is_complex()):
        return int(differing.sum()) <= tolerance.unequal * differing.numel()
    if expected.dtype.itemsize < 4:
        tolerance = max(tolerance, SIXTEEN_BITS._replace(least=tolerance.least))
        found, expected = found.float(), expected.float()
    # What is equal says nothing of rounding: a score of -1e9 of a masked entry would allow everything else.
    sizes = torch.where(differing & expected.isfinite(), expected.abs(), 0.0)
    largest = max(float(sizes.max()) if sizes.numel() else 0.0, tolerance.least)
    return torch.allclose(found, expected, tolerance.own, tolerance.largest * largest, equal_nan=True)


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors of what a network returns, also those that objects in it hold, but caches.

    Raises:
        InsertError: it returns an iterator or a function, in which tensors cannot be followed.
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def visit(part: Any, attribute: bool = False) -> None:
        if isinstance(part, Tensor):
            tensors.append(part)
        elif isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
            tensors.append(torch.from_numpy(part.copy()))
        elif id(part) in seen or isinstance(part, type | nn.Module | str) or is_cache(part):
            return
        elif isinstance(part, Mapping | tuple | list | Set):
            seen.add(id(part))
            for inner in part.values() if isinstance(part, Mapping) else part:
                visit(inner, attribute)
        elif isinstance(part, Iterator) or callable(part):
            if not attribute:
                raise InsertError(
                    f"the network returns a {type(part).__name__}, in which tensors cannot be followed; "
                    "return tensors, in tuples, lists, dictionaries or objects with attributes"
                )
        else:
            seen.add(id(part))
            slots = (name for cls in type(part).__mro__ for name in cls.__dict__.get("__slots__", ()))
            for inner in (*getattr(part, "__dict__", {}).values(), *(getattr(part, n, None) for n in slots)):
                visit(inner, attribute=True)

    visit(output)
    return tensors


def is_cache(value: Any) -> bool:
    """Tell whether an object is a cache of keys, values or states, whose shapes are those of the subnet."""
    return "cache" in type(value).__name__.lower()


def is_as_near(found: Any, other: Any, exact: Any) -> bool:
    """Tell whether an output is not much farther from an exact one than another output is."""
    leaves = [tensors_in(one) for one in (found, other, exact)]
    return len({len(one) for one in leaves}) == 1 and all(map(_is_as_near, *leaves))


def _is_as_near(found: Tensor, other: Tensor, exact: Tensor) -> bool:
    if not exact.is_floating_point():
        return equal(found, exact)
    allowed = DISTANCE_RATIO * (other - exact).norm() + NORM_SHARE * exact.norm()
    alike = found.shape == exact.shape and found.dtype == exact.dtype
    return alike and bool((found - exact).norm() <= allowed)
