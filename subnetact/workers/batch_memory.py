"""BatchMemory: the inputs or the outputs of one batch in shared memory, without pickling a tensor."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subnetact.workers.memory import SharedMemory

__all__ = ["BatchMemory"]

ALIGNMENT = 64


class BatchMemory:
    """Writes samples into shared memory in one process, and reads them in another.

    Samples that are alike are one block in the memory. Tensors and arrays in others are buffers there, out of
    the band of pickle. The memory grows if a batch needs more.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory

    def write(self, samples: Sequence[Any]) -> bytes:
        """Copy samples over those that were there, and return the layout, which `read` needs."""
        first = samples[0]
        if all(
            isinstance(x, Tensor)
            and _plain(x)
            and (x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device)
            for x in samples
        ):
            shape, rows = (len(samples), *first.shape), [x.detach() for x in samples]
            block = self._block(first.dtype, shape)
            if first.device.type == "cpu":
                torch.stack(rows, out=block)
            else:
                block.copy_(torch.stack(rows))
            return pickle.dumps((first.dtype, shape))
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(file, 5, buffer_callback=buffers.append).dump(list(samples))
        raw, places, end = [buffer.raw() for buffer in buffers], [], 0
        for part in raw:
            places.append((end, end + part.nbytes))
            end = -(-(end + part.nbytes) // ALIGNMENT) * ALIGNMENT
        self._grow(end)
        for (start, stop), part in zip(places, raw, strict=True):
            self.memory[start:stop] = part
        return pickle.dumps((file.getvalue(), places))

    def read(self, layout: bytes, copy: bool) -> list[Any]:
        """Return the samples of a layout; without `copy`, they are valid until the next `write`."""
        kind, rest = pickle.loads(layout)
        if isinstance(kind, torch.dtype):
            rows = self._block(kind, rest).unbind(0)
            return [row.clone() for row in rows] if copy else list(rows)
        self._grow(rest[-1][1] if rest else 0)
        memory = memoryview(self.memory)
        parts = (memory[start:stop] for start, stop in rest)
        found: list[Any] = pickle.loads(kind, buffers=map(bytearray, parts) if copy else parts)
        return found

    def _block(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        self._grow(size)
        return torch.frombuffer(self.memory, dtype=torch.uint8)[:size].view(dtype).view(shape)

    def _grow(self, size: int) -> None:
        if size > len(self.memory):
            self.memory = SharedMemory(size, os.dup(self.memory.descriptor))


class _Pickler(pickle.Pickler):
    """Takes the values of tensors, as those of arrays, out of the band."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made of an array."""
        if not isinstance(value, Tensor) or not _plain(value):
            return NotImplemented
        flat = value.detach().cpu().contiguous().view(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor(array: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(array).view(dtype).view(shape)


def _plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_conj() and not x.is_neg()
