"""Reads JSON from clients. Long texts are read in short steps, so that no other thread has to wait long.

`json.loads` holds the interpreter's lock until it is done: a body of 15 MB would stop the whole server for a
third of a second, in whichever thread it is read. A long text is long because of its arrays of numbers, so
`read_json` takes these out, converts them in pieces, and gives only the small remainder to `json.loads`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from subnetact.errors import InvalidRequest

__all__ = ["SHORT", "NumberArray", "read_json", "tensor_json"]

SHORT = 32 * 1024
"""Texts of up to this many bytes are read at once, in about half a millisecond."""
_NUMERIC = b"0123456789+-.eE, \t\r\n[]"
_DIGITS = b"0123456789+-.eE \t\r\n"
_KIND = bytes(0 if byte in _NUMERIC else 1 for byte in range(256))
_STEP = 16 * 1024
_SHORT_ARRAY = 256
_MISPLACED = re.compile(rb"[0-9.]\s*\[|\]\s*[-0-9]")


class NumberArray:
    """A long JSON array of numbers, flat or nested.

    Args:
        values: the numbers in order, int64 or float64.
        brackets: the text without its digits and spaces, for example `[[,,],[,,]]`.
    """

    def __init__(self, values: npt.NDArray[Any], brackets: bytes) -> None:
        self.values = values
        self._brackets = brackets

    def shaped(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return the numbers in a shape.

        Args:
            shape: the shape; the text has to be nested like it, or flat.

        Raises:
            ValueError: the text has another shape.
        """
        flat = b"[" + b"," * (len(self.values) - 1) + b"]"
        if self._brackets not in (flat, _brackets_of(shape)):
            raise ValueError("the array is nested differently")
        return self.values.reshape(shape)


def _brackets_of(shape: tuple[int, ...]) -> bytes:
    inner = b""
    for size in reversed(shape):
        inner = b"[" + b",".join([inner] * size) + b"]"
    return inner


def read_json(text: bytes) -> Any:
    """Read a JSON text from a client. Call it in a thread if the text is longer than `SHORT`.

    Args:
        text: the text.

    Returns:
        The value. In long texts, long arrays of numbers are `NumberArray` objects.

    Raises:
        InvalidRequest: the text is not JSON, or it is long for another reason than its arrays of numbers.
    """
    if len(text) <= SHORT:
        return _loads(text)
    rest, arrays = _without_arrays(text)
    if len(rest) > SHORT:
        raise InvalidRequest(f"body: more than {SHORT} bytes of JSON besides arrays of numbers; send less")
    read = [_array(array) for array in arrays]
    return _put_back(_loads(rest), read, 8)


def _loads(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # The message of json names a place in the text, and that of the codec a few bytes; both are short.
        raise InvalidRequest(f"body: not JSON ({error}); send one JSON object") from None


_PLACE = "\ue000array"


def _without_arrays(text: bytes) -> tuple[bytes, list[bytes]]:
    """Return the text with a string in the place of every long array of numbers, and these arrays."""
    pieces: list[bytes] = []
    arrays: list[bytes] = []
    at = start = size = 0
    while (start := text.find(b"[", at)) >= 0:
        end = _end_of_numbers(text, start)
        array = text[start:end].rstrip(b", \t\r\n")
        if len(array) <= _SHORT_ARRAY:
            # A short array, or the beginning of something else: it stays in the text.
            step = max(1, end - start)
            pieces.append(text[at : start + step])
            size += start + step - at
            at = start + step
        else:
            pieces += [text[at:start], b'"' + f"{_PLACE}{len(arrays)}".encode() + b'"']
            size += start - at
            arrays.append(array)
            at = start + len(array)
        if size > SHORT:
            return b" " * (size + 1), []  # read_json refuses the rest for its length
    pieces.append(text[at:])
    return b"".join(pieces), arrays


def _end_of_numbers(text: bytes, start: int) -> int:
    """Return the end of the run of digits, brackets, commas and spaces that begins at `start`."""
    while start < len(text):
        piece = text[start : start + _STEP].translate(_KIND)
        found = piece.find(1)
        if found >= 0:
            return start + found
        start += _STEP
    return len(text)


def _array(text: bytes) -> NumberArray:
    parts: list[npt.NDArray[Any]] = []
    brackets: list[bytes] = []
    start = 0
    while start < len(text):
        end = start + _STEP
        if end < len(text):
            end = text.rfind(b",", start, end)
            if end < 0:
                raise InvalidRequest(
                    "body: not JSON (a number of more than 16,384 digits); send shorter ones"
                )
        piece = text[start:end]
        if _MISPLACED.search(piece):
            raise InvalidRequest("body: not JSON (a bracket beside a number); separate them with a comma")
        values = _loads(b"[" + piece.translate(None, b"[]") + b"]")
        try:
            array = np.array(values)
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(f"body: not an array of numbers ({error})") from None
        if array.dtype.kind not in "if":
            raise InvalidRequest("body: a whole number beyond 64 bits; send a smaller one")
        parts.append(array)
        brackets.append(piece.translate(None, _DIGITS))
        start = end + 1
    return NumberArray(np.concatenate(parts), b",".join(brackets))


def _put_back(value: Any, arrays: list[NumberArray], depth: int) -> Any:
    """Return the value with the arrays in their places, which no request has deeper than `depth`."""
    if isinstance(value, str) and value.startswith(_PLACE):
        number = value[len(_PLACE) :]
        if number.isdecimal() and int(number) < len(arrays):
            return arrays[int(number)]
    if depth and isinstance(value, dict):
        return {key: _put_back(inner, arrays, depth - 1) for key, inner in value.items()}
    if depth and isinstance(value, list):
        return [_put_back(inner, arrays, depth - 1) for inner in value]
    return value


def tensor_json(tensor: Tensor) -> str:
    """Return a tensor as nested arrays; values that are not finite become null, because JSON has none.

    Args:
        tensor: the tensor.
    """
    values = tensor.detach().tolist()
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        return json.dumps(_without_infinities(values))


def _without_infinities(values: Any) -> Any:
    if isinstance(values, list):
        return [_without_infinities(value) for value in values]
    return values if abs(values) < float("inf") else None
