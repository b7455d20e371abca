"""BatchMemory: the inputs or the outputs of one batch in shared memory, without pickling a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnetact.workers.memory import SharedMemory

__all__ = ["BatchMemory"]

ALIGNMENT = 64
Layout = tuple[Any, ...]


class BatchMemory:
    """Writes samples into shared memory in one process, and reads them in another.

    Tensors and arrays are copied into the memory, which grows if a batch needs more; those of all samples
    that have one shape and dtype are copied as one block. Everything else of a sample, such as numbers,
    travels in the layout.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._end = 0

    def write(self, samples: Sequence[Any]) -> Layout:
        """Copy samples over those that were there, and return the layout, which `read` needs."""
        self._end = 0
        return self._write(list(samples))

    def read(self, layout: Layout, copy: bool) -> list[Any]:
        """Return the samples of a layout; without `copy`, they are valid until the next `write`."""
        kind = layout[0]
        if kind == "tensors" or kind == "arrays":
            _, dtype, shape, offset = layout
            block: Any
            if kind == "arrays":
                block = self._array(dtype, shape, offset)
                return [row.copy() for row in block] if copy else list(block)
            block = self._tensor(getattr(torch, dtype), shape, offset)
            return [row.clone() for row in block.unbind(0)] if copy else list(block.unbind(0))
        if kind == "tuple" or kind == "list":
            columns = [self.read(column, copy) for column in layout[2]]
            rows = list(zip(*columns, strict=True)) if columns else [()] * layout[1]
            return rows if kind == "tuple" else [list(row) for row in rows]
        if kind == "mapping":
            names, columns = layout[2], [self.read(column, copy) for column in layout[3]]
            return [
                {name: column[i] for name, column in zip(names, columns, strict=True)}
                for i in range(layout[1])
            ]
        if kind == "values":
            return list(layout[1])
        return [self.read(one, copy)[0] for one in layout[1]]

    def _write(self, samples: list[Any]) -> Layout:
        first = samples[0]
        if isinstance(first, Tensor):
            alike = all(
                isinstance(x, Tensor) and x.shape == first.shape and x.dtype == first.dtype and _plain(x)
                for x in samples
            )
            if alike:
                return self._write_tensors(samples)
        elif isinstance(first, np.ndarray):
            alike = not first.dtype.hasobject and all(
                isinstance(x, np.ndarray) and x.shape == first.shape and x.dtype == first.dtype
                for x in samples
            )
            if alike:
                return self._write_arrays(samples)
        elif type(first) in (tuple, list):
            if all(type(x) is type(first) and len(x) == len(first) for x in samples):
                columns = [self._write([x[i] for x in samples]) for i in range(len(first))]
                return type(first).__name__, len(samples), columns
        elif isinstance(first, Mapping):
            if all(isinstance(x, Mapping) and x.keys() == first.keys() for x in samples):
                names = list(first)
                return (
                    "mapping",
                    len(samples),
                    names,
                    [self._write([x[name] for x in samples]) for name in names],
                )
        elif not any(isinstance(x, Tensor | np.ndarray | tuple | list | Mapping) for x in samples):
            return "values", samples
        if len(samples) == 1:
            return "values", samples
        return "each", [self._write([x]) for x in samples]

    def _write_tensors(self, samples: list[Tensor]) -> Layout:
        first = samples[0]
        shape = (len(samples), *first.shape)
        offset = self._take(math.prod(shape) * first.element_size())
        block = self._tensor(first.dtype, shape, offset)
        if all(x.device.type == "cpu" for x in samples):
            torch.stack([x.detach() for x in samples], out=block)
        else:
            for place, x in zip(block, samples, strict=True):
                place.copy_(x.detach())
        return "tensors", str(first.dtype).removeprefix("torch."), shape, offset

    def _write_arrays(self, samples: list[Any]) -> Layout:
        first = samples[0]
        shape = (len(samples), *first.shape)
        offset = self._take(math.prod(shape) * first.dtype.itemsize)
        np.stack(samples, out=self._array(first.dtype, shape, offset))
        return "arrays", first.dtype, shape, offset

    def _take(self, size: int) -> int:
        """Return the offset of the next free bytes."""
        offset = self._end
        self._end = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        self.memory.grow(self._end)
        return offset

    def _tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        self.memory.grow(offset + count * dtype.itemsize)
        return torch.frombuffer(self.memory.map, dtype=dtype, count=count, offset=offset).view(shape)

    def _array(self, dtype: Any, shape: Sequence[int], offset: int) -> Any:
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        self.memory.grow(offset + count * dtype.itemsize)
        return np.frombuffer(self.memory.map, dtype, count, offset).reshape(shape)


def _plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_conj() and not x.is_neg()
