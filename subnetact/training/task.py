"""Tasks: what batches hold, what the outputs of a network mean, and how well a subnet does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, nan
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from subnetact.errors import SpecError, TrainingError
from subnetact.supernet.batches import as_batch, as_pair, describe_input, logits, map_tensors
from subnetact.training.sandwich import IGNORED, Places, counted, cross_entropy, places_of

METRICS = {
    "classes": "accuracy (%)",
    "values": "mean squared error",
    "vectors": "cosine with the teacher",
    "tokens": "perplexity",
}
TASKS = tuple(METRICS)


@dataclass(frozen=True)
class Task:
    """One of `TASKS`, with what the user gave in the place of its parts."""

    name: str
    labels: bool
    own_output: Callable[[Any, Any], Any] | None = None
    own_loss: Callable[[Any, Any], Tensor] | None = None
    own_divergence: Callable[[Any, Any], Tensor] | None = None
    own_metric: Callable[[Any, Any], Any] | None = None

    @property
    def metric(self) -> str:
        """The name of what `measure` measures."""
        if self.own_metric is not None:
            return getattr(self.own_metric, "__name__", type(self.own_metric).__name__)
        agreement = self.name == "classes" and not self.labels
        return "agreement with the teacher (%)" if agreement else METRICS[self.name]

    def split(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Return the inputs and the labels of a batch on a device; without labels, they are None."""
        found, labels = as_batch(batch), None
        if self.labels and isinstance(batch, tuple | list):
            found, labels = as_pair(batch, "training")
        if isinstance(found, dict) and "labels" in found:
            given = found.pop("labels")
            labels = given if labels is None else labels
        if self.name == "tokens":
            if labels is None:
                labels = found.get("input_ids") if isinstance(found, dict) else found
            mask = found.get("attention_mask") if isinstance(found, dict) else None
            if isinstance(labels, Tensor) and mask is not None:
                labels = labels.masked_fill(mask == 0, IGNORED)
            if not isinstance(labels, Tensor) or labels.dim() != 2:
                raise TrainingError(
                    f"a batch of tokens is a tensor (N, tokens) or has them as input_ids, got "
                    f"{describe_input(found)}"
                )
        elif self.labels and labels is None:
            raise TrainingError(
                f"a batch has no labels, got {describe_input(as_batch(batch))}; give pairs (inputs, labels) "
                'or a dictionary with "labels", or labels=False to learn from the teacher alone'
            )
        given = labels if self.labels or self.name == "tokens" else None
        moved = tree_map_only(Tensor, lambda t: t.to(device), given)
        return map_tensors(lambda t: t.to(device), found), moved

    def output(self, output: Any, inputs: Any) -> Any:
        """Return what is learnt of the output of a network, which was called with some inputs."""
        found = (self.own_output or self._usual)(output, inputs)
        if callable(self.own_divergence) and (self.own_loss is not None or not self.labels):
            return found
        if not isinstance(found, Tensor):
            raise TrainingError(
                f"task {self.name!r}: what is learnt is {describe_input(found)}; give output=, a function of "
                "the output and the inputs that returns a tensor, or loss=, divergence= and metric="
            )
        if self.name == "classes" and (found.dim() < 2 or found.shape[1] < 2):
            raise TrainingError(
                f"task 'classes': scores (N, classes, ...) of at least two classes are needed, got "
                f"{describe_input(found)}; of one score z per label, make two: output=lambda z, x: "
                "torch.cat([torch.zeros_like(z), z], 1)"
            )
        return found

    def _usual(self, output: Any, inputs: Any) -> Any:
        """Return the logits, `out` or the first of several outputs; or embeddings, the mean over tokens."""
        found = logits(output)
        if isinstance(found, Mapping):
            only = next(iter(found.values())) if len(found) == 1 else found
            found = found.get("last_hidden_state" if self.name == "vectors" else "out", only)
        if self.name == "vectors" and isinstance(found, Tensor) and found.dim() == 3:
            mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
            kept = torch.ones_like(found[..., :1]) if mask is None else mask.unsqueeze(-1).to(found.dtype)
            return (found * kept).sum(1) / kept.sum(1).clamp(min=1)
        return found

    @property
    def learns(self) -> bool:
        """Whether the largest subnet learns from labels."""
        return self.labels or self.name == "tokens"

    def places(self, scores: Any, labels: Any) -> Places:
        """Return where the scores of a batch count by its labels, once for all subnets: it may wait."""
        if self.name == "tokens":
            if not isinstance(scores, Tensor) or scores.dim() != 3 or scores.shape[:2] != labels.shape:
                raise SpecError(
                    f"tokens: scores of shape (N, tokens, vocabulary) are needed for labels "
                    f"{tuple(labels.shape)}, got {describe_input(scores)}"
                )
            places = places_of(labels[:, 1:] != IGNORED)
            if not labels[:, 1:].numel() or (places is not None and not len(places[0])):
                raise TrainingError("a batch has no token to predict; give sequences of at least two tokens")
            return places
        if self.name != "classes":
            return None
        if self.labels and self.own_loss is None:
            _require_classes(scores, labels)
        return counted(scores, labels, getattr(self.own_loss, "ignore_index", IGNORED))

    def loss(self, output: Any, labels: Any) -> Tensor:
        """Return the loss of an output on the labels."""
        return Lesson(self, labels).loss(output)

    def meter(self) -> Any:
        """Return a new object with `update(output, labels)` and `compute()`, for the metric of one subnet.

        Where the task has no labels, `labels` are the teacher's outputs.
        """
        return copy.deepcopy(self.own_metric) if hasattr(self.own_metric, "update") else _Mean(self)

    def measure(self, output: Any, labels: Any) -> tuple[float, int]:
        """Return a measure of how good outputs are, summed up, and the number that it is of."""
        size = len(next(part for part in tree_leaves(output) if isinstance(part, Tensor)))
        if self.own_metric is not None:
            return number(self.own_metric(output, labels)) * size, size
        if self.name == "tokens":
            places = self.places(output, labels)
            scores, wanted = _next(output[:, :-1], places), _next(labels[:, 1:], places)
            return float(F.cross_entropy(scores.float(), wanted, reduction="sum")), len(wanted)
        if self.name == "classes":
            found, wanted = output.argmax(1), labels.argmax(1) if labels.shape == output.shape else labels
            if found.shape != wanted.shape:
                raise TrainingError(f"labels of shape {tuple(labels.shape)} need metric=, a function of them")
            counts = (wanted >= 0) & (wanted < output.shape[1])
            return 100.0 * int((found == wanted)[counts].sum()), int(counts.sum())
        if self.name == "vectors" and not self.labels:
            return float(F.cosine_similarity(output, labels, dim=-1).mean()) * size, size
        return float(self.loss(output, labels)) * size, size


class Lesson:
    """The labels of one batch of a task; which scores count is found out once for all subnets."""

    def __init__(self, task: Task, labels: Any) -> None:
        self._task, self._labels = task, labels
        self._places: list[Places] = []

    def _places_of(self, scores: Any) -> Places:
        if not self._places:
            self._places.append(self._task.places(scores, self._labels))
        return self._places[0]

    def loss(self, output: Any, _: Any = None) -> Tensor:
        """Return the loss of an output on the labels."""
        task, labels = self._task, self._labels
        if task.own_loss is not None:
            return task.own_loss(output, labels)
        places = self._places_of(output)
        if task.name == "tokens":
            return F.cross_entropy(_next(output[:, :-1], places).float(), _next(labels[:, 1:], places))
        if task.name == "classes":
            if places is not None and not len(places[0]):
                return 0.0 * output.sum()  # type: ignore[no-any-return]
            return F.cross_entropy(output.float(), labels if labels.is_floating_point() else labels.long())
        if output.shape != labels.shape:
            raise TrainingError(
                f"labels of shape {tuple(labels.shape)} do not fit outputs of shape {tuple(output.shape)}; "
                "make them equal, or give loss="
            )
        return F.mse_loss(output.float(), labels.float())

    def divergence(self, student: Any, teacher: Any) -> Tensor:
        """Return how far an output is from that of the teacher."""
        task, places = self._task, self._places_of(student)
        if task.name == "tokens":
            student, teacher, places = _next(student[:, :-1], places), _next(teacher[:, :-1], places), None
        if task.own_divergence is not None:
            if places is not None:  # The scores keep their shape; equal ones teach nothing.
                counting = student.movedim(1, -1)[places]
                student = teacher.movedim(1, -1).index_put(places, counting).movedim(-1, 1)
            return task.own_divergence(student, teacher)
        if task.name in ("classes", "tokens"):
            return cross_entropy(student, teacher, places)
        if task.name == "vectors":
            return (1.0 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).mean()
        return F.mse_loss(student.float(), teacher.float())


def number(value: Any) -> float:
    """Return what a metric of the user says."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"metric: the result is no single number ({error})") from error


class _Mean:
    """The mean of what a task measures, over samples, pixels or tokens."""

    def __init__(self, task: Task) -> None:
        self._task, self._total, self._count = task, 0.0, 0

    def update(self, output: Any, labels: Any) -> None:
        total, count = self._task.measure(output, labels)
        self._total, self._count = self._total + total, self._count + count

    def compute(self) -> float:
        mean = self._total / self._count if self._count else nan
        perplexity = self._task.name == "tokens" and self._task.own_metric is None
        return exp(min(mean, 700.0)) if perplexity else mean


def _require_classes(scores: Tensor, labels: Any) -> None:
    """Refuse labels that `cross_entropy` does not take."""
    if not isinstance(labels, Tensor):
        raise TrainingError(f"labels are a tensor, got {describe_input(labels)}; give loss= for others")
    if labels.is_floating_point() and labels.shape == scores.shape:  # probabilities
        return
    fitting = scores.shape[:1] + scores.shape[2:]
    if labels.is_floating_point() or labels.shape != fitting:
        raise TrainingError(
            f"labels are whole numbers of shape {tuple(fitting)} for scores of shape {tuple(scores.shape)}, "
            f"got {describe_input(labels)}; resize the scores with output=, or give loss="
        )
    classes = scores.shape[1]
    unknown = labels[((labels < 0) & (labels != IGNORED)) | (labels >= classes)]
    if len(unknown):
        raise TrainingError(
            f"a label is {int(unknown[0])}, but the classes are 0 to {classes - 1}; mark what does not count "
            f"with {IGNORED}, or give loss= with its ignore_index"
        )


def _next(tokens: Tensor, places: Places) -> Tensor:
    """Return those (M, ...) of tokens (N, tokens, ...) that count."""
    return tokens.flatten(0, 1) if places is None else tokens[places]
