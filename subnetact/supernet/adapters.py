"""Adapters: the layers that PEFT puts around elastic ones follow the sizes of these.

A layer of PEFT holds the layer that it adapts as `base_layer`. Of LoRA, `lora_A` follows the inputs of that
layer and `lora_B` its outputs, so that every subnet has its slice of both: the product of the slices is the
slice of the product. Other adapters of an elastic layer are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from subnetact.errors import InsertError
from subnetact.operators import WeightSlice
from subnetact.operators.base import Operator, exchange_modules_, template_of

__all__ = ["adapted", "is_adapter", "slice_adapter_", "switches", "without_adapters"]

_LAYERS = "peft.tuners.lora.layer"
"""The home of the layers of LoRA."""
_FOLLOWS = {"lora_A": "in_", "lora_B": "out", "lora_embedding_A": "", "lora_embedding_B": "out"}
"""What is in a layer of LoRA -> the part of the adapted layer that it follows; "" if it stays whole."""
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class _Table(Operator, nn.ParameterDict):
    """Slices the first axis of all matrices of a dictionary, those of several adapters of an embedding."""

    parts = ("out",)

    def __init__(self, template: nn.ParameterDict, *args: Any) -> None:
        super().__init__(template, *args)
        self._keys = template._keys

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the length of the first axis."""
        return next(len(matrix) for matrix in self._parameters.values() if matrix is not None)

    def axes(self, name: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the part that is sliced."""
        return self.parts


def is_adapter(module: nn.Module) -> bool:
    """Tell whether a module is a layer of PEFT that holds the layer which it adapts."""
    held = isinstance(module._modules.get("base_layer"), nn.Module)
    return held and any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def adapted(module: Any) -> Any:
    """Return the layer that an adapter, or several around one another, are for; other modules as they are."""
    while is_adapter(module):
        module = module._modules["base_layer"]
    return module


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Let a model have the layers themselves in the places of their adapters meanwhile.

    What is given puts the adapters back, around what is then in the places of these layers; so does the end.
    """
    places = [
        (module, name, layer)
        for module in model.modules()
        for name, layer in module._modules.items()
        if layer is not None and is_adapter(layer) and not is_adapter(module)
    ]

    def put_back() -> None:
        for module, name, layer in places:
            holder: Any = layer
            while is_adapter(holder._modules["base_layer"]):
                holder = holder._modules["base_layer"]
            holder._modules["base_layer"] = adapted(module._modules[name])
            module._modules[name] = layer

    for module, name, layer in places:
        module._modules[name] = adapted(layer)
    try:
        yield put_back
    finally:
        put_back()


def switches(module: Any) -> list[str]:
    """Return what tells which of the adapters of a layer count, and how much; nothing of other modules."""
    attributes = getattr(module, "__dict__", {})  # of None, if the layer is gone
    return [str(attributes.get(n)) for n in _SWITCHES] if "_active_adapter" in attributes else []


def slice_adapter_(layer: nn.Module, path: str) -> None:
    """Let the adapters of a layer of LoRA follow the sizes of the elastic layer that it holds, in place.

    Raises:
        InsertError: the layer has other adapters, of which no subnet has a slice.
    """
    base = adapted(layer)
    if not any(isinstance(module, Operator) and module.dims for module in base.modules()):
        return
    if vars(layer).get("_disable_adapters") and vars(layer).get("merged_adapters"):
        raise InsertError(
            f"{path}: its adapters are merged and switched off, and a subnet would take them out of its slice "
            "of the weight alone; call unmerge_adapter() first"
        )
    inner: Any = layer._modules["base_layer"]
    known, slices = {id(p) for p in inner.parameters()}, dict[nn.Module, nn.Module]()
    for name, module in layer.named_modules():
        if isinstance(module, Operator) or all(id(p) in known for p in module.parameters(recurse=False)):
            continue
        part = _FOLLOWS.get(name.partition(".")[0])
        if part is None or not _is_plain(layer, base):
            raise _refused(layer, path, name)
        dims, segments = (
            {n: given for n, given in held.items() if n.partition(".")[0] == part}
            for held in (base.dims, base.segments)
        )
        if dims:
            kind: Any = _Table if isinstance(module, nn.ParameterDict) else WeightSlice
            operator = slices[module] = kind(module, f"{path}.{name}", dims, segments)
            operator.check()
            if operator.full(part) != base.full(part):
                raise _refused(layer, path, name)
            settings = ("actuation", "packs", "placed")
            vars(operator).update({n: v for n, v in vars(base).items() if n in settings})
    exchange_modules_(layer, slices)


def _is_plain(layer: nn.Module, base: nn.Module) -> bool:
    """Tell whether a layer adds the product of two matrices to what a linear layer or a convolution computes."""
    own, groups = vars(layer), getattr(template_of(base), "groups", 1)
    plain = type(layer).__module__ == _LAYERS and "parameter_name" not in own and not own.get("lora_variant")
    return plain and type(base) is WeightSlice and groups == 1


def _refused(layer: nn.Module, path: str, name: str) -> InsertError:
    return InsertError(
        f"{path}: its adapter {name or 'of vectors'} ({type(layer).__module__}.{type(layer).__qualname__}) is on "
        f"an elastic layer, and no subnet has a slice of it; use LoRA without a variant (LoraConfig) on linear "
        "layers, convolutions and embeddings, leave this layer out of target_modules, or put the adapter on "
        "supernet.extract(spec)"
    )
