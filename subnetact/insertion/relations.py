"""Relations: which entries of which tensors of a recorded graph go together when some of them are removed.

What a function does is read off by calling it (`function_trial.py`): it moves data, or treats an axis entry
by entry. `RULES` states what no call shows: the sums of products and norms, over which the weights have to
follow. Whatever else a function does with entries that go mixes them with others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from subnetact.insertion.function_trial import FunctionTrial, Mask, Move, axes_but, indexed
from subnetact.insertion.recorder import Recording, called_name
from subnetact.operators.layer_traits import CHANNEL_NORM, norm_features, traits_of
from subnetact.spec import grouped

Masks: TypeAlias = dict[Any, Mask]
"""Which entries go, of the tensor that a node returns, or of an axis of a parameter or buffer.

The key of the latter is (path of a module, name, axis). 1 in a shape stands for an axis along which all are
alike.
"""
Part: TypeAlias = tuple[tuple[int, ...], tuple[str | None, ...]]
"""The lengths that an axis is viewed as, and a label for each; None belongs to no other."""
Place: TypeAlias = tuple[Any, tuple[Part, ...]]
"""A key of masks, and its axes."""

RULES: dict[str, tuple[str, str]] = {
    "linear": ("input weight bias", "*i,oi,o->*o"),
    "linear with inputs first": ("input weight bias", "*i,io,o->*o"),
    "conv": ("input weight bias", "n(gI)~,(gO)I~,(gO)->n(gO)~"),
    "conv_transpose": ("input weight bias", "n(gI)~,(gI)O~,(gO)->n(gO)~"),
    "embedding": ("- weight", "-,_c->~c"),
    "batch_norm": ("input running_mean running_var weight bias", "nc*,c,c,c,c->nc*"),
    "layer_norm": ("input - weight bias", "*,-,*,*->*"),
    "normalize": ("input", "*->*"),
    "prelu": ("input weight", "nc*,c->nc*"),
    "group_norm": ("input - weight bias", "n(gC)*,-,(gC),(gC)->n(gC)*"),
    "matmul": ("input other", "*ik,*kj->*ij"),
    "_grouped_mm": ("input other", "ti,gio->to"),
    "baddbmm": ("input batch1 batch2", "*ij,*ik,*kj->*ij"),
    "scaled_dot_product_attention": ("query key value attn_mask", "*id,*Sd,*Se,*__->*ie"),
    "grouped-query attention": ("query key value attn_mask", "n(gH)id,ngSd,ngSe,*__->n(gH)ie"),
    "attention": ("query key value in_proj_weight out_proj.weight out_proj.bias", "~f,~f,~f,_f,f_,f->~f"),
}
"""Name of a function, or kind of a layer -> its tensors, and their axes with the result's after the arrow.

Letters are labels: axes with the same one have the same entries. Of a capital letter, some entries cannot go
without all. `*` is any number of axes that are aligned from the right, `~` any number of axes of which all
entries go together, and `_` one without a label. Axes in brackets are one axis of that many groups.
"""
ALIKE = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), "conv"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "conv_transpose"),
    **dict.fromkeys(("batch norm", "instance_norm", CHANNEL_NORM), "batch_norm"),
    **dict.fromkeys(("norm", "rms_norm"), "layer_norm"),
    **{"transposed convolution": "conv_transpose", "addmm": "baddbmm"},
    **dict.fromkeys(("bmm", "mm"), "matmul"),
}
"""Other functions and kinds of layers that have the rule of one in `RULES`."""
SUMS = ("sum", "norm", "linalg_norm", "linalg_vector_norm")
"""Functions that add up: what goes leaves nothing behind."""


class Mixed(Exception):
    """A function mixes entries that go with others; `masks` are as far as they were followed."""

    def __init__(self, node: fx.Node, masks: Masks) -> None:
        super().__init__(node.name)
        self.node, self.masks = node, masks


class _Unexplained(Exception):
    """Entries go that nothing else goes with."""


@dataclass(frozen=True)
class _Labelled:
    """A function whose tensors have axes in common."""

    places: list[Place]
    summed: bool = False
    moved: bool = False

    def spread(self, masks: Masks, new: Set[Any]) -> Iterator[tuple[Any, Mask]]:
        """Yield what goes with masks that are `new`, and all of what cannot go in part."""
        for key, parts, alone, followers in self._steps:
            if key not in new:
                continue
            mask = left = _viewed(masks[key], parts)
            for other, split, over, here, order, there in followers:
                gone = mask.all(over) if over else mask
                if gone.any():
                    left = left & ~gone[here]
                    yield other, _joined(gone.transpose(order)[there], split)
            if left.any() and not (self.summed and is_grid(mask)):
                whole: Mask = np.logical_or.reduce(left, alone, keepdims=True)
                if whole.all() or not (whole & ~mask).any():
                    raise _Unexplained
                yield key, _joined(whole, parts)

    @cached_property
    def _steps(self) -> list[tuple[Any, tuple[Part, ...], tuple[int, ...], list[Any]]]:
        """Return for every place its key, its parts, the axes that no other place has, and what follows it.

        Of what follows it: its key and parts, the axes that it lacks, and how a mask over those that both
        have becomes one of the place (an index), and of what follows (an order and an index). Parts are left
        out where every axis is viewed as it is.
        """
        steps = []
        for place in self.places:
            labels, followers = _labels(place[1]), list[Any]()
            for other in self.places:
                others = _labels(other[1])
                shared = [name for name in labels if name in others and name and not name.isupper()]
                if other != place and shared:
                    over = tuple(axis for axis, label in enumerate(labels) if label not in shared)
                    order = [shared.index(label) for label in others if label in shared]
                    here, there = _spaced(labels, shared), _spaced(others, shared)
                    followers.append((other[0], _split(other[1]), over, here, order, there))
            alone = tuple(axis for axis, label in enumerate(labels) if label is None or label.isupper())
            steps.append((place[0], _split(place[1]), alone, followers))
        return steps


@dataclass(frozen=True)
class _Moved:
    """A function that moves data; if it makes equal parts, these stay equal."""

    inputs: list[Any]
    results: list[fx.Node]
    moves: list[Move]

    def spread(self, masks: Masks, new: Set[Any]) -> Iterator[tuple[Any, Mask]]:
        """Yield what goes with masks that are `new`: what is moved to or from the same places."""
        known = {key: masks[key] for key in self.inputs if key in new}
        gone = {result: masks[result] for result in self.results if result in new}
        if len(self.results) > 1 and gone and len({shape_of(result) for result in self.results}) == 1:
            every = [masks[result] for result in self.results if result in masks]
            gone = dict.fromkeys(self.results, reduce(or_, every))
            yield from gone.items()
        for move in self.moves:
            mask, key = gone.get(self.results[move.result]), self.inputs[move.input]
            if mask is not None and (before := move.before(mask)) is not None:
                former = known.get(key, masks.get(key))
                known[key] = before if former is None else former | before
        yield from known.items()
        for move in self.moves:
            mask = known.get(self.inputs[move.input])
            if mask is not None and (after := indexed(mask, *move.to_result)) is not None:
                yield self.results[move.result], after


def _split(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return parts, or none if every axis is viewed as it is."""
    return parts if any(len(lengths) > 1 for lengths, _ in parts) else ()


def _labels(parts: Sequence[Part]) -> list[str | None]:
    return [label for _, inner in parts for label in inner]


def _viewed(mask: Mask, parts: Sequence[Part]) -> Mask:
    """Return a mask in the view of a place."""
    if not parts:
        return mask
    sizes = list[int]()
    for whole, (lengths, _) in zip(mask.shape, parts, strict=True):
        sizes += lengths if whole > 1 or math.prod(lengths) == 1 else [1] * len(lengths)
    return mask.reshape(sizes)


def _joined(mask: Mask, parts: Sequence[Part]) -> Mask:
    """Return a mask of a view as one of the tensor."""
    if not parts:
        return mask
    sizes, at, full = list[int](), 0, list(mask.shape)
    for lengths, _ in parts:
        end = at + len(lengths)
        varies = any(n > 1 for n in full[at:end])
        sizes.append(math.prod(lengths) if varies else 1)
        full[at:end] = lengths if varies else [1] * len(lengths)
        at = end
    return np.broadcast_to(mask, full).reshape(sizes)


def is_grid(mask: Mask) -> bool:
    """Tell whether what goes are whole entries of axes, so that a tensor of fewer entries is left."""
    left = mask
    for axis in range(mask.ndim):
        left = left & ~mask.all(axes_but(axis, mask), keepdims=True)
    return not left.any()


def _spaced(labels: Sequence[str | None], shared: Sequence[str]) -> tuple[slice | None, ...]:
    """Return the index that makes a mask over shared labels one over labels, with 1 for the others."""
    return tuple(slice(None) if label in shared else None for label in labels)


class Relations:
    """What the functions of a recording relate.

    `homes` are the modules that hold a tensor, by its id, each with the name of the tensor.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.modules = dict(recording.model.named_modules(remove_duplicate=False))
        self.nodes: list[fx.Node] = list(recording.graph.nodes)
        self.homes: dict[int, list[tuple[str, str]]] = {}
        for path, module in recording.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.homes.setdefault(id(tensor), []).append((path, name))
        self._functions: dict[fx.Node, _Labelled | _Moved | None] = {}
        self._trials: dict[Any, Any] = {}
        self._around = grouped((key, node) for node in self.nodes for key in self._keys(node))

    def tensor(self, home: tuple[str, str]) -> Tensor:
        """Return a parameter or buffer."""
        module: Any = self.modules[home[0]]
        tensor: Tensor = {**module._parameters, **module._buffers}[home[1]]
        return tensor

    def shape(self, key: Any) -> tuple[int, ...]:
        """Return the shape that a mask has."""
        return (self.tensor(key[:2]).shape[key[2]],) if isinstance(key, tuple) else shape_of(key)

    def closure(self, key: Any, mask: Mask) -> Masks:
        """Return everything that goes with some entries.

        Raises:
            Mixed: a function mixes them with others.
        """
        masks: Masks = {key: mask}
        mixing: fx.Node | None = None
        news = {node: {key} for node in self._around.get(key, ())}  # what a function has not spread yet
        changed = dict.fromkeys(news)
        while changed:
            node = next(iter(changed))
            del changed[node]
            function, new = self.function(node), news.pop(node)
            try:
                for other, more in () if function is None else list(function.spread(masks, new)):
                    former = masks.get(other)
                    if former is None or (more & ~former).any():
                        masks[other] = more if former is None else former | more
                        for near in (around := self._around.get(other, ())):
                            news.setdefault(near, set()).add(other)
                        if not masks[other].all():  # Nothing would be left of it.
                            changed.update(dict.fromkeys(around))
            except _Unexplained:
                mixing = mixing or node
                news.setdefault(node, set()).update(new)
        if mixing is not None:
            raise Mixed(mixing, masks)
        return masks

    def touched(self, masks: Masks) -> list[fx.Node]:
        """Return the calls that read or return what goes, in their order."""
        touched = {node for key in masks for node in self._around.get(key, ())}
        return [node for node in self.nodes if node in touched and node.op.startswith("call")]

    def results(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of the tensors that a call returns, in their order."""
        if "tensor_meta" in node.meta:
            return [node]
        parts = sorted((user.args[1], user) for user in node.users if _is_part(user))
        return [result for _, part in parts for result in self.results(part)]

    def function(self, node: fx.Node) -> _Labelled | _Moved | None:
        """Return what a node relates; None if it is nothing."""
        if node not in self._functions:
            self._functions[node] = self._function_of(node)
        return self._functions[node]

    def moves(self, node: fx.Node) -> bool:
        """Tell whether a call moves data."""
        function = self.function(node)
        return isinstance(function, _Moved) or (function is not None and function.moved)

    def home(self, node: Any) -> tuple[str, str] | None:
        """Return the first home of the parameter or buffer that a node reads; None for other nodes."""
        read = isinstance(node, fx.Node) and node.op == "get_attr"
        homes = self.homes.get(id(self.recording.tensors[str(node.target)])) if read else None
        return homes[0] if homes else None

    # -- inner parts -------------------------------------------------------------------------------

    def _keys(self, node: fx.Node) -> Iterator[Any]:
        """Yield the keys that a node may relate."""
        if _is_part(node):
            return
        read = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
        homes = [home for n in (node, *read) if (home := self.home(n))]
        if node.op == "call_module":
            layer = self.modules[str(node.target)]
            homes += [self.homes[id(t)][0] for t in (*layer.parameters(), *layer.buffers())]
        for home in homes:
            yield from ((*home, axis) for axis in range(self.tensor(home).dim()))
        yield from read
        yield from self.results(node) if node.op not in ("placeholder", "output") else ()

    def _function_of(self, node: fx.Node) -> _Labelled | _Moved | None:
        if node.op in ("placeholder", "output") or _is_part(node):
            return None
        if node.op == "get_attr":  # An ordinary tensor, whose entries go with those of the axes.
            home = self.home(node)
            if home is None or all(self._by_rule(user) is not None for user in node.users):
                return None
            parts = _parts(shape_of(node), [f"*{axis}" for axis in range(len(shape_of(node)))])
            return _Labelled([(node, parts), *(((*home, axis), (part,)) for axis, part in enumerate(parts))])
        places = self._by_rule(node)
        return self._by_trial(node) if places is None else _Labelled(places)

    def _by_rule(self, node: fx.Node) -> list[Place] | None:
        """Return the places of the tensors of a product or a norm."""
        name, layer = called_name(node), None
        if node.op == "call_module":
            layer = self.modules[str(node.target)]
            name = {nn.GroupNorm: "group_norm", nn.PReLU: "prelu"}.get(type(layer), traits_of(layer).kind)
            if name == "unknown" and (features := norm_features(layer)):
                name = "layer_norm" if shape_of(node)[-1] == features else "prelu"
            name += " with inputs first" * (name == "linear" and traits_of(layer).axes["weight"][0] == "in_")
        name = ALIKE.get(name, name)
        if name == "einsum":
            return self._einsum(node)
        summed = layer is None and called_name(node) in SUMS
        if name not in RULES or summed or (node.op == "call_method" and name not in ("matmul", "baddbmm")):
            return None
        groups = _groups(node, name, layer)
        if name == "scaled_dot_product_attention":
            query, key = (shape_of(n) for n in node.args[:2] if isinstance(n, fx.Node))
            if len(key) == 4 and key[1] != query[1]:
                name, groups = "grouped-query attention", key[1]
        operands, rule = RULES[name]
        inputs = (n for n in (*node.args, *node.kwargs.values()) if isinstance(n, fx.Node))
        tensors: list[Any] = []
        for i, operand in enumerate(operands.split()):
            if layer is None:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(operand)
                tensors.append(value if isinstance(value, fx.Node) and operand != "-" else None)
            elif operand in ("input", "query", "key", "value"):
                tensors.append(next(inputs, None))
            else:
                owner, _, attribute = operand.rpartition(".")
                held = getattr(layer.get_submodule(owner), attribute, None)
                tensors.append(self.homes[id(held)][0] if isinstance(held, Tensor) else None)
        if groups == 1:
            rule = rule.lower()
        specs, _, result = rule.partition("->")
        returned = [(result, node) for node in self.results(node)[:1]]
        return self._places([*zip(specs.split(","), tensors, strict=True), *returned], groups)

    def _einsum(self, node: fx.Node) -> list[Place] | None:
        equation, *operands = tree_leaves(node.args)
        terms, arrow, result = str(equation).replace(" ", "").partition("->")
        repeated = any(len({*term}) < len(term) for term in terms.split(","))  # a diagonal
        if not arrow or "." in terms or not terms.islower() or repeated:
            return None
        return self._places([*zip(terms.split(","), operands, strict=True), (result, node)], 1)

    def _places(self, operands: Sequence[tuple[str, Any]], groups: int) -> list[Place] | None:
        """Return the places of operands, the axes of parameters with one each; None if they do not fit."""
        viewed: list[tuple[Any, list[tuple[list[int], list[str | None]]]]] = []
        for spec, tensor in operands:
            if tensor is not None:
                home = tensor if isinstance(tensor, tuple) else self.home(tensor)
                axes = list(_axes(spec, self.tensor(home).shape if home else shape_of(tensor), groups))
                viewed.append((home or tensor, axes))
        places: list[Place] = []
        sizes = grouped((k, n) for _, axes in viewed for pair in axes for n, k in zip(*pair, strict=True))
        if any(len({*own} - {1}) > 1 for label, own in sizes.items() if label and label.islower()):
            return None
        for key, axes in viewed:
            parts: list[Part] = []
            for lengths, labels in axes:  # What is broadcast does not follow.
                same = [
                    k if n > 1 or {*sizes[k]} == {1} else None for n, k in zip(lengths, labels, strict=True)
                ]
                parts.append((tuple(lengths), tuple(same)))
            if isinstance(key, tuple):
                places += [((*key, i), (part,)) for i, part in enumerate(parts) if any(part[1])]
            else:
                places.append((key, tuple(parts)))
        return places

    def _by_trial(self, node: fx.Node) -> _Labelled | _Moved | None:
        results = self.results(node)
        trial = FunctionTrial(node, self.modules, results)
        known = trial.signature()
        if known is None or known not in self._trials:
            self._trials[known] = trial.moves() or trial.labels()
        facts = self._trials[known]
        if facts is None:
            return None
        if isinstance(facts, list):
            return _Moved(trial.tensors, results, facts)
        keys = [*trial.tensors, *results]
        parts = (_parts(shape_of(key), labels) for key, labels in zip(keys, facts.axes, strict=True))
        return _Labelled(list(zip(keys, parts, strict=True)), called_name(node) in SUMS, facts.moved)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node returns."""
    return tuple(node.meta["tensor_meta"].shape)


def _parts(shape: Sequence[int], labels: Sequence[str | None]) -> tuple[Part, ...]:
    return tuple(((n,), (label,)) for n, label in zip(shape, labels, strict=True))


def _is_part(node: fx.Node) -> bool:
    """Tell whether a node is a part of a result that is no tensor."""
    source = node.args[0] if called_name(node) == "getitem" else None
    return isinstance(source, fx.Node) and "tensor_meta" not in source.meta


def _groups(node: fx.Node, name: str, layer: nn.Module | None) -> int:
    """Return the number of groups that a convolution or a norm has, or is called with."""
    if layer is not None:
        return int(vars(layer).get("groups", vars(layer).get("num_groups", 1)))
    places = {"conv": (6, "groups"), "conv_transpose": (6, "groups"), "group_norm": (1, "num_groups")}
    at, key = places.get(name, (99, ""))
    return int(node.args[at] if at < len(node.args) else node.kwargs.get(key, 1))  # type: ignore[arg-type]


def _axes(spec: str, shape: Sequence[int], groups: int) -> Iterator[tuple[list[int], list[str | None]]]:
    """Yield for every axis the lengths and labels of the axes that it is viewed as."""
    parts = re.findall(r"\(..\)|.", spec)
    wild = next((i for i, part in enumerate(parts) if part in "*~"), None)
    count = len(shape) - len(parts) + 1
    if wild is not None and count >= 0:
        parts[wild : wild + 1] = [f"{parts[wild]}{count - i}" for i in range(count)]
    given = [part for part in parts if part not in "*~"]
    parts = given[-len(shape) :]  # It may lack a batch, and what is broadcast.
    for part, length in zip(parts, shape, strict=True):
        if part.startswith("("):
            yield [groups, length // groups], [part[1], part[2]]
        else:
            yield [length], [None if part == "_" else part.replace("~", "N")]
