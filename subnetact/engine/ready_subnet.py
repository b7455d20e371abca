"""ReadySubnet: the callable of one subnet, the view that it currently runs, and all those of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import SpecError
from subnetact.operators.layer_traits import is_batch_norm
from subnetact.operators.tensor_version import changes_of, counting
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with
from subnetact.supernet.forward_state import note_state_, watched_buffers
from subnetact.supernet.generation import is_counter
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.statistics import batch_norms, require_calibrated
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import shared_view
from subnetact.supernet.views import private_view


@dataclass(frozen=True, eq=False)
class Bound:
    """The view of a subnet, and the weights and statistics that it was made from."""

    supernet: Supernet
    spec: SubnetSpec
    view: nn.Module
    statistics_row: NormRow | None  # None: the supernet's shared statistics
    number: int  # of the supernet's generation

    @classmethod
    def of(cls, supernet: Supernet, spec: SubnetSpec, allow_uncalibrated: bool = True) -> Bound:
        """Bind a subnet to the current weights and statistics, if need be its own ones only."""
        while True:  # Another thread may drop the row meanwhile.
            if not allow_uncalibrated:
                require_calibrated(supernet, [spec])
            number = supernet.generation.number
            view, row = private_view(supernet, spec)
            if allow_uncalibrated or row is not None or not batch_norms(supernet.network):
                return cls(supernet, spec, view, row, number)

    @property
    def current(self) -> bool:
        """Whether the supernet would bind the subnet to the same tensors now."""
        same_statistics = self.statistics_row is self.supernet.norms.get(self.spec)
        return same_statistics and self.number == self.supernet.generation.number

    @cached_property
    def _reads(self) -> list[Tensor]:
        """The tensors that the view reads and that count changes; of a packed copy, what it is made of."""
        row = self.statistics_row
        found: list[Any] = [*self.view.parameters(), *([] if row is None else [row.flat])]
        for module in self.view.modules():
            if row is None or not is_batch_norm(module):
                found += [b for b in module._buffers.values() if b is not None and not is_counter(b)]
        read = (source for t in found for source in (t.packed.sources if hasattr(t, "packed") else [t]))
        return counting(read)

    def moment(self) -> tuple[Any, ...]:
        """Return another value after any change of what this view reads."""
        generation = self.supernet.generation
        if self.statistics_row is None:  # Nothing counts the changes of shared statistics but their owner.
            return generation.number, generation.moment()
        return generation.number, changes_of(self._reads)

    def changes_itself(self, x: Any) -> bool:
        """Run a batch and tell whether the network's own forward changes buffers, of which it gets copies."""
        # Other threads write into the view itself.
        view = shared_view(self.supernet.network, self.supernet.space.resolve(self.spec))
        written = watched_buffers(view)
        with torch.inference_mode(), suppress(Exception):
            call_with(view, x)
        note_state_(self.supernet, names := written())
        return bool(names)


@dataclass(eq=False, repr=False, slots=True)
class ReadySubnet:
    """The callable of one registered subnet. It stays valid when weights change and the subnet is fused.

    Attributes:
        id: the subnet's number in its engine.
        spec: the subnet.
        accuracy: in percent, or None if it is not known.
        bound: the current view, or None if there is none yet or the subnet was removed.
    """

    id: int
    spec: SubnetSpec
    _engine: Callable[[Any, int], Any]
    accuracy: float | None = None
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
            InvalidRequest: the network fails on x, which differs from the example, as in `Engine.__call__`.
            NotCalibrated: the subnet's BatchNorm statistics were dropped with the weights they belonged to.
            SpecError: the subnet was removed from its engine.
        """
        return self._engine(x, self.id)


class ReadySubnets:
    """The subnets that an engine runs, each by its id: a position among all that were registered."""

    _subnets: tuple[ReadySubnet, ...]
    _served: Mapping[int, ReadySubnet]
    _bind: Callable[[SubnetSpec], Bound]
    _rebinding: AbstractContextManager[Any]  # a lock

    def __len__(self) -> int:
        """Return the number of subnets that were registered, removed ones included."""
        return len(self._subnets)

    @property
    def specs(self) -> tuple[SubnetSpec, ...]:
        """The registered subnets in id order, removed ones included."""
        return tuple(subnet.spec for subnet in self._subnets)

    @property
    def keys(self) -> tuple[str, ...]:
        """The readable keys of the subnets in id order, removed ones included."""
        return tuple(subnet.spec.key for subnet in self._subnets)

    @property
    def accuracy(self) -> tuple[float | None, ...]:
        """The accuracy of the subnets in percent, or None, in id order, removed ones included."""
        return tuple(subnet.accuracy for subnet in self._subnets)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the subnets that are served, in ascending order."""
        return tuple(sorted(self._served))

    @property
    def sample(self) -> Any:
        """The largest of `samples`: a tensor, a tuple or a dictionary of tensors, as requests are."""
        engine: Any = self
        return engine.samples[-1]

    def ready(self, subnet: int) -> ReadySubnet:
        """Return the callable of a registered `subnet`. This takes well below a microsecond.

        It is a function of one batch, as in `Engine.__call__`, that stays valid until the subnet is removed.

        Raises:
            SpecError: there is no such id, or the subnet was removed.
        """
        found = self._served.get(subnet) if type(subnet) is int else self._served.get(_id(subnet))
        if found is None:
            ids = self.ids
            span = f"0..{len(self) - 1}" if len(ids) == len(self) else ", ".join(map(str, ids))
            raise SpecError(f"no subnet {subnet}; this engine has {span}")
        return found

    def _bound(self, subnet: ReadySubnet) -> Bound:
        """Return the view of a subnet on the weights and statistics of now; a removed subnet keeps none."""
        bound = subnet.bound
        if bound is None or not bound.current:
            bound = self._bind(subnet.spec)
            with self._rebinding:
                if self._served.get(subnet.id) is subnet:
                    subnet.bound = bound
        return bound


def _id(subnet: Any) -> int:
    with suppress(TypeError):
        if not isinstance(subnet, bool):
            return index(subnet)
    raise SpecError(f"no subnet {subnet!r}: this is not an id; ids are ints, 0 for the first subnet")
