"""ModuleOutput: what the modules of a network return while it runs, and which functions they call first."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Set
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from subnetact.comparison import tensors_in
from subnetact.errors import InsertError
from subnetact.operators import ElasticAttribute, LayerSelect
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.bind import operators_in

_LOOKS = ("__get__", "is_inference")
"""Functions that only look at a tensor, as packed copies do at what they follow."""
Calls = list[tuple[str, str]]
"""Names of modules, and of the functions that they call."""


@dataclass(frozen=True, eq=False)
class ModuleOutput:
    """What one call of a module returned."""

    path: str
    kind: str
    shapes: list[torch.Size]
    tensors: list[Tensor]


def outputs_of(model: nn.Module, x: Any) -> list[Tensor]:
    """Run a model and return all tensors of its output, copied."""
    with torch.no_grad(), torch.overrides.BaseTorchFunctionMode():  # With it, torch nests no tensors.
        output = call_with(model, map_tensors(Tensor.clone, x))
    return [tensor.clone() for tensor in tensors_in(output)]


@torch.no_grad()
def outputs_and_calls(network: nn.Module, view: nn.Module, x: Any) -> tuple[list[Tensor], Calls]:
    """Run a view that nobody else uses; return what it returns, and which functions its modules call first.

    Into the operators of the network, which stand for layers, nobody looks.
    """
    layers = {o.path for o in operators_in(network) if not isinstance(o, ElasticAttribute | LayerSelect)}
    calls = _Calls(view, layers)
    outputs = module_outputs(view, x, lambda _, t: t.clone(), inside=False, mode=calls)
    return outputs[-1].tensors, list(calls.names)


def module_outputs(
    network: nn.Module,
    x: Any,
    keep: Callable[[str, Tensor], Tensor],
    inside: bool = True,
    mode: TorchFunctionMode | None = None,
) -> list[ModuleOutput]:
    """Run a network; return what `keep` leaves of what it and the modules inside returned, as they ended."""
    outputs: list[ModuleOutput] = []

    def note(path: str, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):
            output = output[0]  # the weights, averaged over heads, are those of other heads
        tensors = list[Tensor]()
        with suppress(InsertError) if path else nullcontext():
            tensors = tensors_in(output)
        kept = [keep(path, tensor) for tensor in tensors]
        outputs.append(ModuleOutput(path, type(module).__name__, [t.shape for t in tensors], kept))

    with ExitStack() as stack:
        for path, module in network.named_modules() if inside else [("", network)]:
            stack.enter_context(module.register_forward_hook(partial(note, path)))
        # With a mode, torch nests no tensors.
        stack.enter_context(mode or torch.overrides.BaseTorchFunctionMode())
        call_with(network, map_tensors(Tensor.clone, x))
    return outputs


class _Calls(TorchFunctionMode):
    """Notes which functions each module calls first, in order; modules of a list are taken together."""

    def __init__(self, network: nn.Module, layers: Set[str]) -> None:
        """Let all modules of a view say when they begin and end; what layers call is their own."""
        super().__init__()
        self.names: dict[tuple[str, str], None] = {}
        self._inside: list[str] = []
        self._hidden = 1
        for path, module in network.named_modules():
            place = re.sub(r"\d+", "#", path), path in layers
            before = OrderedDict({**module._forward_pre_hooks, -1: partial(self._enter, *place)})
            after = OrderedDict({**module._forward_hooks, -1: partial(self._leave, *place)})
            # Registering costs much more: it gives a module of a view dictionaries of its own.
            module.__dict__.update(_forward_pre_hooks=before, _forward_hooks=after)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and note its name, unless a layer calls it or it only reads an attribute."""
        if not self._hidden and (name := getattr(func, "__name__", "")) not in _LOOKS:
            self.names[self._inside[-1], name] = None
        return func(*args, **(kwargs or {}))

    def _enter(self, path: str, hidden: bool, *_: Any) -> None:
        self._inside.append(path)
        self._hidden += hidden - (not path)

    def _leave(self, path: str, hidden: bool, *_: Any) -> None:
        self._inside.pop()
        self._hidden -= hidden - (not path)
