"""What a function does with the entries of its tensors, found by calling it with other numbers.

If its results are numbers of its inputs, wherever these are, it moves data, and entries go with the places
that they came from. If it returns, with only some entries of an axis, what it returns with all of them, it
treats that axis entry by entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from subnetact.comparison import EXACT, ROUNDED, equal
from subnetact.device import tolerated
from subnetact.insertion.recorder import called_name

EMPTY = ("empty", "new_empty", "empty_like")
"""Functions whose results have numbers that mean nothing."""
UNCHECKED = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that read beyond their arguments if these do not fit; their modules check that first."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Which entries of a tensor go; 1 in its shape stands for an axis along which all are alike.

Thousands of small ones are compared, for which numpy takes less than half of torch's time.
"""
Places: TypeAlias = npt.NDArray[np.int64]
Tables: TypeAlias = tuple[list[Places], Mask]
"""The index on every axis of a tensor that lies at some places, and which places have one.

1 in their shapes stands for an axis along which all are alike.
"""


@dataclass(frozen=True)
class Move:
    """How places in an input of a function that moves data are those in a result; both by their numbers.

    `places` has the shape of the result, -1 where it holds something else. The way back is known if no entry
    of the input is there twice.
    """

    input: int
    result: int
    shape: tuple[int, ...]
    places: Places
    to_result: Tables
    to_input: Tables | None

    @classmethod
    def of(cls, input: int, result: int, shape: tuple[int, ...], places: Places) -> Move:
        """Return the move of an input of a shape to some places in a result."""
        inside, back = places >= 0, None
        if len(used := places[inside]) == len(set(used.tolist())):
            there = np.full(math.prod(shape), -1)
            there[used] = np.flatnonzero(inside)
            back = _tables(there.reshape(shape), places.shape)
        return cls(input, result, shape, places, _tables(places, shape), back)

    def before(self, mask: Mask) -> Mask | None:
        """Return which entries of the input go with some of the result; None if none does."""
        if self.to_input is not None:
            return indexed(mask, *self.to_input)
        mask = np.broadcast_to(mask, self.places.shape)
        goes, stays = np.zeros((2, math.prod(self.shape)), bool)
        goes[self.places[mask & (self.places >= 0)]] = True
        stays[self.places[~mask & (self.places >= 0)]] = True
        if (goes & stays).any() and self._is_copied(mask):
            goes &= ~stays  # Some copies go, and what they are copies of stays.
        goes, unread = goes.reshape(self.shape), ~(goes | stays).reshape(self.shape)
        for axis in range(goes.ndim if goes.any() and unread.any() else 0):
            others = axes_but(axis, goes)
            if others:  # What is not read goes with all that is read at the same place of an axis.
                whole = (goes | unread).all(others, keepdims=True) & goes.any(others, keepdims=True)
                goes = goes | (whole & unread)
        return reduced(goes) if goes.any() else None

    def _is_copied(self, mask: Mask) -> bool:
        """Tell whether data are copied along an axis, as `expand` does, of which entries go as a whole."""
        for axis in range(mask.ndim):
            alike = (self.places == self.places.take([0], axis)).all()
            if mask.shape[axis] > 1 and alike and mask.all(axes_but(axis, mask)).any():
                return True
        return False


@dataclass(frozen=True)
class Labels:
    """A label for each axis of the tensors and results of a function that it treats entry by entry.

    `moved` says that it leaves all numbers in their places.
    """

    axes: list[tuple[str | None, ...]]
    moved: bool = False


def _tables(places: Places, shape: Sequence[int]) -> Tables:
    """Return the index on every axis of a shape that is at some places."""
    known = places >= 0
    tables, stride = list[Places](), math.prod(shape)
    for length in shape:
        stride //= length
        at = np.where(known, places // stride % length, -1)
        for axis in range(at.ndim):
            most = at.max(axis, keepdims=True)
            if ((at == most) | (at < 0)).all():
                at = most
        tables.append(at)
    return tables, reduced(known)


def indexed(mask: Mask, tables: Sequence[Places], known: Mask) -> Mask | None:
    """Return a mask at other places; None if nothing goes there."""
    zero = np.zeros((1,) * known.ndim, np.int64)
    index = [table if n > 1 else zero for n, table in zip(mask.shape, tables, strict=True)]
    moved: Mask = mask[tuple(index)] if index else mask.reshape(zero.shape)
    for table in index:
        moved = moved & (table >= 0)
    return moved if moved.any() else None


def axes_but(axis: int, mask: Mask) -> tuple[int, ...]:
    """Return the other axes of a mask."""
    return tuple(i for i in range(mask.ndim) if i != axis)


def reduced(mask: Mask) -> Mask:
    """Return a mask with 1 for every axis along which all entries are alike."""
    for axis, length in enumerate(mask.shape):
        if length > 1 and (mask == (first := mask.take([0], axis))).all():
            mask = first
    return mask


class FunctionTrial:
    """One call of a function, with other numbers in the place of those that it got."""

    def __init__(self, node: fx.Node, modules: Mapping[str, nn.Module], results: list[fx.Node]) -> None:
        self.node, self.results = node, results
        kinds = {
            "call_module": modules.get(str(node.target)),
            "call_method": getattr(Tensor, str(node.target), None),
        }
        self._function: Any = kinds.get(node.op, node.target)
        self.tensors = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
        facts = [n.meta["tensor_meta"] for n in self.tensors]
        self._shapes, self._dtypes = [tuple(f.shape) for f in facts], [f.dtype for f in facts]
        self._deciding = [  # whole numbers, which may decide where others go
            None if dtype.is_floating_point else n.meta.get("value", torch.zeros(shape, dtype=dtype))
            for n, shape, dtype in zip(self.tensors, self._shapes, self._dtypes, strict=True)
        ]

    def signature(self) -> Any:
        """Return what calls with the same results have in common; None if numbers decide."""
        if any(value is not None for value in self._deciding):
            return None
        layer = self._function if self.node.op == "call_module" else None
        target = (type(layer), str(layer)) if layer is not None else self._function
        arguments = fx.map_arg(
            (self.node.args, self.node.kwargs), lambda n: self.tensors.index(n) if n in self.tensors else None
        )
        return target, str(arguments), tuple(self._shapes), tuple(self._dtypes)

    def moves(self) -> list[Move] | Labels | None:
        """Return how the function moves data, as labels if it leaves them in place; None if it computes."""
        undecided = [i for i, value in enumerate(self._deciding) if value is None]
        read = undecided or list(range(len(self.tensors)))
        sizes = [math.prod(self._shapes[i]) for i in read]
        total, orders = sum(sizes), list[list[Tensor]]()
        if not total or not self.results:
            return None
        for order in (torch.arange(total), torch.randperm(total, generator=torch.Generator().manual_seed(0))):
            numbers = iter((order + 1).double().split_with_sizes(sizes))
            values = [
                next(numbers).view(shape) if i in read else value
                for i, (shape, value) in enumerate(zip(self._shapes, self._deciding, strict=True))
            ]
            results = self._called(values)
            if results is None or len(results) != len(self.results):
                return None
            where, sources = torch.full((total + 1,), -1), list[Tensor]()
            where[order] = torch.arange(total)
            for result in results:
                numbers_seen = torch.full((1,), 0.5) if result.is_complex() else result.double() - 1
                whole = (numbers_seen == numbers_seen.round()) & (numbers_seen >= -1)
                if not bool((whole & (numbers_seen < total)).all()):
                    return None
                sources.append(where[numbers_seen.long()])
            orders.append(sources)
        if not all(map(torch.equal, *orders)) or not any(bool((s >= 0).any()) for s in orders[0]):
            return None
        alike = len(read) == 1 and len(self.results) == 1 and orders[0][0].shape == self._shapes[read[0]]
        if alike and torch.equal(orders[0][0].flatten(), torch.arange(total)):
            labels: tuple[str | None, ...] = tuple(f"*{axis}" for axis in range(len(self._shapes[read[0]])))
            axes = (labels if i in read else (None,) * len(s) for i, s in enumerate(self._shapes))
            return Labels([*axes, labels], moved=True)
        moves, begin = list[Move](), 0
        for i, size in zip(read, sizes, strict=True):
            for at, source in enumerate(t.numpy(force=True) for t in orders[0]):
                places = np.where((source >= begin) & (source < begin + size), source - begin, -1)
                if (places >= 0).any():
                    moves.append(Move.of(i, at, self._shapes[i], places))
            begin += size
        return moves

    def labels(self) -> Labels | None:
        """Return labels for axes that the function treats entry by entry; None if it reads shapes only."""
        draw = torch.Generator().manual_seed(0)
        values = [
            torch.randn(shape, generator=draw).to(dtype) if value is None else value
            for shape, dtype, value in zip(self._shapes, self._dtypes, self._deciding, strict=True)
        ]
        others = [v if d is not None else v * torch.nan for v, d in zip(values, self._deciding, strict=True)]
        whole, again = self._called(values), self._called(others)
        constant = whole is not None and again is not None and equal(whole, again, EXACT)
        if called_name(self.node) in EMPTY or (constant and None in self._deciding):
            return None
        if constant and all(bool((t == t.flatten()[:1]).all()) for t in whole or ()):
            return None
        labels: list[list[str | None]] = [[None] * len(shape) for shape in self._shapes]
        labels += [[None] * len(result.meta["tensor_meta"].shape) for result in self.results]
        if whole is not None and len(whole) == len(self.results):
            for i, shape in enumerate(self._shapes):
                for axis, length in enumerate(shape):
                    for axes in self._together(i, axis) if length > 1 and labels[i][axis] is None else ():
                        ends = self._ends(values, whole, axes, length)
                        if ends is not None:
                            for at, end in (*axes.items(), *((len(self._shapes) + r, a) for r, a in ends)):
                                labels[at][end] = f"*{i}.{axis}"
                            break
        return Labels(list(map(tuple, labels)))

    # -- inner parts -------------------------------------------------------------------------------

    def _called(self, values: Sequence[Any]) -> list[Tensor] | None:
        if self.node.op == "call_function" and called_name(self.node) in UNCHECKED:
            return None
        by_node = dict(zip(self.tensors, values, strict=True))
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), lambda n: by_node[n].clone())
        with tolerated(), torch.no_grad():
            result = self._function(*args, **kwargs)
            return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return None

    def _together(self, at: int, axis: int) -> Iterator[dict[int, int]]:
        """Yield an axis of one tensor, and then all axes of its length at the same place from the right."""
        yield {at: axis}
        place, length = axis - len(self._shapes[at]), self._shapes[at][axis]
        shapes = [(i, shape) for i, shape in enumerate(self._shapes) if len(shape) >= -place]
        alike = {i: len(shape) + place for i, shape in shapes if shape[place] == length}
        if len(alike) > 1:
            yield alike

    def _ends(
        self, values: Sequence[Tensor], whole: list[Tensor], axes: Mapping[int, int], length: int
    ) -> list[tuple[int, int]] | None:
        """Return the results and axes of them that follow axes of tensors; None if others change."""
        ends: list[tuple[int, int]] | None = None
        for kept in (torch.arange(length // 2), torch.arange(0, length, 2), torch.arange(1, length, 2)):
            results = self._called(
                [v.index_select(axes[i], kept) if i in axes else v for i, v in enumerate(values)]
            )
            if results is None or len(results) != len(whole):
                return None
            now = []
            for i, (result, full) in enumerate(zip(results, whole, strict=True)):
                sides = enumerate(zip(result.shape, full.shape, strict=False))
                shorter = [axis for axis, (now_long, long) in sides if now_long != long]
                if len(shorter) > 1 or any(full.shape[axis] != length for axis in shorter):
                    return None
                if not equal(result, full.index_select(shorter[0], kept) if shorter else full, ROUNDED):
                    return None
                now += [(i, axis) for axis in shorter]
            if ends not in (None, now):
                return None
            ends = now
        return ends
