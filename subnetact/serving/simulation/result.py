"""The result of a simulation, and the figures by which policies are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Decision(NamedTuple):
    """One decision of a policy and the batch that followed.

    Attributes:
        t_ms: when the batch was formed.
        worker: index of the worker.
        queued: number of requests in the queue.
        slack_ms: slack of the most urgent request.
        subnet: index of the subnet that ran.
        batch_size: the profiled batch size.
        k: number of requests in the batch.
        finish_ms: when the batch ended.
    """

    t_ms: float
    worker: int
    queued: int
    slack_ms: float
    subnet: int
    batch_size: int
    k: int
    finish_ms: float


@dataclass(frozen=True)
class RequestLog:
    """The outcome of every request, in order of arrival.

    Attributes:
        start_ms: when the last batch of each request started, shape (n,); NaN if the request never ran.
        finish_ms: when that batch ended, shape (n,); NaN if the request was never answered.
        subnet: the subnet that answered each request, shape (n,); -1 if none did.
    """

    start_ms: npt.NDArray[np.float64]
    finish_ms: npt.NDArray[np.float64]
    subnet: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, count: int) -> RequestLog:
        """Return the log of requests without an outcome yet."""
        return cls(np.full(count, np.nan), np.full(count, np.nan), np.full(count, -1, dtype=np.int32))


@dataclass
class SimulationResult:
    """What `simulate` counted.

    A request is met if it is answered by its deadline, on a subnet that has its minimum accuracy. SLO
    attainment is the share of met requests. Effective accuracy is the profiled accuracy of the answering
    subnets, summed over met requests and divided by all requests, so that a missed request counts as 0. A
    simulation has no labels; measured on labelled requests, effective accuracy is the percentage that is
    answered in time and right.

    Attributes:
        requests: number of requests.
        met: number of requests answered by their deadline, on a subnet that has their minimum accuracy.
        late: number of requests answered after their deadline.
        dropped: number of expired requests that were dropped.
        unserved: number of requests that still waited when nothing could run any more.
        accuracy_sum: sum over met requests of the accuracy of their subnet, percent.
        batches: number of batches that ran to the end.
        preempted: number of batches that were interrupted, by a policy or because their worker went down.
        switches: how many times a worker changed its subnet.
        end_ms: when the last batch ended.
        served_by: for each subnet, number of requests that it answered, in time or late.
        decisions: every decision, if `simulate` was called with `decisions=True`.
        log: the outcome of every request, if `simulate` was called with `requests=True`.
    """

    requests: int = 0
    met: int = 0
    late: int = 0
    dropped: int = 0
    unserved: int = 0
    accuracy_sum: float = 0.0
    batches: int = 0
    preempted: int = 0
    switches: int = 0
    end_ms: float = 0.0
    served_by: list[int] = field(default_factory=list)
    decisions: list[Decision] | None = None
    log: RequestLog | None = None

    @property
    def missed(self) -> int:
        """Number of requests that were not met: late, dropped or unserved."""
        return self.requests - self.met

    @property
    def attainment(self) -> float:
        """SLO attainment: met requests / all requests, from 0 to 1."""
        return self.met / self.requests if self.requests else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean serving accuracy: mean accuracy over met requests, percent (SuperServe, NSDI'25)."""
        return self.accuracy_sum / self.met if self.met else math.nan

    @property
    def effective_accuracy(self) -> float:
        """Effective accuracy: accuracy summed over met requests / all requests, percent (HotCloud'20)."""
        return self.accuracy_sum / self.requests if self.requests else math.nan

    def summary(self) -> dict[str, float]:
        """Return the figures as plain numbers, for tables and JSON."""
        shown = ("attainment", "mean_accuracy", "effective_accuracy", "missed", "dropped", "batches")
        return {name: getattr(self, name) for name in ("requests", *shown)}


def count_batch(
    result: SimulationResult, subnet: int, accuracy: float, met: int, late: int, end_ms: float
) -> None:
    """Count a batch that ran to the end, of requests that were answered in time or late."""
    result.met += met
    result.late += late
    result.accuracy_sum += met * accuracy
    result.batches += 1
    result.served_by[subnet] += met + late
    result.end_ms = max(result.end_ms, end_ms)
