"""Batches: a tensor, a tuple of a network's positional arguments, or a dictionary of its named arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["as_batch", "call_with", "describe_input", "logits", "map_tensors", "tensors_of"]


def call_with(network: Callable[..., Any], x: Any) -> Any:
    """Call a network with a batch and return its output.

    Args:
        network: a module or any other function.
        x: one argument, a tuple of positional arguments, or a dictionary of named arguments.
    """
    if isinstance(x, tuple):
        return network(*x)
    return network(**x) if isinstance(x, dict) else network(x)


def as_batch(x: Any) -> Any:
    """Return a batch with plain dictionaries in place of other mappings, such as a tokenizer's output.

    Args:
        x: a tensor, or a tuple or mapping of batches. Anything else is returned as it is.
    """
    if isinstance(x, tuple):
        return tuple(map(as_batch, x))
    return {name: as_batch(part) for name, part in x.items()} if isinstance(x, Mapping) else x


def tensors_of(x: Any) -> Iterator[Any]:
    """Yield the tensors of an input in the order of its structure; what is no tensor is yielded, too."""
    if isinstance(x, tuple | dict):
        for part in x if isinstance(x, tuple) else x.values():
            yield from tensors_of(part)
    else:
        yield x


def logits(output: Any) -> Any:
    """Return the class scores among the outputs of a network.

    Args:
        output: a tensor; a mapping with `logits`, as the networks of Hugging Face return it; or a tuple or
            list that begins with the scores.

    Returns:
        The tensor. An output of any other kind is returned as it is.
    """
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return output[0] if isinstance(output, tuple | list) and output else output


def map_tensors(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Apply a function to every tensor of an input and return the results in the same structure.

    What is no tensor, such as the argument `use_cache=False` of a language model, stays as it is.
    """
    if isinstance(x, tuple):
        return tuple(map_tensors(function, part) for part in x)
    if isinstance(x, dict):
        return {name: map_tensors(function, part) for name, part in x.items()}
    return function(x) if isinstance(x, Tensor) else x


def describe_input(x: Any) -> str:
    """Describe the type and shape of an input, for messages."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a dictionary of {', '.join(map(repr, x))}" if isinstance(x, Mapping) else type(x).__name__
