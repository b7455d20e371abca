"""Batches: a tensor, a tuple of a network's positional arguments, or a dictionary of its named arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from subnetact.errors import SpecError

__all__ = ["as_batch", "call_with", "describe_input", "logits", "map_tensors", "tensors_of", "without_labels"]


def call_with(network: Callable[..., Any], x: Any) -> Any:
    """Call a network with one argument, a tuple of positional arguments or a dictionary of named ones."""
    if isinstance(x, tuple):
        return network(*x)
    return network(**x) if isinstance(x, dict) else network(x)


def as_batch(x: Any) -> Any:
    """Return a batch with plain dictionaries in place of other mappings, such as a tokenizer's output."""
    if isinstance(x, tuple):
        return tuple(map(as_batch, x))
    return {name: as_batch(part) for name, part in x.items()} if isinstance(x, Mapping) else x


def without_labels(batch: Any, network: nn.Module, labels: bool | None = None) -> Any:
    """Return the inputs of a batch that may go on with labels; `calibrate` says how `labels=None` decides."""
    if not isinstance(batch, tuple | list) or not batch:
        return batch
    if labels is None and len(batch) > 1 and isinstance(batch[0], Tensor):
        positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        given = signature(network.forward).parameters.values()
        needed = sum(p.kind in positional and p.default is Parameter.empty for p in given)
        several = any(p.kind == Parameter.VAR_POSITIONAL for p in given)
        if several or sum(p.kind in positional for p in given) > 1:
            if len(batch) != needed:
                raise SpecError(
                    f"a batch is {describe_input(tuple(batch))} and the network takes several arguments: are "
                    "the elements behind the first labels? Give calibrate labels=True if they are, and "
                    "labels=False if all are arguments; ((a, b), labels) and dictionaries are always clear"
                )
            return tuple(batch)
    if labels is False:
        return tuple(batch)
    return batch[0]


def tensors_of(x: Any) -> Iterator[Any]:
    """Yield the tensors of an input in the order of its structure; what is no tensor is yielded, too."""
    if isinstance(x, tuple | dict):
        for part in x if isinstance(x, tuple) else x.values():
            yield from tensors_of(part)
    else:
        yield x


def logits(output: Any) -> Any:
    """Return the class scores of an output: `logits`, the first element of a tuple, or the output itself."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return output[0] if isinstance(output, tuple | list) and output else output


def map_tensors(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Apply a function to every tensor of an input; what is no tensor, as in `use_cache=False`, stays."""
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
