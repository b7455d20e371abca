"""What a subnet costs, from its sizes alone: parameters, multiply-accumulates, bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from subnetact.costs.layers import (
    FEATURES,
    MEASURES,
    Choices,
    Part,
    Use,
    Vector,
    grouped,
    parts_of,
)
from subnetact.costs.meta_forward import Pass, ShapeTracer
from subnetact.errors import SpecError
from subnetact.space import Row
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["Cost", "CostModel", "cost"]

_PRODUCT_MACS = FEATURES.index("product.macs")
TRIALS = 5
"""Random subnets in a row that show nothing new, after which what varies is taken as known."""


@dataclass(frozen=True)
class Cost:
    """What one forward pass of one subnet costs.

    Attributes:
        parameters: of the extracted network.
        macs: multiply-accumulates of convolutions, linear layers and matrix products, for the batch.
        activation_bytes: what modules with parameters write, for the batch; embeddings of positions too
            are counted once for each input.
        weight_bytes: of the parameters, each counted once.
        not_counted: operators whose arithmetic is not among `macs`, by their ATen names.
        product_macs: the part of `macs` that is matrix products outside of any layer, as in attention.
    """

    parameters: int
    macs: int
    activation_bytes: int
    weight_bytes: int
    not_counted: tuple[str, ...]
    product_macs: int = 0


class CostModel:
    """The costs of a supernet's subnets, thousands in a second.

    The network runs a few times without data (torch's meta device), which shows how often each layer's
    weights are used on inputs of this shape. Where that depends on the subnet, as it does on an elastic
    resolution or on the heads of an attention, further passes tell on which of its choices; a subnet
    with new values of those costs one more pass. All else follows from the sizes of the layers.

    Args:
        supernet: the supernet; it is not changed.
        input_shape: of one input, without the batch: (3, 224, 224), or (tokens,).
        dtype: of the input; default: whole numbers where the network begins with an embedding, else the
            type of its weights.

    Raises:
        SpecError: the network does not run on inputs of this shape, or not without data.
    """

    def __init__(
        self, supernet: Supernet, input_shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        self.space = supernet.space
        self.tracer = ShapeTracer(supernet, input_shape, dtype)
        self.not_counted: tuple[str, ...] = ()
        self._parts = parts_of(self.tracer.network)
        self._slots = [(axis.name, i) for axis in self.space.axes for i in range(len(axis.slots))]
        self._item_bytes = next((p.element_size() for p in supernet.parameters()), 4)
        self._find_what_varies()

    def __call__(self, spec: SubnetSpec, batch_size: int = 1) -> Cost:
        """Return the cost of one subnet.

        Raises:
            SpecError: the specification is malformed or of another space, or the batch size below 1.
        """
        if batch_size < 1:
            raise SpecError(f"batch_size: {batch_size} is not at least 1")
        vector = self.vector(spec)
        macs, activation, weights = (int(vector[2 + i :: len(MEASURES)].sum()) for i in range(3))
        return Cost(
            parameters=int(vector[0]),
            macs=macs * batch_size,
            activation_bytes=activation * batch_size,
            weight_bytes=weights,
            not_counted=self.not_counted,
            product_macs=int(vector[_PRODUCT_MACS]) * batch_size,
        )

    def vector(self, spec: SubnetSpec) -> Vector:
        """Return the costs of one subnet and one input by kind of layer, in the order of `FEATURES`."""
        row = self.space.resolve(spec)
        values = row if not self._varies else (*row, *(spec[axis][i] for axis, i in self._slots))
        total = np.zeros(len(FEATURES), np.int64)
        for group in self._groups:
            key = group.key(values)
            found = group.known.get(key)
            if found is None:
                found = group.known[key] = self._sum(group.parts, spec, row)
            total += found
        return total

    # -- inner parts -----------------------------------------------------------------------------

    def _sum(self, parts: Iterable[Part], spec: SubnetSpec, row: Row) -> Vector:
        total = np.zeros(len(FEATURES), np.int64)
        for part in parts:
            if part.kept(row):
                total += part.measure(row, *self._use(part, spec, row), self._item_bytes)
        return total

    def _use(self, part: Part, spec: SubnetSpec, row: Row) -> Use:
        choices = self._choices(part, spec)
        if choices not in part.uses:
            self._learn(spec, self._run(row))
        return part.uses.setdefault(choices, (Fraction(0), 0))

    def _choices(self, part: Part, spec: SubnetSpec) -> Choices:
        return tuple(spec[axis][i] for axis, i in (self._slots[slot] for slot in part.varies_with))

    def _run(self, row: Row) -> Pass:
        seen = self.tracer.run(row)
        self.not_counted = tuple(sorted({*self.not_counted, *seen.not_counted}))
        return seen

    def _learn(self, spec: SubnetSpec, seen: Pass) -> None:
        row = self.space.resolve(spec)
        for part in self._parts:
            if part.kept(row):
                part.uses[self._choices(part, spec)] = part.use(row, seen)

    def _find_what_varies(self) -> None:
        """Find the parts whose use depends on the subnet, and on which of its slots.

        Two subnets that differ in a part's use, though not in the slots it is known to vary with, show
        a further slot, which is found by halving the slots in which they differ.
        """
        rng = random.Random(0)
        space = self.space
        passes = {spec: self._run(space.resolve(spec)) for spec in (space.largest(), space.smallest())}
        quiet = 0
        while quiet < TRIALS:
            spec = space.sample(rng)
            passes[spec] = self._run(space.resolve(spec))
            quiet = quiet + 1 if not self._settle(passes) else 0
        for spec, seen in passes.items():
            self._learn(spec, seen)
        self._varies = any(part.varies_with for part in self._parts)
        self._groups = grouped(self._parts, len(self.space.dimensions))

    def _settle(self, passes: dict[SubnetSpec, Pass]) -> bool:
        """Add the slots that explain the passes; tell whether there were any."""
        found = False
        for part in self._parts:
            while (pair := self._contradiction(part, passes)) is not None:
                part.varies_with = (*part.varies_with, self._cause(part, *pair, passes))
                found = True
        return found

    def _contradiction(
        self, part: Part, passes: Mapping[SubnetSpec, Pass]
    ) -> tuple[SubnetSpec, SubnetSpec] | None:
        first: dict[Choices, tuple[SubnetSpec, Use]] = {}
        for spec, seen in passes.items():
            row = self.space.resolve(spec)
            if part.kept(row):
                use = part.use(row, seen)
                other, known = first.setdefault(self._choices(part, spec), (spec, use))
                if known != use:
                    return other, spec
        return None

    def _cause(self, part: Part, one: SubnetSpec, two: SubnetSpec, passes: dict[SubnetSpec, Pass]) -> int:
        """Return a slot whose value alone changes the part's use, somewhere between two subnets."""
        differing = [i for i, (axis, slot) in enumerate(self._slots) if one[axis][slot] != two[axis][slot]]
        row = self.space.resolve(one)
        before = part.use(row, passes[one])
        low, high = 0, len(differing)  # with `low` slots of the second the use is as before
        while high - low > 1:
            middle = (low + high) // 2
            mixed = self._mixed(one, two, differing[:middle])
            row = self.space.resolve(mixed)
            if mixed not in passes:
                passes[mixed] = self._run(row)
            if not part.kept(row) or part.use(row, passes[mixed]) == before:
                low = middle
            else:
                high = middle
        return differing[low]

    def _mixed(self, one: SubnetSpec, two: SubnetSpec, slots: Iterable[int]) -> SubnetSpec:
        chosen = {self._slots[slot] for slot in slots}
        values = {}
        for axis in self.space.axes:
            pairs = zip(axis.slots, one[axis.name], two[axis.name], strict=True)
            picked = [b if (axis.name, i) in chosen else a for i, (_, a, b) in enumerate(pairs)]
            values[axis.name] = [
                slot.choices[0] if value is None else value
                for slot, value in zip(axis.slots, picked, strict=True)
            ]
        return self.space.spec(**values)


def cost(supernet: Supernet, spec: SubnetSpec, input_shape: Sequence[int], batch_size: int = 1) -> Cost:
    """Return what one forward pass of a subnet costs; for more than one, make a `CostModel`.

    Args:
        supernet: the supernet; it is not changed.
        spec: one of its subnets.
        input_shape: of one input, without the batch: (3, 224, 224), or (tokens,).
        batch_size: inputs in the forward pass.

    Raises:
        SpecError: the specification is malformed or of another space, the batch size is below 1, or the
            network does not run on inputs of this shape.
    """
    return CostModel(supernet, input_shape)(spec, batch_size)
