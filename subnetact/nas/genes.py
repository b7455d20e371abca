"""The genes of a subnet: populations, crossover and mutation in any space, and features for predictors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from subnetact.latency.arrays import Floats
from subnetact.space import Slot, SubnetSpace
from subnetact.spec import SubnetSpec

Genes: TypeAlias = list[int]
"""For each slot of each axis, the position of its choice, from the smallest network to the largest."""

INITIAL_DEVIATION = 0.3
"""Standard deviation of the choices of a random initial subnet, as a share of the number of choices."""


class Variation:
    """Crossover and mutation; every subnet that they make is legal."""

    def __init__(self, space: SubnetSpace, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng
        self.counts = [len(slot.choices) for axis in space.axes for slot in axis.slots]

    def spec(self, genes: Sequence[int]) -> SubnetSpec:
        """Return the subnet of the genes. Genes of slots that the subnet skips are ignored."""
        rest = iter(genes)
        return self.space.chosen(lambda choices: choices[next(rest)])

    def genes(self, spec: SubnetSpec) -> Genes:
        """Return the genes of a subnet. Genes of slots that the subnet skips are drawn at random."""
        return [
            int(self.rng.integers(len(slot.choices))) if value is None else slot.choices.index(value)
            for slot, value in _chosen(self.space, spec)
        ]

    def initial(self, levels: int) -> Iterator[SubnetSpec]:
        """Yield without end what a search begins with: even levels, every axis alone, random ones."""
        for level in (0.0, 1.0, *np.linspace(0, 1, levels)[1:-1]):
            yield self.spec([round(level * (count - 1)) for count in self.counts])
        axes = self.space.axes
        for axis in axes:
            for inside, outside in ((0, -1), (-1, 0)):
                yield self.spec([inside if other is axis else outside for other in axes for _ in other.slots])
        while True:
            level = self.rng.uniform()
            share = np.clip(level + INITIAL_DEVIATION * self.rng.standard_normal(len(self.counts)), 0, 1)
            yield self.spec([round(s * (count - 1)) for s, count in zip(share, self.counts, strict=True)])

    def cross(self, one: SubnetSpec, two: SubnetSpec) -> Genes:
        """Return the genes of a child that takes each gene from either parent (uniform crossover)."""
        first, second = self.genes(one), self.genes(two)
        from_first = self.rng.random(len(first)) < 0.5
        return [a if take else b for a, b, take in zip(first, second, from_first, strict=True)]

    def mutate(self, genes: Genes) -> Genes:
        """Return a copy of the genes with at least one gene moved, if any slot has two choices."""
        genes = list(genes)
        movable = [i for i, count in enumerate(self.counts) if count > 1]
        if not movable:
            return genes
        moved = self.rng.random(len(movable)) < 1 / len(movable)
        moved[int(self.rng.integers(len(movable)))] = True
        for i in np.array(movable)[moved]:
            other = int(self.rng.integers(self.counts[i] - 1))
            genes[i] = other + (other >= genes[i])
        return genes


def encoded(space: SubnetSpace, specs: Sequence[SubnetSpec]) -> Floats:
    """Return what describes subnets to a surrogate, (subnets, choices of all slots).

    A choice has a 1 if the subnet takes it or a larger one of the slot, otherwise a 0; all choices of a slot
    that the subnet skips have a 0. So choices are the closer the fewer are between them, and no law of their
    values is assumed.
    """

    def features(spec: SubnetSpec) -> list[float]:
        taken = ((slot.choices, value) for slot, value in _chosen(space, spec))
        return [float(v in choices[i:]) for choices, v in taken for i in range(len(choices))]

    return np.array([features(spec) for spec in specs])


def _chosen(space: SubnetSpace, spec: SubnetSpec) -> Iterator[tuple[Slot, Any]]:
    """Yield every slot with what a subnet has there; None if it skips the slot."""
    slots = (slot for axis in space.axes for slot in axis.slots)
    yield from zip(slots, chain.from_iterable(space.values(spec).values()), strict=True)
