"""Batches: what a network takes, in one form for all functions.

A batch is a tensor, a tuple of the network's positional arguments, or a dictionary (or another mapping, such
as a tokenizer's output) of its named arguments. Where labels are needed (`evaluate`, `reorder_`, training),
it is a pair (inputs, labels), whose inputs are such a batch. Where they are not (`calibrate`), `labels=True`
says that batches are such pairs, of which only the inputs are used; nothing is guessed. A list counts as a
tuple, because the usual DataLoader makes lists of both; only `Engine(example=[...])` is several batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from torch import Tensor

from subnetact.errors import SpecError
from subnetact.files.tensors import tensor_bytes


def call_with(network: Callable[..., Any], x: Any) -> Any:
    """Call a network with one argument, a tuple of positional arguments or a dictionary of named ones."""
    if isinstance(x, tuple):
        return network(*x)
    return network(**x) if isinstance(x, dict) else network(x)


def as_batch(x: Any) -> Any:
    """Return a batch with tuples in place of lists and plain dictionaries in place of other mappings."""
    if isinstance(x, tuple | list):
        return tuple(map(as_batch, x))
    return {name: as_batch(part) for name, part in x.items()} if isinstance(x, Mapping) else x


def as_pair(batch: Any, where: str) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch that is such a pair; in the SpecError, `where` needs it."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = describe_input(as_batch(batch))
        raise SpecError(f"{where}: a batch is a pair (inputs, labels), got {got}; write (inputs, labels)")
    return as_batch(batch[0]), batch[1]


def tensors_of(x: Any) -> Iterator[Any]:
    """Yield the tensors of an input in the order of its structure; what is no tensor is yielded, too."""
    if isinstance(x, tuple | dict):
        for part in x if isinstance(x, tuple) else x.values():
            yield from tensors_of(part)
    else:
        yield x


def hash_of(inputs: Iterable[Any], before: str = "") -> str:
    """Return a hash of the shapes, dtypes and values of the tensors of inputs, and of the hash `before`."""
    digest = blake2b(before.encode(), digest_size=16)
    for part in (part for x in inputs for part in tensors_of(x)):
        if isinstance(part, Tensor):
            digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
            digest.update(tensor_bytes(part))
    return digest.hexdigest()


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
