"""Inputs and outputs between processes: NumPy arrays, which Ray sends without copying large ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["to_arrays", "to_tensors"]


def to_arrays(x: Any) -> Any:
    """Return an input or an output with arrays instead of tensors.

    Args:
        x: a tensor, or tuples, lists and dictionaries of them. Tensors of bfloat16 stay tensors, because
            NumPy has no such type.
    """
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return x if x.dtype == torch.bfloat16 else x.contiguous().numpy()
    if isinstance(x, Mapping):
        return {name: to_arrays(part) for name, part in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(map(to_arrays, x))
    return x


def to_tensors(x: Any) -> Any:
    """Return the tensors again.

    Args:
        x: what `to_arrays` returned. Arrays that may not be written are copied.
    """
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x if x.flags.writeable else x.copy())
    if isinstance(x, Mapping):
        return {name: to_tensors(part) for name, part in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(map(to_tensors, x))
    return x
