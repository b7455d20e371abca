"""Which modules of a supernet run at the precision of the subnet, and what that costs in accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from subnetact.errors import PrecisionError
from subnetact.operators import AttentionSlice, WeightSlice
from subnetact.operators.base import Operator
from subnetact.operators.lowered_weight import Low

__all__ = ["PrecisionSettings", "layer_errors", "put_precision_", "weight_errors"]

_WEIGHTED = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, nn.MultiheadAttention)
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of their submodules themselves."""


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

    Grouped convolutions and the first module with weights stay as they are, and so does the last one, unless
    the settings include it. Layers that no operator slices get an operator.

    Args:
        network: a network with operators.
        settings: which modules stay as they are.
        dims: the position in the size row of the bits of every slot.

    Returns:
        The names of the modules that follow the precision now.

    Raises:
        PrecisionError: there is no such module, or `keep` names none. The network is then unchanged.
    """
    named = dict(network.named_modules())
    unknown = [name for name in settings.keep if name not in named]
    if unknown:
        raise PrecisionError(f"keep: the network has no module {unknown[0]!r}; supernet.report lists them")
    kept = {name for name in named if any(name == k or name.startswith(f"{k}.") for k in settings.keep)}
    weighted = [n for n, m in named.items() if isinstance(_plain(m), _WEIGHTED) or _is_conv1d(_plain(m))]
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


def _is_conv1d(module: nn.Module) -> bool:
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _operator(module: nn.Module, path: str) -> Operator | None:
    """Return an operator for a module that keeps its full size in every subnet, if there can be one."""
    weight = module._parameters.get("weight")
    if weight is None or any(p is not None and n not in ("weight", "bias") for n, p in _own(module)):
        return None
    if path == "" or isinstance(module, nn.MultiheadAttention | nn.Embedding):
        return None
    return WeightSlice(module, path, {})


def _own(module: nn.Module) -> Iterable[tuple[str, Any]]:
    return (*module._parameters.items(), *module._buffers.items())


def _read_by_parent(named: Mapping[str, nn.Module], name: str) -> bool:
    parent = named[name.rpartition(".")[0]] if "." in name else named[""]
    if isinstance(parent, AttentionSlice):
        return False
    if isinstance(parent, nn.TransformerEncoderLayer):
        return not isinstance(parent.self_attn, AttentionSlice)
    return isinstance(_plain(parent), _READS_CHILDREN)


def weight_errors(network: nn.Module, bits: int) -> dict[str, float]:
    """Return how far the weights of a lower precision are off, per module.

    Args:
        network: a network whose modules follow precisions.
        bits: 8 for int8, 16 for bfloat16.

    Returns:
        Name of the module -> the largest relative error of an output channel: the norm of the difference of
        its weights by the norm of its weights.

    Raises:
        PrecisionError: a weight is not finite.
    """
    found = {}
    for module in network.modules():
        if not isinstance(module, Operator) or module.precision_dim is None:
            continue
        weight = module._parameters[module.lowers[0]]
        if weight is None:
            continue
        axis = module.out_axis()
        full = weight.detach().transpose(0, axis).flatten(1).float()
        rows = module.made_low(bits).channels(axis)
        off = (rows - full).norm(dim=1) / full.norm(dim=1).clamp_min(1e-30)
        found[module.path] = float(off.max())
    return found


def layer_errors(view: nn.Module, low: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, float]:
    """Return how far each layer of a lower precision is off on the inputs that it has at float32.

    Args:
        view: a private view of a subnet at float32.
        low: a private view of the same subnet at the lower precision.
        run: runs a network on the data.

    Returns:
        Name of the module -> the norm of the difference of its outputs by the norm of its outputs. The errors
        of layers before it are not included.
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
