"""A lost worker costs accuracy, not deadlines: the scheduler in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduled import Scheduled

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import HullFit, SlackFit
from subnetact.serving.scheduling.request import Job

SIZES = (1, 2, 4, 8, 16)
TABLE = LatencyTable(
    [f"s{i}" for i in range(5)],
    [70.0, 73.0, 76.0, 78.0, 80.0],
    SIZES,
    [[(1.0 + i) * (0.5 + 0.25 * size) for size in SIZES] for i in range(5)],
)


class VirtualServer(Scheduled):
    """Workers that take exactly the table's latency."""

    def __init__(self, policy: Any, workers: int) -> None:
        super().__init__(policy, workers=workers, slo_ms=36.0)
        self.jobs: dict[int, Job | None] = dict.fromkeys(range(workers))
        self.dead: set[int] = set()

    def serve(self, arrivals_ms: Any) -> tuple[float, float]:
        """Return attainment and mean accuracy of these arrivals."""
        self.met, self.accuracies = 0, []
        for at in arrivals_ms:
            self._until(float(at))
            self.admit(0, 36.0)
            self._give_work()
        self._until(self.now + 200.0)
        return self.met / len(arrivals_ms), float(np.mean(self.accuracies))

    def kill(self, worker: int) -> None:
        """Let a worker die, and again whenever it is started again."""
        self.dead.add(worker)
        del self.jobs[worker]
        self.lose(worker)

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
            self.finish(job)
            self.jobs[worker] = None
            self._give_work()

    def _takes(self, job: Job) -> float:
        return float(TABLE.latency_ms[job.subnet, TABLE.pad_index[job.size]])

    def _give_work(self) -> None:
        for worker in self.tick():
            if worker in self.dead:
                self.lose(worker)
        for worker, job in self.jobs.items():
            if job is None:
                self.jobs[worker] = self.idle(worker)
        self.scheduler.ended.clear()


@pytest.mark.parametrize("policy", [SlackFit, HullFit])
def test_a_lost_worker_costs_accuracy_and_not_deadlines(policy: Any) -> None:
    rng = np.random.default_rng(0)
    server = VirtualServer(policy(TABLE, slo_ms=36.0), workers=3)
    whole = server.serve(np.cumsum(rng.exponential(1 / 3.0, 6000)))
    server.kill(1)
    fewer = server.serve(server.now + np.cumsum(rng.exponential(1 / 3.0, 6000)))
    assert server.scheduler.workers.up() == 2
    assert whole[0] >= 0.995
    assert fewer[0] >= 0.99
    assert whole[1] - 6.0 < fewer[1] < whole[1] - 0.5
