"""TrainingRun: the steps of a distillation, from any step on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import TrainingError, WriteError
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.load import warn_caller
from subnetact.supernet.supernet import Supernet
from subnetact.training.batch_stream import BatchStream
from subnetact.training.processes import agreed
from subnetact.training.progress_bar import progress_bar
from subnetact.training.sandwich import average_gradients, sandwich_step
from subnetact.training.state import TrainingState
from subnetact.training.stored_outputs import StoredOutputs
from subnetact.training.task import Task

WARM_UP = 0.05
"""The share of the training in which the learning rate rises."""
MOST_LOSSES = 400
"""The losses of at most this many steps are kept."""
SAVE_EVERY_S, SAVING = 60.0, 0.05
"""How often a run saves that was not told: so often, but not for a larger share of the time."""
LEAST_TRAINING = 0.5
"""So much of the minutes is left to the steps, however long the rest takes."""


@dataclass
class TrainingRun:
    """What the steps of a distillation need; the arguments are those of `distill_`.

    `learns` says that the first subnet learns from labels, and `rate` is the highest learning rate where the
    run changes it. In the `facts` are the `seconds` of the steps, and those that `others` take beside them.
    """

    supernet: Supernet
    stream: BatchStream
    task: Task
    teacher: Callable[..., Any] | None
    stored: StoredOutputs | None
    learns: bool
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    rate: float | None
    clip: float
    accumulate: int
    autocast: torch.dtype | None
    random_subnets: int
    distillation: float
    balance: bool
    seed: int
    steps: int | None
    minutes: float | None
    save_every_s: float | None
    progress: bool
    processes: int
    facts: dict[str, Any] = field(default_factory=dict)

    def go_on(self, state: TrainingState) -> None:
        """Take the steps that are left, and save from time to time and at the end."""
        facts, began = self.facts, time.perf_counter() - self.facts["seconds"]
        saved = time.perf_counter()
        unit, total = (" s", max(1, round(self._seconds))) if self.steps is None else (" steps", self.steps)
        done = facts["step"] if self.minutes is None else min(round(facts["seconds"]), total)
        with progress_bar(None, "distilling", self.progress, total=total, initial=done, unit=unit) as bar:
            while self._share() < 1.0:
                before = [(buffer, buffer.clone()) for buffer in self.supernet.buffers()]
                try:
                    losses = self._step()
                except TrainingError:
                    self.optimizer.zero_grad(set_to_none=True)
                    with torch.no_grad():
                        for buffer, value in before:
                            buffer.copy_(value)
                    self._save(state)
                    raise
                facts["step"] += 1
                facts["seconds"] = agreed(time.perf_counter() - began)
                self._note(losses)
                self.stream.mark()
                named = zip(("largest", "smallest", "random"), losses, strict=True)
                bar.set_postfix({name: f"{loss:.3g}" for name, loss in named}, refresh=False)
                place = facts["step"] if self.minutes is None else min(round(facts["seconds"]), total)
                bar.update(place - bar.n)
                often = max(SAVE_EVERY_S, state.cost_s / SAVING)
                every = often if self.save_every_s is None else self.save_every_s
                if time.perf_counter() - saved >= every and self._share() < 1.0:
                    self._save(state)
                    saved = time.perf_counter()
        self._save(state)

    def _share(self) -> float:
        """Return which share of the training is done."""
        if self.steps is not None:
            return float(self.facts["step"]) / self.steps
        return float(self.facts["seconds"]) / self._seconds

    @property
    def _seconds(self) -> float:
        """The time of all steps."""
        total = 60 * (self.minutes or 1.0)
        return max(total - float(self.facts["others"]), LEAST_TRAINING * total)

    def _step(self) -> tuple[float, float, float]:
        """Take one step; return the losses of the largest, the smallest and the random subnets."""
        optimizer, share = self.optimizer, self._share()
        if self.rate is not None:
            rising = (share + 1e-3) / WARM_UP
            factor = min(1.0, rising) * 0.5 * (1.0 + math.cos(math.pi * share))
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
        chosen = self._chosen()
        optimizer.zero_grad(set_to_none=True)
        sums = dict.fromkeys(chosen, 0.0)
        for _ in range(self.accumulate):
            for spec, loss in self._gradients(chosen).items():
                sums[spec] += loss / self.accumulate
        if self.processes > 1:
            average_gradients(self.supernet)
        self.scaler.unscale_(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(held, self.clip))
        # A scaler takes no step where gradients overflow, and scales them less: below 1, it is of no use.
        if not math.isfinite(norm) and not (self.scaler.is_enabled() and self.scaler.get_scale() >= 1.0):
            raise self._not_finite(f"the norm of the gradients is {norm}")
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        largest, *others = sums.values()
        rest = others[1:] or others or [largest]
        return largest, (others or [largest])[0], sum(rest) / len(rest)

    def _gradients(self, chosen: list[SubnetSpec]) -> dict[SubnetSpec, float]:
        """Add the gradients of one batch; return the losses."""
        task, device = self.task, self.supernet.device
        x, labels = task.split(self.stream.next(), device)
        first: list[Tensor] = []

        def backward(total: Tensor) -> None:
            magnitude = total.detach()
            if not magnitude.isfinite() and self.processes == 1:  # Otherwise the average will not be, either.
                raise self._not_finite(f"a loss is {float(magnitude)}")
            first.append(magnitude)
            if self.balance:
                total = total * (first[0] / magnitude.clamp(min=1e-6))
            torch.autograd.backward(self.scaler.scale(total / self.accumulate))

        with nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast):
            wanted = None if self.stored is None else self.stored(x, self.stream.epoch == 0).to(device)
            return sandwich_step(
                self.supernet,
                x,
                labels,
                rng=random.Random(),
                loss=task.loss,
                output=lambda output: output if output is wanted else task.output(output, x),
                subnets=chosen,
                distillation=self.distillation if self.learns else 1.0,
                divergence=lambda student, teacher: task.divergence(student, teacher, labels),
                teacher=self.teacher if wanted is None else lambda *_, **__: wanted,
                backward=backward,
            )

    def _chosen(self) -> list[SubnetSpec]:
        """Return the subnets of a step; one half of the random ones have about the same size everywhere."""
        space, rng = self.supernet.space, random.Random(f"{self.seed}/{self.facts['step']}")
        found = [space.largest(), space.smallest()]
        for _ in range(self.random_subnets):
            even = rng.random() < 0.5
            found.append(even_subnet(space, rng.random()) if even else space.sample(rng))
        return list(dict.fromkeys(spec.base for spec in found))

    def _note(self, losses: tuple[float, ...]) -> None:
        """Keep the losses of evenly distributed steps, a bounded number."""
        kept, step = self.facts["losses"], self.facts["step"]
        every = 1
        while step > every * MOST_LOSSES:
            every *= 2
        if kept and len(kept) >= MOST_LOSSES:
            kept[:] = [entry for entry in kept if entry[0] % every == 0]
        if step % every == 0:
            kept.append([step, *losses])

    def _save(self, state: TrainingState) -> None:
        try:
            state.save({**self.facts, "stream": self.stream.facts()})
        except WriteError as error:
            warn_caller(
                f"the training goes on, and saves again later: {error}; what was trained is in the supernet",
                RuntimeWarning,
            )

    def _not_finite(self, what: str) -> TrainingError:
        return TrainingError(
            f"step {self.facts['step'] + 1}: {what}. The weights are those after step {self.facts['step']}, "
            "which were good; look for NaN in the batches, or give a lower learning_rate or clip"
        )


def even_subnet(space: SubnetSpace, share: float) -> SubnetSpec:
    """Return the float32 subnet with the choice at this share of the way up, from 0 to 1, in every slot."""
    return space.chosen(lambda choices: choices[round((len(choices) - 1) * share)]).base
