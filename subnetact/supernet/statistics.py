"""Statistics: which BatchNorm statistics the subnets of a supernet run on, and whose they are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
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
RowsBefore: TypeAlias = tuple[bool, list[int]]
"""Whether the largest subnet had adopted the shared statistics, and the checksums of the weights."""


class Binding:
    """Gives the BatchNorms of one subnet its statistics row, or the shared ones, and notes the `pairs`."""

    def __init__(
        self, spec: SubnetSpec, sizes: SizeRow, statistics: NormRow | None, fresh: bool = False
    ) -> None:
        self.pairs: dict[str, Pair] = {}
        self._spec, self._sizes, self._fresh = spec, sizes, fresh
        self._measured = None if statistics is None else statistics.pairs()

    def __call__(self, norm: SubnetNorm) -> nn.Module:
        """Return the BatchNorm of the subnet."""
        measured = self._measured
        pair = norm.shared_statistics(self._sizes) if measured is None else measured.get(norm.path)
        if pair is None:
            raise SpecError(f"the statistics of {self._spec} lack {norm.path}; calibrate it again")
        mean, var = self.pairs[norm.path] = norm.readable(self._sizes, pair)
        return norm.bind_with(self._sizes, mean, var, self._fresh)


class Statistics:
    """The BatchNorm statistics of the subnets of a supernet; `supernet.statistics(spec)` returns them.

    Args:
        supernet: the supernet.
        actuation: what its operators read the table of statistics rows from.
        original: whether those that its network has are those that it was trained with.

    Attributes:
        before_load: what tells, after a module around the supernet was loaded, which rows still fit.
    """

    before_load: RowsBefore

    def __init__(self, supernet: Any, actuation: Actuation, original: bool) -> None:
        self._supernet = weakref.ref(supernet)  # A cycle would delay the end of the weights.
        self._actuation = actuation
        self._since = supernet.generation.moment() if original else None

    def __call__(self, spec: SubnetSpec) -> dict[str, Pair]:
        """Return the BatchNorm statistics that a subnet runs on: its own, or the shared ones.

        Args:
            spec: the subnet.

        Returns:
            The tensors in use, not copies: BatchNorm name -> (mean, variance), of shape (channels,).

        Raises:
            SpecError: its own statistics lack a BatchNorm or have another number of channels.
        """
        spec = self._present().space.check(spec)
        return self._read(spec, self.table.get(spec))

    @property
    def table(self) -> NormTable:
        """The statistics rows of calibrated subnets: `supernet.norms`."""
        actuation = self._actuation
        if actuation.moving is not None:
            with self._present().generation.lock:
                moving, actuation.moving = actuation.moving, None
                if moving in actuation.norms.rows.values():  # Training has moved it.
                    self.adopt()
        table: NormTable = actuation.norms
        return table

    @table.setter
    def table(self, table: NormTable) -> None:
        self.require_own(table)
        norms = self._present().norm_operators().values()
        self._actuation.norms = table.to_like(next(iter(norms), None))  # on the device of the weights

    def require_own(self, table: NormTable) -> None:
        """Refuse what is no table of the space, with `SpecError` or `ForeignSpec`."""
        given: Any = table
        space = self._present().space.id
        if not isinstance(given, NormTable):
            raise SpecError(f"norms: expected a NormTable, got {type(given).__name__}; NormTable.load(path)")
        if given.space != space:
            raise ForeignSpec(f"the norm table must be of space {space}, got {given.space}")

    def calibrated(self, spec: SubnetSpec) -> bool:
        """Tell whether a subnet, `spec`, has a statistics row of its own, or the network has no BatchNorm."""
        supernet = self._present()
        return supernet.space.check(spec) in self._actuation.norms or not supernet.norm_operators()

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
        space, network = self._present().space, self._present().network
        largest = space.largest()
        row, sizes = self.table.get(largest), space.resolve(largest)
        pairs, others = {} if row is None else row.pairs(), dict[str, Tensor]()
        for path, norm in network.named_modules(remove_duplicate=False):
            if isinstance(norm, SubnetNorm) and norm.path in pairs:
                pair = norm.readable(sizes, pairs[norm.path])
                for name, statistic in zip(norm.statistics_names(sizes), pair, strict=True):
                    shared = norm.get_buffer(name)
                    norm.scatter_(sizes, tensor := shared.clone(), statistic)
                    if tensor.is_meta or not torch.equal(tensor, shared):
                        others[f"{path}.{name}"] = tensor
        return others

    def adopt(self) -> None:
        """Give the largest subnet the BatchNorm statistics that the network came with as its statistics row.

        In a pretrained network, it is then the original network, bit for bit.
        """
        largest = self._present().space.largest()
        with outside_modes():
            self._actuation.norms.update({largest: NormRow.of(self._read(largest, None))})

    @property
    def original(self) -> bool:
        """Whether the largest subnet is the trained network that `insert_` was given, unchanged since.

        `calibrate` then leaves it alone. Networks of families were trained as supernets.
        """
        supernet = self._present()
        return supernet.origin is None and self._since == supernet.generation.moment()

    def renew_original(self) -> None:
        """Declare that a change of weights left the function of the largest subnet as it was."""
        self._since = self._present().generation.moment()

    def _present(self) -> Any:
        return self._supernet()

    def _read(self, spec: SubnetSpec, row: NormRow | None) -> dict[str, Pair]:
        supernet = self._present()
        sizes = supernet.space.resolve(spec)
        with supernet.generation.lock, outside_modes():
            require_whole(supernet.network)
            bind(supernet.network, sizes, binding := Binding(spec, sizes, row))
        return binding.pairs


def came_trained(norms: Sequence[SubnetNorm]) -> bool:
    """Tell whether BatchNorms came with statistics that training has measured."""
    buffers: Any = [norm._buffers for norm in norms]
    pairs = [(own["running_mean"], own["running_var"]) for own in buffers if "running_mean" in own]
    return any(m is not None and not m.is_meta and bool(m.any() or (v != 1).any()) for m, v in pairs)
