"""What an engine takes: the tensors of one input by name, and their datatypes on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subnetact.errors import ServeError

__all__ = ["DATATYPES", "InputPart", "Signature", "named_tensors"]

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES = "BOOL UINT8 INT8 INT16 INT32 INT64 FP16 BF16 FP32 FP64"
DATATYPES = dict(zip((*WHOLE, *FRACTIONS), NAMES.split(), strict=True))
"""The names of the Open Inference Protocol."""


class InputPart(NamedTuple):
    """One tensor of an input: its name on the wire, its shape without a batch dimension, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class Signature:
    """The tensors of one input, and how they become an input of the engine again.

    A single tensor is called `input`, the tensors of a tuple `input_0`, `input_1` and so on, and those of a
    dictionary have its keys. The sample is one input, without batch axis; `parts` are its tensors in order.

    Raises:
        ServeError: there is no example, or a dtype that has no name on the wire.
    """

    def __init__(self, sample: Any) -> None:
        if sample is None:
            raise ServeError(
                "engine: it has no example, so the shape of its inputs is not known; make it with "
                "Engine(supernet, specs, example=x)"
            )
        self._sample = sample
        named = list(named_tensors(sample, "input"))
        self.parts = tuple(InputPart(name, tuple(t.shape), t.dtype) for name, t in named)
        for part in self.parts:
            if part.dtype not in DATATYPES:
                raise ServeError(f"engine: input {part.name!r} is {part.dtype}, which no client can send")

    @property
    def count(self) -> int:
        """Number of values of one input."""
        return sum(part.size for part in self.parts)

    def single(self) -> bool:
        """Return whether an input is one tensor, not a tuple or a dictionary."""
        return isinstance(self._sample, Tensor)

    def join(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return one input of the engine from its tensors by name, one for each of `parts`."""
        return _like(self._sample, "input", tensors.__getitem__)


def named_tensors(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists and dictionaries, each with its name.

    `name` is that of a single tensor, and the first part of the names in a tuple.
    """
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, (tuple, list)):
        for i, part in enumerate(x):
            yield from named_tensors(part, f"{name}_{i}")
    elif isinstance(x, Mapping):
        for key, part in x.items():
            yield from named_tensors(part, str(key))


def _like(sample: Any, name: str, get: Callable[[str], Tensor]) -> Any:
    if isinstance(sample, (tuple, list)):
        return tuple(_like(part, f"{name}_{i}", get) for i, part in enumerate(sample))
    if isinstance(sample, Mapping):
        return {key: _like(part, str(key), get) for key, part in sample.items()}
    return get(name)
