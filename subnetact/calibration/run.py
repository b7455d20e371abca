"""CalibrationRun: the work of one calibration, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.calibration.shared_forward import NotShareable, SharedForward
from subnetact.comparison import EXACT, equal
from subnetact.device import raise_if_explained
from subnetact.errors import InsertError, SpecError
from subnetact.operators import SubnetNorm
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import describe_input
from subnetact.supernet.bind import bind, private_buffers
from subnetact.supernet.failure import failure, not_running
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet

TRIAL_INPUTS = 2
"""How many inputs the trial takes that compares a shared with an ordinary forward pass."""


class CalibrationRun:
    """Runs batches through many subnets, `finished` so far, and averages the statistics of BatchNorms."""

    def __init__(self, supernet: Supernet, specs: list[SubnetSpec], rule: str | None, memory: float) -> None:
        self._supernet = supernet
        self._rule = rule
        self._frozen = private_buffers()  # A forward may write into its buffers.
        self.specs = sorted(specs, key=lambda spec: spec.key)
        self.device = supernet.device
        self.finished = 0
        self.one_at_a_time: dict[SubnetSpec, str] = {}
        self.shared = SharedForward(memory)
        for spec in self.specs:
            view, norms = self._bind(spec)
            try:
                self.shared.add(spec, view, norms)
            except NotShareable as reason:
                self._run_alone(spec, str(reason))
        self.shared.arrange(self.specs)

    def _bind(self, spec: SubnetSpec) -> tuple[nn.Module, list[CalibrationNorm]]:
        row = self._supernet.space.resolve(spec)
        norms: list[CalibrationNorm] = []

        def collecting(norm: SubnetNorm) -> nn.Module:
            norms.append(CalibrationNorm(norm, row, self._rule))
            return norms[-1].module  # type: ignore[no-any-return]

        return bind(self._supernet.network, row, collecting, frozen=self._frozen), norms

    def _run_alone(self, spec: SubnetSpec, reason: str) -> None:
        self.shared.add_whole(spec, *self._bind(spec))
        self.one_at_a_time[spec] = reason

    # -- running ---------------------------------------------------------------------------------

    def prepare(self, x: Any) -> None:
        """Compare a shared with an ordinary forward pass of the first batch; unless equal, share nothing."""
        sharing = [spec for spec in self.specs if spec not in self.one_at_a_time]
        reason: str | None = "its batches are not single tensors"
        if sharing and isinstance(x, Tensor):
            try:
                reason = self._difference(sharing[0], x[:TRIAL_INPUTS].clone())
            except Exception as error:
                raise_if_explained(error)
                reason = f"a trial failed: {error}"
        if reason is not None:
            for spec in sharing:
                self._run_alone(spec, reason)
        self.shared.reset()
        self.shared.arrange(self.specs)

    def _difference(self, spec: SubnetSpec, x: Tensor) -> str | None:
        """Return in words how the shared forward pass of a subnet differs from its own."""
        view, norms = self._bind(spec)
        view(x.clone())
        self.shared.arrange([spec])
        list(self.shared.run(x.clone(), 0, check=True))
        self.shared.reset()
        list(self.shared.run(x, 0))
        shared = self.shared.norms(spec)
        for norm in norms:
            if not equal(shared[norm.norm.path].average, norm.average, EXACT):
                return f"{norm.norm.path} has other statistics when the subnet is traced"
        return None

    def batch(self, x: Any) -> Iterator[SubnetSpec]:
        """Run a tensor, or a tuple or dictionary of tensors, and yield each subnet when it is done."""
        yield from self.shared.run(x, self.finished)
        self.finished += 1

    def explain(self, x: Any) -> None:
        """Raise an error that says why a batch could not be run, if a subnet fails on it."""
        for spec in self.specs:
            view, _ = self._bind(spec)
            if (error := failure(view, x)) is not None:
                full, _ = self._bind(self._supernet.space.largest())
                advice = "give batches that the network takes, images as (N, C, H, W)"
                why, runs = not_running(view, error, x, full, describe_input(x), advice)
                raise (InsertError if runs else SpecError)(f"calibrate: {spec} {why}") from error

    # -- results ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as values that JSON can hold."""
        return {"finished": self.finished, "layers": self.shared.layers, "averages": self.shared.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned for the same subnets; the run is prepared already."""
        self.shared.restore(state["averages"], self.device)
        self.finished, self.shared.layers = int(state["finished"]), int(state["layers"])

    def row(self, spec: SubnetSpec) -> NormRow:
        """Return the statistics row of a subnet; BatchNorms that it never calls have the shared ones."""
        sizes, norms = self._supernet.space.resolve(spec), self.shared.norms(spec)
        pairs = {path: norm.average or norm.norm.shared_statistics(sizes) for path, norm in norms.items()}
        return NormRow.of(pairs)
