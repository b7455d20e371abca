"""Coarse: model switching by workers that must load a model before they run it."""

from __future__ import annotations

from subnetact.latency.table import LatencyTable
from subnetact.serving import ModelSwitching
from subnetact.serving.scheduling.checks import check_margin

__all__ = ["Coarse"]


class Coarse(ModelSwitching):
    """Decides as `ModelSwitching` does; every worker that changes its subnet is busy for `delay_ms`.

    Source:
        The coarse-grained switching of SuperServe (NSDI'25, Fig. 1).
    """

    def __init__(self, table: LatencyTable, slo_ms: float, delay_ms: float = 100.0) -> None:
        super().__init__(table, slo_ms)
        self.switch_ms = check_margin(delay_ms, "delay_ms")
