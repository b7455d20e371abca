"""PerWidthNorm: BatchNorm with one affine, and statistics for every listed subnet in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.operators.subnet_norm import SubnetNorm
from subnetact.space import Row

__all__ = ["PerWidthBatchNorm2d", "PerWidthNorm"]


class PerWidthBatchNorm2d(nn.Module):
    """BatchNorm over (N, C, H, W) that stores statistics of several widths; as it is, the widest's.

    Args:
        num_features: channels of the full network.
        listed: the channel count of every listed width, in the order of the list.
        eps: added to the variance.
        momentum: of the running statistics in training.
    """

    def __init__(
        self, num_features: int, listed: Sequence[int], eps: float = 1e-5, momentum: float = 0.1
    ) -> None:
        super().__init__()
        self.listed = tuple(listed)
        self.num_features = num_features
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(self.num_features))
        self.bias = nn.Parameter(torch.zeros(self.num_features))
        for i, channels in enumerate(self.listed):
            self.register_buffer(f"running_mean_{i}", torch.zeros(channels))
            self.register_buffer(f"running_var_{i}", torch.ones(channels))
            self.register_buffer(f"num_batches_tracked_{i}", torch.tensor(0))
        self.widest = self.listed.index(max(self.listed))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of the widest."""
        mean, var = (self.get_buffer(f"running_{what}_{self.widest}") for what in ("mean", "var"))
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)


class PerWidthNorm(SubnetNorm):
    """A SubnetNorm whose checkpoint brings statistics per listed width (US-Nets).

    Follows `channels`, and `position`, which is one more than the position in the list. Until a
    subnet is calibrated it runs on the statistics listed for it.
    """

    parts = ("channels", "position")

    def __init__(self, template: nn.Module, path: str, dims: Mapping[str, int]) -> None:
        super().__init__(template, path, dims)
        if isinstance(template, PerWidthBatchNorm2d):
            with torch.device("meta"):
                plain = nn.BatchNorm2d(template.num_features, template.eps, template.momentum)
            self.__dict__["template"] = plain.train(template.training)
            self.listed = template.listed

    def check(self) -> None:
        """Refuse modules that are not PerWidthBatchNorm2d."""
        if not hasattr(self, "listed") or "position" not in self.dims:
            raise self.refuse("only PerWidthBatchNorm2d, with a dimension for 'position', lists statistics")

    def full(self, part: str) -> int:
        """Return the number of channels, or of listed widths."""
        return len(self.listed) if part == "position" else super().full(part)

    def sizes(self, row: Row) -> tuple[int, ...]:
        """Return the channels; the position decides the statistics only."""
        return (self.size("channels", row),)

    def shared_statistics(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return the mean and variance listed for the subnet."""
        position = self.size("position", row) - 1
        mean: Any = self._buffers[f"running_mean_{position}"]
        var: Any = self._buffers[f"running_var_{position}"]
        return mean.data, var.data

    def batches_tracked(self) -> Tensor:
        """Return the widest's counter of training batches."""
        counter: Any = self._buffers[f"num_batches_tracked_{self.listed.index(max(self.listed))}"]
        return counter  # type: ignore[no-any-return]
