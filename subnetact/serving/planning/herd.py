"""`group_streams`: which streams of requests share which workers (the algorithm HERD of Shepherd)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite

import numpy as np

from subnetact.errors import PolicyError, TraceError, extra_needed
from subnetact.latency.arrays import Floats
from subnetact.serving.scheduling.checks import check_count

TIME_LIMIT_S = 10.0  # of one integer program
STEPS = 1024  # so many headrooms are told apart


@dataclass(frozen=True)
class Stream:
    """The requests of one user for one model.

    Attributes:
        rate_qps: mean rate, requests per second.
        capacity_qps: how many of these requests one worker answers per second within the SLO.
        memory_mb: memory, MiB, that the model takes on every worker of its group.

    Raises:
        TraceError: a value is negative or not finite, or the capacity is 0.
    """

    rate_qps: float
    capacity_qps: float
    memory_mb: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isfinite(value) and value >= 0):
                raise TraceError(f"stream.{name}: {value} must be finite and >= 0")
        if self.capacity_qps <= 0:
            raise TraceError(f"stream.capacity_qps: {self.capacity_qps} must be > 0")

    @property
    def load(self) -> float:
        """Number of workers that the stream keeps busy on average."""
        return self.rate_qps / self.capacity_qps


@dataclass(frozen=True)
class Grouping:
    """An assignment of streams to groups and of workers to groups.

    Attributes:
        group_of: for each stream, its group.
        workers: for each group, its number of workers.
        headroom: the least ratio of workers to load over the groups; inf if there is no load.
    """

    group_of: tuple[int, ...]
    workers: tuple[int, ...]
    headroom: float


def group_streams(streams: Sequence[Stream], workers: int, groups: int, memory_mb: float = inf) -> Grouping:
    """Assign streams to groups and workers to groups so that the least ratio of workers to load is greatest.

    Every stream is in one group, the numbers of workers are whole, and the models of a group fit into the
    memory of one worker. The greatest possible ratio is found by bisection over integer programs, because a
    program in which it is a variable is not linear. HiGHS solves them; it needs scipy (the extra `plan`).

    Args:
        streams: the streams; at least one.
        workers: number of workers to assign.
        groups: the greatest number of groups; empty groups get no worker.
        memory_mb: memory of one worker, MiB.

    Returns:
        The assignment.

    Raises:
        TraceError: there are no streams.
        PolicyError: a setting is out of range, or no assignment fits the memory.
        MissingExtra: scipy is not installed.

    Source:
        Shepherd (NSDI'23, section 4.1).
    """
    if not streams:
        raise TraceError("streams: empty; give at least one")
    check_count(workers, "workers")
    check_count(groups, "groups")
    loads = np.array([stream.load for stream in streams])
    sizes = np.array([stream.memory_mb for stream in streams])
    solve = partial(_solve, loads, sizes, workers, groups, memory_mb)
    total_load = float(loads.sum())
    step = (
        workers / total_load / STEPS if total_load > 0 else 0.0
    )  # no assignment has a greater headroom than all steps
    reached = bisect_left(range(1, STEPS + 1), True, key=lambda number: solve(number * step) is None)
    found = solve(reached * step)
    if found is None:
        raise PolicyError(f"memory_mb: {memory_mb} per worker does not hold the streams in {groups} groups")
    group_of, share = found
    used = np.bincount(group_of, weights=loads, minlength=groups).tolist()
    headroom = min((count / load for count, load in zip(share, used, strict=True) if load > 0), default=inf)
    return Grouping(tuple(group_of), tuple(share), float(headroom))


def _solve(
    loads: Floats, sizes: Floats, workers: int, groups: int, memory_mb: float, headroom: float
) -> tuple[list[int], list[int]] | None:
    """Return (group of each stream, workers of each group) with at least `headroom`, or None.

    The variables of the program are x[stream, group], which is 1 if the stream is in the group, and then
    workers[group].
    """
    with extra_needed("group_streams needs scipy; pip install 'subnetact[plan]'"):
        from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(loads)
    each, every, none = np.eye(count), np.eye(groups), np.zeros((count, groups))
    one_group = np.hstack([np.kron(each, np.ones(groups)), none])
    room = np.hstack([np.kron(-headroom * loads, every), every])
    memory = np.hstack([np.kron(sizes, every), np.zeros((groups, groups))])
    total = np.concatenate([np.zeros(count * groups), np.ones(groups)])
    constraints = [
        LinearConstraint(one_group, 1, 1),
        LinearConstraint(room, 0, np.inf),
        LinearConstraint(total, workers, workers),
        LinearConstraint(memory, -np.inf, memory_mb),
    ]
    # Groups are interchangeable. That stream i is in a group <= i breaks the symmetry.
    upper = np.concatenate([np.tri(count, groups).ravel(), np.full(groups, workers)])
    answer = milp(
        np.zeros(len(upper)),
        constraints=constraints,
        integrality=np.ones(len(upper)),
        bounds=Bounds(0, upper),
        options={"time_limit": TIME_LIMIT_S},
    )
    if answer.x is None:
        return None
    chosen = np.round(answer.x).astype(int)
    group_of = chosen[: count * groups].reshape(count, groups).argmax(axis=1)
    return group_of.tolist(), chosen[count * groups :].tolist()
