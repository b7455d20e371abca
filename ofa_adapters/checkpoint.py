"""Reading a checkpoint without running its code, and filling a network with exactly its tensors."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Container, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from subnetact.errors import CheckpointError

__all__ = ["fill", "match", "read", "settings", "unwrap"]

_WRAPPERS = ("state_dict", "model")
_IN_DIRECTORY = ("model.safetensors", "pytorch_model.bin")
_SHOWN = 12
_SCALAR: Any = np.float64(0).__reduce__()[0]
_INERT: list[Any] = [
    argparse.Namespace,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
]
"""What training scripts save beside the weights (their command line, a best accuracy); no code."""


def read(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Return the state_dict in a file, outside its wrappers.

    Args:
        path: a file, or a directory that holds `model.safetensors` or `pytorch_model.bin`.

    Raises:
        CheckpointError: the file is missing, truncated, needs code to be unpickled, or holds no
            state_dict.
    """
    file = Path(path)
    if (file / "bundle.json").is_file():
        raise CheckpointError(f"{path}: is a bundle, not a checkpoint; subnetact.Engine.load reads it")
    if file.is_file() and _is_program(file):
        raise CheckpointError(f"{path}: is a TorchScript program; load the checkpoint that it was made from")
    if file.is_dir():
        found = [file / name for name in _IN_DIRECTORY if (file / name).is_file()]
        if not found:
            raise CheckpointError(f"{path}: the directory holds none of {', '.join(_IN_DIRECTORY)}")
        file = found[0]
    try:
        if fspath(file).endswith(".safetensors"):
            content: Any = load_file(file)
        else:
            with torch.serialization.safe_globals(_INERT):
                content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, or is no checkpoint; save its state_dict alone "
            f"(torch.save({{'state_dict': model.state_dict()}}, ...)) and load that ({error})"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: truncated or not a checkpoint ({error}); fetch it again") from error
    return unwrap(content, str(path))


def unwrap(content: Any, subject: str) -> dict[str, Tensor]:
    """Return the state_dict inside `state_dict` and `model` wrappers.

    Raises:
        CheckpointError: there is none.
    """
    while isinstance(content, Mapping) and any(isinstance(content.get(w), Mapping) for w in _WRAPPERS):
        content = next(content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{subject}: holds no state_dict, but {type(content).__name__}")
    others = [
        str(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if others or not content:
        what = f"entries that are no tensors: {_some(others)}" if others else "nothing"
        raise CheckpointError(f"{subject}: holds no state_dict, but {what}")
    return dict(content)


def _is_program(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def settings(directory: str | PathLike[str], known: Container[str]) -> dict[str, Any]:
    """Return the constructor arguments in a directory's `config.json`, those that are known.

    Raises:
        CheckpointError: there is no readable `config.json`.
    """
    path = Path(directory) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in content.items() if key in known}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable configuration ({error})") from error


def match(
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    rename: Callable[[str], str],
    unused: str | None = None,
) -> tuple[dict[str, Tensor], str]:
    """Return tensors under a network's names, and what is wrong with them, nothing where all fit.

    Args:
        own: the network's state_dict.
        tensors: upstream's names -> tensors.
        rename: an upstream name -> the network's.
        unused: a regular expression of upstream names that may be there without a use.
    """
    given: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    twice: list[str] = []
    for key, tensor in tensors.items():
        bare = key.removeprefix("module.")
        name = rename(bare)
        if name not in own and unused and re.search(unused, bare):
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
    wrong = {
        "missing": [n for n in own if n not in given and n not in counters],
        "extra": [source[n] for n in given if n not in own],
        "of another shape": shapes,
        "given twice": twice,
    }
    return given, "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in wrong.items() if names)


def fill(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    rename: Callable[[str], str],
    subject: str,
    unused: str | None = None,
    hint: str = "Check the constructor arguments it was made with, and that the file is complete",
) -> None:
    """Copy tensors into a network, all or none.

    Args:
        network: the plain network.
        tensors: upstream's names -> tensors; cast to the network's dtype.
        rename: an upstream name -> the network's.
        subject: what the tensors are, for error messages.
        unused: a regular expression of upstream names that may be there without a use.
        hint: the next step where they do not fit.

    Raises:
        CheckpointError: a tensor is missing, extra, given twice, or of another shape; it lists them.
    """
    own = network.state_dict()
    given, wrong = match(own, tensors, rename, unused)
    if wrong:
        raise CheckpointError(f"{subject} does not fit: {wrong}. {hint}")
    network.load_state_dict({**own, **given})


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
