"""bind: puts the ordinary network of one subnet together, from a network with operators and a size row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from subnetact.operators.actuation import leave_, numbers_of_layers
from subnetact.operators.base import Operator
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.subnet_norm import SubnetNorm
from subnetact.operators.view_module import HOOKS, view_module
from subnetact.space import SizeRow

NormBinding: TypeAlias = Callable[[SubnetNorm], nn.Module]
Freezing: TypeAlias = Callable[[Tensor], Tensor] | None


def operators_in(network: nn.Module) -> list[Operator]:
    """Return all operators of a network."""
    return [module for module in network.modules() if isinstance(module, Operator)]


def packed_bytes(network: nn.Module, kind: str = "") -> int:
    """Return the bytes of the packed copies of a network, slices that are no views of the weights.

    There is one per operator and sizes, for all subnets with these sizes. Of the `kind` "lowered" are the
    copies at lower precisions; without it, all count.
    """
    return sum(copy.nbytes for operator in operators_in(network) for copy in operator.packed_copies(kind))


def bind(
    network: nn.Module, row: SizeRow, norm: NormBinding, trainable: bool = False, frozen: Freezing = None
) -> nn.Module:
    """Return the network of one subnet; `norm` makes its BatchNorms, `frozen` what no operator slices."""
    done: dict[int, nn.Module] = {}

    def visit(_: str, module: nn.Module) -> nn.Module:
        if id(module) not in done:
            done[id(module)] = bind_module(module, row, visit, norm, trainable, frozen)
        return done[id(module)]

    return visit("", network)


def private_buffers() -> Callable[[Tensor], Tensor]:
    """Return a `frozen` with which views have the parameters as they are, and together copies of buffers."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return copies.setdefault(id(tensor), (tensor, tensor.detach().clone()))[1]

    return own


def bind_module(
    module: nn.Module,
    row: SizeRow,
    child: Callable[[str, nn.Module], nn.Module],
    norm: NormBinding,
    trainable: bool = False,
    frozen: Freezing = None,
) -> nn.Module:
    """Return one module of a subnet; `child` binds its submodules by name, those that the subnet keeps."""
    names = module.kept(row) if isinstance(module, LayerSelect) else module._modules
    modules = {n: None if (inner := module._modules[n]) is None else child(n, inner) for n in names}
    if isinstance(module, LayerSelect):
        return module.select(modules)
    if isinstance(module, Operator):
        bound = norm(module) if isinstance(module, SubnetNorm) else module.bind(row, trainable)
        if modules:
            object.__setattr__(bound, "_modules", modules)
        if frozen is not None and bound._buffers and bound._buffers is module._buffers:
            object.__setattr__(bound, "_buffers", each_tensor(module._buffers, frozen))
    else:
        own: dict[str, Any] = module._parameters
        buffers: dict[str, Any] = module._buffers
        if frozen is not None:
            own, buffers = each_tensor(own, frozen), each_tensor(buffers, frozen)
        numbers = numbers_of_layers(vars(module), row)
        bound = view_module(module, parameters=own, buffers=buffers, modules=modules, **numbers)
    if trainable:
        object.__setattr__(bound, "training", module.training)
    if "_shell" in vars(module):  # It has no hooks; the operator and its template may.
        vars(bound).update({name: hooks for name in HOOKS if (hooks := vars(module)[name])})
    if vars(bound)["_forward_pre_hooks"]:  # Those of a network would run its active subnet.
        leave_(bound, view=True)
    return bound


def each_tensor(tensors: dict[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return what a function makes of parameters or buffers, by name; those that are None stay."""
    if not tensors:
        return tensors
    return {name: None if tensor is None else function(tensor) for name, tensor in tensors.items()}
