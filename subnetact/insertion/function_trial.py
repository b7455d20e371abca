"""Which entries of the results of a function follow which entries of its arguments, found by a trial.

A function treats the entries of an axis one by one if, with only some of them, it returns what it returns
with all of them, without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from subnetact.comparison import ROUNDED, equal
from subnetact.device import raise_if_out_of_memory

BY_THE_FORWARD = "the forward"
"""What a reason begins with that is meant for users."""
SPREAD = ("linspace", "logspace")
"""Functions of no tensor whose numbers depend on how many there are."""
EFFECTS = {
    **{"mean": "averages over", "roll": "shifts", "flip": "reverses the order of", "sort": "sorts"},
    "assigned": "writes over some of",
    **dict.fromkeys(("amax", "amin"), "takes the largest or the least of"),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), "takes the variance over"),
    **dict.fromkeys(SPREAD, "spreads numbers over"),
}
"""What functions do with all entries of an axis, in the words of a refusal; others move or mix them."""
UNCHECKED = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that read beyond their arguments if these do not fit; their modules check that first."""

_Axes = Mapping[fx.Node, int]


def spec_by_trial(operation: Any) -> Any:
    """Return what torch-kirigami has to know of a call of a function, or of a module, without a rule."""
    from torch_kirigami.dep_graph.contracts import AxisBarrier, Barrier
    from torch_kirigami.dep_graph.operation import OperatorSpec
    from torch_kirigami.dep_graph.relations import AxisRelation

    given = tree_leaves((operation.node.args, operation.node.kwargs))
    nodes = [leaf for leaf in given if isinstance(leaf, fx.Node)]
    refs = dict(zip(nodes, operation.inputs, strict=False))
    name = getattr(operation.node.target, "__name__", str(operation.node.target))
    why = f"{BY_THE_FORWARD} {EFFECTS.get(name, 'moves or mixes')} its outputs"
    constraints: list[Any] = [Barrier((*operation.bindings.values(),), why, operation.name)]
    relations: list[Any] = []
    if len(nodes) != len(operation.inputs):
        return OperatorSpec((), (Barrier((*operation.inputs, *operation.outputs), why, operation.name),))
    free: set[tuple[Any, int]] = set()
    trial = _Trial(operation, refs)
    for node, ref in refs.items():
        for axis, length in enumerate(ref.shape):
            if (ref, axis) in free:
                continue
            for axes in _together(refs, node, axis):
                followed = trial.followed(axes, length) if length > 1 else None
                if followed is not None:
                    ends = [refs[other].axis(at) for other, at in axes.items()]
                    ends += [operation.outputs[i].axis(at) for i, at in followed]
                    relations += [AxisRelation.equal(ends[0], end, operation.name) for end in ends[1:]]
                    free |= {(end.tensor, end.dim) for end in ends}
                    break
    tensors = (*refs.values(), *operation.outputs) if refs or name in SPREAD else ()
    constraints += [
        AxisBarrier(ref.axis(axis), why, operation.name)
        for ref in tensors
        for axis in range(len(ref.shape))
        if (ref, axis) not in free
    ]
    return OperatorSpec(tuple(relations), tuple(constraints))


def _together(refs: Mapping[fx.Node, Any], node: fx.Node, axis: int) -> Iterator[_Axes]:
    """Yield an axis of one argument, and then all axes of its length at the same place from the right."""
    yield {node: axis}
    shape = refs[node].shape
    from_right = len(shape) - axis
    others = {
        other: len(ref.shape) - from_right
        for other, ref in refs.items()
        if len(ref.shape) >= from_right and ref.shape[-from_right] == shape[axis]
    }
    if len(others) > 1:
        yield others


class _Trial:
    """Calls a function with random numbers, and with the whole numbers of the example."""

    def __init__(self, operation: Any, refs: Mapping[fx.Node, Any]) -> None:
        self._node, target = operation.node, operation.node.target
        kinds = {"call_module": operation.module, "call_method": getattr(Tensor, str(target), None)}
        self._function: Any = kinds.get(self._node.op, target)
        generator = torch.Generator().manual_seed(0)
        self._values: dict[fx.Node, Tensor] = {}
        for node in refs:
            value, facts = node.meta.get("value"), node.meta["tensor_meta"]
            if value is None:
                value = torch.randn(facts.shape, generator=generator).to(facts.dtype)
            self._values[node] = value.cpu()
        self._whole = self._called(self._values)

    def followed(self, axes: _Axes, length: int) -> list[tuple[int, int]] | None:
        """Return the results and axes of them that follow axes of arguments; None if others change."""
        found: list[tuple[int, int]] | None = None
        for kept in (torch.arange(length // 2), torch.arange(0, length, 2), torch.arange(1, length, 2)):
            values = {n: v.index_select(axes[n], kept) if n in axes else v for n, v in self._values.items()}
            results = self._called(values)
            if self._whole is None or results is None or len(results) != len(self._whole):
                return None
            now = []
            for i, (result, whole) in enumerate(zip(results, self._whole, strict=True)):
                sides = enumerate(zip(result.shape, whole.shape, strict=False))
                shorter = [axis for axis, (now_long, long) in sides if now_long != long]
                if len(shorter) > 1 or any(whole.shape[axis] != length for axis in shorter):
                    return None
                expected = whole.index_select(shorter[0], kept) if shorter else whole
                if not equal(result, expected, ROUNDED):
                    return None
                now += [(i, axis) for axis in shorter]
            if found not in (None, now):
                return None
            found = now
        return found

    def _called(self, values: Mapping[fx.Node, Tensor]) -> list[Tensor] | None:
        if self._node.op == "call_function" and getattr(self._node.target, "__name__", "") in UNCHECKED:
            return None
        args, kwargs = fx.map_arg((self._node.args, self._node.kwargs), lambda node: values[node].clone())
        try:
            with torch.no_grad():
                result = self._function(*args, **kwargs)
        except Exception as error:
            raise_if_out_of_memory(error)
            return None
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
