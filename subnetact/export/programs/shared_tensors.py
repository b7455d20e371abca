"""Tensors of many programs in one file: each storage once, each tensor as a view of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from subnetact.documents import replacing
from subnetact.errors import FileFormatError

__all__ = ["SharedTensors", "View"]

View = tuple[str, list[int], list[int], int]
"""Name of the storage, size, stride and offset; the latter three in elements."""


class SharedTensors:
    """Distinct storages, collected while programs are written.

    Slices of a supernet's weights are views of the full ones, so these are stored once however many
    subnets use them; so are a row of the norm table and a kernel that a matrix made.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[int, torch.dtype], tuple[str, Tensor]] = {}

    def view(self, tensor: Tensor) -> View:
        """Take a tensor's storage in, and tell where in it the tensor is."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.dtype
        if key not in self._flat:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self._flat[key] = (
                str(len(self._flat)),
                flat,
            )  # keeps the storage, so that its address is no other's
        return self._flat[key][0], list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())

    def save(self, path: Path) -> None:
        """Write every storage as one flat tensor (safetensors)."""
        with replacing(path) as temporary:  # which gives it the usual permissions
            flats = {name: flat.cpu().clone() for name, flat in self._flat.values()}
            save_file(flats, temporary, {"format": "pt"})

    @staticmethod
    def load(path: Path, views: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Tensor]]:
        """Return tensors by name for each mapping of names to `View`s; they share what they shared before.

        Raises:
            FileFormatError: the file is not readable, or a view is not inside it.
        """
        try:
            flat = load_file(path, device=str(device))
            return [
                {
                    n: flat[of].as_strided(size, stride, offset)
                    for n, (of, size, stride, offset) in named.items()
                }
                for named in views
            ]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise FileFormatError(
                f"{path}: not the weights of this export ({error}); export again"
            ) from error
