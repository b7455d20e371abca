"""Memory that processes share, without a name, and the inputs or outputs of a batch in it."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SharedMemory(mmap.mmap):
    """Bytes that several processes map by a file `descriptor`; nothing is left of them after a crash.

    Tensors made of the memory keep it. A MemoryError says that there is no room for so many bytes.
    """

    descriptor = -1

    def __new__(cls, size: int, descriptor: int | None = None) -> SharedMemory:
        """Make the memory, or map that of a descriptor, which belongs to this object then."""
        size, file = max(1, size), _new_file() if descriptor is None else descriptor
        try:
            if os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            memory = super().__new__(cls, file, size)
        except OSError as error:
            os.close(file)
            raise MemoryError(f"no room for {size} bytes of shared memory: {error}") from error
        memory.descriptor = file
        return memory

    def __del__(self) -> None:
        """Close the descriptor. The bytes stay as long as something maps them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _new_file() -> int:
    """Return the descriptor of a file in memory, or of one that is in no folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("subnetact", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BatchMemory:
    """Writes samples into shared memory in one process and reads them in another; it grows if need be.

    Tensors that are alike are one block there, and all other samples are a pickle.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def write(self, samples: Sequence[Any] | Mapping[Any, Any]) -> Any:
        """Copy samples over those that were there, and return the layout, which `read` needs."""
        kinds = {(x.shape, x.dtype) if isinstance(x, Tensor) and _plain(x) else None for x in samples}
        if len(kinds) == 1 and None not in kinds:
            rows = [x.detach().cpu() for x in samples]
            layout = rows[0].dtype, (len(rows), *rows[0].shape)
            torch.stack(rows, out=self._block(*layout))
            return layout
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(samples)
        size = file.tell()
        self._grow(size)
        self._memory[:size] = file.getbuffer()
        return size

    def read(self, layout: Any, copy: bool) -> Any:
        """Return the samples of a layout; without `copy`, tensors may change with the next `write`."""
        if isinstance(layout, int):
            self._grow(layout)
            return pickle.loads(memoryview(self._memory)[:layout])
        rows = self._block(*layout).unbind(0)
        return [row.clone() for row in rows] if copy else list(rows)

    def _block(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        self._grow(size)
        return torch.frombuffer(self._memory, dtype=torch.uint8)[:size].view(dtype).view(shape)

    def _grow(self, size: int) -> None:
        if size > len(self._memory):
            self._memory = SharedMemory(size, os.dup(self._memory.descriptor))


class _Pickler(pickle.Pickler):
    """Pickles the values of a tensor alone, where its storage may be that of many."""

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
