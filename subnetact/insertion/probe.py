"""Probe: finds out which parts of operators hang together, and in which units they may be permuted.

The probe is a private copy of the largest subnet with random weights, so that nothing is hidden by weights
that happen to be zero. The output of every layer that mixes channels is replaced by random numbers.

- A gradient then reaches exactly as far as the same channels do: a part that computes channels and a part
  that reads them are in one group if the input of the reader depends on the replaced output.
- If the replaced outputs of a group are permuted, every layer that reads them must see its former input,
  permuted in the same way. The smallest units with which this holds, single channels or whole heads, are the
  units of the group.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError
from subnetact.insertion.channel_groups import Group, Part, extracted, flat, parts_of, weight_axis
from subnetact.operators import ElasticKernel, LayerNormSlice, Operator, SubnetNorm, WeightSlice
from subnetact.operators.attention_slice import AttentionSlice
from subnetact.space import SizeRow
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import summary

__all__ = ["Probe", "find_groups"]

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
            probe = Probe(network, row, x)
        with torch.enable_grad():
            groups = probe.groups()
        with torch.no_grad():
            probe.try_units([group for group in groups if group.reason is None])
    return groups


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


class Probe:
    """The largest subnet with random weights, whose layers that mix channels give out random numbers."""

    def __init__(self, network: nn.Module, row: SizeRow, x: Any) -> None:
        self.copy, of = extracted(network, row)
        self.row, self.parts = row, [part for operator in of for part in parts_of(operator, row)]
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
            wrong: set[Part] = set()
            for shuffled in (
                False,
                True,
            ):  # a shuffle may leave heads whole by chance, a shift by one never does
                orders: dict[Part, dict[tuple[str, int], tuple[Tensor, Tensor]]] = {}
                for group, candidates in left.items():
                    units = [*range(1, candidates[0]), 0]
                    if shuffled:
                        rng.shuffle(units)
                    for part in group.parts:
                        orders[part] = part.order(torch.tensor(units))
                wrong |= self._disagreeing(orders)
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
                positions = part.tables[weight_axis(part)].flatten()
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
                to, of = order[weight_axis(part)]
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
                to, of = orders[reader][weight_axis(reader)]
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
            raise_if_out_of_memory(error)
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
                    followed.append((part, part.tables[weight_axis(part)].flatten()))
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


def _moved(tensor: Tensor, axis: int, to: Tensor, of: Tensor) -> Tensor:
    """Return a copy whose entries at positions `to` of an axis are those that were at positions `of`."""
    return tensor.index_copy(axis, to.to(tensor.device), tensor.index_select(axis, of.to(tensor.device)))


def _taken(tensor: Tensor, axis: int, positions: Tensor) -> Tensor:
    return tensor.index_select(axis, positions.to(tensor.device))


def _as_float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _SHORT else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
