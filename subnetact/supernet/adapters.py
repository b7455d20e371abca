"""Adapters: the layers that PEFT puts around elastic ones follow the sizes of these.

A layer of PEFT holds the layer that it adapts as `base_layer`. Of LoRA, `lora_A` follows the inputs of that
layer and `lora_B` its outputs, so that every subnet has its slice of both: the product of the slices is the
slice of the product. Other adapters of an elastic layer are refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from subnetact.errors import InsertError
from subnetact.operators import WeightSlice
from subnetact.operators.base import Operator, template_of

_HOME = "peft.tuners.lora.layer"
_FOLLOWS = {"lora_A": "in_", "lora_B": "out", "lora_embedding_A": "", "lora_embedding_B": "out"}
"""What is in a layer of LoRA -> the part of the adapted layer that it follows; "" if it stays whole."""
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class _Table(Operator, nn.ParameterDict):
    """Slices the first axis of all matrices of a dictionary, those of several adapters of an embedding."""

    parts = ("out",)
    __getitem__ = Operator.__getattr__  # which sees who asks

    def __init__(self, template: nn.ParameterDict, *args: Any) -> None:
        super().__init__(template, *args)
        self._keys = template._keys

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the length of the first axis."""
        return next(len(matrix) for matrix in self.values())

    def axes(self, name: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the part that is sliced."""
        return self.parts


def is_adapter(module: Any) -> bool:
    """Tell whether a module is a layer of PEFT that holds the layer which it adapts."""
    held = isinstance(module, nn.Module) and isinstance(module._modules.get("base_layer"), nn.Module)
    return held and any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def adapted(module: Any) -> Any:
    """Return the layer that an adapter, or several around one another, are for; other modules as they are."""
    while is_adapter(module):
        module = module._modules["base_layer"]
    return module


def take_off_adapters_(model: nn.Module) -> None:
    """Put the layers themselves into the places of their adapters."""
    for registry in [module._modules for module in model.modules() if not is_adapter(module)]:
        registry.update({name: adapted(layer) for name, layer in registry.items()})


def require_no_adapters(network: nn.Module, act: str) -> None:
    """Refuse an `act`, while layers of a network have adapters."""
    for path in (path for path, module in network.named_modules() if is_adapter(module)):
        raise InsertError(
            f"{act}: {path} has adapters; do it before get_peft_model, or after merge_and_unload() (what "
            "get_peft_model returns saves the adapters alone, with its save_pretrained)"
        )


def switches(module: nn.Module) -> list[str]:
    """Return what tells which of the adapters of a layer count, and how much; nothing of other modules."""
    held = vars(module)
    return [str(held.get(name)) for name in _SWITCHES] if "_active_adapter" in held else []


def slices_of(layer: nn.Module, base: Any, path: str) -> dict[nn.Module, Operator]:
    """Return operators for what is in an adapter, which follow the sizes of the elastic layer that it is for.

    Raises:
        InsertError: no subnet has a slice of this adapter.
    """
    slices: dict[nn.Module, Operator] = {}
    if not any(isinstance(module, Operator) and module.dims for module in base.modules()):
        return slices
    held, template = vars(layer), template_of(base)
    if held.get("_disable_adapters") and held.get("merged_adapters"):  # A subnet would undo it in its slice.
        raise InsertError(f"{path}: its adapters are switched off, but merged; call unmerge_adapter() first")
    plain = type(layer).__module__ == _HOME and type(base) is WeightSlice and "parameter_name" not in held
    plain = plain and not held.get("lora_variant") and getattr(template, "groups", 1) == 1
    known = {id(p) for p in layer.get_submodule("base_layer").parameters()}
    for name, module in layer.named_modules():
        if isinstance(module, Operator) or all(id(p) in known for p in module.parameters(recurse=False)):
            continue
        part = _FOLLOWS.get(name.partition(".")[0])
        if part is None or not plain:
            raise InsertError(
                f"{path}: {type(template).__name__} is elastic, and no subnet has a slice of its adapter "
                f"{name} ({type(layer).__module__}.{type(layer).__name__}); use LoRA without a variant, on "
                "linear layers, embeddings or ungrouped convolutions, or put it on supernet.extract(spec)"
            )
        given = base.dims, base.segments
        followed = [{n: v for n, v in each.items() if n.split(".")[0] == part} for each in given]
        if followed[0]:
            kind: Any = _Table if isinstance(module, nn.ParameterDict) else WeightSlice
            operator = slices[module] = kind(module, f"{path}.{name}", *followed)
            operator.check()
            operator.actuation, operator.packs = base.actuation, base.packs
    return slices
