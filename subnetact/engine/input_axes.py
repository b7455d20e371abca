"""`InputAxes`: which axes of the inputs of an exported program are free, and between which sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.export import Dim

from subnetact.engine.inputs import check_input, parts_of
from subnetact.supernet.batches import map_tensors, tensors_of

LARGEST_BATCH = 2**30


class InputAxes:
    """The axes of the tensors of a batch: the first one is free from 1 on.

    Others are free if the samples differ there, from the smallest size of a sample to the largest one. Axes
    that are equally long in every sample, as those of token ids and of their mask are, stay equally long.

    Attributes:
        sample: the largest sample, without a batch axis.
        limits: of every tensor and axis of a batch, its size or axis:least:most, then both as numbers. Axes
            of one name are equally long in all tensors of a batch.
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        self.sample = samples[-1]
        self.limits: list[list[tuple[str, int, int]]] = []
        names = dict[tuple[int, ...], str]()
        for parts in zip(*map(tensors_of, samples), strict=True):
            limits = [(f"batch:1:{LARGEST_BATCH}", 1, LARGEST_BATCH)]
            for sizes in zip(*(part.shape for part in parts), strict=True):
                least, most = min(sizes), max(sizes)
                name = (
                    "" if least == most else names.setdefault(sizes, f"axis_{chr(97 + len(names))}:{least}:")
                )
                limits.append((f"{name}{most}", least, most))
            self.limits.append(limits)

    def dims(self) -> list[dict[int, Dim]]:
        """Return, for every tensor of a batch, its free axes, as `torch.export` takes them."""
        free = {
            text: Dim(text.partition(":")[0], min=least, max=most)
            for text, least, most in chain(*self.limits)
            if least < most
        }
        return [{i: free[text] for i, (text, *_) in enumerate(axes) if text in free} for axes in self.limits]

    def described(self, names: Iterable[str] = ()) -> list[str]:
        """Return a line per tensor of a batch, `name: dtype` and the limits of every axis."""
        keys = parts_of(self.sample) or ("input",)
        names = names or [f"input_{key}" if type(key) is int else str(key) for key in keys]
        tensors = zip(names, tensors_of(self.sample), self.limits, strict=True)
        return [
            " ".join([f"{name}:", str(part.dtype).removeprefix("torch."), *(text for text, _, _ in limits)])
            for name, part, limits in tensors
        ]

    def check(self, x: Any, device: torch.device, finite: bool) -> None:
        """Raise InvalidRequest unless an input without a batch axis has sizes and dtypes that are allowed."""
        sizes = dict[str, int]()
        for part, (_, *axes) in zip(tensors_of(x), self.limits, strict=False):
            for (text, least, most), size in zip(axes, getattr(part, "shape", ()), strict=False):
                sizes.setdefault(text, max(least, min(size, most)))
        shapes = iter([sizes.get(text, most) for text, _, most in axes] for _, *axes in self.limits)
        wanted = map_tensors(lambda part: part.new_empty(next(shapes), device="meta"), self.sample)
        check_input(x, wanted, device, finite)
