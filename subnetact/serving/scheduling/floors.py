"""Minimum accuracies: which of them a latency table can tell apart."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError, SubnetActError
from subnetact.latency.table import LatencyTable

NO_FLOOR = 0.0


class Floors:
    """Replaces a minimum accuracy by the accuracy of the least accurate subnet that meets it.

    Both are met by the same subnets. So there are no more different floors than subnets, whatever numbers
    clients give, and what is planned for a floor is planned for all that mean the same.
    `accuracies` are those that answers may have, percent, ascending, each once, and `best` is the greatest.
    Subnets that can run at no batch size do not count.
    """

    def __init__(self, table: LatencyTable) -> None:
        rows = zip(table.known_accuracy(), table.latency_ms.tolist(), strict=True)
        known = {percent for percent, row in rows if any(ms == ms for ms in row)}
        self.best = max(known, default=-math.inf)
        self.accuracies = sorted(known)

    def __call__(self, min_accuracy: float) -> float:
        """Return the floor of a minimum accuracy, percent; `NO_FLOOR` if every answer meets it."""
        at = self.at(min_accuracy)
        return self.accuracies[at] if at else NO_FLOOR

    def of_all(self, min_accuracies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the floors of several minimum accuracies, percent, none of them above `best`."""
        steps = np.array([NO_FLOOR, *self.accuracies[1:]])
        return steps[np.searchsorted(self.accuracies, min_accuracies)]

    def unreachable(self, min_accuracy: float, kind: type[SubnetActError] = PolicyError) -> SubnetActError:
        """Return the error for a minimum accuracy, percent, that no subnet has."""
        above = f"above the best subnet ({self.best:g} %)"
        return kind(f"min_accuracy: no subnet reaches {min_accuracy} %, which is {above}; ask for less")

    def at(self, min_accuracy: float) -> int:
        """Return the position among `accuracies` of the least one that is at least `min_accuracy`."""
        at = bisect_left(self.accuracies, min_accuracy)
        if at == len(self.accuracies):
            raise self.unreachable(min_accuracy)
        return at
