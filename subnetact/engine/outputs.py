"""Outputs of a batch: whether two agree up to rounding, and how they are split and put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from subnetact.errors import EngineError

__all__ = ["agree", "is_as_near", "replaced_samples", "unstack"]


def agree(output: Any, expected: Any, rtol: float = 1e-3, atol: float = 1e-4) -> bool:
    """Tell whether two outputs are equal up to rounding.

    Args:
        output: a tensor, any other value, or a tuple, list or dictionary of outputs.
        expected: what the output should be.
        rtol: largest relative difference of an element.
        atol: largest absolute difference of an element. If the largest expected value is above 1, `atol` is
            multiplied by it.

    Returns:
        Whether structure, shapes and dtypes are equal, floating-point tensors agree within the tolerances,
        and all other values are equal.
    """
    if isinstance(output, Tensor) and isinstance(expected, Tensor):
        if output.shape != expected.shape or output.dtype != expected.dtype:
            return False
        if not (expected.is_floating_point() or expected.is_complex()):
            return torch.equal(output, expected)
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        scale = max(1.0, largest if largest < float("inf") else 1.0)
        return torch.allclose(output, expected, rtol, atol * scale, equal_nan=True)
    if isinstance(output, Mapping) and isinstance(expected, Mapping):
        return set(output) == set(expected) and all(
            agree(output[name], expected[name], rtol, atol) for name in expected
        )
    if isinstance(output, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(output) == len(expected) and all(
            agree(one, other, rtol, atol) for one, other in zip(output, expected, strict=True)
        )
    try:
        return type(output) is type(expected) and bool(output == expected)
    except (
        RuntimeError,
        ValueError,
    ):  # The values hold arrays, whose comparison is no single bool.
        return False


def is_as_near(output: Any, other: Any, exact: Any, times: float) -> bool:
    """Tell whether an output is nearly as close to an exact one as another output is.

    Args:
        output: a tensor, or a tuple, list or dictionary of tensors.
        other: an output that is not exact either.
        exact: what both are near to.
        times: how many times as far from the exact output it may be, by the norm of every tensor. One
            percent of the norm of the exact tensor is always allowed.

    Returns:
        Whether structure, shapes and dtypes are equal, and all tensors are near enough.
    """
    leaves = [tree_leaves(one) for one in (output, other, exact)]
    if len({len(found) for found in leaves}) > 1:
        return False
    for mine, others, right in zip(*leaves, strict=True):
        if not isinstance(right, Tensor) or not right.is_floating_point():
            if not agree(mine, right):
                return False
            continue
        if mine.shape != right.shape or mine.dtype != right.dtype:
            return False
        if not bool((mine - right).norm() <= times * (others - right).norm() + 0.01 * right.norm()):
            return False
    return True


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
