"""Analysis of the recorded graph: which parts of which modules have to be narrowed together, and why not.

The upper half of the outputs of a layer is removed, and what goes with it is read off: if that is a suffix of
one axis of every tensor, a group is found; if something else goes, the layer is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError, first_line
from subnetact.insertion.analysis import (
    EFFECTS, BY_THE_FORWARD, CONCATENATIONS, MOST_SEGMENTS, WRITTEN, _Attribute, _check_apart, _extent, _kind, _name,
    _name_numbers_, _out_axis, _part, _recorded, _Refused, _why, computes_channels, is_rank,
)
from subnetact.insertion.description import Group, Member
from subnetact.insertion.recorder import Recording
from subnetact.insertion.relations import Masks, Mixed, Relations, _Moved, _shape
from subnetact.operators import ElasticAttribute, LayerNormSlice, Operator
from subnetact.operators.base import slicer_of
from subnetact.operators.layer_traits import CHANNEL_NORM, traits_of
from subnetact.supernet.elementwise import ADDITIONS

_Runs = tuple[tuple[int, int], ...]


class TracedModel2:
    def __init__(self, model: nn.Module, example: Any) -> None:
        self.recording: Recording | None = None
        self.failure: InsertError | None = None
        _name_numbers_(model)
        try:
            self.recording = _recorded(model, example)
            if self.recording.branches:
                raise InsertError("its forward branches on values that it computes with its weights")
        except Exception as error:
            raise_if_out_of_memory(error)
            self.failure = InsertError(
                f"{type(model).__name__} cannot be traced: {_why(error)}; describe its elastic "
                "modules by hand, or make its forward free of branches on values and of changes to the model"
            )
            self.failure.__cause__ = error
            return
        self._modules = dict(model.named_modules())
        self._relations = Relations(self.recording)
        (*_, output) = self._relations.nodes
        self._outputs: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]

    def layers(self) -> list[str]:
        """Return the names of the layers that run, or whose weights are read, in this order."""
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
                group = self._group(layer)
                _check_apart(group, groups)
            except _Refused as reason:
                refused |= dict.fromkeys((layer, *reason.alike), str(reason))
                continue
            known |= {(member.module, member.part) for member in group.members}
            groups.append(group)
        yield from groups
        yield from ((n, refused[n]) for n in layers if n in refused and (n, "out") not in known)

    def _group(self, layer: str) -> Group:
        module: Any = self._modules[layer]
        weight = module.in_proj_weight if isinstance(module, nn.MultiheadAttention) else module.weight
        axis = (*self._relations.homes[id(weight)][0], _out_axis(module))
        (outputs,) = _shape(axis, self._relations)
        if outputs < 2:
            raise _Refused("it has one output only")
        try:
            return self._group_of(layer, axis, outputs, [outputs])
        except _Refused:
            pieces, apart = self._pieces(axis, outputs)
            full = outputs // pieces
            packed = apart and isinstance(module, nn.Linear)  # as queries, keys and values
            if pieces < 2 or outputs % pieces or full < 2 or packed:
                raise
            ends = [full * (i + 1) for i in range(pieces)] if apart else [outputs]
            return self._group_of(layer, axis, full, ends)

    def _removal(self, axis: Any, length: int, ends: Sequence[int]) -> tuple[Masks, fx.Node | None]:
        """Return what goes with some outputs of a layer, so many before each of some ends, and what mixes it."""
        mask = torch.zeros(_shape(axis, self._relations), dtype=torch.bool)
        for end in ends:
            mask[end - length : end] = True
        try:
            return self._relations.closure({axis: mask}), None
        except Mixed as mixed:
            return mixed.masks, mixed.node

    def _pieces(self, axis: Any, outputs: int) -> tuple[int, bool]:
        """Return in how many equal pieces the outputs of a layer are used, and whether these are apart.

        So many outputs go with the last one: 2 if they are chunked and multiplied. If it goes alone, it may
        be that the forward splits them, which needs pieces that stay equal.
        """
        masks, _ = self._removal(axis, 1, [outputs])
        together = len(_runs(masks[axis], 0, outputs))
        for node in self._relations.touched(masks) if together == 1 else ():
            parts = self._relations.results(node)
            whole = node.args[0].meta.get("tensor_meta") if node.args and isinstance(node.args[0], fx.Node) else None
            if len(parts) > 1 and whole is not None and node.args[0] in masks and isinstance(self._relations.function(node), _Moved):
                for dim, length in enumerate(whole.shape):
                    if length == outputs and {p.meta["tensor_meta"].shape[dim : dim + 1].numel() * len(parts) for p in parts} == {outputs}:
                        return len(parts), True
        return together, False

    def _group_of(self, layer: str, axis: Any, full: int, ends: Sequence[int]) -> Group:
        """Return the group of which the `full` outputs of a layer before each of some ends are segments."""
        kept = full // 2
        masks, mixes = self._removal(axis, full - kept, ends)
        unit = self._unit(masks)
        if unit > full // 2 or full % unit:
            raise _Refused(f"its outputs come in units of {unit}, of which it has {full / unit:g}")
        if kept % unit:
            kept = kept // unit * unit
            masks, mixes = self._removal(axis, full - kept, ends)
        try:
            removed = self._removed(masks, mixes)
        except _Refused as refused:
            refused.alike = tuple(self._alike(masks, full)) if ends == [full] else ()
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
        members += dict.fromkeys(self._numbers(masks, full))  # several reshapes may read one number
        axis_kind = "stream" if self._is_shared(masks) else _kind(self._modules, members)
        return Group(f"{layer}.{axis_kind}", axis_kind, full, tuple(members), unit)

    def _is_shared(self, masks: Masks) -> bool:
        """Tell whether the channels are added to those of other layers, or concatenated with them."""
        for node in self._relations.touched(masks):
            read = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
            goes = [n for n in read if n in masks and n.op != "get_attr"]
            if node.target in ADDITIONS and len(goes) > 1:
                return True
            if node.target in CONCATENATIONS and len(goes) < len(read):
                shape = node.meta["tensor_meta"].shape
                for tensor in goes:
                    grown = [d for d, n in enumerate(tensor.meta["tensor_meta"].shape) if n != shape[d]]
                    if any(_runs(masks[tensor], d, tensor.meta["tensor_meta"].shape[d]) for d in grown):
                        return True
        return False

    def _removed(self, masks: Masks, mixes: fx.Node | None) -> dict[tuple[str, str], tuple[type[Operator], _Runs]]:
        """Return module and part of the operator -> the operator, and what goes of the part."""
        if any(not isinstance(key, tuple) and (key.op == "placeholder" or key in self._outputs) for key in masks):
            which = [str(i) for i, node in enumerate(self._outputs, 1) if node in masks]
            advice = "; leave it out there to narrow it" if len(self._outputs) > 1 else ""
            place = f", tensor {' and '.join(which)} of those returned{advice}" if which else ""
            raise _Refused(f"its outputs are inputs or outputs of the model{place}")
        if any(bool(mask.all()) for key, mask in masks.items() if not isinstance(key, tuple)):
            raise _Refused("all of a part of its outputs goes with it")
        if mixes is not None:
            what = EFFECTS.get(_name(mixes), "moves or mixes")
            raise _Refused(f"{BY_THE_FORWARD} {what} its outputs, {self._place(mixes)}")
        removed: dict[tuple[str, str], tuple[type[Operator], _Runs]] = {}
        for key, mask in masks.items():
            if not isinstance(key, tuple):
                if key.op == "get_attr":
                    self._check_whole(key, masks)
                continue
            path, name, axis = key
            homes = self._relations.homes[id(self._relations.tensor((path, name)))]
            if len(homes) > 1:
                raise _Refused(f"{' and '.join(f'{p}.{n}' for p, n in homes)} are one tied tensor")
            if self._is_free(path, name, axis):
                continue
            kind, part = _part(self._modules[path], path, name, axis)
            entry = kind, _runs(mask, 0, self._relations.tensor((path, name)).shape[axis])
            if removed.setdefault((path, part), entry) != entry:
                raise _Refused(f"different channels of the tensors of {path} go with it")
        for node in self._relations.touched(masks):
            path, x = str(node.target), (node.all_input_nodes or [None])[0]
            if node.op == "call_module" and x in masks and slicer_of(self._modules[path]) is LayerNormSlice:
                axis = 1 if isinstance(self._modules[path], nn.GroupNorm) or traits_of(self._modules[path]).kind == CHANNEL_NORM else -1
                if runs := _runs(masks[x], axis % masks[x].dim(), x.meta["tensor_meta"].shape[axis]):  # A norm may have no tensors.
                    removed.setdefault((path, "features"), (LayerNormSlice, runs))
        return removed

    def _check_whole(self, node: fx.Node, masks: Masks) -> None:
        """Refuse a tensor of which other entries go than whole ones of its axes."""
        homes = self._relations._home(node)
        if not homes:
            raise _Refused(f"the constant {node.target} goes with it")
        path, name = homes[0]
        slabs = torch.zeros(node.meta["tensor_meta"].shape, dtype=torch.bool)
        for axis in range(slabs.dim()):
            if (mask := masks.get((path, name, axis))) is not None:
                slabs |= mask.view([-1 if i == axis else 1 for i in range(slabs.dim())])
        if not torch.equal(slabs, masks[node].expand_as(slabs)):
            raise _Refused(f"single elements of {path}.{name} go with it")

    def _alike(self, masks: Masks, full: int) -> Iterator[str]:
        """Yield the layers with `full` outputs whose upper half goes, so that the same goes with theirs."""
        for key, mask in masks.items():
            if isinstance(key, tuple) and key[1] == "weight" and computes_channels(self._modules[key[0]]):
                if key[2] == _out_axis(self._modules[key[0]]) and len(mask) == full and _runs(mask, 0, full) == ((full // 2, full),):
                    yield key[0]

    def _place(self, node: fx.Node) -> str:
        """Return which function of which module a node is, and what that means."""
        path, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", object)}).values()))
        where = f"{path or 'the model itself'} ({kind.__name__})"
        called = WRITTEN.get(_name(node), _name(node))
        return (
            f"with {called} in {where}: the first ones alone would give something else; it stays whole, "
            "unless the forward treats each output by itself"
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

    def _numbers(self, masks: Masks, full: int) -> Iterator[Member]:
        """Yield the attributes that a forward reads to reshape what goes, if they hold the full size."""
        for node in self._relations.touched(masks):
            if isinstance(self._relations.function(node), _Moved):
                for value in tree_leaves((node.args[1:], node.kwargs)):
                    if isinstance(value, _Attribute) and value == full:
                        yield Member(value.path, value.name, ElasticAttribute)


def _runs(mask: Tensor, axis: int, length: int) -> _Runs:
    """Return (start, stop) of every run of entries of an axis that go as a whole."""
    gone = mask.amin([i for i in range(mask.dim()) if i != axis]) if mask.dim() > 1 else mask
    gone = gone.expand(length)
    edges = torch.diff(gone.int(), prepend=gone.new_zeros(1, dtype=torch.int), append=gone.new_zeros(1, dtype=torch.int))
    starts, stops = ((edges == edge).nonzero().flatten().tolist() for edge in (1, -1))
    return tuple(zip(starts, stops, strict=True))
