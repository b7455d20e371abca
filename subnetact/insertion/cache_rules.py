"""CacheRules: what the key-value cache of a subnet of a language model depends on.

A cache holds keys and values per layer, or the states of a state space, which depend on everything in front
of the layer. Layers are found by the structure of the network: a stack of layers that take a cache and
contain an attention or a state space with the index of its entry (`layer_idx`). What runs after the keys and
values of a layer are written is seen in one run of the network; where it does not run, and in a state space,
everything in a layer counts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from subnetact.operators.base import Operator, template_of
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.vocabulary import CACHES
from subnetact.space import SizeRow, SubnetSpace
from subnetact.spec import PRECISION, SubnetSpec
from subnetact.supernet.failure import failure
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import shared_view

_QUERY = re.compile(r"^w?q(uer(y|ies))?(_|$)")

CacheSignature: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]
"""What the shapes and what the values of a key-value cache depend on, for one subnet."""


@dataclass(frozen=True)
class CacheArgument:
    """The argument of a layer's forward that takes the cache."""

    name: str
    position: int

    @classmethod
    def of(cls, layer: nn.Module) -> CacheArgument | None:
        """Find it among the names that transformers uses."""
        parameters = list(inspect.signature(type(template_of(layer)).forward).parameters)[1:]
        return next((cls(name, parameters.index(name)) for name in CACHES if name in parameters), None)

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cache of one call, or None."""
        return kwargs.get(self.name, args[self.position] if len(args) > self.position else None)


@dataclass(frozen=True)
class CacheLayer:
    """A layer of a language model, and the sizes, by position, on which its keys and values depend.

    Attributes:
        name: of the layer in the network.
        argument: the argument that takes the cache.
        kept: a position in size rows, and the size there with which subnets keep the layer; None: all do.
        writes: whether the layer has keys and values of its own, and does not read those of another layer.
        shape: the sizes that give keys and values their shape, of the heads for example.
        inner: the other sizes that its keys and values depend on, beside its input.
        rest: the sizes in the layer on which only the layers behind it depend, of its feed-forward network.
    """

    name: str
    argument: CacheArgument
    kept: tuple[int, int] | None
    writes: bool
    shape: tuple[int, ...]
    inner: tuple[int, ...]
    rest: tuple[int, ...]


@dataclass(frozen=True)
class CacheRules:
    """What a cache depends on: sizes `outside` of the layers, and those up to the last layer that writes."""

    outside: tuple[int, ...]
    layers: tuple[CacheLayer, ...]

    def signature(self, space: SubnetSpace, spec: SubnetSpec) -> CacheSignature:
        """Return what the cache of a subnet depends on, shapes apart from values."""
        row = space.resolve(spec)
        kept = [layer.kept is None or row[layer.kept[0]] == layer.kept[1] for layer in self.layers]
        writers = [i for i, layer in enumerate(self.layers) if layer.writes]
        shapes = tuple(_at(row, self.layers[i].shape) if kept[i] else None for i in writers)
        last = max((i for i in writers if kept[i]), default=-1)
        values: list[tuple[Any, ...]] = [_at(row, self.outside)]
        for i, layer in enumerate(self.layers[: last + 1]):
            rest = _at(row, layer.rest) if i < last else ()
            values.append((_at(row, layer.inner), rest) if kept[i] else ())
        return shapes, (*values, dict(spec.values).get(PRECISION))

    def difference(self, before: CacheSignature, now: CacheSignature) -> str | None:
        """Return why a subnet cannot read the cache of another one at all, or None if it can."""
        writers = [layer for layer in self.layers if layer.writes]
        for layer, then, here in zip(writers, before[0], now[0], strict=True):
            if then != here:
                did, does = ("kept", "skips") if here is None else ("skipped", "keeps")
                other = f"that {did} this layer, and this subnet {does} it"
                if then is not None and here is not None:
                    other = "with keys and values of other sizes in this layer"
                return f"{layer.name}: the key-value cache was filled by a subnet {other}"
        return None


def _at(row: SizeRow, positions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(row[position] for position in positions)


def rules_of(supernet: Supernet, example: Any = None) -> CacheRules | None:
    """Return what caches depend on, or None if no layer takes one; run the example, or `dummy_inputs`."""
    modules: dict[str, nn.Module] = dict(supernet.network.named_modules())
    arguments: dict[str, CacheArgument] = {}
    for path, stack in modules.items():
        inside = any(path.startswith(f"{layer}.") for layer in arguments)
        if inside or not isinstance(template_of(stack), nn.ModuleList | nn.Sequential):
            continue
        for name, layer in stack._modules.items():
            argument = None if layer is None else CacheArgument.of(layer)
            if layer is not None and argument is not None and any(True for _ in attentions(layer)):
                arguments[f"{path}.{name}".lstrip(".")] = argument
    if not arguments:
        return None
    started = _started(supernet, arguments, example)
    found = tuple(_layer(modules, path, argument, started) for path, argument in arguments.items())
    gates = {layer.kept[0] for layer in found if layer.kept}
    layers = tuple(f"{path}." for path in arguments)
    outside = _positions(m for path, m in modules.items() if not f"{path}.".startswith(layers))
    return CacheRules(tuple(sorted(outside - gates)), found)


def _started(supernet: Supernet, arguments: dict[str, CacheArgument], example: Any) -> dict[str, int]:
    """Run the network; return how often keys and values were written before each module first started."""
    started: dict[str, int] = {}
    written = 0

    def watch(argument: CacheArgument, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = argument.among(args, kwargs)
        for part in (cache, *(getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross"))):
            if part is not None and "update" not in part.__dict__:
                part.update = partial(update, part.update)

    def note(path: str, *_: Any) -> None:
        started.setdefault(path, written)

    def update(write: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal written
        written += 1
        return write(*args, **kwargs)

    if example is None:
        example = getattr(supernet.network, "dummy_inputs", None)
    if isinstance(example, dict):  # It may say that no cache is used.
        example = {name: value for name, value in example.items() if name != "use_cache"}
    view = shared_view(supernet.network, supernet.space.resolve(supernet.space.largest()))
    for path, module in view.named_modules():
        if path in arguments:
            module.register_forward_pre_hook(partial(watch, arguments[path]), with_kwargs=True)
        module.register_forward_pre_hook(partial(note, path))
    # If it fails, nothing is known of what runs after a write.
    return started if failure(partial(view, use_cache=True), example) is None else {}


def _layer(
    modules: Mapping[str, nn.Module], path: str, argument: CacheArgument, started: Mapping[str, int]
) -> CacheLayer:
    above, _, own = path.rpartition(".")
    stack, layer = modules[above], modules[path]
    gate = stack.gate(own) if isinstance(stack, LayerSelect) else None
    found = {f"{path}.{name}".rstrip("."): attention for name, attention in attentions(layer)}
    after: dict[str, set[int]] = {}
    for name in found:
        late = {p for p, written in started.items() if written > started.get(name, written)}
        outer = [module for p, module in layer.named_modules(prefix=path) if p in late]
        after[name] = {id(inner) for module in outer for inner in module.modules()}
    everything = _positions(layer.modules())
    before = _positions(m for m in layer.modules() if not all(id(m) in behind for behind in after.values()))
    shaping = (
        m
        for name, attention in found.items()
        for child, inner in attention._modules.items()
        if inner is not None and not _QUERY.search(child) and child != "out_proj"
        for m in inner.modules()
        if id(m) not in after[name]
    )
    shape = _positions(shaping, inputs=False)
    writes = not all(getattr(attention, "is_kv_shared_layer", False) for attention in found.values())
    parts = (shape, before - shape, everything - before)
    return CacheLayer(path, argument, gate, writes, *(tuple(sorted(part)) for part in parts))


def _positions(modules: Any, inputs: bool = True) -> set[int]:
    return {
        position
        for m in modules
        if isinstance(m, Operator)
        for part, position in m.dims.items()
        if inputs or not part.startswith("in_")
    }


def attentions(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the innermost modules in a layer with an index of an entry in caches, each with its name."""
    named = ((name, template_of(module)) for name, module in layer.named_modules() if name)
    indexed = {name: module for name, module in named if type(vars(module).get("layer_idx")) is int}
    yield from ((n, m) for n, m in indexed.items() if not any(o.startswith(f"{n}.") for o in indexed))
