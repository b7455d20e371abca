"""Unused weights: a private copy of a network in which everything that a subnet does not use is NaN or zero.

Two proofs need such copies. A subnet must not change if all weights that it does not use become NaN. And a
subnet equals its masked reference, which is the original network with these weights at zero and with skipped
layers as identities. The second proof also finds slices of the wrong rows, which the first one cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.operators import LayerSelect, SubnetNorm
from subnetact.operators.base import Operator
from subnetact.space import SizeRow
from subnetact.supernet.bind import bind

__all__ = [
    "fill_unused_",
    "loud_operators",
    "masked_reference",
    "private_copy",
    "shared_view",
    "structure_copy",
]


def private_copy(network: nn.Module) -> nn.Module:
    """Return a copy of a network with operators that shares no parameter and no buffer with the network.

    What occurs several times in the network does so in the copy. Configuration objects are not copied.
    """
    tensors: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:
            copied = tensor.detach().clone()
            tensors[id(tensor)] = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
            tensors[id(tensor)].__dict__.update(tensor.__dict__)
        return tensors[id(tensor)]

    return _copy(network, own)


def structure_copy(network: nn.Module) -> nn.Module:
    """Return a copy of the modules of a network, as `private_copy` does, that shares all tensors with it."""
    return _copy(network, lambda tensor: tensor)


def _copy(network: nn.Module, own: Callable[[Tensor], Tensor]) -> nn.Module:
    modules: dict[int, nn.Module] = {}
    inside = {id(part) for part in (*network.modules(), *network.parameters(), *network.buffers())}

    def owned(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
        return {name: None if t is None else own(t) for name, t in tensors.items()}

    def attribute(value: Any) -> Any:
        if isinstance(value, nn.Module | Tensor):
            inner: Any = visit if isinstance(value, nn.Module) else own
            return inner(value) if id(value) in inside else value
        if type(value) in (list, tuple):
            return type(value)(map(attribute, value))
        return {name: attribute(v) for name, v in value.items()} if type(value) is dict else value

    def visit(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        copied: nn.Module = object.__new__(type(module))
        modules[id(module)] = copied
        state = module.__getstate__() if isinstance(module, Operator) else module.__dict__
        parts = {
            "_parameters": owned(module._parameters),
            "_buffers": owned(module._buffers),
            "_modules": {name: None if m is None else visit(m) for name, m in module._modules.items()},
        }
        copied.__dict__.update(
            {name: attribute(v) for name, v in state.items() if name not in parts}, **parts
        )
        if isinstance(module, Operator):
            original = module.template.__dict__
            template: nn.Module = object.__new__(type(module.template))
            template.__dict__.update({n: attribute(v) for n, v in original.items() if n not in parts})
            shared = original["_parameters"] is module._parameters
            template.__dict__.update(parts if shared else {name: original[name] for name in parts})
            copied.__dict__["template"] = template
        return copied

    return visit(network)


def fill_unused_(copy: nn.Module, network: nn.Module, row: SizeRow, value: float) -> None:
    """Fill what a subnet does not use with a value, in a private copy of the network.

    What it does use is taken from the network, so that one copy serves many subnets in turn.
    """
    with torch.inference_mode(False), torch.no_grad():
        for parameter in copy.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.fill_(value)
        for norm in copy.modules():
            if isinstance(norm, SubnetNorm):
                for buffer in norm._buffers.values():
                    if buffer is not None and buffer.is_floating_point():
                        buffer.fill_(value)
        _restore(copy, network, row, set())
    for module in copy.modules():
        if isinstance(module, Operator):
            module.forget()


def _restore(copy: nn.Module, network: nn.Module, row: SizeRow, done: set[int]) -> None:
    if id(network) in done:
        return
    done.add(id(network))
    names = network.kept(row) if isinstance(network, LayerSelect) else list(network._modules)
    if isinstance(network, LayerSelect):
        pass
    elif isinstance(network, Operator) and isinstance(copy, Operator):
        _restore_slices(copy, network, row)
    else:
        for name, parameter in network._parameters.items():
            if parameter is not None:
                copy._parameters[name].copy_(parameter)  # type: ignore[union-attr]
    for name in names:
        child, original = copy._modules[name], network._modules[name]
        if child is not None and original is not None:
            _restore(child, original, row, done)


def _restore_slices(copy: Operator, operator: Operator, row: SizeRow) -> None:
    sizes = operator.sizes(row)
    storages = {p.untyped_storage().data_ptr() for p in copy._parameters.values() if p is not None}
    slices = [t for t in copy.tensors(sizes).values() if t is not None]
    if all(t.untyped_storage().data_ptr() in storages for t in slices):
        originals = [t for t in operator.tensors(sizes).values() if t is not None]
        for mine, original in zip(slices, originals, strict=True):
            mine.copy_(original)
    else:
        for name, used in _used(operator, sizes).items():
            parameter = copy.get_parameter(name)
            parameter.copy_(torch.where(used, operator.get_parameter(name), parameter))
    if isinstance(operator, SubnetNorm) and isinstance(copy, SubnetNorm):
        copy.write_statistics(row, *operator.shared_statistics(row))


def _used(operator: Operator, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return which elements an operator reads for a subnet, found with gradients, if it computes tensors."""
    reading: Any = object.__new__(type(operator))
    draw = torch.Generator().manual_seed(0)
    leaves = {  # Random values: a weight that is multiplied by a zero would look unused.
        name: nn.Parameter((torch.rand(p.shape, generator=draw) + 0.5).to(p), p.is_floating_point())
        for name, p in operator._parameters.items()
        if p is not None
    }
    reading.__dict__.update(operator.__dict__, _parameters={**operator._parameters, **leaves})
    with torch.enable_grad():
        total = sum(t.sum() for t in reading.tensors(sizes).values() if t is not None)
        found: Any = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf, dtype=torch.bool) if grad is None else grad != 0
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def shared_view(network: nn.Module, row: SizeRow) -> nn.Module:
    """Return a view of one subnet on the shared BatchNorm statistics, which nobody else holds."""
    with torch.inference_mode(False):
        return bind(network, row, lambda norm: norm.bind(row))


def masked_reference(copy: nn.Module, network: nn.Module, row: SizeRow, largest: SizeRow) -> nn.Module:
    """Return the full network in which everything that the subnet of a row does not use is zero.

    Layers that the subnet skips are identities, and BatchNorms have its statistics. The outputs equal those
    of the subnet if `loud_operators` returns nothing and the slices fit together. The reference holds the
    weights of the private copy, so it is valid until the copy is filled again.
    """
    fill_unused_(copy, network, row, 0.0)
    mixed = list(largest)
    for stack in network.modules():
        if isinstance(stack, LayerSelect):
            gates = (stack.gate(name) for name in stack._modules)
            for position in {gate[0] for gate in gates if gate is not None}:
                mixed[position] = row[position]
    norms = {m.path: m for m in network.modules() if isinstance(m, SubnetNorm)}

    def padded(norm: SubnetNorm) -> nn.Module:
        mean, var = norms[norm.path].shared_statistics(row)
        means, variances = mean.new_zeros(norm.full("channels")), var.new_ones(norm.full("channels"))
        for full, statistic in ((means, mean), (variances, var)):
            norm.scatter_(row, full, statistic)
        wide = tuple(mixed)
        return norm.bind_with(wide, norm.gather(wide, means), norm.gather(wide, variances))

    with torch.inference_mode(False), torch.no_grad():
        return bind(copy, tuple(mixed), padded)


def loud_operators(network: nn.Module, row: SizeRow, largest: SizeRow) -> list[Operator]:
    """Return the narrowed operators for which zeroing is not dropping: they normalise over it, for example.

    If there is none, the masked reference is exact unless a forward normalises without an operator.
    """
    changed = {i for i, (size, full) in enumerate(zip(row, largest, strict=True)) if size != full}
    return [
        module
        for module in network.modules()
        if isinstance(module, Operator)
        and any(
            index in changed and not module.zeroing_equals_dropping(part)
            for part, index in module.dims.items()
        )
    ]
