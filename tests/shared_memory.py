"""The shared memory that processes hold: other tests, which run beside, have shared memory as well."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["shared_memory_of"]


def shared_memory_of(processes: Iterable[int]) -> set[Path]:
    """Return the files in `/dev/shm` that processes have mapped or open, whether they have a name still."""
    found: set[str] = set()
    for pid in processes:
        here = Path("/proc") / str(pid)
        found.update(line.split(maxsplit=5)[-1] for line in (here / "maps").read_text().splitlines())
        found.update(os.readlink(link) for link in (here / "fd").iterdir() if link.is_symlink())
    return {Path(name.removesuffix(" (deleted)")) for name in found if name.startswith("/dev/shm/")}
