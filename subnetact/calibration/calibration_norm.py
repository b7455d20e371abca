"""CalibrationNorm: a BatchNorm while it is calibrated, which averages the statistics of batches."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.errors import SpecError
from subnetact.files.tensors import tensor_from_json, tensor_to_json
from subnetact.operators.subnet_norm import (
    BATCH_NORMS,
    CUMULATIVE_UNBIASED,
    WEIGHTED_BIASED,
    SubnetNorm,
)
from subnetact.operators.view_module import mix_in_, module_class
from subnetact.space import SizeRow

__all__ = ["CalibrationNorm", "batch_statistics"]


class CalibrationNorm:
    """A BatchNorm that normalises every batch with the batch's own statistics and averages them.

    With `spread` it also records how much the batches differ, which `error` needs.

    Attributes:
        norm: the operator of the BatchNorm.
        module: the module to put into the network; it has the class that the network expects.
        plain: whether that class is one of PyTorch's own.
        average: the averaged mean and variance so far, each of shape (channels,). With `spread` they are
            followed by the weighted sums of the squared deviations of the batches' means and variances. None
            before the first batch.
        batches: the number of batches that were averaged.
        weight: the sum of the weights of the batches.
        weight_squares: the sum of the squared weights.
        paused: if True, batches are normalised but not averaged.
    """

    def __init__(self, norm: SubnetNorm, row: SizeRow, rule: str | None = None, spread: bool = False) -> None:
        self.norm = norm
        self.module: Any = norm.bind(row)
        self.plain = module_class(self.module) in BATCH_NORMS
        object.__setattr__(self.module, "collector", self)
        mix_in_(self.module, _CollectingForward)
        self._unbiased = (rule or norm.rule or WEIGHTED_BIASED) == CUMULATIVE_UNBIASED
        self._spread = spread
        self.paused = False
        self.reset()

    def reset(self) -> None:
        """Drop the averages of all batches."""
        self.average: tuple[Tensor, ...] | None = None
        self.batches = self.weight = self.weight_squares = 0

    def state(self) -> list[Any]:
        """Return everything that `restore` needs, as values that JSON can hold."""
        average = None if self.average is None else tensor_to_json(torch.stack(self.average))
        return [self.batches, self.weight, self.weight_squares, average]

    def restore(self, state: list[Any], device: torch.device) -> None:
        """Go on from what `state` returned for the same BatchNorm."""
        *counts, average = state
        self.batches, self.weight, self.weight_squares = map(int, counts)
        if average is not None:
            found = tensor_from_json(average)
            shape = (4 if self._spread else 2, self.module.num_features)
            if found.shape != shape:
                raise ValueError(f"{self.norm.path} has averages of shape {shape}, not {tuple(found.shape)}")
            self.average = found.to(device).unbind()

    def collect(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Take a batch (N, C, ...) into the average, and return its mean and biased variance, each (C,).

        With weight w and total weight W so far, the average moves by the share w / W towards the batch:
        w is the batch size (`weighted_biased`), or 1 (`cumulative_unbiased`).
        """
        values = x.numel() // x.shape[1]
        if values < (2 if self._unbiased else 1):
            raise SpecError(
                f"{self.norm.path}: a batch of shape {tuple(x.shape)} gives {values} values per channel, the "
                f"{'unbiased ' if self._unbiased else ''}variance needs more; calibrate with larger batches"
            )
        mean, var = batch_statistics(x)
        if self.paused:
            return mean, var
        stored = mean, var * (values / (values - 1)) if self._unbiased else var
        weight = 1 if self._unbiased else x.shape[0]
        self.batches += 1
        self.weight += weight
        self.weight_squares += weight * weight
        if self.average is None:
            squares = (torch.zeros_like(mean), torch.zeros_like(var)) if self._spread else ()
            self.average = *stored, *squares
        else:
            old, share = self.average, weight / self.weight
            now = tuple(torch.lerp(a, b, share) for a, b in zip(old, stored, strict=False))
            moved = zip(old[2:], stored, old, now, strict=False)
            self.average = *now, *(s + weight * (b - a) * (b - c) for s, b, a, c in moved)
        return mean, var

    def normalise(self, x: Tensor) -> Tensor:
        """Take a batch, of shape (N, C, ...), into the average, and return it normalised."""
        norm = self.module
        mean, var = self._as_affine(*self.collect(x))
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)

    def _as_affine(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.module.weight
        return (mean, var) if weight is None else (mean.to(weight.dtype), var.to(weight.dtype))

    def error(self) -> float:
        """Return the relative standard error of the averages; infinity before the second batch.

        It is the larger of two, each the root mean square over the channels: that of the averaged mean,
        divided by the standard deviation of the layer, and that of the averaged variance, divided by the
        variance of the layer. The variance of the layer is the mean over the channels, plus eps.
        """
        if self.average is None or self.batches < 2:
            return float("inf")
        _, var, *squares = self.average
        # The unbiased variance of weighted samples, and from it that of their weighted average.
        sample = self.weight - self.weight_squares / self.weight
        of_average = self.weight_squares / self.weight**2 / sample
        level = float(var.mean()) + self.module.eps
        mean_error, var_error = (float((s.mean() * of_average).sqrt()) for s in squares)
        return float(max(mean_error / math.sqrt(level), var_error / level))


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of every channel of a batch (N, C, ...), each (C,).

    The axes are averaged one after another, in the order of OFA's `set_running_statistics`. Rounding grows
    from layer to layer, so another order would end 1e-5 away from upstream's statistics.
    """
    if x.dtype in (torch.float16, torch.bfloat16):  # Squares overflow or vanish in these dtypes.
        mean, var = batch_statistics(x.float())
        return mean.to(x.dtype), var.to(x.dtype)
    mean = _mean(x)
    deviation = x - mean
    return mean.flatten(), _mean(deviation.mul_(deviation)).flatten()


def _mean(x: Tensor) -> Tensor:
    for axis in (0, *range(2, x.dim())):
        x = x.mean(axis, keepdim=True)
    return x


class _CollectingForward:
    """The mixin of the module: a forward that collects the statistics of every batch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        collector: CalibrationNorm = self.collector
        if collector.plain:
            return collector.normalise(x)
        mean, var = collector._as_affine(*collector.collect(x))
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        return super().forward(x)  # type: ignore[misc, no-any-return]
