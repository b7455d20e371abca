"""The validated input of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError, ProfileMismatch, SubnetActError, TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count, check_policy, too_short
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.floors import Floors

__all__ = ["CoRunner", "Scenario", "WorkerEvent", "checked_arrivals", "numeric_arguments"]

Floats = npt.NDArray[np.float64]
MOST_WORKERS = 65_536


@contextmanager
def numeric_arguments() -> Iterator[None]:
    """Translate the errors of arguments that are no numbers, or are too large; also a decorator.

    Raises:
        TraceError: there was such an error inside the block.
    """
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


class CoRunner(NamedTuple):
    """A period in which `number` co-runners use every worker's device.

    Attributes:
        start_ms: when they start.
        end_ms: when they end.
        number: how many co-runners; fractions are interpolated. Periods that overlap add up.
    """

    start_ms: float
    end_ms: float
    number: float


def checked_arrivals(arrivals_ms: npt.ArrayLike) -> Floats:
    """Return arrival times as a float64 array.

    Args:
        arrivals_ms: arrival times, ms, shape (n,).

    Returns:
        The same times, shape (n,).

    Raises:
        TraceError: they are empty, not one-dimensional, not finite, or not ascending.
    """
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
    """Validated input of one simulation.

    Attributes:
        arrivals_ms: arrival times, ms, shape (n,).
        table: the latencies that batches take.
        policy: the policy.
        slo_ms: time from arrival to deadline, ms, one number or shape (n,).
        workers: number of workers.
        floors: what `Floors` makes of the minimum accuracies, percent, one number or shape (n,); 0 accepts
            any subnet.
        noise: standard deviation of the random factor on latencies.
        overhead_ms: time added to every latency, ms.
        switch_ms: time added when a worker changes its subnet, ms.
        events: workers that go down or come up, in order of time.
        co_runners: periods in which co-runners use the devices.
    """

    arrivals_ms: Floats
    table: LatencyTable
    policy: Policy
    slo_ms: float | Floats
    workers: int
    floors: float | Floats
    noise: float
    overhead_ms: float
    switch_ms: float
    events: tuple[WorkerEvent, ...]
    co_runners: tuple[CoRunner, ...]

    @classmethod
    @numeric_arguments()
    def checked(
        cls,
        arrivals_ms: npt.ArrayLike,
        table: LatencyTable,
        policy: Policy,
        slo_ms: float | npt.ArrayLike,
        workers: int,
        min_accuracy: float | npt.ArrayLike | None,
        noise: float,
        overhead_ms: float,
        switch_ms: float,
        events: Sequence[WorkerEvent],
        co_runners: Sequence[CoRunner],
    ) -> Scenario:
        """Validate the input; see `simulate` for arguments and errors."""
        arrivals = checked_arrivals(arrivals_ms)
        check_policy(policy)
        seen = policy.table
        if seen.subnets != table.subnets or seen.batch_sizes != table.batch_sizes:
            raise ProfileMismatch(
                "policy: made for another table (its subnets or batch sizes differ); make it from this one"
            )
        check_count(workers, "workers")
        if workers > MOST_WORKERS:
            raise PolicyError(f"workers: {workers:.3g} are more than {MOST_WORKERS}")
        for name, value in (("noise", noise), ("overhead_ms", overhead_ms), ("switch_ms", switch_ms)):
            if not (math.isfinite(value) and value >= 0):
                raise PolicyError(f"{name}: {value} must be finite and >= 0")
        slo = _per_request(slo_ms, len(arrivals), "slo_ms")
        least = float(np.min(slo))
        if least < table.fastest_ms:
            raise TraceError(too_short(least, table))
        asked = _per_request(0.0 if min_accuracy is None else min_accuracy, len(arrivals), "min_accuracy")
        known = Floors(table)
        if float(np.max(asked)) > known.best:
            raise TraceError(
                f"min_accuracy: {float(np.max(asked))} % is above the best subnet ({known.best} %)"
            )
        floors = known(asked) if isinstance(asked, float) else known.of_all(asked)
        return cls(
            arrivals,
            table,
            policy,
            slo,
            workers,
            floors,
            float(noise),
            float(overhead_ms),
            max(float(switch_ms), float(getattr(policy, "switch_ms", 0.0))),
            _checked_events(events, workers),
            _checked_co_runners(co_runners, table),
        )


def _per_request(values: float | npt.ArrayLike, count: int, name: str) -> float | Floats:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != count):
        raise TraceError(f"{name}: shape {given.shape}; give one number, or one per request ({count})")
    if not np.isfinite(given).all() or given.min() < 0:
        raise TraceError(f"{name}: every value must be finite and >= 0")
    return given if given.ndim else float(given)


def _checked_events(events: Sequence[WorkerEvent], workers: int) -> tuple[WorkerEvent, ...]:
    checked = tuple(WorkerEvent(float(t), int(worker), bool(up)) for t, worker, up in events)
    for event in checked:
        if not math.isfinite(event.t_ms) or not 0 <= event.worker < workers:
            raise TraceError(f"events: {event} needs a finite time and a worker from 0 to {workers - 1}")
    return tuple(sorted(checked, key=lambda event: event.t_ms))


def _checked_co_runners(co_runners: Sequence[CoRunner], table: LatencyTable) -> tuple[CoRunner, ...]:
    checked = tuple(CoRunner(*map(float, runner)) for runner in co_runners)
    for runner in checked:
        if not all(map(math.isfinite, runner)) or runner.end_ms < runner.start_ms or runner.number < 0:
            raise TraceError(f"co_runners: {runner} needs start_ms <= end_ms and a number >= 0")
    if checked and not table.co_runners:
        raise TraceError(
            "co_runners: the table has no co-runner dimension; profile it under co-runners first"
        )
    return checked
