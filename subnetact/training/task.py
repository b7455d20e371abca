"""Tasks: what batches hold, what the outputs of a network mean, and how well a subnet does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subnetact.errors import SpecError, TrainingError
from subnetact.supernet.batches import as_batch, as_pair, describe_input, logits, map_tensors
from subnetact.training.sandwich import cross_entropy

__all__ = ["TASKS", "Task"]

METRICS = {
    "classes": "accuracy (%)",
    "values": "mean squared error",
    "vectors": "cosine with the teacher",
    "tokens": "perplexity",
}
TASKS = tuple(METRICS)
IGNORED = -100
"""The label of a token that is not predicted, as transformers and `cross_entropy` of torch have it."""


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
            return getattr(self.own_metric, "__name__", "metric")
        if not self.labels and self.name != "tokens":
            return "agreement with the teacher (%)" if self.name == "classes" else METRICS[self.name]
        return METRICS[self.name]

    def split(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Return the inputs and the labels of a batch on a device; without labels, they are None."""
        found, labels = as_batch(batch), None
        if self.labels and isinstance(batch, tuple | list):
            found, labels = as_pair(batch, "training")
        if isinstance(found, dict) and "labels" in found:
            found = dict(found)
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
        return map_tensors(lambda t: t.to(device), found), map_tensors(lambda t: t.to(device), given)

    def output(self, output: Any, inputs: Any) -> Any:
        """Return what is learnt of the output of a network, which was called with some inputs."""
        found = logits(output)
        if self.own_output is not None:
            return self.own_output(found, inputs)
        if self.name == "vectors":
            if isinstance(found, Mapping):
                found = found.get("last_hidden_state")
            if isinstance(found, Tensor) and found.dim() == 3:
                mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
                kept = torch.ones_like(found[..., :1]) if mask is None else mask.unsqueeze(-1).to(found.dtype)
                return (found * kept).sum(1) / kept.sum(1).clamp(min=1)
        if not isinstance(found, Tensor):
            raise TrainingError(
                f"task {self.name!r}: the network returns {describe_input(found)}; give output=, a function "
                "of the output and the inputs that returns the tensor to learn"
            )
        return found

    def loss(self, output: Any, labels: Any) -> Tensor:
        """Return the loss of an output on the labels."""
        if self.own_loss is not None:
            return self.own_loss(output, labels)
        if self.name == "tokens":
            scores, wanted = _next(output, labels)
            return F.cross_entropy(scores.float(), wanted)
        if self.name == "classes":
            return F.cross_entropy(output.float(), labels)
        if output.shape != labels.shape:
            raise TrainingError(
                f"labels of shape {tuple(labels.shape)} do not fit outputs of shape {tuple(output.shape)}; "
                "make them equal, or give loss="
            )
        return F.mse_loss(output.float(), labels.float())

    def divergence(self, student: Any, teacher: Any, labels: Any) -> Tensor:
        """Return how far an output is from that of the teacher."""
        if self.name == "tokens":
            student, _ = _next(student, labels)
            teacher, _ = _next(teacher, labels)
        if self.own_divergence is not None:
            return self.own_divergence(student, teacher)
        if self.name in ("classes", "tokens"):
            return cross_entropy(student, teacher)
        if self.name == "vectors":
            return (1.0 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).mean()
        return F.mse_loss(student.float(), teacher.float())

    def measure(self, output: Any, labels: Any) -> tuple[float, int]:
        """Return a measure of how good outputs are, summed up, and the number that it is of.

        Where the task has no labels, `labels` are the teacher's outputs.
        """
        size = len(output)
        if self.own_metric is not None:
            return float(self.own_metric(output, labels)) * size, size
        if self.name == "tokens":
            scores, wanted = _next(output, labels)
            return float(F.cross_entropy(scores.float(), wanted, reduction="sum")), len(wanted)
        if self.name == "classes":
            right = output.argmax(1) == (labels if self.labels else labels.argmax(1))
            return 100.0 * float(right.float().mean()) * size, size
        if self.name == "vectors" and not self.labels:
            return float(F.cosine_similarity(output, labels, dim=-1).mean()) * size, size
        return float(self.loss(output, labels)) * size, size

    def value(self, total: float, count: int) -> float:
        """Return the metric from the sums of `measure`."""
        mean = total / count
        return exp(min(mean, 700.0)) if self.name == "tokens" and self.own_metric is None else mean


def _next(scores: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores (M, vocabulary) of the tokens that are predicted, and these tokens (M,)."""
    if not isinstance(scores, Tensor) or scores.dim() != 3 or scores.shape[:2] != labels.shape:
        raise SpecError(
            f"tokens: scores of shape (N, tokens, vocabulary) are needed for labels {tuple(labels.shape)}, "
            f"got {describe_input(scores)}"
        )
    wanted = labels[:, 1:]
    kept = wanted != IGNORED
    if not bool(kept.any()):
        raise TrainingError("a batch has no token to predict; give sequences of at least two tokens")
    if bool(kept.all()):
        return scores[:, :-1].flatten(0, 1), wanted.flatten()
    return scores[:, :-1][kept], wanted[kept]
