"""SandwichTraining: lets a Trainer of transformers train all subnets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from subnetact.errors import TrainingError
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import describe_input, logits
from subnetact.supernet.supernet import Supernet, supernet_of
from subnetact.training.sandwich import IGNORED, average_gradients, cross_entropy, drawn


class SandwichTraining:
    """A mixin for `transformers.Trainer` and its subclasses: every step trains several subnets.

    In every step the largest subnet learns from the labels, the smallest and some random ones from its
    outputs. All else is that of the Trainer: columns, accumulation of gradients, precision, checkpoints,
    evaluation. It logs the loss of the largest subnet, and evaluates the active one, which is the largest;
    `with supernet.running(spec): trainer.evaluate()` evaluates another one. The random subnets depend on the
    seed and the number of the step alone, so that a resumed training draws the same ones.

    Args:
        args: those of the Trainer. The model is the network of a supernet, maybe in an adapter of peft.
        random_subnets: the number of random subnets per step.
        subnets: the subnets to train instead, the teacher first.
        distillation: share, from 0 to 1, of the teacher in the loss of all subnets but the first.
        kwargs: those of the Trainer.

    Raises:
        InsertError: there is no supernet in the model.
        TrainingError: outputs are no class scores of the labels, from which subnets could learn; or the
            checkpoint from which the training goes on is of a supernet with other subnets.

    Example:
        >>> class ElasticTrainer(SandwichTraining, Trainer):
        ...     pass
        >>> trainer = ElasticTrainer(model=supernet.network, args=arguments, train_dataset=data)
        >>> trainer.train()
    """

    def __init__(
        self: Any,
        *args: Any,
        random_subnets: int = 2,
        subnets: Sequence[SubnetSpec] | None = None,
        distillation: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if isinstance(kwargs.get("model"), Supernet):
            kwargs["model"] = kwargs["model"].network
        super().__init__(*args, **kwargs)
        self.supernet = supernet_of(self.model)
        self.random_subnets, self.subnets, self.distillation = random_subnets, subnets, distillation
        self.wanted: Tensor | None = None  # what the first subnet of the step returned
        events = {"on_train_begin": lambda _, __, state, *___, **____: self._require_same_subnets(state)}
        self.add_callback(type("SameSubnets", (import_module("transformers").TrainerCallback,), events))

    def _require_same_subnets(self, state: Any) -> None:
        """Refuse a checkpoint of other subnets; the state of a Trainer is written with its checkpoints."""
        space = {"args": {}, "attributes": {"space": self.supernet.space.id}}
        if state.stateful_callbacks.setdefault("SandwichTraining", space) != space:
            raise TrainingError(
                "the checkpoint is of a supernet with other subnets: insert_ orders layers by the weights "
                "and the example; call supernet.save_pretrained(folder) before the training, and make the "
                "supernet of a resumed one with subnetact.from_pretrained(folder)"
            )

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of all subnets of a step; return the loss of the first."""
        rng = random.Random(f"{self.args.seed}/{self.state.global_step}")
        parallel, losses, self.wanted = isinstance(model, DistributedDataParallel), list[Tensor](), None
        with model.no_sync() if parallel else nullcontext():  # type: ignore[operator]
            for spec in drawn(self.supernet, self.subnets, self.random_subnets, rng):
                with self.supernet.running(spec):
                    loss = super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc]
                losses.append(loss)
        if parallel and self.accelerator.sync_gradients:
            average_gradients(self.supernet, model.process_group)
        return losses[0]

    def compute_loss(
        self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of the subnet that runs, with that of the distillation in training."""
        labels = inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        if model.training and self.distillation:
            scores = logits(outputs)
            if not isinstance(scores, Tensor):
                raise self._no_scores(scores, labels)
            if self.wanted is None:
                self.wanted = scores.detach()
            else:
                apart = self.divergence(scores, self.wanted, labels, num_items_in_batch)
                loss = self.distillation * apart + (1.0 - self.distillation) * loss
        return (loss, outputs) if return_outputs else loss

    def _no_scores(self, scores: Any, labels: Any) -> TrainingError:
        return TrainingError(
            f"distillation: the outputs, {describe_input(scores)}, are no class scores of the labels, "
            f"{describe_input(labels)}; give distillation=0.0, or override divergence"
        )

    def divergence(self: Any, scores: Tensor, wanted: Tensor, labels: Any, number: Any = None) -> Any:
        """Return how far the scores of a subnet, (..., classes), are from those of the teacher.

        It is a mean over the `labels` that count or, as the Trainer's own loss, their sum by the `number` of
        all that count in a step. Override it for a model whose outputs are no class scores.
        """
        # Where it shifts labels, every token predicts the next one.
        if getattr(self, "_loss_shifts_labels", False) and isinstance(labels, Tensor):
            scores, wanted, labels = scores[:, :-1], wanted[:, :-1], labels[:, 1:]
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != scores.shape[:-1]:
            raise self._no_scores(scores, labels)
        counts = labels != IGNORED
        apart = cross_entropy(scores[counts], wanted[counts])
        if number is None or not (self.model_accepts_loss_kwargs or self.compute_loss_func):
            return apart
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return apart * counts.sum() * processes / number
