"""BatchStream: batches in epochs, each with a seed of its own, so that a resumed run reads the same ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from subnetact.errors import ResumeMismatch, TrainingError
from subnetact.supernet.batches import as_batch, hash_of

_END = object()


class BatchStream:
    """Reads batches again and again; `number` were read, and the present epoch began with batch `epoch`.

    Of every `count` batches, as many as there are processes, it returns that of the process `rank`.
    """

    def __init__(self, batches: Iterable[Any], seed: int, rank: int = 0, count: int = 1) -> None:
        self._batches, self._seed = batches, seed
        self._rank, self._count = rank, count
        self._iterator: Iterator[Any] | None = None
        self._last: Any = None
        self.number = self.epoch = 0
        self.mark()

    def next(self) -> Any:
        """Return the next batch of this process, after seeding torch, NumPy and `random` by its number."""
        return [self._read() for _ in range(self._count)][self._rank]

    def _read(self) -> Any:
        for _ in range(2):
            seed = (self._seed * 1_000_003 + self.number) % 2**63
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if self._iterator is None:
                self.epoch = self.number
                own = getattr(self._batches, "generator", None)
                if isinstance(own, torch.Generator):
                    own.manual_seed(torch.initial_seed())
                self._iterator = iter(self._batches)
            found = next(self._iterator, _END)
            if found is not _END:
                self.number += 1
                self._last = found
                return found
            self._iterator = None
        raise TrainingError("batches: there is none, give at least one")

    def mark(self) -> None:
        """Note the present place as the one to go on from."""
        self._marked = self.number, self.epoch, self._last

    def facts(self) -> dict[str, Any]:
        """Return the marked place, as values that JSON can hold."""
        number, epoch, last = self._marked
        return {"number": number, "epoch": epoch, "last": hash_of([as_batch(last)])}

    def go_to(self, facts: dict[str, Any]) -> None:
        """Go to a place, reading what comes before it in its epoch; ResumeMismatch if it is other data."""
        self.number = int(facts["epoch"])
        while self.number < int(facts["number"]):
            self.next()
        if (self.epoch, hash_of([as_batch(self._last)])) != (facts["epoch"], facts["last"]):
            raise ResumeMismatch(
                f"batch {self.number} is another one than before; give the same batches in the same order "
                "(torch, NumPy and random are seeded before every batch)"
            )
        self.mark()


@contextmanager
def kept_random_states(device: torch.device) -> Iterator[None]:
    """Restore the random states of torch, NumPy and `random` at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
