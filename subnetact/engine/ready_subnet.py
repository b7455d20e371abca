"""ReadySubnet: the callable of one registered subnet, and the view that it currently runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from subnetact.engine.fast_conv import use_fast_convs_
from subnetact.operators.tensor_version import tensor_version
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with
from subnetact.supernet.forward_state import watched_buffers
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import shared_view


@dataclass(frozen=True, eq=False)
class Bound:
    """The view of a subnet, and the weights and statistics that it was made from."""

    supernet: Supernet
    spec: SubnetSpec
    view: nn.Module
    statistics_row: NormRow | None  # None: the supernet's shared statistics
    number: int  # of the supernet's generation

    @classmethod
    def of(cls, supernet: Supernet, spec: SubnetSpec) -> Bound:
        """Bind a subnet to the current weights and statistics, with fast convolutions."""
        number = supernet.generation.number
        view, statistics_row = supernet.private_view(spec)
        return cls(supernet, spec, use_fast_convs_(view), statistics_row, number)

    @property
    def current(self) -> bool:
        """Whether the supernet would bind the subnet to the same tensors now."""
        same_statistics = self.statistics_row is self.supernet.norms.get(self.spec)
        return same_statistics and self.number == self.supernet.generation.number

    def moment(self) -> tuple[Any, ...]:
        """Return another value after any change of the weights, or of the statistics of this view."""
        generation, row = self.supernet.generation, self.statistics_row
        if row is None:
            return generation.number, generation.moment()
        return generation.number, generation.moment()[:3], tensor_version(row.flat)

    def changes_itself(self, x: Any) -> bool:
        """Run a batch and tell whether the network's own forward changes buffers, of which it gets copies."""
        # Other threads write into the view itself.
        view = shared_view(self.supernet.network, self.supernet.space.resolve(self.spec))
        written = watched_buffers(view)
        with torch.inference_mode(), suppress(Exception):
            call_with(view, x)
        self.supernet.note_state(names := written())
        return bool(names)


@dataclass(eq=False, repr=False, slots=True)
class ReadySubnet:
    """The callable of one registered subnet. It stays valid when weights change and the subnet is fused.

    Attributes:
        id: the subnet's number in its engine.
        spec: the subnet.
        bound: the current view, or None if there is none yet or the subnet was removed.
    """

    id: int
    spec: SubnetSpec
    _run: Callable[[ReadySubnet, Any], Any]
    bound: Bound | None = None

    def __repr__(self) -> str:
        return f"ReadySubnet({self.id}: {self.spec})"

    def __call__(self, x: Any) -> Any:
        """Run a batch through the subnet.

        Args:
            x: a tensor of shape (N, ...) on the engine's device, or a tuple or dictionary of such tensors.

        Returns:
            The network's output for the batch.

        Raises:
            NotCalibrated: the subnet's BatchNorm statistics were dropped with the weights they belonged to.
            SpecError: the subnet was removed from its engine.
        """
        return self._run(self, x)
