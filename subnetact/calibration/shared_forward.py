"""SharedForward: the networks of many subnets as one graph, in which equal layers of equal inputs run once.

The docstring of `subnetact.calibration` explains what is shared, when this is exact, and how memory is
bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.calibration.inplace import hidden_writes
from subnetact.operators.tensor_version import tensor_version
from subnetact.supernet.elementwise import Elementwise, elementwise
from subnetact.supernet.trace import trace_

__all__ = ["NotShareable", "SharedForward"]

_INNER = frozenset(nn.Module().__dict__) | {"collector", "recorder"}
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
_FRESH = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers whose outputs are new tensors, which a following activation or sum may overwrite."""


class NotShareable(Exception):
    """A network cannot be split into layers; the message is the reason."""


@dataclass(frozen=True)
class _Ref:
    """A placeholder for the output of a step, in the arguments of another step."""

    step: int


@dataclass(eq=False)
class _Step:
    """One operation of the graph: a call of a module, a function or a method."""

    inputs: tuple[int, ...]
    args: Any
    kwargs: Any
    call: Callable[..., Any]
    operation: Elementwise | None = None
    module: nn.Module | None = None
    norm: CalibrationNorm | None = None
    fresh: bool = False


class SharedForward:
    """The forward passes of many subnets, up to their last BatchNorm, without repetitions.

    Two layers are one step if they have the same weights (the same slices), the same settings and the same
    inputs. That is the case for the common beginning of two subnets, and for a shortcut that does not depend
    on the rest of its block. Subnets run one after another, those with equal beginnings next to each other.
    An output is kept only as long as a later step reads it.

    Args:
        memory: the number of bytes of outputs to keep from one subnet to later ones. Beyond that, the outputs
            that are needed last are dropped and computed again.

    Attributes:
        memory: as given.
        norms: the BatchNorms by step number.
        layers: the number of module calls so far.
        peak: the largest number of bytes that were kept from one subnet to later ones.
    """

    def __init__(self, memory: float = float("inf")) -> None:
        self.memory = memory
        self.norms: dict[int, CalibrationNorm] = {}
        self.layers = 0
        self.peak = 0
        self._steps: list[_Step] = [_Step((), (), {}, lambda: None)]
        self._numbers: dict[Any, int] = {}
        self._alive: dict[int, Any] = {}
        self._needed: dict[Any, frozenset[int]] = {}
        self._order: list[Any] = []
        self._uses: dict[int, list[int]] = {}

    # -- building --------------------------------------------------------------------------------

    def add(self, view: nn.Module, norms: Sequence[CalibrationNorm]) -> dict[str, int]:
        """Add a subnet.

        Args:
            view: a view that nobody else uses.
            norms: the BatchNorms of the view.

        Returns:
            The step numbers of the BatchNorms, by name.

        Raises:
            NotShareable: the forward cannot be traced, calls a BatchNorm twice, or overwrites values that
                may be used again.
        """
        collectors = {id(norm.module): norm for norm in norms}
        try:
            graph, leaves = trace_(view, lambda m: id(m) in collectors or not m._modules)
        except Exception as error:
            raise NotShareable(f"its forward cannot be traced: {error}") from error
        nodes = list(graph.nodes)
        called = [id(leaves[str(n.target)]) for n in nodes if n.op == "call_module"]
        found = [key for key in called if key in collectors]
        if len(set(found)) < len(found):
            raise NotShareable("it calls a BatchNorm more than once")
        last = max((i for i, n in enumerate(nodes) if _norm(n, leaves, collectors)), default=-1)
        nodes = nodes[: last + 1]
        unclear = hidden_writes(nodes, leaves)
        if unclear is not None:
            raise NotShareable(f"{unclear} writes over a value that may be used again")
        values: dict[fx.Node, int] = {}
        steps: dict[str, int] = {}
        for node in nodes:
            if node.op == "placeholder":
                values[node] = 0
            elif node.op.startswith("call_"):
                norm = _norm(node, leaves, collectors)
                values[node] = self._number(node, leaves, norm, values)
                if norm is not None:
                    steps[norm.norm.path] = values[node]
            else:
                raise NotShareable(f"its forward reads {node.target} itself")
        return steps

    def _number(
        self,
        node: fx.Node,
        leaves: Mapping[str, nn.Module],
        norm: CalibrationNorm | None,
        values: Mapping[fx.Node, int],
    ) -> int:
        refer: Any = lambda v: _Ref(values[v]) if isinstance(v, fx.Node) else v  # noqa: E731
        args: Any = map_aggregate(node.args, refer)
        kwargs: Any = map_aggregate(node.kwargs, refer)
        operation = elementwise(node, leaves)
        module = leaves[str(node.target)] if node.op == "call_module" else None
        what: Any
        if operation is not None:
            what, kwargs = operation.name, {}
        elif module is None:
            what = node.op, node.target
        else:
            what = self._signature(module, norm)
        key = what, self._frozen(args), self._frozen(kwargs)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._steps)
            inputs = tuple(values[n] for n in node.all_input_nodes)
            self._steps.append(
                _Step(
                    inputs,
                    args,
                    kwargs,
                    _call(node, module),
                    operation,
                    module,
                    norm,
                    operation is not None or _is_fresh(module, norm),
                )
            )
            if norm is not None:
                self.norms[number] = norm
        return number

    def _signature(self, module: nn.Module, norm: CalibrationNorm | None = None) -> Any:
        """Return a key of everything on which the output of a module depends, apart from its input."""
        own = tuple(
            (name, self._frozen(value))
            for name, value in module.__dict__.items()
            if name not in _INNER and not isinstance(value, CalibrationNorm)
        )
        hooks = tuple(self._frozen(tuple(module.__dict__[name].values())) for name in _HOOKS)
        buffers = () if norm is not None else self._frozen(tuple(module._buffers.items()))
        children = tuple((n, None if m is None else self._signature(m)) for n, m in module._modules.items())
        parameters = self._frozen(tuple(module._parameters.items()))
        path = None if norm is None else norm.norm.path
        return type(module), path, parameters, buffers, own, hooks, children

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value).__name__, tuple(self._frozen(v) for v in value)
        if isinstance(value, dict):
            return "dict", tuple((k, self._frozen(v)) for k, v in value.items())
        if isinstance(value, slice):
            return "slice", self._frozen((value.start, value.stop, value.step))
        if value is None or isinstance(value, _Ref | bool | int | float | str | torch.dtype | torch.device):
            return type(value), value
        self._alive[id(value)] = value  # An id is unique only as long as its object lives.
        return id(value)

    # -- running ---------------------------------------------------------------------------------

    def arrange(self, subnets: Mapping[Any, Sequence[int]]) -> None:
        """Choose the subnets to run from now on, and their order.

        Args:
            subnets: for each subnet, the step numbers of its BatchNorms.
        """
        self._needed = {key: self._ancestors(norms) for key, norms in subnets.items()}
        self._order = sorted(self._needed, key=lambda key: sorted(self._needed[key]))
        first: dict[int, int] = {}
        for position, key in enumerate(self._order):
            for step in self._needed[key]:
                first.setdefault(step, position)
        self._uses = {}
        for step, position in first.items():
            for value in set(self._steps[step].inputs):
                self._uses.setdefault(value, []).append(position)
        for positions in self._uses.values():
            positions.sort()

    def _ancestors(self, targets: Sequence[int]) -> frozenset[int]:
        found: set[int] = set()
        stack = list(targets)
        while stack:
            step = stack.pop()
            if step and step not in found:
                found.add(step)
                stack += self._steps[step].inputs
        return frozenset(found)

    def alone(self, key: Any) -> int:
        """Return the number of module calls of one subnet that runs by itself."""
        return sum(self._steps[step].module is not None for step in self._needed[key])

    def together(self) -> int:
        """Return the number of module calls of all subnets, with shared calls counted once."""
        steps = frozenset[int]().union(*self._needed.values())
        return sum(self._steps[step].module is not None for step in steps)

    def run(self, x: Tensor, batch: int, check: bool = False) -> Iterator[Any]:
        """Run a batch through all subnets, and yield each subnet when it is done.

        Args:
            x: the batch, of shape (N, ...).
            batch: the number of batches before this one. A BatchNorm that has averaged this batch already,
                before an interruption, does not average it again.
            check: whether to look for layers that overwrite their inputs although the graph does not say so.

        Raises:
            NotShareable: such a layer was found.
        """
        values: dict[int, Any] = {0: x}
        for position, key in enumerate(self._order):
            targets = [s for s in self._needed[key] if s in self.norms and self.norms[s].batches <= batch]
            self._compute(targets, position, values, batch, check)
            for value in [v for v in values if v and self._next_use(v, position) is None]:
                del values[value]
            yield key

    def _compute(
        self, targets: Sequence[int], position: int, values: dict[int, Any], batch: int, check: bool
    ) -> None:
        todo: set[int] = set()
        stack = list(targets)
        while stack:
            step = stack.pop()
            if step not in todo and step not in values:
                todo.add(step)
                stack += self._steps[step].inputs
        pending: dict[int, int] = {}
        for step in todo:
            for value in set(self._steps[step].inputs):
                pending[value] = pending.get(value, 0) + 1
        for number in sorted(todo):
            step_of = self._steps[number]
            kept = number in pending or self._next_use(number, position) is not None
            versions = [_version(values[i]) for i in step_of.inputs] if check else []
            result = self._run(step_of, values, batch, kept, may_write=not check)
            if check and versions != [_version(values[i]) for i in step_of.inputs if i in values]:
                raise NotShareable(f"{step_of.module or step_of.call} writes over its input")
            for value in set(step_of.inputs):
                pending[value] -= 1
                if value and not pending[value] and self._next_use(value, position) is None:
                    values.pop(value, None)
            if kept:
                values[number] = result
            self._make_room(values, pending, position)

    def _run(self, step: _Step, values: dict[int, Any], batch: int, kept: bool, may_write: bool) -> Any:
        fetch: Any = lambda v: values[v.step] if isinstance(v, _Ref) else v  # noqa: E731
        args: Any = map_aggregate(step.args, fetch)
        kwargs: Any = map_aggregate(step.kwargs, fetch)
        if step.module is not None:
            self.layers += 1
        if step.norm is not None:
            step.norm.paused = step.norm.batches > batch
            try:
                if not kept:
                    return step.norm.collect(args[0])
                return step.call(*args, **kwargs)
            finally:
                step.norm.paused = False
        if step.operation is not None:
            first = step.args[0]
            mine = isinstance(first, _Ref) and self._steps[first.step].fresh
            alone = mine and len(self._uses.get(first.step, ())) == 1
            return step.operation(args, may_write and alone)
        return step.call(*args, **kwargs)

    def _next_use(self, value: int, position: int) -> int | None:
        uses = self._uses.get(value, ())
        i = bisect_right(uses, position)
        return uses[i] if i < len(uses) else None

    def _make_room(self, values: dict[int, Any], pending: Mapping[int, int], position: int) -> None:
        """Drop outputs that only later subnets read, until they fit; those that are needed last go first."""
        later = {
            value: use
            for value in values
            if value and not pending.get(value) and (use := self._next_use(value, position)) is not None
        }
        held = sum(_nbytes(values[value]) for value in later)
        while held > self.memory:
            value = max(later, key=later.__getitem__)
            held -= _nbytes(values.pop(value))
            del later[value]
        self.peak = max(self.peak, held)


def _norm(
    node: fx.Node, leaves: Mapping[str, nn.Module], collectors: Mapping[int, CalibrationNorm]
) -> CalibrationNorm | None:
    return collectors.get(id(leaves[str(node.target)])) if node.op == "call_module" else None


def _call(node: fx.Node, module: nn.Module | None) -> Callable[..., Any]:
    if module is not None:
        return module
    if node.op == "call_method":
        name = str(node.target)
        return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)
    function: Any = node.target
    return function  # type: ignore[no-any-return]


def _is_fresh(module: nn.Module | None, norm: CalibrationNorm | None) -> bool:
    if module is None or any(module.__dict__[name] for name in _HOOKS):
        return False
    return isinstance(module, _FRESH) or (norm is not None and norm.plain)


def _version(value: Any) -> int:
    return tensor_version(value) if isinstance(value, Tensor) else 0


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
