"""Actuation: which subnet the operators of a network run when the network is called as an ordinary module.

An operator binds itself when it is called: it slices the module of the running subnet out of its parameters,
and calls that. The network's own modules run, with the hooks that others attach to them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase

from subnetact.errors import TrainingError
from subnetact.operators.shards import require_same_subnet
from subnetact.operators.tensor_version import tensor_version
from subnetact.space import SizeRow, SubnetSpace
from subnetact.spec import SubnetSpec

OF_LAYERS = "_numbers_of_layers"
"""The attribute of a network with its own whole numbers that are the largest of those of several layers: name
-> positions in the size row. In a subnet it has the largest of them."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
MOST_CHANGES = 1024
"""So many changes of the subnet of each thread are remembered for backward passes that come later."""


class Run(NamedTuple):
    """A subnet that runs: its specification, its size row, and whether it is the largest one."""

    spec: SubnetSpec
    row: SizeRow
    is_largest: bool = False


_running: ContextVar[tuple[tuple[Any, Run], ...]] = ContextVar("running", default=())


class Actuation:
    """Says which subnet the operators of a network run: the active one, or another in this thread or task.

    Gradient checkpointing calls modules again in the backward pass, which may run in another thread, or after
    another subnet has run. Every node of autograd's graph has a number that tells when it was made, and hence
    for which subnet.

    Attributes:
        largest: the largest subnet.
        active: the subnet that runs where no other one was asked for.
        norms: the statistics rows of the subnets.
        supernet: returns the supernet, or None if it is gone, or was not copied with the network.
        moving: the row of the largest subnet from which training has moved the shared statistics on since.
    """

    def __init__(self, largest: Run, norms: Any) -> None:
        self.largest = self.active = largest
        self.norms, self.moving = norms, None
        self.supernet: Callable[[], Any] = type(None)
        self._changes: dict[int, deque[tuple[int, Run]]] = {}
        self._calls: dict[int, list[Any]] = {}
        self._buffered: tuple[int | None, list[nn.Module]] = (None, [])

    def __getstate__(self) -> dict[str, Any]:
        inner: dict[str, Any] = {"_changes": {}, "_calls": {}, "_buffered": (None, [])}
        return {**vars(self), "supernet": type(None), **inner}

    def now(self) -> Run:
        """Return the subnet that runs in this thread or task, or did when a graph was made that is run back.

        Raises:
            TrainingError: a checkpoint is computed again of which the subnet is not known.
        """
        if torch._C._current_graph_task_id() >= 0:
            return self._recomputed()
        run = self.asked() or self.active
        changes = self._changes.get(get_ident())
        if changes is None or changes[-1][1] is not run:
            self._note(run)
        return run

    def run_of(self, space: SubnetSpace, spec: SubnetSpec) -> Run:
        """Return how a subnet of a space runs."""
        if not isinstance(spec, SubnetSpec):
            spec = space.check(spec)
        return Run(spec, space.resolve(spec), spec.base == self.largest.spec.base)

    def corrected(self, module: nn.Module, run: Run, path: str) -> nn.Module:
        """Return a module of a subnet that runs, with its correction in place, if it has one there."""
        row = self.norms.get(run.spec)
        return module if row is None else row.correct_(module, path)

    def asked(self) -> Run | None:
        """Return the subnet that was asked for in this thread or task, or None."""
        for actuation, run in _running.get():
            if actuation is self:
                return run
        return None

    def _note(self, run: Run) -> None:
        """Note that the graph that this thread makes from now on is of a subnet."""
        number = torch._C._autograd._get_sequence_nr()
        self._changes.setdefault(get_ident(), deque(maxlen=MOST_CHANGES)).append((number, run))

    def _recomputed(self) -> Run:
        """Return the subnet for which the node of the graph was made that is run back."""
        node: Any = torch._C._current_autograd_node()
        made = {}
        for thread, changes in list(self._changes.items()):
            place = bisect_right(changes, node._sequence_nr(), key=lambda change: change[0])
            if place or len(changes) < MOST_CHANGES:
                made[thread] = changes[max(place - 1, 0)][1]
        here = made.get(get_ident())
        runs = set(made.values()) if here is None else {here}
        if len(runs) != 1:
            raise TrainingError(
                "gradient checkpointing calls an elastic module again, and it is not known for which subnet: "
                f"{len(runs)} are possible; call backward in the thread of the forward, and soon after it"
            )
        return runs.pop()

    @contextmanager
    def running(self, run: Run, network: nn.Module) -> Iterator[None]:
        """Let the operators of a network run a subnet in this thread or task."""
        if (supernet := self.supernet()) is not None:
            supernet._generation.notice_adapters()
        require_same_subnet(network, supernet, run.row)
        token = _running.set(((self, run), *_running.get()))
        self._note(run)
        vars(network).update(numbers_of_layers(vars(network), run.row))
        try:
            yield
        finally:
            _running.reset(token)
            self._note(self.asked() or self.active)
            vars(network).update(numbers_of_layers(vars(network), (self.asked() or self.largest).row))

    def _buffers(self, network: nn.Module) -> list[tuple[nn.Module, str, Tensor, int, Tensor]]:
        """Return the buffers that no operator holds, with their modules, names, versions and values."""
        writes = getattr(getattr(network._modules, "count", None), "writes", None)  # what Replacements counts
        if writes is None or self._buffered[0] != writes:
            modules = [m for m in network.modules() if m._buffers and "actuation" not in vars(m)]
            self._buffered = writes, modules
        named = [(m, name, b) for m in self._buffered[1] for name, b in m._buffers.items() if b is not None]
        return [(module, name, b, tensor_version(b), b.clone()) for module, name, b in named]

    @_disable_dynamo
    def begin(self, network: nn.Module, _: Any) -> None:
        """Let a network run the active subnet, unless another one was asked for, and keep its buffers."""
        calls, run = self._calls.setdefault(get_ident(), []), self.asked()
        calls.append((nullcontext(), []))
        context: Any = nullcontext()
        if run is None:
            if network.training:
                _refuse_plain_trainer()
            run, context = self.active, self.running(self.active, network)
        context.__enter__()
        calls[-1] = context, [] if run.is_largest else self._buffers(network)

    @_disable_dynamo
    def end(self, *_: Any) -> None:
        """End what `begin` began, whether or not the call failed: only the largest subnet moves buffers."""
        if calls := self._calls.get(get_ident()):
            context, buffers = calls.pop()
            context.__exit__(None, None, None)
            for module, name, buffer, version, value in buffers:
                if tensor_version(buffer) != version or isinstance(module, _NormBase):
                    with torch.no_grad():
                        buffer.copy_(value)
                if module._buffers[name] is not buffer:
                    module._buffers[name] = buffer


def leave_(network: nn.Module, view: bool = False) -> None:
    """Let no `Actuation` watch the calls of a network any longer, or of a `view`, which has its hooks."""
    held = vars(network)
    hooks = [(number, hook) for name in _HOOKS for number, hook in held[name].items()]
    ours = [n for n, hook in hooks if isinstance(getattr(hook, "__self__", None), Actuation)]
    for name in _HOOKS if ours else ():
        left = OrderedDict(held[name]) if view else held[name]
        for number in ours:
            left.pop(number, None)
        object.__setattr__(network, name, left)


def numbers_of_layers(attributes: Mapping[str, Any], row: SizeRow) -> dict[str, Any]:
    """Return the `OF_LAYERS` among the attributes of a network, or of a module, in a subnet."""
    return {name: max(row[i] for i in at) for name, at in attributes.get(OF_LAYERS, {}).items()}


def plain_trainer_error(trainer: str) -> TrainingError:
    """Return the refusal of a Trainer that knows nothing of subnets."""
    return TrainingError(
        f"{trainer} would train the active subnet alone; for all subnets, make a class of "
        "subnetact.training.SandwichTraining and your Trainer, class Elastic(SandwichTraining, Trainer), and "
        "give it supernet.network; for one subnet, train in `with supernet.running(spec):`"
    )


def _refuse_plain_trainer() -> None:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "training_step":
        frame = frame.f_back
    trainer = type(None if frame is None else frame.f_locals.get("self"))
    if any(cls.__module__ == "transformers.trainer" for cls in trainer.__mro__):
        raise plain_trainer_error(trainer.__name__)


_CALL: Any = nn.Module._call_impl.__code__
_CALLS = (_CALL, *(inner for inner in _CALL.co_consts if hasattr(inner, "co_code")))


def in_forward(operator: nn.Module) -> bool:
    """Tell whether what reads an operator was called by the forward of a module, and by no hook.

    Methods of the operator itself read it as it is.
    """
    if torch.compiler.is_compiling():
        return True
    frame: Any = sys._getframe(2)
    callee = None
    while frame is not None:
        local = frame.f_locals
        if frame.f_code in _CALLS and "forward_call" in local:
            forward = local["forward_call"]
            return getattr(getattr(forward, "__func__", forward), "__code__", None) is callee
        if local.get("self") is operator:
            return False
        callee, frame = frame.f_code, frame.f_back
    return False
