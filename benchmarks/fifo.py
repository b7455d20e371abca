"""The usual dynamic batcher: first in, first out; a batch starts when it is full or after a delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

__all__ = ["FifoBatcher"]


class FifoBatcher:
    """A queue in an event loop and one thread that runs the model.

    Args:
        run: maps a list of inputs to their outputs.
        max_batch: largest number of requests per batch.
        max_delay_ms: how long the first request of a batch waits for others, in ms.
    """

    def __init__(
        self, run: Callable[[Sequence[Any]], Sequence[Any]], max_batch: int, max_delay_ms: float
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_delay_s = max_delay_ms / 1e3
        self._queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._worker = ThreadPoolExecutor(1)

    async def infer(self, x: Any) -> Any:
        """Queue one input and wait for its output."""
        future = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((x, future))
        return await future

    async def _serve(self) -> None:
        loop, queue = asyncio.get_running_loop(), self._queue
        while True:
            batch = [await queue.get()]
            until = loop.time() + self._max_delay_s
            while len(batch) < self._max_batch:
                if queue.empty():
                    try:
                        batch.append(await asyncio.wait_for(queue.get(), until - loop.time()))
                    except TimeoutError:
                        break
                else:
                    batch.append(queue.get_nowait())
            outputs = await loop.run_in_executor(self._worker, self._run, [x for x, _ in batch])
            for (_, future), output in zip(batch, outputs, strict=True):
                if not future.done():
                    future.set_result(output)

    async def __aenter__(self) -> FifoBatcher:
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._worker.shutdown()
