"""How a sweep measures its cells."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from subnetact.errors import TableError
from subnetact.profile.stability import quantile_name

__all__ = ["ORDERS", "SweepSettings"]

ORDERS = ("interleaved", "sequential")


@dataclass(frozen=True)
class SweepSettings:
    """How cells are measured.

    Attributes:
        warmup_ms: untimed running before each window.
        min_time_ms: timed running of a cell, over its first `windows` windows.
        windows: how many windows every cell gets, at different times.
        max_windows: how many one gets whose median is not known well enough.
        stability: how well it must be: half the width of its 90 % interval, relative. Needs five windows.
        order: `interleaved` comes back to a cell after all others had their turn, so that a machine that
            drifts does so for all of them; `sequential` measures a cell to its end.
        quantiles: percent, kept beside mean, std and min.
        statistic: which one becomes `latency_ms`: mean or one of the quantiles, p90 for example.
        co_runners: numbers of co-runners to measure under as well, ascending.
        co_runner_subnet: index of the subnet that co-runners run.

    Raises:
        TableError: a setting that no table can be made with.
    """

    warmup_ms: float = 20.0
    min_time_ms: float = 100.0
    windows: int = 5
    max_windows: int = 5
    stability: float = 0.05
    order: str = "interleaved"
    quantiles: tuple[float, ...] = (50, 90, 95, 99)
    statistic: str = "p50"
    co_runners: tuple[int, ...] = ()
    co_runner_subnet: int = 0

    def __post_init__(self) -> None:
        known = ["mean", *map(quantile_name, self.quantiles)]
        if self.statistic not in known:
            raise TableError(f"statistic: {self.statistic!r} is unknown; choose from {', '.join(known)}")
        if not self.quantiles or not all(0 < q < 100 for q in self.quantiles):
            raise TableError(f"quantiles: {list(self.quantiles)} must be between 0 and 100, at least one")
        if self.order not in ORDERS:
            raise TableError(f"order: {self.order!r} is unknown; choose from {', '.join(ORDERS)}")
        if not 1 <= self.windows <= self.max_windows:
            raise TableError(
                f"windows: {self.windows} must be at least 1 and at most max_windows, {self.max_windows}"
            )
        for name in ("warmup_ms", "min_time_ms", "stability"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TableError(f"{name}: {getattr(self, name)} must be finite and >= 0")
        if self.co_runner_subnet and not self.co_runners:
            raise TableError("co_runner_subnet: there are no co-runners; give --co-runners too")
        if list(self.co_runners) != sorted(set(self.co_runners)) or any(n < 1 for n in self.co_runners):
            raise TableError(f"co_runners: {list(self.co_runners)} must be ascending numbers >= 1")

    def to_json(self) -> dict[str, Any]:
        """The settings as plain lists, strings and numbers."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
