"""The parts of a network whose costs add up to a subnet's, and which sizes each follows from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from subnetact.costs.meta_forward import Pass
from subnetact.operators import (
    ElasticKernel,
    LayerNormSlice,
    LayerSelect,
    ParameterSlice,
    SubnetNorm,
    WeightSlice,
)
from subnetact.operators.base import Operator
from subnetact.operators.subnet_norm import BATCH_NORMS
from subnetact.space import Row
from subnetact.spec import Value

__all__ = ["FEATURES", "MEASURES", "Choices", "Group", "Part", "Use", "Vector", "grouped", "parts_of"]

Vector: TypeAlias = npt.NDArray[np.int64]
Choices: TypeAlias = tuple[Value | None, ...]

KINDS = ("convolution", "pointwise", "depthwise", "linear", "norm", "product", "other")
"""Of parts: by what they compute; `product` is a matrix product outside any layer, as in attention."""
MEASURES = ("modules", "macs", "activation_bytes", "weight_bytes")
FEATURES = ("parameters", *(f"{kind}.{measure}" for kind in KINDS for measure in MEASURES))

_MULTIPLIES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_WIDE = (WeightSlice, ElasticKernel, SubnetNorm, LayerNormSlice, ParameterSlice)
"""Operators whose output is as wide as the first of their sizes."""


Use: TypeAlias = tuple[Fraction, int]
"""How often a part's weights are used in one pass, and the products beyond that."""


class Part:
    """One module of the network: which sizes its costs follow from."""

    def __init__(self, path: str, module: nn.Module, gates: tuple[tuple[LayerSelect, str], ...]) -> None:
        self.path = path
        self.module = module
        self.gates = gates
        self.plain: nn.Module = module.template if isinstance(module, Operator) else module
        self.kind = _kind(self.plain)
        self.varies_with: tuple[int, ...] = ()
        self.uses: dict[Choices, Use] = {}
        self.gate_dims = frozenset(dim for stack, name in gates for dim in _gate_dims(stack, name))
        own = module.dims.values() if isinstance(module, Operator) else ()
        self.dims = self.gate_dims | frozenset(own)

    def kept(self, row: Row) -> bool:
        """Tell whether the subnet has this module."""
        return all(name in stack.kept(row) for stack, name in self.gates)

    def tensors(self, row: Row) -> dict[str, Any]:
        """Return the subnet's parameters, without data."""
        if isinstance(self.module, LayerSelect):
            return {}
        if isinstance(self.module, Operator):
            return self.module.parameters_of(self.module.sizes(row), False)
        return self.module._parameters

    def width(self, row: Row) -> int:
        """Return how wide the output is; 1 where the sizes do not tell."""
        if isinstance(self.module, _WIDE):
            return self.module.sizes(row)[0]
        return self.plain.weight.shape[0] if isinstance(self.plain, _MULTIPLIES) else 1

    def use(self, row: Row, seen: Pass) -> Use:
        """Return what a pass says that the sizes do not."""
        tensors = self.tensors(row)
        elements = seen.elements.get(self.path, 0) if any(t is not None for t in tensors.values()) else 0
        times = Fraction(elements, self.width(row))
        return times, seen.macs.get(self.path, 0) - int(times * self._per_use(tensors))

    def _per_use(self, tensors: dict[str, Any]) -> int:
        return int(tensors["weight"].numel()) if isinstance(self.plain, _MULTIPLIES) else 0

    def measure(self, row: Row, times: Fraction, products: int, item_bytes: int) -> Vector:
        """Return the part's share of a subnet's vector."""
        tensors = self.tensors(row)
        own = [t for t in tensors.values() if t is not None]
        vector = np.zeros(len(FEATURES), np.int64)
        at = 1 + len(MEASURES) * KINDS.index(self.kind)
        if own:
            vector[0] = sum(t.numel() for t in own)
            written = int(times * self.width(row)) * item_bytes
            weights = sum(t.numel() * t.element_size() for t in own)
            vector[at : at + len(MEASURES)] = 1, int(times * self._per_use(tensors)), written, weights
        if products:
            at = 1 + len(MEASURES) * KINDS.index("product")
            vector[at : at + 2] += 1, products
        return vector


@dataclass
class Group:
    """Parts that follow the same few sizes and choices, and their sums so far."""

    parts: list[Part]
    needs: frozenset[int]

    def __post_init__(self) -> None:
        self.known: dict[Any, Vector] = {}

    @cached_property
    def key(self) -> Callable[[Sequence[Any]], Any]:
        """Picks what the sums follow from, out of a row of sizes and the choices behind it."""
        return itemgetter(*sorted(self.needs)) if self.needs else lambda _: ()


def grouped(parts: list[Part], dimensions: int) -> list[Group]:
    """Gather parts that follow the same sizes (of `dimensions`), or fewer of them."""
    groups: list[Group] = []
    needs = {part: part.dims | {dimensions + slot for slot in part.varies_with} for part in parts}
    for part in sorted(parts, key=lambda part: -len(needs[part])):
        home = next((group for group in groups if needs[part] <= group.needs), None)
        if home is None:
            groups.append(Group([part], frozenset(needs[part])))
        else:
            home.parts.append(part)
    return groups


def parts_of(network: nn.Module) -> list[Part]:
    """Return the parts of a network with operators, each module once."""
    parts: list[Part] = []
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module, gates: tuple[tuple[LayerSelect, str], ...]) -> None:
        if module in seen:
            return
        seen.add(module)
        parts.append(Part(path, module, gates))
        for name, child in module._modules.items():
            if child is not None:
                gated = (*gates, (module, name)) if isinstance(module, LayerSelect) else gates
                visit(f"{path}.{name}" if path else name, child, gated)

    visit("", network, ())
    return parts


def _gate_dims(stack: LayerSelect, name: str) -> Iterable[int]:
    if type(stack) is LayerSelect:
        return [stack.dims[name]] if name in stack.dims else []
    return stack.dims.values()


def _kind(plain: nn.Module) -> str:
    if isinstance(plain, nn.Linear):
        return "linear"
    if isinstance(plain, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if plain.groups > 1:
            return "depthwise"
        return "pointwise" if set(plain.kernel_size) == {1} else "convolution"
    return "norm" if isinstance(plain, (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)) else "other"
