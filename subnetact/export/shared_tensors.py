"""`SharedTensors`: the tensors of many programs in one file, which has every storage once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subnetact.errors import FileFormatError
from subnetact.files.tensors import read_tensors, write_tensors

__all__ = ["SharedTensors", "TensorPosition"]

TensorPosition = tuple[str, list[int], list[int], int]
"""A tensor in the file: name of its storage, and its size, stride and offset in elements."""


class SharedTensors:
    """The distinct storages of many tensors, collected while programs are written.

    Slices of a supernet's weights are views of the full weights, so the full weights are stored once for all
    subnets. The statistics of a subnet and kernels that a matrix has made are stored once as well.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[int, torch.dtype], tuple[str, Tensor]] = {}

    def view(self, tensor: Tensor) -> TensorPosition:
        """Add the storage of a tensor.

        Args:
            tensor: the tensor.

        Returns:
            The position of the tensor in the file.
        """
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.dtype
        if key not in self._flat:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self._flat[key] = (
                str(len(self._flat)),
                flat,
            )  # keeps the storage alive, so that its address stays unique
        return self._flat[key][0], list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())

    def save(self, path: Path) -> None:
        """Write every storage as one flat tensor into a safetensors file.

        Args:
            path: the file to write.
        """
        write_tensors(path, {name: flat.cpu().clone() for name, flat in self._flat.values()})

    @staticmethod
    def load(path: Path, views: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Tensor]]:
        """Read tensors; those that shared memory when they were saved share memory again.

        Args:
            path: the file.
            views: for each program, the position in the file of every tensor by name.
            device: the device of the tensors.

        Returns:
            For each program, its tensors by name.

        Raises:
            FileFormatError: the file is unreadable, or a position is outside the file.
        """
        flat = read_tensors(path, device)
        try:
            return [
                {
                    n: flat[of].as_strided(size, stride, offset)
                    for n, (of, size, stride, offset) in named.items()
                }
                for named in views
            ]
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            raise FileFormatError(
                f"{path}: not the weights of this export ({error}); export again"
            ) from error
