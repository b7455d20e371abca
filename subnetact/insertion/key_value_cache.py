"""Key-value caches of language models: which subnet may continue on a cache that others have filled.

Every view of a language model notes on the cache that it is given, before its first layer runs, from which
position on it writes, and the moment of the weights that it reads. If its keys and values would be others
than those that are there, it is refused before anything is written. Networks read from a cache how many
tokens there were, so a skipped layer notes the number of its tokens, as keys and values of one number each.

The pages of continuous batching hold many sequences, which come and go, so that no position tells who wrote
what. All subnets that write into them must therefore be able to read what the others wrote. A layer that
shares the keys and values of an earlier one has pages of its own there, into which a subnet that skips the
layer copies them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subnetact.errors import CacheMismatch, SpecError
from subnetact.insertion.cache_rules import (
    CACHE_NAMES,
    CacheArgument,
    CacheRules,
    CacheSignature,
    attentions,
    rules_of,
    writes_own,
)
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.spec import SubnetSpec
from subnetact.supernet.generation import Moment, Weights
from subnetact.supernet.supernet import Supernet

__all__ = ["cache_relation", "empty_pages", "guard_caches_", "note_skipped_", "switch"]

_PLACEHOLDER = "skipped_by_a_subnet"
_WRITERS = "written_by_subnets"
_UNKNOWN: CacheSignature = ((), ())
_ALLOW = "switch(supernet, cache, spec, allow_approximate=True)"
_AGAIN = "run the tokens again with switch(supernet, cache, spec, recompute=tokens)"


def guard_caches_(supernet: Supernet, example: Any = None) -> Supernet:
    """Let all views of a language model check the caches that they are given; return the supernet."""
    rules = rules_of(supernet, example)
    if rules is not None:
        supernet.on_bind = CacheGuard(rules)
    return supernet


def cache_relation(
    supernet: Supernet, a: SubnetSpec, b: SubnetSpec
) -> Literal["exact", "approximate", "incompatible"]:
    """Tell whether a subnet can continue on the key-value cache of another one.

    The relation is symmetric. `switch` applies it to a cache.

    Args:
        supernet: the supernet of a language model.
        a: the subnet that filled the cache.
        b: the subnet that is to continue.

    Returns:
        `"exact"`: both subnets compute the same keys and values, so b answers as if it had filled the cache
        itself. `"approximate"`: the keys and values have the same shapes, but other values. `"incompatible"`:
        a layer that one of them keeps and the other one skips has no past, or the keys and values have other
        shapes.

    Raises:
        SpecError: a specification is not legal, or it is not known what the caches of these networks depend
            on, because they are no language models.

    Example:
        >>> cache_relation(supernet, large, small)
        'exact'
    """
    rules = _guard_of(supernet).rules
    first, second = (rules.signature(supernet.space, spec) for spec in (a, b))
    if first == second:
        return "exact"
    return "approximate" if first[0] == second[0] else "incompatible"


def switch(
    supernet: Supernet,
    cache: Any,
    spec: SubnetSpec,
    *,
    allow_approximate: bool = False,
    recompute: Any = None,
) -> nn.Module:
    """Return the view of a subnet that continues on a key-value cache that other subnets have filled.

    Views check every cache themselves. Without this function they continue on the cache of another subnet if
    its keys and values are the same (`cache_relation` is `"exact"`, and the weights have not changed since)
    and raise `CacheMismatch` if not. A cache that was reset is free for every subnet. Call this function to
    choose another subnet between two tokens. It takes microseconds if the view is cached and nothing is
    recomputed.

    Args:
        supernet: the supernet of a language model.
        cache: a key-value cache of transformers, a `DynamicCache` for example, or the pages of continuous
            batching, for which approximate subnets are then allowed for good. The subnets that wrote it are
            noted on it.
        spec: the subnet that is to continue.
        allow_approximate: whether keys and values of other numbers will do, which have the same shapes
            (`"approximate"`, or of former weights of this supernet). The answers are then those of neither
            subnet.
        recompute: the tokens of all positions in the cache, as a tensor of shape (batch, positions), or the
            named arguments that the network takes for them. The subnet computes the keys and values again,
            from the first position on that it would not have written itself, so that it answers as if it had
            run from the beginning. If None, nothing is computed.

    Returns:
        The view, as `Supernet.subnet` returns it.

    Raises:
        CacheMismatch: a layer of the subnet has no past in the cache, keys and values have other shapes, or
            they have other numbers and neither option allows that: those of another subnet, or of weights
            that have changed since. The cache is then unchanged. It is raised as well if the cache belongs to
            another supernet, or does not hold the given tokens.
        SpecError: the specification is malformed, or of another space, or the networks of this space are no
            language models whose caches are known.

    Example:
        >>> output = supernet.subnet(large)(prompt, use_cache=True)
        >>> view = switch(supernet, output.past_key_values, small)
        >>> output = view(token, past_key_values=output.past_key_values)
    """
    _guard_of(supernet)
    view = supernet.subnet(spec)
    writer: CacheWriter = view.__dict__["cache_writer"]
    if recompute is not None:
        _recompute(view, cache, writer, recompute)
    writer.claim(cache, allow_approximate)
    return view


def _guard_of(supernet: Supernet) -> CacheGuard:
    guard = supernet.on_bind
    if not isinstance(guard, CacheGuard):
        raise SpecError(
            f"{supernet.space.name}: it is not known what a key-value cache depends on here; insert_ finds "
            "it out for language models whose layers write caches of transformers"
        )
    return guard


@dataclass(frozen=True)
class CacheGuard:
    """Lets views check the caches that they are given; `Supernet.on_bind` of language models."""

    rules: CacheRules

    def __call__(self, supernet: Supernet, view: nn.Module, spec: SubnetSpec, weights: Weights) -> None:
        """Register the hooks of a new view: before its first layers, and before skipped ones."""
        signature = self.rules.signature(supernet.space, spec)
        writer = CacheWriter(self.rules, supernet.space.id, signature, weights)
        object.__setattr__(view, "cache_writer", writer)
        first = {layer.name.rpartition(".")[0]: layer for layer in reversed(self.rules.layers)}
        for layer in first.values():
            hook = _Claiming(writer, layer.argument)
            view.get_submodule(layer.name).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        for layer in self.rules.layers:
            skipped = view.get_submodule(layer.name) if layer.kept else None
            if isinstance(skipped, SkippedLayer):
                note_skipped_(supernet.network.get_submodule(layer.name), skipped)


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
    """A subnet that writes into caches, with the weights that it reads."""

    rules: CacheRules
    space: str
    signature: CacheSignature
    weights: Weights

    def claim(self, cache: Any, allow_approximate: bool = False) -> None:
        """Note on a cache that the subnet writes from the next position on, or refuse it unchanged."""
        cache = _of_decoder(cache)
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
        """Return how many positions the subnet could have written itself, and how many there are."""
        seen, runs, _, before = self._runs(_of_decoder(cache))
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
        reason = self.rules.difference(before, self.signature) if before != _UNKNOWN else None
        if reason is not None:
            raise CacheMismatch(f"{reason}; give every subnet a cache of its own, or {_AGAIN}")
        if not allow_approximate:
            raise CacheMismatch(
                "the key-value cache was filled by a subnet whose keys and values are others (cache_relation "
                f"is 'approximate'); accept them with {_ALLOW}, or {_AGAIN}"
            )


@dataclass(frozen=True)
class _Claiming:
    """A hook before the first layer of a view: the subnet claims the cache that the layer is given."""

    writer: CacheWriter
    argument: CacheArgument

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = self.argument.among(args, kwargs)
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
    """Note that pages of no active sequence are empty, and that their owner watches the weights itself."""
    setattr(pages, _WRITERS, _Pages(None))


# -- recomputing -------------------------------------------------------------------------------------


def _recompute(view: nn.Module, cache: Any, writer: CacheWriter, tokens: Any) -> None:
    """Compute the positions that the subnet could not have written; a failure leaves the cache as it was."""
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
        parameters = inspect.signature(type(view).forward).parameters
        given = {**inputs, name: inputs[name][:, first:], "use_cache": True}
        given[next((n for n in CACHE_NAMES if n in parameters), CACHE_NAMES[0])] = cache
        if "logits_to_keep" in parameters:
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


def _forget_shapes(cache: Any, all: bool) -> None:
    """Let entries of an empty cache take keys and values of any shape: those of skipped layers, or all."""
    for entry in getattr(cache, "layers", ()):
        skipped = entry.__dict__.pop(_PLACEHOLDER, False)
        if skipped or (all and getattr(entry, "is_initialized", False) and hasattr(entry, "keys")):
            entry.reset()
            entry.keys = entry.values = None
            entry.is_initialized = False


# -- skipped layers ----------------------------------------------------------------------------------


def note_skipped_(layer: nn.Module, identity: nn.Module) -> nn.Module:
    """Let the identity in the place of a skipped layer note the number of its tokens; return the identity."""
    argument = CacheArgument.of(layer)
    entries = []
    for _, attention in attentions(layer):
        if writes_own(attention):
            entries.append(int(attention.layer_idx))
        else:
            copying = _Copying(int(attention.layer_idx), getattr(attention, "layer_type", None))
            identity.register_forward_pre_hook(copying, with_kwargs=True)
    if argument is not None and entries:
        identity.register_forward_pre_hook(_Skipping(argument, entries[0]), with_kwargs=True)
    return identity


@dataclass(frozen=True)
class _Skipping:
    """A hook before the identity in the place of a skipped layer."""

    argument: CacheArgument
    entry: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _of_decoder(self.argument.among(args, kwargs))
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


def _of_decoder(cache: Any) -> Any:
    """Return what the decoder of an encoder-decoder writes into, or the cache itself."""
    return getattr(cache, "self_attention_cache", cache)


def _is_paged(cache: Any) -> bool:
    """Tell whether a cache is that of continuous batching, whose pages hold many sequences."""
    return hasattr(cache, "cache_allocators")


def _pages_of(kwargs: dict[str, Any]) -> Any:
    """Return the pages among the arguments of a layer, or None if it is not called by continuous batching."""
    return kwargs.get("cache") if "read_index" in kwargs else None
