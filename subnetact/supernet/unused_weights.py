"""Unused weights: a private copy of a network, in which what a subnet does not use is NaN or zero."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from subnetact.operators import LayerSelect, SubnetNorm
from subnetact.operators.base import Operator
from subnetact.operators.outside_modes import outside_modes
from subnetact.space import SizeRow
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.bind import bind, operators_in, private_buffers
from subnetact.supernet.statistics import batch_norms

SAMPLED = 2**16
"""So many of the numbers of a weight say how far they are spread."""


def private_copy(
    network: nn.Module, weights: Callable[[Tensor], Tensor] = Tensor.clone, buffers: Any = Tensor.clone
) -> nn.Module:
    """Return a copy of a network that shares no tensor with it; functions make its weights and buffers."""
    memo: dict[int, Any] = {}
    for tensor in (*network.parameters(), *network.buffers()):
        copied = (weights if isinstance(tensor, nn.Parameter) else buffers)(tensor.detach())
        own = memo[id(tensor)] = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
        own.__dict__.update(tensor.__dict__)
    return _copy(network, memo)


def disturbed_copy(network: nn.Module) -> nn.Module:
    """Return a private copy whose vectors are not zero and whose matrices have at least the gain of one.

    Otherwise a scale that training begins at zero, such as that of the last BatchNorm of a residual block,
    would hide the block, and small weights would hide which rows of queries and keys are used.
    """
    copied = private_copy(network)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in copied.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                _disturb_(name, tensor, generator)
    return copied


def _disturb_(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.numel() <= max(tensor.shape, default=1):
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        tensor.add_(0.2 * noise - 0.1 if "running_mean" in name else 0.2 * noise + 0.1)
        return
    gain = (tensor.shape[0] / tensor.numel()) ** 0.5
    spread = float(tensor.flatten()[:: 1 + tensor.numel() // SAMPLED].float().std())
    if spread < 1e-3 * gain:
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        tensor.add_(gain * (2 * noise - 1))
    elif spread < gain:
        tensor.mul_(gain / spread)


def settle_norms_(network: nn.Module, row: SizeRow, x: Any) -> None:
    """Give the BatchNorms of a subnet the statistics of what they see, so that no signal fades on its way."""
    norms = batch_norms(network)
    if not norms:
        return

    def measure(norm: SubnetNorm, bound: nn.Module, args: Any, kwargs: Any) -> None:
        seen = (*args, *kwargs.values())[0].to(bound.get_buffer("running_mean"))
        var, mean = torch.var_mean(seen.transpose(0, 1).flatten(1), 1, correction=0)
        var = var.clamp(min=0.1 * float(var.mean()) + 1e-6)
        for name, statistic in zip(norm.statistics_names(row), (mean, var), strict=True):
            norm.scatter_(row, norm.get_buffer(name), statistic)
        bound.running_mean, bound.running_var = mean, var

    view = shared_view(network, row)
    for path, module in view.named_modules():
        if path in norms:
            module.register_forward_pre_hook(partial(measure, norms[path]), with_kwargs=True)
    with torch.no_grad(), torch.overrides.BaseTorchFunctionMode():
        call_with(view, map_tensors(Tensor.clone, x))
    for norm in norms.values():
        norm.forget()


def structure_copy(network: nn.Module) -> nn.Module:
    """Return a copy of the modules of a network, as `private_copy` does, that shares all tensors with it."""
    return _copy(network, {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())})


def _copy(network: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a network; what its modules hold beside modules, configurations and hooks say, is shared."""
    for module in network.modules():
        for held in tree_leaves([v for v in vars(module).values() if not isinstance(v, bool | int | str)]):
            if not isinstance(held, nn.Module | dict):  # A watched registry is a dictionary of its own class.
                memo.setdefault(id(held), held)
        for held in vars(module).values():
            if type(held) is OrderedDict and not held:  # Most registries of hooks are empty.
                memo[id(held)] = OrderedDict()
    return deepcopy(network, memo)


def fill_unused_(copy: nn.Module, network: nn.Module, row: SizeRow, value: float) -> None:
    """Fill what a subnet does not use with a value in a private copy, and take the rest from the network."""
    with outside_modes():
        for parameter in copy.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.fill_(value)
        for operator in operators_in(copy):
            for buffer in _sliced_buffers(operator).values():
                buffer.fill_(value)
        _restore(copy, network, row, set())
    for operator in operators_in(copy):
        operator.forget()


def _restore(copy: nn.Module, network: nn.Module, row: SizeRow, done: set[int]) -> None:
    if id(network) in done:
        return
    done.add(id(network))
    names = list(network._modules)
    if isinstance(network, LayerSelect):
        names = network.kept(row)
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
    tensors = copy.tensors(sizes)
    for name, parameter in operator._parameters.items():
        if parameter is not None and tensors.get(name) is None:  # The original has it.
            copy.get_parameter(name).copy_(parameter)
    slices = [t for t in tensors.values() if t is not None]
    if all(t.untyped_storage().data_ptr() in storages for t in slices):
        originals = [t for t in operator.tensors(sizes).values() if t is not None]
        for mine, original in zip(slices, originals, strict=True):
            mine.copy_(original)
    else:
        for name, used in _used(operator, sizes).items():
            parameter = copy.get_parameter(name)
            parameter.copy_(torch.where(used, operator.get_parameter(name), parameter))
    if isinstance(operator, SubnetNorm) and isinstance(copy, SubnetNorm):
        for name, part in zip(copy.statistics_names(row), operator.shared_statistics(row), strict=True):
            copy.scatter_(row, copy.get_buffer(name), part)
    elif _sliced_buffers(operator):
        own: Any = copy.sliced(sizes, _sliced_buffers(copy))
        for name, buffer in operator.sliced(sizes, _sliced_buffers(operator)).items():
            own[name].copy_(buffer)


def _sliced_buffers(operator: Operator) -> dict[str, Any]:
    """Return the buffers of numbers of which subnets have slices that share their storage."""
    numbers = {n: b for n, b in operator._buffers.items() if b is not None and b.is_floating_point()}
    if isinstance(operator, SubnetNorm):
        return numbers
    return {n: b for n, b in numbers.items() if not operator.segments and any(operator.axes(n))}


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
        gradients: Any = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {name: gradient != 0 for name, gradient in zip(leaves, gradients, strict=True)}


def shared_view(network: nn.Module, row: SizeRow) -> nn.Module:
    """Return a view of one subnet on the shared BatchNorm statistics and copies of other buffers."""
    with outside_modes():
        return bind(network, row, lambda norm: norm.bind(row), frozen=private_buffers())


def masked_reference(copy: nn.Module, network: nn.Module, row: SizeRow, largest: SizeRow) -> nn.Module:
    """Return the full network on a copy, in which everything that a subnet does not use is zero."""
    mixed = list(largest)
    for operator in operators_in(network):
        for part, position in operator.dims.items():
            if operator.resized_in_reference(part):
                mixed[position] = row[position]
    norms = batch_norms(network)

    def padded(norm: SubnetNorm) -> nn.Module:
        mean, var = norms[norm.path].shared_statistics(row)
        means, variances = mean.new_zeros(norm.full("channels")), var.new_ones(norm.full("channels"))
        for full, statistic in ((means, mean), (variances, var)):
            norm.scatter_(row, full, statistic)
        wide = tuple(mixed)
        return norm.bind_with(wide, norm.gather(wide, means), norm.gather(wide, variances))

    with outside_modes():
        return bind(copy, tuple(mixed), padded)
