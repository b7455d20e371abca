"""Statistics: which BatchNorm statistics subnets run on, rows of their own or the shared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import NotCalibrated, SpecError
from subnetact.operators import SubnetNorm
from subnetact.operators.outside_modes import outside_modes
from subnetact.operators.shards import require_whole
from subnetact.space import SizeRow
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import bind
from subnetact.supernet.norm_table import NormRow


def batch_norms(network: nn.Module) -> dict[str, SubnetNorm]:
    """Return the operators of all BatchNorms of a network, by name.

    Example:
        >>> for norm in batch_norms(supernet.network).values():
        ...     norm.float()
    """
    return {norm.path: norm for norm in network.modules() if isinstance(norm, SubnetNorm)}


def came_trained(norms: Iterable[SubnetNorm]) -> bool:
    """Tell whether the BatchNorms of a network came with statistics of its own."""
    owns: Any = [norm._buffers for norm in norms]
    pairs = ((own["running_mean"], own["running_var"]) for own in owns if "running_mean" in own)
    return any(m is not None and not m.is_meta and bool(m.any() or (v != 1).any()) for m, v in pairs)


def is_calibrated(supernet: Any, spec: SubnetSpec) -> bool:
    """Tell whether a subnet has a statistics row of its own, or the network has no BatchNorm."""
    return supernet.space.check(spec) in supernet._actuation.norms or not batch_norms(supernet._present())


def require_calibrated(supernet: Any, specs: Sequence[SubnetSpec]) -> None:
    """Refuse subnets of which one has no BatchNorm statistics of its own, with `NotCalibrated`."""
    bare = [spec for spec in specs if not is_calibrated(supernet, spec)]
    if bare:
        raise NotCalibrated(
            f"{len(bare)} of {len(specs)} subnets have no BatchNorm statistics of their own, {bare[0]} "
            "first; call subnetact.calibrate(supernet, specs, batches), or make the engine or file with "
            "allow_uncalibrated=True, to use the shared ones"
        )


def binding_of(
    spec: SubnetSpec, sizes: SizeRow, row: NormRow | None, fresh: bool = False
) -> tuple[Callable[[SubnetNorm], nn.Module], dict[str, tuple[Tensor, Tensor]]]:
    """Return what binds the BatchNorms of a subnet, and, as it does so, their statistics by name.

    They are those of a statistics row, or the shared ones if that is None.
    """
    pairs, bound = None if row is None else row.pairs(), dict[str, tuple[Tensor, Tensor]]()

    def bind_norm(norm: SubnetNorm) -> nn.Module:
        if pairs is not None and norm.path not in pairs:
            raise SpecError(f"the statistics of {spec} lack {norm.path}; calibrate it again")
        measured = norm.shared_statistics(sizes) if pairs is None else pairs[norm.path]
        bound[norm.path] = norm.readable(sizes, measured)
        return norm.bind_with(sizes, *bound[norm.path], fresh)

    return bind_norm, bound


def statistics_of(supernet: Any, spec: SubnetSpec, shared: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the BatchNorm statistics that a subnet runs on.

    Args:
        supernet: the supernet.
        spec: the subnet.
        shared: whether to return the shared ones, on which subnets without their own run, in any case.

    Returns:
        Name of a BatchNorm -> (mean, variance), of shape (channels,): the tensors in use, not copies.

    Raises:
        SpecError: its own statistics lack a BatchNorm or have another number of channels.
    """
    spec = supernet.space.check(spec)
    with supernet._generation.lock, outside_modes():
        require_whole(network := supernet._present())
        row, sizes = None if shared else supernet.norms.get(spec), supernet.space.resolve(spec)
        bind_norm, statistics = binding_of(spec, sizes, row)
        bind(network, sizes, bind_norm)
    return statistics


def adopt_statistics_(supernet: Any) -> None:
    """Give the largest subnet the BatchNorm statistics that the network came with as its statistics row.

    In a pretrained network, it is then the original network, bit for bit. A network without BatchNorms gets
    no row.
    """
    largest = supernet.space.largest()
    with outside_modes():
        if statistics := statistics_of(supernet, largest, shared=True):
            supernet._actuation.norms.update({largest: NormRow.of(statistics)})


def follow_training_(supernet: Any) -> None:
    """Let the row of the largest subnet follow the shared statistics, which training has moved on from it."""
    actuation = supernet._actuation
    with supernet._generation.lock:
        moving, actuation.moving = actuation.moving, None
        if moving in actuation.norms.rows.values():
            adopt_statistics_(supernet)


def statistics_of_largest(supernet: Any) -> dict[str, Tensor]:
    """Return, by name, the shared statistics that are others in the row of the largest subnet."""
    largest = supernet.space.largest()
    row, sizes = supernet.norms.get(largest), supernet.space.resolve(largest)
    pairs, others = {} if row is None else row.pairs(), dict[str, Tensor]()
    for path, norm in supernet._present().named_modules(remove_duplicate=False):
        if isinstance(norm, SubnetNorm) and norm.path in pairs:
            pair = norm.readable(sizes, pairs[norm.path])
            for name, statistic in zip(norm.statistics_names(sizes), pair, strict=True):
                shared = norm.get_buffer(name)
                norm.scatter_(sizes, tensor := shared.clone(), statistic)
                if tensor.is_meta or not torch.equal(tensor, shared):
                    others[f"{path}.{name}"] = tensor
    return others
