"""Kills a worker process every 2 s under load: `python benchmarks/soak_processes.py --seconds 60`.

Two worker processes serve the digits supernet in an open loop, once in peace and once while one of the two is
sent SIGKILL every 2 s; both runs have the same arrivals. The run fails unless every request ends exactly
once, every output is the one that the subnet gives for the input, and closing leaves no process, no thread
and no shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from open_loop import Refused, Reply, Sent, run_open_loop, summary, trace

from subnetact import Batcher, Engine, HullFit, LatencyTable
from subnetact.device import machine
from subnetact.errors import RequestError
from subnetact.serve.digits_engine import digits_engine, profiled, unseen_digits
from subnetact.serving import Answer, BatcherStats

WORKERS = 2
CV2 = 4.0
TOLERANCE = 2e-3
"""Largest difference of an answer from the expected output: batches of other sizes round differently."""


class Killer(threading.Thread):
    """Sends SIGKILL to one of the worker processes every few seconds."""

    def __init__(self, batcher: Batcher, period_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.killed = 0
        self._batcher, self._period_s, self._rng = batcher, period_s, random.Random(seed)
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Kill until `stop` is called."""
        while not self._stop_asked.wait(self._period_s):
            pids = self._batcher.processes
            if pids:
                os.kill(self._rng.choice(pids), signal.SIGKILL)
                self.killed += 1

    def stop(self) -> None:
        """Stop."""
        self._stop_asked.set()
        self.join()


class Run:
    """One run of a trace, and the problems that it showed, of which there must be none."""

    def __init__(self, engine: Engine, slo_ms: float) -> None:
        data = unseen_digits()
        self.images, self.labels = list(data.images), data.labels.tolist()
        self.slo_ms = slo_ms
        with torch.no_grad():
            self._expected = [engine(data.images, subnet=i) for i in engine.ids]
        self.problems: list[str] = []
        self.endings: Counter[int] = Counter()

    async def serve(self, batcher: Batcher, arrivals_ms: list[float]) -> list[Sent]:
        """Send a trace."""

        async def send(i: int, left_ms: float) -> Reply:
            try:
                answer = await batcher.infer(self.images[i % len(self.images)], left_ms)
            except RequestError as error:
                self.endings[i] += 1
                raise Refused(type(error).__name__) from error
            self.endings[i] += 1
            self._check(i, answer)
            return Reply(int(answer.output.argmax()), answer.subnet, answer.accuracy)

        return await run_open_loop(arrivals_ms, send, self.slo_ms)

    def _check(self, i: int, answer: Answer) -> None:
        expected = self._expected[answer.subnet][i % len(self.images)]
        if not torch.allclose(answer.output, expected, atol=TOLERANCE, rtol=TOLERANCE):
            self.problems.append(f"request {i}: the output is not that of subnet {answer.subnet}")


def soak(
    engine: Engine,
    table: LatencyTable,
    arrivals_ms: list[float],
    slo_ms: float,
    period_s: float | None,
    spares: int,
) -> dict[str, Any]:
    """Serve a trace, and kill a process every `period_s` seconds unless that is None.

    Raises:
        RuntimeError: Something went wrong; the message names what.
    """
    threads, descriptors = set(threading.enumerate()), Counter(open_files())
    run = Run(engine, slo_ms)
    batcher = Batcher(
        engine,
        policy=HullFit(table, slo_ms=slo_ms),
        slo_ms=slo_ms,
        workers=WORKERS,
        process=True,
        spares=spares,
        threads_per_worker=1,
    )
    killer = Killer(batcher, period_s or 1.0, seed=0)
    try:
        asyncio.run(run.serve(batcher, arrivals_ms[: len(arrivals_ms) // 20]))  # the batcher learns
        run.endings.clear()
        before = batcher.stats()
        if period_s is not None:
            killer.start()
        sent = asyncio.run(run.serve(batcher, arrivals_ms))
        if period_s is not None:
            killer.stop()
        after = batcher.stats()
    finally:
        batcher.close()
    killed = killer.killed
    problems = run.problems[:20] + _left(before, after, run, sent)
    left = {t for t in threading.enumerate() if t not in threads and t.name.startswith("subnetact")}
    if left:
        problems.append(f"threads left: {sorted(thread.name for thread in left)}")
    if children():
        problems.append(f"processes left: {children()}")
    del batcher, killer
    gc.collect()
    more = Counter(open_files()) - descriptors
    if more.total() > 2:  # the weights are still in shared memory
        problems.append(f"descriptors left: {more}")
    if problems:
        raise RuntimeError("\n".join(problems))
    found = summary(sent, run.labels, slo_ms)
    return {
        **{
            name: found[name]
            for name in ("requests", "attainment", "measured_accuracy", "effective_accuracy")
        },
        "latency_ms": found["latency_ms"],
        "outcomes": found["outcomes"],
        "killed": killed,
        "died": after.died - before.died,
        "retried": after.retried - before.retried,
    }


def _left(before: BatcherStats, after: BatcherStats, run: Run, sent: list[Sent]) -> list[str]:
    problems = []
    unanswered = sum(s.outcome in ("unanswered", "SentTooLate") for s in sent)
    if set(run.endings.values()) - {1} or len(run.endings) + unanswered != len(sent):
        problems.append(f"{len(run.endings)} endings for {len(sent)} requests")
    if any(s.outcome == "unanswered" for s in sent):
        problems.append("requests without an outcome")
    submitted = after.submitted - before.submitted
    ended = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("met", "late", "dropped", "failed", "cancelled", "closed")
    )
    if submitted != ended:
        problems.append(f"the counters do not add up: {submitted} submitted, {ended} ended")
    return problems


def open_files() -> list[str]:
    """Return what every descriptor of this process refers to, in one word."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(re.sub(r"\[\d+\]", "", os.readlink(path)))
    return found


def children() -> list[int]:
    """Return the ids of the processes whose parent is this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (
                (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            continue
        if int(status[1]) == os.getpid() and status[0] != "Z":
            found.append(int(folder.name))
    return found


def main() -> None:
    """Measure both runs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=150.0, help="requests per second")
    parser.add_argument("--slo-ms", type=float, default=100.0)
    parser.add_argument("--period-s", type=float, default=2.0, help="time between two kills")
    parser.add_argument("--spares", type=int, default=1, help="processes that are ready to take over")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak_processes.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # every killed process is logged
    torch.set_num_threads(1)
    engine = digits_engine()
    table = profiled(engine)
    arrivals_ms = trace("bursty", args.rate, args.seconds, CV2, 0).tolist()
    result = {
        "seconds": args.seconds,
        "rate": args.rate,
        "slo_ms": args.slo_ms,
        "period_s": args.period_s,
        "workers": WORKERS,
        "spares": args.spares,
        "in peace": soak(engine, table, arrivals_ms, args.slo_ms, None, args.spares),
        "under SIGKILL": soak(engine, table, arrivals_ms, args.slo_ms, args.period_s, args.spares),
        "machine": machine(torch.device("cpu")),
    }
    text = json.dumps(result, indent=1)
    args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
