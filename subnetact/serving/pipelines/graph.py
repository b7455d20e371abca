"""The graph of a pipeline's stages, and how much of a request's time is kept for the stages behind one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from subnetact.errors import PipelineError
from subnetact.latency.table import LatencyTable


class StageGraph:
    """A directed acyclic graph of named stages; in `order`, every stage comes after those that feed it.

    `after` has for every stage those that feed it; with each, what is true if some requests do not take the
    edge, for example its condition.
    """

    def __init__(self, after: Mapping[str, Mapping[str, Any]]) -> None:
        self.after = after
        feeding = {other for edges in after.values() for other in edges}
        if unknown := feeding - after.keys():
            known = ", ".join(map(repr, after))
            raise PipelineError(f"stages: one follows {unknown.pop()!r}, which is none; choose from {known}")
        try:
            self.order = tuple(TopologicalSorter(after).static_order())
        except CycleError as error:
            shown = " before ".join(map(repr, error.args[1]))
            raise PipelineError(f"stages: there is a cycle, {shown}; leave one of these edges out") from error
        self.sources = tuple(stage for stage in self.order if not after[stage])
        self.sinks = tuple(stage for stage in self.order if stage not in feeding)

    def tails(self, work_ms: Mapping[str, float], always: bool = False) -> dict[str, float]:
        """Return the work on the longest path behind every stage; `always`: on edges that all take only."""
        behind = dict.fromkeys(self.order, 0.0)
        for stage in reversed(self.order):
            for other, conditional in self.after[stage].items():
                if not (always and conditional):
                    behind[other] = max(behind[other], work_ms[stage] + behind[stage])
        return behind

    def reserves(self, tables: Mapping[str, LatencyTable], inputs: Mapping[str, float]) -> dict[str, float]:
        """Return for every stage the share of a request's time that is kept for those behind it, below 1.

        `inputs` is how many inputs a request has at every stage.
        """
        work_ms = {stage: expected_work_ms(table, inputs[stage]) for stage, table in tables.items()}
        tails = self.tails(work_ms)
        longest = max(work_ms[stage] + tails[stage] for stage in self.sources)
        return {stage: tail / longest for stage, tail in tails.items()}

    def least_ms(self, tables: Mapping[str, LatencyTable], slo_ms: float = math.inf) -> dict[str, float]:
        """Return the least time from every stage to the end, ms; refuse an SLO below that of the pipeline."""
        fastest_ms = {stage: table.fastest_ms for stage, table in tables.items()}
        least = {stage: fastest_ms[stage] + tail for stage, tail in self.tails(fastest_ms, True).items()}
        shortest = max(least[stage] for stage in self.sources)
        if slo_ms < shortest:
            raise PipelineError(
                f"slo_ms: {slo_ms:g} is shorter than the shortest path through the stages ({shortest:.3g} ms "
                "on the fastest hardware); allow more"
            )
        return least


def expected_work_ms(table: LatencyTable, inputs: float = 1.0) -> float:
    """Return the median time of a stage's subnets for one request alone, with this many inputs, ms."""
    most = table.batch_sizes[-1]
    rows = table.latency_ms[:, table.pad_index[max(1, min(most, round(inputs)))] :]
    times = [row[~np.isnan(row)][0] for row in rows if not np.isnan(row).all()]
    return float(np.median(times) if times else np.nanmax(table.latency_ms)) * max(1.0, inputs / most)
