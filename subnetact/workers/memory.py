"""Shared memory without a name: the system frees it with the last process that has it, however that ends."""

from __future__ import annotations

import mmap
import os
import tempfile

__all__ = ["SharedMemory", "new_file"]

STEP = mmap.ALLOCATIONGRANULARITY


class SharedMemory(mmap.mmap):
    """Bytes that several processes map. They are in no folder, so that nothing is left of them after a crash.

    Another process maps the same memory by its file `descriptor`. Tensors made of the memory keep it. A
    MemoryError says that there is no room for so many bytes.
    """

    descriptor: int

    def __new__(cls, size: int, descriptor: int | None = None) -> SharedMemory:
        """Make the memory, or map that of a descriptor, which belongs to this object then."""
        size = -(-max(1, size) // STEP) * STEP
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
    descriptor, path = tempfile.mkstemp(prefix="subnetact-")
    os.unlink(path)
    return descriptor
