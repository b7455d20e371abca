"""Analysis of the recorded graph: which parts of which modules have to be narrowed together, and why not.

The upper half of the outputs of a layer is removed, and what goes with it is read off: if that is a suffix of
one axis of every tensor, a group is found; if something else goes, the layer is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from subnetact.device import raise_if_explained
from subnetact.errors import InsertError, first_line
from subnetact.insertion.description import Group, Member, without_numbers
from subnetact.insertion.function_trial import Mask, axes_but
from subnetact.insertion.recorder import Recording, called_name, recorded
from subnetact.insertion.relations import Masks, Mixed, Relations, is_grid, shape_of
from subnetact.operators import ElasticAttribute, LayerNormSlice, Operator
from subnetact.operators.base import slicer_of
from subnetact.operators.layer_traits import CHANNEL_NORM, norm_features, traits_of
from subnetact.operators.operation_traits import calls_of
from subnetact.spec import grouped
from subnetact.supernet.elementwise import ADDITIONS
from subnetact.supernet.failure import failure

MOST_SEGMENTS = 256
"""If more segments than these would be kept of one part, its channels are interleaved."""

CONCATENATIONS = calls_of("concatenation")
PRODUCTS_WITH_WEIGHTS = ("linear", "conv1d", "conv2d", "conv3d", "matmul", "addmm", "einsum")
WRITTEN = {"assigned": "x[...] = ...", "getitem": "x[...]"}
"""How users write functions whose names they do not know."""
EFFECTS = {
    **{"mean": "averages over", "roll": "shifts", "flip": "reverses the order of", "sort": "sorts"},
    "assigned": "writes over some of",
    **dict.fromkeys(("amax", "amin"), "takes the largest or the least of"),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), "takes the variance over"),
    **dict.fromkeys(("linspace", "logspace"), "spreads numbers over"),
}
"""What functions do with all entries of an axis, in the words of a refusal; others move or mix them."""

_Runs = tuple[tuple[int, int], ...]


class _Refused(Exception):
    """A layer cannot be narrowed, and the layers in `alike`, whose outputs go with its own, cannot either.

    If it `is_final`, no other number of outputs can go, either; if it `is_mixed`, a function mixes them with
    others.
    """

    alike: tuple[str, ...] = ()
    masks: Masks
    is_final = is_mixed = False


class _Disordered(_Refused):
    """What would be left of a part is no beginning of it."""


class TracedModel:
    """The graph of a model's forward, with the relations between its tensors."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        """Run a model, which nobody else uses; `failure` says why its tensors could not be related."""
        self.recording: Recording | None = None
        self.failure: InsertError | None = None
        self._answers: dict[str, Group | _Refused] = {}
        self._counts: dict[tuple[str, int], int] = {}
        _name_numbers_(model)
        try:
            self.recording = _recorded(model, example)
            if self.recording.branches:
                raise InsertError("its forward branches on values that it computes with its weights")
        except Exception as error:
            raise_if_explained(error)
            why = f"{type(error).__name__}: {first_line(error)}"[:300]
            why = str(error) if isinstance(error, InsertError) else why
            self.failure = InsertError(
                f"{type(model).__name__} cannot be traced: {why}; describe its elastic "
                "modules by hand, or make its forward free of branches on values and of changes to the model"
            )
            self.failure.__cause__ = error
        if self.recording is not None:
            self._modules = dict(model.named_modules())
            self._relations = Relations(self.recording)
            (*_, output) = self._relations.nodes
            self._outputs: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]

    def layers(self) -> list[str]:
        """Return the names of the layers that run, or whose weights are read, in this order."""
        if self.recording is None:
            return []
        called = [
            str(node.target) if node.op == "call_module" else str(node.target).rpartition(".")[0]
            for node in self._relations.nodes
            if node.op in ("call_module", "get_attr")
        ]
        inside = [n for path in called for n in self._modules if n == path or n.startswith(f"{path}.")]
        return [n for n in dict.fromkeys(inside) if computes_channels(self._modules[n])]

    def groups(self, layers: Sequence[str]) -> Iterator[Group | tuple[str, str]]:
        """Yield the groups that the outputs of layers form, and for other layers a name and a reason."""
        known: set[tuple[str, str]] = set()
        groups: list[Group] = []
        refused: dict[str, str] = {}
        for layer in layers:
            if (layer, "out") in known or layer in refused:
                continue
            try:
                group = self._answer(layer)
                _check_apart(group, groups)
            except _Refused as reason:
                refused |= dict.fromkeys((layer, *reason.alike), str(reason))
                continue
            known |= {(member.module, member.part) for member in group.members}
            groups.append(group)
        yield from groups
        yield from ((n, refused[n]) for n in layers if n in refused and (n, "out") not in known)

    def _answer(self, layer: str) -> Group:
        """Return the group of a layer, which is looked for once."""
        if layer not in self._answers:
            try:
                self._answers[layer] = self._group(layer)
            except _Refused as refused:
                self._answers[layer] = refused
        answer = self._answers[layer]
        if isinstance(answer, _Refused):
            raise answer
        return answer

    def _group(self, layer: str) -> Group:
        """Return the group of units of which the outputs of a layer consist, and of what goes with them."""
        module: Any = self._modules[layer]
        axis = (*self._relations.homes[id(module.weight)][0], _out_axis(module))
        (outputs,) = self._relations.shape(axis)
        if outputs < 2:
            raise _Refused("it has one output only")
        masks, each, full = self._halved(axis, outputs)
        kept = full // 2
        removed = self._removed(masks)
        unit = self._unit(masks)
        unit = unit if each % unit == 0 else 1  # Groups of other channels than these go as a whole already.
        full, kept = full * unit, kept * unit
        lengths = (stop - start for _, gone in removed.values() for start, stop in gone)
        each = (full - kept) // math.gcd(full - kept, *lengths)  # units per entry of another tensor
        if unit == 1 and full % each == kept % each == 0:
            full, kept = full // each, kept // each
        members: list[Member] = []
        for (path, part), (kind, gone) in sorted(removed.items()):
            try:
                members += self._members(path, part, kind, gone, kept, full)
            except _Disordered as disordered:
                moving = (node for node in self._relations.touched(masks) if self._relations.moves(node))
                node = next((node for node in moving if called_name(node) in EFFECTS), None)
                raise _Refused(str(disordered) if node is None else self._effect(node)) from None
        totals = {full, *(m.multiple * full for m in members if m.part == "out")}
        numbers = dict.fromkeys(self._numbers(masks, full, totals))  # several reshapes may read one number
        members += [n for n in numbers if n.module not in {m.module for m in members if "." not in m.part}]
        axis_kind = "stream" if self._is_shared(masks) else _kind(self._modules, members, full)
        return Group(f"{layer}.{axis_kind}", axis_kind, full, tuple(members), unit)

    def _halved(self, axis: Any, outputs: int) -> tuple[Masks, int, int]:
        """Return what goes with the upper half of the units of a layer, outputs per unit, and their number.

        A unit is as few first outputs as reach, without others, everything that the half reaches.
        """
        alike = without_numbers(axis[0]), outputs
        counts = [n for n in range(1, outputs // 2 + 1) if outputs % n == 0]
        mixed_once = False
        for count in dict.fromkeys([1, self._counts.get(alike, 1), *counts]):
            reached: set[Any] | None = None
            mixed = False
            try:
                first = self._removal(axis, ((0, count),))
                reached = _parameters(first)
            except _Refused as refused:
                if refused.is_final:
                    raise
                first, mixed = refused.masks, refused.is_mixed
            mixed_once = mixed_once or mixed
            runs = _runs(first[axis], 0, outputs)
            each = sum(stop - start for start, stop in runs)
            full = outputs // each
            ends = [start + (stop - start) * full for start, stop in runs]
            if full < 2 or outputs % each or [0, *ends] != [*(start for start, _ in runs), outputs]:
                continue
            if reached is not None or (mixed and count == 1):
                spans = zip(runs, ends, strict=True)
                masks = self._removal(axis, [(e - (b - a) * (full - full // 2), e) for (a, b), e in spans])
                if _parameters(masks) == reached:
                    self._counts[alike] = count
                    return masks, each, full
        why = "its outputs are used in parts that are not equal, or only all of them together"
        # What is mixed depends on the layer at which one begins, so that others may be no layers like it.
        raise _Refused(why) if mixed_once else self._refusal(why, first, axis)

    def _removal(self, axis: Any, runs: Sequence[tuple[int, int]]) -> Masks:
        """Return what goes with some outputs of a layer."""
        mask = np.zeros(self._relations.shape(axis), bool)
        for start, stop in runs:
            mask[start:stop] = True
        try:
            masks = self._relations.closure(axis, mask)
        except Mixed as mixed:
            self._check_ends(mixed.masks, axis)
            refused = self._refusal(self._effect(mixed.node), mixed.masks, axis)
            refused.is_mixed = True
            raise refused from None
        self._check_ends(masks, axis)
        return masks

    def _check_ends(self, masks: Masks, axis: Any) -> None:
        """Refuse what goes on inputs and outputs of the model, and tensors that go as a whole."""
        nodes = [key for key in masks if not isinstance(key, tuple)]
        if any(node.op == "placeholder" or node in self._outputs for node in nodes):
            which = [str(i) for i, node in enumerate(self._outputs, 1) if node in masks]
            advice = "; leave it out there to narrow it" if len(self._outputs) > 1 else ""
            place = f", tensor {' and '.join(which)} of those returned{advice}" if which else ""
            refused = self._refusal(f"its outputs are inputs or outputs of the model{place}", masks, axis)
            refused.is_final = True
            raise refused
        if any(masks[node].all() or not is_grid(masks[node]) for node in nodes):
            raise self._refusal("what would be left of a tensor is nothing, or has no shape", masks, axis)

    def _refusal(self, reason: str, masks: Masks, axis: Any) -> _Refused:
        """Return a refusal, also of the layers of which the same outputs go."""
        refused, alike = _Refused(reason), list[str]()
        refused.masks = masks
        for key, mask in masks.items():
            layer = isinstance(key, tuple) and key[1] == "weight" and computes_channels(self._modules[key[0]])
            if layer and key[2] == _out_axis(self._modules[key[0]]) and np.array_equal(mask, masks[axis]):
                alike.append(key[0])
        refused.alike = tuple(alike)
        return refused

    def _is_shared(self, masks: Masks) -> bool:
        """Tell whether the channels are added to those of other layers, or concatenated with them."""
        makers: dict[fx.Node, set[fx.Node]] = {}  # the layers that have computed what flows there
        for node in self._relations.nodes:
            read = [n for n in node.all_input_nodes if n.op != "get_attr"]
            layer = node.op == "call_module" and computes_channels(self._modules[str(node.target)])
            product = called_name(node) in PRODUCTS_WITH_WEIGHTS and len(read) < len(node.all_input_nodes)
            makers[node] = (
                {node} if layer or product else set[fx.Node]().union(*map(makers.__getitem__, read))
            )
            goes = [n for n in read if n in masks]
            if node.target in ADDITIONS and len(goes) > 1 and makers[goes[0]] != makers[goes[1]]:
                return True
            if node.target in CONCATENATIONS and 0 < len(goes) < len(read):
                for tensor in goes:
                    sizes = enumerate(zip(shape_of(tensor), shape_of(node), strict=True))
                    if any(_runs(masks[tensor], axis, n) for axis, (n, whole) in sizes if n != whole):
                        return True
        return False

    def _removed(self, masks: Masks) -> dict[tuple[str, str], tuple[type[Operator], _Runs]]:
        """Return module and part of the operator -> the operator, and what goes of the part."""
        removed: dict[tuple[str, str], tuple[type[Operator], _Runs]] = {}
        for key, mask in masks.items():
            if not isinstance(key, tuple):
                if key.op == "get_attr" and self._relations.home(key) is None:
                    raise _Refused(f"the constant {key.target} goes with it")
                continue
            path, name, axis = key
            tensor = self._relations.tensor((path, name))
            for home, own in self._relations.homes[id(tensor)]:  # Several modules may hold it.
                kind, part = _part(self._modules[home], home, own, axis)
                entry = kind, _runs(mask, 0, tensor.shape[axis])
                if removed.setdefault((home, part), entry) != entry:
                    raise _Refused(f"different channels of the tensors of {home} go with it")
        for node in self._relations.touched(masks):
            path, module = str(node.target), self._modules.get(str(node.target))
            x = next((n for n in node.all_input_nodes if n in masks), None)
            if module is not None and x is not None and _slicer(module) is LayerNormSlice:
                by_channel = isinstance(module, nn.GroupNorm) or traits_of(module).kind == CHANNEL_NORM
                axis = 1 if by_channel else masks[x].ndim - 1
                if runs := _runs(masks[x], axis, shape_of(x)[axis]):  # A norm may have no tensors.
                    removed.setdefault((path, "features"), (LayerNormSlice, runs))
        return removed

    def _effect(self, node: fx.Node) -> str:
        """Return what a function does with the outputs of a layer, where, and what that means."""
        path, kind = next(reversed(node.meta["nn_module_stack"].values()))
        name = called_name(node)
        return (
            f"the forward {EFFECTS.get(name, 'moves or mixes')} its outputs, "
            f"with {WRITTEN.get(name, name)} in {path or 'the model itself'} ({kind.__name__}): the first "
            "ones alone would give something else; it stays whole, unless the forward treats each output by "
            "itself"
        )

    def _unit(self, masks: Masks) -> int:
        """Return the number of channels that only go together, because grouped layers drop whole groups."""
        unit = 1
        for path, name in {key[:2] for key in masks if isinstance(key, tuple)}:
            module = self._modules[path]
            groups = int(getattr(module, "num_groups" if isinstance(module, nn.GroupNorm) else "groups", 1))
            if groups > 1 and (isinstance(module, nn.GroupNorm) or computes_channels(module)):
                unit = math.lcm(unit, self._relations.tensor((path, name)).shape[0] // groups)
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
                raise _Disordered(f"{name} keeps no prefix, {gone}; let the forward keep their order")
            end = stop
            alone = (begin, stop) == (0, length)
            if not alone and (kind is ElasticAttribute or (kind is LayerNormSlice and list(made.buffers()))):
                raise _Refused(f"{name} consists of several segments")
            yield Member(path, part, kind, multiple, *((None, None) if alone else (begin, length)))

    def _numbers(self, masks: Masks, full: int, totals: Collection[int]) -> Iterator[Member]:
        """Yield the attributes that a forward reads to reshape what goes, if they hold one of its sizes."""
        for node in filter(self._relations.moves, self._relations.touched(masks)):
            arguments = tree_leaves((node.args[1:], node.kwargs))
            results = [result for result in self._relations.results(node) if result in masks]
            for at, value in enumerate(arguments):
                if isinstance(value, _Attribute) and value in totals:
                    places = self._places(node, results, at, len(arguments))
                    if any(shape_of(r)[a] == value and _runs(masks[r], a, int(value)) for r, a in places):
                        yield Member(value.path, value.name, ElasticAttribute, value // full)

    def _places(
        self, node: fx.Node, results: Sequence[fx.Node], at: int, count: int
    ) -> Iterator[tuple[fx.Node, int]]:
        """Yield the axes of results that an argument may give the length of, one of so many."""
        source = shape_of(node.all_input_nodes[0])
        for result in results:
            shape = shape_of(result)
            if count == len(shape) and result is node:
                yield result, at
            elif result is not node and len(shape) == len(source):  # It is split along one axis.
                yield from ((result, axis) for axis, n in enumerate(shape) if n != source[axis])
            else:
                yield from ((result, axis) for axis in range(len(shape)))


def _runs(mask: Mask, axis: int, length: int) -> _Runs:
    """Return (start, stop) of every run of entries of an axis that go as a whole."""
    gone = np.zeros(length + 2, np.int8)
    gone[1:-1] = mask.all(axes_but(axis, mask))
    edges = np.diff(gone)
    starts, stops = (np.flatnonzero(edges == edge).tolist() for edge in (1, -1))
    return tuple(zip(starts, stops, strict=True))


class _Attribute(int):
    """A whole number that knows which attribute of which module it is, also in a graph."""

    path: str
    name: str


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


def _parameters(masks: Masks) -> set[Any]:
    """Return the axes of parameters of which something goes."""
    return {key for key in masks if isinstance(key, tuple)}


def _out_axis(module: nn.Module) -> int:
    return traits_of(module).axes["weight"].index("out")


def _part(module: nn.Module, path: str, name: str, axis: int) -> tuple[type[Operator], str]:
    """Return the operator, and the part of it, that slices an axis of a tensor of a module."""
    slicer, axes = _slicer(module), traits_of(module).axes.get(name, ())
    if slicer is LayerNormSlice and not axes:
        return slicer, "features"
    if slicer is not None and axes:
        if axis >= len(axes):
            raise _Refused(f"axis {axis} of {path}.{name} goes with it")
        return slicer, axes[axis]
    return ElasticAttribute, f"{name}.{axis}"


def _slicer(module: nn.Module) -> type[Operator] | None:
    """Return the operator that slices a module; norms may be of classes that nobody knows."""
    return LayerNormSlice if norm_features(module) else slicer_of(module)


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


def _kind(modules: Mapping[str, nn.Module], members: Sequence[Member], full: int) -> str:
    """Return the axis of a group: neurons lie between linear layers, beside norms and depthwise layers."""
    deep = {m.module for m in members if 1 < getattr(modules[m.module], "groups", 1) == m.multiple * full}
    others = [m for m in members if m.operator is not LayerNormSlice and m.module not in deep]
    linear = all(traits_of(modules[m.module]).kind == "linear" for m in others)
    outputs, inputs = ([m.module for m in others if (m.part == "out") is out] for out in (True, False))
    rank = linear and inputs and is_rank(modules, outputs[0], inputs[-1])
    homes = {m.module.rpartition(".")[0] for m in others}
    latent = len(homes) == 1 and "attention" in type(modules[homes.pop()]).__name__.lower()
    return "ffn" if linear and len(outputs) <= 2 and not rank and not latent else "width"


def is_rank(modules: Mapping[str, Any], first: str, last: str) -> bool:
    """Tell whether two layers are an adapter: narrow ones, beside one that could stand for them."""
    around, other = (modules[path.rpartition(".")[0]] for path in (first, last))
    sides = ([getattr(modules[p], f"{side}_features", 0) for side in ("in", "out")] for p in (first, last))
    (in_, rank), (_, out) = sides
    shapes = [tuple(p.shape) for m in (around, *around.children()) for p in m.parameters(recurse=False)]
    beside = around is other and not isinstance(around, nn.Sequential)
    return bool(beside and rank < min(in_, out) and shapes.count((out, in_)) == 1)


def _recorded(model: nn.Module, example: Any) -> Recording:
    """Record a model, or refuse it if it changes attributes that are numbers other than to count with."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    recording, count = recorded(model, example), _Count()
    counts = [
        (now, name)
        for now, former in before
        for name, value in former.items()
        if type(now.get(name)) in (int, float) and str(now[name]) != str(value)
    ]
    for now, name in counts:
        now[name] = count
    # A set asks for hashes, so that what is returned is read, too.
    error = failure(lambda *a, **k: set(tree_leaves(model(*a, **k))), example) if counts else None
    if error or count.reads:
        raise InsertError("its forward changes attributes of the model, such as a counter that it reads")
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
