"""Relations: which entries of which tensors of a recorded graph go together when some of them are removed.

What a function does is read off by calling it. If its results are numbers of its inputs, wherever these are,
it moves data, and entries go with the places that they came from. If it returns, with only some entries of an
axis, what it returns with all of them, it treats that axis entry by entry. `RULES` states what no call shows:
the sums of products and norms, over which the weights have to follow. Whatever else a function does with
entries that go mixes them with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from subnetact.comparison import EXACT, ROUNDED, equal
from subnetact.device import raise_if_out_of_memory
from subnetact.insertion.recorder import Recording
from subnetact.operators.layer_traits import CHANNEL_NORM, is_batch_norm, traits_of

ParameterAxis: TypeAlias = tuple[str, str, int]
"""The path of a module, the name of its parameter or buffer, and an axis of that."""
Key: TypeAlias = "fx.Node | ParameterAxis"
"""What masks are of: the tensor that a node returns, or an axis of a parameter."""
Masks: TypeAlias = dict[Any, Tensor]
"""Key -> which entries go; 1 stands for an axis along which all are alike."""
Part: TypeAlias = tuple[tuple[int, ...], tuple[str | None, ...]]
"""The lengths that an axis is viewed as, and a label for each; None belongs to no other."""
Place: TypeAlias = tuple[Any, tuple[Part, ...]]
"""A key, and its axes."""

RULES: dict[str, tuple[str, str]] = {
    "linear": ("input weight bias", "*i,oi,o->*o"),
    "linear with inputs first": ("input weight bias", "*i,io,o->*o"),
    "conv": ("input weight bias", "n(gI)~,(gO)I~,(gO)->n(gO)~"),
    "conv_transpose": ("input weight bias", "n(gI)~,(gI)O~,(gO)->n(gO)~"),
    "embedding": ("- weight", "_c->~c"),
    "batch_norm": ("input running_mean running_var weight bias", "nc*,c,c,c,c->nc*"),
    "layer_norm": ("input - weight bias", "*,*,*->*"),
    "group_norm": ("input - weight bias", "n(gC)*,(gC),(gC)->n(gC)*"),
    "matmul": ("input other", "*iK,*Kj->*ij"),
    "baddbmm": ("input batch1 batch2", "*ij,*iK,*Kj->*ij"),
    "scaled_dot_product_attention": ("query key value attn_mask", "*iD,*SD,*Se,*__->*ie"),
    "attention": ("query key value in_proj_weight out_proj.weight out_proj.bias", "~f,~f,~f,_f,g_,g->~g"),
}
"""Name of a function, or kind of a layer -> its tensors, and their axes with the result's after the arrow.

Letters are labels: axes with the same one have the same entries. Of a capital letter, some entries cannot go
without all. `*` is any number of axes that are aligned from the right; `~` and `_` are axes of no label, any
number and one. Axes in brackets are one axis of that many groups.
"""
ALIKE = {"conv1d": "conv", "conv2d": "conv", "conv3d": "conv", "rms_norm": "layer_norm", "bmm": "matmul"}
ALIKE |= {"conv_transpose1d": "conv_transpose", "conv_transpose2d": "conv_transpose", "mm": "matmul"}
ALIKE |= {"conv_transpose3d": "conv_transpose", "instance_norm": "batch_norm", "addmm": "baddbmm"}
ALIKE |= {"convolution": "conv", "transposed convolution": "conv_transpose", CHANNEL_NORM: "batch_norm"}
ALIKE |= {"batch norm": "batch_norm"}
SUMS = ("sum",)
"""Functions that add up: what goes leaves nothing behind."""
UNCHECKED = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that read beyond their arguments if these do not fit; their modules check that first."""


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

    def spread(self, masks: Masks) -> Iterator[tuple[Any, Tensor]]:
        """Yield what goes with masks, and all of what cannot go in part."""
        for place in self.places:
            key, parts = place
            if key not in masks:
                continue
            labels = [label for _, inner in parts for label in inner]
            mask = left = _viewed(masks[key], parts)
            for other in self.places:
                others = [label for _, inner in other[1] for label in inner]
                shared = [l for l in labels if l is not None and l in others and not l.isupper()]
                if other == place or not shared:
                    continue
                gone = _whole(mask, [axis for axis, label in enumerate(labels) if label not in shared])
                if bool(gone.any()):
                    left = left & ~_aligned(gone, shared, labels)
                    yield other[0], _joined(_aligned(gone, shared, others), other[1])
            for axis in range(mask.dim() if self.summed and bool(left.any()) else 0):
                left = left & ~_slabs(mask, axis)
            if bool(left.any()):
                alone = [axis for axis, label in enumerate(labels) if label is not None and label.isupper()]
                whole = left.amax(alone, keepdim=True) if alone else left
                if bool((whole & ~mask).any()):
                    yield key, _joined(whole, parts)
                else:
                    raise _Unexplained


@dataclass(frozen=True)
class _Moved:
    """A function that moves data: for each result, the places of its numbers in its inputs, -1 for new ones."""

    inputs: list[tuple[Any, tuple[int, ...]]]
    results: list[tuple[Any, Tensor]]
    ways: list[list[_Way | None]]
    """For each result and input, how the places of the one are those of the other."""

    def spread(self, masks: Masks) -> Iterator[tuple[Any, Tensor]]:
        """Yield what goes with masks, and what is moved to or from the same places."""
        whole: Masks = {}
        for (key, source), ways in zip(self.results, self.ways, strict=True):
            for i, (other, shape) in enumerate(self.inputs):
                way = ways[i]
                if way is not None and way.back is not None:
                    if key in masks and (mask := _indexed(masks[key], *way.back)) is not None:
                        whole[other] = mask if other not in whole else whole[other] | mask
                elif way is not None and key in masks:
                    mask = self._before(masks[key].expand(source.shape), source, i)
                    if bool(mask.any()):
                        whole[other] = mask if other not in whole else whole[other] | mask
        yield from whole.items()
        known = {key: masks[key] | whole[key] if key in masks and key in whole else masks.get(key, whole.get(key)) for key, _ in self.inputs}
        for (key, _), ways in zip(self.results, self.ways, strict=True):
            for (other, _), way in zip(self.inputs, ways, strict=True):
                before = known[other]
                if before is not None and way is not None and (mask := _indexed(before, *way.on)) is not None:
                    yield key, mask

    def _before(self, mask: Tensor, source: Tensor, i: int) -> Tensor:
        """Return which entries of an input go with copies of them."""
        sizes = [math.prod(shape) for _, shape in self.inputs]
        begin, end = sum(sizes[:i]), sum(sizes[: i + 1])
        inside = (source >= begin) & (source < end)
        goes = torch.zeros(sizes[i], dtype=torch.bool).index_fill_(0, source[mask & inside] - begin, True)
        stays = torch.zeros(sizes[i], dtype=torch.bool).index_fill_(0, source[~mask & inside] - begin, True)
        if bool((goes & stays).any()) and _is_copied(source, mask):
            goes &= ~stays  # Some copies go, and what they are copies of stays.
        return _reduced(goes.view(self.inputs[i][1]))


@dataclass(frozen=True)
class _Way:
    """Where entries of a result lie in an input, and, if no entry is there twice, the other way round.

    Both are a table for each axis of the place, and a mask of what has such a place.
    """

    on: tuple[list[Tensor], Tensor]
    back: tuple[list[Tensor], Tensor] | None


def _ways(shapes: Sequence[tuple[int, ...]], sources: Sequence[Tensor]) -> list[list[_Way | None]]:
    """Return how the places in results are those in inputs; None if a result has nothing of an input."""
    ways: list[list[_Way | None]] = []
    for source in sources:
        ways.append([])
        begin = 0
        for shape in shapes:
            size = math.prod(shape)
            inside = (source >= begin) & (source < begin + size)
            places = torch.where(inside, source - begin, -1)
            begin += size
            if not bool(inside.any()):
                ways[-1].append(None)
                continue
            used = places[inside]
            back = None
            if len(used) == len(used.unique()):
                there = torch.full((size,), -1)
                there[used] = inside.flatten().nonzero().flatten()
                back = _tables(there.view(shape), source.shape)
            ways[-1].append(_Way(_tables(places, shape), back))
    return ways


def _tables(places: Tensor, shape: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Return the index on every axis of a shape that is at some places, 1 for axes along which it is alike."""
    known = places >= 0
    tables, stride = list[Tensor](), math.prod(shape)
    for length in shape:
        stride //= length
        at = torch.where(known, places // stride % length, -1)
        for axis in range(at.dim()):
            most = at.amax(axis, keepdim=True)
            if bool(((at == most) | (at < 0)).all()):
                at = most
        tables.append(at)
    return tables, _reduced(known)


def _indexed(mask: Tensor, tables: Sequence[Tensor], known: Tensor) -> Tensor | None:
    """Return a mask at other places; None if nothing goes there."""
    index = [table if n > 1 else torch.zeros((), dtype=torch.int64) for n, table in zip(mask.shape, tables, strict=True)]
    found = torch.broadcast_tensors(*[i.clamp(min=0) for i in index], known[(slice(0, 1),) * known.dim()].long())[:-1] if index else []
    moved = mask[tuple(found)] if found else mask.expand([1] * known.dim())
    for n, table in zip(mask.shape, tables, strict=True):
        if n > 1:
            moved = moved & (table >= 0)
    for axis in range(known.dim()):  # What is new along other axes goes with what lies around it.
        if known.shape[axis] > 1 and moved.shape[axis] > 1:
            moved = moved & (known.amax(_others(known, axis), keepdim=True) if known.dim() > 1 else known)
    return moved if bool(moved.any()) else None


def _viewed(mask: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return a mask in the view of a place."""
    return mask.reshape([n if whole > 1 or math.prod(lengths) == 1 else 1 for whole, (lengths, _) in zip(mask.shape, parts, strict=True) for n in lengths])


def _joined(mask: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return a mask of a view as one of the tensor."""
    sizes, at, full = list[int](), 0, list(mask.shape)
    for lengths, _ in parts:
        end = at + len(lengths)
        varies = any(n > 1 for n in full[at:end])
        sizes.append(math.prod(lengths) if varies else 1)
        full[at:end] = lengths if varies else [1] * len(lengths)
        at = end
    return mask.expand(full).reshape(sizes)


def _reduced(mask: Tensor) -> Tensor:
    """Return a mask with 1 for every axis along which all entries are alike."""
    for axis in range(mask.dim()):
        first = mask.narrow(axis, 0, 1) if mask.shape[axis] else mask
        if mask.shape[axis] > 1 and bool((mask == first).all()):
            mask = first
    return mask


def _others(mask: Tensor, axis: int) -> list[int]:
    return [i for i in range(mask.dim()) if i != axis]


def _whole(mask: Tensor, over: list[int]) -> Tensor:
    """Return which entries go wherever they are on some axes."""
    return mask.amin(over) if over else mask


def _slabs(mask: Tensor, axis: int) -> Tensor:
    """Return which entries of an axis go as a whole, with 1 in the place of all other axes."""
    return mask.amin(_others(mask, axis), keepdim=True) if mask.dim() > 1 else mask


def _aligned(gone: Tensor, shared: Sequence[str], labels: Sequence[str | None]) -> Tensor:
    """Return a mask over shared labels as one over labels, with 1 for those that it does not have."""
    gone = gone.permute([shared.index(label) for label in labels if label in shared])
    return gone[tuple(slice(None) if label in shared else None for label in labels)]


def _is_copied(source: Tensor, mask: Tensor) -> bool:
    """Tell whether data are copied along an axis, as `expand` does, of which entries go as a whole."""
    for axis in range(source.dim()):
        first = source.narrow(axis, 0, 1)
        if source.shape[axis] > 1 and bool((source == first).all()) and bool(_slabs(mask, axis).any()):
            return True
    return False


class Relations:
    """What the functions of a recording relate."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.modules = recording, dict(recording.model.named_modules(remove_duplicate=False))
        self.nodes: list[fx.Node] = list(recording.graph.nodes)
        self.homes: dict[int, list[tuple[str, str]]] = {}
        for path, module in recording.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.homes.setdefault(id(tensor), []).append((path, name))
        self._functions: dict[fx.Node, _Labelled | _Moved | None] = {}
        self._trials: dict[Any, Any] = {}
        self._around: dict[Any, list[fx.Node]] = {}
        for node in self.nodes:
            for key in self._keys(node):
                self._around.setdefault(key, []).append(node)

    def tensor(self, home: tuple[str, str]) -> Tensor:
        """Return a parameter or buffer."""
        module = self.modules[home[0]]
        tensor = module._parameters.get(home[1])
        return module._buffers[home[1]] if tensor is None else tensor  # type: ignore[return-value]

    def closure(self, seeds: Masks) -> Masks:
        """Return everything that goes with some entries.

        Raises:
            Mixed: a function mixes them with others.
        """
        masks: Masks = {}
        changed: dict[fx.Node, None] = {}

        def add(key: Any, mask: Tensor) -> None:
            former = masks.get(key)
            if former is None or bool((mask & ~former).any()):
                masks[key] = mask if former is None else former | mask
                changed.update(dict.fromkeys(self._around.get(key, ())))

        for key, mask in seeds.items():
            add(key, mask)
        while changed:
            node = next(iter(changed))
            del changed[node]
            function = self.function(node)
            try:
                for key, mask in () if function is None else list(function.spread(masks)):
                    add(key, mask)
            except _Unexplained:
                raise Mixed(node, masks) from None
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
            self._functions[node] = self._found(node)
        return self._functions[node]

    # -- inner parts -------------------------------------------------------------------------------

    def _keys(self, node: fx.Node) -> Iterator[Any]:
        """Yield the keys that a node may relate."""
        if _is_part(node):
            return
        own = [home[0] for home in self._own(node)]
        read = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
        for home in (*own, *(h for n in read for h in self._home(n))):
            yield from ((*home, axis) for axis in range(self.tensor(home).dim()))
        yield from read
        yield from self.results(node) if node.op not in ("placeholder", "output") else ()

    def _own(self, node: fx.Node) -> list[list[tuple[str, str]]]:
        """Return the homes of the parameters and buffers that a call of a layer reads, or a node names."""
        if node.op == "get_attr":
            return [home] if (home := self.homes.get(id(self.recording.tensors[str(node.target)]))) else []
        if node.op != "call_module":
            return []
        layer = self.modules[str(node.target)]
        return [self.homes[id(t)] for t in (*layer.parameters(), *layer.buffers())]

    def _home(self, node: Any) -> list[tuple[str, str]]:
        """Return the first home of the parameter that a node is."""
        return [home[0] for home in self._own(node)] if isinstance(node, fx.Node) and node.op == "get_attr" else []

    def _found(self, node: fx.Node) -> _Labelled | _Moved | None:
        if node.op in ("placeholder", "output") or _is_part(node):
            return None
        if node.op == "get_attr":  # An ordinary tensor, whose entries go with those of the axes.
            if not self._own(node) or all(self._by_rule(user) is not None for user in node.users):
                return None
            parts = _parts(node.meta["tensor_meta"].shape, [f"*{axis}" for axis in range(len(node.meta["tensor_meta"].shape))])
            axes = [((*self._home(node)[0], axis), (part,)) for axis, part in enumerate(parts)]
            return _Labelled([(node, parts), *axes])
        places = self._by_rule(node)
        return self._by_trial(node) if places is None else _Labelled(places)

    def _by_rule(self, node: fx.Node) -> list[Place] | None:
        """Return the places of the tensors of a product or a norm."""
        name = _name(node)
        layer: Any = self.modules[str(node.target)] if node.op == "call_module" else None
        if name == "einsum":
            return self._einsum(node)
        if layer is not None:
            name = traits_of(layer).kind
            name = {nn.GroupNorm: "group_norm"}.get(type(layer), "layer_norm") if name == "norm" else name
            name += " with inputs first" * (name == "linear" and traits_of(layer).axes["weight"][0] == "in_")
        name = ALIKE.get(name, name)
        if name not in RULES or (node.op == "call_method" and name not in ("matmul", "baddbmm")):
            return None
        names, rule = RULES[name][0].split(), RULES[name][1]
        inputs = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, fx.Node)]
        tensors: list[Any] = []
        for i, operand in enumerate(names):
            if layer is not None and operand in ("input", "query", "key", "value"):
                tensors.append(inputs[i] if i < len(inputs) else None)
            elif layer is not None:
                owner, _, attribute = operand.rpartition(".")
                held = getattr(layer.get_submodule(owner), attribute, None)
                tensors.append(self.homes[id(held)][0] if isinstance(held, Tensor) else None)
            else:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(operand)
                tensors.append(value if isinstance(value, fx.Node) else None)
        tensors = [t for t, operand in zip(tensors, names, strict=True) if operand != "-"]
        specs, _, result = rule.partition("->")
        groups = layer.__dict__.get("groups", layer.__dict__.get("num_groups", 1)) if layer is not None else _groups(node, name)
        weighted = any(isinstance(t, tuple) or self._home(t) for t in tensors)
        if groups == 1 and "(" in rule or (weighted and name in ("matmul", "baddbmm")):
            specs, result = specs.lower(), result.lower()
        out = self.results(node)[:1]
        return self._places([*zip(specs.split(","), tensors, strict=True), *((result, r) for r in out)], groups)

    def _einsum(self, node: fx.Node) -> list[Place] | None:
        equation, *operands = tree_leaves(node.args)
        terms, arrow, result = str(equation).replace(" ", "").partition("->")
        if not arrow or "." in terms or not terms.islower():
            return None
        if not any(map(self._home, operands)):
            terms = "".join(l if l in result or l == "," else l.upper() for l in terms)
        return self._places([*zip(terms.split(","), operands, strict=True), (result, node)], 1)

    def _places(self, operands: Sequence[tuple[str, Any]], groups: int) -> list[Place]:
        """Return the places of operands; the axes of parameters have one each."""
        found: list[tuple[Any, list[tuple[list[int], list[str | None]]]]] = []
        for spec, tensor in operands:
            if tensor is None:
                continue
            home = tensor if isinstance(tensor, tuple) else (self._home(tensor) or [None])[0]
            shape = self.tensor(home).shape if home else tensor.meta["tensor_meta"].shape
            found.append((home or tensor, list(_axes(spec, shape, groups))))
        most: dict[str, int] = {}
        for _, axes in found:
            for lengths, labels in axes:
                for length, label in zip(lengths, labels, strict=True):
                    most[label or ""] = max(length, most.get(label or "", 0))
        places: list[Place] = []
        for key, axes in found:
            parts = []
            for lengths, labels in axes:  # What is broadcast does not follow.
                same = [l if l and (n > 1 or most[l] == 1) else None for n, l in zip(lengths, labels, strict=True)]
                parts.append((tuple(lengths), tuple(same)))
            if isinstance(key, tuple):
                places += [((*key, i), (part,)) for i, part in enumerate(parts) if any(part[1])]
            else:
                places.append((key, tuple(parts)))
        return places

    def _by_trial(self, node: fx.Node) -> _Labelled | _Moved | None:
        call = _Call(node, self.modules, self.results(node))
        keys = [*call.tensors, *call.results]
        known = call.signature()
        if known is None or known not in self._trials:
            trial = call.moved() or call.followed()
            if known is not None:
                self._trials[known] = trial
        else:
            trial = self._trials[known]
        kind, facts = trial
        shapes = [_shape(key, self) for key in keys]
        if kind == "moved":
            read, sources, ways = facts
            return _Moved([(keys[i], shapes[i]) for i in read], list(zip(call.results, sources, strict=True)), ways)
        if kind == "constant":
            return None
        return _Labelled(list(zip(keys, map(_parts, shapes, facts), strict=True)), summed=_name(node) in SUMS)


def _parts(shape: Sequence[int], labels: Sequence[str | None]) -> tuple[Part, ...]:
    return tuple(((n,), (label,)) for n, label in zip(shape, labels, strict=True))


def _shape(key: Any, relations: Relations) -> tuple[int, ...]:
    if isinstance(key, tuple):
        return (relations.tensor(key[:2]).shape[key[2]],)
    return tuple(key.meta["tensor_meta"].shape)


def _is_part(node: fx.Node) -> bool:
    """Tell whether a node is a part of a result that is no tensor."""
    return _name(node) == "getitem" and isinstance(node.args[0], fx.Node) and "tensor_meta" not in node.args[0].meta


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _groups(node: fx.Node, name: str) -> int:
    """Return the number of groups that a convolution or a norm is called with."""
    at, key = {"conv": (6, "groups"), "conv_transpose": (6, "groups"), "group_norm": (1, "num_groups")}.get(name, (99, ""))
    return int(node.args[at] if at < len(node.args) else node.kwargs.get(key, 1))  # type: ignore[arg-type]


def _axes(spec: str, shape: Sequence[int], groups: int) -> Iterator[tuple[list[int], list[str | None]]]:
    """Yield for every axis the lengths and labels of the axes that it is viewed as."""
    parts: list[str] = []
    for letter in spec:
        if parts and parts[-1].startswith("(") and not parts[-1].endswith(")"):
            parts[-1] += letter
        else:
            parts.append(letter)
    wild = next((i for i, part in enumerate(parts) if part in "*~"), None)
    count = len(shape) - len(parts) + 1
    if wild is not None and count >= 0:
        parts[wild : wild + 1] = [f"*{count - i}" if parts[wild] == "*" else "_" for i in range(count)]
    parts = [part for part in parts if part not in "*~"][-len(shape) :]  # It may lack a batch, and what is broadcast.
    for part, length in zip(parts, shape, strict=True):
        if part.startswith("("):
            yield [groups, length // groups], [part[1], part[2]]
        else:
            yield [length], [None if part == "_" else part]


class _Call:
    """One call of a function, with other numbers in the place of those that it got."""

    def __init__(self, node: fx.Node, modules: Mapping[str, nn.Module], results: list[fx.Node]) -> None:
        self.node, self.results = node, results
        kinds = {"call_module": modules.get(str(node.target)), "call_method": getattr(Tensor, str(node.target), None)}
        self._function: Any = kinds.get(node.op, node.target)
        self.tensors = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
        facts = [n.meta["tensor_meta"] for n in self.tensors]
        self.shapes, self.dtypes = [tuple(f.shape) for f in facts], [f.dtype for f in facts]
        self.given = [  # numbers that decide where others go
            None if dtype.is_floating_point else n.meta.get("value", torch.zeros(shape, dtype=dtype))
            for n, shape, dtype in zip(self.tensors, self.shapes, self.dtypes, strict=True)
        ]

    def signature(self) -> Any:
        """Return what calls with the same results have in common; None if others' numbers decide."""
        if any(value is not None for value in self.given):
            return None
        layer = self._function if self.node.op == "call_module" else None
        target = (type(layer), str(layer)) if layer is not None else self._function
        arguments = fx.map_arg((self.node.args, self.node.kwargs), lambda n: self.tensors.index(n) if n in self.tensors else None)
        return target, str(arguments), tuple(self.shapes), tuple(self.dtypes)

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor] | None:
        if self.node.op == "call_function" and _name(self.node) in UNCHECKED:
            return None
        by_node = dict(zip(self.tensors, values, strict=True))
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), lambda n: by_node[n].clone())
        try:
            with torch.no_grad():
                result = self._function(*args, **kwargs)
        except Exception as error:
            raise_if_out_of_memory(error)
            return None
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def moved(self) -> tuple[str, Any] | None:
        """Return which inputs the results are made of, and from which places; None if of other numbers."""
        read = [i for i, value in enumerate(self.given) if value is None] or list(range(len(self.tensors)))
        sizes = [math.prod(self.shapes[i]) for i in read]
        total, sources = sum(sizes), list[list[Tensor]]()
        if not total or not self.results:
            return None
        for order in (torch.arange(total), torch.randperm(total, generator=torch.Generator().manual_seed(0))):
            numbers = iter((order + 1).double().split(sizes))
            values = [
                next(numbers).view(shape) if i in read else value
                for i, (shape, value) in enumerate(zip(self.shapes, self.given, strict=True))
            ]
            results = self(values)  # type: ignore[arg-type]
            if results is None or len(results) != len(self.results):
                return None
            where = torch.cat([order.argsort(), torch.tensor([-1])])
            found = []
            for result in results:
                places = result.real.double() - 1 if not result.is_complex() else torch.full((1,), 0.5)
                if not bool(((places == places.round()) & (places >= -1) & (places < total)).all()):
                    return None
                found.append(where[places.long()])
            sources.append(found)
        if not all(map(torch.equal, *sources)) or not any(bool((s >= 0).any()) for s in sources[0]):
            return None
        alike = len(read) == 1 and len(self.results) == 1 and sources[0][0].shape == self.shapes[read[0]]
        if alike and torch.equal(sources[0][0].flatten(), torch.arange(total)):
            labels = tuple(f"*{axis}" for axis in range(len(self.shapes[read[0]])))
            return "labels", [*(labels if i in read else (None,) * len(s) for i, s in enumerate(self.shapes)), labels]
        return "moved", (read, sources[0], _ways([self.shapes[i] for i in read], sources[0]))

    def followed(self) -> tuple[str, Any]:
        """Return labels for the axes of tensors and results that the function treats entry by entry."""
        draw = torch.Generator().manual_seed(0)
        values = [
            torch.randn(shape, generator=draw).to(dtype) if value is None else value
            for shape, dtype, value in zip(self.shapes, self.dtypes, self.given, strict=True)
        ]
        whole = self(values)
        again = self([torch.randn(v.shape, generator=draw).to(v.dtype) if g is None else v for v, g in zip(values, self.given, strict=True)])
        if whole is not None and again is not None and None in self.given and equal(whole, again, EXACT):
            return "constant", None  # It reads shapes.
        labels: list[list[str | None]] = [[None] * len(shape) for shape in self.shapes]
        labels += [[None] * len(result.meta["tensor_meta"].shape) for result in self.results]
        if whole is not None and len(whole) == len(self.results):
            for i, shape in enumerate(self.shapes):
                for axis, length in enumerate(shape):
                    for axes in self._together(i, axis) if length > 1 and labels[i][axis] is None else ():
                        ends = self._ends(values, whole, axes, length)
                        if ends is not None:
                            for at, end in (*axes.items(), *((len(self.shapes) + r, a) for r, a in ends)):
                                labels[at][end] = f"*{i}.{axis}"
                            break
        return "labels", list(map(tuple, labels))

    def _together(self, at: int, axis: int) -> Iterator[dict[int, int]]:
        """Yield an axis of one tensor, and then all axes of its length at the same place from the right."""
        yield {at: axis}
        place = axis - len(self.shapes[at])
        alike = {i: len(s) + place for i, s in enumerate(self.shapes) if s[place:][:1] == self.shapes[at][axis:][:1] and len(s) >= -place}
        if len(alike) > 1:
            yield alike

    def _ends(
        self, values: Sequence[Tensor], whole: list[Tensor], axes: Mapping[int, int], length: int
    ) -> list[tuple[int, int]] | None:
        """Return the results and axes of them that follow axes of tensors; None if others change."""
        ends: list[tuple[int, int]] | None = None
        for kept in (torch.arange(length // 2), torch.arange(0, length, 2), torch.arange(1, length, 2)):
            results = self([v.index_select(axes[i], kept) if i in axes else v for i, v in enumerate(values)])
            if results is None or len(results) != len(whole):
                return None
            now = []
            for i, (result, full) in enumerate(zip(results, whole, strict=True)):
                sides = enumerate(zip(result.shape, full.shape, strict=False))
                shorter = [axis for axis, (now_long, long) in sides if now_long != long]
                if len(shorter) > 1 or any(full.shape[axis] != length for axis in shorter):
                    return None
                if not equal(result, full.index_select(shorter[0], kept) if shorter else full, ROUNDED):
                    return None
                now += [(i, axis) for axis in shorter]
            if ends not in (None, now):
                return None
            ends = now
        return ends
