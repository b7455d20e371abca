"""Analysis of the traced graph: which parts of which modules have to be narrowed together, and why not.

Only this module knows the package that relates the coordinates of all tensors (torch-kirigami, the extra
`auto`). The upper half of the outputs of a layer is removed, and what goes with it is read off: if that is a
suffix of one axis of every tensor, a group is found; if something else goes, the layer is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError, MissingExtra, first_line
from subnetact.insertion.description import Group, Member
from subnetact.insertion.function_trial import BY_THE_FORWARD, EFFECTS, spec_by_trial
from subnetact.insertion.recorder import RecordedTensor, Recording, recorded
from subnetact.insertion.thread_patch import patched_here
from subnetact.operators import ElasticAttribute, LayerNormSlice, Operator
from subnetact.operators.base import slicer_of
from subnetact.operators.layer_traits import CHANNEL_NORM, is_batch_norm, traits_of
from subnetact.operators.operation_traits import calls_of
from subnetact.spec import grouped
from subnetact.supernet.elementwise import ADDITIONS
from subnetact.supernet.failure import failure

MOST_SEGMENTS = 256
"""If more segments than these would be kept of one part, its channels are interleaved."""

MOST_REGIONS = 128
"""Selections of more regions than these are not followed; to follow thousands of them takes minutes."""

MOST_FOLLOWED = 30_000
"""After so many tensors were followed, the layers that are left stay as they are."""

WHOLE_GROUPS = ("empty_partition", "unbalanced_groups", "unbalanced_blocks", "indivisible_axis")
"""Conflicts that do not occur here: the package keeps the number of groups, operators drop whole groups."""

CONCATENATIONS = calls_of("concatenation")
WRITTEN = {"assigned": "x[...] = ...", "getitem": "x[...]"}
"""How users write functions whose names they do not know."""
REDUCTIONS = ("mean", "amax", "amin")
"""Reductions in which zeros do not stand for dropped values, at some weights."""


_Runs = tuple[tuple[int, int], ...]
"""(start, stop) of every run of removed entries."""


class _Refused(Exception):
    """A layer cannot be narrowed, and the layers in `alike`, whose outputs go with its own, cannot either."""

    alike: tuple[str, ...] = ()


class TracedModel:
    """The graph of a model's forward, with the relations between its tensors."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        """Run a model, which nobody else uses; `failure` says why its tensors could not be related."""
        self.recording: Recording | None = None
        self.failure: InsertError | MissingExtra | None = None
        _name_numbers_(model)
        try:
            import torch_kirigami as kirigami
        except ImportError:
            self.failure = MissingExtra(
                "finding what can be elastic needs torch-kirigami; pip install 'subnetact[auto]', or "
                "describe the model by hand"
            )
            with suppress(Exception):  # It cannot be recorded.
                self.recording = recorded(model, example)
            return
        self._span = kirigami.IndexSet.span
        try:
            with _few_regions(), self._captured(example), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._graph = kirigami.DependencyGraph.build(model, operators=_rules())
        except Exception as error:
            raise_if_out_of_memory(error)
            self.failure = InsertError(
                f"{type(model).__name__} cannot be traced: {_why(error)}; describe its elastic "
                "modules by hand, or make its forward free of branches on values and of changes to the model"
            )
            self.failure.__cause__ = error
            return
        self._followed = 0
        self._modules = dict(model.named_modules())
        first = {id(module): path for path, module in self._modules.items()}
        self._first = {path: first[id(m)] for path, m in model.named_modules(remove_duplicate=False)}
        self._nodes = {node.name: node for node in self._graph.fx_graph.nodes}
        made, (*_, output) = self._graph._data.operations, self._nodes.values()
        returned = [made.get(node.name) for node in output.args[0]]  # None for numbers of numpy
        self._returned = [{t.id for t in operation.outputs} if operation else set() for operation in returned]

    def _captured(self, example: Any) -> Any:
        """Let torch-kirigami read the graph of a recording, in place of a symbolic trace."""
        from torch_kirigami.dep_graph import construction
        from torch_kirigami.dep_graph.capture import CaptureResult, tree_map
        from torch_kirigami.dep_graph.operation import TensorEffects, TensorFacts

        def facts(value: Any) -> Any:
            return TensorFacts(**vars(value)) if isinstance(value, RecordedTensor) else value

        def capture(model: nn.Module, *_: Any) -> Any:
            found: Any = _recorded(model, example)
            self.recording = found
            if found.branches:
                raise InsertError("its forward branches on values that it computes with its weights")
            results = {node: tree_map(facts, result) for node, result in found.results.items()}
            effects = dict.fromkeys(found.graph.nodes, TensorEffects(writes_inputs=()))
            return CaptureResult(found, results, {}, (), frozenset(), effects)

        return patched_here(construction, capture=capture, resolve_attribute=Recording.tensor)

    def layers(self) -> list[str]:
        """Return the names of the layers that run, or whose weights are read, in this order."""
        called = [
            str(node.target) if node.op == "call_module" else str(node.target).rpartition(".")[0]
            for node in self._graph.fx_graph.nodes
            if node.op in ("call_module", "get_attr")
        ]
        inside = [n for path in called for n in self._modules if n == path or n.startswith(f"{path}.")]
        return [n for n in dict.fromkeys(inside) if computes_channels(self._modules[n])]

    def groups(self, layers: Sequence[str]) -> Iterator[Group | tuple[str, str]]:
        """Yield the groups that the outputs of layers form, and for other layers a name and a reason."""
        known: set[tuple[str, str]] = set()
        found: list[Group] = []
        refused: dict[str, str] = {}
        checked = self._graph._queries_checked.set(True)  # nothing changes the model between these queries
        try:
            for layer in layers:
                if (layer, "out") in known or layer in refused:
                    continue
                if self._followed > MOST_FOLLOWED:
                    refused[layer] = f"the layers before it reach {MOST_FOLLOWED:,} tensors; use only="
                    continue
                try:
                    with _few_regions():
                        group = self._group(layer)
                    _check_apart(group, found)
                except _Refused as reason:
                    refused |= dict.fromkeys((layer, *reason.alike), str(reason))
                    continue
                known |= {(member.module, member.part) for member in group.members}
                found.append(group)
        finally:
            self._graph._queries_checked.reset(checked)
        yield from found
        yield from ((n, refused[n]) for n in layers if n in refused and (n, "out") not in known)

    # -- inner parts -------------------------------------------------------------------------------

    def _group(self, layer: str) -> Group:
        axis = self._graph.parameter(f"{layer}.weight").axis(_out_axis(self._modules[layer]))
        outputs = int(axis.tensor.shape[axis.dim])
        if outputs < 2:
            raise _Refused("it has one output only")
        try:
            return self._group_of(layer, axis, outputs, [outputs])
        except _Refused:
            pieces, apart = self._pieces(axis, outputs)
            full = outputs // pieces
            packed = apart and isinstance(self._modules[layer], nn.Linear)  # as queries, keys and values
            if pieces < 2 or outputs % pieces or full < 2 or packed:
                raise
            ends = [full * (i + 1) for i in range(pieces)] if apart else [outputs]
            return self._group_of(layer, axis, full, ends)

    def _removal(self, axis: Any, length: int, ends: Sequence[int]) -> Any:
        """Return what goes with some outputs of a layer, so many before each of some ends."""
        impact = self._graph.propagate(remove=[axis.select(self._span(end - length, end)) for end in ends])
        self._followed += len(impact.selections)
        return impact

    def _pieces(self, axis: Any, outputs: int) -> tuple[int, bool]:
        """Return in how many equal pieces the outputs of a layer are used, and whether these are apart.

        So many outputs go with the last one: 2 if they are chunked and multiplied. If it goes alone, it may
        be that the forward splits them, which needs pieces that stay equal.
        """
        impact = self._removal(axis, 1, [outputs])
        together = len(impact.selections[axis.tensor.id].fully_selected_indices(axis.dim))
        split = (r for r in impact.requirements if getattr(r, "kind", "") == "partition_arguments")
        for facts in (dict(requirement.data) for requirement in split):
            lengths = {part.shape[facts["axis"].dim] for part in facts["outputs"] if not facts["unbound"]}
            if together == 1 and {n * len(facts["outputs"]) for n in lengths} == {outputs}:
                return len(facts["outputs"]), True
        return together, False

    def _group_of(self, layer: str, axis: Any, full: int, ends: Sequence[int]) -> Group:
        """Return the group of which the `full` outputs of a layer before each of some ends are segments."""
        kept = full // 2
        impact = self._removal(axis, full - kept, ends)
        unit = self._unit(impact)
        if unit > full // 2 or full % unit:
            raise _Refused(f"its outputs come in units of {unit}, of which it has {full / unit:g}")
        if kept % unit:
            kept = kept // unit * unit
            impact = self._removal(axis, full - kept, ends)
        try:
            removed = self._removed(impact)
        except _Refused as refused:
            refused.alike = tuple(self._alike(impact, full)) if ends == [full] else ()
            raise
        lengths = (stop - start for _, runs in removed.values() for start, stop in runs)
        each = (full - kept) // math.gcd(full - kept, *lengths)  # outputs per entry of another tensor
        if unit == 1 and full % each == kept % each == 0:
            full, kept = full // each, kept // each
        members: list[Member] = []
        for (path, part), (kind, runs) in removed.items():
            members += self._members(path, part, kind, runs, kept, full)
        if not any((m.module, m.part) == (layer, "out") for m in members):
            raise _Refused("its outputs are not sliced on their own")
        members += dict.fromkeys(self._numbers(impact, full))  # several reshapes may read one number
        axis_kind = "stream" if self._is_shared(impact) else _kind(self._modules, members)
        return Group(f"{layer}.{axis_kind}", axis_kind, full, tuple(members), unit)

    def _is_shared(self, impact: Any) -> bool:
        """Tell whether the channels are added to those of other layers, or concatenated with them."""
        chosen, operations = impact.selections, self._graph._data.operations
        for node in self._nodes.values():
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

    def _removed(self, impact: Any) -> dict[tuple[str, str], tuple[type[Operator], _Runs]]:
        """Return module and part of the operator -> the operator, and what goes of the part."""
        ends = {ref.id for ref in impact.interfaces if not self._graph._data.refs[ref.id].paths}
        if ends:
            which = [str(i) for i, ids in enumerate(self._returned, 1) if not ends.isdisjoint(ids)]
            advice = "; leave it out there to narrow it" if len(self._returned) > 1 else ""
            place = f", tensor {' and '.join(which)} of those returned{advice}" if which else ""
            raise _Refused(f"its outputs are inputs or outputs of the model{place}")
        for diagnostic in impact.diagnostics:
            shapes = (self._graph._data.refs[t].shape for t in diagnostic.tensors)
            if diagnostic.code == "empty_axis" and not all(map(math.prod, shapes)):
                continue  # It is empty in the whole model, too: no box lies in a level of features.
            if not diagnostic.complete or diagnostic.code not in WHOLE_GROUPS:
                told = diagnostic.message.startswith(BY_THE_FORWARD)
                what = diagnostic.message if told else f"{BY_THE_FORWARD} moves or mixes its outputs"
                at = diagnostic.node or (*diagnostic.tensors, "::")[0].split(":")[2]
                raise _Refused(f"{what}, {self._place(at) if at in self._nodes else f'down to {at}'}")
        for requirement in impact.requirements:
            if (what := self._reduction(requirement, impact.selections)) is not None:
                raise _Refused(f"{BY_THE_FORWARD} {what} its outputs, {self._place(requirement.target)}")
        removed: dict[tuple[str, str], tuple[type[Operator], _Runs]] = {}
        for selection in (*impact.parameters, *impact.buffers):
            (path, name), *tied = self._places(selection)
            if tied:
                raise _Refused(f"{' and '.join(selection.tensor.paths)} are one tied tensor")
            whole = 1
            for dim, length in enumerate(selection.tensor.shape):
                indices = selection.fully_selected_indices(dim)
                whole *= length - len(indices)
                if not indices or self._is_free(path, name, dim):
                    continue
                kind, part = _part(self._modules[path], path, name, dim)
                found = kind, indices.intervals
                if removed.setdefault((path, part), found) != found:
                    raise _Refused(f"different channels of the tensors of {path} go with it")
            if selection.count != math.prod(selection.tensor.shape) - whole:
                raise _Refused(f"single elements of {selection.tensor.paths[0]} go with it")
        for requirement in impact.requirements:
            path, _, name = requirement.target.rpartition(".")
            numbers = "num_features", "num_channels"
            if name in numbers and slicer_of(self._modules[path]) is LayerNormSlice:
                tensor, dim = requirement.expression.value  # A norm may have no tensors.
                chosen = impact.selections.get(tensor.id)
                runs = chosen.fully_selected_indices(dim).intervals if chosen else ()
                if runs:
                    removed.setdefault((path, "features"), (LayerNormSlice, runs))
        return removed

    def _places(self, selection: Any) -> list[tuple[str, str]]:
        """Return the modules that hold a tensor, each under its first path, with the name of the tensor."""
        places = (path.rpartition(".")[::2] for path in selection.tensor.paths)
        return list(dict.fromkeys((self._first[path], name) for path, name in places))

    def _alike(self, impact: Any, full: int) -> Iterator[str]:
        """Yield the layers with `full` outputs whose upper half goes, so that the same goes with theirs."""
        for selection in impact.parameters:
            path, name = self._places(selection)[0]
            if computes_channels(self._modules[path]) and name == "weight":
                axis = _out_axis(self._modules[path])
                indices = selection.fully_selected_indices(axis)
                if selection.tensor.shape[axis] == full and indices.intervals == ((full // 2, full),):
                    yield path

    def _reduction(self, requirement: Any, chosen: Mapping[Any, Any]) -> str | None:
        """Return what the forward does if it is one of the `REDUCTIONS` over removed channels."""
        reduces = getattr(requirement, "kind", "") == "reduction_domain"
        name = _name(self._nodes[requirement.target]) if reduces else ""
        if name not in REDUCTIONS:
            return None
        removed, axes = chosen.get(requirement.tensors[0].id), dict(requirement.data)["axes"]
        over = removed is not None and any(map(removed.fully_selected_indices, axes))
        return EFFECTS[name] if over else None

    def _place(self, name: str) -> str:
        """Return which function of which module a node is, and what that means."""
        node = self._nodes[name]
        path, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", object)}).values()))
        where = f"{path or 'the model itself'} ({kind.__name__})"
        called = WRITTEN.get(_name(node), _name(node))
        return (
            f"with {called} in {where}: the first ones alone would give something else; it stays whole, "
            "unless the forward treats each output by itself"
        )

    def _unit(self, impact: Any) -> int:
        """Return the number of channels that only go together, because grouped layers drop whole groups."""
        unit = 1
        for selection in impact.parameters:
            module = self._modules[self._places(selection)[0][0]]
            groups = int(getattr(module, "num_groups" if isinstance(module, nn.GroupNorm) else "groups", 1))
            if groups > 1 and (isinstance(module, nn.GroupNorm) or computes_channels(module)):
                unit = math.lcm(unit, selection.tensor.shape[0] // groups)
        return unit

    def _members(
        self, path: str, part: str, kind: type[Operator], runs: _Runs, kept: int, full: int
    ) -> Iterator[Member]:
        """Yield the members that keep a prefix of each of their segments."""
        try:
            made = kind(self._modules[path], path, {part: 0})
            made.check()
            length = made.full(part)
        except InsertError as error:
            raise _Refused(str(error)) from None
        name = f"{path}.{part}".lstrip(".")
        if len(runs) > MOST_SEGMENTS:
            raise _Refused(f"the channels of {name} are interleaved")
        end = 0
        for start, stop in runs:
            multiple, rest = divmod(stop - start, full - kept)
            begin = stop - multiple * full
            if rest or not multiple or begin < end:
                gone = f"{start} to {stop} of {length} go with its outputs"
                raise _Refused(f"{name} keeps no prefix, {gone}; let the forward keep their order")
            end = stop
            alone = (begin, stop) == (0, length)
            if not alone and (kind is ElasticAttribute or (kind is LayerNormSlice and list(made.buffers()))):
                raise _Refused(f"{name} consists of several segments")
            yield Member(path, part, kind, multiple, *((None, None) if alone else (begin, length)))

    def _is_free(self, path: str, name: str, dim: int) -> bool:
        """Tell whether an axis is the heads of a MultiheadAttention, which need not follow the width."""
        if name.startswith(("in_proj", "bias_")):
            return dim in (0, 2) and isinstance(self._modules[path], nn.MultiheadAttention)
        owner = self._modules.get(path.removesuffix(".out_proj"))
        return dim == 1 and path.endswith(".out_proj") and isinstance(owner, nn.MultiheadAttention)

    @cached_property
    def split_by(self) -> list[_Attribute]:
        """The numbers of modules by which the forward splits tensors."""
        nodes = [n for n in self.recording.graph.nodes if _name(n) == "split"] if self.recording else []
        return [v for v in tree_leaves([(n.args, n.kwargs) for n in nodes]) if isinstance(v, _Attribute)]

    def _numbers(self, impact: Any, full: int) -> Iterator[Member]:
        """Yield the attributes that a forward reads to reshape what goes, if they hold the full size."""
        kinds = "shape_arguments", "partition_arguments"
        shaping = (r for r in impact.requirements if getattr(r, "kind", "") in kinds and r.arguments)
        for requirement in (r for r in shaping if r.tensors[0].id in impact.selections):
            node = self._nodes[requirement.target]
            for value in tree_leaves((node.args[1:], node.kwargs)):
                if isinstance(value, _Attribute) and value == full:
                    yield Member(value.path, value.name, ElasticAttribute)


class _Attribute(int):
    """A whole number that knows which attribute of which module it is, also in a graph."""

    path: str
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attribute:
        return self


def _name_numbers_(model: nn.Module) -> None:
    """Give names to the whole numbers of users' modules."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and not type(module).__module__.startswith("torch."):
                named = _Attribute(value)
                named.path, named.name = path, name
                module.__dict__[name] = named


def computes_channels(module: nn.Module) -> bool:
    """Tell whether a layer has a weight with an axis of outputs, which an operator slices."""
    weight = traits_of(module).axes.get("weight", ())
    return "out" in weight and slicer_of(module) is not None


def _name(node: Any) -> str:
    """Return the name of the function that a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def _out_axis(module: nn.Module) -> int:
    return traits_of(module).axes["weight"].index("out")


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
    taken = grouped(((m.module, m.part), _extent(other, m)) for other in others for m in other.members)
    for m in group.members:
        start, stop = _extent(group, m)
        if any(start < b and a < stop for a, b in taken.get((m.module, m.part), ())):
            raise _Refused(f"{m.module}.{m.part} follows other channels, too".lstrip("."))


def _extent(group: Group, member: Member) -> tuple[int, float]:
    """Return where the segment of a member starts and stops."""
    if member.start is None:
        return 0, math.inf
    return member.start, member.start + group.full * member.multiple


def _kind(modules: Mapping[str, nn.Module], members: Sequence[Member]) -> str:
    """Return the axis of a group: feed-forward neurons lie between linear layers, without anything else."""
    linear = all(isinstance(modules[m.module], nn.Linear) for m in members)
    outputs, inputs = ([m.module for m in members if (m.part == "out") is out] for out in (True, False))
    rank = linear and inputs and is_rank(modules, outputs[0], inputs[0])
    return "ffn" if linear and len(outputs) <= 2 and not rank else "width"


def is_rank(modules: Mapping[str, Any], first: str, last: str) -> bool:
    """Tell whether two layers are an adapter: narrow ones, beside one that could stand for them."""
    around, other = (modules[path.rpartition(".")[0]] for path in (first, last))
    sides = ([getattr(modules[p], f"{side}_features", 0) for side in ("in", "out")] for p in (first, last))
    (in_, rank), (_, out) = sides
    shapes = [tuple(p.shape) for m in (around, *around.children()) for p in m.parameters(recurse=False)]
    beside = around is other and not isinstance(around, nn.Sequential)
    return bool(beside and rank < min(in_, out) and shapes.count((out, in_)) == 1)


def _why(error: BaseException) -> str:
    if type(error).__name__ == "StaleGraphError":
        return "its forward changes attributes of the model, such as a counter that it reads"
    return f"{type(error).__name__}: {first_line(error)}"[:300]


# -- the package ------------------------------------------------------------------------------------


def _few_regions() -> Any:
    """Join regions before torch-kirigami compares all pairs, in this thread only."""
    from torch_kirigami.dep_graph import selection

    normalize = selection.normalize
    return patched_here(selection, normalize=lambda regions: normalize(_joined(regions)))


def _recorded(model: nn.Module, example: Any) -> Recording:
    """Record a model, and put back what its forward counts if it does nothing else with it."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    recording, count = recorded(model, example), _Count()
    counts = [
        (now, name, (value, now[name]))
        for now, former in before
        for name, value in former.items()
        if type(now.get(name)) in (int, float) and str(now[name]) != str(value)
    ]
    for now, name, _ in counts:
        now[name] = count
    # A set asks for hashes, so that what is returned is read, too.
    error = failure(lambda *a, **k: set(tree_leaves(model(*a, **k))), example) if counts else None
    for now, name, values in counts:
        now[name] = values[bool(error or count.reads)]
    return recording


class _Count:
    """Stands for a number to which a forward may add others; it notes whatever else is done with it."""

    __class__: Any = int  # for isinstance()

    def __init__(self) -> None:
        self.reads: list[Any] = []

    def __add__(self, number: Any) -> Any:
        return self if isinstance(number, int | float) else self.reads.append(number)

    __radd__ = __sub__ = __add__


for _method in {*vars(int), *vars(float)} - {*vars(_Count), "__new__", "__getattribute__"}:
    setattr(_Count, _method, lambda self, *others: self.reads.append(others))


def _joined(regions: Iterable[Any]) -> list[Any]:
    """Return fewer regions that cover the same: those that differ on one axis only become one."""
    from torch_kirigami.dep_graph.selection import IndexSet, Region
    from torch_kirigami.errors import AnalysisLimitError

    found = [region.axes for region in {*regions} if not region.empty]
    for axis in range(len(found[0]) if len(found) > 1 else 0):
        runs = [((axes[:axis], axes[axis + 1 :]), run) for axes in found for run in axes[axis].intervals]
        found = [(*a, IndexSet(tuple(line)), *b) for (a, b), line in grouped(runs).items()]
    if len(found) > MOST_REGIONS:
        raise AnalysisLimitError("Too many Cartesian regions")
    return list(map(Region, found))


@cache
def _rules() -> Any:
    """Return the rules of the package; where they know nothing, what follows what is found by a trial."""
    from torch_kirigami.dep_graph.operation import OperatorRule
    from torch_kirigami.dep_graph.registry import OperatorRegistry

    class Complete(OperatorRule):
        """A rule of the package, if there is one, and a trial for what it does not know."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def build_spec(self, operation: Any) -> Any:
            with suppress(Exception):  # It is None, or takes the arguments for those of another function.
                return self.inner.build_spec(operation)
            return spec_by_trial(operation)

    rules: Any = OperatorRegistry.default()
    known, complete = rules.lookup, cache(Complete)

    def found(node: Any, module: nn.Module | None) -> Any:
        norm = module is not None and (traits_of(module).kind == CHANNEL_NORM or is_batch_norm(module))
        return complete(known(node, module) or (rules.modules[nn.BatchNorm2d] if norm else None))

    rules.lookup, rules.copy = found, lambda: rules
    return rules
