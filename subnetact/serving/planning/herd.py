"""HERD: which streams of requests share which workers (Shepherd, NSDI'23, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subnetact.errors import PolicyError, TraceError
from subnetact.serving.scheduling.checks import check_count

__all__ = ["Grouping", "Stream", "group_streams"]


@dataclass(frozen=True)
class Stream:
    """Requests of one user for one model.

    Attributes:
        rate_qps: mean rate.
        capacity_qps: what one worker serves of it within its SLO.
        cv2: squared coefficient of variation of its gaps; more bursty streams need more room.
        memory_mb: what its model takes on a worker that may serve it.
    """

    rate_qps: float
    capacity_qps: float
    cv2: float = 1.0
    memory_mb: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise TraceError(f"stream.{name}: {value} must be finite and >= 0")
        if self.capacity_qps <= 0:
            raise TraceError(f"stream.capacity_qps: {self.capacity_qps} must be > 0")

    @property
    def load(self) -> float:
        """Workers it keeps busy on average."""
        return self.rate_qps / self.capacity_qps


@dataclass(frozen=True)
class Grouping:
    """Group of each stream, workers of each group, and the least ratio of workers to load over the groups."""

    group_of: tuple[int, ...]
    workers: tuple[int, ...]
    headroom: float


def group_streams(
    streams: Sequence[Stream],
    workers: int,
    groups: int,
    memory_mb: float = math.inf,
    burst_weight: float = 0.0,
    time_limit_s: float = 10.0,
) -> Grouping:
    """Assign streams to groups and workers to groups so that the least provisioned group has the most room.

    A small integer program, solved by HiGHS: every stream in one group, the workers shared out in whole
    numbers, the models of a group's streams within one worker's memory, and at least `headroom` times the
    group's load in workers, with `headroom` maximised by bisection over feasible programs. Needs scipy
    (the extra `plan`).

    Args:
        streams: at least one.
        workers: to share out.
        groups: at most so many groups; empty ones get no worker.
        memory_mb: of one worker.
        burst_weight: a stream's load counts as load + burst_weight * sqrt(cv2 * load).
        time_limit_s: for each program.

    Raises:
        TraceError: no streams.
        PolicyError: a setting out of range, or no grouping fits the memory.
    """
    if not streams:
        raise TraceError("streams: empty; give at least one")
    check_count(workers, "workers")
    check_count(groups, "groups")
    loads = np.array([stream.load + burst_weight * math.sqrt(stream.cv2 * stream.load) for stream in streams])
    sizes = np.array([stream.memory_mb for stream in streams])
    found = _solve(loads, sizes, workers, groups, memory_mb, 0.0, time_limit_s)
    if found is None:
        raise PolicyError(f"memory_mb: {memory_mb} per worker does not hold the streams in {groups} groups")
    low = 0.0
    high = workers / float(loads.sum()) if loads.sum() > 0 else math.inf
    if math.isfinite(high):
        exact = _solve(loads, sizes, workers, groups, memory_mb, high * (1 - 1e-9), time_limit_s)
        if exact is not None:
            found, low = exact, high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            better = _solve(loads, sizes, workers, groups, memory_mb, middle, time_limit_s)
            if better is None:
                high = middle
            else:
                found, low = better, middle
    group_of, share = found
    used = [sum(loads[i] for i, group in enumerate(group_of) if group == j) for j in range(groups)]
    rooms = [share[j] / used[j] for j in range(groups) if used[j] > 0]
    return Grouping(tuple(group_of), tuple(share), float(min(rooms, default=math.inf)))


def _solve(
    loads: np.ndarray[tuple[int], np.dtype[np.float64]],
    sizes: np.ndarray[tuple[int], np.dtype[np.float64]],
    workers: int,
    groups: int,
    memory_mb: float,
    headroom: float,
    time_limit_s: float,
) -> tuple[list[int], list[int]] | None:
    """A grouping with at least `headroom`, or None; variables x[stream, group], then workers[group]."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(loads)
    in_group = count * groups
    one_group = np.zeros((count, in_group + groups))
    for i in range(count):
        one_group[i, i * groups : (i + 1) * groups] = 1
    room = np.zeros((groups, in_group + groups))
    memory = np.zeros((groups, in_group + groups))
    for j in range(groups):
        room[j, j:in_group:groups] = -headroom * loads
        room[j, in_group + j] = 1
        memory[j, j:in_group:groups] = sizes
    total = np.zeros((1, in_group + groups))
    total[0, in_group:] = 1
    constraints = [
        LinearConstraint(one_group, 1, 1),
        LinearConstraint(room, 0, np.inf),
        LinearConstraint(total, workers, workers),
    ]
    if math.isfinite(memory_mb):
        constraints.append(LinearConstraint(memory, -np.inf, memory_mb))
    upper = np.concatenate([np.ones(in_group), np.full(groups, workers)])
    # Streams of equal kind are interchangeable: stream i goes to group <= i, which breaks the symmetry.
    for i in range(min(count, groups)):
        upper[i * groups + i + 1 : (i + 1) * groups] = 0
    answer = milp(
        np.zeros(in_group + groups),
        constraints=constraints,
        integrality=np.ones(in_group + groups),
        bounds=Bounds(0, upper),
        options={"time_limit": time_limit_s},
    )
    if answer.x is None:
        return None
    chosen = np.round(answer.x).astype(int)
    return [int(chosen[i * groups : (i + 1) * groups].argmax()) for i in range(count)], chosen[
        in_group:
    ].tolist()
