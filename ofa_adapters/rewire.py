"""`rewire_` sorts the heads and neurons of a BERT by importance, so that narrow subnets keep the best ones.

A subnet of the `dynabert` family keeps the first heads and the first neurons of every layer. The checkpoints
that DynaBERT published are sorted already. A BERT that was only fine-tuned is not: call `rewire_` on it
before training or serving narrow subnets.

Source: DynaBERT (Hou et al., NeurIPS 2020), section 2.1, "network rewiring".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.errors import SpecError
from subnetact.insertion.importance import ChannelGroup
from subnetact.insertion.reorder import reorder_
from subnetact.supernet.supernet import Supernet

__all__ = ["Importance", "importance", "rewire_"]


@dataclass(frozen=True)
class Importance:
    """Importance scores of one layer: how much the loss depends on each head and on each neuron.

    Attributes:
        heads: score of every attention head, of shape (heads,).
        neurons: score of every neuron of the feed-forward network, of shape (intermediate_size,).
    """

    heads: Tensor
    neurons: Tensor


def importance(
    supernet: Supernet,
    batches: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> list[Importance]:
    """Measure the importance of every head and neuron from the gradients of a few batches.

    The score of a head is the absolute gradient of the loss with respect to a mask on the head. The score of
    a neuron is the absolute sum of weight times gradient over its incoming weights and bias, plus the same
    over its outgoing weights. Scores are added over the batches. The supernet is not changed.

    Args:
        supernet: a supernet of the `dynabert` family.
        batches: pairs of the network's inputs by name, and the labels (N,).
        loss: maps logits (N, num_labels) and labels to a scalar.

    Returns:
        The scores of every layer, in order, for `rewire_`.

    Raises:
        SpecError: the supernet is of another family, or there are no batches.

    Source: DynaBERT (Hou et al., NeurIPS 2020), section 2.1.
    """
    _check(supernet)
    network: Any = supernet.extract(supernet.space.largest()).eval()
    totals: list[Importance] = []
    for inputs, labels in batches:
        network.zero_grad()
        loss(network(**inputs), labels).backward()  # type: ignore[no-untyped-call]
        found = [_scores(layer) for layer in network.layers]
        totals = list(map(_added, totals, found)) if totals else found
    if not totals:
        raise SpecError("importance needs at least one batch, got none; a generator can be read only once")
    return totals


def _scores(layer: Any) -> Importance:
    """Score by weight times gradient; a head's mask has the gradient of all columns that read the head."""
    up = layer.intermediate
    with torch.no_grad():
        features, incoming, outgoing = (
            module.weight * module.weight.grad for module in (layer.attention_output, up, layer.output)
        )
        heads = features.sum(0).view(-1, layer.head_size).sum(1).abs()
        incoming = incoming.sum(1) + up.bias * up.bias.grad
        return Importance(heads, incoming.abs() + outgoing.sum(0).abs())


def _added(a: Importance, b: Importance) -> Importance:
    return Importance(a.heads + b.heads, a.neurons + b.neurons)


def rewire_(supernet: Supernet, scores: list[Importance]) -> None:
    """Sort the heads and neurons of every layer in place, the most important first, with `reorder_`.

    Every BERT that was only fine-tuned needs this before narrow subnets are trained or served, because a
    subnet keeps the first heads and neurons. The full network computes the same function as before. Existing
    views see the sorted weights, as they see every other change of the weights.

    Args:
        supernet: a supernet of the `dynabert` family.
        scores: the scores of every layer, from `importance`.

    Raises:
        SpecError: the supernet is of another family, or the scores do not fit its layers.

    Example:
        >>> from ofa_adapters import importance, load, rewire_
        >>> supernet = load("dynabert", "fine_tuned_bert/")
        >>> rewire_(supernet, importance(supernet, batches))
    """
    _check(supernet)
    network: Any = supernet.network
    layers = list(network.layers._modules.values())
    size = layers[0].head_size
    shapes = [(len(layer.query.weight) // size, len(layer.intermediate.weight)) for layer in layers]
    given = [(len(score.heads), len(score.neurons)) for score in scores]
    if shapes != given:
        raise SpecError(f"dynabert: scores of (heads, neurons) {given} do not fit layers of {shapes}")
    by_module: dict[str, Tensor] = {}
    for i, score in enumerate(scores):
        by_module |= {f"layers.{i}.query": score.heads, f"layers.{i}.intermediate": score.neurons}

    def scored(group: ChannelGroup) -> Tensor | None:
        return next((by_module[name] for name in group.modules if name in by_module), None)

    words = network.words.weight
    tokens = torch.zeros(1, min(8, len(network.positions.weight) - 1), dtype=torch.long, device=words.device)
    reorder_(supernet, scored, example={"input_ids": tokens})


def _check(supernet: Supernet) -> None:
    if supernet.space.name != "dynabert":
        raise SpecError(
            f"{supernet.space.name}: only a BERT has heads and neurons to rewire; load it as dynabert"
        )
