"""CalibrationRun: the work of one calibration, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.calibration.shared_forward import NotShareable, SharedForward
from subnetact.errors import InsertError, SpecError
from subnetact.files.tensors import tensor_from_json, tensor_to_json
from subnetact.operators import SubnetNorm
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input, map_tensors
from subnetact.supernet.bind import bind
from subnetact.supernet.failure import missing_entry, summary
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet

__all__ = ["CalibrationRun"]

TRIAL_INPUTS = 2
"""How many inputs the trial takes that compares a shared with an ordinary forward pass."""
AT_LEAST = 4
"""How many batches a subnet takes before it may be found to have small enough errors."""


@dataclass(eq=False)
class _Alone:
    """A subnet that shares no layers and runs by itself."""

    view: nn.Module
    norms: list[CalibrationNorm]
    batches: int = 0

    @property
    def layers(self) -> int:
        return sum(
            not module._modules and not isinstance(module, SkippedLayer) for module in self.view.modules()
        )


class CalibrationRun:
    """Runs batches through many subnets and averages the statistics of every BatchNorm.

    Args:
        supernet: the supernet; it is not changed.
        specs: the subnets.
        rule: one of `CALIBRATION_RULES`; if None, each BatchNorm has its own rule.
        largest_error: the relative standard error at which a subnet needs no more batches, 0.01 for one
            percent. If None, every subnet takes all batches.
        memory: the number of bytes of one subnet's forward pass to keep for later subnets.

    Attributes:
        specs: the subnets in an order that does not depend on the given one.
        finished: the number of batches that all subnets have taken.
        position: the number of subnets with shared layers that have taken the next batch.
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
        self._alone: dict[SubnetSpec, _Alone] = {}
        self._steps: dict[SubnetSpec, dict[str, int]] = {}
        self._order: dict[SubnetSpec, list[SubnetNorm]] = {}
        self._shared = SharedForward(memory)
        for spec in self.specs:
            view, norms = self._bind(spec)
            self._order[spec] = [norm.norm for norm in norms]
            try:
                self._steps[spec] = self._shared.add(view, norms)
            except NotShareable as reason:
                self._leave_alone(spec, str(reason))

    def _bind(self, spec: SubnetSpec) -> tuple[nn.Module, list[CalibrationNorm]]:
        row = self._supernet.space.resolve(spec)
        norms: list[CalibrationNorm] = []

        def collecting(norm: SubnetNorm) -> nn.Module:
            norms.append(CalibrationNorm(norm, row, self._rule, spread=self._largest_error is not None))
            return norms[-1].module  # type: ignore[no-any-return]

        return bind(self._supernet.network, row, collecting), norms

    def _leave_alone(self, spec: SubnetSpec, reason: str) -> None:
        self._steps.pop(spec, None)
        self._alone[spec] = _Alone(*self._bind(spec))
        self.one_at_a_time[spec] = reason

    # -- running ---------------------------------------------------------------------------------

    def prepare(self, x: Any) -> None:
        """Compare a shared with an ordinary forward pass. If they differ, no subnet will share layers.

        Args:
            x: the first batch: a tensor of shape (N, ...), of which the trial takes a few inputs, or a tuple
                or dictionary of tensors, for which no layers are shared.
        """
        if self._steps and not isinstance(x, Tensor):
            for spec in list(self._steps):
                self._leave_alone(spec, "its batches are not single tensors")
        elif self._steps:
            try:
                reason = self._trial(x[:TRIAL_INPUTS].clone())
            except Exception as error:
                reason = f"a trial failed: {error}"
            for norm in self._shared.norms.values():
                norm.reset()
            if reason is not None:
                for spec in list(self._steps):
                    self._leave_alone(spec, reason)
        self._shared.layers = self._shared.peak = 0
        self._arrange()

    def _trial(self, x: Tensor) -> str | None:
        spec = next(iter(self._steps))
        view, norms = self._bind(spec)
        view(x.clone())
        self._shared.arrange({spec: list(self._steps[spec].values())})
        list(self._shared.run(x.clone(), 0, check=True))
        for norm in self._shared.norms.values():
            norm.reset()
        list(self._shared.run(x, 0))
        shared = self._norms_of(spec)
        for norm in norms:
            here, there = norm.average, shared[norm.norm.path].average if norm.norm.path in shared else None
            if (here is None) != (there is None):
                return f"{norm.norm.path} is reached only when the subnet is not traced"
            if here is not None and there is not None:
                for a, b in zip(here, there, strict=True):
                    if not torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True):
                        return f"{norm.norm.path} has other statistics when the subnet is traced"
        return None

    def _arrange(self) -> None:
        active = {spec: steps for spec, steps in self._steps.items() if spec not in self.stopped}
        self._shared.arrange({spec: list(steps.values()) for spec, steps in active.items()})

    def batch(self, x: Any) -> Iterator[SubnetSpec]:
        """Run a batch through all active subnets; yield each subnet when it is done.

        Args:
            x: a tensor of shape (N, ...), or a tuple or dictionary of such tensors.
        """
        counted = self.position
        for i, spec in enumerate(self._shared.run(x, self.finished)):
            self._count(self._shared.layers, self._shared.alone(spec) if i >= counted else 0)
            self._shared.layers, self.position = 0, max(counted, i + 1)
            yield spec
        for spec, alone in self._alone.items():
            if spec not in self.stopped:
                if alone.batches <= self.finished:
                    call_with(alone.view, map_tensors(Tensor.clone, x))  # A forward may overwrite its input.
                    alone.batches += 1
                    self._count(alone.layers, alone.layers)
                yield spec
        self.finished, self.position = self.finished + 1, 0
        self._stop()

    def explain(self, x: Any) -> None:
        """Raise an error that says why a batch could not be run, if a subnet fails on it.

        Args:
            x: the batch, a tensor of shape (N, ...), or a tuple or dictionary of such tensors.

        Raises:
            InsertError: the largest subnet runs on the batch, so that the elastic description lacks a module.
            SpecError: the largest subnet does not run on the batch either.
        """
        for spec in self.specs:
            view, _ = self._bind(spec)
            error = _failure(view, x)
            if error is None:
                continue
            fact = f"{spec} does not run on {_described(x)}: {summary(view, error)}"
            full, _ = self._bind(self._supernet.space.largest())
            if _failure(full, x) is None:
                raise InsertError(
                    f"calibrate: {fact}; the largest subnet does run: {missing_entry(view, error)}"
                ) from error
            raise SpecError(
                f"calibrate: {fact}; give batches that the network takes, (N, C, H, W) for images"
            ) from error

    def _count(self, computed: int, alone: int) -> None:
        self.layers_computed += computed
        self.layers_alone += alone

    def _stop(self) -> None:
        if self._largest_error is None or self.finished < AT_LEAST:
            return
        errors: dict[int, float] = {}
        found = {}
        for spec in self.specs:
            if spec not in self.stopped:
                norms = self._norms_of(spec).values()
                for norm in norms:
                    errors.setdefault(id(norm), norm.error())
                if max((errors[id(norm)] for norm in norms), default=0.0) < self._largest_error:
                    found[spec] = self._row(spec), self.finished
        if found:
            self.stopped.update(found)
            self._arrange()

    # -- results ---------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """The number of subnets that need further batches."""
        return len(self.specs) - len(self.stopped)

    @property
    def peak(self) -> int:
        """The largest number of bytes that were kept of one subnet's forward pass for later subnets."""
        return self._shared.peak

    def norms(self) -> list[CalibrationNorm]:
        """Return every BatchNorm that averages, in an order that a resumed calibration has, too."""
        return [*self._shared.norms.values(), *(n for alone in self._alone.values() for n in alone.norms)]

    def steps(self, spec: SubnetSpec) -> dict[str, int]:
        """Return the step number of every shared BatchNorm of a subnet, by name; equal numbers are shared."""
        return dict(self._steps.get(spec, {}))

    def layers(self) -> tuple[int, int]:
        """Return the number of module calls per batch, with sharing and without."""
        self._arrange()
        alone = sum(subnet.layers for subnet in self._alone.values())
        shared = sum(map(self._shared.alone, self._steps))
        return self._shared.together() + alone, shared + alone

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as values that JSON can hold."""
        return {
            "finished": self.finished,
            "position": self.position,
            "layers": [self.layers_computed, self.layers_alone],
            "norms": [norm.state() for norm in self.norms()],
            "alone": [alone.batches for alone in self._alone.values()],
            "stopped": [
                [spec.to_json(), tensor_to_json(row.flat), batches]
                for spec, (row, batches) in self.stopped.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned for the same subnets; the run is prepared already."""
        for norm, known in zip(self.norms(), state["norms"], strict=True):
            norm.restore(known, self.device)
        for alone, count in zip(self._alone.values(), state["alone"], strict=True):
            alone.batches = int(count)
        for known, flat, batches in state["stopped"]:
            spec = SubnetSpec.from_json(known)
            channels = self._row(spec).channels
            self.stopped[spec] = NormRow(channels, tensor_from_json(flat).to(self.device)), int(batches)
        self.layers_computed, self.layers_alone = map(int, state["layers"])
        self.finished, self.position = int(state["finished"]), int(state["position"])
        self._arrange()

    def batches(self) -> dict[SubnetSpec, int]:
        """Return for each subnet the number of batches that its statistics average."""
        return {spec: self.stopped[spec][1] if spec in self.stopped else self.finished for spec in self.specs}

    def rows(self) -> dict[SubnetSpec, NormRow]:
        """Return the statistics row of every subnet."""
        return {
            spec: self.stopped[spec][0] if spec in self.stopped else self._row(spec) for spec in self.specs
        }

    def _norms_of(self, spec: SubnetSpec) -> dict[str, CalibrationNorm]:
        if spec in self._alone:
            return {norm.norm.path: norm for norm in self._alone[spec].norms}
        return {path: self._shared.norms[step] for path, step in self._steps[spec].items()}

    def _row(self, spec: SubnetSpec) -> NormRow:
        norms, sizes = self._norms_of(spec), self._supernet.space.resolve(spec)
        statistics = {}
        for norm in self._order[spec]:
            averaged = norms[norm.path].average if norm.path in norms else None
            if averaged is None:  # The forward pass never called this BatchNorm.
                statistics[norm.path] = norm.shared_statistics(sizes)
            else:
                statistics[norm.path] = averaged[0], averaged[1]
        return NormRow.of(statistics)


def _described(x: Any) -> str:
    return f"a batch of shape {tuple(x.shape)}" if isinstance(x, Tensor) else describe_input(x)


def _failure(view: nn.Module, x: Any) -> Exception | None:
    try:
        call_with(view, map_tensors(Tensor.clone, x))
    except Exception as error:
        return error
    return None
