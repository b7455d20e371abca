"""CalibrationRun: the work of one calibration, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.calibration.shared_calls import SharedCalls
from subnetact.device import raise_if_explained
from subnetact.errors import InsertError, SpecError, SubnetActError
from subnetact.operators import SubnetNorm
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input, map_tensors
from subnetact.supernet.bind import bind, private_buffers
from subnetact.supernet.failure import not_running
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet


class CalibrationRun:
    """Runs batches through many subnets, `finished` so far, and averages the statistics of BatchNorms."""

    def __init__(self, supernet: Supernet, specs: list[SubnetSpec], rule: str | None, memory: float) -> None:
        self._supernet, self.rule, self._memory = supernet, rule, memory
        self._frozen = private_buffers()  # A forward may write into its buffers.
        self.finished = self._done = 0
        self.calls, resolve = SharedCalls(supernet.network), supernet.space.resolve
        rows = {spec: resolve(spec) for spec in specs}
        place = lambda spec: ([rows[spec][i] for i in self.calls.order], spec.key)  # noqa: E731
        self.specs = sorted(specs, key=place)  # Equal beginnings run one after the other.
        self._bound = [self._bind(spec) for spec in self.specs]
        noted = self.calls.worth_noting([rows[spec] for spec in self.specs])
        for spec, (view, norms), paths in zip(self.specs, self._bound, noted, strict=True):
            self.calls.share(view, rows[spec], paths, norms)

    def _bind(self, spec: SubnetSpec) -> tuple[nn.Module, dict[str, CalibrationNorm]]:
        row = self._supernet.space.resolve(spec)
        norms: dict[str, CalibrationNorm] = {}

        def collecting(norm: SubnetNorm) -> nn.Module:
            norms[norm.path] = CalibrationNorm(norm, row, self.rule)
            return norms[norm.path].module  # type: ignore[no-any-return]

        return bind(self._supernet.network, row, collecting, frozen=self._frozen), norms

    # -- running ---------------------------------------------------------------------------------

    def batch(self, x: Any) -> Iterator[SubnetSpec]:
        """Run a tensor, or a tuple or dictionary of tensors, and yield each subnet when it is done."""
        for spec, (view, _) in list(zip(self.specs, self._bound, strict=True))[self._done :]:
            try:
                call_with(view, map_tensors(Tensor.clone, x))  # A forward may overwrite its input.
            except Exception as error:
                raise_if_explained(error, SubnetActError)
                full, _ = self._bind(self._supernet.space.largest())
                advice = "give batches that the network takes, images as (N, C, H, W)"
                why, runs = not_running(view, error, x, full, describe_input(x), advice)
                raise (InsertError if runs else SpecError)(f"calibrate: {spec} {why}") from error
            self.calls.keep(self._memory)
            self._done += 1
            yield spec
        self.calls.keep(0)
        self.finished, self._done = self.finished + 1, 0

    # -- results ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as values that JSON can hold."""
        facts = {"finished": self.finished, "done": self._done, "layers": self.calls.layers}
        averages = [[norm.state() for norm in norms.values()] for _, norms in self._bound]
        return {**facts, "shared": self.calls.shared, "averages": averages}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned for the same subnets."""
        for (_, norms), averages in zip(self._bound, state["averages"], strict=True):
            for norm, average in zip(norms.values(), averages, strict=True):
                norm.restore(average, self._supernet.device)
        self.finished, self._done = int(state["finished"]), int(state["done"])
        self.calls.layers, self.calls.shared = int(state["layers"]), int(state["shared"])

    def row(self, spec: SubnetSpec) -> NormRow:
        """Return the statistics row of a subnet; BatchNorms that it never calls have the shared ones."""
        sizes, (_, norms) = self._supernet.space.resolve(spec), self._bound[self.specs.index(spec)]
        averages = ((norm.norm, norm.average and norm.average[1:]) for norm in norms.values())
        return NormRow.of({norm.path: pair or norm.shared_statistics(sizes) for norm, pair in averages})
