"""Importance: scores that say which units (channels, heads or neurons) narrow subnets should keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitWeights:
    """The entries of one weight that belong to the units of a `ChannelGroup`, row i those of unit i.

    Attributes:
        module: the name of the module, as `named_modules` of the model has it.
        operator: the name of the class of its operator, `WeightSlice` for example.
        parameter: the name of its parameter, `weight` or `bias` for example.
        role: `writes` if the entries compute the units, `reads` if they take them as inputs, `keeps` if the
            module passes each unit on by itself, as BatchNorm does.
        values: the entries, of shape (units, entries per unit); what no subnet uses is zero.
        gradient: of the loss, of the same shape; None unless the measure is "taylor", so it is None for an
            own measure.
        inputs: what the loss would change by, to first order, without each input that the entries multiply,
            summed up over places, of shape (units, inputs per unit); None where it is not known.
    """

    module: str
    operator: str
    parameter: str
    role: str
    values: Tensor
    gradient: Tensor | None = None
    inputs: Tensor | None = None


@dataclass(frozen=True)
class ChannelGroup:
    """Units that `reorder_` puts into a new order, and all weights that move with them.

    A function that is given as `reorder_(importance=)` takes a group and returns finite scores of shape
    (units,), the highest for the most important unit, or None to leave the group as it is.

    Attributes:
        name: the first part of a module that computes the units, for example `layer1.0.conv1.out`.
        dimensions: the dimensions of the space that the weights follow.
        units: the number of units, which are channels, neurons or heads.
        weights: the entries of every weight that moves with the units, each with one row per unit.

    Example:
        >>> def by_l2(group: ChannelGroup) -> torch.Tensor:
        ...     return sum(w.values.square().sum(1) for w in group.weights if w.role == "writes")
        >>> reorder_(supernet, by_l2, example=x)
    """

    name: str
    dimensions: tuple[str, ...]
    units: int
    weights: tuple[UnitWeights, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules with weights in the group."""
        return tuple(dict.fromkeys(weight.module for weight in self.weights))


Measure: TypeAlias = Callable[[ChannelGroup], Tensor | None]
"""Returns the score of every unit of a group, of shape (units,), or None to leave the group as it is."""


def by_l1(group: ChannelGroup) -> Tensor | None:
    """Return the sum of absolute weights that compute or read a unit, no biases (Li et al., ICLR 2017)."""
    mixing = [w for w in group.weights if w.role != "keeps" and "bias" not in w.parameter]
    return _total([w.values.abs().sum(1) for w in mixing])


def by_batch_norm(group: ChannelGroup) -> Tensor | None:
    """Return the absolute scale of a unit in the BatchNorms, if there are any (Liu et al., ICCV 2017)."""
    norms = [w for w in group.weights if w.operator == "SubnetNorm" and w.parameter == "weight"]
    return _total([w.values.abs().sum(1) for w in norms])


def by_taylor(group: ChannelGroup) -> Tensor | None:
    """Return the first-order change of the loss without a unit's activations (Molchanov et al., ICLR 2017).

    Where these are not known, it is that without its weights (Molchanov et al., CVPR 2019).
    """
    if inputs := [w.inputs.sum(1) for w in group.weights if w.inputs is not None]:
        return _total(inputs)
    return _total([(w.values * w.gradient).sum(1).abs() for w in group.weights if w.gradient is not None])


def _total(scores: list[Tensor]) -> Tensor | None:
    return torch.stack(scores).sum(0) if scores else None


MEASURES: Mapping[str, Measure] = {"l1": by_l1, "batch_norm": by_batch_norm, "taylor": by_taylor}
"""The measures that `reorder_` knows by name."""
