"""Statistics: which BatchNorm statistics the subnets of a supernet run on, and whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from subnetact.errors import ForeignSpec, NotCalibrated, SpecError
from subnetact.operators import SubnetNorm
from subnetact.operators.actuation import Actuation
from subnetact.operators.outside_modes import outside_modes
from subnetact.operators.shards import require_whole
from subnetact.space import SizeRow
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import bind
from subnetact.supernet.norm_table import NormRow, NormTable

Pair: TypeAlias = tuple[Tensor, Tensor]
"""A mean and a variance, each of shape (channels,)."""


@dataclass
class Binding:
    """Gives the BatchNorms of one subnet the statistics that were `measured`, or the shared ones."""

    spec: SubnetSpec
    sizes: SizeRow
    measured: Mapping[str, Pair] | None
    fresh: bool = False
    pairs: dict[str, Pair] = field(default_factory=dict)  # those that it gave, by the names of the BatchNorms

    def __call__(self, norm: SubnetNorm) -> nn.Module:
        """Return the BatchNorm of the subnet."""
        measured = self.measured
        pair = norm.shared_statistics(self.sizes) if measured is None else measured.get(norm.path)
        if pair is None:
            raise SpecError(f"the statistics of {self.spec} lack {norm.path}; calibrate it again")
        mean, var = self.pairs[norm.path] = norm.readable(self.sizes, pair)
        return norm.bind_with(self.sizes, mean, var, self.fresh)


@dataclass(frozen=True)
class Statistics:
    """The BatchNorm statistics of the subnets of a supernet; `supernet.statistics(spec)` returns them.

    Attributes:
        supernet: the supernet.
        actuation: what its operators read the table of statistics rows from.
    """

    supernet: Any
    actuation: Actuation

    def __call__(self, spec: SubnetSpec) -> dict[str, Pair]:
        """Return the BatchNorm statistics that a subnet runs on: its own, or the shared ones.

        Args:
            spec: the subnet.

        Returns:
            The tensors in use, not copies: BatchNorm name -> (mean, variance), of shape (channels,).

        Raises:
            SpecError: its own statistics lack a BatchNorm or have another number of channels.
        """
        spec = self.supernet.space.check(spec)
        return self.read(spec, self.table.get(spec))

    @property
    def table(self) -> NormTable:
        """The statistics rows of calibrated subnets: `supernet.norms`."""
        actuation = self.actuation
        if actuation.moving is not None:
            with self.supernet.generation.lock:
                moving, actuation.moving = actuation.moving, None
                if moving in actuation.norms.rows.values():  # Training has moved it.
                    self.supernet.adopt_statistics()
        table: NormTable = actuation.norms
        return table

    def use(self, table: NormTable) -> None:
        """Let subnets run on a copy of a table, on the device of the weights."""
        self.require_own(table)
        norms = self.supernet.norm_operators().values()
        self.actuation.norms = table.to_like(next(iter(norms), None))

    def require_own(self, table: NormTable) -> None:
        """Refuse what is no table of the space, with `SpecError` or `ForeignSpec`."""
        given: Any = table
        space = self.supernet.space.id
        if not isinstance(given, NormTable):
            raise SpecError(f"norms: expected a NormTable, got {type(given).__name__}; NormTable.load(path)")
        if given.space != space:
            raise ForeignSpec(f"the norm table must be of space {space}, got {given.space}")

    def calibrated(self, spec: SubnetSpec) -> bool:
        """Tell whether a subnet, `spec`, has a statistics row of its own, or the network has no BatchNorm."""
        rows, norms = self.actuation.norms, self.supernet.norm_operators()
        return self.supernet.space.check(spec) in rows or not norms

    def require(self, specs: Sequence[SubnetSpec]) -> None:
        """Refuse `specs` of which one has no BatchNorm statistics of its own, with `NotCalibrated`."""
        bare = [spec for spec in specs if not self.calibrated(spec)]
        if bare:
            raise NotCalibrated(
                f"{len(bare)} of {len(specs)} subnets have no BatchNorm statistics of their own, {bare[0]} "
                "first; call subnetact.calibrate(supernet, specs, batches), or make the engine or file with "
                "allow_uncalibrated=True, to use the shared ones"
            )

    def of_largest(self) -> dict[str, Tensor]:
        """Return, by name, the shared statistics that are others in the row of the largest subnet."""
        largest = self.supernet.space.largest()
        row, sizes = self.table.get(largest), self.supernet.space.resolve(largest)
        pairs, others = {} if row is None else row.pairs(), dict[str, Tensor]()
        for path, norm in self.supernet._present().named_modules(remove_duplicate=False):
            if isinstance(norm, SubnetNorm) and norm.path in pairs:
                pair = norm.readable(sizes, pairs[norm.path])
                for name, statistic in zip(norm.statistics_names(sizes), pair, strict=True):
                    shared = norm.get_buffer(name)
                    norm.scatter_(sizes, tensor := shared.clone(), statistic)
                    if tensor.is_meta or not torch.equal(tensor, shared):
                        others[f"{path}.{name}"] = tensor
        return others

    @property
    def original(self) -> bool:
        """Whether the largest subnet is the trained network that `insert_` was given, unchanged since.

        `calibrate` then leaves it alone. Networks of families were trained as supernets.
        """
        generation = self.supernet.generation
        return self.supernet.origin is None and bool(generation.original == generation.moment())

    def renew_original(self) -> None:
        """Declare that a change of weights left the function of the largest subnet as it was."""
        self.supernet.generation.original = self.supernet.generation.moment()

    def read(self, spec: SubnetSpec, row: NormRow | None) -> dict[str, Pair]:
        """Return the statistics of a subnet that runs on a statistics row, or on the shared ones if None."""
        network, sizes = self.supernet._present(), self.supernet.space.resolve(spec)
        with self.supernet.generation.lock, outside_modes():
            require_whole(network)
            binding = Binding(spec, sizes, None if row is None else row.pairs())
            bind(network, sizes, binding)
        return binding.pairs


def came_trained(norms: Iterable[SubnetNorm]) -> bool:
    """Tell whether BatchNorms came with statistics that training has measured."""
    buffers: Any = [norm._buffers for norm in norms]
    pairs = [(own["running_mean"], own["running_var"]) for own in buffers if "running_mean" in own]
    return any(m is not None and not m.is_meta and bool(m.any() or (v != 1).any()) for m, v in pairs)
