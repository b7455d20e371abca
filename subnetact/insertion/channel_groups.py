"""Channel groups: which entries of which weights have to move together when channels or heads are permuted.

Which entries belong to a size is read off the slicing rules: an operator that keeps one entry more of a part
keeps certain rows or columns more. `probe.py` finds out which parts form a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.operators import ElasticKernel, LayerSelect, Operator, SubnetNorm, WeightSlice
from subnetact.operators.attention_slice import AttentionSlice
from subnetact.operators.per_width_norm import PerWidthNorm
from subnetact.operators.segments import cut
from subnetact.operators.view_module import owned
from subnetact.space import SizeRow
from subnetact.supernet.bind import bind_module

__all__ = ["Group", "Part", "extracted", "flat", "kept_entries", "parts_of", "weight_axis"]


@dataclass(eq=False)
class Part:
    """A part of an operator, or a segment of a part, that follows a dimension.

    Attributes:
        operator: the operator.
        name: the name of the part or segment.
        role: `writes` if the entries compute the channels, `reads` if they take them, `keeps` if they
            belong to a layer that does not mix channels.
        tables: (name of a tensor, axis) -> positions on this axis in the largest subnet, of shape (steps,
            positions per step). A step is the smallest change of the size.
        reason: why the part cannot be permuted; None if it can.
    """

    operator: Operator
    name: str
    role: str
    tables: Mapping[tuple[str, int], Tensor]
    reason: str | None = None

    @property
    def steps(self) -> int:
        """The number of steps in the largest subnet."""
        return len(next(iter(self.tables.values()), ()))

    def order(self, units: Tensor) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
        """Return how the positions of every axis move.

        Args:
            units: a permutation of the units of the group; their number divides `steps`.

        Returns:
            (name of a tensor, axis) -> positions, and the positions whose entries they get.
        """
        each = self.steps // len(units)
        steps = (units[:, None] * each + torch.arange(each)).flatten()
        return {key: (table.flatten(), table[steps].flatten()) for key, table in self.tables.items()}

    def __str__(self) -> str:
        return f"{self.operator.path}.{self.name}"


@dataclass(eq=False)
class Group:
    """Parts that are permuted together.

    Attributes:
        parts: the parts.
        reason: why they cannot be permuted; None if they can.
        units: the number of units that can change places, single channels or whole heads for example.
    """

    parts: list[Part]
    reason: str | None = None
    units: int = 1

    @property
    def name(self) -> str:
        """The first part that computes the channels, for example `layer1.0.conv1.out`."""
        return str(next((part for part in self.parts if part.role == "writes"), self.parts[0]))

    def candidates(self) -> list[int]:
        """Return the numbers of units that all parts can be divided into, in descending order."""
        most = math.gcd(*(part.steps for part in self.parts))
        return [n for n in range(most, 1, -1) if most % n == 0]


def extracted(network: nn.Module, row: SizeRow) -> tuple[nn.Module, dict[Operator, nn.Module]]:
    """Return a subnet with its own copy of the weights, and its module for every operator in it.

    Args:
        network: a network with operators; it is not changed.
        row: the size row of the subnet.
    """

    def visit(module: nn.Module) -> nn.Module:
        if id(module) not in done:

            def child(name: str) -> nn.Module | None:
                submodule = module._modules[name]
                return None if submodule is None else visit(submodule)

            bound = bind_module(module, row, child, lambda norm: norm.bind(row))
            if isinstance(module, Operator) and not isinstance(module, LayerSelect):
                object.__setattr__(bound, "elastic_operator", module)
            done[id(module)] = bound
        return done[id(module)]

    done: dict[int, nn.Module] = {}
    with torch.no_grad():
        copy = owned(visit(network)).eval()
    found = {m.__dict__.pop("elastic_operator", None): m for m in copy.modules()}
    return copy, {operator: module for operator, module in found.items() if operator is not None}


# -- the slicing rules -------------------------------------------------------------------------------


def kept_entries(operator: Operator, sizes: tuple[int, ...], axis: int) -> dict[str, Tensor]:
    """Return which entries of an axis a subnet keeps of every parameter that has the axis, in order.

    Args:
        operator: the operator.
        sizes: what `operator.sizes` returned for the subnet.
        axis: the axis of the full parameters.
    """

    def sliced(others: int | None) -> dict[str, Tensor]:
        """Slice tags instead of weights; axes other than the given one have this length at most."""
        tags: dict[str, Tensor | None] = {}
        for name, parameter in operator._parameters.items():
            tags[name] = parameter
            if parameter is not None and parameter.dim() > axis:
                shape = [
                    n if i == axis or others is None else min(n, others)
                    for i, n in enumerate(parameter.shape)
                ]
                tag = torch.arange(parameter.shape[axis])
                tags[name] = tag.view([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)
        tagged: Any = object.__new__(type(operator))
        tagged.__dict__.update(operator.__dict__, _parameters=tags)
        result = tagged.tensors(sizes)
        return {
            name: result[name].flatten() if others == 1 else torch.unique(result[name])
            for name, parameter in operator._parameters.items()
            if parameter is not None and parameter.dim() > axis and result.get(name) is not None
        }

    if isinstance(operator, ElasticKernel):
        sizes = sizes[0], operator.full("kernel")  # Smaller kernels have the same channels.
    for others in (1, 12):  # Short axes are quicker, unless the rule splits them or begins behind their end.
        try:
            found = sliced(others)
        except RuntimeError:
            continue
        if all(map(len, found.values())):
            return found
    return sliced(None)


def parts_of(operator: Operator, row: SizeRow) -> list[Part]:
    """Return the parts of an operator that have entries, those that cannot be permuted included."""
    if isinstance(operator, LayerSelect):
        return []
    everything: dict[tuple[str, int | None], Tensor] = {}
    parts = (_part(operator, name, row, everything) for name in operator.dims)
    return [part for part in parts if part is not None]


def _part(
    operator: Operator, name: str, row: SizeRow, everything: dict[tuple[str, int | None], Tensor]
) -> Part | None:
    """Return a part, or None if it has no entries; `everything` is what the largest subnet keeps."""
    whole = name if name in operator.parts or not operator.parts else name.rpartition(".")[0]
    grouped = isinstance(operator, WeightSlice) and operator.template.__dict__.get("groups", 1) > 1
    if grouped and whole == "in_" and any(other.startswith("out") for other in operator.dims):
        return None  # The groups move with the outputs.
    if whole in ("kernel", "position"):
        return None
    role = "keeps"
    if isinstance(operator, AttentionSlice) or (isinstance(operator, WeightSlice) and not grouped):
        writes = isinstance(operator, WeightSlice) and whole == "out"
        role = "reads" if whole == "in_" else "writes" if writes else role
    most = operator.size(name, row)
    legal = [size for size in operator.legal(name) if size <= most]
    if len(legal) < 2 or legal[-1] != most:
        return None
    solo: Any = object.__new__(type(operator))
    solo.__dict__.update(operator.__dict__, dims={name: 0}, checks=False)
    axes = range(max((p.dim() for p in operator._parameters.values() if p is not None), default=0))
    tables: dict[tuple[str, int], Tensor] = {}
    for axis in [*axes, None]:
        first, last = (_entries(solo, solo.sizes((size,)), axis) for size in (legal[0], most))
        growing = [tensor for tensor in first if len(first[tensor]) < len(last[tensor])]
        if not growing:
            continue
        middle = _entries(solo, solo.sizes((legal[len(legal) // 2],)), axis)
        # What the other segments keep is no part of this one.
        others = _entries(solo, solo.sizes((0,)), axis) if name != whole else {}
        for tensor in growing:
            samples = [kept[tensor] for kept in (first, middle, last)]
            if others:
                samples = [entries[~torch.isin(entries, others[tensor])] for entries in samples]
            table = _table(samples[0], samples[2], len(legal))
            half = None if table is None else table[: len(legal) // 2 + 1].flatten().sort().values
            if table is None or half is None or not torch.equal(half, samples[1]):
                return Part(operator, name, role, {}, "its slices do not grow in equal steps")
            if (tensor, axis) not in everything:
                everything[tensor, axis] = _entries(operator, operator.sizes(row), axis)[tensor]
            tables[tensor, axis or 0] = torch.searchsorted(everything[tensor, axis], table)
    if isinstance(operator, PerWidthNorm):
        return Part(operator, name, role, tables, "its checkpoint lists statistics of first channels")
    return Part(operator, name, role, tables) if tables else None


def _entries(operator: Operator, sizes: tuple[int, ...], axis: int | None) -> dict[str, Tensor]:
    """Return the kept entries of parameters, or, if the axis is None, of running statistics."""
    if axis is not None:
        return kept_entries(operator, sizes, axis)
    if not isinstance(operator, SubnetNorm):
        return {}
    kept = cut(torch.arange(operator.full("channels")), {0: operator.kept_parts(sizes)[0]})
    return {"running_mean": kept, "running_var": kept}


def _table(first: Tensor, last: Tensor, steps: int) -> Tensor | None:
    """Return the entries that every step adds, of shape (steps, entries per step).

    Args:
        first: the entries of the smallest size, ascending.
        last: those of the largest size, ascending.
        steps: the number of sizes.
    """
    new = last[~torch.isin(last, first)]
    breaks = (new.diff() != 1).nonzero().flatten() + 1
    runs = [new[a:b] for a, b in pairwise([0, *breaks.tolist(), len(new)])]
    if any(len(run) % (steps - 1) for run in runs):
        return None
    added = torch.cat([run.view(steps - 1, -1) for run in runs], 1)
    return torch.cat([first[None], added]) if added.shape[1] == len(first) else None


def flat(operator: Operator, name: str, tensor: Tensor) -> Tensor:
    """Return a view with the axes of the operator's own parameter; a slice may have split the first one."""
    full = operator._parameters.get(name)
    extra = 0 if full is None else tensor.dim() - full.dim()
    return tensor.view(-1, *tensor.shape[1 + extra :]) if extra else tensor


def weight_axis(part: Part) -> tuple[str, int]:
    """Return the key of the table whose positions are channels: that of the weight."""
    return next(key for key in part.tables if key[0] in ("weight", "in_proj_weight"))
