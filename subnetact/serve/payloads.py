"""Inputs from bodies of requests: JSON, NumPy files, images. Claims are checked before memory is taken."""

from __future__ import annotations

import ast
import io
import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
from torch import Tensor

from subnetact.errors import InvalidRequest, MissingExtra, ServeError
from subnetact.serve.signature import InputPart, Signature

__all__ = [
    "Images",
    "array_tensor",
    "is_image",
    "is_numpy",
    "numpy_input",
    "tensor_json",
    "tensor_of",
    "values_input",
    "write_numpy",
]

NUMPY_MAGIC = b"\x93NUMPY"
PNG_MAGIC, JPEG_MAGIC = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
LONGEST_NUMPY_HEADER = 1024


def is_numpy(body: bytes) -> bool:
    """Return whether a body is a NumPy file; its first bytes tell."""
    return body.startswith(NUMPY_MAGIC)


def is_image(body: bytes) -> bool:
    """Return whether a body is a PNG or JPEG image; its first bytes tell."""
    return body.startswith((PNG_MAGIC, JPEG_MAGIC))


def values_input(values: Any, signature: Signature) -> Any:
    """Return one input of the engine from JSON.

    Args:
        values: a list of numbers, nested like the input or flat; an object of lists by name if the input
            has several tensors.
        signature: what the engine takes.

    Raises:
        InvalidRequest: the values do not fit; the message names what is served.
    """
    if signature.single():
        return tensor_of(values, signature.parts[0], signature.parts[0].shape)
    if not isinstance(values, Mapping) or set(values) != {part.name for part in signature.parts}:
        names = ", ".join(part.name for part in signature.parts)
        raise InvalidRequest(f"input: give a JSON object with a list for each of {names}")
    return signature.join(
        {part.name: tensor_of(values[part.name], part, part.shape) for part in signature.parts}
    )


def tensor_of(
    values: Any, part: InputPart, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None
) -> Tensor:
    """Return numbers from JSON as a tensor.

    Args:
        values: a list or, for a tensor without dimensions, a number.
        part: what the tensor is.
        shape: its shape; a flat list of as many values is reshaped.
        dtype: what the client says that the values are. If None, what the tensor is.

    Raises:
        InvalidRequest: the values are no numbers, of another shape, fractions for whole numbers, or beyond
            the range of the dtype.
    """
    kind = (
        ("f" if part.dtype.is_floating_point else "b" if part.dtype == torch.bool else "i")
        if (dtype is None)
        else dtype.kind
    )
    try:
        level = _in_order(values, shape)
        if not set(map(type, level)) <= KINDS_OF_VALUES[kind]:
            raise TypeError("other values than numbers of that kind")
        array = np.array(level, np.float64 if kind == "f" else np.int64).reshape(shape)
        if kind != "f" and dtype is not None and not (array.astype(dtype) == array).all():
            raise ValueError("a number that the dtype does not hold")
        found = array_tensor(array if dtype is None or kind == "f" else array.astype(dtype), part)
        if part.dtype.is_floating_point and bool(found.isinf().any()):
            raise ValueError("a number that the dtype does not hold")
    except (TypeError, ValueError, OverflowError, RecursionError):
        wanted = {"f": "numbers", "b": "true or false"}.get(kind, "whole numbers")
        count = math.prod(shape)
        raise InvalidRequest(
            f"{part.name}: give {wanted} for {dtype or part.dtype} of shape {shape}, nested like it or all "
            f"{count} in a row"
        ) from None
    return found


KINDS_OF_VALUES: Mapping[str, set[type]] = {
    "f": {int, float},
    "i": {int},
    "u": {int},
    "b": {bool, int},
}
"""What JSON may hold, by the kind of the dtype; 0 and 1 count as false and true, and not the other way."""


def _in_order(values: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the values of a list that is nested like the shape, or flat."""
    flat = type(values) is list and not (values and type(values[0]) is list)
    level = [values]
    for size in (math.prod(shape),) if flat else shape:
        if not all(type(one) is list and len(one) == size for one in level):
            raise ValueError("another shape")
        level = list(chain.from_iterable(level))
    return level


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert, and refuse whole numbers that the dtype does not hold."""
    found = tensor.to(dtype)
    if not dtype.is_floating_point and not bool((found.to(tensor.dtype) == tensor).all()):
        raise ValueError("a number that the dtype does not hold")
    return found


def numpy_input(body: bytes, signature: Signature) -> Tensor:
    """Return one input of the engine from a NumPy file (`numpy.save`). Pickled objects are refused.

    Args:
        body: the file.
        signature: what the engine takes: one tensor.

    Raises:
        InvalidRequest: the file is damaged, or of another shape or kind of number than the input.
    """
    if not signature.single():
        raise InvalidRequest("body: a NumPy file holds one tensor, and this input has several; send JSON")
    part = signature.parts[0]
    try:
        version, length = body[6], struct.unpack_from("<H" if body[6] == 1 else "<I", body, 8)[0]
        start = (10 if version == 1 else 12) + length
        if length > LONGEST_NUMPY_HEADER or start > len(body) or version not in (1, 2, 3):
            raise ValueError("its header")
        dtype, fortran, shape = _numpy_header(body[start - length : start])
        count = math.prod(shape)
        if len(body) - start != count * dtype.itemsize:
            raise ValueError("its length")
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        SyntaxError,
        RecursionError,
        MemoryError,
        struct.error,
    ):
        raise InvalidRequest("body: not a whole NumPy file of numbers; write it with numpy.save") from None
    if shape != part.shape:
        raise InvalidRequest(
            f"body: the array has shape {shape}, this engine serves {part.shape}; send one input"
        )
    array = np.frombuffer(body, dtype, count, start).reshape(shape, order="F" if fortran else "C")
    return array_tensor(array, part)


def array_tensor(array: npt.NDArray[Any], part: InputPart) -> Tensor:
    """Return an array as a tensor of its own, converted if no kind of number is lost.

    Args:
        array: the array; it may be read-only and of any byte order.
        part: what the tensor is.

    Raises:
        InvalidRequest: fractions for whole numbers, or numbers that the dtype does not hold.
    """
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    if native.dtype.kind == "u" and native.dtype.itemsize > 1:
        native = native.astype(np.int64)  # torch computes little with larger unsigned numbers.
    tensor = torch.from_numpy(native)
    if tensor.is_floating_point() and not part.dtype.is_floating_point:
        raise InvalidRequest(
            f"{part.name}: got {array.dtype}, this engine serves {part.dtype}; send whole numbers"
        )
    if tensor.dtype == part.dtype:
        return tensor
    try:
        return _converted(tensor, part.dtype)
    except ValueError:
        raise InvalidRequest(f"{part.name}: a number that {part.dtype} does not hold; send another") from None


@lru_cache(maxsize=64)
def _numpy_header(text: bytes) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    header = ast.literal_eval(text.decode("latin-1").strip())
    if set(header) != {"descr", "fortran_order", "shape"} or not isinstance(header["descr"], str):
        raise ValueError("its header")
    dtype, shape = np.dtype(header["descr"]), header["shape"]
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or type(header["fortran_order"]) is not bool:
        raise ValueError("its dtype")
    if (
        type(shape) is not tuple
        or len(shape) > 16
        or not all(type(n) is int and 0 <= n < 2**40 for n in shape)
    ):
        raise ValueError("its shape")
    return dtype, header["fortran_order"], shape


def write_numpy(tensor: Tensor) -> bytes:
    """Return a tensor as a NumPy file; bfloat16 becomes float32.

    Args:
        tensor: the tensor, on any device.
    """
    tensor = tensor.detach().cpu()
    file = io.BytesIO()
    np.save(file, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(), allow_pickle=False)
    return file.getvalue()


def tensor_json(tensor: Tensor) -> str:
    """Return a tensor as nested lists; values that are not finite become null, because JSON has none.

    Args:
        tensor: the tensor, on any device.
    """
    return orjson.dumps(tensor.detach().tolist()).decode()


class Images:
    """Decodes PNG and JPEG images into inputs of shape (C, H, W), C 1 or 3, or of shape (H, W).

    Black is 0 and white 1, whatever the depth of the image; then (value - mean) / std per channel. 16-bit
    grey keeps its depth, and all other images are read with 8 bits per channel. Colours become grey by the
    weights of ITU-R 601, as in Pillow. Images with transparent pixels are refused, because what is behind
    them is not known. An alpha channel or a palette whose pixels are all opaque does no harm.

    Args:
        signature: what the engine takes.
        most_pixels: largest number of pixels, checked before an image is decoded.
        mean: mean per channel.
        std: standard deviation per channel.

    Raises:
        ServeError: mean or std has another number of values than 1 or C, or a value that is not finite, or a
            standard deviation that is not above 0.
    """

    def __init__(
        self,
        signature: Signature,
        most_pixels: int,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
    ) -> None:
        part = signature.parts[0]
        channels = part.shape[0] if len(part.shape) == 3 else 1
        fits = signature.single() and len(part.shape) in (2, 3) and channels in (1, 3)
        self.served = fits and part.dtype.is_floating_point
        self._part = part
        self._mode = "RGB" if channels == 3 else "L"
        self._most_pixels = most_pixels
        self._mean = torch.tensor(mean).reshape(-1, 1, 1)
        self._std = torch.tensor(std).reshape(-1, 1, 1)
        self._open: Callable[..., Any] | None = None
        for name, values in (("mean", mean), ("std", std)):
            fitting = len(values) in (1, channels) if fits else len(values) > 0
            if not fitting or not all(math.isfinite(v) and (name == "mean" or v > 0) for v in values):
                allowed = "finite numbers" if name == "mean" else "finite numbers above 0"
                raise ServeError(
                    f"image_{name}: got {values}; give {allowed}, one for all channels or {channels}"
                )

    def decode(self, body: bytes) -> Tensor:
        """Return an image as an input. Call this method in a thread: it may take milliseconds.

        Args:
            body: the file.

        Raises:
            InvalidRequest: the input is no image, or the file is damaged, too large, of another size, or
                transparent.
            MissingExtra: Pillow is not installed.
        """
        if not self.served:
            raise InvalidRequest("body: the input of this engine is no image; send JSON or a NumPy file")
        if self._open is None:
            try:
                self._open = import_module("PIL.Image").open
            except ImportError:
                raise MissingExtra("images need Pillow; install it beside the server") from None
        height, width = self._part.shape[-2:]
        try:
            with self._open(io.BytesIO(body), formats=("PNG", "JPEG")) as image:
                size = image.size
                if size[0] * size[1] > self._most_pixels:
                    raise InvalidRequest(
                        f"body: an image of {size} pixels, at most {self._most_pixels} are read"
                    )
                if size != (width, height):
                    raise InvalidRequest(
                        f"body: an image of {size[0]} x {size[1]}, this engine serves {width} x {height}; "
                        "resize it"
                    )
                if _has_transparency(image):
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


def _has_transparency(image: Any) -> bool:
    """Return whether an image has an alpha channel or a palette with transparent colours.

    Raises:
        InvalidRequest: one colour of all pixels counts as transparent.
    """
    keyed = "transparency" in image.info
    if keyed and image.mode not in ("P", "LA", "RGBA"):
        raise InvalidRequest("body: a colour that is transparent; send the image on a background")
    return keyed or image.mode in ("LA", "RGBA")
