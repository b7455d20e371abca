"""Dictionaries in which a forward keeps tensors for its next call, which views compute by themselves instead.

Attentions of timm (LeViT, TinyViT, EfficientFormer) compute their biases once and keep them in a plain
dictionary. All views would share it, and use what another subnet or former weights have left there. In a
supernet, such a dictionary seems empty whenever it is asked, so every call computes the tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import template_of

MOST_KEPT = 64
"""So many tensors, the last ones, are kept for the thread that computed them."""


class _Forgetful(dict[Any, Any]):
    """A dictionary that is always empty, but returns what the same thread has just put in."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    def __setitem__(self, key: Any, value: Any) -> None:
        last = {**getattr(self._own, "last", {}), key: value}
        self._own.last = dict([*last.items()][-MOST_KEPT:])

    def __missing__(self, key: Any) -> Any:
        return getattr(self._own, "last", {})[key]

    def setdefault(self, _: Any, default: Any = None) -> Any:
        return default

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Forgetful, ()


def tensor_memos(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return dictionaries with tensors that are not registered: path of the module, module, attribute."""
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}
    ordinary = vars(nn.Module())

    def kept(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and id(value) not in registered

    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, dict) and name not in ordinary and any(map(kept, value.values()))
    ]


def forget_(memos: Iterable[tuple[nn.Module, str]]) -> None:
    """Let modules compute in each call what they keep in dictionaries, their attributes of these names."""
    for module, name in memos:
        object.__setattr__(template_of(module), name, _Forgetful())


def forgotten(model: nn.Module) -> list[tuple[str, str]]:
    """Return the places of the dictionaries that forget: path of the module, attribute."""
    held = ((path, vars(module).items()) for path, module in model.named_modules())
    return [(path, name) for path, own in held for name, value in own if isinstance(value, _Forgetful)]
