"""CalibrationNorm: a subnet's BatchNorm while it is calibrated."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.errors import SpecError
from subnetact.operators.subnet_norm import (
    BATCH_NORMS,
    CUMULATIVE_UNBIASED,
    WEIGHTED_BIASED,
    SubnetNorm,
)
from subnetact.operators.view_module import mix_in_, module_class
from subnetact.space import Row

__all__ = ["CalibrationNorm", "batch_statistics"]


class CalibrationNorm:
    """Gives a subnet's BatchNorm each batch's own mean and biased variance, and averages them by a rule.

    Args:
        norm: the operator.
        row: the subnet's sizes.
        rule: one of `CALIBRATION_RULES`; None = the norm's own.
        spread: whether to follow how much the batches differ, for `error`.

    Attributes:
        module: the BatchNorm to put into the network, of the class it has there.
        average: mean and variance so far, each of shape (channels,), then, with `spread`, the summed
            squares of the batches' deviations from either; None before the first batch.
        batches: how many batches were averaged.
        weight: the sum of their weights, and `weight_squares` of the squares.
        paused: whether further batches are normalised only.
    """

    def __init__(self, norm: SubnetNorm, row: Row, rule: str | None = None, spread: bool = False) -> None:
        self.norm = norm
        self.module: Any = norm.bind(row)
        self.plain = module_class(self.module) in BATCH_NORMS
        object.__setattr__(self.module, "collector", self)
        mix_in_(self.module, _Collecting)
        self._unbiased = (rule or norm.rule or WEIGHTED_BIASED) == CUMULATIVE_UNBIASED
        self._spread = spread
        self.paused = False
        self.reset()

    def reset(self) -> None:
        """Forget every batch."""
        self.average: tuple[Tensor, ...] | None = None
        self.batches = self.weight = self.weight_squares = 0

    def collect(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Take an input of shape (N, C, ...) into the average; return its mean and biased variance.

        Raises:
            SpecError: there are too few values per channel for the rule.
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
        """Collect a batch and return it normalised."""
        norm = self.module
        mean, var = self._as_affine(*self.collect(x))
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)

    def _as_affine(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.module.weight
        return (mean, var) if weight is None else (mean.to(weight.dtype), var.to(weight.dtype))

    def error(self) -> float:
        """Return the larger standard error of the two averages, relative to the layer.

        Over the channels, the root of the mean square: of the mean's standard errors, divided by the
        layer's standard deviation, and of the variance's, divided by the layer's variance (the mean
        over the channels, plus eps). Infinite before the second batch.
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
    """Return the mean and biased variance of every channel of x, of shape (N, C, ...).

    One axis after another, in the order of OFA's `set_running_statistics`: rounding grows from layer to
    layer, so another order ends 1e-5 away from upstream's statistics.
    """
    if x.dtype in (torch.float16, torch.bfloat16):  # whose squares overflow or vanish
        mean, var = batch_statistics(x.float())
        return mean.to(x.dtype), var.to(x.dtype)
    mean = _mean(x)
    deviation = x - mean
    return mean.flatten(), _mean(deviation.mul_(deviation)).flatten()


def _mean(x: Tensor) -> Tensor:
    for axis in (0, *range(2, x.dim())):
        x = x.mean(axis, keepdim=True)
    return x


class _Collecting:
    def forward(self: Any, x: Tensor) -> Tensor:
        collector: CalibrationNorm = self.collector
        if collector.plain:
            return collector.normalise(x)
        mean, var = collector._as_affine(*collector.collect(x))
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        return super().forward(x)  # type: ignore[misc, no-any-return]
