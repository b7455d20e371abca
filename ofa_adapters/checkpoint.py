"""Reading a checkpoint without running its code, and filling a network with exactly its tensors."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from subnetact.errors import CheckpointError

__all__ = ["fill", "read"]

_WRAPPERS = ("state_dict", "model")
_SHOWN = 12


def read(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Return the state_dict in a file, outside its wrappers and without `module.` prefixes.

    Raises:
        CheckpointError: the file is missing, truncated, needs code to be unpickled, or holds no
            state_dict.
    """
    try:
        if fspath(path).endswith(".safetensors"):
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, or is no checkpoint; save its state_dict alone "
            f"(torch.save({{'state_dict': model.state_dict()}}, ...)) and load that ({error})"
        ) from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: truncated or not a checkpoint ({error}); fetch it again") from error
    while isinstance(content, Mapping) and any(isinstance(content.get(w), Mapping) for w in _WRAPPERS):
        content = next(content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping))
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path}: holds no state_dict, but {type(content).__name__}")
    return dict(content)


def fill(
    network: nn.Module, tensors: Mapping[str, Tensor], rename: Callable[[str], str], subject: str
) -> None:
    """Copy tensors into a network, all or none.

    Args:
        network: the plain network.
        tensors: upstream's names -> tensors; cast to the network's dtype.
        rename: an upstream name -> the network's.
        subject: what the tensors are, for error messages.

    Raises:
        CheckpointError: a tensor is missing, extra, given twice, or of another shape; it lists them.
    """
    own = network.state_dict()
    given: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    twice: list[str] = []
    for key, tensor in tensors.items():
        name = rename(key.removeprefix("module."))
        if name in given:
            twice.append(f"{key} and {source[name]}")
        given[name], source[name] = tensor, key
    missing = [n for n in own if n not in given and not n.endswith("num_batches_tracked")]
    extra = [source[n] for n in given if n not in own]
    shapes = [
        f"{source[n]} {tuple(t.shape)} should be {tuple(own[n].shape)}"
        for n, t in given.items()
        if n in own and t.shape != own[n].shape
    ]
    wrong = {"missing": missing, "extra": extra, "of another shape": shapes, "given twice": twice}
    if any(wrong.values()):
        lists = "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in wrong.items() if names)
        raise CheckpointError(
            f"{subject} does not fit: {lists}. Check the family and the constructor arguments it was made with"
        )
    network.load_state_dict({**own, **given})


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
