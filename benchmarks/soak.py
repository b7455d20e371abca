"""A long run of the batcher under injected faults: `python benchmarks/soak.py --requests 1000000`.

Clients on two event loops and two threads send requests. Some requests are refused because they are invalid,
some are cancelled, and some make their batch raise, run slowly, run out of memory, hang, or kill their
worker. The run fails unless every output belongs to its input, every request ends exactly once and as its
kind allows, memory does not grow, and closing leaves no thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import options_of, resident_mb, run

from subnetact.errors import (
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    WorkerHung,
)
from subnetact.latency import LatencyTable
from subnetact.serving import Answer, Batcher, SlackFit

SIZES = (1, 2, 4, 8, 16, 32)
TABLE = LatencyTable(
    [f"subnet{i}" for i in range(4)],
    [70.0, 73.0, 76.0, 79.0],
    SIZES,
    [[0.2 * (1 + 0.3 * i) * (1 + size / 16) for size in SIZES] for i in range(4)],
)
WATCHDOG_MS = 150.0
HANG_S = 1.5
KINDS = ("plain", "raises", "slow", "hangs", "kills", "memory", "invalid", "cancelled")
#: request i is of a kind when i % period == offset
PERIODS = {
    "raises": (500, 7),
    "slow": (1000, 3),
    "hangs": (5000, 17),
    "kills": (3000, 11),
    "memory": (10_000, 27),
    "invalid": (400, 5),
    "cancelled": (97, 1),
}
DEADLINES_MS = (5000.0, 5000.0, 5000.0, 50.0, 3.0)

Array = npt.NDArray[np.float64]


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error, by which the batcher recognises it."""


class FaultyRunner:
    """Returns 2 x + 1 for every input, unless an input carries a fault."""

    keys = TABLE.subnets

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()

    def check(self, x: Any) -> None:
        """Refuse inputs that are not of shape (2,)."""
        if x.shape != (2,):
            raise InvalidRequest(f"input: shape {x.shape}, expected (2,)")

    def run(self, subnet: int, inputs: Any, batch_size: int) -> list[Array]:
        """Return one output per input."""
        del subnet, batch_size
        batch: Array = np.stack(inputs)
        kinds = {KINDS[int(kind)] for kind in batch[:, 1]}
        for kind in kinds & {"raises", "slow", "hangs", "kills", "memory"}:
            self.faults[kind] += 1
        if "hangs" in kinds:
            time.sleep(HANG_S)
        if "kills" in kinds:
            raise SystemExit("killed")
        if "raises" in kinds:
            raise ValueError("poisoned")
        if "memory" in kinds and len(inputs) > 8:
            raise OutOfMemoryError("out of memory")
        if "slow" in kinds:
            time.sleep(0.005)
        return list(2.0 * batch + 1.0)


class Account:
    """Collects the outcome of every request, and the problems, of which there must be none."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def end(self, i: int, kind: str, answer: Answer | None, error: BaseException | None) -> None:
        """Check one outcome."""
        wrong = ""
        if error is None:
            outcome = "answered" if answer is not None else "nothing"
            output = None if answer is None else answer.output
            if output is None or output[0] != 2.0 * i + 1.0:
                wrong = f"answered with {output}"
            elif kind in ("raises", "hangs", "kills", "invalid"):
                wrong = "answered although it cannot be"
        else:
            outcome = type(error).__name__
            allowed = {
                "raises": isinstance(error, BatchFailed) and isinstance(error.__cause__, ValueError),
                "hangs": isinstance(error, WorkerHung),
                "kills": isinstance(error, BatchFailed) and isinstance(error.__cause__, SystemExit),
                "invalid": isinstance(error, InvalidRequest),
                "cancelled": isinstance(error, (asyncio.CancelledError, FutureCancelled)),
            }.get(kind, False)
            if not allowed and not isinstance(error, (DeadlinePassed, QueueFull)):
                wrong = f"ended with {error!r}"
        with self._lock:
            self.outcomes[outcome] += 1
            if wrong and len(self.problems) < 20:
                self.problems.append(f"request {i} ({kind}): {wrong}")


def kind_of(i: int) -> str:
    """The fault of request i."""
    return next((kind for kind, (period, at) in PERIODS.items() if i % period == at), "plain")


def input_of(i: int, kind: str) -> Array:
    """The input of request i."""
    if kind == "invalid":
        return np.zeros(3)
    return np.array([float(i), float(KINDS.index(kind))])


def threaded_client(batcher: Batcher, numbers: range, window: int, account: Account) -> None:
    """Send from a plain thread, `window` at a time."""
    waiting: deque[tuple[int, str, Future[Answer]]] = deque()

    def settle_one() -> None:
        i, kind, future = waiting.popleft()
        try:
            account.end(i, kind, future.result(60), None)
        except BaseException as error:
            account.end(i, kind, None, error)

    for i in numbers:
        kind = kind_of(i)
        try:
            future = batcher.submit(input_of(i, kind), DEADLINES_MS[i % 5], priority=i % 3)
        except (InvalidRequest, QueueFull) as error:
            account.end(i, kind, None, error)
            continue
        waiting.append((i, kind, future))
        if kind == "cancelled":
            future.cancel()
        if len(waiting) >= window:
            settle_one()
    while waiting:
        settle_one()


async def loop_client(batcher: Batcher, numbers: range, window: int, account: Account) -> None:
    """Send from one event loop, `window` at a time."""
    room = asyncio.Semaphore(window)

    async def one(i: int, kind: str) -> None:
        call = batcher.infer(input_of(i, kind), DEADLINES_MS[i % 5], priority=i % 3)
        try:
            if kind == "cancelled":
                task = asyncio.ensure_future(call)
                await asyncio.sleep(0.0005 * (i % 4))
                task.cancel()
                answer = await task
            else:
                answer = await call
            account.end(i, kind, answer, None)
        except (asyncio.CancelledError, Exception) as error:
            account.end(i, kind, None, error)
        finally:
            room.release()

    tasks: set[asyncio.Task[None]] = set()
    for i in numbers:
        await room.acquire()
        task = asyncio.ensure_future(one(i, kind_of(i)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.gather(*list(tasks))


def soak(requests: int, workers: int = 4) -> dict[str, Any]:
    """Run the clients.

    Raises:
        RuntimeError: Something went wrong; the message names the first 20 problems.
    """
    account, runner = Account(), FaultyRunner()
    before = set(threading.enumerate())
    started = time.perf_counter()
    batcher = Batcher(
        runner, policy=SlackFit(TABLE, slo_ms=50.0), workers=workers, watchdog_ms=WATCHDOG_MS, max_queue=2000
    )
    shares = [range(k, requests, 4) for k in range(4)]
    clients = [
        threading.Thread(target=threaded_client, args=(batcher, share, 150, account)) for share in shares[:2]
    ] + [
        threading.Thread(target=asyncio.run, args=(loop_client(batcher, share, 150, account),))
        for share in shares[2:]
    ]
    for client in clients:
        client.start()
    memory: list[tuple[int, float]] = []
    while any(client.is_alive() for client in clients):
        time.sleep(0.25)
        memory.append((sum(account.outcomes.values()), resident_mb()))
    seconds = time.perf_counter() - started
    stats = batcher.stats()
    batcher.close()
    for _ in range(100):
        left = set(threading.enumerate()) - before
        if not left:
            break
        time.sleep(0.05)
    warm = next((mb for done, mb in memory if done >= requests // 5), memory[-1][1])
    problems = list(account.problems)
    ended = sum(account.outcomes.values())
    if ended != requests:
        problems.append(f"{ended} outcomes for {requests} requests")
    finished = stats.met + stats.late + stats.dropped + stats.failed + stats.cancelled + stats.closed
    if stats.submitted + stats.refused != requests or finished != stats.submitted:
        problems.append(f"the counters do not add up: {stats}")
    if left:
        problems.append(f"threads left: {sorted(thread.name for thread in left)}")
    if memory[-1][1] > warm + 32.0:
        problems.append(f"memory grew from {warm:.0f} to {memory[-1][1]:.0f} MiB")
    if problems:
        raise RuntimeError("\n".join(problems))
    return {
        "requests": requests,
        "seconds": round(seconds, 1),
        "requests_per_second": round(requests / seconds),
        "outcomes": dict(sorted(account.outcomes.items())),
        "faulty_runs": dict(sorted(runner.faults.items())),
        "counters": {name: value for name, value in vars(stats).items() if isinstance(value, int) and value},
        "batch_limits": {str(subnet): most for subnet, most in stats.batch_limits.items()},
        "resident_mb": {"after a fifth": round(warm, 1), "at the end": round(memory[-1][1], 1)},
        "threads_left": len(left),
    }


def main() -> None:
    parser = options_of(__doc__, "soak")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    logging.disable(logging.WARNING)  # every killed worker is logged
    run(parser, "soak", {"faults": lambda this: soak(this.args.requests, this.args.workers)})


if __name__ == "__main__":
    main()
