"""SubnetNorm: BatchNorm whose mean and variance belong to the subnet, its affine to the supernet."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from subnetact.errors import SpecError
from subnetact.operators.base import Operator
from subnetact.operators.view_module import view_module
from subnetact.space import Row

__all__ = ["BATCH_NORMS", "CALIBRATION_RULES", "CUMULATIVE_UNBIASED", "WEIGHTED_BIASED", "SubnetNorm"]

WEIGHTED_BIASED = "weighted_biased"
CUMULATIVE_UNBIASED = "cumulative_unbiased"
CALIBRATION_RULES = (WEIGHTED_BIASED, CUMULATIVE_UNBIASED)
"""How statistics of batches are averaged: by batch size with biased variances (OFA
`set_running_statistics`), or every batch alike with unbiased ones (BatchNorm without momentum, as
AttentiveNAS and Slimmable Networks calibrate)."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SubnetNorm(Operator):
    """Keeps one (mean, variance) row per subnet and one affine for all (SuperServe section 3.1).

    The parameters `weight[:channels]` and `bias[:channels]` are shared slices. The statistics come
    from a `NormTable`; without a row there, from the first entries of the shared running statistics.
    """

    parts: ClassVar[tuple[str, ...]] = ("channels",)

    rule: str = WEIGHTED_BIASED
    """How calibration averages this norm's batches; one of `CALIBRATION_RULES`."""

    def check(self) -> None:
        """Refuse modules that are not BatchNorm with running statistics."""
        if not isinstance(self.template, BATCH_NORMS):
            raise self.refuse("only BatchNorm has statistics that depend on the subnet")
        if self.template.running_mean is None:
            raise self.refuse("it keeps no running statistics (track_running_stats=False)")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the number of channels of the full network."""
        return int(self.template.num_features)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the affine of the first `channels` channels."""
        (channels,) = sizes
        affine: dict[str, Any] = {"weight": self.weight, "bias": self.bias}
        return {name: None if t is None else t[:channels] for name, t in affine.items()}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the channel count of the subnet's module."""
        return {"num_features": sizes[0]}

    def shared_statistics(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return the first channels of the supernet's own running mean and variance."""
        (channels,) = self.sizes(row)
        mean: Any = self.running_mean
        var: Any = self.running_var
        return mean.data[:channels].data, var.data[:channels].data

    def batches_tracked(self) -> Tensor | None:
        """Return the shared counter of training batches."""
        return self._buffers["num_batches_tracked"]

    def bind_with(self, row: Row, mean: Tensor, var: Tensor, trainable: bool = False) -> nn.Module:
        """Return the BatchNorm of one subnet with the given statistics, each of shape (channels,).

        Raises:
            SpecError: the statistics are of another number of channels.
        """
        sizes = self.sizes(row)
        if self.checks and (mean.shape != sizes or var.shape != sizes):
            raise SpecError(f"{self.path}: the subnet has {sizes[0]} channels, its statistics {mean.numel()}")
        buffers = {
            "running_mean": mean,
            "running_var": var,
            "num_batches_tracked": self.batches_tracked(),
        }
        bound = view_module(
            self.template,
            parameters=self.parameters_of(sizes, trainable),
            buffers=buffers,
            **self.attributes(sizes),
        )
        object.__setattr__(bound, "training", trainable and self.training)
        return bound

    def bind(self, row: Row, trainable: bool = False) -> nn.Module:
        """Return the BatchNorm of one subnet on the supernet's shared statistics."""
        return self.bind_with(row, *self.shared_statistics(row), trainable=trainable)
