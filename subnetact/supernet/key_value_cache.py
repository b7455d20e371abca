"""Key-value caches: what a subnet that skips layers reads and writes in the cache of a language model.

A cache holds one entry per layer, and networks read from it how many tokens there were. A skipped layer
therefore notes the number of its tokens in its entry, as keys and values of one number per token. An entry
that was filled by a subnet that skips the layer cannot be used by one that keeps the layer, nor the other way
round: both raise ViewError.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from subnetact.errors import ViewError
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.skipped_layer import SkippedLayer

__all__ = ["guard_cache"]

_NAMES = ("past_key_values", "past_key_value", "layer_past")
_MARK = "skipped_by_a_subnet"


def guard_cache(stack: LayerSelect, view: nn.Module) -> None:
    """Let the layers of a subnet that may be skipped note and check in a cache who filled their entries.

    Args:
        stack: the operator of a stack of layers.
        view: what the operator returned for the subnet, with identities in the places of skipped layers.
    """
    if stack.shortens:
        return  # Layers of a Sequential take one tensor, and no cache.
    for name in stack.dims:
        layer, bound = stack._modules.get(name), view._modules.get(name)
        if layer is None or bound is None:
            continue
        parameters = inspect.signature(type(layer).forward).parameters
        cache = next((n for n in _NAMES if n in parameters), None)
        entry = next((m.layer_idx for m in layer.modules() if isinstance(_index(m), int)), None)
        if cache is None or entry is None:
            continue
        position = list(parameters).index(cache) - 1  # without `self`
        guard = _Guard(f"{stack.path}.{name}", cache, position, int(entry))  # type: ignore[arg-type]
        bound.register_forward_pre_hook(guard, with_kwargs=True)


def _index(module: nn.Module) -> Any:
    return module.__dict__.get("layer_idx")


@dataclass(frozen=True)
class _Guard:
    """A hook before the forward of a layer, kept or skipped."""

    path: str
    name: str
    position: int
    entry: int

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(self.name, args[self.position] if len(args) > self.position else None)
        cache = getattr(cache, "self_attention_cache", cache)
        entries = getattr(cache, "layers", None)
        if cache is None or entries is None:
            return
        skips = isinstance(layer, SkippedLayer)
        entry = entries[self.entry] if self.entry < len(entries) else None
        filled = entry is not None and _length(entry) > 0
        if filled and getattr(entry, _MARK, False) != skips:
            now, before = ("skips", "kept") if skips else ("keeps", "skipped")
            raise ViewError(
                f"{self.path}: the key-value cache was filled by a subnet that {before} this layer, and this "
                f"subnet {now} it; give every subnet a cache of its own, or run the whole sequence again "
                "without the cache"
            )
        if skips:
            self._note(cache, next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None))
        elif entry is not None and getattr(entry, _MARK, False):
            delattr(entry, _MARK)  # The cache was emptied.

    def _note(self, cache: Any, hidden: Tensor | None) -> None:
        if hidden is None or hidden.dim() < 2:
            return
        states = hidden.new_zeros((hidden.shape[0], 1, hidden.shape[1], 1))
        cache.update(states, states, self.entry)
        setattr(cache.layers[self.entry], _MARK, True)


def _length(entry: Any) -> int:
    try:
        return int(entry.get_seq_length())
    except (AttributeError, TypeError, NotImplementedError):
        return 0
