"""Fuzzes one target guided by coverage: `python tests/fuzz/coverage_guided.py "latency table"`.

This needs `pip install atheris`. Atheris watches which lines of the library an input reaches, and changes the
inputs that reached new ones. Every random number that a target draws comes from the input's bytes. A finding
stops the run and leaves the input in a file; give this file as the second argument to make the finding again.
Further arguments are libFuzzer's, for example `-max_total_time=600`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["subnetact", "ofa_adapters"]):
    from fuzz.targets import TARGETS, run, seeds


class BytesRandom(random.Random):
    """Random numbers that are read from bytes, and zeros after their end."""

    def __init__(self, data: bytes) -> None:
        """Keep the bytes.

        Args:
            data: the input that atheris made.
        """
        self.data, self.position = data, 0
        super().__init__(0)

    def getrandbits(self, k: int) -> int:
        """Return an integer of `k` bits from the next bytes."""
        size = (k + 7) // 8
        taken = self.data[self.position : self.position + size].ljust(size, b"\0")
        self.position += size
        return int.from_bytes(taken, "little") >> (8 * size - k)

    def random(self) -> float:
        """Return a float in [0, 1) from the next two bytes."""
        return self.getrandbits(16) / 65536


def main() -> None:
    """Fuzz the target that the first argument names, until a finding or libFuzzer's limits."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name one of these targets: {', '.join(TARGETS)}")
    name = sys.argv.pop(1)
    seeds()
    atheris.Setup(sys.argv, lambda data: run(name, BytesRandom(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
