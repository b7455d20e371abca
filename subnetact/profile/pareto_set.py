"""A Pareto set for this device: latencies fitted to subnets measured here, and a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from subnetact.costs.model import CostModel
from subnetact.errors import SpecError
from subnetact.nas.accuracy_predictor import AccuracyPredictor
from subnetact.nas.latency_predictor import FEWEST, LatencyPredictor
from subnetact.nas.search import SearchResult, search
from subnetact.profile.source import ProfileSource, find
from subnetact.spec import SubnetSpec

__all__ = ["Measure", "accuracy_of", "find_pareto_set", "fitted_latencies", "searched_sizes"]

NEVER_MS = 1e12
"""Stands for the latency of a subnet whose memory runs out."""
Measure: TypeAlias = Callable[[Sequence[SubnetSpec], Sequence[int]], Sequence[Sequence[float]]]
"""(subnets, batch sizes) -> measured latencies, ms, a row for each subnet."""


def accuracy_of(
    subject: ProfileSource, given: Sequence[str], predictor: str | None, encoding: str | None
) -> tuple[Callable[[SubnetSpec], float] | None, str]:
    """Return the accuracy of any subnet, percent, and where it is from; None where it is not known.

    Args:
        subject: whose subnets.
        given: one `pkg.mod:factory`, called with the supernet; anything else is no function of a subnet.
        predictor: a checkpoint of once-for-all's accuracy predictor; None = none.
        encoding: what it was trained on; None = the family's own.
    """
    factory = given[0] if len(given) == 1 and ":" in given[0] else None
    if factory:
        return find(factory)(subject.supernet), factory
    if predictor:
        space = subject.supernet.space
        own_size = any(axis.name == "resolution" for axis in space.axes)
        encode = partial(
            import_module("ofa_adapters").encode,
            space,
            image_size=None if own_size else int(subject.example.shape[-1]),
            encoding=encoding,
        )
        return AccuracyPredictor.from_checkpoint(predictor, encode), f"predicted by {Path(predictor).name}"
    return None, "not known"


def searched_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """The batch sizes a search goes by: the smallest and the largest."""
    return sorted({batch_sizes[0], batch_sizes[-1]})


def fitted_latencies(
    subject: ProfileSource, specs: Sequence[SubnetSpec], sizes: Sequence[int], measure: Measure
) -> list[LatencyPredictor]:
    """Measure subnets and fit one latency predictor for each batch size that enough of them ran at.

    Raises:
        SpecError: there is no such batch size.
    """
    costs = CostModel(subject.supernet, subject.example.shape, subject.example.dtype)
    found, ran = [], []
    for size, column in zip(sizes, zip(*measure(specs, sizes), strict=True), strict=True):
        pairs = [(spec, ms) for spec, ms in zip(specs, column, strict=True) if not math.isnan(ms)]
        ran.append(f"{len(pairs)} ran at batch size {size}")
        if len(pairs) >= FEWEST:
            some, latency_ms = zip(*pairs, strict=True)
            found.append(LatencyPredictor.fit(subject.supernet, some, latency_ms, size, costs=costs))
    if not found:
        raise SpecError(
            f"a search's latencies are fitted to at least {FEWEST} measured subnets; of {len(specs)}, "
            f"{', '.join(ran)}. Give smaller --batch-sizes, --search-latency macs, or --subnets all"
        )
    return found


def find_pareto_set(
    subject: ProfileSource,
    accuracy: Callable[[SubnetSpec], float] | None,
    latencies: Sequence[LatencyPredictor],
    size: int,
    evaluations: int,
    seed: int,
    measure: Measure,
    resume: Path,
    progress: bool,
) -> tuple[SearchResult, dict[str, Any]]:
    """Search for subnets that no other beats, spread evenly in latency; return them, and how they were found.

    Without latencies, multiply-accumulates stand in for them; without accuracy, for that. Where both are
    known, chosen subnets are measured before they are trusted.
    """
    sizes = [one.batch_size for one in latencies]

    def remeasure(spec: SubnetSpec) -> list[float]:
        return [NEVER_MS if math.isnan(ms) else ms for ms in measure([spec], sizes)[0]]

    functions: list[Callable[[SubnetSpec], float]] = [*latencies]
    if not functions:
        costs = CostModel(subject.supernet, subject.example.shape, subject.example.dtype)
        functions = [lambda spec: float(costs(spec).macs)]
    result = search(
        subject.supernet,
        accuracy,
        functions,
        size=size,
        evaluations=evaluations,
        seed=seed,
        batch_sizes=sizes or [1],
        input_shape=subject.example.shape,
        remeasure=remeasure if latencies and accuracy is not None else None,
        resume=resume,
        progress=progress,
    )
    facts: dict[str, Any] = {
        "search": result.method,
        "evaluated": len(result.evaluated),
        "search_latency": "multiply-accumulates",
        "measured_before_trusted": result.remeasured,
    }
    if latencies:
        facts["search_latency"] = {f"batch {one.batch_size}": str(one.error) for one in latencies}
    return result, facts
