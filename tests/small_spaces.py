"""Spaces whose dimensions are their axes, of one slot each, for the tests of operators and supernets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from subnetact import Axis, SubnetSpace

__all__ = ["space_of"]


def space_of(
    name: str = "s", sizes: Callable[[dict[str, Any]], dict[str, int]] = dict, /, **choices: Iterable[int]
) -> SubnetSpace:
    """Return a space with the given choices; `sizes` computes further dimensions from a choice of each."""
    axes = [Axis.uniform(axis, ["it"], values) for axis, values in choices.items()]
    return SubnetSpace(name, axes, partial(_resolved, sizes))


def _resolved(sizes: Callable[[dict[str, Any]], dict[str, int]], values: Any) -> dict[str, int]:
    return sizes({axis: slots[0] for axis, slots in values.items()})
