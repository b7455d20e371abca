"""How many replicas to run: as many as the load needs if no answer may be less accurate than a floor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from subnetact.errors import ServeError
from subnetact.latency.table import LatencyTable

TARGET, RELEASE = 0.7, 0.5
"""The mean load at which a replica is added, and the one that removing a replica may lead to."""


@dataclass(frozen=True)
class Autoscaling:
    """How many replicas to run: accuracy gives way first, down to its floor, and then replicas are added.

    Every replica exports its load: the share of its time that its inputs would take in full batches of the
    fastest subnet that reaches the floor. Replicas are added so that the mean load is at most 0.7, and
    removed if it is then at most 0.5.

    Attributes:
        accuracy_floor: accuracy in percent that the replicas should be able to hold.
        least: least number of replicas.
        most: greatest number of replicas.
        patience_s: how long fewer replicas must have been enough before some are removed, in s.

    Raises:
        ServeError: `least` is below 1 or above `most`.
    """

    accuracy_floor: float
    least: int = 1
    most: int = 8
    patience_s: float = 15.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ServeError(
                f"autoscaling: from {self.least} to {self.most} replicas; give at least 1, and a greatest "
                "number that is not below the least one"
            )


def input_ms_at_floor(table: LatencyTable, slo_ms: float, accuracy_floor: float) -> float:
    """Return the shortest time per input, in ms, of the batches that reach a floor within half of an SLO."""
    reaching = np.array(table.accuracy) >= accuracy_floor
    usable = np.where((table.latency_ms <= slo_ms / 2) & reaching[:, None], table.latency_ms, np.inf)
    found = float((usable / np.array(table.batch_sizes)).min())
    if math.isinf(found):
        raise ServeError(
            f"accuracy_floor: no subnet reaches {accuracy_floor:g} % within half of slo_ms={slo_ms:g}; the "
            f"best has {max(table.accuracy):g} %; give a lower floor or a longer SLO"
        )
    return found


def replicas_needed(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the loads of Ray's `AutoscalingContext` need; Ray bounds them. No state."""
    loads = (context.aggregated_metrics or {}).get("load")
    if not loads:
        return context.target_num_replicas, {}
    load, running = sum(loads.values()), context.target_num_replicas
    needed = math.ceil(load / TARGET)
    if needed < running:  # Loads are measured, so that without a distance replicas would come and go.
        needed = min(running, math.ceil(load / RELEASE))
    return max(1, needed), {}
