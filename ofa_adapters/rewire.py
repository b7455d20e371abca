"""Rewiring: the most important heads and neurons of a BERT first, so that a slice keeps them.

DynaBERT's released checkpoints are rewired already; a BERT that was only fine-tuned is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.errors import SpecError
from subnetact.supernet.supernet import Supernet

__all__ = ["Importance", "importance", "rewire_"]

ROWS = {"heads": ("query", "key", "value"), "neurons": ("intermediate",)}
COLUMNS = {"heads": "attention_output", "neurons": "output"}


@dataclass(frozen=True)
class Importance:
    """Of one layer: what each head (heads,) and each neuron (intermediate_size,) changes the loss by."""

    heads: Tensor
    neurons: Tensor


def importance(
    supernet: Supernet,
    batches: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> list[Importance]:
    """Measure what heads and neurons matter, from the gradients of a few batches.

    A head scores the absolute gradient of a mask on it; a neuron the absolute sums of weight times
    gradient over its incoming weights and bias, and over its outgoing weights (DynaBERT section 2.1).
    Scores of batches are added. The supernet is not changed.

    Args:
        supernet: of the `dynabert` family.
        batches: pairs of the network's inputs by name and labels (N,).
        loss: maps logits (N, labels) and labels to a scalar.

    Raises:
        SpecError: the supernet is of another family, or there are no batches.
    """
    _check(supernet)
    network: Any = supernet.extract(supernet.space.largest()).eval()
    contexts: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        contexts.append(inputs[0])

    for layer in network.layers:
        layer.attention_output.register_forward_pre_hook(keep)
    totals: list[Importance] = []
    for inputs, labels in batches:
        contexts.clear()
        network.zero_grad()
        loss(network(**inputs), labels).backward()  # type: ignore[no-untyped-call]
        found = [_scores(layer, context) for layer, context in zip(network.layers, contexts, strict=True)]
        totals = [_sum(*pair) for pair in zip(totals, found, strict=True)] if totals else found
    if not totals:
        raise SpecError("importance needs at least one batch, got none; a generator can be read only once")
    return totals


def _scores(layer: Any, context: Tensor) -> Importance:
    with torch.no_grad():
        per_feature = (context * _gradient(context)).sum((0, 1))
        heads = per_feature.view(-1, layer.head_size).sum(1).abs()
        up, down = layer.intermediate, layer.output
        incoming = (up.weight * up.weight.grad).sum(1) + up.bias * up.bias.grad
        outgoing = (down.weight * down.weight.grad).sum(0)
        return Importance(heads, incoming.abs() + outgoing.abs())


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _sum(a: Importance, b: Importance) -> Importance:
    return Importance(a.heads + b.heads, a.neurons + b.neurons)


def rewire_(supernet: Supernet, scores: list[Importance]) -> None:
    """Sort every layer's heads and neurons in place, the most important first.

    The full network computes what it did; views follow, as with any change of the weights.

    Args:
        supernet: of the `dynabert` family.
        scores: one per layer, from `importance`.

    Raises:
        SpecError: the supernet is of another family, or the scores are of other layers.
    """
    _check(supernet)
    network: Any = supernet.network
    layers = list(network.layers._modules.values())
    size = layers[0].head_size
    shapes = [(len(layer.query.weight) // size, len(layer.intermediate.weight)) for layer in layers]
    given = [(len(score.heads), len(score.neurons)) for score in scores]
    if shapes != given:
        raise SpecError(f"dynabert: scores of (heads, neurons) {given} do not fit layers of {shapes}")
    with torch.no_grad():
        for layer, score in zip(layers, scores, strict=True):
            order = score.heads.argsort(descending=True, stable=True)
            features = (order[:, None] * size + torch.arange(size, device=order.device)).flatten()
            _permute(layer, "heads", features)
            _permute(layer, "neurons", score.neurons.argsort(descending=True, stable=True))


def _permute(layer: Any, what: str, order: Tensor) -> None:
    for name in ROWS[what]:
        linear = getattr(layer, name)
        order = order.to(linear.weight.device)
        linear.weight.copy_(linear.weight[order])
        linear.bias.copy_(linear.bias[order])
    columns = getattr(layer, COLUMNS[what])
    columns.weight.copy_(columns.weight[:, order])


def _check(supernet: Supernet) -> None:
    if supernet.space.name != "dynabert":
        raise SpecError(
            f"{supernet.space.name}: only a BERT has heads and neurons to rewire; load it as dynabert"
        )
