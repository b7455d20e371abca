"""What an engine knows of one registered subnet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from subnetact.engine.fast_conv import use_fast_convs_
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet

__all__ = ["Bound", "ReadySubnet"]


@dataclass(frozen=True, eq=False)
class Bound:
    """A subnet's view on one row of the norm table.

    Attributes:
        view: a view that only the engine uses.
        row: the statistics it runs on; None = the supernet's shared ones.
        weights_generation: that of the supernet when the subnet was bound.
        sources: the tensors it reads, of those that can tell when they change in place.
    """

    view: nn.Module
    row: NormRow | None
    weights_generation: int
    sources: tuple[Tensor, ...]

    @classmethod
    def of(cls, supernet: Supernet, spec: SubnetSpec) -> Bound:
        """Bind a subnet, with faster layers."""
        generation = supernet.weights_generation
        view, row = supernet.private_view(spec)
        use_fast_convs_(view)
        # A convolution whose kernel is computed follows these, and its own tensor only when it runs.
        sources: list[Tensor] = []
        for parameter in view.parameters():
            computed = getattr(parameter, "computed", None)
            sources += [parameter] if computed is None else computed.operator.parameters(recurse=False)
        if row is not None:
            sources += row.sources
        else:
            norms = supernet.norm_operators().values()
            sources += [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        return cls(view, row, generation, tuple(t for t in sources if not t.is_inference()))

    def current(self, supernet: Supernet, spec: SubnetSpec) -> bool:
        """Tell whether the supernet would bind the subnet to the same tensors now."""
        return self.row is supernet.norms.get(spec) and self.weights_generation == supernet.weights_generation

    def versions(self) -> list[int]:
        """Return numbers that change when any source changes in place."""
        return [tensor._version for tensor in self.sources]


class ReadySubnet:
    """The callable of one registered subnet; it stays valid while the engine evicts and recalibrates.

    Attributes:
        id: the subnet's number in its engine.
        spec: the subnet.
        accuracy: percent, or None where it is not known.
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
        self.refused = False
        self._run = run

    def __repr__(self) -> str:
        return f"ReadySubnet({self.id}: {self.spec})"

    def __call__(self, x: Any) -> Any:
        """Run a batch, x of shape (N, ...) on the engine's device."""
        return self._run(self, x)
