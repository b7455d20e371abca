"""Checkpoints: they are read without running code from the file, and must fit the network exactly."""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ofa_adapters.family import Family
from subnetact.errors import CheckpointError, FileFormatError
from subnetact.files.atomic import read_regular, require_regular
from subnetact.files.documents import parse_json
from subnetact.files.tensors import read_tensors

__all__ = ["fill", "layers_in", "match", "parsed_config", "read", "renamed", "sizes_in", "unwrap"]

_WRAPPERS = ("state_dict", "model")
_IN_DIRECTORY = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"
"""The file that says which part of a checkpoint a tensor is in."""
NAMES_SHOWN = 12
"""The most names in an error message."""
MOST_WRAPPERS = 8
"""The most mappings around a state_dict. In a hostile file, a mapping may contain itself."""
SMALL_BYTES, SHARED = 2**26, 16
"""Tensors may claim this many bytes, and this many times the size of their file, because they may overlap."""
_SCALAR: Any = np.float64(0).__reduce__()[0]
HARMLESS_TYPES: list[Any] = [
    argparse.Namespace,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
]
"""Types that training scripts save beside the weights, such as their command line or the best accuracy.
Unpickling them runs no code from the file."""


def read(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Read the state_dict in a file, or in a directory that transformers saved, without running its code."""
    file = Path(path)
    if (file / "bundle.json").is_file():
        raise CheckpointError(f"{path}: is a bundle, not a checkpoint; subnetact.Engine.load reads it")
    if file.is_file() and _is_program(file):
        raise CheckpointError(f"{path}: is a TorchScript program; load the checkpoint that it was made from")
    if file.is_dir() and (file / INDEX).is_file():
        return _parts(file)
    if file.is_dir():
        found = [file / name for name in _IN_DIRECTORY if (file / name).is_file()]
        if not found:
            raise CheckpointError(f"{path}: the directory holds none of {', '.join(_IN_DIRECTORY)}")
        file = found[0]
    try:
        require_regular(file)
        if fspath(file).endswith(".safetensors"):
            content: Any = read_tensors(file)
        else:
            with torch.serialization.safe_globals(HARMLESS_TYPES):
                content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:  # which MissingFile is, too
        raise CheckpointError(f"{path}: no such file") from error
    except FileFormatError as error:
        raise CheckpointError(str(error)) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, or is not a checkpoint; save its state_dict alone "
            f"(torch.save({{'state_dict': model.state_dict()}}, ...)) and load that ({error})"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: truncated or not a checkpoint ({error}); fetch it again") from error
    tensors = unwrap(content, str(path))
    claimed, size = sum(tensor.nbytes for tensor in tensors.values()), file.stat().st_size
    if claimed > SMALL_BYTES + SHARED * size:
        raise CheckpointError(
            f"{path}: its tensors claim {claimed:,} bytes, the file has {size:,}; save contiguous tensors"
        )
    return tensors


def _parts(directory: Path) -> dict[str, Tensor]:
    """Read the state_dict that lies in several files of a directory."""
    try:
        names = dict(parse_json(read_regular(directory / INDEX))["weight_map"])
        files = sorted({str(name) for name in names.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{directory / INDEX}: not a readable index ({error})") from error
    outside = [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise CheckpointError(f"{directory / INDEX}: {outside[0]!r} is no .safetensors file beside it")
    found: dict[str, Tensor] = {}
    for name in files:
        found.update(read(directory / name))
    return found


def unwrap(content: Any, subject: str) -> dict[str, Tensor]:
    """Return the state_dict inside the wrappers `state_dict` and `model`, if its tensors can be used."""
    for _ in range(MOST_WRAPPERS):
        wrapped = [content.get(name) for name in _WRAPPERS] if isinstance(content, Mapping) else []
        inner = next((part for part in wrapped if isinstance(part, Mapping)), None)
        if inner is None:
            break
        content = inner
    else:
        raise CheckpointError(f"{subject}: has more than {MOST_WRAPPERS} wrappers around its state_dict")
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{subject}: holds no state_dict, but {type(content).__name__}")
    others = [str(k) for k, v in content.items() if not (isinstance(k, str) and isinstance(v, Tensor))]
    if others or not content:
        what = f"entries that are not tensors: {_some(others)}" if others else "nothing"
        raise CheckpointError(f"{subject}: holds no state_dict, but {what}")
    unusable = {key: kind for key, tensor in content.items() if (kind := _unusable(tensor))}
    if unusable:
        some = _some([f"{key} is {kind}" for key, kind in unusable.items()])
        raise CheckpointError(f"{subject}: {some}; save ordinary dense tensors of real numbers")
    return dict(content)


def _unusable(tensor: Tensor) -> str | None:
    """Return what is wrong with a tensor from a checkpoint, or None."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "without values (on the meta device)"
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    return f"{tensor.dtype}" if tensor.is_complex() else None


def _is_program(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def parsed_config(directory: str | PathLike[str]) -> dict[str, Any]:
    """Return what `config.json` holds in a directory that transformers saved."""
    path = Path(directory) / "config.json"
    try:
        return dict(parse_json(read_regular(path)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable configuration ({error})") from error


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Return the tensors under the network's names."""
    return {rename(key.removeprefix("module.")): tensor for key, tensor in tensors.items()}


def sizes_in(tensors: Mapping[str, Tensor], axes: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Return sizes by name, each read from an axis of a tensor; those of missing tensors are left out."""
    return {
        name: tensors[key].shape[axis]
        for name, (key, axis) in axes.items()
        if key in tensors and tensors[key].dim() > axis
    }


def layers_in(names: Iterable[str], stack: str) -> int:
    """Return the number of layers in a stack, such as `blocks`."""
    found = [re.match(rf"{stack}\.(\d+)\.", name) for name in names]
    return max((int(match[1]) + 1 for match in found if match), default=0)


def match(
    family: Family, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors under the network's names, and what does not fit, empty if all do."""
    given: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    twice: list[str] = []
    for key, tensor in tensors.items():
        bare = key.removeprefix("module.")
        name = family.rename(bare)
        if name not in own and family.unused and re.search(family.unused, bare):
            continue
        if name in given:
            twice.append(f"{key} and {source[name]}")
        given[name], source[name] = tensor, key
    counters = {n for n in own if n.rpartition(".")[2].startswith("num_batches_tracked")}
    shapes = [
        f"{source[n]} {tuple(t.shape)} should be {tuple(own[n].shape)}"
        for n, t in given.items()
        if n in own and t.shape != own[n].shape
    ]
    kinds = [
        f"{source[n]} is {t.dtype}, should be {own[n].dtype}"
        for n, t in given.items()
        if n in own and n not in counters and t.is_floating_point() != own[n].is_floating_point()
    ]
    wrong = {
        "missing": [n for n in own if n not in given and n not in counters],
        "extra": [source[n] for n in given if n not in own],
        "of another shape": shapes,
        "of another kind of numbers": kinds,
        "given twice": twice,
    }
    return given, "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in wrong.items() if names)


def fill(
    family: Family,
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    subject: str,
    hint: str,
    allow_nonfinite: bool,
) -> None:
    """Copy tensors into a network if all of them fit; otherwise leave the network unchanged."""
    own = network.state_dict()
    given, wrong = match(family, own, tensors)
    if wrong:
        raise CheckpointError(f"{subject} does not fit: {wrong}. {hint}")
    wild = [n for n, t in given.items() if t.is_floating_point() and not t.float().isfinite().all()]
    if wild and not allow_nonfinite:
        raise CheckpointError(
            f"{subject}: {len(wild)} tensors have values that are NaN or infinite: {_some(wild)}. "
            "The training diverged, or the file is damaged; allow_nonfinite=True loads it all the same"
        )
    network.load_state_dict({**own, **given})


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )
