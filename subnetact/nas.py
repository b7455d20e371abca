"""Candidate search: which subnets are worth serving."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

from subnetact.errors import SpecError
from subnetact.pareto import pareto_front
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet

__all__ = ["Candidate", "search"]


@dataclass(frozen=True)
class Candidate:
    """A subnet with what it gains and what it costs."""

    spec: SubnetSpec
    accuracy: float
    latency_ms: float


def search(
    supernet: Supernet,
    accuracy: Callable[[SubnetSpec], float],
    latency: Callable[[SubnetSpec], float],
    budget: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> list[Candidate]:
    """Evaluate up to `budget` subnets and return the Pareto-optimal ones, in ascending latency.

    A space no larger than the budget is searched exhaustively; of a larger one the smallest, the
    largest and random subnets are tried.

    Args:
        supernet: whose space to search; it is not changed.
        accuracy: percent of a subnet, by evaluation or by a predictor.
        latency: milliseconds of a subnet at the batch size that matters, measured or predicted.
        budget: how many subnets to evaluate, at least 2.
        seed: of the random subnets.
        progress: whether to show a progress bar.

    Raises:
        SpecError: the budget is below 2.
    """
    if budget < 2:
        raise SpecError(f"budget: {budget} subnets cannot make a front; give at least 2")
    space = supernet.space
    if space.size() <= budget:
        specs = list(space.enumerate())
    else:
        rng = random.Random(seed)
        found = dict.fromkeys([space.smallest(), space.largest()])
        while len(found) < budget:
            found[space.sample(rng)] = None
        specs = list(found)
    candidates = [
        Candidate(spec, float(accuracy(spec)), float(latency(spec)))
        for spec in tqdm(specs, desc="searching", disable=not progress)
    ]
    return pareto_front(candidates, cost=lambda c: c.latency_ms, gain=lambda c: c.accuracy)
