"""How a TorchScript file holds tensors: each once, all of one dtype in one record."""

from __future__ import annotations

import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.documents import replacing

__all__ = ["pack", "strip"]

ALIGNED = 64
"""Elements that every tensor starts at a multiple of, so that it is aligned as one of its own would be."""


def pack(whole: nn.Module) -> None:
    """Give a module tensors of its own, in one storage a dtype: one record in the file instead of hundreds.

    Strides stay as they are, but for tensors whose elements overlap or leave gaps.
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
    """Copy weights that a module holds under two names, which freezing refuses to find in one storage."""
    for name, tensor in module._parameters.items():
        module._parameters[name] = None if tensor is None else nn.Parameter(tensor.detach().clone(), False)
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    object.__setattr__(module, "_flat_weights", weights)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


def strip(path: Path) -> None:
    """Leave out what only maps errors to lines of generated source, much of a small network's file."""
    with replacing(path) as stripped, zipfile.ZipFile(path) as old, zipfile.ZipFile(stripped, "w") as new:
        for record in old.infolist():
            if not record.filename.endswith(".debug_pkl"):
                with old.open(record) as source, new.open(record, "w") as target:
                    shutil.copyfileobj(source, target, 2**20)
