"""Tensors in files: safetensors, written atomically and read without pickle, and tensors inside JSON."""

from __future__ import annotations

import math
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from subnetact.errors import FileFormatError
from subnetact.files.atomic import replacing, require_regular

__all__ = ["read_tensors", "tensor_from_json", "tensor_to_json", "write_tensors"]


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors, no two of which share memory, into a safetensors file, atomically."""
    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata or {"format": "pt"}))
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file by name; together they are at most as large as the file."""
    require_regular(path)
    try:
        return load_file(Path(path))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise FileFormatError(f"{path}: not readable as safetensors ({error}); save it again") from error


def tensor_to_json(tensor: Tensor) -> list[Any]:
    """Return the dtype, the shape and the bytes of a tensor, as values that JSON can hold."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), b64encode(raw).decode()]


def tensor_from_json(found: Any) -> Tensor:
    """Return the tensor of what `tensor_to_json` returned; ValueError or TypeError if it is damaged."""
    name, shape, text = found
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    raw = bytearray(b64decode(text, validate=True))
    if len(raw) != dtype.itemsize * math.prod(shape) or not raw:
        raise ValueError(f"{len(raw)} bytes are no {name} of shape {shape}")
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)
