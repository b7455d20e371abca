"""Networks of one's own with an elastic width, and functions in threads: what tests of many rooms need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from subnetact import Axis, SubnetNorm, SubnetSpace, Supernet, WeightSlice, insert_

__all__ = ["PARTS", "in_threads", "one_width", "width_space"]

PARTS: dict[str, Any] = {
    "out": WeightSlice.on(out="w"),
    "in": WeightSlice.on(in_="w"),
    "both": WeightSlice.on(in_="w", out="w"),
    "norm": SubnetNorm.on(channels="w"),
}
"""What is elastic in a module: its outputs, its inputs, both, or the channels of a BatchNorm."""


def width_space(widths: Iterable[int] = (4, 8), name: str = "own") -> SubnetSpace:
    """Return a space of one width, the axis and the dimension `w`."""
    return SubnetSpace(name, [Axis.uniform("w", ["all"], tuple(widths))], _one_size)


def _one_size(values: Mapping[str, Any]) -> dict[str, int]:
    return {"w": values["w"][0]}


def one_width(
    network: nn.Module, parts: Mapping[str, Any], widths: Iterable[int] = (4, 8), name: str = "own"
) -> Supernet:
    """Return the supernet of a network, in evaluation mode, whose modules are parts of `PARTS` or others."""
    elastic = {path: PARTS[part] if isinstance(part, str) else part for path, part in parts.items()}
    return insert_(network.eval(), width_space(widths, name), elastic)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Call each function in a thread of its own, and return what they return; their errors are raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]
