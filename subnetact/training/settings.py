"""Distillation: how `distill_` trains, measures and saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from subnetact.errors import TrainingError
from subnetact.insertion.importance import Measure
from subnetact.spec import SubnetSpec
from subnetact.training.task import TASKS, Task

Function = Callable[[Any, Any], Any]

AUTO = "auto"
RANGES = {
    "clip": (1e-9, math.inf),
    "distillation": (0.0, 1.0),
    "learning_rate": (0.0, 1e3),
    "minutes": (1e-9, math.inf),
    "save_every_s": (0.0, math.inf),
}
LEAST = {"accumulate": 1, "calibration": 1, "random_subnets": 0, "seed": 0, "steps": 1}
SAME = ("accumulate", "autocast", "balance", "clip", "distillation", "random_subnets", "seed")
"""The settings that must be the same again when a training is resumed, beside those with names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation:
    """How `distill_` trains, measures and saves.

    Attributes:
        steps: the number of steps of the optimizer. Give either this or `minutes`.
        minutes: the time of everything, with earlier parts if it is resumed: measuring, sorting, the steps,
            and measuring in the end, which is reckoned to take as long as at first. Each time, as many
            held-out batches are measured as a twentieth of it allows, at least one. The steps get one
            half of the minutes at least, and the last one is not cut short.
        task: what the network returns. "classes": scores (N, classes), or (N, classes, H, W) of pixels, where
            the label -100 does not count; "values": numbers; "vectors": embeddings (N, features), or
            (N, tokens, features), which are averaged over the tokens that `attention_mask` keeps; "tokens":
            scores (N, tokens, vocabulary) of a language model.
        labels: whether batches are pairs (inputs, labels); dictionaries may have the entry "labels" instead.
            Without labels, subnets learn from the teacher alone. If None, True for classes and values. For
            tokens without labels, the inputs, or their `input_ids`, are the labels: every token but
            the first one is predicted from those before it, unless `attention_mask` is 0 or the label -100.
        subnets: the subnets that are measured and calibrated. If None, five from the largest to the smallest.
            They do not decide what is trained.
        trained: the subnets that are trained beside the largest one, those of `LayerScores.best` or `front`
            for example: every step draws `random_subnets` of them. If None, the smallest subnet and random
            ones are.
        importance: how to sort first; see `reorder_`. "taylor" uses the first `calibration` batches. None for
            a supernet whose narrow subnets were trained before: they would be lost. "auto": what can be
            sorted, by "taylor" for tokens and else by "l1", but nothing in supernets of published families.
        learning_rate: the highest one of AdamW, which rises for 5 % of the training and then falls to 0 like
            a cosine; if `optimizer` is None.
        optimizer: of the parameters of the supernet, new; `scheduler` may change its learning rate.
        scheduler: an object whose `step` is called after every step of `optimizer`.
        clip: the largest norm of the gradients; larger ones are scaled down.
        accumulate: the number of batches per step of the optimizer.
        autocast: torch.bfloat16 or torch.float16 to compute in 16 bits what torch's autocast allows; the
            weights stay as they are. With float16, gradients are scaled.
        random_subnets: the number of random subnets per step.
        distillation: share, from 0 to 1, of the teacher in the loss of those that learn from it; the rest are
            the labels.
        divergence: what subnets minimise to be like the teacher, a function of the two outputs. If None, the
            cross-entropy for scores, the squared error for values, and one minus the cosine for vectors.
            Scores of classes are the teacher's in both where a label does not count.
        balance: whether the losses of all subnets are scaled to that of the first one, so that a bad subnet
            does not dominate the shared weights.
        loss: a function of outputs and labels instead of the one of the task: cross-entropy or squared error.
        metric: a function of outputs and labels for the report, whose mean over samples is shown, or an
            object with `update(outputs, labels)` and `compute()`, such as a metric of torchmetrics, which is
            copied for every subnet. Without labels, it gets the teacher's outputs.
        output: a function of what the network returns and of the inputs, which returns the tensor that is
            learnt. If None, the network's `logits` or `out`, or the first of several outputs.
        calibration: the number of training batches for BatchNorm statistics and for "taylor".
        resume: a file for unfinished work. If it exists, the training goes on from there, and the report
            is that of an uninterrupted run, up to rounding. Begin with the same supernet, untrained, and
            the same batches in the same order. Batches of an unfinished epoch are read once more.
        save_every_s: the time in seconds between two writes of `resume`, which has the size of the weights
            and the state of the optimizer. If None, 60, or so many that a twentieth of the time goes into
            writing. If the disk is full, the training warns, goes on and tries again.
        seed: decides the random subnets and seeds torch, NumPy and `random`, whose states are kept.
        progress: if True, show on standard error what is done and how far it is, with the losses: as bars
            on a terminal, elsewhere as a line every 20 seconds.

    Raises:
        TrainingError: a setting is out of its range, or contradicts another one.
    """

    steps: int | None = None
    minutes: float | None = None
    task: str = "classes"
    labels: bool | None = None
    subnets: Sequence[SubnetSpec] | None = None
    trained: Sequence[SubnetSpec] | None = None
    importance: str | Measure | None = AUTO
    learning_rate: float = 3e-4
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    clip: float = 1.0
    accumulate: int = 1
    autocast: torch.dtype | None = None
    random_subnets: int = 2
    distillation: float = 1.0
    divergence: Function | None = None
    balance: bool = False
    loss: Function | None = None
    metric: Function | None = None
    output: Function | None = None
    calibration: int = 8
    resume: str | PathLike[str] | None = None
    save_every_s: float | None = None
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise TrainingError("give either steps or minutes, to say how long to train")
        for name, (lowest, most) in RANGES.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and lowest <= value <= most):
                raise TrainingError(f"{name}: {value!r} is no number from {lowest:g} to {most:g}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise TrainingError(f"{name}: {value!r} is no whole number of at least {least}")
        if self.trained is not None and not self.random_subnets:
            raise TrainingError("random_subnets: 0 of trained= would be trained; give at least 1")
        if self.task not in TASKS:
            raise TrainingError(f"task: {self.task!r} is unknown; choose from {', '.join(TASKS)}")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise TrainingError(f"autocast: {self.autocast!r}; choose torch.bfloat16, torch.float16 or None")
        stateful = hasattr(self.metric, "update") and hasattr(self.metric, "compute")
        for name in ("divergence", "loss", "output", *(() if stateful else ("metric",))):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TrainingError(f"{name}: {getattr(self, name)!r} is no function")
        if not self.meaning.learns and self.distillation < 1.0:
            raise TrainingError(f"distillation: {self.distillation} needs labels; without them, it is 1.0")

    @property
    def meaning(self) -> Task:
        """What batches hold and what outputs mean."""
        labels = self.task in TASKS[:2] if self.labels is None else self.labels
        return Task(self.task, labels, self.output, self.loss, self.divergence, self.metric)

    def to_json(self) -> dict[str, Any]:
        """Return what must be the same again when a training is resumed; functions by their names."""
        names = {name: name_of(getattr(self, name)) for name in ("divergence", "importance", "loss", "task")}
        rate = self.learning_rate if self.optimizer is None else None
        optimizer = name_of(type(self.optimizer))
        same = {name: getattr(self, name) for name in SAME} | {"autocast": str(self.autocast)}
        same["trained"] = None if self.trained is None else [spec.key for spec in self.trained]
        return {**same, **names, "learning_rate": rate, "optimizer": optimizer}


def name_of(value: Any) -> Any:
    """Return the name of a function or class, for comparisons between two runs."""
    return getattr(value, "__qualname__", value if isinstance(value, str | None) else type(value).__name__)
