"""SharedForward: the networks of many subnets as one graph, in which equal layers run once."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.device import raise_if_explained
from subnetact.operators.layer_traits import is_layer
from subnetact.operators.operation_traits import OperationTraits
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.operators.tensor_version import tensor_version
from subnetact.operators.view_module import HOOKS
from subnetact.spec import grouped
from subnetact.supernet.batches import call_with, map_tensors, tensors_of
from subnetact.supernet.elementwise import elementwise, hidden_writes
from subnetact.supernet.trace import trace_

_NO_SETTINGS = frozenset(nn.Module().__dict__) | {"collector", "recorder"}


class NotShareable(Exception):
    """A network cannot be split into layers; the message is the reason."""


@dataclass(frozen=True)
class _Ref:
    """A placeholder for the output of a step, in the arguments of another step."""

    step: int


_BY_VALUE = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, _Ref})
"""The types of settings that are equal if their values are; others are equal if they are one object."""


@dataclass(eq=False)
class _Step:
    """One operation of the graph: a call of a module, a function or a method, or of a whole subnet."""

    inputs: tuple[int, ...]
    args: Any
    kwargs: Any
    call: Callable[..., Any]
    operation: OperationTraits | None = None
    norms: Sequence[CalibrationNorm] = ()
    whole: bool = False
    layers: int = 0
    averaged: int = 0


@dataclass(eq=False)
class _Subnet:
    """What a subnet needs: the steps that average, and with `arrange` all steps before them."""

    targets: list[int]
    norms: dict[str, CalibrationNorm]
    steps: frozenset[int] = field(default_factory=frozenset)


class SharedForward:
    """Forward passes of many subnets without repetitions, with `memory` bytes of outputs between them."""

    def __init__(self, memory: float = float("inf")) -> None:
        self.memory = memory
        self.layers = 0
        self.peak = 0
        self._subnets: dict[Hashable, _Subnet] = {}
        self._steps: list[_Step] = [_Step((), (), {}, lambda: None)]
        self._numbers: dict[Any, int] = {}
        self._alive: dict[int, Any] = {}
        self._order: list[Hashable] = []
        self._uses: dict[int, list[int]] = {}

    # -- building --------------------------------------------------------------------------------

    def add(self, key: Hashable, view: nn.Module, norms: Sequence[CalibrationNorm]) -> None:
        """Add a subnet, given a view that nobody else uses, and its BatchNorms; or raise `NotShareable`."""
        collectors = {id(norm.module): norm for norm in norms}
        try:
            graph, leaves = trace_(view, lambda m: id(m) in collectors or not m._modules or is_layer(m))
        except Exception as error:
            raise_if_explained(error)
            raise NotShareable(f"its forward cannot be traced: {error}") from error
        nodes = list(graph.nodes)
        calls = {node: id(leaves[str(node.target)]) for node in nodes if node.op == "call_module"}
        found = {node: collectors[module] for node, module in calls.items() if module in collectors}
        if len({id(norm) for norm in found.values()}) < len(found):
            raise NotShareable("it calls a BatchNorm more than once")
        nodes = nodes[: max((i + 1 for i, node in enumerate(nodes) if node in found), default=0)]
        unclear = hidden_writes(nodes, leaves)
        if unclear is not None:
            raise NotShareable(f"{unclear} writes over a value that may be used again")
        values: dict[fx.Node, int] = {}
        for node in nodes:
            if node.op == "placeholder":
                values[node] = 0
            elif node.op.startswith("call_"):
                values[node] = self._number(node, leaves, found.get(node), values)
            else:
                raise NotShareable(f"its forward reads {node.target} itself")
        targets = {norm.norm.path: values[node] for node, norm in found.items()}
        shared = {path: self._steps[step].norms[0] for path, step in targets.items()}
        own = {norm.norm.path: norm for norm in norms}
        self._subnets[key] = _Subnet(list(targets.values()), own | shared)

    def add_whole(self, key: Hashable, view: nn.Module, norms: Sequence[CalibrationNorm]) -> None:
        """Add a subnet, or replace it, as a single step that shares nothing."""

        def call(x: Any) -> None:
            call_with(view, map_tensors(Tensor.clone, x))  # A forward may overwrite its input.

        layers = sum(not m._modules and not isinstance(m, SkippedLayer) for m in view.modules())
        self._steps.append(_Step((0,), (_Ref(0),), {}, call, norms=norms, whole=True, layers=layers))
        self._subnets[key] = _Subnet([len(self._steps) - 1], {norm.norm.path: norm for norm in norms})

    def norms(self, key: Hashable) -> Mapping[str, CalibrationNorm]:
        """Return the BatchNorms of a subnet that average, by name; subnets share some of them."""
        return self._subnets[key].norms

    def reset(self) -> None:
        """Forget all batches."""
        self.layers = self.peak = 0
        for step in self._averaging():
            step.averaged = 0
            for norm in step.norms:
                norm.reset()

    def state(self) -> list[Any]:
        """Return the averages so far, as values that JSON can hold."""
        return [[step.averaged, [norm.state() for norm in step.norms]] for step in self._averaging()]

    def restore(self, state: Sequence[Any], device: torch.device) -> None:
        """Go on from what `state` returned for the same subnets."""
        for step, (averaged, norms) in zip(self._averaging(), state, strict=True):
            step.averaged = int(averaged)
            for norm, known in zip(step.norms, norms, strict=True):
                norm.restore(known, device)

    def _averaging(self) -> list[_Step]:
        targets = (step for subnet in self._subnets.values() for step in subnet.targets)
        return [self._steps[step] for step in dict.fromkeys(targets)]

    def _number(
        self,
        node: fx.Node,
        leaves: Mapping[str, nn.Module],
        norm: CalibrationNorm | None,
        values: Mapping[fx.Node, int],
    ) -> int:
        """Return the number of the step that a node is, which is a new one if no earlier step computes it."""
        refer: Any = lambda v: _Ref(values[v]) if isinstance(v, fx.Node) else v  # noqa: E731
        args: Any = map_aggregate(node.args, refer)
        kwargs: Any = map_aggregate(node.kwargs, refer)
        operation = elementwise(node, leaves)
        module = leaves[str(node.target)] if node.op == "call_module" else None
        what: Any = node.op, node.target
        if operation is not None:
            what, kwargs = operation, {}
        elif module is not None:
            what = self._signature(module, norm)
        key = what, self._frozen(args), self._frozen(kwargs)
        if key not in self._numbers:
            self._numbers[key] = len(self._steps)
            inputs = tuple(values[n] for n in node.all_input_nodes)
            step = _Step(inputs, args, kwargs, _call(node, module), operation)
            step.norms, step.layers = () if norm is None else (norm,), int(module is not None)
            self._steps.append(step)
        return self._numbers[key]

    def _signature(self, module: nn.Module, norm: CalibrationNorm | None = None) -> Any:
        """Return a key of everything on which the output of a module depends, apart from its input."""
        own = tuple((n, self._frozen(v)) for n, v in module.__dict__.items() if n not in _NO_SETTINGS)
        hooks = tuple(self._frozen(tuple(module.__dict__[name].values())) for name in HOOKS)
        buffers = () if norm is not None else self._frozen(tuple(module._buffers.items()))
        children = tuple((n, None if m is None else self._signature(m)) for n, m in module._modules.items())
        parameters = self._frozen(tuple(module._parameters.items()))
        path = None if norm is None else norm.norm.path
        return type(module), path, parameters, buffers, own, hooks, children

    def _frozen(self, value: Any) -> Any:
        kind = type(value)
        if kind in _BY_VALUE:
            return kind, value
        if isinstance(value, (tuple, list)):
            return kind.__name__, tuple([self._frozen(v) for v in value])
        if isinstance(value, dict):
            return "dict", tuple([(k, self._frozen(v)) for k, v in value.items()])
        if kind is slice:
            return "slice", self._frozen((value.start, value.stop, value.step))
        self._alive[id(value)] = value  # An id is unique only as long as its object lives.
        return id(value)

    # -- running ---------------------------------------------------------------------------------

    def arrange(self, keys: Sequence[Hashable]) -> None:
        """Choose the subnets to run from now on, and their order."""
        chosen = {key: self._subnets[key] for key in keys}
        for subnet in chosen.values():
            subnet.steps = subnet.steps or frozenset(self._missing(subnet.targets, {0}))
        self._order = sorted(chosen, key=lambda key: sorted(chosen[key].steps))
        first: dict[int, int] = {}
        for position, key in enumerate(self._order):
            for step in chosen[key].steps:
                first.setdefault(step, position)
        uses = ((value, at) for step, at in first.items() for value in set(self._steps[step].inputs))
        self._uses = grouped(uses)  # They ascend, as in `first`.

    def _missing(self, targets: Sequence[int], known: Any) -> set[int]:
        """Return the steps that have to run for the targets if the outputs of some steps are known."""
        found: set[int] = set()
        stack = list(targets)
        while stack:
            step = stack.pop()
            if step not in found and step not in known:
                found.add(step)
                stack += self._steps[step].inputs
        return found

    def alone(self, key: Hashable) -> int:
        """Return the number of module calls of one subnet that runs by itself."""
        return sum(self._steps[step].layers for step in self._subnets[key].steps)

    def run(self, x: Any, batch: int, check: bool = False) -> Iterator[Any]:
        """Run a batch, after `batch` others, through the chosen subnets; yield each when it is done."""
        values: dict[int, Any] = {0: x}
        for position, key in enumerate(self._order):
            targets = [step for step in self._subnets[key].targets if self._steps[step].averaged <= batch]
            self._compute(targets, position, values, batch, check)
            for value in [v for v in values if v and self._next_use(v, position) is None]:
                del values[value]
            yield key

    def _compute(
        self, targets: Sequence[int], position: int, values: dict[int, Any], batch: int, check: bool
    ) -> None:
        missing = self._missing(targets, values)
        pending = Counter(value for number in missing for value in set(self._steps[number].inputs))
        for number in sorted(missing):
            step = self._steps[number]
            kept = number in pending or self._next_use(number, position) is not None
            versions = [_version(values[i]) for i in step.inputs] if check else []
            result = self._run(step, values, batch, kept)
            if check and versions != [_version(values[i]) for i in step.inputs if i in values]:
                raise NotShareable(f"{step.call} writes over its input")
            for value in set(step.inputs):
                pending[value] -= 1
                if value and not pending[value] and self._next_use(value, position) is None:
                    values.pop(value, None)
            if kept:
                values[number] = result
            self._make_room(values, pending, position)

    def _run(self, step: _Step, values: dict[int, Any], batch: int, kept: bool) -> Any:
        fetch: Any = lambda v: values[v.step] if isinstance(v, _Ref) else v  # noqa: E731
        args: Any = map_aggregate(step.args, fetch)
        kwargs: Any = map_aggregate(step.kwargs, fetch)
        self.layers += step.layers
        if step.norms:
            paused, step.averaged = step.averaged > batch, batch + 1
            for norm in step.norms:
                norm.paused = paused
        if step.norms and not step.whole and not kept:
            return step.norms[0].collect(args[0])
        if step.operation is not None:
            return step.operation(args, over=False)  # Others may read what an operation would write over.
        return step.call(*args, **kwargs)

    def _next_use(self, value: int, position: int) -> int | None:
        uses = self._uses.get(value, ())
        i = bisect_right(uses, position)
        return uses[i] if i < len(uses) else None

    def _make_room(self, values: dict[int, Any], pending: Mapping[int, int], position: int) -> None:
        """Drop outputs that only later subnets read, until they fit; those that are needed last go first."""
        idle = [value for value in values if value and not pending.get(value)]
        later = {value: use for value in idle if (use := self._next_use(value, position)) is not None}
        held = sum(_nbytes(values[value]) for value in later)
        while held > self.memory:
            value = max(later, key=later.__getitem__)
            held -= _nbytes(values.pop(value))
            del later[value]
        self.peak = max(self.peak, held)


def _call(node: fx.Node, module: nn.Module | None) -> Callable[..., Any]:
    if module is not None:
        return module
    if node.op == "call_method":
        name = str(node.target)
        return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)
    return node.target  # type: ignore[return-value]


def _version(value: Any) -> int:
    return tensor_version(value) if isinstance(value, Tensor) else 0


def _nbytes(value: Any) -> int:
    return sum(part.nbytes for part in tensors_of(value) if isinstance(part, Tensor))
