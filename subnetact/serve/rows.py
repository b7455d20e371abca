"""The rows of one request: each is a request of its own to the batcher, and all are answered, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from subnetact.serving import Answer, BatcherStats

__all__ = ["Answerer", "infer_rows"]


class Answerer(Protocol):
    """What a server needs to know of a batcher. `Batcher` is one, and so is the client of a cluster."""

    @property
    def accuracy(self) -> Mapping[int, float]:
        """Profiled accuracy per subnet id, in percent."""

    def stats(self) -> BatcherStats:
        """Return a snapshot of the counters."""

    def prometheus(self) -> str:
        """Return the snapshot in Prometheus' text format."""

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish or drop those that wait, and end the threads."""


async def infer_rows(batcher: Any, xs: Sequence[Any], deadline_ms: float, **ask: Any) -> Sequence[Answer]:
    """Queue all rows of a request, each with the options `ask` of `Batcher.infer`, and wait for the answers.

    Raises:
        RequestError: a row was refused or dropped, or it failed. The other rows are withdrawn.
    """
    if len(xs) == 1:
        return [await batcher.infer(xs[0], deadline_ms, **ask)]
    tasks = [asyncio.ensure_future(batcher.infer(x, deadline_ms, **ask)) for x in xs]
    try:
        answers: Sequence[Answer] = await asyncio.gather(*tasks)
        return answers
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
