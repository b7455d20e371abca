"""Shared memory without a name: the system frees it with the last process that has it, however that ends."""

from __future__ import annotations

import mmap
import os
import tempfile

__all__ = ["SharedMemory"]

STEP = mmap.ALLOCATIONGRANULARITY


class SharedMemory:
    """Bytes that several processes map. They are in no folder, so that nothing is left of them after a crash.

    Another process maps the same memory by its file `descriptor`. Tensors made of `map` keep the bytes
    mapped. A MemoryError says that there is no room for so many bytes.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = -1
        self.descriptor = _new_file() if descriptor is None else descriptor
        self.size = 0
        self.map: mmap.mmap
        try:
            self.grow(max(1, size))
        except BaseException:
            self.close()
            raise

    def grow(self, size: int) -> None:
        """Map at least this many bytes. What is there stays; tensors on the former map keep it."""
        if size <= self.size:
            return
        size = -(-size // STEP) * STEP
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError(f"{size} bytes of shared memory are more than this machine has")
        try:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self.map = mmap.mmap(self.descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"no room for {size} bytes of shared memory: {error}") from error
        self.size = size

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. The bytes stay as long as something maps them."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("subnetact", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="subnetact-")
    os.unlink(path)
    return descriptor
