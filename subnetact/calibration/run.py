"""CalibrationRun: the work of one calibration, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.calibration.shared_forward import NotShareable, SharedForward
from subnetact.comparison import EXACT, equal
from subnetact.errors import InsertError, SpecError
from subnetact.files.tensors import tensor_from_json, tensor_to_json
from subnetact.operators import SubnetNorm
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input, map_tensors
from subnetact.supernet.bind import bind
from subnetact.supernet.failure import missing_entry, summary
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet

__all__ = ["CalibrationRun"]

TRIAL_INPUTS = 2
"""How many inputs the trial takes that compares a shared with an ordinary forward pass."""
FEWEST_BATCHES = 4
"""How many batches a subnet takes before it may be found to have small enough errors."""


class CalibrationRun:
    """Runs batches through many subnets and averages the statistics of every BatchNorm.

    Attributes:
        specs: the subnets in an order that does not depend on the given one.
        shared: the forward passes of the subnets.
        finished: the number of batches that all subnets have taken.
        position: the number of subnets that have taken the next batch.
        stopped: for each subnet with small enough errors, its statistics row and the number of its batches.
        one_at_a_time: for each subnet that shares no layers, the reason.
        layers_computed: the number of module calls so far.
        layers_alone: the number of module calls that the subnets would have made without sharing.
    """

    def __init__(
        self,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        rule: str | None,
        largest_error: float | None,
        memory: float,
    ) -> None:
        self._supernet = supernet
        self._rule = rule
        self._largest_error = largest_error
        self.specs = sorted(specs, key=lambda spec: spec.key)
        self.device = next(supernet.network.parameters()).device
        self.finished = self.position = self.layers_computed = self.layers_alone = 0
        self.stopped: dict[SubnetSpec, tuple[NormRow, int]] = {}
        self.one_at_a_time: dict[SubnetSpec, str] = {}
        self._order: dict[SubnetSpec, list[SubnetNorm]] = {}
        self.shared = SharedForward(memory)
        for spec in self.specs:
            view, norms = self._bind(spec)
            self._order[spec] = [norm.norm for norm in norms]
            try:
                self.shared.add(spec, view, norms)
            except NotShareable as reason:
                self._run_alone(spec, str(reason))
        self._arrange()

    def _bind(self, spec: SubnetSpec) -> tuple[nn.Module, list[CalibrationNorm]]:
        row = self._supernet.space.resolve(spec)
        norms: list[CalibrationNorm] = []

        def collecting(norm: SubnetNorm) -> nn.Module:
            norms.append(CalibrationNorm(norm, row, self._rule, spread=self._largest_error is not None))
            return norms[-1].module  # type: ignore[no-any-return]

        return bind(self._supernet.network, row, collecting), norms

    def _run_alone(self, spec: SubnetSpec, reason: str) -> None:
        self.shared.add_whole(spec, *self._bind(spec))
        self.one_at_a_time[spec] = reason

    def _arrange(self) -> None:
        self.shared.arrange([spec for spec in self.specs if spec not in self.stopped])

    # -- running ---------------------------------------------------------------------------------

    def prepare(self, x: Any) -> None:
        """Compare a shared with an ordinary forward pass of the first batch; unless equal, share nothing."""
        sharing = [spec for spec in self.specs if spec not in self.one_at_a_time]
        reason: str | None = "its batches are not single tensors"
        if sharing and isinstance(x, Tensor):
            try:
                reason = self._difference(sharing[0], x[:TRIAL_INPUTS].clone())
            except Exception as error:
                reason = f"a trial failed: {error}"
        if reason is not None:
            for spec in sharing:
                self._run_alone(spec, reason)
        self.shared.reset()
        self._arrange()

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
            path = norm.norm.path
            if not equal(shared[path].average if path in shared else None, norm.average, EXACT):
                return f"{path} has other statistics when the subnet is traced"
        return None

    def batch(self, x: Any) -> Iterator[SubnetSpec]:
        """Run a tensor, or a tuple or dictionary of tensors, and yield each active subnet when it is done."""
        for i, spec in enumerate(self.shared.run(x, self.finished)):
            self.layers_computed += self.shared.layers
            self.shared.layers = 0
            if i >= self.position:
                self.layers_alone += self.shared.alone(spec)
                self.position = i + 1
            yield spec
        self.finished, self.position = self.finished + 1, 0
        self._stop()

    def explain(self, x: Any) -> None:
        """Raise an error that says why a batch could not be run, if a subnet fails on it.

        Raises:
            InsertError: the largest subnet runs on the batch, so that the elastic description lacks a module.
            SpecError: the largest subnet does not run on the batch either.
        """
        for spec in self.specs:
            view, _ = self._bind(spec)
            error = _failure(view, x)
            if error is None:
                continue
            shape = f"a batch of shape {tuple(x.shape)}" if isinstance(x, Tensor) else describe_input(x)
            fact = f"{spec} does not run on {shape}: {summary(view, error)}"
            full, _ = self._bind(self._supernet.space.largest())
            if _failure(full, x) is None:
                raise InsertError(
                    f"calibrate: {fact}; the largest subnet does run: {missing_entry(view, error)}"
                ) from error
            raise SpecError(
                f"calibrate: {fact}; give batches that the network takes, (N, C, H, W) for images"
            ) from error

    def _stop(self) -> None:
        if self._largest_error is None or self.finished < FEWEST_BATCHES:
            return
        errors: dict[int, float] = {}
        before = self.active
        for spec in self.specs:
            if spec not in self.stopped:
                norms = self.shared.norms(spec).values()
                for norm in norms:
                    errors.setdefault(id(norm), norm.error())
                if max((errors[id(norm)] for norm in norms), default=0.0) < self._largest_error:
                    self.stopped[spec] = self._row(spec), self.finished
        if self.active < before:
            self._arrange()

    # -- results ---------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """The number of subnets that need further batches."""
        return len(self.specs) - len(self.stopped)

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as values that JSON can hold."""
        return {
            "finished": self.finished,
            "position": self.position,
            "layers": [self.layers_computed, self.layers_alone],
            "averages": self.shared.state(),
            "stopped": [
                [spec.to_json(), tensor_to_json(row.flat), batches]
                for spec, (row, batches) in self.stopped.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned for the same subnets; the run is prepared already."""
        self.shared.restore(state["averages"], self.device)
        for known, flat, batches in state["stopped"]:
            spec = SubnetSpec.from_json(known)
            channels = self._row(spec).channels
            self.stopped[spec] = NormRow(channels, tensor_from_json(flat).to(self.device)), int(batches)
        self.layers_computed, self.layers_alone = map(int, state["layers"])
        self.finished, self.position = int(state["finished"]), int(state["position"])
        self._arrange()

    def results(self) -> dict[SubnetSpec, tuple[NormRow, int]]:
        """Return the statistics row of every subnet, and the number of batches that it averages."""
        return {
            spec: self.stopped[spec] if spec in self.stopped else (self._row(spec), self.finished)
            for spec in self.specs
        }

    def _row(self, spec: SubnetSpec) -> NormRow:
        norms, sizes = self.shared.norms(spec), self._supernet.space.resolve(spec)
        statistics = {}
        for norm in self._order[spec]:
            averaged = norms[norm.path].average if norm.path in norms else None
            if averaged is None:  # The forward pass never called this BatchNorm.
                statistics[norm.path] = norm.shared_statistics(sizes)
            else:
                statistics[norm.path] = averaged[0], averaged[1]
        return NormRow.of(statistics)


def _failure(view: nn.Module, x: Any) -> Exception | None:
    try:
        call_with(view, map_tensors(Tensor.clone, x))
    except Exception as error:
        return error
    return None
