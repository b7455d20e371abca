"""Which subnets a search tries next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from subnetact.nas.genes import Variation
from subnetact.nas.state import SearchState
from subnetact.nas.surrogate import Surrogate, promising
from subnetact.pareto import Costs, crowding_distance, non_dominated_ranks
from subnetact.spec import SubnetSpec

__all__ = ["METHODS", "evolve", "exhaust", "sample", "survivors"]

TRIES = 100
"""Children that are no new subnets, in a row, after which a generation ends early."""
SMALL = 1_000_000
"""Subnets up to which a search that finds no new ones by chance looks through all."""
SCREENED = 30
"""Children for each one that is tried."""
LEARNT_FROM = 300
"""Evaluated subnets behind the guess at the others: the population, and the newest."""
CROSSED = 0.9
"""Share of children with two parents."""


def exhaust(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return the next subnets of the whole space."""
    rest = (spec for spec in state.space.enumerate() if spec not in state.found)
    return list(itertools.islice(rest, count))


def sample(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return the smallest and the largest subnet once, and random ones."""
    return _new(state, _sampled(state), count)


def evolve(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return the next generation of NSGA-II (Deb et al., 2002), over the slots of the space.

    The first one is a set of guesses. Parents win tournaments by rank, then by how lonely they are on
    the front; a child takes each choice from one of two parents, as in once-for-all's evolutionary
    search (Cai et al., ICLR'20), and some of its slots move. Of many children those are tried that a
    surrogate expects most of (as in NSGANetV2, Lu et al., ECCV'20); none is tried twice.
    """
    variation = Variation(state.space, state.rng)
    if not state.found:
        return _new(state, variation.guesses(max(3, count // 3)), count)
    children = _new(state, _children(state, variation), SCREENED * count)
    if len(children) <= count:
        return children
    newest = range(len(state.found) - 1, -1, -1)
    telling = list(dict.fromkeys([*state.population, *newest]))[:LEARNT_FROM]
    specs, costs = list(state.found), state.costs()
    known, new = (variation.features(rows) for rows in ([specs[i] for i in telling], children))
    groups = [axis for axis, rows in enumerate(variation.axes) for _ in rows]
    accuracy = Surrogate(known, costs[telling, 0], groups)
    guesses = [accuracy.predict(new)]
    for latency in costs[telling, 1:].T:
        if (latency > 0).all():
            guesses.append(np.exp(Surrogate(known, np.log(latency), groups).predict(new)))
        else:
            guesses.append(Surrogate(known, latency, groups).predict(new))
    picked = promising(np.stack(guesses, 1), accuracy.doubt, costs, count)
    return [children[i] for i in picked]


def survivors(costs: Costs, pool: Sequence[int], count: int) -> list[int]:
    """Return the best `count` of a pool of rows: by rank, then the loneliest."""
    rows = np.array(pool)
    rank = non_dominated_ranks(costs[rows])
    order = np.lexsort((-crowding_distance(costs[rows], rank), rank))
    return [int(i) for i in rows[order[:count]]]


METHODS = {"evolution": evolve, "exhaustive": exhaust, "random": sample}


def _children(state: SearchState, variation: Variation) -> Iterator[SubnetSpec]:
    specs = list(state.found)
    parents = [specs[i] for i in state.population]
    costs = state.costs()[state.population]
    rank = non_dominated_ranks(costs)
    lonely = crowding_distance(costs, rank)

    def parent() -> SubnetSpec:
        one, two = (int(i) for i in state.rng.integers(len(parents), size=2))
        return parents[min(one, two, key=lambda i: (rank[i], -lonely[i]))]

    while True:
        crossed = state.rng.random() < CROSSED
        genes = variation.cross(parent(), parent()) if crossed else variation.genes(parent())
        yield variation.spec(variation.mutate(genes))


def _sampled(state: SearchState) -> Iterator[SubnetSpec]:
    yield state.space.smallest()
    yield state.space.largest()
    while True:
        yield state.space.sample(state.rng)


def _new(state: SearchState, specs: Iterator[SubnetSpec], count: int) -> list[SubnetSpec]:
    new: dict[SubnetSpec, None] = {}
    tries = 0
    while len(new) < count and tries < TRIES:
        spec = next(specs)
        tries += 1
        if spec not in state.found and spec not in new:
            new[spec] = None
            tries = 0
    if new:
        return list(new)
    return exhaust(state, count) if state.space.size() <= SMALL else []
