"""`InputAxes`: which axes of the inputs of an exported program are free, and between which sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
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
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        self.sample = samples[-1]
        shapes = zip(*([t.shape for t in tensors_of(sample)] for sample in samples), strict=True)
        self._sizes = [list(zip(*sizes, strict=True)) for sizes in shapes]
        """For every tensor and axis, the sizes in all samples."""
        every = [sizes for axes in self._sizes for sizes in axes if len(set(sizes)) > 1]
        self.names = {sizes: f"axis_{chr(97 + i)}" for i, sizes in enumerate(dict.fromkeys(every))}

    def dims(self) -> list[dict[int, Dim]]:
        """Return, for every tensor of a batch, its free axes, as `torch.export` takes them."""
        free = {sizes: Dim(name, min=min(sizes), max=max(sizes)) for sizes, name in self.names.items()}
        batch = {0: Dim("batch", min=1)}
        return [
            batch | {i: free[sizes] for i, sizes in enumerate(axes, 1) if sizes in free}
            for axes in self._sizes
        ]

    def limits(self) -> list[list[tuple[str, int, int]]]:
        """Return, for every tensor and axis of a batch, its size or axis:least:most, then both as numbers.

        Axes of one name are equally long in all tensors of a batch.
        """
        free = {sizes: f"{name}:{min(sizes)}:{max(sizes)}" for sizes, name in self.names.items()}
        return [
            [(f"batch:1:{LARGEST_BATCH}", 1, LARGEST_BATCH)]
            + [(free.get(sizes, str(sizes[0])), min(sizes), max(sizes)) for sizes in axes]
            for axes in self._sizes
        ]

    def described(self, names: Iterable[str] = ()) -> list[str]:
        """Return a line per tensor of a batch, `name: dtype` and the limits of every axis."""
        keys = parts_of(self.sample) or ("input",)
        names = names or [f"input_{key}" if type(key) is int else str(key) for key in keys]
        tensors = zip(names, tensors_of(self.sample), self.limits(), strict=True)
        return [
            " ".join([f"{name}:", str(part.dtype).removeprefix("torch."), *(text for text, _, _ in limits)])
            for name, part, limits in tensors
        ]

    def check(self, x: Any, device: torch.device, finite: bool) -> None:
        """Raise InvalidRequest unless an input without a batch axis has sizes and dtypes that are allowed."""
        wanted = self.sample
        if self.names and [part.dim() for part in tensors_of(x) if isinstance(part, Tensor)] == [
            len(axes) for axes in self._sizes
        ]:
            free, shapes = dict[Any, int](), list[list[int]]()
            for part, axes in zip(tensors_of(x), self._sizes, strict=True):
                for size, sizes in zip(part.shape, axes, strict=True):
                    free.setdefault(sizes, max(min(sizes), min(size, max(sizes))))
                shapes.append([free[sizes] for sizes in axes])
            following = iter(shapes)
            wanted = map_tensors(lambda t: t.new_empty(next(following), device="meta"), self.sample)
        check_input(x, wanted, device, finite)
