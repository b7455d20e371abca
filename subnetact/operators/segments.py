"""Segments: parts of modules that are several segments one after another; a subnet keeps a prefix of each.

A fused layer such as the `qkv` of an attention has such parts: a subnet with p features uses the rows
{0..p}, {D..D+p} and {2D..2D+p}. So has a module behind a concatenation. A part without `Segments` is a single
segment, so that every operator has one slicing rule, `cut`. One run of rows is a zero-copy view; other slices
are packed copies, made once per layer and slice. A TorchScript file slices, and copies, in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeAlias

import torch
from torch import Tensor, nn

from subnetact.errors import InsertError

Runs: TypeAlias = list[tuple[int, list[tuple[int, int]]]]
"""Axis, and (start, size) of every run of entries that is kept of it."""


@dataclass(frozen=True, init=False)
class Segments:
    """Describes a part that consists of several segments, for `insert_`.

    Args:
        segments: for each segment, in order, the dimension that gives its size in a subnet, and its full
            length. If the dimension is None, every subnet keeps the whole segment.

    Raises:
        InsertError: there is no segment, or one is not such a pair with a positive length.

    Example:
        >>> qkv = WeightSlice.on(out=Segments(*[("attention", 768)] * 3), in_="width")
        >>> after_concatenation = SubnetNorm.on(channels=Segments(("left", 64), (None, 32)))
    """

    segments: tuple[tuple[str | None, int], ...]

    def __init__(self, *segments: tuple[str | None, int]) -> None:
        example = "give a dimension, or None, and the full length, ('width', 768) for example"
        for segment in segments:
            match segment:
                case (str() | None, int() as length) if length > 0 and not isinstance(length, bool):
                    pass
                case _:
                    raise InsertError(f"Segments: {segment!r} is not a segment; {example}")
        if not segments:
            raise InsertError(f"Segments: there is no segment; {example}")
        object.__setattr__(self, "segments", tuple((dimension, int(n)) for dimension, n in segments))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The full length of every segment."""
        return tuple(length for _, length in self.segments)

    def named(self, part: str) -> dict[str, str]:
        """Return the dimensions by the names of the segments of a `part`: `out.0`, `out.1` and so on."""
        return {f"{part}.{i}": name for i, (name, _) in enumerate(self.segments) if name is not None}

    def __str__(self) -> str:
        return " + ".join(f"{name or 'whole'}[{length}]" for name, length in self.segments)


@dataclass(frozen=True)
class Kept:
    """The first `sizes` of the `lengths` of the segments of a part. Sizes are graph nodes in exports."""

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """The size of the part in the subnet."""
        return reduce(add, self.sizes)

    def runs(self) -> list[tuple[int, int]]:
        """Return (start, size) of the runs of entries that are kept; segments that touch are one run."""
        found: list[tuple[int, int]] = []
        start, touches = 0, False
        for length, size in zip(self.lengths, self.sizes, strict=True):
            if touches:
                found[-1] = found[-1][0], found[-1][1] + size
            else:
                found.append((start, size))
            start, touches = start + length, type(size) is int and size == length
        return found


def cut(tensor: Tensor, runs: Runs) -> Tensor:
    """Return the given runs of some axes of a tensor: a view if it is one run of each, otherwise a copy.

    Axes of several runs come last, so that copies are of the least.
    """
    if len(runs) > 1 and type(tensor) is nn.Parameter and all(len(pieces) == 1 for _, pieces in runs):
        shape, offset = list(tensor.shape), tensor.storage_offset()
        for axis, ((start, shape[axis]),) in runs:
            offset += start * tensor.stride(axis)
        return tensor.as_strided(shape, tensor.stride(), offset)  # One step back, where `narrow` takes two.
    for axis, pieces in runs:
        if axis == 0 and len(pieces) == 1 and type(pieces[0][1]) is int:  # the fastest way of torch
            tensor = tensor[pieces[0][0] : sum(pieces[0])]
            continue
        slices = [tensor.narrow(axis, start, size) for start, size in pieces]
        tensor = slices[0] if len(slices) == 1 else torch.cat(slices, axis)
    return tensor
