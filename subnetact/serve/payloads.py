"""What an engine takes, and inputs from bodies of requests: JSON and NumPy files.

Claims are checked before memory is taken.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from pydantic import ConfigDict, Field, TypeAdapter
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from subnetact.engine.inputs import DATATYPES
from subnetact.errors import InvalidRequest, ServeError
from subnetact.serve.exchange import Raw

NUMPY_MAGIC = b"\x93NUMPY"
LONGEST_NUMPY_HEADER = 1024
MOST_LISTED = 4096
"""Inputs of more values have no length in the document, so that programs that make examples stay quick."""


class InputPart(NamedTuple):
    """One tensor of an input: its name on the wire, its shape without a batch dimension, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def schema(self) -> dict[str, Any]:
        """Describe its values in OpenAPI: nested, or all in a row."""
        number: dict[str, Any] = {"type": "number", "minimum": -1e6, "maximum": 1e6}
        if not self.shape:
            return number
        length = {"minItems": self.size, "maxItems": self.size} if self.size <= MOST_LISTED else {}
        nested = number
        for size in reversed(self.shape):
            nested = {"type": "array", "items": nested, "minItems": size, "maxItems": size}
        return {"anyOf": [{"type": "array", "items": number, **length}, nested]}

    def tensor(self, values: Any, shape: tuple[int, ...], declared: torch.dtype | None = None) -> Tensor:
        """Return numbers from JSON, nested like the shape or flat, as a tensor.

        `declared` is what the client says that they are. What fits neither that nor the part is refused.
        """
        dtype = self.dtype if declared is None else declared
        kind: type = float if dtype.is_floating_point else bool if dtype == torch.bool else int
        flat = type(values) is list and not (values and type(values[0]) is list)
        count = math.prod(shape)
        try:
            numbers = _numbers(kind, 1 if flat else len(shape)).validate_python(values)
            array = np.array(numbers, np.float64 if kind is float else np.int64)
            if array.shape not in (shape, (count,)):
                raise ValueError("another shape")
            tensor = torch.from_numpy(array.reshape(shape))
            found = self.fit(tensor if declared is None else self._replace(dtype=dtype).fit(tensor))
            quick = kind is float and math.isfinite(found.sum())  # the sum may overflow, too
            if not quick and self.dtype.is_floating_point and bool(found.isinf().any()):
                raise ValueError("a number that the dtype does not hold")
        except (ValueError, OverflowError):  # pydantic's ValidationError is a ValueError
            words: dict[type, str] = {float: "numbers", bool: "true or false", int: "whole numbers"}
            raise InvalidRequest(
                f"{self.name}: give {words[kind]} for {dtype} of shape {shape}, nested like it or all "
                f"{count} in a row"
            ) from None
        return found

    def fit(self, tensor: Tensor) -> Tensor:
        """Return numbers as the dtype that they are for; fractions for whole numbers are refused."""
        if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
            tensor = tensor.to(torch.int64)  # torch computes little with larger unsigned numbers.
        if tensor.is_floating_point() and not self.dtype.is_floating_point:
            raise InvalidRequest(f"{self.name}: got {tensor.dtype} for {self.dtype}; send whole numbers")
        found = tensor.to(self.dtype)
        if not self.dtype.is_floating_point and not bool((found.to(tensor.dtype) == tensor).all()):
            raise InvalidRequest(f"{self.name}: a number that {self.dtype} does not hold; send another")
        return found


class Signature:
    """The tensors of one input, in order, and how they become an input of the engine again.

    They are called `input`, or `input_0`, `input_1` and so on, or by the keys of a dictionary.
    """

    def __init__(self, sample: Any) -> None:
        if sample is None:
            raise ServeError(
                "engine: it has no example, so the shape of its inputs is not known; make it with "
                "Engine(supernet, specs, example=x)"
            )
        self.single = isinstance(sample, Tensor)
        self._tree = tree_flatten(sample)[1]
        named = named_tensors(sample, "input")
        self.parts = tuple(InputPart(name, tuple(t.shape), t.dtype) for name, t in named)
        for part in self.parts:
            if part.dtype not in DATATYPES:
                raise ServeError(f"engine: input {part.name!r} is {part.dtype}, which no client can send")

    def join(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return one input of the engine from its tensors by name, one for each of `parts`."""
        return tree_unflatten([tensors[part.name] for part in self.parts], self._tree)

    def from_values(self, values: Any) -> Any:
        """Return one input of the engine from JSON: a list for a tensor, an object of lists for several."""
        if self.single:
            return self.parts[0].tensor(values, self.parts[0].shape)
        if not isinstance(values, Mapping) or set(values) != {part.name for part in self.parts}:
            names = ", ".join(part.name for part in self.parts)
            raise InvalidRequest(f"input: give a JSON object with a list for each of {names}")
        return self.join({p.name: p.tensor(values[p.name], p.shape) for p in self.parts})

    def from_numpy(self, body: Raw) -> Tensor:
        """Return one input of the engine from a NumPy file (`numpy.save`). Pickled objects are refused."""
        if not self.single:
            raise InvalidRequest("body: a NumPy file holds one tensor, and this input has several; send JSON")
        part, file = self.parts[0], io.BytesIO(body)
        try:
            read = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(file)]
            shape, fortran, dtype = read(file, max_header_size=LONGEST_NUMPY_HEADER)
            if dtype.kind not in "biuf" or dtype.itemsize > 8:
                raise ValueError("its dtype")
            array = np.frombuffer(body, dtype, offset=file.tell())
            if array.size != math.prod(shape):
                raise ValueError("its length")
        except Exception:  # NumPy's reader of headers raises errors of many kinds.
            raise InvalidRequest(
                "body: not a whole NumPy file of numbers; write it with numpy.save"
            ) from None
        if shape != part.shape:
            raise InvalidRequest(
                f"body: the array has shape {shape}, this engine serves {part.shape}; send one input"
            )
        array = array.astype(dtype.newbyteorder("=")).reshape(shape, order="F" if fortran else "C")
        return part.fit(torch.from_numpy(np.ascontiguousarray(array)))


def named_tensors(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists and dictionaries; `name` is that of a single one."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, (tuple, list)):
        for i, part in enumerate(x):
            yield from named_tensors(part, f"{name}_{i}")
    elif isinstance(x, Mapping):
        for key, part in x.items():
            yield from named_tensors(part, str(key))


@lru_cache(maxsize=64)
def _numbers(kind: type, depth: int) -> TypeAdapter[Any]:
    """Return what checks nested lists of numbers; 0 and 1 count as false and true, not the other way."""
    found: Any = bool | Annotated[int, Field(ge=0, le=1)] if kind is bool else kind
    for _ in range(depth):
        found = list[found]
    return TypeAdapter(found, config=ConfigDict(strict=True, allow_inf_nan=False))


def write_numpy(tensor: Tensor) -> bytes:
    """Return a tensor, on any device, as a NumPy file; bfloat16 becomes float32."""
    tensor = tensor.detach().cpu()
    file = io.BytesIO()
    np.save(file, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(), allow_pickle=False)
    return file.getvalue()
