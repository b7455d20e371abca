"""Channel groups: which weights have to move together when channels, heads or neurons are permuted.

Three facts make up a group, and none of them is guessed.

- Which entries of which weights belong to a size is read off the slicing rules: an operator that keeps one
  entry more of a part keeps certain rows or columns more (`_table`).
- Which parts hang together is found with gradients, on a private copy of the largest subnet with random
  weights. The output of every layer that mixes channels is replaced by random numbers, so that a gradient
  reaches exactly as far as the same channels do.
- In which units a group may be permuted, single channels or whole heads, is tried. The replaced outputs are
  permuted, and every layer that reads them must see its former input, permuted in the same way. The smallest
  units with which this holds are the units of the group.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from subnetact.errors import InsertError
from subnetact.operators import ElasticKernel, LayerNormSlice, LayerSelect, Operator, SubnetNorm, WeightSlice
from subnetact.operators.attention_slice import AttentionSlice
from subnetact.operators.per_width_norm import PerWidthNorm
from subnetact.operators.segments import cut
from subnetact.operators.view_module import owned
from subnetact.space import SizeRow
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.bind import bind_module
from subnetact.supernet.failure import summary

__all__ = ["Group", "Part", "extracted", "find_groups", "flat", "kept_entries"]

ALIKE = 1e-3
"""The largest difference between a layer's input and its former one, permuted, as a share of the largest."""

_MIXING: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)
_SHORT = (torch.float16, torch.bfloat16)
_CONVOLUTIONS = _MIXING[1:-1]
_CHANNELWISE = (SubnetNorm, LayerNormSlice, ElasticKernel, WeightSlice)
"""Operators of which every output channel depends on the same channel of the input, if they do not mix."""


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


def find_groups(network: nn.Module, row: SizeRow, x: Any) -> list[Group]:
    """Find everything in a network that can be permuted, and in which units.

    Args:
        network: a network with operators; it is not changed.
        row: the size row of the largest subnet.
        x: a batch that the network takes. Its values do not matter.

    Returns:
        The groups, in the order of the network. Those that cannot be permuted have a reason.

    Raises:
        InsertError: the largest subnet does not run on the batch.
    """
    with torch.inference_mode(False):
        with torch.no_grad():
            probe = _Probe(network, row, x)
        with torch.enable_grad():
            groups = probe.groups()
        with torch.no_grad():
            probe.try_units([group for group in groups if group.reason is None])
    return groups


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


def _parts(operator: Operator, row: SizeRow) -> list[Part]:
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


# -- what hangs together -----------------------------------------------------------------------------


@dataclass
class _Reading:
    """One call of a module that reads channels: its input, and which part every range of channels follows."""

    path: str
    tensor: Tensor
    axis: int
    ranges: list[tuple[Part | None, Tensor]]


@dataclass
class _Run:
    """One forward pass: the replaced outputs by (module, number of the call), the readings, the outputs."""

    replaced: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    readings: list[_Reading] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class _Probe:
    """The largest subnet with random weights, whose layers that mix channels give out random numbers."""

    def __init__(self, network: nn.Module, row: SizeRow, x: Any) -> None:
        self.copy, of = extracted(network, row)
        self.row, self.parts = row, [part for operator in of for part in _parts(operator, row)]
        self.operators = {id(module): operator for operator, module in of.items()}
        self.modules = dict(of)
        self.x = map_tensors(_as_float, x)
        if any(p.dtype in _SHORT for p in self.copy.parameters()):
            self.copy.float()
        self.paths = {id(module): path for path, module in self.copy.named_modules()}
        self.generator = torch.Generator().manual_seed(0)
        self.copy.requires_grad_(False)
        for parameter in self.copy.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=self.generator)
                parameter.add_(noise.to(parameter) * (parameter.abs().mean() / 2 + 0.1))
        for part in self.parts:
            if part.role == "keeps":
                for tensor, _ in part.tables:
                    own = self.modules[part.operator]._parameters.get(tensor)
                    if own is not None:
                        own.requires_grad_(True)
        for operator, module in of.items():
            if isinstance(operator, SubnetNorm):
                mean, var = module._buffers["running_mean"], module._buffers["running_var"]
                for statistic, least in ((mean, -0.5), (var, 0.5)):
                    if statistic is not None:
                        statistic.copy_(torch.rand(statistic.shape, generator=self.generator) + least)
        self.first = self._run()
        self.keys = list(self.first.replaced)
        self.own = [
            (part, name, axis)
            for part in self.parts
            if part.role == "keeps"
            for name, axis in part.tables
            if self.modules[part.operator]._parameters.get(name) is not None
        ]
        self.inputs: list[Any] = [self.first.replaced[key] for key in self.keys]
        self.inputs += [self.modules[part.operator]._parameters[name] for part, name, _ in self.own]
        self.written: dict[int, list[Part]] = {}
        for part in self.parts:
            if part.role == "writes" and part.tables:
                self.written.setdefault(id(self.modules[part.operator]), []).append(part)

    def groups(self) -> list[Group]:
        """Return the parts that hang together, with a reason if they cannot be permuted."""
        parent: dict[Part, Part] = {part: part for part in self.parts}

        def root(part: Part) -> Part:
            while parent[part] is not part:
                part = parent[part]
            return part

        reasons: dict[Part, str] = {}
        read: set[Part] = set()
        for reading in self.first.readings:
            for part, positions in reading.ranges:
                sources = list(self._sources(_taken(reading.tensor, reading.axis, positions)))
                for source in sources:
                    if part is None:
                        reasons.setdefault(source, f"{reading.path} reads it and does not follow it")
                    else:
                        parent[root(source)] = root(part)
                if part is not None and part.role == "reads" and sources:
                    read.add(part)
        for output in self.first.outputs:
            for source in self._sources(output):
                reasons.setdefault(source, "it reaches the output of the network")
        members: dict[Part, list[Part]] = {}
        for part in self.parts:
            members.setdefault(root(part), []).append(part)
        found = []
        for parts in members.values():
            group = Group(parts)
            unread = [p for p in parts if p.role == "reads" and p not in read]
            reason = next((f"{reasons[p]} ({p})" for p in parts if p in reasons), None)
            reason = next((f"{p.reason} ({p})" for p in parts if p.reason is not None), reason)
            if reason is None and unread:
                reason = f"no part is known to compute what {unread[0]} reads"
            if reason is None and not any(p.role == "reads" for p in parts):
                reason = "no layer is known to read it"
            group.reason = reason or (None if group.candidates() else "its parts have no common units")
            found.append(group)
        return found

    def try_units(self, groups: Sequence[Group]) -> None:
        """Find the largest number of units of every group; set the reason of those that have none."""
        left = {group: group.candidates() for group in groups}
        rng = random.Random(0)
        while left:
            orders: dict[Part, dict[tuple[str, int], tuple[Tensor, Tensor]]] = {}
            for group, candidates in left.items():
                units = list(range(candidates[0]))
                while units == sorted(units):
                    rng.shuffle(units)
                for part in group.parts:
                    orders[part] = part.order(torch.tensor(units))
            wrong = self._disagreeing(orders)
            for group in list(left):
                if not wrong & set(group.parts):
                    group.units = left.pop(group)[0]
                elif len(left[group]) == 1:
                    del left[group]
                    group.reason = "a layer does not see the same input after any permutation"
                else:
                    left[group].pop(0)

    def _sources(self, tensor: Tensor) -> Iterator[Part]:
        """Yield the parts whose channels a tensor depends on, without another mixing layer in between."""
        if not tensor.requires_grad:
            return
        weights = torch.randn(tensor.shape, generator=self.generator).to(tensor)
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            (tensor * weights).sum(), self.inputs, retain_graph=True, allow_unused=True
        )
        for (module, _), gradient in zip(self.keys, gradients, strict=False):
            for part in self.written.get(module, ()):
                if gradient is None:
                    break
                axis = _channel_axis(self.modules[part.operator], gradient)
                positions = part.tables[_weight_axis(part)].flatten()
                if _taken(gradient, axis, positions).any():
                    yield part
        for (part, name, axis), gradient in zip(self.own, gradients[len(self.keys) :], strict=True):
            if gradient is not None:
                gradient = flat(part.operator, name, gradient)
                if _taken(gradient, axis, part.tables[name, axis].flatten()).any():
                    yield part

    def _disagreeing(
        self, orders: Mapping[Part, Mapping[tuple[str, int], tuple[Tensor, Tensor]]]
    ) -> set[Part]:
        """Permute parts, run, and return the parts whose readers do not see their former input, permuted."""
        replaced = dict(self.first.replaced)
        former: list[tuple[Tensor, Tensor]] = []
        for part, order in orders.items():
            module = self.modules[part.operator]
            if part.role == "writes":
                to, of = order[_weight_axis(part)]
                for key in [key for key in replaced if key[0] == id(module)]:
                    axis = _channel_axis(module, replaced[key])
                    replaced[key] = _moved(replaced[key].detach(), axis, to, of)
            elif part.role == "keeps":
                for (name, axis), (to, of) in order.items():
                    tensor = module._parameters.get(name, module._buffers.get(name))
                    if tensor is not None:
                        tensor = flat(part.operator, name, tensor.detach())
                        former.append((tensor, tensor.clone()))
                        tensor.copy_(_moved(tensor, axis, to, of))
        try:
            run = self._run(replaced)
        finally:
            for tensor, values in reversed(former):
                tensor.copy_(values)
        wrong: set[Part] = set()
        for before, after in zip(self.first.readings, run.readings, strict=True):
            for reader, positions in before.ranges:
                if reader is None or reader.role != "reads" or reader not in orders:
                    continue
                expected = before.tensor.detach()
                to, of = orders[reader][_weight_axis(reader)]
                expected = _taken(_moved(expected, before.axis, to, of), before.axis, positions)
                got = _taken(after.tensor.detach(), before.axis, positions)
                if not bool((got - expected).abs().max() <= ALIKE * expected.abs().max()):
                    wrong.add(reader)
        return wrong

    def _run(self, replaced: Mapping[tuple[int, int], Tensor] | None = None) -> _Run:
        run, calls, handles = _Run(), dict[int, int](), []

        def read(module: nn.Module, args: Any, kwargs: Any) -> Any:
            run.readings.extend(self._read(module, (*args, *kwargs.values())))
            if not isinstance(self.operators.get(id(module)), AttentionSlice):
                return None
            # Its projections mix channels inside, so its inputs are replaced instead of its output.
            inputs = {name: self._noise(t) for name, t in kwargs.items() if name in ("query", "key", "value")}
            return (*map(self._noise, args[:3]), *args[3:]), {**kwargs, **inputs}

        def replace(module: nn.Module, _: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            key = id(module), calls.get(id(module), 0)
            calls[id(module)] = key[1] + 1
            if replaced is None:
                noise = torch.randn(output.shape, generator=self.generator).to(output)
                run.replaced[key] = noise.requires_grad_(True)
            else:
                run.replaced[key] = replaced[key].detach()
            return run.replaced[key].clone()

        for module in self.copy.modules():
            operator = self.operators.get(id(module))
            if operator is not None or isinstance(module, _MIXING):
                handles.append(module.register_forward_pre_hook(read, with_kwargs=True))
            if _mixes(operator, module):
                handles.append(module.register_forward_hook(replace))
        try:
            with torch.set_grad_enabled(replaced is None):
                outputs = call_with(self.copy, tree_map(_cloned, self.x))
        except Exception as error:
            raise InsertError(
                f"the largest subnet does not run on the example: {summary(self.copy, error)}; give a batch "
                "that the network takes"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        run.outputs = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
        return run

    def _noise(self, like: Tensor) -> Tensor:
        """Return random numbers that are the same in every call with this shape."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(like.shape, generator=generator).to(like)

    def _read(self, module: nn.Module, given: Sequence[Any]) -> Iterator[_Reading]:
        operator = self.operators.get(id(module))
        tensors = [t for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]
        own = [part for part in self.parts if part.operator is operator and part.tables]
        mixes = _mixes(operator, module) or isinstance(operator, AttentionSlice)
        if not mixes and not (isinstance(operator, _CHANNELWISE) and own):
            return
        path = self.paths[id(module)]
        for tensor in tensors[: 3 if isinstance(operator, AttentionSlice) else 1]:
            axis = _channel_axis(module, tensor)
            everything = torch.arange(tensor.shape[axis])
            followed: list[tuple[Part | None, Tensor]] = []
            for part in own:
                if mixes and part.role == "reads":
                    followed.append((part, part.tables[_weight_axis(part)].flatten()))
                elif not mixes:
                    followed.append((part, self._channels(part, len(everything))))
            covered = torch.cat([positions for _, positions in followed] or [everything[:0]])
            rest = everything[~torch.isin(everything, covered)]
            if mixes and len(rest):
                followed.append((None, rest))
            yield _Reading(path, tensor.clone(), axis, followed)

    def _channels(self, part: Part, total: int) -> Tensor:
        """Return the channels of the input of a layer that does not mix channels which a part follows."""
        operator = part.operator
        name, _, index = part.name.rpartition(".")
        if name not in operator.parts:
            return torch.arange(total)
        kept = dict(zip(operator.parts, operator.kept_parts(operator.sizes(self.row)), strict=True))
        sizes = kept["in_" if isinstance(operator, WeightSlice) else name].sizes
        start = sum(sizes[: int(index)])
        return torch.arange(start, start + sizes[int(index)])


def _mixes(operator: Operator | None, module: nn.Module) -> bool:
    if operator is None:
        return isinstance(module, _MIXING) and module.__dict__.get("groups", 1) == 1
    return isinstance(operator, WeightSlice) and operator.template.__dict__.get("groups", 1) == 1


def _channel_axis(module: nn.Module, tensor: Tensor) -> int:
    """Return the axis of channels of a layer's input or output."""
    spatial = isinstance(module, (*_CONVOLUTIONS, nn.modules.batchnorm._BatchNorm, nn.GroupNorm))
    if not spatial:
        return tensor.dim() - 1
    inner = 2 if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) else 1
    inner = 3 if isinstance(module, nn.Conv3d | nn.ConvTranspose3d) else inner
    unbatched = isinstance(module, _CONVOLUTIONS) and tensor.dim() == inner + 1
    return 0 if unbatched else 1


def _weight_axis(part: Part) -> tuple[str, int]:
    """Return the key of the table whose positions are channels: that of the weight."""
    return next(key for key in part.tables if key[0] in ("weight", "in_proj_weight"))


def _moved(tensor: Tensor, axis: int, to: Tensor, of: Tensor) -> Tensor:
    """Return a copy whose entries at positions `to` of an axis are those that were at positions `of`."""
    return tensor.index_copy(axis, to.to(tensor.device), tensor.index_select(axis, of.to(tensor.device)))


def _taken(tensor: Tensor, axis: int, positions: Tensor) -> Tensor:
    return tensor.index_select(axis, positions.to(tensor.device))


def flat(operator: Operator, name: str, tensor: Tensor) -> Tensor:
    """Return a view with the axes of the operator's own parameter; a slice may have split the first one."""
    full = operator._parameters.get(name)
    extra = 0 if full is None else tensor.dim() - full.dim()
    return tensor.view(-1, *tensor.shape[1 + extra :]) if extra else tensor


def _as_float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _SHORT else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
