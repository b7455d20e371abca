"""Outputs of a batch: how they are split into samples and put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from subnetact.errors import EngineError

__all__ = ["replaced_samples", "unstack"]


def replaced_samples(output: Any, others: Any, places: Tensor, size: int) -> Any:
    """Return an output with other answers for the samples at some places; None if it cannot be split."""
    (parts, structure), (new, other) = tree_flatten(output), tree_flatten(others)
    if structure != other:
        return None
    joined: list[Tensor | None] = []
    for one, rows in zip(parts, new, strict=True):
        if isinstance(one, Tensor) and isinstance(rows, Tensor):
            if (one.shape[:1], rows.shape) != ((size,), (len(places), *one.shape[1:])):
                return None
            joined.append(one.index_copy(0, places, rows.to(one.dtype)))
        elif one is None and rows is None:
            joined.append(None)
        else:
            return None
    return tree_unflatten(joined, structure)


def unstack(output: Any, count: int, size: int, where: str = "output") -> list[Any]:
    """Split the output of a batch of `size` samples into the outputs of the first `count`, on the CPU.

    Parts of a mapping that are None are left out; parts of a tuple or list that are None stay None. Every
    output is in memory of its own: who keeps one keeps neither the batch nor the answers to others, and
    cannot change a weight. An EngineError says what cannot be split, which it calls `where`.
    """
    if isinstance(output, Tensor):
        if output.shape[:1] != (size,):
            raise EngineError(
                f"{where}: the network returned a tensor of shape {tuple(output.shape)} for a batch of "
                f"{size}, which cannot be split into samples; its first axis must be the batch"
            )
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
