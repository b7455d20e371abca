"""Files of tensors (safetensors): written atomically, read without pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from subnetact.errors import FileFormatError
from subnetact.files.atomic import replacing, require_regular

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into a safetensors file, atomically.

    Args:
        path: the file; an earlier one is replaced.
        tensors: contiguous tensors by name, no two of which share memory.
        metadata: strings by name that the file carries. If None, only that the tensors are of torch.

    Raises:
        MissingFile: the folder of the file does not exist.
        WriteError: the file cannot be written, for example because the disk is full.
    """
    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata or {"format": "pt"}))
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_tensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read all tensors of a safetensors file.

    Args:
        path: the file.
        device: the device of the tensors.

    Returns:
        The tensors by name. Together they are at most as large as the file.

    Raises:
        MissingFile: there is no such file.
        FileFormatError: the file is damaged, or is not a safetensors file.
    """
    require_regular(path)
    try:
        return load_file(Path(path), device=str(device))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise FileFormatError(f"{path}: not readable as safetensors ({error}); save it again") from error
