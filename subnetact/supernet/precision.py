"""Which modules of a supernet run at the precision of the subnet, and what that costs in accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from subnetact.errors import PrecisionError
from subnetact.operators import AttentionSlice
from subnetact.operators.base import Operator, exchange_modules_, slicer_of, template_of
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.lowered_weight import Low
from subnetact.supernet.batches import call_with


@dataclass(frozen=True)
class PrecisionSettings:
    """The arguments of `Supernet.enable_precision`, which bundles keep."""

    precisions: tuple[str, ...]
    keep: tuple[str, ...] = ()
    last: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the settings as dictionaries, lists and strings that JSON can hold."""
        return {"precisions": list(self.precisions), "keep": list(self.keep), "last": self.last}


def put_precision_(network: nn.Module, settings: PrecisionSettings, dim: int) -> None:
    """Let layers follow the precision at `dim` of the size row; a refused network is unchanged."""
    named = dict(network.named_modules())
    unknown = [name for name in settings.keep if name not in named]
    if unknown:
        raise PrecisionError(f"keep: the network has no module {unknown[0]!r}; supernet.report lists them")
    kept = {name for name in named if any(name == k or name.startswith(f"{k}.") for k in settings.keep)}
    weighted = [name for name, module in named.items() if traits_of(template_of(module)).mixes]
    # The first module with weights stays at float32, and so does the last one, unless it is included.
    kept.update(weighted[:1] if settings.last else weighted[:1] + weighted[-1:])
    chosen: dict[nn.Module, Operator] = {}
    for name in weighted:
        module = named[name]
        operator = module if isinstance(module, Operator) else _operator(module, name)
        lowers = operator is not None and operator.low_mixin() is not None
        if operator is not None and lowers and name not in kept and not _read_by_parent(named, name):
            operator.precision_dim = dim
            chosen[module] = operator
    if not chosen:
        raise PrecisionError(
            "the network has no linear layer and no convolution without groups, apart from the first and the "
            "last layer, that could run at a lower precision; its subnets are float32 only"
        )
    exchange_modules_(network, chosen)


def _operator(module: nn.Module, path: str) -> Operator | None:
    """Return an operator for a module that keeps its full size in every subnet, if there can be one."""
    traits, slicer = traits_of(module), slicer_of(module)
    given = {n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    if slicer is None or path == "" or traits.reads_children or not given <= set(traits.axes):
        return None
    return slicer(module, path, {})


def _read_by_parent(named: Mapping[str, nn.Module], name: str) -> bool:
    parent = named[name.rpartition(".")[0]]
    attention = parent.self_attn if isinstance(parent, nn.TransformerEncoderLayer) else parent
    # No fused kernel reads the weights of an AttentionSlice.
    return not isinstance(attention, AttentionSlice) and traits_of(template_of(parent)).reads_children


def layer_errors(view: nn.Module, low: nn.Module, x: Any) -> dict[str, float]:
    """Return how far each layer of `low` is off on its inputs in `view`, the private one at float32."""
    found: dict[str, float] = {}

    def note(path: str, module: Any, _: Any, args: Sequence[Any], output: Any) -> None:
        pair = [o[0] if isinstance(o, tuple) else o for o in (output, module(*args))]
        off = (pair[1] - pair[0]).norm() / pair[0].norm().clamp_min(1e-30)
        found[path] = max(found.get(path, 0.0), float(off))

    for path, module in low.named_modules():
        if isinstance(module, Low):
            view.get_submodule(path).register_forward_hook(partial(note, path, module))
    with torch.inference_mode():
        call_with(view, x)
    return found
