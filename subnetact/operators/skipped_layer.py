"""SkippedLayer: the identity in the place of a layer that a subnet skips."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import template_of
from subnetact.operators.view_module import Extractable, mixed_class

RECORDING = "transformers.utils.output_capturing"
"""Home of the hooks with which models of transformers note hidden states; it finds layers by their class."""
_INNER = frozenset(nn.Module().__dict__)


class SkippedLayer(nn.Module):
    """Returns its first argument. It has the settings of a layer, which networks read, but no weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        settings = {name: value for name, value in layer.__dict__.items() if name not in _INNER}
        inner = {name: None if child is None else skipped(child) for name, child in layer._modules.items()}
        self.__dict__.update(settings, stands_for=type(layer), first_name=first_name(layer), inner=inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, given by position or by the name that the layer has for it."""
        if args or kwargs:
            return args[0] if args else kwargs.get(self.first_name, next(iter(kwargs.values())))
        raise TypeError(f"{self.stands_for.__name__}.forward() was called without an input")

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner", {})
        if name in inner:
            return inner[name]
        cls = self.__dict__.get("stands_for")
        value = inspect.getattr_static(cls, name, None) if cls is not None else None
        if isinstance(value, property) and value.fget is not None:
            return value.fget(self)
        if value is not None:
            return value.__get__(self, type(self)) if hasattr(value, "__get__") else value
        raise AttributeError(
            f"{getattr(cls, '__name__', 'the layer')} has no attribute {name!r} here: this subnet skips the "
            "layer, and the module in its place has its settings, but no weights"
        )

    def extra_repr(self) -> str:
        """Return the class of the layer that is skipped, for the printed network."""
        return str(self.stands_for.__name__)


class SkippedBlock(Extractable, SkippedLayer):
    """A SkippedLayer that is of the class of its layer, too, so that transformers notes its output."""

    __call__ = nn.Module.__call__
    train = nn.Module.train


class SkippedUnary(SkippedLayer):
    """A SkippedLayer for a layer that takes one tensor; `torch.jit.script` compiles this one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass one argument on by position, also if it was given by name."""
        return super().__call__(*args, *kwargs.values())

    def forward(self, x: Tensor) -> Tensor:
        """Return the argument."""
        return x


def first_name(layer: nn.Module) -> str:
    """Return the name that a layer has for its first argument; an empty string if it takes none."""
    return next((n for n in inspect.signature(type(layer).forward).parameters if n != "self"), "")


def is_transformer_block(module: nn.Module) -> bool:
    """Tell whether a module is a block of a model of transformers."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def skipped(layer: nn.Module) -> SkippedLayer:
    """Return what stands in the place of a layer that a subnet skips."""
    layer = template_of(layer)
    if is_transformer_block(layer):
        stand_in, cls = SkippedLayer(layer), type(layer)
        object.__setattr__(stand_in, "__class__", mixed_class(SkippedBlock, cls))  # type: ignore[arg-type]
        return stand_in
    taken = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    one = len(taken) == 1 and taken[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return (SkippedUnary if one else SkippedLayer)(layer)
