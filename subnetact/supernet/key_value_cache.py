"""Key-value caches of language models: what a subnet writes into them, and which subnet may read them.

A cache holds one entry per layer, and networks read from it how many tokens there were. A skipped layer
therefore notes the number of its tokens in its entry, as keys and values of one number per token.

Keys and values of a layer come from its input, so they depend on all layers in front of it. `layout_of` finds
out on which sizes of a subnet they depend, from the structure of the network: a stack of layers that take a
cache and contain an attention with the index of its entry (`layer_idx`). What runs in a layer after the
cache is written is read off the order of calls in the code of its forward.

Every view notes on the cache itself, before its first layer runs, from which position on it writes, and the
moment of the weights that it reads. If its keys and values would be others than those that are there, it is
refused before anything is written.

The pages of continuous batching hold many sequences, which come and go, so that no position tells who wrote
what. All subnets that write into them must therefore be able to read what the others wrote. A layer that
shares the keys and values of an earlier one has pages of its own there, into which a subnet that skips the
layer copies them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import CacheMismatch
from subnetact.operators.base import Operator
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.space import CacheLayer, CacheRules, CacheSignature
from subnetact.supernet.generation import Moment, Weights

__all__ = [
    "CacheLayout",
    "CacheWriter",
    "empty_pages",
    "layout_of",
    "note_skipped",
    "note_skipped_layer",
    "recompute",
]

_NAMES = ("past_key_values", "past_key_value", "layer_past")
_QUERY = re.compile(r"^w?q(uer(y|ies))?(_|$)")
_PLACEHOLDER = "skipped_by_a_subnet"
_WRITERS = "written_by_subnets"
_UNKNOWN: CacheSignature = ((), ())
_ALLOW = "supernet.switch(cache, spec, allow_approximate=True)"
_AGAIN = "run the tokens again with supernet.switch(cache, spec, recompute=tokens)"


@dataclass(frozen=True)
class CacheLayout:
    """How the layers of a network use a key-value cache.

    Attributes:
        rules: what the cache of a subnet depends on.
        first: the names of the layers that run first in their stacks, each with the name and the position
            of the argument that takes the cache.
    """

    rules: CacheRules
    first: tuple[tuple[str, str, int], ...]


@dataclass
class _Written:
    """What a cache holds: pairs of a position and the signature of the subnet that wrote from there on."""

    space: str
    moment: Moment
    runs: list[tuple[int, CacheSignature]]


@dataclass
class _Pages:
    """The signatures of the subnets that write into pages, and whether they may hold other numbers.

    The moment is None if the owner of the pages asks before every step whether the weights have changed.
    """

    moment: Moment | None
    space: str | None = None
    signatures: list[CacheSignature] = field(default_factory=list)
    approximate: bool = False


@dataclass(frozen=True)
class CacheWriter:
    """A subnet that writes into caches.

    Attributes:
        layout: how the network uses caches.
        space: the id of the space of the subnet.
        signature: what the keys and values of the subnet depend on.
        weights: the weights that the subnet reads.
    """

    layout: CacheLayout
    space: str
    signature: CacheSignature
    weights: Weights

    def guard(self, view: nn.Module) -> None:
        """Let the view of the subnet check every cache that it is given, before its first layer runs."""
        for path, argument, position in self.layout.first:
            hook = _Claiming(self, argument, position)
            view.get_submodule(path).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def claim(self, cache: Any, allow_approximate: bool = False) -> None:
        """Note on a cache that the subnet writes from the next position on.

        Args:
            cache: the cache.
            allow_approximate: whether keys and values of other numbers will do.

        Raises:
            CacheMismatch: the subnet cannot continue on the cache, which is unchanged.
        """
        cache = getattr(cache, "self_attention_cache", cache)
        if _is_paged(cache):
            self._claim_pages(cache, allow_approximate)
            return
        former = [run[1] for run in getattr(getattr(cache, _WRITERS, None), "runs", ())]
        moment = self.weights.moment()
        seen, runs, accepted, before = self._runs(cache)
        allow_approximate = allow_approximate or (accepted and before == moment)
        if runs and before != moment:
            self._check_owner(before)
            if not allow_approximate:
                raise CacheMismatch(
                    f"the weights have changed since the key-value cache was filled; {_AGAIN}, or accept it "
                    f"with {_ALLOW}"
                )
            if runs[-1][1] != self.signature:
                self._check(runs[-1][1], allow_approximate)
            runs = [(0, _UNKNOWN), (seen, self.signature)]
        elif not runs:
            if seen and not allow_approximate:
                raise CacheMismatch(
                    "the key-value cache was filled by a network that is no subnet of a supernet; accept it "
                    f"with {_ALLOW}, or {_AGAIN}"
                )
            _forget_shapes(cache, all=not seen and former not in ([], [self.signature]))
            runs = [(0, _UNKNOWN), (seen, self.signature)] if seen else [(0, self.signature)]
        elif len(runs) == 1 and runs[0][1] == self.signature:
            runs = [(0, self.signature)]  # This very object, which later calls compare by identity.
        elif runs[-1][1] != self.signature:
            self._check(runs[-1][1], allow_approximate)
            runs.append((seen, self.signature))
        setattr(cache, _WRITERS, _Written(self.space, moment, runs))

    def _claim_pages(self, cache: Any, allow_approximate: bool) -> None:
        moment = self.weights.moment()
        pages: _Pages = getattr(cache, _WRITERS, None) or _Pages(moment)
        if pages.space is not None:
            self._check_space(pages.space)
        if pages.moment not in (None, moment):
            self._check_owner(pages.moment)
            raise CacheMismatch(
                "the weights have changed since the pages were filled; begin anew with another manager, or "
                "generate with subnetact.generation.Generator, which computes its sequences again"
            )
        if self.signature not in pages.signatures:
            if pages.signatures:
                self._check(pages.signatures[0], allow_approximate or pages.approximate)
            pages.signatures.append(self.signature)
        pages.space, pages.approximate = self.space, pages.approximate or allow_approximate
        setattr(cache, _WRITERS, pages)

    def own_positions(self, cache: Any) -> tuple[int, int]:
        """Return how many positions of a cache the subnet could have written itself, and how many there are.

        Args:
            cache: the cache.
        """
        seen, runs, _, before = self._runs(getattr(cache, "self_attention_cache", cache))
        if not runs or runs[0][1] != self.signature or before != self.weights.moment():
            return 0, seen
        return (runs[1][0] if len(runs) > 1 else seen), seen

    def _runs(self, cache: Any) -> tuple[int, list[tuple[int, CacheSignature]], bool, Moment | None]:
        """Return how many positions a cache has, who wrote them, whether this subnet may go on, and when."""
        seen = int(cache.get_seq_length())
        written: _Written | None = getattr(cache, _WRITERS, None)
        if written is None:
            return seen, [], False, None
        runs, accepted = written.runs, False
        while runs and runs[-1][0] >= seen:  # The cache was emptied or cropped, or nothing was written since.
            accepted = runs.pop() == (seen, self.signature)
        if runs:
            self._check_space(written.space)
        return seen, runs, accepted, written.moment

    def _check_owner(self, before: Moment | None) -> None:
        if before is not None and before.owner != self.weights.moment().owner:
            raise CacheMismatch(
                "the key-value cache was filled by a subnet of another supernet; give the subnets of every "
                f"supernet a cache of their own, or {_AGAIN}"
            )

    def _check_space(self, space: str) -> None:
        if space != self.space:
            raise CacheMismatch(
                f"the key-value cache was filled by a subnet of {space}, this one is of {self.space}"
                "; give the subnets of every supernet a cache of their own"
            )

    def _check(self, before: CacheSignature, allow_approximate: bool) -> None:
        known = before != _UNKNOWN
        reason = self.layout.rules.difference(before, self.signature) if known else None
        if reason is not None:
            raise CacheMismatch(f"{reason}; give every subnet a cache of its own, or {_AGAIN}")
        if not allow_approximate:
            raise CacheMismatch(
                "the key-value cache was filled by a subnet whose keys and values are others (space.cache is "
                f"'approximate'); accept them with {_ALLOW}, or {_AGAIN}"
            )


@dataclass(frozen=True)
class _Claiming:
    """A hook before the first layer of a view: the subnet claims the cache that the layer is given."""

    writer: CacheWriter
    argument: str
    position: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _argument(args, kwargs, self.argument, self.position)
        if cache is None:
            cache = _pages_of(kwargs)
        if cache is None or torch.compiler.is_compiling():
            return
        written: Any = getattr(cache, _WRITERS, None)
        runs: Any = getattr(written, "runs", ())
        if (
            len(runs) != 1
            or runs[0][1] is not self.writer.signature
            or written.moment != self.writer.weights.moment()
        ):
            self.writer.claim(cache)


def empty_pages(pages: Any) -> None:
    """Note that pages hold nothing, and that their owner asks for the moment of the weights by itself.

    Args:
        pages: the pages of continuous batching, no sequence of which is active.
    """
    setattr(pages, _WRITERS, _Pages(None))


def recompute(view: nn.Module, cache: Any, writer: CacheWriter, tokens: Any) -> None:
    """Let a subnet compute those positions of a cache that it could not have written itself.

    Args:
        view: the view of the subnet.
        cache: the cache. It is as before if the view fails.
        writer: the subnet.
        tokens: the tokens of all positions in the cache, as a tensor of shape (batch, positions), or the
            named arguments that the network takes for them.

    Raises:
        CacheMismatch: there are more or fewer tokens than positions in the cache.
    """
    inputs = dict(tokens) if isinstance(tokens, Mapping) else {"input_ids": tokens}
    name = next((n for n in ("input_ids", "inputs_embeds") if isinstance(inputs.get(n), Tensor)), None)
    if name is None:
        raise CacheMismatch("recompute: give the token ids of all positions, of shape (batch, positions)")
    if _is_paged(cache):
        raise CacheMismatch(
            "recompute: the pages of continuous batching hold many sequences, so they are not computed again "
            "here; generate with subnets whose caches are exact"
        )
    first, seen = writer.own_positions(cache)
    if inputs[name].dim() < 2 or inputs[name].shape[1] != seen:
        raise CacheMismatch(
            f"recompute: the cache holds {seen} positions, the tokens are of shape "
            f"{tuple(inputs[name].shape)}; give those of all positions, of shape (batch, {seen})"
        )
    if first == seen:
        return
    former = copy.deepcopy(cache.__dict__)
    try:
        first = first if first and _cropped(cache, seen - first) else 0
        if not first:
            cache.reset()
            _forget_shapes(cache, all=True)
        given = {**inputs, name: inputs[name][:, first:], _cache_name(view): cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(type(view).forward).parameters:
            given["logits_to_keep"] = 1
        with torch.no_grad():
            view(**given)
    except BaseException:
        cache.__dict__.clear()
        cache.__dict__.update(former)
        raise


def _cropped(cache: Any, count: int) -> bool:
    """Remove the last positions from a cache, and tell whether that was possible."""
    former = [dict(entry.__dict__) for entry in cache.layers]
    try:
        cache.crop(-count)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        for entry, facts in zip(cache.layers, former, strict=True):
            entry.__dict__.update(facts)
        return False
    return True


def _cache_name(view: nn.Module) -> str:
    parameters = inspect.signature(type(view).forward).parameters
    return next((name for name in _NAMES if name in parameters), _NAMES[0])


# -- skipped layers ----------------------------------------------------------------------------------


def note_skipped(stack: LayerSelect, view: nn.Module) -> None:
    """Let the identities in the places of skipped layers note the number of their tokens in caches.

    Args:
        stack: the operator of a stack of layers.
        view: what the operator returned for the subnet.
    """
    if stack.shortens:
        return  # Layers of a Sequential take one tensor, and no cache.
    for name in stack.dims:
        layer, bound = stack._modules.get(name), view._modules.get(name)
        if layer is not None and isinstance(bound, SkippedLayer):
            note_skipped_layer(layer, bound)


def note_skipped_layer(layer: nn.Module, bound: nn.Module) -> nn.Module:
    """Let the identity in the place of a skipped layer note the number of its tokens in caches.

    Args:
        layer: the layer.
        bound: the identity in its place, which is returned.
    """
    argument = _cache_argument(layer)
    attentions = [attention for _, attention in _attentions(layer)]
    entries = [int(m.layer_idx) for m in attentions if _writes(m)]
    if argument is not None and entries:
        bound.register_forward_pre_hook(_Skipping(*argument, entries[0]), with_kwargs=True)
    for attention in attentions:
        if not _writes(attention):
            copying = _Copying(int(attention.layer_idx), getattr(attention, "layer_type", None))
            bound.register_forward_pre_hook(copying, with_kwargs=True)
    return bound


@dataclass(frozen=True)
class _Skipping:
    """A hook before the identity in the place of a skipped layer."""

    argument: str
    position: int
    entry: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _argument(args, kwargs, self.argument, self.position)
        cache = getattr(cache, "self_attention_cache", cache)
        hidden = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        if cache is None or not hasattr(cache, "layers") or hidden is None or hidden.dim() < 3:
            return
        states = hidden.new_zeros((hidden.shape[-3], 1, hidden.shape[-2], 1))
        cache.update(states, states, self.entry)
        setattr(cache.layers[self.entry], _PLACEHOLDER, True)


@dataclass(frozen=True)
class _Copying:
    """A hook before the identity in the place of a skipped layer that shares an earlier layer's keys.

    It copies these keys and values, so that the pages are complete if the next step runs the layer.
    """

    entry: int
    kind: str | None

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        pages, shared = _pages_of(kwargs), kwargs.get("shared_kv_states")
        if pages is not None and shared is not None:
            keys, values = shared[self.kind]
            pages.update(keys, values, self.entry, dict(kwargs))


def _forget_shapes(cache: Any, all: bool) -> None:
    """Let entries of an empty cache take keys and values of any shape: those of skipped layers, or all."""
    for entry in getattr(cache, "layers", ()):
        skipped = entry.__dict__.pop(_PLACEHOLDER, False)
        if skipped or (all and getattr(entry, "is_initialized", False) and hasattr(entry, "keys")):
            entry.reset()
            entry.keys = entry.values = None
            entry.is_initialized = False


def _is_paged(cache: Any) -> bool:
    """Tell whether a cache is that of continuous batching, whose pages hold many sequences."""
    return hasattr(cache, "cache_allocators")


def _pages_of(kwargs: dict[str, Any]) -> Any:
    """Return the pages among the arguments of a layer, or None if it is not called by continuous batching."""
    return kwargs.get("cache") if "read_index" in kwargs else None


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, position: int) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else None)


# -- layout ------------------------------------------------------------------------------------------


def layout_of(network: nn.Module) -> CacheLayout | None:
    """Return how a network with operators uses key-value caches, or None if none of its layers takes one.

    Args:
        network: the network.
    """
    layers: dict[str, tuple[nn.Module, tuple[int, int] | None]] = {}
    for path, stack in network.named_modules():
        inside = any(path.startswith(f"{layer}.") for layer in layers)
        if inside or not isinstance(_template(stack), nn.ModuleList | nn.Sequential):
            continue
        for name, layer in stack._modules.items():
            if layer is not None and _cache_argument(layer) and any(True for _ in _attentions(layer)):
                gate = stack.gate(name) if isinstance(stack, LayerSelect) else None
                layers[f"{path}.{name}" if path else name] = layer, gate
    if not layers:
        return None
    found = tuple(_layer(path, layer, gate) for path, (layer, gate) in layers.items())
    gates = {layer.kept[0] for layer in found if layer.kept}
    outside = _positions(
        m for path, m in network.named_modules() if not any(f"{path}.".startswith(f"{x}.") for x in layers)
    )
    first: dict[str, tuple[str, str, int]] = {}
    for path, (layer, _) in layers.items():
        argument = _cache_argument(layer)
        if argument is not None:
            first.setdefault(path.rpartition(".")[0], (path, *argument))
    return CacheLayout(CacheRules(tuple(sorted(outside - gates)), found), tuple(first.values()))


def _layer(path: str, layer: nn.Module, gate: tuple[int, int] | None) -> CacheLayer:
    """Return what the keys and values of one layer depend on."""
    attentions = dict(_attentions(layer))
    behind = set.intersection(*({id(m) for m in _behind(layer, name)} for name in attentions))
    everything = _positions(layer.modules())
    before = _positions(m for m in layer.modules() if id(m) not in behind)
    shape = {
        position
        for name, attention in attentions.items()
        for child, inner in attention._modules.items()
        if inner is not None and not _QUERY.search(child)
        for m in inner.modules()
        if isinstance(m, Operator) and id(m) not in {id(x) for x in _behind(layer, name)}
        for part, position in m.dims.items()
        if not part.startswith("in_")
    }
    writes = any(map(_writes, attentions.values()))
    parts = (shape, before - shape, everything - before)
    return CacheLayer(path, gate, writes, *(tuple(sorted(part)) for part in parts))


def _positions(modules: Any) -> set[int]:
    return {position for m in modules if isinstance(m, Operator) for position in m.dims.values()}


def _template(module: nn.Module) -> Any:
    return module.template if isinstance(module, Operator) else module


def _attentions(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the innermost modules with an index of an entry in caches, each with its name in the layer."""
    found = [(n, m) for n, m in layer.named_modules() if type(_template(m).__dict__.get("layer_idx")) is int]
    for name, module in found:
        if not any(other.startswith(f"{name}." if name else "") and other != name for other, _ in found):
            yield name, _template(module)


def _writes(attention: Any) -> bool:
    return not getattr(attention, "is_kv_shared_layer", False)


def _cache_argument(layer: nn.Module) -> tuple[str, int] | None:
    """Return the name and the position of the argument that takes the cache."""
    parameters = list(inspect.signature(type(_template(layer)).forward).parameters)[1:]  # without `self`
    return next(((name, parameters.index(name)) for name in _NAMES if name in parameters), None)


def _behind(layer: nn.Module, attention: str) -> Iterator[nn.Module]:
    """Yield the modules in a layer that run after an attention in it has written into the cache."""
    module = layer
    for name in (*filter(None, attention.split(".")), None):
        calls = _calls(type(_template(module)))
        end = max(calls.get(name or "update", ()), default=None)
        for child, inner in module._modules.items():
            later = end is not None and child in calls and min(calls[child]) > end
            if later and child != name and inner is not None:
                yield from inner.modules()
        if name is not None:
            following = module._modules[name]
            assert following is not None
            module = following


def _calls(cls: Any) -> dict[str, list[tuple[int, int]]]:
    """Return where the code of a forward calls the submodules of a module, and the method `update`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
            if own or node.func.attr == "update":
                end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
                found.setdefault(node.func.attr, []).append(end)
    return found
