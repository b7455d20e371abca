"""Serves the digits supernet live in this process, in every way and on the same arrivals.

A request is a page of 16 digits, so that the model costs more than the client in the same process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import harness  # noqa: F401  # finds load_test
import numpy as np
import torch
from load_test import Refused, Reply, Sent, run_open_loop, trace
from torch import Tensor
from tqdm import tqdm

from subnetact import Batcher, HullFit, LatencyTable, SlackFit, profile_latency
from subnetact.digits import validation_and_test
from subnetact.errors import InvalidRequest, RequestError
from subnetact.serve.digits_engine import digits_engine
from subnetact.serving import Answer, Context, Fixed, Policy

SLO_MS = 100.0
PAGE = 16
SIZES = tuple(range(1, 17))
#: load of each burst over what the largest subnet sustains in service; lulls lie between the bursts
BURSTS = (1.0, 2.0, 3.0, 4.0)
LULL = 0.6
CV2 = 4.0
FIFO_DELAY_MS = 2.0
MARGIN_MS = 10.0
BATCHES_EACH = 25
Read = Callable[[int, Answer], Reply]


class Pages:
    """A runner for pages of digits: the input is (PAGE, 1, 16, 16), the output PAGE labels."""

    def __init__(self) -> None:
        self._engine = digits_engine()
        self.keys = self._engine.keys
        self.accuracy = [float(known or "nan") for known in self._engine.accuracy]

    def profile(self) -> LatencyTable:
        """Measure the latency of batches of pages while nothing else runs."""
        digits = [PAGE * size for size in SIZES]
        self._engine.prepare(digits)
        found = profile_latency(
            self._engine, digits, self.accuracy, statistic="p50", warmup_ms=1, min_time_ms=100
        )
        return LatencyTable(self.keys, self.accuracy, SIZES, found.latency_ms)

    def check(self, page: Any) -> None:
        """Refuse inputs that are not a page."""
        if not isinstance(page, Tensor) or page.shape[:1] != (PAGE,):
            raise InvalidRequest(f"page: expected a tensor of {PAGE} digits")
        self._engine.check(page[0])

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Tensor]:  # noqa: ARG002
        """Return the labels of every page."""
        digits: Tensor = self._engine(torch.cat(list(inputs)), subnet).argmax(1)
        return list(digits.view(len(inputs), PAGE))


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


class RandomPolicy:
    """A policy that tries random subnets, each for `BATCHES_EACH` batches, as live policies stay with one."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self._rng = random.Random(0)
        self._decisions = self._subnet = 0

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size); half of the batches take all requests that wait, the others a part."""
        if self._decisions % BATCHES_EACH == 0:
            self._subnet = self._rng.randrange(len(self.table.subnets))
        self._decisions += 1
        most = min(context.queued, self.table.batch_sizes[-1])
        return self._subnet, most if self._rng.random() < 0.5 else self._rng.randint(1, most)


async def ask_batcher(
    batcher: Batcher, pages: Sequence[Tensor], arrivals_ms: Sequence[float], slo_ms: float, read: Read
) -> list[Sent]:
    """Send a trace to a batcher in this process, in an open loop; `read` makes the reply from an answer."""

    async def send(i: int, left_ms: float) -> Reply:
        try:
            return read(i, await batcher.infer(pages[i % len(pages)], left_ms))
        except RequestError as error:
            raise Refused(type(error).__name__) from error

    return await run_open_loop(arrivals_ms, send, slo_ms)


class Contest:
    """The engine, its tables, and the ways to serve a trace.

    Args:
        part_s: length of a burst, in s; a lull lasts twice as long.
        folder: where to keep the learned latencies.
    """

    def __init__(self, part_s: float, folder: Path) -> None:
        self.part_s = part_s
        self.folder = folder
        data = validation_and_test(3, seed=1)[1]
        pages = len(data.images) // PAGE
        self.pages = list(data.images[: pages * PAGE].view(pages, PAGE, *data.images.shape[1:]))
        self.labels = list(data.labels[: pages * PAGE].view(pages, PAGE))
        self.engine = Pages()
        self.profile = self.engine.profile()
        gc.collect()
        gc.freeze()

    def learn(self, seed: int) -> tuple[Path, float]:
        """Return the file of latencies learned in service, and the pages/s that the largest subnet sustains.

        That is at the largest batch size, on the machine as it is now.
        """
        profiled = 1e3 * SIZES[-1] / float(self.profile.latency_ms[-1, -1])
        arrivals = trace("bursty", 0.6 * profiled, 3.0, CV2, 99 + seed).tolist()
        file = self.folder / f"corrections-{seed}.json"
        with Batcher(self.engine, policy=RandomPolicy(self.profile), slo_ms=1e4, learn=False) as batcher:
            asyncio.run(ask_batcher(batcher, self.pages, arrivals, 1e4, self._read))
        batcher.corrections.save(file)
        return file, profiled / float(batcher.corrections.snapshot().mean[-1, -1])

    def arrivals(self, capacity: float, bursts: Sequence[float], seed: int) -> list[list[float]]:
        """Make a trace as a list of parts: lulls and bursts in turn, with bursty arrivals inside each."""
        loads = [LULL, *(load for burst in bursts for load in (burst, LULL))]
        parts, start_ms = [], 0.0
        for i, load in enumerate(loads):
            seconds = self.part_s * (2 if load == LULL else 1)
            times = trace("bursty", load * capacity, seconds, CV2, 100 * seed + i)
            parts.append([start_ms + float(t) for t in times])
            start_ms += 1e3 * seconds
        return parts

    def policies(self) -> dict[str, Policy]:
        """Make the policies that choose, and one fixed policy per subnet."""
        table = self.profile
        choosing: dict[str, Policy] = {
            "SlackFit": SlackFit(table, slo_ms=SLO_MS, margin_ms=MARGIN_MS),
            "HullFit": HullFit(table, slo_ms=SLO_MS),
        }
        return choosing | {f"fixed {i}": Fixed(table, i) for i in range(len(self.engine.keys))}

    def serve(self, name: str, learned: Path, parts: list[list[float]]) -> dict[str, Any]:
        """Serve a trace live."""
        arrivals = [t for part in parts for t in part]
        with Batcher(self.engine, policy=self.policies()[name], slo_ms=SLO_MS) as batcher:
            batcher.corrections.load(learned)
            sent = asyncio.run(ask_batcher(batcher, self.pages, arrivals, SLO_MS, self._read))
        return self.judged(sent, parts)

    def _read(self, i: int, answer: Answer) -> Reply:
        return self._marked(i, answer.output, answer.subnet)

    def _marked(self, i: int, output: Tensor, subnet: int) -> Reply:
        right = int((output == self.labels[i % len(self.labels)]).sum())
        return Reply(right, subnet, self.profile.accuracy[subnet])

    def judged(self, sent: Sequence[Sent], parts: list[list[float]]) -> dict[str, Any]:
        """Summarise a run; effective accuracy is the percentage of digits that are right and in time."""
        right = [s.reply.label if s.reply is not None and s.latency_ms <= SLO_MS else None for s in sent]
        met = [r for r in right if r is not None]
        ends = list(itertools.accumulate(map(len, parts)))
        return {
            "attainment": len(met) / len(sent),
            "measured_accuracy": 100 * sum(met) / (PAGE * max(1, len(met))),
            "effective_accuracy": 100 * sum(met) / (PAGE * len(sent)),
            "latency_p99_ms": float(np.percentile([s.latency_ms for s in sent if s.reply is not None], 99)),
            "parts": [
                100 * sum(filter(None, right[end - len(part) : end])) / (PAGE * len(part))
                for part, end in zip(parts, ends, strict=True)
            ],
        }

    def serve_fifo(self, subnet: int, parts: list[list[float]]) -> dict[str, Any]:
        """Send a trace to the first-in, first-out batcher with one subnet."""
        arrivals_ms = [t for part in parts for t in part]

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return self.engine.run(subnet, inputs, len(inputs))

        async def main() -> list[Sent]:
            async with FifoBatcher(run, SIZES[-1], FIFO_DELAY_MS) as fifo:

                async def send(i: int, left_ms: float) -> Reply:  # noqa: ARG001
                    return self._marked(i, await fifo.infer(self.pages[i % len(self.pages)]), subnet)

                return await run_open_loop(arrivals_ms, send, SLO_MS)

        return self.judged(asyncio.run(main()), parts)


def digits_section(seeds: Sequence[int], part_s: float) -> dict[str, Any]:
    """Run every contender on the trace of every seed, in random order; return medians over the seeds."""
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(part_s, Path(folder))
        found, facts = _runs(contest, seeds)
    return {
        "slo_ms": SLO_MS,
        "part_s": part_s,
        "bursts": BURSTS,
        "lull": LULL,
        "cv2": CV2,
        "accuracy": contest.profile.accuracy,
        "profile_ms": contest.profile.latency_ms[:, [0, 3, 7, 15]].tolist(),
        "fifo_delay_ms": FIFO_DELAY_MS,
        "margin_ms": MARGIN_MS,
        "seeds": facts,
        "contenders": {name: _medians(runs) for name, runs in found.items()},
    }


def _runs(
    contest: Contest, seeds: Sequence[int]
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    facts = []
    rng = random.Random(0)
    for seed in tqdm(seeds, desc="digits"):
        learned, capacity = contest.learn(seed)
        order_of_bursts = random.Random(seed).sample(BURSTS, len(BURSTS))
        parts = contest.arrivals(capacity, order_of_bursts, seed)
        facts.append(
            {
                "capacity_qps": capacity,
                "requests": sum(map(len, parts)),
                "bursts_in_order": order_of_bursts,
            }
        )
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            f"FIFO, fixed {i}": partial(contest.serve_fifo, i, parts) for i in range(len(contest.engine.keys))
        }
        calls |= {name: partial(contest.serve, name, learned, parts) for name in contest.policies()}
        order = list(calls)
        rng.shuffle(order)
        for name in order:
            gc.collect()
            one = calls[name]()
            bursts = zip(order_of_bursts, one.pop("parts")[1::2], strict=True)
            one["by_burst"] = {f"{load:g}": percent for load, percent in sorted(bursts)}
            runs.setdefault(name, []).append(one)
    return runs, facts


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("attainment", "measured_accuracy", "effective_accuracy", "latency_p99_ms")
    result: dict[str, Any] = {name: median(run[name] for run in found) for name in names}
    result["effective_accuracy_by_seed"] = [run["effective_accuracy"] for run in found]
    result["by_burst"] = {
        load: median(run["by_burst"][load] for run in found) for load in found[0]["by_burst"]
    }
    return result
