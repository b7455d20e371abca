"""BatchMemory: the inputs or the outputs of one batch in shared memory, without pickling a tensor."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnetact.workers.memory import SharedMemory

__all__ = ["BatchMemory"]

ALIGNMENT = 64


class BatchMemory:
    """Writes samples into shared memory in one process, and reads them in another.

    Tensors and arrays are copied into the memory, which grows if a batch needs more, and those of samples
    that are alike as one block. Everything else of a sample travels in the layout, with their places.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._end = 0

    def write(self, samples: Sequence[Any]) -> bytes:
        """Copy samples over those that were there, and return the layout, which `read` needs."""
        self._end = 0
        first = samples[0]
        if all(
            isinstance(x, Tensor) and _plain(x) and x.shape == first.shape and x.dtype == first.dtype
            for x in samples
        ):
            place, block = self._take(first.dtype, (len(samples), *first.shape))
            if all(x.device.type == "cpu" for x in samples):
                torch.stack([x.detach() for x in samples], out=block)
            else:
                for row, x in zip(block, samples, strict=True):
                    row.copy_(x.detach())
            return pickle.dumps(place)
        file = io.BytesIO()
        _Writer(file, self).dump(list(samples))
        return file.getvalue()

    def read(self, layout: bytes, copy: bool) -> list[Any]:
        """Return the samples of a layout; without `copy`, they are valid until the next `write`."""
        reader = _Reader(io.BytesIO(layout), self, copy)
        found = reader.load()
        if isinstance(found, list):
            return found
        rows = self._block(*found).unbind(0)
        return [row.clone() for row in rows] if copy else list(rows)

    def _take(self, dtype: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, tuple[int, ...], int], Any]:
        """Return a place in the free bytes, and the tensor or array there."""
        place = dtype, shape, self._end
        block = self._block(*place)
        self._end = -(-(self._end + block.nbytes) // ALIGNMENT) * ALIGNMENT
        return place, block

    def _block(self, dtype: Any, shape: tuple[int, ...], offset: int) -> Any:
        """Return the tensor or array of a place."""
        count = math.prod(shape)
        tensor = isinstance(dtype, torch.dtype)
        if not count:
            return torch.empty(shape, dtype=dtype) if tensor else np.empty(shape, dtype)
        self.memory.grow(offset + count * dtype.itemsize)
        if tensor:
            return torch.frombuffer(self.memory.map, dtype=dtype, count=count, offset=offset).view(shape)
        return np.frombuffer(self.memory.map, dtype, count, offset).reshape(shape)


class _Writer(pickle.Pickler):
    """Pickles samples; tensors and arrays in them are places in the memory."""

    def __init__(self, file: io.BytesIO, memory: BatchMemory) -> None:
        self._take = memory._take
        super().__init__(file, protocol=5)

    def persistent_id(self, value: Any) -> Any:
        """Copy a tensor or an array into the memory, and return its place; None for other objects."""
        if isinstance(value, Tensor) and _plain(value):
            place, block = self._take(value.dtype, tuple(value.shape))
            block.copy_(value.detach())
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            place, block = self._take(value.dtype, value.shape)
            block[...] = value
        else:
            return None
        return place


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` has pickled."""

    def __init__(self, file: io.BytesIO, memory: BatchMemory, copy: bool) -> None:
        self._block, self._copy = memory._block, copy
        super().__init__(file)

    def persistent_load(self, place: Any) -> Any:
        """Return the tensor or array of a place."""
        block = self._block(*place)
        if not self._copy:
            return block
        return block.clone() if isinstance(block, Tensor) else block.copy()


def _plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_conj() and not x.is_neg()
