"""New subnets from old ones: legal mutations, crossovers and first guesses in any space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

__all__ = ["Variation"]

Genes: TypeAlias = list[int]
"""For each slot of each axis, the position of its choice, from the smallest network to the largest."""

Features: TypeAlias = npt.NDArray[np.float64]

SKIPPED = -0.5
LOCAL = 0.5
"""Share of mutated genes that move to a neighbouring choice; the others move anywhere."""
SHIFT = 0.15
"""Share of mutations that move all slots of one axis by one choice instead of a few slots."""
JITTER = 0.3
"""How far a guess of a given size strays from it, as a share of the choices."""


class Variation:
    """Draws subnets of a space; every one is canonical and legal.

    Args:
        space: the space.
        rng: decides everything.
    """

    def __init__(self, space: SubnetSpace, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng
        self.slots = [slot for axis in space.axes for slot in axis.slots]
        self.counts = [len(slot.choices) for slot in self.slots]
        ends = np.cumsum([len(axis.slots) for axis in space.axes])
        self.axes = [range(end - len(a.slots), end) for a, end in zip(space.axes, ends, strict=True)]

    def spec(self, genes: Sequence[int]) -> SubnetSpec:
        """Return the subnet of the genes; those of slots it skips do not matter."""
        values = [slot.choices[gene] for slot, gene in zip(self.slots, genes, strict=True)]
        named = zip(self.space.axes, self.axes, strict=True)
        return self.space.spec(**{axis.name: values[rows.start : rows.stop] for axis, rows in named})

    def genes(self, spec: SubnetSpec) -> Genes:
        """Return the genes of a subnet, drawn at random in slots that it skips."""
        values = [value for axis in self.space.axes for value in spec[axis.name]]
        return [
            int(self.rng.integers(len(slot.choices))) if value is None else slot.choices.index(value)
            for slot, value in zip(self.slots, values, strict=True)
        ]

    def features(self, specs: Sequence[SubnetSpec]) -> Features:
        """Return where each slot is between its choices, 0 to 1, and below 0 where it is skipped."""
        rows = [[value for axis in self.space.axes for value in spec[axis.name]] for spec in specs]
        return np.array(
            [
                [
                    SKIPPED if value is None else slot.choices.index(value) / max(count - 1, 1)
                    for slot, count, value in zip(self.slots, self.counts, row, strict=True)
                ]
                for row in rows
            ]
        )

    def guesses(self, levels: int) -> Iterator[SubnetSpec]:
        """Yield subnets to begin with, without end.

        First the smallest and the largest, then those in between with every slot at the same level,
        then the largest with one axis at its smallest and the reverse, then others of random size.
        """
        for level in (0.0, 1.0, *np.linspace(0, 1, levels)[1:-1]):
            yield self.spec([round(level * (count - 1)) for count in self.counts])
        for rows in self.axes:
            for inside, outside in ((0, 1), (1, 0)):
                ends = [inside if i in rows else outside for i in range(len(self.counts))]
                yield self.spec([end * (count - 1) for end, count in zip(ends, self.counts, strict=True)])
        while True:
            level = self.rng.uniform()
            share = np.clip(level + JITTER * self.rng.standard_normal(len(self.counts)), 0, 1)
            yield self.spec([round(s * (count - 1)) for s, count in zip(share, self.counts, strict=True)])

    def cross(self, one: SubnetSpec, two: SubnetSpec) -> Genes:
        """Take each gene from either parent."""
        first, second = self.genes(one), self.genes(two)
        from_first = self.rng.random(len(first)) < 0.5
        return [a if take else b for a, b, take in zip(first, second, from_first, strict=True)]

    def mutate(self, genes: Genes) -> Genes:
        """Move at least one gene, where any can move."""
        genes = list(genes)
        movable = [i for i, count in enumerate(self.counts) if count > 1]
        if not movable:
            return genes
        if self.rng.random() < SHIFT:
            rows = self.axes[int(self.rng.integers(len(self.axes)))]
            step = 1 if self.rng.random() < 0.5 else -1
            for i in rows:
                genes[i] = min(max(genes[i] + step, 0), self.counts[i] - 1)
            return genes
        moved = self.rng.random(len(movable)) < 1 / len(movable)
        moved[int(self.rng.integers(len(movable)))] = True
        for i in np.array(movable)[moved]:
            genes[i] = self._elsewhere(genes[i], self.counts[i])
        return genes

    def _elsewhere(self, gene: int, count: int) -> int:
        if self.rng.random() < LOCAL:
            near = [g for g in (gene - 1, gene + 1) if 0 <= g < count]
            return near[int(self.rng.integers(len(near)))]
        other = int(self.rng.integers(count - 1))
        return other + (other >= gene)
