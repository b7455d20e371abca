"""How a TorchScript file stores tensors: each one once, and all tensors of one dtype in one record."""

from __future__ import annotations

import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.files.atomic import replacing

__all__ = ["pack", "strip"]

ALIGNED = 64
"""Every tensor starts at a multiple of this many elements, so that it is aligned like a separate one."""


def pack(whole: nn.Module) -> None:
    """Copy all tensors of a module into one storage per dtype and device.

    The file then has one record per dtype instead of hundreds, and the module shares no tensors with the
    supernet. Strides stay the same, except for tensors whose elements overlap or leave gaps.

    Args:
        whole: the module; its parameters and buffers are replaced.
    """
    for module in whole.modules():
        if isinstance(module, nn.RNNBase):
            _copy_recurrent(module)
    held = [
        (own, name, tensor)
        for module in whole.modules()
        if not isinstance(module, nn.RNNBase)
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    ]
    starts: dict[Any, int] = {}
    ends: Counter[Any] = Counter()
    for _, _, tensor in held:
        kind = tensor.dtype, tensor.device
        if _place(tensor) not in starts:
            starts[_place(tensor)] = ends[kind]
            ends[kind] += -(-tensor.numel() // ALIGNED) * ALIGNED
    flats = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in ends.items()}
    for own, name, tensor in held:
        start = starts[_place(tensor)]
        flat = flats[tensor.dtype, tensor.device]
        packed = flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), start)
        packed.copy_(tensor.detach())
        own[name] = nn.Parameter(packed, False) if isinstance(tensor, nn.Parameter) else packed  # type: ignore[assignment]


def _copy_recurrent(module: nn.RNNBase) -> None:
    """Copy the weights of a recurrent module one by one: freezing refuses them if they share a storage."""
    for name, tensor in module._parameters.items():
        module._parameters[name] = None if tensor is None else nn.Parameter(tensor.detach().clone(), False)
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    object.__setattr__(module, "_flat_weights", weights)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


def strip(path: Path) -> None:
    """Remove the debug records, which map errors to generated source and fill most of a small file.

    Args:
        path: the TorchScript file, which is rewritten.
    """
    with replacing(path) as stripped, zipfile.ZipFile(path) as old, zipfile.ZipFile(stripped, "w") as new:
        for record in old.infolist():
            if not record.filename.endswith(".debug_pkl"):
                with old.open(record) as source, new.open(record, "w") as target:
                    shutil.copyfileobj(source, target, 2**20)
