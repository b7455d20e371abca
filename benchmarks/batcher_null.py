"""Measures requests per second and added latency of the batcher with a model that does nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from fifo import FifoBatcher
from torch import Tensor
from tqdm import tqdm

from subnetact import Batcher, LatencyTable, SlackFit
from subnetact.errors import InvalidRequest
from subnetact.workers.pool import ProcessPool

__all__ = ["null_section"]

SLO_MS = 1000.0
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LARGEST = BATCH_SIZES[-1]
CLIENTS = 2048
TICK_S = 2.5e-4
PACER = "import os, sys, time\nwhile True:\n    time.sleep(float(sys.argv[1]))\n    os.write(1, b'.')"
THREADS, WINDOW = 4, 512
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
Infer = Callable[[Tensor], Awaitable[Any]]


class NullEngine:
    """A runner that stacks its inputs and answers each with its first number."""

    keys = tuple(f"null{s}" for s in range(4))

    def check(self, x: Any) -> None:
        """Refuse everything but a vector of 16 numbers."""
        if not isinstance(x, Tensor) or x.shape != (16,):
            raise InvalidRequest("input: expected a tensor of shape (16,)")

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Any]:  # noqa: ARG002
        """Return one number per input."""
        return torch.stack(list(inputs))[:, 0].tolist()


def null_table() -> LatencyTable:
    """Measure the engine; its four subnets are said to differ by 5 %."""
    engine, inputs = NullEngine(), vectors()
    taken: list[float] = []
    for size in BATCH_SIZES:
        runs = []
        for _ in range(50):
            start = time.perf_counter()
            engine.run(0, inputs[:size], size)
            runs.append((time.perf_counter() - start) * 1e3)
        taken.append(max(median(runs), taken[-1] if taken else 0.0))
    latency_ms = [[(1 + 0.05 * s) * ms for ms in taken] for s in range(4)]
    return LatencyTable(NullEngine.keys, [70.0, 74.0, 77.0, 79.0], BATCH_SIZES, latency_ms)


def vectors() -> list[Tensor]:
    """Return inputs that differ in their first number."""
    return list(torch.arange(4096.0).unsqueeze(1).repeat(1, 16))


def ours(table: LatencyTable) -> Batcher:
    """Open our batcher; SlackFit decides."""
    return Batcher(NullEngine(), policy=SlackFit(table, slo_ms=SLO_MS), max_queue=100_000)


def naive() -> FifoBatcher:
    """Open a first-in, first-out batcher that waits 0.5 ms for a batch to fill."""
    return FifoBatcher(lambda inputs: NullEngine().run(0, inputs, LARGEST), LARGEST, 0.5)


def asyncio_throughput(make: Callable[[], Any], count: int) -> float:
    """Measure requests per second of `CLIENTS` coroutines, each with one request in flight."""
    inputs = vectors()

    async def main() -> float:
        async with make() as batcher:
            infer = infer_of(batcher)

            async def client(c: int) -> None:
                x = inputs[c % len(inputs)]
                expected = c % len(inputs)
                for _ in range(count // CLIENTS):
                    if await infer(x) != expected:
                        raise RuntimeError("an answer of another request")

            start = time.perf_counter()
            await asyncio.gather(*map(client, range(CLIENTS)))
            return count // CLIENTS * CLIENTS / (time.perf_counter() - start)

    return asyncio.run(main())


def infer_of(batcher: Any) -> Infer:
    """Return the coroutine function of a contender that maps an input to its output."""
    if not isinstance(batcher, Batcher):
        return batcher.infer  # type: ignore[no-any-return]

    async def infer(x: Tensor) -> Any:
        return (await batcher.infer(x, SLO_MS)).output

    return infer


class NoBatcher:
    """Answers in the next turn of the event loop, to show the latency that the measurement itself adds."""

    async def __aenter__(self) -> NoBatcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def infer(self, x: Tensor) -> Any:
        """Return the first number of the input."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        loop.call_soon(future.set_result, float(x[0]))
        return await future


@contextmanager
def on_one_core() -> Iterator[None]:
    """Run the threads that are started inside on the first core only."""
    os.sched_setaffinity(0, CORES[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def asyncio_latency(make: Callable[[], Any], qps: float, seconds: float) -> list[float]:
    """Measure latencies in an open loop with equal gaps, in ms from when each request was due.

    Every `TICK_S` seconds another process, on a core of its own, wakes the event loop through a pipe, as a
    client would; the loop then sends the requests that are due. An event loop's own timers are no finer than
    1 ms. Coroutines wait for the answers, and each sends further requests. The first tenth of the requests is
    not counted.
    """
    inputs, count = vectors(), int(qps * seconds)
    clock, taken = time.perf_counter, list[float]()

    async def main() -> None:
        async with make() as batcher:
            infer, loop = infer_of(batcher), asyncio.get_running_loop()
            idle: list[asyncio.Future[int]] = []
            clients: list[asyncio.Task[None]] = []
            all_done = loop.create_future()
            sent = done = 0
            start = clock() + 0.3

            async def client(i: int) -> None:
                nonlocal done
                while True:
                    if await infer(inputs[i % len(inputs)]) != i % len(inputs):
                        raise RuntimeError("an answer of another request")
                    if i >= count // 10:
                        taken.append((clock() - start - i / qps) * 1e3)
                    done += 1
                    if done == count:
                        all_done.set_result(None)
                    following: asyncio.Future[int] = loop.create_future()
                    idle.append(following)
                    i = await following

            def ended(task: asyncio.Task[None]) -> None:
                if not task.cancelled() and not all_done.done():
                    all_done.set_exception(task.exception() or RuntimeError("a client ended"))

            def send_due() -> None:
                nonlocal sent
                ticks.read(4096)
                until = min(count, 1 + int((clock() - start) * qps)) if clock() >= start else 0
                while sent < until:
                    if idle:
                        idle.pop().set_result(sent)
                    else:
                        clients.append(asyncio.create_task(client(sent)))
                        clients[-1].add_done_callback(ended)
                    sent += 1

            pacer = subprocess.Popen(
                [sys.executable, "-S", "-c", PACER, str(TICK_S)], stdout=subprocess.PIPE, bufsize=0
            )
            os.sched_setaffinity(pacer.pid, CORES[-1:])
            ticks: Any = pacer.stdout
            loop.add_reader(ticks, send_due)
            try:
                await all_done
            finally:
                loop.remove_reader(ticks)
                pacer.kill()
                pacer.wait()
                ticks.close()
                for task in clients:
                    task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(main())
    return taken


def in_threads(make: Callable[[], Batcher], work: Callable[[Batcher, int], None]) -> float:
    """Return the seconds that `THREADS` threads take, each calling `work(batcher, thread)` once."""
    failed: list[BaseException] = []

    def checked(thread: int) -> None:
        try:
            work(batcher, thread)
        except BaseException as error:
            failed.append(error)

    with make() as batcher:
        threads = [threading.Thread(target=checked, args=(t,)) for t in range(THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - start
    if failed:
        raise failed[0]
    return took


def thread_throughput(make: Callable[[], Batcher], count: int) -> float:
    """Measure requests per second of threads with `WINDOW` requests in flight each."""
    inputs = vectors()

    def work(batcher: Batcher, thread: int) -> None:
        for _ in range(count // THREADS // WINDOW):
            numbers = range(thread * WINDOW, (thread + 1) * WINDOW)
            futures = [batcher.submit(inputs[i], SLO_MS) for i in numbers]
            if [future.result().output for future in futures] != list(numbers):
                raise RuntimeError("an answer of another request")

    return count // THREADS // WINDOW * WINDOW * THREADS / in_threads(make, work)


def thread_latency(make: Callable[[], Batcher], qps: float, seconds: float) -> list[float]:
    """Measure latencies from when each request was due, in ms; the threads share the rate.

    The first tenth of the time is not counted.
    """
    inputs, taken, wrong = vectors(), list[float](), list[int]()
    clock = time.perf_counter
    start = clock() + 0.1
    counted_from = start + seconds / 10

    def work(batcher: Batcher, thread: int) -> None:
        for i in range(thread, int(qps * seconds), THREADS):
            due = start + i / qps
            early = due - clock()
            if early > 0:
                time.sleep(early)

            def done(future: Any, due: float = due, x: int = i % len(inputs)) -> None:
                if future.exception() is not None or future.result().output != x:
                    wrong.append(x)
                if due >= counted_from:
                    taken.append((clock() - due) * 1e3)

            batcher.submit(inputs[i % len(inputs)], SLO_MS).add_done_callback(done)

    in_threads(make, work)
    if wrong:
        raise RuntimeError("an answer of another request, or none")
    return taken


class FirstNumber:
    """A runner that takes tensors of any shape and answers each with its first number, as a tensor."""

    keys = NullEngine.keys

    def check(self, x: Any) -> None:
        """Accept everything."""

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Any]:  # noqa: ARG002
        """Return one tensor per input."""
        return list(torch.stack(list(inputs)).flatten(1)[:, :1].unbind(0))


#: number of inputs and shape of each, of the batches whose way to a worker process is measured
BATCHES = ((1, (16,)), (16, (16,)), (1, (3, 224, 224)), (8, (3, 224, 224)))


def process_overhead(repeats: int, scale: float = 1.0) -> dict[str, Any]:
    """Measure what a batch costs more in a worker process than in a thread, in us per batch."""
    here = FirstNumber()
    pool = ProcessPool(here, 1, threads=1, batch_sizes=(1,), spares=0)
    found: dict[str, dict[str, list[float]]] = {}
    try:
        for _ in range(repeats):
            for count, shape in BATCHES:
                inputs = list(torch.randn(count, *shape))
                calls = int(400 * scale)
                for name, runner in (("thread", here), ("process", pool.runners[0])):
                    taken = []
                    for _ in range(calls):
                        start = time.perf_counter()
                        runner.run(0, inputs, count)
                        taken.append((time.perf_counter() - start) * 1e6)
                    key = f"{count} x {list(shape)}"
                    found.setdefault(key, {}).setdefault(name, []).append(median(taken))
    finally:
        pool.close()
    return {key: {name: median(us) for name, us in one.items()} for key, one in found.items()}


def null_section(repeats: int = 5, scale: float = 1.0) -> dict[str, Any]:
    """Run every measurement `repeats` times, in turn; return medians."""
    seconds, count = 2.0 * scale, int(131_072 * scale)
    make = partial(ours, null_table())
    throughputs: dict[str, Callable[[], float]] = {
        "asyncio": lambda: asyncio_throughput(make, count),
        "asyncio, naive FIFO": lambda: asyncio_throughput(naive, count),
        "threads": lambda: thread_throughput(make, count // 2),
    }
    latencies: dict[str, Callable[[], list[float]]] = {
        "asyncio, 33000/s": lambda: asyncio_latency(make, 33_000, seconds),
        "asyncio, naive FIFO, 33000/s": lambda: asyncio_latency(naive, 33_000, seconds),
        "asyncio, no batcher, 33000/s": lambda: asyncio_latency(NoBatcher, 33_000, seconds),
        "threads, 16500/s": lambda: thread_latency(make, 16_500, seconds),
    }
    qps: dict[str, list[float]] = {name: [] for name in throughputs}
    added: dict[str, list[list[float]]] = {
        f"{name}{where}": [] for name in latencies for where in ("", ", one core")
    }
    for _ in tqdm(range(repeats), desc="null model"):
        for name, measure in throughputs.items():
            gc.collect()
            qps[name].append(measure())
        for name, run in latencies.items():
            gc.collect()
            added[name].append(np.percentile(run(), [50, 99, 100]).tolist())
            with on_one_core():
                added[f"{name}, one core"].append(np.percentile(run(), [50, 99, 100]).tolist())
    return {
        "requests_per_second": {name: median(found) for name, found in qps.items()},
        "all_requests_per_second": qps,
        "added_latency_ms": {
            name: dict(zip(("p50", "p99", "max"), map(median, zip(*found, strict=True)), strict=True))
            for name, found in added.items()
        },
        "all_added_latency_ms": added,
        "ratio_to_naive": median(
            a / b for a, b in zip(qps["asyncio"], qps["asyncio, naive FIFO"], strict=True)
        ),
        "us_per_batch": process_overhead(repeats, scale),
        "clients": CLIENTS,
        "threads": THREADS,
    }
