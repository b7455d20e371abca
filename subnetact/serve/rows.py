"""The rows of one request: each is a request of its own to the batcher, and all are answered, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from subnetact.serving.live.answers import Answer
from subnetact.serving.live.stats import BatcherStats

__all__ = ["Answerer", "RowAnswerer", "infer_rows"]


class Answerer(Protocol):
    """What a server needs to know of a batcher. `Batcher` is one, and so is the client of a cluster."""

    @property
    def accuracy(self) -> Mapping[int, float]:
        """Profiled accuracy per subnet id, in percent."""
        ...

    def stats(self) -> BatcherStats:
        """Return a snapshot of the counters."""
        ...

    def prometheus(self) -> str:
        """Return the snapshot in Prometheus' text format."""
        ...

    def close(self, drain: bool = True) -> None:
        """Refuse new requests and end the threads.

        Args:
            drain: whether to finish the requests that wait.
        """
        ...


class RowAnswerer(Protocol):
    """Answers all rows of a request, as `infer_rows` does for a batcher."""

    async def __call__(
        self,
        xs: Sequence[Any],
        deadline_ms: float,
        min_accuracy: float | None = None,
        priority: int | None = None,
        client: str = "",
    ) -> Sequence[Answer]:
        """Answer all rows."""
        ...


async def infer_rows(
    batcher: Any,
    xs: Sequence[Any],
    deadline_ms: float,
    min_accuracy: float | None = None,
    priority: int | None = None,
    client: str = "",
) -> Sequence[Answer]:
    """Queue all rows of a request and wait for their answers.

    Args:
        batcher: an open batcher.
        xs: the inputs, without a batch dimension.
        deadline_ms: time that the request is given from now, in ms.
        min_accuracy: minimum accuracy of the answering subnets, in percent. If None, any may answer.
        priority: the higher, the more important.
        client: name of the client.

    Returns:
        The answers in order.

    Raises:
        RequestError: a row was refused or dropped, or it failed. The other rows are withdrawn.
    """
    if len(xs) == 1:
        return [
            await batcher.infer(
                xs[0], deadline_ms, min_accuracy=min_accuracy, priority=priority, client=client
            )
        ]
    tasks = [
        asyncio.ensure_future(
            batcher.infer(x, deadline_ms, min_accuracy=min_accuracy, priority=priority, client=client)
        )
        for x in xs
    ]
    try:
        answers: Sequence[Answer] = await asyncio.gather(*tasks)
        return answers
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
