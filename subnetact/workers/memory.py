"""Memory that processes share, without a name, and the inputs or outputs of a batch in it."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64


class SharedMemory(mmap.mmap):
    """Bytes that several processes map by a file `descriptor`; nothing is left of them after a crash.

    Tensors made of the memory keep it. A MemoryError says that there is no room for so many bytes.
    """

    descriptor: int

    def __new__(cls, size: int, descriptor: int | None = None) -> SharedMemory:
        """Make the memory, or map that of a descriptor, which belongs to this object then."""
        size = max(1, size)
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError(f"{size} bytes of shared memory are more than this machine has")
        file = new_file() if descriptor is None else descriptor
        try:
            if os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            memory = super().__new__(cls, file, size)
        except (OSError, ValueError, OverflowError) as error:
            os.close(file)
            raise MemoryError(f"no room for {size} bytes of shared memory: {error}") from error
        memory.descriptor = file
        return memory

    def __reduce__(self) -> tuple[Any, ...]:
        """Say what a new process maps, which inherits the descriptor."""
        return SharedMemory, (len(self), self.descriptor)

    def __del__(self) -> None:
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Close the descriptor. The bytes stay as long as something maps them."""
        descriptor, self.descriptor = getattr(self, "descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)


def new_file() -> int:
    """Return the descriptor of a file in memory, or of one that is in no folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("subnetact", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BatchMemory:
    """Writes samples into shared memory in one process and reads them in another; it grows if need be.

    Samples that are alike are one block there; of others, tensors and arrays are buffers beside the pickle.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory

    def write(self, samples: Sequence[Any]) -> bytes:
        """Copy samples over those that were there, and return the layout, which `read` needs."""
        kinds = {
            (x.shape, x.dtype, x.device) if isinstance(x, Tensor) and _plain(x) else None for x in samples
        }
        if len(kinds) == 1 and None not in kinds:
            first, rows = samples[0], [x.detach() for x in samples]
            shape = len(samples), *first.shape
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
