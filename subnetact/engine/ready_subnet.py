"""ReadySubnet: the callable of one registered subnet, and the view that it currently runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.engine.fast_conv import use_fast_convs_
from subnetact.operators.subnet_norm import BATCH_NORMS
from subnetact.operators.tensor_version import changes_of
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with
from subnetact.supernet.generation import is_counter
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet

__all__ = ["Bound", "ReadySubnet"]


@dataclass(frozen=True, eq=False)
class Bound:
    """The view of a subnet together with the statistics and weights that it was made from.

    Attributes:
        view: a view that only the engine uses.
        statistics_row: the statistics row of the subnet. If None, the view uses the supernet's shared
            statistics.
        weights_generation: that of the supernet when the view was made.
        sources: the tensors that the view reads, except inference tensors, which do not count versions. They
            are left out once, here, because `versions` runs with every call of a fused program or graph.
        read: the tensors that the view reads, inference tensors included.
    """

    view: nn.Module
    statistics_row: NormRow | None
    weights_generation: int
    sources: tuple[Tensor, ...]
    read: tuple[Tensor, ...]

    @classmethod
    def of(cls, supernet: Supernet, spec: SubnetSpec) -> Bound:
        """Bind a subnet to the current weights and statistics, with fast convolutions.

        Raises:
            SpecError: the specification is malformed, or of another space (`ForeignSpec`).
        """
        generation = supernet.generation.number
        view, statistics_row = supernet.private_view(spec)
        use_fast_convs_(view)
        # A packed copy is refreshed only when a module reads it, so watch the tensors that it is made of.
        sources: list[Tensor] = []
        for tensor in _read_by(view):
            packed = getattr(tensor, "packed", None)
            sources += [tensor] if packed is None else packed.sources
        if statistics_row is not None:
            sources.append(statistics_row.flat)
        else:
            # Training writes the means and variances without counting versions, and counts the batch.
            norms = supernet.norm_operators().values()
            sources += [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        read = tuple({id(source): source for source in sources}.values())
        counting = tuple(source for source in read if not source.is_inference())
        return cls(view, statistics_row, generation, read if len(counting) == len(read) else counting, read)

    def current(self, supernet: Supernet, spec: SubnetSpec) -> bool:
        """Tell whether the supernet would bind the subnet to the same tensors now."""
        same_statistics = self.statistics_row is supernet.norms.get(spec)
        return same_statistics and self.weights_generation == supernet.generation.number

    def versions(self) -> list[int]:
        """Return the version counters of all sources; they differ after any in-place change."""
        return [tensor._version for tensor in self.sources]

    def changes_itself(self, x: Any) -> bool:
        """Run a batch and tell whether the network's own forward changes buffers that it reads."""
        buffers = [source for source in self.sources if not isinstance(source, nn.Parameter)]
        before = changes_of(buffers)
        with torch.inference_mode(), suppress(Exception):
            call_with(self.view, x)
        return changes_of(buffers) != before


def _read_by(view: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a view, apart from the statistics of its BatchNorms."""
    yield from view.parameters()
    for module in view.modules():
        if not isinstance(module, BATCH_NORMS):
            yield from (b for b in module._buffers.values() if b is not None and not is_counter(b))


class ReadySubnet:
    """The callable of one registered subnet. It stays valid when the engine evicts and recalibrates.

    Attributes:
        id: the subnet's number in its engine.
        spec: the subnet.
        accuracy: in percent, or None if it is not known.
        bound: the current view, or None after the subnet was removed.
        uses: the number of calls since promotion was last considered.
        since: the cache's clock when promotion was last considered.
        refused: why the subnet cannot become a fused program, in one line. It is empty as far as is known.
    """

    __slots__ = ("_run", "accuracy", "bound", "id", "refused", "since", "spec", "uses")

    def __init__(
        self, id: int, spec: SubnetSpec, accuracy: float | None, run: Callable[[ReadySubnet, Any], Any]
    ) -> None:
        self.id = id
        self.spec = spec
        self.accuracy = accuracy
        self.bound: Bound | None = None
        self.uses = 0
        self.since = 0
        self.refused = ""
        self._run = run

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
