"""Key-value caches of language models: which subnet may continue on a cache that others have filled.

A subnet has a signature (`CacheRules.signature`; `rules_of` in `cache_rules.py` finds the sizes that count in
the structure and in one run of the network):

- shapes: for every layer that writes keys and values, the sizes of these (heads), or None if it is skipped;
- values: all other sizes that they depend on (outside of the layers, in every layer up to the last one that
  writes, but not what that layer computes behind its keys and values), and the precision.

Two subnets are `exact` if their signatures are equal, `approximate` if only the shapes are, and otherwise
`incompatible`. Before its first layer runs, a view notes on the cache that it is given its space, its
signature and the moment of its weights. It refuses a cache that another supernet, no subnet at all, former
weights or a subnet that is not `exact` has filled; `switch` allows all of these but incompatible subnets and
other supernets. An empty cache is everybody's. Compiled views do not look.
Pages of continuous batching count as empty if nothing is noted on them, and stay mixed once `switch` has
allowed approximate subnets.

Networks read from a cache how many tokens there were, so a skipped layer writes keys and values of one number
per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subnetact.errors import CacheMismatch, SpecError
from subnetact.insertion.cache_rules import CacheArgument, CacheRules, CacheSignature, attentions, rules_of
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.spec import SubnetSpec
from subnetact.supernet.generation import Moment, Weights
from subnetact.supernet.supernet import Supernet

_WRITTEN = "written_by_a_subnet"
_ALLOW = "switch(supernet, cache, spec, allow_approximate=True)"
_AGAIN = "run the tokens again: view(tokens, use_cache=True) fills a cache of its own"


def guard_caches_(supernet: Supernet, example: Any = None) -> Supernet:
    """Let all views of a language model check the caches that they are given; return the supernet."""
    rules = rules_of(supernet, example)
    if rules is not None:
        supernet.on_bind = CacheGuard(rules)
    return supernet


def cache_relation(
    supernet: Supernet, a: SubnetSpec, b: SubnetSpec
) -> Literal["exact", "approximate", "incompatible"]:
    """Tell whether a subnet can continue on the key-value cache of another one; `switch` applies this.

    Args:
        supernet: the supernet of a language model.
        a: the subnet that filled the cache.
        b: the subnet that is to continue.

    Returns:
        `"exact"`: both compute the same keys and values. `"approximate"`: theirs have the same shapes, but
        other values. `"incompatible"`: they have other shapes, or one of them skips a layer that the other
        one keeps and that has keys and values of its own.

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
) -> nn.Module:
    """Return the view of a subnet that continues on a key-value cache that other subnets have filled.

    Every view checks the caches that it is given. It continues on an empty one, and on that of another subnet
    if `cache_relation` is `"exact"` and the weights have not changed since; this function allows more. A
    subnet whose keys and values have other shapes runs the tokens again: `view(tokens, use_cache=True)`.

    Args:
        supernet: the supernet of a language model.
        cache: a key-value cache of transformers, a `DynamicCache` for example, or the pages of continuous
            batching, for which approximate subnets are then allowed for good.
        spec: the subnet that is to continue.
        allow_approximate: whether keys and values of other numbers will do, which have the same shapes
            (`"approximate"`, of former weights of this supernet, or of a network that is no subnet). The
            answers are then those of neither network.

    Returns:
        The view, as `Supernet.subnet` returns it.

    Raises:
        CacheMismatch: the subnet cannot continue on the cache, or not without the option, or the cache
            belongs to another supernet. It is then unchanged.
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
            hook = partial(_claim, writer, layer.argument)
            view.get_submodule(layer.name).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        for layer in self.rules.layers:
            skipped = view.get_submodule(layer.name) if layer.kept else None
            if isinstance(skipped, SkippedLayer):
                note_skipped_(supernet.network.get_submodule(layer.name), skipped)


@dataclass(frozen=True)
class _Written:
    """The last writer of a cache, and its weights; `mixed` if others wrote a part of it."""

    space: str
    signature: CacheSignature
    moment: Moment | None  # None: the owner asks before every step whether the weights have changed
    mixed: bool = False  # pages hold many sequences: who writes into mixed ones accepts other numbers


_EMPTY = _Written("", ((), ()), None)


@dataclass(frozen=True)
class CacheWriter:
    """A subnet that writes into caches, with the weights that it reads."""

    rules: CacheRules
    space: str
    signature: CacheSignature
    weights: Weights

    def claim(self, cache: Any, allow_approximate: bool = False) -> None:
        """Note on a cache that the subnet writes there from now on, or refuse it unchanged."""
        cache, moment = _of_decoder(cache), self.weights.moment()
        before: _Written | None = getattr(cache, _WRITTEN, None)
        paged = hasattr(cache, "cache_allocators")  # that of continuous batching, with many sequences
        if before in (None, _EMPTY) if paged else not _seen(cache):
            mixed = paged and allow_approximate
            if before is not None and before.signature != self.signature and not paged:
                _forget_shapes(cache)
        elif before is not None:
            self._check(before, moment, allow_approximate, others=paged and before.mixed)
            other = (before.signature, before.moment) != (self.signature, moment)
            mixed = before.mixed or (allow_approximate if paged else other)
        elif allow_approximate:
            mixed = True
        else:
            raise CacheMismatch(
                "the key-value cache was filled by a network that is no subnet of a supernet; accept it with "
                f"{_ALLOW}, or {_AGAIN}"
            )
        watched = before is not None and before.moment is None
        setattr(cache, _WRITTEN, _Written(self.space, self.signature, None if watched else moment, mixed))

    def _check(self, before: _Written, moment: Moment, allow_approximate: bool, others: bool) -> None:
        """Refuse what was written before, unless other numbers are allowed, or those of other subnets are."""
        if before.space != self.space or (before.moment and before.moment.owner != moment.owner):
            raise CacheMismatch(
                f"the key-value cache was filled by a subnet of another supernet ({before.space}; this one "
                f"is of {self.space}); give the subnets of every supernet a cache of their own, or {_AGAIN}"
            )
        if before.moment not in (None, moment) and not allow_approximate:
            raise CacheMismatch(
                f"the weights have changed since the key-value cache was filled; {_AGAIN}, or accept it with "
                f"{_ALLOW}"
            )
        reason = self.rules.difference(before.signature, self.signature)
        if reason is not None:
            raise CacheMismatch(f"{reason}; give every subnet a cache of its own, or {_AGAIN}")
        if before.signature != self.signature and not (allow_approximate or others):
            raise CacheMismatch(
                "the key-value cache was filled by a subnet whose keys and values are others (cache_relation "
                f"is 'approximate'); accept them with {_ALLOW}, or {_AGAIN}"
            )


def _claim(writer: CacheWriter, argument: CacheArgument, _: nn.Module, args: Any, kwargs: Any) -> None:
    """Claim the cache that the first layer of a view is given."""
    cache = argument.among(args, kwargs)
    if cache is None:
        cache = _pages_of(kwargs)
    if cache is None or torch.compiler.is_compiling():
        return
    written: _Written = getattr(cache, _WRITTEN, _EMPTY)
    if written.signature is not writer.signature or written.moment != writer.weights.moment():
        writer.claim(cache)


def empty_pages(pages: Any) -> None:
    """Note that pages of no active sequence are empty, and that their owner watches the weights itself."""
    setattr(pages, _WRITTEN, _EMPTY)


def _seen(cache: Any) -> int:
    """Return the number of tokens in a cache; if it has state spaces only, whether there are some."""
    if not (layers := getattr(cache, "layers", ())) or any(hasattr(entry, "keys") for entry in layers):
        return int(cache.get_seq_length())
    return any(any(entry.has_previous_state.values()) for entry in layers)


def _forget_shapes(cache: Any) -> None:
    """Let an empty cache take keys, values and states of other shapes, also where a layer was skipped."""
    for entry in getattr(cache, "layers", ()):
        for kind in ("conv", "recurrent") if hasattr(entry, "has_previous_state") else ():
            states, known = getattr(entry, f"{kind}_states"), f"is_{kind}_states_initialized"
            setattr(entry, f"{kind}_states", dict.fromkeys(states))
            setattr(entry, known, dict.fromkeys(states, False))
            entry.has_previous_state = dict.fromkeys(states, False)
        if getattr(entry, "is_initialized", False) and getattr(entry, "keys", None) is not None:
            entry.reset()
            entry.keys = entry.values = None
            entry.is_initialized = False


# -- skipped layers ----------------------------------------------------------------------------------


def note_skipped_(layer: nn.Module, identity: nn.Module) -> nn.Module:
    """Let the identity in the place of a skipped layer note the number of its tokens; return the identity."""
    argument = CacheArgument.of(layer)
    for _, attention in attentions(layer):
        entry = int(attention.layer_idx)
        if getattr(attention, "is_kv_shared_layer", False):
            copying = partial(_copy_shared, entry, getattr(attention, "layer_type", None))
            identity.register_forward_pre_hook(copying, with_kwargs=True)
        elif argument is not None:
            identity.register_forward_pre_hook(partial(_count, argument, entry), with_kwargs=True)
            argument = None  # One entry of a layer has all its tokens.
    return identity


def _count(argument: CacheArgument, entry: int, _: nn.Module, args: Any, kwargs: Any) -> None:
    """Write keys and values of one number each, for as many tokens as a skipped layer is given."""
    cache = _of_decoder(argument.among(args, kwargs))
    hidden = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    if not hasattr(dict(enumerate(getattr(cache, "layers", ()))).get(entry, cache), "update"):
        return  # A state space keeps no number of tokens.
    if hasattr(cache, "layers") and hidden is not None and hidden.dim() > 2:
        states = hidden.new_zeros((hidden.shape[-3], 1, hidden.shape[-2], 1))
        cache.update(states, states, entry)


def _copy_shared(entry: int, kind: str | None, _: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    """Copy the keys and values that a skipped layer shares, so that its own pages are complete."""
    pages, shared = _pages_of(kwargs), kwargs.get("shared_kv_states")
    if pages is not None and shared is not None:
        pages.update(*shared[kind], entry, dict(kwargs))


def _of_decoder(cache: Any) -> Any:
    """Return what the decoder of an encoder-decoder writes into, or the cache itself."""
    return getattr(cache, "self_attention_cache", cache)


def _pages_of(kwargs: dict[str, Any]) -> Any:
    """Return the pages among the arguments of a layer, or None if it is not called by continuous batching."""
    return kwargs.get("cache") if "read_index" in kwargs else None
