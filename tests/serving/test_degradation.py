"""A lost worker costs accuracy, not deadlines: the live core in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batch_job import BatchJob
from subnetact.serving.live.core import Core
from subnetact.serving.policies import HullFit, SlackFit

SIZES = (1, 2, 4, 8, 16)
TABLE = LatencyTable(
    [f"s{i}" for i in range(5)],
    [70.0, 73.0, 76.0, 78.0, 80.0],
    SIZES,
    [[(1.0 + i) * (0.5 + 0.25 * size) for size in SIZES] for i in range(5)],
)


class VirtualServer:
    """Drives a core with workers that take exactly the table's latency."""

    def __init__(self, policy: Any, workers: int) -> None:
        self.now = 0.0
        self.core = Core(
            policy,
            TABLE,
            workers=workers,
            max_queue=10_000,
            expired="drop",
            slo_ms=36.0,
            clock_ms=lambda: self.now,
            watchdog_ms=None,
            learn=True,
        )
        self.jobs: dict[int, BatchJob | None] = dict.fromkeys(range(workers))
        self.dead: set[int] = set()

    def serve(self, arrivals_ms: Any) -> tuple[float, float]:
        """Return attainment and mean accuracy of these arrivals."""
        before = self.core.stats()
        for at in arrivals_ms:
            self._until(float(at))
            self.core.admit(0, 36.0, 0.0, 0, None, None)
            self._give_work()
        self._until(self.now + 200.0)
        after = self.core.stats()
        met = after.met - before.met
        return met / len(arrivals_ms), (after.accuracy_sum - before.accuracy_sum) / met

    def lose(self, worker: int) -> None:
        """Let a worker die, and again whenever it is started again."""
        self.dead.add(worker)
        if self.core.died(worker, self.jobs.pop(worker), SystemExit()):
            self.core.delivered()

    def _until(self, then: float) -> None:
        while True:
            due = [(job.started_ms + self._takes(job), w) for w, job in self.jobs.items() if job is not None]
            finish, worker = min(due, default=(then + 1.0, -1))
            if finish > then:
                self.now = then
                return
            self.now = finish
            job = self.jobs[worker]
            assert job is not None
            if self.core.answered(job, [None] * len(job.part)):
                self.core.delivered()
            self.jobs[worker] = None
            self._give_work()

    def _takes(self, job: BatchJob) -> float:
        return float(TABLE.latency_ms[job.subnet, TABLE.pad_index[job.size]])

    def _give_work(self) -> None:
        revived, outcomes = self.core.tick()
        if outcomes:
            self.core.delivered()
        for worker in revived:
            if worker in self.dead:
                self.core.died(worker, None, SystemExit())
        for worker, job in self.jobs.items():
            if job is None:
                self.jobs[worker], outcomes = self.core.next_job(worker, wait=False)
                if outcomes:
                    self.core.delivered()


@pytest.mark.parametrize("policy", [SlackFit, HullFit])
def test_a_lost_worker_costs_accuracy_and_not_deadlines(policy: Any) -> None:
    rng = np.random.default_rng(0)
    server = VirtualServer(policy(TABLE, slo_ms=36.0), workers=3)
    whole = server.serve(np.cumsum(rng.exponential(1 / 3.0, 6000)))
    server.lose(1)
    fewer = server.serve(server.now + np.cumsum(rng.exponential(1 / 3.0, 6000)))
    assert server.core.stats().workers_up == 2
    assert whole[0] >= 0.995
    assert fewer[0] >= 0.99
    assert whole[1] - 6.0 < fewer[1] < whole[1] - 0.5
