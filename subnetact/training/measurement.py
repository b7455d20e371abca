"""Measurement: how well subnets do on held-out batches, with BatchNorm statistics made for it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from subnetact.calibration.calibrate import calibrate
from subnetact.errors import TrainingError, UncalibratedSubnetWarning
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input
from subnetact.supernet.failure import explained
from subnetact.supernet.supernet import Supernet
from subnetact.training.processes import agreed
from subnetact.training.progress_bar import progress_bar
from subnetact.training.task import Task, number

FIRST_BATCH = "a batch is what the network takes or, unless labels=False, a pair (inputs, labels)"


@dataclass
class Measurement:
    """Measures `specs` on `held_out`, always on as many batches as the first time.

    `inputs` are training inputs for BatchNorm statistics. The last time took so many `seconds`.
    """

    supernet: Supernet
    specs: Sequence[SubnetSpec]
    held_out: Iterable[Any]
    task: Task
    teacher: Callable[..., Any] | None
    inputs: Sequence[Any]
    progress: bool
    batches: int | None = None
    seconds: float = 0.0

    @torch.no_grad()
    def check(self, labels: Any) -> None:
        """Refuse a first batch, its labels or a teacher that do not fit the supernet."""
        teacher = self.teacher
        own = {parameter.data_ptr() for parameter in self.supernet.parameters()}
        if any(p.data_ptr() in own for p in getattr(teacher, "parameters", list)()):
            raise TrainingError(
                "teacher: shares weights with the supernet, so it moves with the training; give "
                'teacher="frozen", a copy.deepcopy made before insert_, or None for in-place distillation'
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncalibratedSubnetWarning)
            found = self._output("the supernet", self.supernet)
        if labels is not None:
            self.task.loss(found, labels)
        if teacher is None:
            return
        wanted = self._output("teacher", teacher)
        if isinstance(found, Tensor) and (not isinstance(wanted, Tensor) or wanted.shape != found.shape):
            raise TrainingError(
                f"teacher: returns {describe_input(wanted)}, the supernet {describe_input(found)}; give a "
                "teacher of the same outputs, or output=, a function that makes them alike"
            )

    def _output(self, name: str, network: Callable[..., Any]) -> Any:
        x = self.inputs[0]
        with explained(TrainingError, name, network, x, FIRST_BATCH):
            found = call_with(network, x)
        return self.task.output(found, x)

    def run(self, limit_s: float = math.inf) -> list[float]:
        """Calibrate every subnet, and return its metric; the first time, end before a limit if possible."""
        supernet, task, progress = self.supernet, self.task, self.progress
        calibrate(supernet, self.specs, self.inputs, progress=progress)
        views = [supernet.subnet(spec) for spec in self.specs]
        meters = [task.meter() for _ in views]
        read, began, total = 0, time.perf_counter(), self.batches or length_hint(self.held_out) or None
        bar = progress_bar(f"measuring {len(views)} subnets", progress, total=total)
        with torch.inference_mode(), bar:
            for read, batch in enumerate(islice(self.held_out, self.batches), 1):
                x, labels = task.split(batch, supernet.device)
                if labels is None:
                    assert self.teacher is not None
                    labels = task.output(call_with(self.teacher, x), x)
                for view, meter in zip(views, meters, strict=True):
                    meter.update(task.output(call_with(view, x), x), labels)
                bar.update()
                next_s = (time.perf_counter() - began) * (read + 1) / read
                if self.batches is None and limit_s < math.inf and agreed(next_s > limit_s):
                    break
        if not read:
            raise TrainingError("held_out: there is no batch; give at least one")
        self.batches, self.seconds = read, time.perf_counter() - began
        return [number(meter.compute()) for meter in meters]
