"""Tensors in files: safetensors, written atomically and read without pickle, and tensors inside JSON."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from subnetact.errors import FileFormatError, SpecError
from subnetact.files.atomic import read_regular, replacing, require_regular
from subnetact.files.documents import DocumentFormat, StrPath, parse_json

MODEL, SHARDS = "model.safetensors", "model.safetensors.index.json"
"""The weights in a folder of a model; if they lie in several files, what says which tensor is in which."""
SHARD_BYTES = 5 * 10**9
"""The most bytes of one file of a model of transformers, unless who saves it says otherwise."""


def write_tensors(
    path: StrPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors, no two of which share memory, into a safetensors file, atomically."""
    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata or {"format": "pt"}))
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_tensors(path: StrPath) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file by name; together they are at most as large as the file."""
    require_regular(path)
    try:
        return load_file(Path(path))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise FileFormatError(f"{path}: not readable as safetensors ({error}); save it again") from error


@contextmanager
def documented_tensors(
    path: StrPath, kind: DocumentFormat, passing: tuple[type[Exception], ...] = ()
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield the document in the metadata of a safetensors file, and the tensors; errors as `fields` does."""
    require_regular(path)
    with (
        kind.fields(path, passing, damaged=(OSError, SafetensorError, RuntimeError)),
        safe_open(path, framework="pt") as file,
    ):
        document = parse_json((file.metadata() or {}).get("document", "null"))
        kind.check(document, path)
        yield document, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_model(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a model in a folder, one file or several; the tensors are mapped into memory."""
    path = folder / SHARDS
    if not path.is_file():
        return read_tensors(folder / MODEL)
    try:
        placed = {str(name): str(file) for name, file in parse_json(read_regular(path))["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileFormatError(f"{path}: says not which tensor is in which file ({error!r})") from error
    files = sorted(set(placed.values()))
    if not files or any(Path(file).name != file or not file.endswith(".safetensors") for file in files):
        raise FileFormatError(f"{path}: names not only .safetensors files beside it: {files[:12]}")
    found = {file: read_tensors(folder / file) for file in files}
    missing = [name for name, file in placed.items() if name not in found[file]]
    if missing:
        raise FileFormatError(f"{folder / placed[missing[0]]}: {missing[0]} is missing; fetch the file again")
    return {name: found[file][name] for name, file in placed.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of the values of a tensor, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def tensor_to_json(tensor: Tensor) -> list[Any]:
    """Return the dtype, the shape and the bytes of a tensor, as values that JSON can hold."""
    text = b64encode(tensor_bytes(tensor)).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), text]


def tensor_from_json(found: Any) -> Tensor:
    """Return the tensor of what `tensor_to_json` returned; ValueError or TypeError if it is damaged."""
    name, shape, text = found
    dtype = named_dtype(name)
    raw = bytearray(b64decode(text, validate=True))
    if len(raw) != dtype.itemsize * math.prod(shape) or not raw:
        raise ValueError(f"{len(raw)} bytes are no {name} of shape {shape}")
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def named_dtype(name: Any, subject: str = "dtype", *, of_weights: bool = False) -> torch.dtype:
    """Return the dtype of torch with a name, "bfloat16" for example; SpecError if there is none for this."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or (of_weights and not dtype.is_floating_point):
        kind = "floating-point dtype" if of_weights else "dtype"
        text = f"{subject}: {name!r:.60} is no {kind} of torch"
        raise SpecError(f"{text}; choose float32, bfloat16 or float16 for weights")
    return dtype
