"""The input of a simulation, and its validation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError, SubnetActError, TraceError
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count, check_margin, check_policy, too_short
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.fair_shares import FairShares
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.request import Ask

MOST_WORKERS = 65_536


@contextmanager
def numeric_arguments() -> Iterator[None]:
    """Raise TraceError for errors of arguments that are no numbers, or are too large; also a decorator."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, SubnetActError):
            raise
        raise TraceError(f"an argument is of the wrong kind, or out of range ({error!s:.200})") from error


class WorkerEvent(NamedTuple):
    """A worker comes up or goes down.

    Attributes:
        t_ms: when, ms.
        worker: index of the worker.
        up: True if the worker comes up, False if it goes down.
    """

    t_ms: float
    worker: int
    up: bool


def checked_arrivals(arrivals_ms: npt.ArrayLike) -> Floats:
    """Return arrival times as a float64 array; TraceError if they are none, or do not ascend."""
    try:
        arrivals = np.asarray(arrivals_ms, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"arrivals_ms: not numbers ({error})") from error
    if arrivals.ndim != 1:
        raise TraceError(f"arrivals_ms: shape {arrivals.shape}; give one dimension")
    if not len(arrivals):
        raise TraceError("arrivals_ms: empty; give at least one arrival")
    if not np.isfinite(arrivals).all():
        at = int(np.argmin(np.isfinite(arrivals)))
        raise TraceError(f"arrivals_ms[{at}]: {arrivals[at]} is not finite")
    falling = arrivals[1:] < arrivals[:-1]
    if falling.any():
        at = int(np.argmax(falling)) + 1
        raise TraceError(f"arrivals_ms[{at}]: {arrivals[at]} is before {arrivals[at - 1]}; sort the arrivals")
    return arrivals


@dataclass(frozen=True)
class Scenario:
    """The input of one simulation; see `simulate` for what the fields mean.

    Attributes:
        floors: what `Floors` makes of the minimum accuracies, percent, one number or shape (n,); 0 accepts
            any subnet. Before `checked`, the minimum accuracies themselves.
    """

    arrivals_ms: Any
    table: LatencyTable
    policy: Policy
    slo_ms: Any
    workers: int
    floors: Any = 0.0
    priority: Any = 0.0
    clients: Sequence[str] | None = None
    shares: FairShares | None = None
    noise: float = 0.0
    overhead_ms: float = 0.0
    switch_ms: float = 0.0
    events: Sequence[WorkerEvent] = ()
    blocks: int = 1
    look_ms: float = 0.0

    def asks(self, start: int, end: int) -> list[Ask]:
        """Return what the requests from `start` to `end` ask for."""
        columns = (self.slo_ms, self.floors, self.priority)
        if self.clients is None and all(isinstance(column, float) for column in columns):
            return [Ask(self.slo_ms, self.floors, int(self.priority))] * (end - start)
        slo, floors, priority = (
            np.broadcast_to(column if isinstance(column, float) else column[start:end], end - start).tolist()
            for column in columns
        )
        clients = [""] * (end - start) if self.clients is None else self.clients[start:end]
        return list(map(Ask, slo, floors, map(int, priority), clients))


@numeric_arguments()
def checked(given: Scenario) -> Scenario:
    """Return the validated input, with arrays for sequences; see `simulate` for the errors."""
    arrivals, table, policy, workers = given.arrivals_ms, given.table, given.policy, given.workers
    arrivals = checked_arrivals(arrivals)
    count = len(arrivals)
    check_policy(policy, table)
    if check_count(workers, "workers") > MOST_WORKERS:
        raise PolicyError(f"workers: {workers:.3g} are more than {MOST_WORKERS}")
    check_count(given.blocks, "blocks")
    names = ("noise", "overhead_ms", "switch_ms", "look_ms")
    amounts: dict[str, Any] = {name: check_margin(getattr(given, name), name) for name in names}
    amounts["switch_ms"] = max(amounts["switch_ms"], float(getattr(policy, "switch_ms", 0.0)))
    slo = _per_request(given.slo_ms, count, "slo_ms")
    least = float(np.min(slo))
    if least < table.fastest_ms:
        raise TraceError(too_short(least, table))
    asked = _per_request(0.0 if given.floors is None else given.floors, count, "min_accuracy")
    known = Floors(table)
    if float(np.max(asked)) > known.best:
        raise TraceError(f"min_accuracy: {float(np.max(asked))} % is above the best subnet ({known.best} %)")
    if given.clients is not None and len(given.clients) != count:
        raise TraceError(f"clients: {len(given.clients)} names; give one per request ({count})")
    return replace(
        given,
        arrivals_ms=arrivals,
        slo_ms=slo,
        floors=known(asked) if isinstance(asked, float) else known.of_all(asked),
        priority=_per_request(given.priority, count, "priority", least=-(2.0**53)),
        events=_checked_events(given.events, workers),
        **amounts,
    )


def _per_request(values: float | npt.ArrayLike, count: int, name: str, least: float = 0.0) -> float | Floats:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != count):
        raise TraceError(f"{name}: shape {given.shape}; give one number, or one per request ({count})")
    if not np.isfinite(given).all() or given.min() < least:
        raise TraceError(f"{name}: every value must be finite and >= {least:g}")
    return given if given.ndim else float(given)


def _checked_events(events: Sequence[WorkerEvent], workers: int) -> tuple[WorkerEvent, ...]:
    checked = tuple(WorkerEvent(float(t), int(worker), bool(up)) for t, worker, up in events)
    for event in checked:
        if not math.isfinite(event.t_ms) or not 0 <= event.worker < workers:
            raise TraceError(f"events: {event} needs a finite time and a worker from 0 to {workers - 1}")
    return tuple(sorted(checked, key=lambda event: event.t_ms))
