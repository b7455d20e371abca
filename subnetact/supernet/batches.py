"""Batches: a tensor, a tuple of a network's positional arguments, or a dictionary of its named arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["call_with", "describe_input", "map_tensors"]


def call_with(network: Callable[..., Any], x: Any) -> Any:
    """Call a network with a batch and return its output.

    Args:
        network: a module or any other function.
        x: one argument, a tuple of positional arguments, or a dictionary of named arguments.
    """
    if isinstance(x, tuple):
        return network(*x)
    return network(**x) if isinstance(x, dict) else network(x)


def map_tensors(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Apply a function to every tensor of an input and return the results in the same structure."""
    if isinstance(x, tuple):
        return tuple(map_tensors(function, part) for part in x)
    if isinstance(x, dict):
        return {name: map_tensors(function, part) for name, part in x.items()}
    return function(x)


def describe_input(x: Any) -> str:
    """Describe the type and shape of an input, for messages."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a dictionary of {', '.join(map(repr, x))}" if isinstance(x, dict) else type(x).__name__
