"""TrainingRun: the steps of a distillation, from any step on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import TrainingError, WriteError
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.load import warn_caller
from subnetact.supernet.supernet import Supernet
from subnetact.training.batch_stream import BatchStream
from subnetact.training.processes import agreed, rank_and_count
from subnetact.training.progress_bar import progress_bar
from subnetact.training.sandwich import average_gradients, sandwich_step
from subnetact.training.settings import Distillation
from subnetact.training.state import TrainingState
from subnetact.training.task import Lesson, Task

WARM_UP = 0.05
"""The share of the training in which the learning rate rises."""
MOST_LOSSES = 400
"""The losses of at most this many steps are kept."""
SAVE_EVERY_S, SAVING = 60.0, 0.05
"""How often a run saves that was not told: so often, but not for a larger share of the time."""
LEAST_TRAINING = 0.5
"""So much of the minutes is left to the steps, however long the rest takes."""


class TrainingRun:
    """The steps of a distillation.

    In the `facts` are the `seconds` of the steps, and those that `others` take beside them. With the
    `buffers` are copies of the last save.
    """

    def __init__(
        self, supernet: Supernet, settings: Distillation, batches: Iterable[Any], task: Task, teacher: Any
    ) -> None:
        self.supernet, self.settings, self.task, self.teacher = supernet, settings, task, teacher
        self.stream = BatchStream(batches, settings.seed, *rank_and_count())
        trained = [parameter for parameter in supernet.parameters() if parameter.requires_grad]
        self.optimizer = settings.optimizer or torch.optim.AdamW(trained, settings.learning_rate)
        scaled = settings.autocast is torch.float16
        self.scaler = torch.amp.GradScaler(supernet.device.type, enabled=scaled)
        self.facts: dict[str, Any] = {}
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def go_on(self, state: TrainingState) -> None:
        """Take the steps that are left, and save from time to time and at the end."""
        facts, began = self.facts, time.perf_counter() - self.facts["seconds"]
        saved, settings = time.perf_counter(), self.settings
        unit, total = " steps" if settings.steps else " s", settings.steps or max(1, round(self._seconds))
        done = facts["step"] if settings.minutes is None else min(round(facts["seconds"]), total)
        self.buffers = [(buffer, buffer.clone()) for buffer in self.supernet.buffers()]
        with progress_bar("distilling", settings.progress, total=total, initial=done, unit=unit) as bar:
            while self._share() < 1.0:
                try:
                    losses = self._step()
                except TrainingError:
                    self.optimizer.zero_grad(set_to_none=True)
                    for buffer, former in self.buffers:  # The batch is in the running statistics.
                        if not buffer.isfinite().all():
                            buffer.copy_(former)
                    self._save(state)
                    raise
                facts["step"] += 1
                facts["seconds"] = agreed(time.perf_counter() - began)
                self._note(losses)
                self.stream.mark()
                named = zip(("largest", "smallest", "random"), losses, strict=True)
                bar.set_postfix({name: f"{loss:.3g}" for name, loss in named}, refresh=False)
                place = facts["step"] if settings.minutes is None else min(round(facts["seconds"]), total)
                bar.update(place - bar.n)
                often = max(SAVE_EVERY_S, state.cost_s / SAVING)
                every = often if settings.save_every_s is None else settings.save_every_s
                if time.perf_counter() - saved >= every and self._share() < 1.0:
                    self._save(state)
                    saved = time.perf_counter()
        self._save(state)

    def _share(self) -> float:
        """Return which share of the training is done."""
        if self.settings.steps is not None:
            return float(self.facts["step"]) / self.settings.steps
        return float(self.facts["seconds"]) / self._seconds

    @property
    def _seconds(self) -> float:
        """The time of all steps."""
        total = 60 * (self.settings.minutes or 1.0)
        return max(total - float(self.facts["others"]), LEAST_TRAINING * total)

    def _step(self) -> tuple[float, float, float]:
        """Take one step; return the losses of the largest, the smallest and the random subnets."""
        settings, optimizer, share = self.settings, self.optimizer, self._share()
        if settings.optimizer is None:
            rising = (share + 1e-3) / WARM_UP
            factor = min(1.0, rising) * 0.5 * (1.0 + math.cos(math.pi * share))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor
        chosen = self._chosen()
        optimizer.zero_grad(set_to_none=True)
        sums: dict[SubnetSpec, Any] = dict.fromkeys(chosen, 0.0)
        for _ in range(settings.accumulate):
            for spec, loss in self._gradients(chosen).items():
                sums[spec] = sums[spec] + loss / settings.accumulate
        if (processes := rank_and_count()[1]) > 1:
            average_gradients(self.supernet)
        self.scaler.unscale_(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        length = nn.utils.clip_grad_norm_(held, settings.clip)
        # All numbers in one tensor: reading it is what a step waits for.
        scalars = [scalar.to(length.device, torch.float32) for scalar in (*sums.values(), length)]
        *losses, norm = torch.stack(scalars).tolist()
        if processes == 1 and (wild := [loss for loss in losses if not math.isfinite(loss)]):
            raise self._not_finite(f"a loss is {wild[0]}")  # Of several, the average will not be, either.
        # A scaler takes no step where gradients overflow, and scales them less: below 1, it is of no use.
        if not math.isfinite(norm) and not (self.scaler.is_enabled() and self.scaler.get_scale() >= 1.0):
            raise self._not_finite(f"the norm of the gradients is {norm}")
        self.scaler.step(optimizer)
        self.scaler.update()
        if settings.scheduler is not None:
            settings.scheduler.step()
        largest, *others = losses
        rest = others[1:] or others or [largest]
        return largest, (others or [largest])[0], sum(rest) / len(rest)

    def _gradients(self, chosen: list[SubnetSpec]) -> dict[SubnetSpec, Tensor]:
        """Add the gradients of one batch; return the losses."""
        settings, task, device = self.settings, self.task, self.supernet.device
        x, labels = task.split(self.stream.next(), device)
        first, lesson = list[Tensor](), Lesson(task, labels)

        def backward(total: Tensor) -> None:
            first.append(total.detach())
            if settings.balance:
                total = total * (first[0] / first[-1].clamp(min=1e-6))
            torch.autograd.backward(self.scaler.scale(total / settings.accumulate))

        with nullcontext() if settings.autocast is None else torch.autocast(device.type, settings.autocast):
            return sandwich_step(
                self.supernet,
                x,
                labels,
                rng=random.Random(),
                loss=lesson.loss,
                output=lambda output: task.output(output, x),
                subnets=chosen,
                distillation=settings.distillation if task.learns else 1.0,
                divergence=lesson.divergence,
                teacher=self.teacher,
                backward=backward,
            )

    def _chosen(self) -> list[SubnetSpec]:
        """Return the subnets of a step; one half of the random ones have about the same size everywhere."""
        space, rng = self.supernet.space, random.Random(f"{self.settings.seed}/{self.facts['step']}")
        trained, count = self.settings.trained, self.settings.random_subnets
        if trained is not None:
            found = [space.largest(), *rng.sample(trained, min(count, len(trained)))]
        else:
            found = [space.largest(), space.smallest()]
            for _ in range(count):
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
        for buffer, former in self.buffers:
            former.copy_(buffer)
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
