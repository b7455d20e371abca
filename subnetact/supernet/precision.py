"""Which modules of a supernet run at the precision of the subnet, and what that costs in accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from subnetact.errors import PrecisionError
from subnetact.operators import AttentionSlice
from subnetact.operators.base import Operator, slicer_of
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.lowered_weight import Low, LoweredWeight

__all__ = ["PrecisionSettings", "layer_errors", "put_precision_", "weight_errors"]


@dataclass(frozen=True)
class PrecisionSettings:
    """The arguments of `Supernet.enable_precision`, which bundles keep.

    Attributes:
        precisions: the precisions beside float32.
        keep: the names of modules that stay at float32.
        slots: the names of the parts of the network, each with the beginning of its modules' names.
        last: whether the last module with weights follows the precision, too.
    """

    precisions: tuple[str, ...]
    keep: tuple[str, ...] = ()
    slots: tuple[tuple[str, str], ...] = (("network", ""),)
    last: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the settings as dictionaries, lists and strings that JSON can hold."""
        return {
            "precisions": list(self.precisions),
            "keep": list(self.keep),
            "slots": dict(self.slots),
            "last": self.last,
        }


def put_precision_(network: nn.Module, settings: PrecisionSettings, dims: Mapping[str, int]) -> list[str]:
    """Let linear layers and convolutions of a network follow the precision of the subnet, in place.

    Layers without a forward for lowered weights and the first module with weights stay as they are, and so
    does the last one, unless the settings include it. Layers that no operator slices get an operator.
    `dims` has the position in the size row of the bits of every slot. Return the names of the modules that
    follow the precision now; raise `PrecisionError`, with the network unchanged, if there are none.
    """
    named = dict(network.named_modules())
    unknown = [name for name in settings.keep if name not in named]
    if unknown:
        raise PrecisionError(f"keep: the network has no module {unknown[0]!r}; supernet.report lists them")
    kept = {name for name in named if any(name == k or name.startswith(f"{k}.") for k in settings.keep)}
    weighted = [name for name, module in named.items() if traits_of(_plain(module)).mixes]
    kept.update(weighted[:1] if settings.last else weighted[:1] + weighted[-1:])
    chosen: dict[str, Operator] = {}
    for name in weighted:
        module = named[name]
        operator = module if isinstance(module, Operator) else _operator(module, name)
        slot = next((slot for slot, start in settings.slots if name.startswith(start)), None)
        if operator is None or operator.low_mixin() is None or name in kept or slot is None:
            continue
        if not _read_by_parent(named, name):
            operator.precision_dim = dims[slot]
            chosen[name] = operator
    if not chosen:
        raise PrecisionError(
            "the network has no linear layer and no convolution without groups, apart from the first and the "
            "last layer, that could run at a lower precision; its subnets are float32 only"
        )
    replaced = {named[name]: operator for name, operator in chosen.items() if named[name] is not operator}
    for module in list(network.modules()):
        for child_name, child in list(module._modules.items()):
            if child in replaced:
                module._modules[child_name] = replaced[child]
    return list(chosen)


def _plain(module: nn.Module) -> nn.Module:
    return module.template if isinstance(module, Operator) else module


def _operator(module: nn.Module, path: str) -> Operator | None:
    """Return an operator for a module that keeps its full size in every subnet, if there can be one."""
    traits, slicer = traits_of(module), slicer_of(module)
    given = {n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    if slicer is None or path == "" or traits.kind == "attention" or not given <= set(traits.axes):
        return None
    return slicer(module, path, {})


def _read_by_parent(named: Mapping[str, nn.Module], name: str) -> bool:
    parent = named[name.rpartition(".")[0]] if "." in name else named[""]
    if isinstance(parent, AttentionSlice):
        return False
    if isinstance(parent, nn.TransformerEncoderLayer):
        return not isinstance(parent.self_attn, AttentionSlice)
    return traits_of(_plain(parent)).reads_children


def weight_errors(network: nn.Module, bits: int) -> dict[str, float]:
    """Return how far the weights are off at 8 or 16 bits: name -> the largest relative error of a channel."""
    found: dict[str, float] = {}
    for module in network.modules():
        if not isinstance(module, Operator) or module.precision_dim is None:
            continue
        weight: Any = module._parameters[module.lowers[0]]
        full, rows = (w.channels(module.out_axis()) for w in (LoweredWeight(weight), module.made_low(bits)))
        off = (rows - full).norm(dim=1) / full.norm(dim=1).clamp_min(1e-30)
        found[module.path] = float(off.max())
    return found


def layer_errors(view: nn.Module, low: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, float]:
    """Return how far each layer is off on the inputs that it has at float32: name -> relative error.

    `view` and `low` are private views of one subnet at float32 and at the lower precision; `run` runs a
    network on the data. The errors of layers before a layer are not included.
    """
    found: dict[str, float] = {}
    handles = []
    for path, module in low.named_modules():
        if not isinstance(module, Low):
            continue

        def note(_: Any, args: Sequence[Any], output: Any, module: Any = module, path: str = path) -> None:
            other = module(*args)
            pair = [o[0] if isinstance(o, tuple) else o for o in (output, other)]
            off = (pair[1] - pair[0]).norm() / pair[0].norm().clamp_min(1e-30)
            found[path] = max(found.get(path, 0.0), float(off))

        handles.append(view.get_submodule(path).register_forward_hook(note))
    try:
        with torch.inference_mode():
            run(view)
    finally:
        for handle in handles:
            handle.remove()
    return found
