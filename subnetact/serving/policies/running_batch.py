"""`RunningBatch`: a batch on a worker, as policies that preempt see it."""

# Annotations are not postponed here, so that tools can read the fields of the named tuple elsewhere.

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["RunningBatch"]


class RunningBatch(NamedTuple):
    """A batch that runs on a worker, as `Preemptive.preempt` sees it.

    Attributes:
        worker: index of the worker.
        subnet: index of the subnet.
        k: number of requests in the batch.
        started_ms: when the batch started.
        free_at_ms: when the batch is expected to end.
        deadlines_ms: the deadlines of its requests.
    """

    worker: int
    subnet: int
    k: int
    started_ms: float
    free_at_ms: float
    deadlines_ms: Sequence[float] = ()
