"""What an engine takes, and inputs from bodies of requests: JSON, NumPy files, images.

Claims are checked before memory is taken.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from pydantic import ConfigDict, Field, TypeAdapter
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from subnetact.engine.inputs import DATATYPES
from subnetact.errors import InvalidRequest, MissingExtra, ServeError
from subnetact.serve.exchange import Raw

NUMPY_MAGIC = b"\x93NUMPY"
PNG_MAGIC, JPEG_MAGIC = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
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
            tensor = torch.from_numpy(array).reshape(shape)
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


def is_image(body: Raw) -> bool:
    """Return whether a body is a PNG or JPEG image; its first bytes tell."""
    return body.startswith((PNG_MAGIC, JPEG_MAGIC))


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


class Images:
    """Decodes PNG and JPEG images into inputs of shape (C, H, W), C 1 or 3, or of shape (H, W).

    Black is 0 and white 1, at 16 bits of grey or 8 bits per channel; then (value - mean) / std per channel.
    Images with transparent pixels are refused, because what is behind them is not known.
    """

    def __init__(self, signature: Signature, mean: Sequence[float], std: Sequence[float]) -> None:
        part = signature.parts[0]
        channels = part.shape[0] if len(part.shape) == 3 else 1
        fits = signature.single and len(part.shape) in (2, 3) and channels in (1, 3)
        self.served = fits and part.dtype.is_floating_point
        self._part = part
        self._mode = "RGB" if channels == 3 else "L"
        self._mean = torch.tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
        self._std = torch.tensor(std, dtype=torch.float32).reshape(-1, 1, 1)
        for name, values, above in (("mean", mean, -math.inf), ("std", std, 0.0)):
            if len(values) not in (1, channels) or not all(above < value < math.inf for value in values):
                raise ServeError(
                    f"image_{name}: got {values}; give finite numbers above {above:g}, one for all channels "
                    f"or {channels}"
                )

    def decode(self, body: Raw) -> Tensor:
        """Return an image as an input, or raise InvalidRequest. Call it in a thread."""
        if not self.served:
            raise InvalidRequest("body: the input of this engine is no image; send JSON or a NumPy file")
        try:
            import PIL.Image
        except ImportError:
            raise MissingExtra("images need Pillow; install it beside the server") from None
        height, width = self._part.shape[-2:]
        try:
            with PIL.Image.open(io.BytesIO(body), formats=("PNG", "JPEG")) as image:
                if image.size != (width, height):
                    raise InvalidRequest(
                        f"body: {image.size} pixels, this engine serves {(width, height)}; resize it"
                    )
                keyed = "transparency" in image.info
                if keyed and image.mode not in ("P", "LA", "RGBA"):  # one colour of all
                    raise InvalidRequest("body: a colour that is transparent; send it on a background")
                if keyed or image.mode in ("LA", "RGBA"):
                    image = image.convert("RGBA")
                    if image.getchannel("A").getextrema()[0] < 255:
                        raise InvalidRequest("body: transparent pixels; send the image on a background")
                if image.mode.startswith("I"):  # 16-bit grey, which Pillow's convert would clip to 8 bits
                    grey = np.asarray(image, dtype=np.float32) / 65535.0
                    pixels = grey if self._mode == "L" else np.stack([grey] * 3, axis=-1)
                else:
                    pixels = np.asarray(image.convert(self._mode), dtype=np.float32) / 255.0
        except InvalidRequest:
            raise
        except Exception:  # Pillow's plugins raise errors of many kinds for damaged files.
            raise InvalidRequest("body: not a whole PNG or JPEG image; send another") from None
        planes = torch.from_numpy(pixels).reshape(height, width, -1).permute(2, 0, 1)
        normalised = ((planes - self._mean) / self._std).to(self._part.dtype)
        return normalised.reshape(self._part.shape).contiguous()
