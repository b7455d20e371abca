"""What a simulation counted, and the figures that policies are compared by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Decision", "RequestLog", "SimulationResult"]


class Decision(NamedTuple):
    """One batch: when it was formed, what the policy saw, what it answered, when it really finished."""

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
    """The fate of every request, in order of arrival; arrays of shape (requests,).

    Attributes:
        start_ms: when its (last) batch started; NaN if it never ran.
        finish_ms: when its batch finished; NaN if it never ran to the end.
        subnet: which subnet served it; -1 if none.
    """

    start_ms: npt.NDArray[np.float64]
    finish_ms: npt.NDArray[np.float64]
    subnet: npt.NDArray[np.int32]


@dataclass
class SimulationResult:
    """Outcome of `simulate`.

    Attributes:
        requests: how many arrived.
        met: how many finished at or before their deadline, on a subnet that meets their floor.
        late: how many finished after it.
        dropped: how many were given up by the hopeless rule.
        unserved: how many still waited when nothing could run any more.
        accuracy_sum: sum over met requests of the profiled accuracy of their subnet, percent.
        batches: how many batches ran to the end.
        preempted: how many batches were interrupted, by a policy or by the death of their worker.
        switches: how many times a worker changed its subnet.
        busy_ms: time all workers spent on batches.
        end_ms: when the last batch finished.
        served_by: requests each subnet served, met or not.
        decisions: every batch, when asked for.
        log: the fate of every request, when asked for.
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
    busy_ms: float = 0.0
    end_ms: float = 0.0
    served_by: list[int] = field(default_factory=list)
    decisions: list[Decision] | None = None
    log: RequestLog | None = None

    @property
    def missed(self) -> int:
        """Requests that did not meet their deadline, for whatever reason."""
        return self.requests - self.met

    @property
    def attainment(self) -> float:
        """SLO attainment: met / all."""
        return self.met / self.requests if self.requests else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean serving accuracy (SuperServe): mean profiled accuracy over met requests, percent."""
        return self.accuracy_sum / self.met if self.met else math.nan

    @property
    def effective_accuracy(self) -> float:
        """Effective accuracy (Model-Switching, HotCloud'20): sum of accuracy over met / all, percent."""
        return self.accuracy_sum / self.requests if self.requests else math.nan

    @property
    def mean_batch(self) -> float:
        """Mean number of requests in a batch."""
        return (self.met + self.late) / self.batches if self.batches else math.nan

    def summary(self) -> dict[str, float]:
        """The figures as plain numbers, for tables and JSON."""
        return {
            "requests": self.requests,
            "attainment": self.attainment,
            "mean_accuracy": self.mean_accuracy,
            "effective_accuracy": self.effective_accuracy,
            "missed": self.missed,
            "dropped": self.dropped,
            "batches": self.batches,
            "mean_batch": self.mean_batch,
        }
