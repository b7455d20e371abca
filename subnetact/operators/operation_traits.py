"""OperationTraits: everything the library knows of a function, in one table that all rooms read.

A function is known by its name, however a network calls it: as one of torch, `torch.nn.functional` or
`operator`, as a method, in place, and as the layer of its name. A new activation is one row.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class OperationTraits:
    """What the library knows of a function, or of several that it treats alike.

    Attributes:
        kind: what the function does.
        finite: whether finite arguments give finite results, unless they overflow.
        transparent: whether it may lie on the shortcut of a residual block.
        moves: whether it computes nothing, and fills or moves memory.
        new: what computes a function of every element into a new tensor; None for all other functions.
        over: what computes it over the first argument.
        merged: what oneDNN calls it in the pass of a convolution; empty if it has it not.
        scalars: its numbers there.
        after_sum: whether it can follow the addition of another tensor in that pass.
        swallows_nan: whether it turns NaN into a number there.
    """

    kind: str = "other"
    finite: bool = False
    transparent: bool = False
    moves: bool = False
    new: Any = None
    over: Any = None
    merged: str = ""
    scalars: Sequence[float] = ()
    after_sum: bool = False
    swallows_nan: bool = False

    def __call__(self, args: Sequence[Any]) -> Any:
        """Compute the result, over the first operand if shape, dtype and device fit."""
        first, *others = args
        fits = not others or isinstance(first, Tensor)
        fits = fits and all(isinstance(other, int | float) or _fits(other, first) for other in others)
        return (self.over if fits else self.new)(*args)


def _fits(tensor: Tensor, whole: Tensor) -> bool:
    """Tell whether a tensor can be broadcast to another one, over which the result may be written."""
    ends = zip(reversed(tensor.shape), reversed(whole.shape), strict=False)
    alike = tensor.dtype == whole.dtype and tensor.device == whole.device
    return alike and tensor.dim() <= whole.dim() and all(a in (1, b) for a, b in ends)


_HOMES = operator, builtins, torch, F
_LAYERS = {name.lower(): cls for name, cls in vars(nn).items() if name[:1].isupper()}


def spellings(*names: str) -> frozenset[Any]:
    """Return the functions of some names, in place or not, the names of methods, and classes of layers."""
    both = [*names, *(f"{name}_" for name in names)]
    functions = {getattr(home, name, None) for home in _HOMES for name in both}
    functions |= {_LAYERS.get(name.replace("_", "")) for name in names}
    return frozenset({f for f in functions if callable(f)}.union(n for n in both if hasattr(Tensor, n)))


def _activation(name: str, approximate: str = "", **facts: Any) -> OperationTraits:
    """Return the traits of an activation without other settings."""
    over = getattr(torch, f"{name}_", None) or getattr(torch.ops.aten, f"{name}_").default
    settings = {"approximate": approximate} if approximate else {}
    calls: dict[str, Any] = {"new": partial(getattr(F, name), **settings), "over": partial(over, **settings)}
    return OperationTraits("activation", finite=True, **calls, **facts)


_known = partial(OperationTraits, finite=True)

OPERATIONS: dict[str, OperationTraits] = {
    "add iadd": _known("addition", new=operator.add, over=operator.iadd),
    "mul imul": _known("product", new=operator.mul, over=operator.imul),
    "truediv div": OperationTraits("division"),
    "relu": _activation("relu", transparent=True, merged="relu", after_sum=True, swallows_nan=True),
    "relu6": _activation("relu6", transparent=True, merged="hardtanh", scalars=(0.0, 6.0), swallows_nan=True),
    "hardswish": _activation("hardswish", merged="hardswish"),
    "silu": _activation("silu", transparent=True),
    "gelu": _activation("gelu", "none", transparent=True),
    "hardsigmoid sigmoid tanh mish hardtanh leaky_relu prelu elu softmax": _known("activation"),
    "dropout dropout2d identity": _known("identity", transparent=True),
    "layer_norm rms_norm": _known("norm", transparent=True),
    "cat concat concatenate": _known("concatenation", moves=True),
    "view reshape flatten transpose permute": _known("reshape", moves=True),
    "clone detach": _known("copy", transparent=True, moves=True),
    "contiguous to float type_as": _known("copy", transparent=True),
    "pad zero_pad2d arange embedding ones zeros zeros_like": _known("filled", moves=True),
    "copy empty full": OperationTraits("filled", moves=True),
    "linear conv2d matmul batch_norm group_norm sub neg floordiv eq erf clamp mean sum chunk split unbind t "
    "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate upsample pixel_shuffle dim "
    "getitem getattr size view_as unflatten swapaxes unsqueeze squeeze expand expand_as _assert": _known(),
}
"""The one table: names of functions that the library treats alike -> their traits."""

BY_CALL = {call: traits for names, traits in OPERATIONS.items() for call in spellings(*names.split())}
BY_CALL |= dict.fromkeys([(F.gelu, "tanh"), (nn.GELU, "tanh")], _activation("gelu", "tanh", transparent=True))
"""The table by functions, names of methods, and classes of layers; by pairs with what is not the default."""


def operation_of(call: Any, approximate: str = "none") -> OperationTraits:
    """Return the traits of a function, of a method by its name, or of a class of layers.

    `approximate` is how its formula is approximated, as some activations are told.
    """
    return BY_CALL.get(call if approximate == "none" else (call, approximate), OperationTraits())


def calls_of(kind: str) -> frozenset[Any]:
    """Return the functions, the names of the methods, and the classes of layers of a kind."""
    return frozenset(call for call, traits in BY_CALL.items() if traits.kind == kind)
