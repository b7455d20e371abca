"""The graph of a pipeline's stages, and how much of a request's time is kept for the stages behind one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from subnetact.errors import PipelineError
from subnetact.latency.table import LatencyTable

__all__ = ["StageGraph", "expected_work_ms"]


class StageGraph:
    """A directed acyclic graph of named stages.

    Args:
        after: for every stage, the stages that feed it, each with whether the edge is conditional, that is,
            whether some requests do not take it. A stage without predecessors gets the pipeline's input.

    Attributes:
        order: the stages; every stage comes after those that feed it.
        sinks: the stages that feed no other.

    Raises:
        PipelineError: there is no stage, a stage follows one that does not exist, or there is a cycle.
    """

    def __init__(self, after: Mapping[str, Mapping[str, bool]]) -> None:
        if not after:
            raise PipelineError("stages: none given; give at least one")
        for stage, feeding in after.items():
            for other in feeding:
                if other not in after:
                    raise PipelineError(
                        f"stage {stage!r}: it follows {other!r}, which is no stage; choose from "
                        f"{', '.join(map(repr, after))}"
                    )
        self.after = {stage: dict(feeding) for stage, feeding in after.items()}
        self.following: dict[str, dict[str, bool]] = {stage: {} for stage in after}
        for stage, feeding in self.after.items():
            for other, conditional in feeding.items():
                self.following[other][stage] = conditional
        self.order = self._sorted()
        self.sinks = tuple(stage for stage in self.order if not self.following[stage])

    def _sorted(self) -> tuple[str, ...]:
        done: dict[str, None] = {}
        waiting = list(self.after)
        while waiting:
            free = [stage for stage in waiting if all(other in done for other in self.after[stage])]
            if not free:
                cycle = [waiting[0]]
                while cycle[-1] not in cycle[:-1]:
                    cycle.append(next(other for other in self.after[cycle[-1]] if other not in done))
                shown = " after ".join(map(repr, cycle[cycle.index(cycle[-1]) :]))
                raise PipelineError(f"stages: there is a cycle, {shown}; leave one of these edges out")
            done.update(dict.fromkeys(free))
            waiting = [stage for stage in waiting if stage not in done]
        return tuple(done)

    def tails(self, work_ms: Mapping[str, float], always: bool = False) -> dict[str, float]:
        """Return for every stage the work on the longest path behind it, the stage itself left out.

        Args:
            work_ms: the work of every stage, ms.
            always: whether to count only edges that every request takes.

        Returns:
            The work behind every stage, ms.
        """
        behind: dict[str, float] = {}
        for stage in reversed(self.order):
            behind[stage] = max(
                (
                    work_ms[other] + behind[other]
                    for other, conditional in self.following[stage].items()
                    if not (always and conditional)
                ),
                default=0.0,
            )
        return behind

    def longest_ms(self, work_ms: Mapping[str, float], always: bool = False) -> float:
        """Return the work on the longest path through the pipeline; see `tails` for the arguments."""
        behind = self.tails(work_ms, always)
        return max(work_ms[stage] + behind[stage] for stage in self.order if not self.after[stage])

    def reserves(self, work_ms: Mapping[str, float]) -> dict[str, float]:
        """Return for every stage the share of a request's time that is kept for the stages behind it.

        The time is split in proportion to the work, so that a request that has the usual time everywhere
        meets its deadline. The slack at a stage is what is left of the request's time minus this share.

        Args:
            work_ms: the expected work of every stage, ms, > 0.

        Returns:
            A number from 0 to below 1 for every stage; 0 for the last ones.
        """
        longest = self.longest_ms(work_ms)
        return {stage: tail / longest for stage, tail in self.tails(work_ms).items()}


def expected_work_ms(table: LatencyTable, inputs: float = 1.0) -> float:
    """Return the time that a stage is expected to need for one request when nothing else runs, ms.

    Args:
        table: the latencies of the stage.
        inputs: how many inputs a request typically has at this stage.

    Returns:
        The median over the subnets, for batches as large as the inputs permit.
    """
    most = table.batch_sizes[-1]
    column = table.batch_sizes.index(table.padded(max(1, min(most, round(inputs)))))
    rows = table.latency_ms[:, column:]
    times = [row[~np.isnan(row)][0] for row in rows if not np.isnan(row).all()]
    one = float(np.median(times)) if times else float(np.nanmax(table.latency_ms))
    return one * max(1.0, inputs / most)
