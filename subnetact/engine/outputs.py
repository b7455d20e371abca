"""Outputs of a batch: how they are split into samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subnetact.errors import EngineError


def unstack(output: Any, count: int, size: int, where: str = "output") -> list[Any]:
    """Split the output of a batch into those of the first `count` samples, on the CPU; errors say `where`."""
    if isinstance(output, Tensor):
        if output.shape[:1] != (size,):
            raise EngineError(
                f"{where}: the network returned a tensor of shape {tuple(output.shape)} for a batch of "
                f"{size}, which cannot be split into samples; its first axis must be the batch"
            )
        # Who keeps a copy keeps neither the batch nor the answers to others, and cannot change a weight.
        return [row.clone() for row in output[:count].detach().cpu().unbind(0)]
    if isinstance(output, Mapping):
        parts = {name: part for name, part in output.items() if part is not None}
        columns = {name: unstack(part, count, size, f"{where}[{name!r}]") for name, part in parts.items()}
        return [{name: rows[i] for name, rows in columns.items()} for i in range(count)]
    if isinstance(output, (tuple, list)):
        rows = [
            [None] * count if part is None else unstack(part, count, size, f"{where}[{i}]")
            for i, part in enumerate(output)
        ]
        return [tuple(row[i] for row in rows) for i in range(count)]
    raise EngineError(
        f"{where}: the network returned {type(output).__name__}, which cannot be split into samples; return "
        "tensors, or tuples, lists or mappings of them (a language model returns its cache unless "
        "model.config.use_cache is False)"
    )
