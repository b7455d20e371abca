"""A scheduler with a clock that the test moves, and with what the batcher lets its policy learn."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from subnetact.errors import DeadlinePassed, RequestError
from subnetact.serving.live.learner import Learner
from subnetact.serving.scheduling.request import Ask, Job, Request
from subnetact.serving.scheduling.scheduler import Scheduler

__all__ = ["Scheduled"]


class Scheduled:
    """Calls a scheduler at the present time of a clock, in ms, and keeps who ended how."""

    def __init__(
        self,
        policy: Any,
        tables: Any = None,
        *,
        slo_ms: float,
        shape_of: Callable[[Any], int] | None = None,
        learn: bool = True,
        **options: Any,
    ) -> None:
        self.now = 0.0
        tables = policy.table if tables is None else tables
        several = tables if isinstance(tables, list) else [tables]
        self.scheduler = Scheduler(policy, several, slo_ms=slo_ms, **{"workers": 1, **options})
        clock = lambda: self.now  # noqa: E731
        self.learner = Learner(several, self.scheduler.dispatcher, Lock(), clock, learn)
        self._shape_of = shape_of

    def admit(
        self, x: Any, deadline_ms: float, floor: float = 0.0, priority: int = 0, client: str = ""
    ) -> Request:
        self.scheduler.make_room(client)
        request = Request(Ask(deadline_ms, floor, priority, client), self.now, x)
        if self._shape_of is not None:
            request.shape = self._shape_of(x)
        self.scheduler.submit([request])
        return request

    def idle(self, worker: int = 0) -> Job | None:
        """Return the job of an idle worker; what a policy raises ends the requests, as in a batcher."""
        try:
            return self.scheduler.idle(worker, self.now)
        except Exception as error:
            self.scheduler.policy_failed(error)
            return None

    def finish(self, job: Job) -> list[Any]:
        """End the part of a job, and return the inputs that are answered."""
        if not job.abandoned:
            self.learner.observe(job, self.now - job.started_ms - job.paused_ms)
        return [request.x for request in self.scheduler.finished(job, self.now)]

    def failed(self, job: Job, error: Exception) -> None:
        self.scheduler.failed(job, error, self.now)

    def lose(self, worker: int, error: BaseException | None = None) -> None:
        self.scheduler.lost(worker, SystemExit() if error is None else error, self.now)

    def start(self, worker: int) -> None:
        self.scheduler.workers.started(worker, self.now)

    def tick(self) -> list[int]:
        """Let the scheduler do what time requires, and return the workers to start again."""
        return self.scheduler.tick(self.now)[0]

    def ended(self) -> dict[Any, type[RequestError] | RequestError | str]:
        """Return how requests ended without an answer since the last call, by their inputs."""
        ended, how_of = self.scheduler.ended, {}
        for request, how, error in ended:
            assert request.x not in how_of, "a second outcome"
            how_of[request.x] = DeadlinePassed if how == "dropped" else error or how
        ended.clear()
        return how_of
