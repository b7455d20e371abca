"""The methods of a search, which propose what to evaluate: evolution with a surrogate, random, exhaustive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import TypeAlias

import numpy as np

from subnetact.latency.pareto import Costs, non_dominated
from subnetact.nas.genes import Variation, encoded
from subnetact.nas.surrogate import Surrogate, select_by_expected_improvement
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

Objectives: TypeAlias = tuple[float, ...]
"""The accuracy in percent, which is maximised, then the latencies in ms, which are minimised."""

MOST_FRUITLESS_TRIES = 100
"""A generation ends early after this many consecutive children that were evaluated before."""
ENUMERABLE_SPACE = 1_000_000
"""The most subnets of a space that an exhaustive search takes, or one that finds no new ones by chance."""
CHILDREN_PER_EVALUATION = 30
"""Children that the surrogate compares for each child that is evaluated."""
COMPARED_SPACE = 2_000
"""The most subnets of a space that the surrogate compares all in every generation, without children."""
LARGEST_TRAINING_SET = 300
"""Evaluated subnets that the surrogate is fitted to, at most: the Pareto front, then the newest ones."""
CROSSED_SHARE = 0.9
"""Share of children with two parents. The others have one."""


class SearchState:
    """A search between two generations; `found` is in order of evaluation."""

    def __init__(self, space: SubnetSpace, seed: int) -> None:
        self.space = space
        self.rng = np.random.default_rng(seed)
        self.found: dict[SubnetSpec, Objectives] = {}

    def costs(self) -> Costs:
        """Return what to minimise, (subnets, objectives): the negated accuracy, then the latencies."""
        points = np.array(list(self.found.values()), dtype=np.float64)
        points[:, 0] *= -1
        return points


def exhaust(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return up to `count` new subnets in the order of the space."""
    rest = (spec for spec in state.space.enumerate() if spec not in state.found)
    return list(islice(rest, count))


def sample(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return up to `count` new random subnets; a search begins with the smallest and the largest one."""
    ends = state.space.smallest(), state.space.largest()
    return _new(state, chain(ends, map(state.space.sample, repeat(state.rng))), count)


def evolve(state: SearchState, count: int, surrogate: bool = True) -> list[SubnetSpec]:
    """Return up to `count` new children of the Pareto front, selected by a surrogate unless it is False.

    In a small space the surrogate selects among all that is left.
    """
    variation = Variation(state.space, state.rng)
    if not state.found:
        return _new(state, variation.initial(max(3, count // 3)), count)
    specs, costs = list(state.found), state.costs()
    front = state.rng.permutation(non_dominated(costs))  # It may have more than the training set takes.
    if surrogate and state.space.size() <= COMPARED_SPACE:
        candidates = exhaust(state, COMPARED_SPACE)
    else:
        bred = _children(variation, [specs[i] for i in front])
        candidates = _new(state, bred, CHILDREN_PER_EVALUATION * count if surrogate else count)
    if len(candidates) <= count:
        return candidates
    newest = range(len(state.found) - 1, -1, -1)
    training_set = list(dict.fromkeys([*front, *newest]))[:LARGEST_TRAINING_SET]
    known, new = (encoded(state.space, some) for some in ([specs[i] for i in training_set], candidates))
    accuracy = Surrogate(known, costs[training_set, 0])
    predicted = [accuracy.predict(new)]
    for latency in costs[training_set, 1:].T:
        scale, inverse = (np.log, np.exp) if (latency > 0).all() else (np.positive, np.positive)
        predicted.append(inverse(Surrogate(known, scale(latency)).predict(new)))
    selected = select_by_expected_improvement(np.stack(predicted, 1), accuracy.loo_rmse, costs, count)
    return [candidates[i] for i in selected]


METHODS: dict[str, Callable[[SearchState, int], list[SubnetSpec]]]
METHODS = {"evolution": evolve, "exhaustive": exhaust, "random": sample}


def _children(variation: Variation, parents: Sequence[SubnetSpec]) -> Iterator[SubnetSpec]:
    rng = variation.rng
    while True:
        one, two = (parents[i] for i in rng.integers(len(parents), size=2))
        genes = variation.cross(one, two) if rng.random() < CROSSED_SHARE else variation.genes(one)
        yield variation.spec(variation.mutate(genes))


def _new(state: SearchState, specs: Iterator[SubnetSpec], count: int) -> list[SubnetSpec]:
    """Return the first `count` distinct subnets of an endless iterator that were not evaluated before."""
    new: dict[SubnetSpec, None] = {}
    tries = 0
    while len(new) < count and tries < MOST_FRUITLESS_TRIES:
        spec = next(specs)
        tries += 1
        if spec not in state.found and spec not in new:
            new[spec] = None
            tries = 0
    if new:
        return list(new)
    return exhaust(state, count) if state.space.size() <= ENUMERABLE_SPACE else []
