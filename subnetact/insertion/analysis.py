"""Analysis of the traced graph: which parts of which modules have to be narrowed together, and why not.

This is the only module that knows the package behind it (torch-kirigami, the extra `auto`). The package
captures the forward of a model with torch.fx and relates the coordinates of all tensors. Here the upper half
of the outputs of a layer is removed, and what goes with it is read off: if a suffix of one axis goes in every
tensor, what stays is a prefix, and a group is found. If something else goes, the layer is refused with the
reason.
"""

from __future__ import annotations

import math
import operator
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Graph, Node
from torch.overrides import resolve_name

from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError, MissingExtra
from subnetact.insertion.description import Group, Member
from subnetact.insertion.skippable import ADDITIONS
from subnetact.operators import (
    ElasticAttribute,
    Operator,
)
from subnetact.operators.base import slicer_of
from subnetact.operators.layer_traits import traits_of
from subnetact.supernet.unused_weights import structure_copy

__all__ = ["TracedModel"]

MOST_SEGMENTS = 256
"""If more segments than these would be kept of one part, its channels are interleaved."""

MOST_PARTS = 512
"""Selections of more intervals than these are not followed; to follow thousands of them takes minutes."""

FEW_PARTS = 16
"""Selections of more parts than these are merged here and not by the package."""

MOST_FOLLOWED = 30_000
"""After so many tensors were followed, the layers that are left stay as they are."""

WHOLE_GROUPS = ("empty_partition", "unbalanced_groups", "unbalanced_blocks", "indivisible_axis")
"""Conflicts that do not occur here: the package keeps the number of groups, operators drop whole groups."""

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
MEANS = (torch.mean, "mean")
SILENT_IN_EVALUATION = ("stochastic_depth", "drop_path", "drop_block_2d", "drop_block_fast_2d")
"""Functions that return their first argument outside of training."""


@dataclass(frozen=True)
class _Removed:
    """What goes with a removed half, per part of a module: (start, stop) of the removed runs."""

    runs: Mapping[tuple[str, str], tuple[tuple[int, int], ...]]
    operators: Mapping[str, type[Operator]]


class _Refused(Exception):
    """A layer cannot be narrowed; the message is the reason.

    Attributes:
        alike: the layers that cannot be narrowed either, because their outputs go with those of this one.
    """

    alike: tuple[str, ...] = ()


class TracedModel:
    """The graph of a model's forward, with the relations between its tensors.

    Args:
        model: the model; it is not changed.
        args: the inputs by position.
        kwargs: the inputs by name.

    Raises:
        MissingExtra: torch-kirigami is not installed.
        InsertError: the model cannot be traced.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kirigami = _package()
        self._span = kirigami.IndexSet.span
        try:
            with _few_parts(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._graph = kirigami.DependencyGraph.build(
                    _with_named_numbers(model), args=args, kwargs=dict(kwargs), operators=_rules()
                )
        except Exception as error:
            raise_if_out_of_memory(error)
            raise InsertError(
                f"{type(model).__name__} cannot be traced: {_first_line(error)}; describe its elastic "
                "modules by hand, or make its forward free of branches on values and of changes to the model"
            ) from error
        self._followed = 0
        self._modules = dict(model.named_modules())
        self._nodes = {node.name: node for node in self._graph.fx_graph.nodes}
        self._parameters = dict(model.named_parameters())

    def graph(self) -> Graph:
        """Return a copy of the traced graph, whose nodes know their shapes."""
        found: Graph = self._graph.fx_graph
        return found

    def groups(self, layers: Sequence[str]) -> Iterator[Group | tuple[str, str]]:
        """Yield what follows the outputs of each layer."""
        known: set[tuple[str, str]] = set()
        refused: dict[str, str] = {}
        with _few_parts():
            found = self._groups(layers, known, refused)
        yield from found
        yield from ((layer, why) for layer, why in refused.items() if (layer, "out") not in known)

    # -- inner parts -------------------------------------------------------------------------------

    def _groups(
        self, layers: Sequence[str], known: set[tuple[str, str]], refused: dict[str, str]
    ) -> list[Group]:
        checked = self._graph._queries_checked.set(True)  # nothing changes the model between these queries
        found: list[Group] = []
        alike: dict[str, str] = {}
        try:
            for layer in layers:
                if (layer, "out") in known:
                    continue
                if layer in alike:
                    refused[layer] = alike[layer]
                    continue
                if self._followed > MOST_FOLLOWED:
                    refused[layer] = f"the layers before it reach {MOST_FOLLOWED:,} tensors; use only="
                    continue
                try:
                    group = self._group(layer)
                    _check_apart(group, found)
                except _Refused as reason:
                    refused[layer] = str(reason)
                    alike |= dict.fromkeys(reason.alike, str(reason))
                    continue
                known |= {(member.module, member.part) for member in group.members}
                found.append(group)
        finally:
            self._graph._queries_checked.reset(checked)
        return found

    def _group(self, layer: str) -> Group:
        module = self._modules[layer]
        axis = traits_of(module).axes["weight"].index("out")
        reference = self._graph.parameter(f"{layer}.weight")
        outputs = int(reference.shape[axis])
        if outputs < 2:
            raise _Refused("it has one output only")
        try:
            return self._group_of(layer, reference.axis(axis), outputs, outputs)
        except _Refused:
            pieces = self._pieces(reference.axis(axis), outputs)
            if pieces < 2 or outputs % pieces or outputs // pieces < 2:
                raise
            return self._group_of(layer, reference.axis(axis), outputs, outputs // pieces)

    def _removal(self, axis: Any, start: int, stop: int) -> Any:
        """Return what goes with some outputs of a layer."""
        impact = self._graph.propagate(remove=[axis.select(self._span(start, stop))])
        self._followed += len(impact.selections)
        return impact

    def _pieces(self, axis: Any, outputs: int) -> int:
        """Return how many outputs of a layer go with the last one: 2 if they are chunked and multiplied."""
        impact = self._removal(axis, outputs - 1, outputs)
        chosen = impact.selections[axis.tensor.id]
        return len(chosen.fully_selected_indices(axis.dim))

    def _group_of(self, layer: str, axis: Any, outputs: int, full: int) -> Group:
        """Return the group of which the last `full` outputs of a layer are a segment."""
        kept = full // 2
        impact = self._removal(axis, outputs - full + kept, outputs)
        unit = self._unit(impact)
        if unit > full // 2 or full % unit:
            raise _Refused(f"its outputs come in units of {unit}, of which it has {full / unit:g}")
        if kept % unit:
            kept = kept // unit * unit
            impact = self._removal(axis, outputs - full + kept, outputs)
        try:
            removed = self._removed(impact)
        except _Refused as refused:
            refused.alike = tuple(self._alike(impact, full)) if full == outputs else ()
            raise
        members = [
            member
            for (path, part), runs in removed.runs.items()
            for member in self._members(path, part, removed.operators[path], runs, kept, full)
        ]
        if not any((m.module, m.part) == (layer, "out") for m in members):
            raise _Refused("its outputs are not sliced on their own")
        members += dict.fromkeys(self._numbers(impact, full))  # several reshapes may read one number
        kind = "stream" if self._is_shared(impact) else _kind(self._modules, members)
        return Group(f"{layer}.{kind}", kind, full, tuple(members), unit)

    def _is_shared(self, impact: Any) -> bool:
        """Tell whether the channels are added to those of other layers, or concatenated with them."""
        chosen, operations = impact.selections, self._graph._data.operations
        for node in self._graph.fx_graph.nodes:
            if node.target not in ADDITIONS and node.target not in CONCATENATIONS:
                continue
            found, made = operations[node.name].inputs, operations[node.name].outputs
            own = {t.id: t for t in found if t.id in chosen and not t.paths}
            if node.target in ADDITIONS and len(own) > 1:
                return True
            if node.target in CONCATENATIONS and len(own) < len({t.id for t in found}):
                for tensor in own.values():
                    grown = [d for d, n in enumerate(tensor.shape) if n != made[0].shape[d]]
                    if any(chosen[tensor.id].fully_selected_indices(d) for d in grown):
                        return True
        return False

    def _removed(self, impact: Any) -> _Removed:
        for diagnostic in impact.diagnostics:
            if not diagnostic.complete or diagnostic.code not in WHOLE_GROUPS:
                raise _Refused(_reason(diagnostic))
        if any(not self._graph._data.refs[ref.id].paths for ref in impact.interfaces):
            raise _Refused("its outputs are inputs or outputs of the model")
        for requirement in impact.requirements:
            if self._is_mean(requirement, impact.selections):
                raise _Refused(f"the forward averages over its outputs, at {requirement.target}")
        runs: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}
        operators: dict[str, type[Operator]] = {}
        for selection in (*impact.parameters, *impact.buffers):
            if len(selection.tensor.paths) > 1:
                raise _Refused(f"{' and '.join(selection.tensor.paths)} are one tied tensor")
            path, _, name = selection.tensor.paths[0].rpartition(".")
            whole = 1
            for dim, length in enumerate(selection.tensor.shape):
                indices = selection.fully_selected_indices(dim)
                whole *= length - len(indices)
                if not indices:
                    continue
                if self._is_free(path, name, dim):
                    continue
                operators[path], part = _part(self._modules[path], path, name, dim)
                found = tuple((int(a), int(b)) for a, b in indices.intervals)
                if runs.setdefault((path, part), found) != found:
                    raise _Refused(f"different channels of the tensors of {path} go with it")
            if selection.count != math.prod(selection.tensor.shape) - whole:
                raise _Refused(f"single elements of {selection.tensor.paths[0]} go with it")
        return _Removed(runs, operators)

    def _alike(self, impact: Any, full: int) -> Iterator[str]:
        """Yield the layers with `full` outputs of which the upper half goes with what was removed.

        What goes with theirs is then the same. Of layers with fewer outputs, this need not be true.
        """
        for selection in impact.parameters:
            path, _, name = selection.tensor.paths[0].rpartition(".")
            if computes_channels(self._modules[path]) and name == "weight":
                axis = traits_of(self._modules[path]).axes["weight"].index("out")
                indices = selection.fully_selected_indices(axis)
                if selection.tensor.shape[axis] == full and indices.intervals == ((full // 2, full),):
                    yield path

    def _is_mean(self, requirement: Any, chosen: Mapping[Any, Any]) -> bool:
        """Tell whether it is a mean over removed channels, which has another divisor without them."""
        if getattr(requirement, "kind", "") != "reduction_domain":
            return False
        if self._nodes[requirement.target].target not in MEANS:
            return False
        removed, axes = chosen.get(requirement.tensors[0].id), dict(requirement.data)["axes"]
        return removed is not None and any(removed.fully_selected_indices(axis) for axis in axes)

    def _unit(self, impact: Any) -> int:
        """Return the number of channels that only go together, because grouped layers drop whole groups."""
        unit = 1
        for selection in impact.parameters:
            module = self._modules[selection.tensor.paths[0].rpartition(".")[0]]
            groups = int(getattr(module, "num_groups" if isinstance(module, nn.GroupNorm) else "groups", 1))
            if groups > 1 and (isinstance(module, nn.GroupNorm) or computes_channels(module)):
                rows = selection.tensor.shape[0]
                unit = math.lcm(unit, rows // groups)
        return unit

    def _members(
        self,
        path: str,
        part: str,
        kind: type[Operator],
        runs: tuple[tuple[int, int], ...],
        kept: int,
        full: int,
    ) -> Iterator[Member]:
        """Yield the members that keep a prefix of each of their segments."""
        length = self._length(path, part, kind)
        if len(runs) > MOST_SEGMENTS:
            raise _Refused(f"the channels of {path} are interleaved")
        end = 0
        for start, stop in runs:
            multiple, rest = divmod(stop - start, full - kept)
            begin = stop - multiple * full
            if rest or not multiple or begin < end:
                raise _Refused(f"{path} keeps no prefix of its channels: {start} to {stop} go with it")
            end = stop
            alone = (begin, stop) == (0, length)
            if not alone and kind is ElasticAttribute:
                raise _Refused(f"{path}.{part} consists of several segments")
            yield Member(path, part, kind, multiple, *((None, None) if alone else (begin, length)))

    def _is_free(self, path: str, name: str, dim: int) -> bool:
        """Tell whether an axis is the heads of a MultiheadAttention, which need not follow the width."""
        owner = path.removesuffix(".out_proj") if dim == 1 else path if name.startswith("in_proj") else ""
        return (
            dim < 2
            and owner != ""
            and isinstance(self._modules.get(owner), nn.MultiheadAttention)
            and (path != owner or dim == 0)
        )

    def _numbers(self, impact: Any, full: int) -> Iterator[Member]:
        """Yield the attributes that a forward reads to reshape what goes, if they hold the full size."""
        for requirement in impact.requirements:
            if getattr(requirement, "kind", "") != "shape_arguments":
                continue
            if requirement.tensors[0].id not in impact.selections:
                continue
            node = self._nodes[requirement.target]
            for value in (*node.args[1:], *node.kwargs.values()):
                if isinstance(value, _Attribute) and value == full:
                    yield Member(value.path, value.name, ElasticAttribute)

    def _length(self, path: str, part: str, kind: type[Operator]) -> int:
        try:
            made = kind(self._modules[path], path, {part: 0})
            made.check()
            return made.full(part)
        except InsertError as error:
            raise _Refused(str(error)) from None


class _Attribute(int):
    """A whole number that knows which attribute of which module it is, also in a graph."""

    path: str
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attribute:
        return self


def _with_named_numbers(model: nn.Module) -> nn.Module:
    """Return a copy of a model, with its tensors, in which whole numbers of users' modules have names."""
    copied = structure_copy(model)
    for path, module in copied.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and not type(module).__module__.startswith("torch."):
                named = _Attribute(value)
                named.path, named.name = path, name
                module.__dict__[name] = named
    return copied


def computes_channels(module: nn.Module) -> bool:
    """Tell whether a layer has a weight with an axis of outputs, which an operator slices."""
    weight = traits_of(module).axes.get("weight", ())
    return "out" in weight and slicer_of(module) is not None


def _part(module: nn.Module, path: str, name: str, axis: int) -> tuple[type[Operator], str]:
    """Return the operator, and the part of it, that slices an axis of a tensor of a module."""
    slicer, axes = slicer_of(module), traits_of(module).axes.get(name, ())
    if slicer is not None and axes:
        if axis >= len(axes):
            raise _Refused(f"axis {axis} of {path}.{name} goes with it")
        return slicer, axes[axis]
    if name not in module._parameters:
        raise _Refused(f"the buffer {path}.{name} goes with it")
    return ElasticAttribute, f"{name}.{axis}"


def _check_apart(group: Group, others: Sequence[Group]) -> None:
    """Refuse a group of which a member follows the channels of another group, too."""
    taken: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for other in others:
        for m in other.members:
            taken.setdefault((m.module, m.part), []).append(_extent(other, m))
    for m in group.members:
        start, stop = _extent(group, m)
        if any(start < b and a < stop for a, b in taken.get((m.module, m.part), ())):
            raise _Refused(f"{m.module}.{m.part} follows other channels, too")


def _extent(group: Group, member: Member) -> tuple[int, float]:
    """Return where the segment of a member starts and stops."""
    if member.start is None:
        return 0, math.inf
    return member.start, member.start + group.full * member.multiple


def _kind(modules: Mapping[str, nn.Module], members: Sequence[Member]) -> str:
    """Return the axis of a group: feed-forward neurons lie between linear layers, without anything else."""
    linear = all(isinstance(modules[m.module], nn.Linear) for m in members)
    return "ffn" if linear and sum(m.part == "out" for m in members) <= 2 else "width"


def _reason(diagnostic: Any) -> str:
    where = f" at {diagnostic.node}" if diagnostic.node else ""
    return f"the analysis cannot see through the model{where}: {diagnostic.message}"


def _first_line(error: BaseException) -> str:
    if type(error).__name__ == "StaleGraphError":
        return "its forward changes attributes of the model, a counter for example"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


# -- the package ------------------------------------------------------------------------------------


def _package() -> Any:
    try:
        import torch_kirigami
    except ImportError as error:
        raise MissingExtra(
            "finding what can be elastic needs torch-kirigami; pip install 'subnetact[auto]', or describe "
            "the model by hand"
        ) from error
    return torch_kirigami


_TURN = threading.RLock()


@contextmanager
def _few_parts() -> Iterator[None]:
    """Let the package refuse selections of many parts early, because no segments describe them.

    Selections with more than a few parts are merged by `_merged`, because the package compares all pairs.
    Threads that analyse take turns, and calls of other threads are the package's own.
    """
    from torch_kirigami.dep_graph import selection

    with _TURN:
        normalize, thread = selection.normalize, threading.get_ident()

        def merged(regions: Iterable[Any]) -> tuple[Any, ...]:
            given = list(regions)
            own = len(given) > FEW_PARTS and threading.get_ident() == thread
            found: tuple[Any, ...] = _merged(given) if own else normalize(given)
            return found

        selection.normalize = merged
        try:
            yield
        finally:
            selection.normalize = normalize


def _merged(regions: Iterable[Any]) -> tuple[Any, ...]:
    """Return what `normalize` of the package returns: disjoint regions with the union of the given ones."""
    from torch_kirigami.errors import AnalysisLimitError
    from torch_kirigami.settings import config

    most = min(config.max_parts, MOST_PARTS)
    found: list[Any] = []
    given = sorted({region for region in regions if not region.empty}, key=_intervals)
    bounds = np.empty((0, len(given[0].axes) if given else 0, 2), int)  # start and stop per axis
    for region in given:
        box = np.array([(axis.intervals[0][0], axis.intervals[-1][1]) for axis in region.axes]).reshape(-1, 2)
        pieces = [region]
        near = ((bounds[:, :, 0] < box[:, 1]) & (box[:, 0] < bounds[:, :, 1])).all(1)
        for other in np.flatnonzero(near):
            pieces = [rest for piece in pieces for rest in piece.subtract(found[other])]
            if len(pieces) + len(found) > most:
                break
        if found and len(pieces) + len(found) > most:
            raise AnalysisLimitError("Too many Cartesian regions")
        found += pieces
        bounds = np.concatenate([bounds, np.repeat(box[None], len(pieces), 0)])
    numbers: dict[Any, int] = {}
    table = np.array([[numbers.setdefault(axis, len(numbers)) for axis in region.axes] for region in found])
    at = 0
    while at < len(found):  # two regions that differ on one axis become one, the first ones first
        similar = np.flatnonzero((table != table[at]).sum(1) == 1)
        if not len(similar):
            at += 1
            continue
        first, second = sorted((at, int(similar[0])))
        axis = int(np.flatnonzero(table[first] != table[second])[0])
        axes = list(found[first].axes)
        axes[axis] = axes[axis].union(found[second].axes[axis])
        found[first] = type(found[first])(tuple(axes))
        table[first, axis] = numbers.setdefault(axes[axis], len(numbers))
        table = np.delete(table, second, 0)
        del found[second]
        at = first
    return tuple(sorted(found, key=_intervals))


def _intervals(region: Any) -> Any:
    return tuple(axis.intervals for axis in region.axes)


@cache
def _rules() -> Any:
    """Return the rules of the package, with some for calls that compute no tensor or change none."""
    import torch.nn.functional as F
    from torch_kirigami.dep_graph.operation import OperatorRule, OperatorSpec
    from torch_kirigami.dep_graph.registry import OperatorRegistry
    from torch_kirigami.errors import UnsupportedOperation

    class WithoutTensors(OperatorRule):
        """A call with neither tensors in nor out, such as a comparison of sizes, relates nothing."""

        def __init__(self, inner: Any = None) -> None:
            super().__init__()
            self.inner = inner

        def build_spec(self, operation: Any) -> Any:
            if not operation.inputs and not operation.outputs:
                return OperatorSpec()
            if self.inner is None:
                raise UnsupportedOperation("No semantics registered")
            return self.inner.build_spec(operation)

        def tensor_effects(self, node: Any, module: Any) -> Any:
            if self.inner is None:
                return super().tensor_effects(node, module)
            return self.inner.tensor_effects(node, module)

    class Rules(OperatorRegistry):
        """The rules of the package, and those of this module."""

        def copy(self) -> Any:
            copied = super().copy()
            copied.__class__ = Rules
            return copied

        def lookup(self, node: Any, module: Any) -> Any:
            if node.op == "call_function":
                if node.target in comparisons:
                    return comparisons[node.target]
                if getattr(node.target, "__name__", "") in SILENT_IN_EVALUATION:
                    return dropout
            if node.op == "call_method" and node.target == "norm" and "dim" in node.kwargs:
                return reduction
            found = super().lookup(node, module)
            return unknown if found is None and _only_reads(node) else found

    rules = OperatorRegistry.default()
    rules.__class__ = Rules
    dropout, pointwise, reduction = (rules.functions[f] for f in (F.dropout, torch.add, torch.mean))
    unknown = WithoutTensors()
    for name in ("addcmul", "addcdiv", "lerp"):
        rules.register(getattr(torch, name), pointwise, opaque=False)
        rules.register_method(name, pointwise)
    for name in ("reshape_as", "view_as"):
        rules.register_method(name, rules.methods["flatten"])
    compared = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    scalars = (*compared, operator.and_, operator.or_, operator.not_, torch._assert, int, bool, max, min)
    comparisons = {target: WithoutTensors(rules.functions.get(target)) for target in scalars}
    return rules


def _only_reads(node: Node) -> bool:
    """Tell whether torch promises that a call changes none of its arguments."""
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return False
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target)) and not str(node.target).endswith("_")
    name = resolve_name(node.target) if node.op == "call_function" else None
    return name is not None and not name.endswith("_")
