"""CalibrationNorm: a BatchNorm while it is calibrated, which averages the statistics of batches."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from subnetact.errors import SpecError
from subnetact.files.tensors import tensor_from_json, tensor_to_json
from subnetact.operators.subnet_norm import CUMULATIVE_UNBIASED, SubnetNorm
from subnetact.operators.view_module import mix_in_
from subnetact.space import SizeRow

Average: TypeAlias = tuple[int, Tensor, Tensor] | None
"""The weight of what was averaged, the mean and the variance; None before the first batch."""


class CalibrationNorm:
    """The BatchNorm `module` that normalises each batch by its own statistics, and their `average`."""

    def __init__(self, norm: SubnetNorm, row: SizeRow, rule: str | None = None) -> None:
        self.norm = norm
        self.module: Any = norm.bind(row)
        object.__setattr__(self.module, "collector", self)
        mix_in_(self.module, _CollectingForward)
        self.readable = partial(norm.readable, row)
        self._dtype = torch.promote_types(norm.shared_statistics(row)[0].dtype, torch.float32)
        self._unbiased = (rule or norm.rule) == CUMULATIVE_UNBIASED
        self.average: Average = None

    def state(self) -> list[Any] | None:
        """Return everything that `restore` needs, as values that JSON can hold."""
        return (
            None if self.average is None else [self.average[0], tensor_to_json(torch.stack(self.average[1:]))]
        )

    def restore(self, state: list[Any] | None, device: torch.device) -> None:
        """Go on from what `state` returned for the same BatchNorm."""
        if state is not None:
            found, channels = tensor_from_json(state[1]), self.module.num_features
            if found.shape != (2, channels):
                raise ValueError(f"{self.norm.path} has {channels} channels, not {tuple(found.shape)}")
            self.average = int(state[0]), *found.to(device, self._dtype)

    def collect(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Average a batch (N, C, ...) in; return its mean and biased variance, each (C,)."""
        values = x.numel() // x.shape[1]
        if values < (2 if self._unbiased else 1):
            raise SpecError(
                f"{self.norm.path}: a batch of shape {tuple(x.shape)} gives {values} values per channel, the "
                f"{'unbiased ' if self._unbiased else ''}variance needs more; calibrate with larger batches"
            )
        # x may have fewer digits than the statistics, which average many batches.
        mean, var = batch_statistics(x.to(torch.promote_types(x.dtype, self._dtype)))
        weight, new = (1, var * (values / (values - 1))) if self._unbiased else (len(x), var)
        if self.average is None:
            self.average = weight, mean, new
        else:
            before, *old = self.average
            share = weight / (before + weight)
            self.average = before + weight, torch.lerp(old[0], mean, share), torch.lerp(old[1], new, share)
        return mean, var


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of every channel of a batch (N, C, ...), each (C,)."""
    # Axes are averaged one after another as in OFA: another order ends 1e-5 away from its statistics.
    mean = _mean(x)
    deviation = x - mean
    return mean.flatten(), _mean(deviation.mul_(deviation)).flatten()


def _mean(x: Tensor) -> Tensor:
    for axis in (0, *range(2, x.dim())):
        x = x.mean(axis, keepdim=True)
    return x


class _CollectingForward:
    """The mixin of the module: every batch is collected, and normalised with its own statistics."""

    def forward(self: Any, x: Tensor) -> Tensor:
        mean, var = self.collector.readable(self.collector.collect(x))
        object.__setattr__(self, "_buffers", {**self._buffers, "running_mean": mean, "running_var": var})
        return super().forward(x)  # type: ignore[misc, no-any-return]
