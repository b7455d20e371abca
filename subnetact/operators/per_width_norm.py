"""PerWidthNorm: BatchNorm with one weight and bias and, in the checkpoint, statistics of several widths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.operators.subnet_norm import SubnetNorm
from subnetact.space import SizeRow


class PerWidthBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm over (N, C, H, W) that stores statistics of several widths. By itself, it runs on the widest.

    Args:
        num_features: the number of channels of the full network.
        listed: the number of channels of every listed width, in the order of the list.

    Source:
        Universally Slimmable Networks (Yu and Huang, 2019).
    """

    def __init__(self, num_features: int, listed: Sequence[int]) -> None:
        super().__init__(num_features, track_running_stats=False)
        self.listed = tuple(listed)
        for i, channels in enumerate(self.listed):
            self.register_buffer(f"running_mean_{i}", torch.zeros(channels))
            self.register_buffer(f"running_var_{i}", torch.ones(channels))
            self.register_buffer(f"num_batches_tracked_{i}", torch.tensor(0))
        self.widest = self.listed.index(max(self.listed))

    def forward(self, input: Tensor) -> Tensor:
        """Return the `input`, of shape (N, C, H, W), normalised with the statistics of the widest."""
        mean, var = (self.get_buffer(f"running_{what}_{self.widest}") for what in ("mean", "var"))
        momentum = self.momentum or 0.0
        return F.batch_norm(input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


class PerWidthNorm(SubnetNorm):
    """A SubnetNorm whose checkpoint has statistics for several listed widths.

    Until a subnet is calibrated, it runs on the statistics that are listed for it.

    Parts:
        channels: the channels. Checkpoints list statistics of first channels, so there are no `Segments`.
        position: which listed statistics: 1 for the first listed width, 2 for the second, and so on. It must
            be described.

    Source:
        Universally Slimmable Networks (Yu and Huang, 2019).
    """

    slices = ("per-width batch norm",)
    parts = ("channels", "position")
    segmented = ()

    def check(self) -> None:
        """Refuse templates that are no PerWidthBatchNorm2d, and descriptions without `position`."""
        if not isinstance(self.template, PerWidthBatchNorm2d) or "position" not in self.dims:
            raise self.refuse("only PerWidthBatchNorm2d, with a dimension for 'position', lists statistics")

    @cached_property
    def shell(self) -> nn.BatchNorm2d:
        """An ordinary BatchNorm with the settings of the template."""
        template = self.template
        return nn.BatchNorm2d(template.num_features, template.eps, template.momentum, device="meta")

    def full(self, part: str) -> int:
        """Return the number of channels of the full network, or the number of listed widths."""
        return len(self.template.listed) if part == "position" else super().full(part)

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return the number of channels. The position decides the statistics only, not the shape."""
        return (self.size("channels", row),)

    def statistics_names(self, row: SizeRow) -> tuple[str, ...]:
        """Return the names of the buffers with the statistics that are listed for the subnet."""
        return tuple(f"{name}_{self.size('position', row) - 1}" for name in super().statistics_names(row))

    def batches_tracked(self) -> Tensor:
        """Return the counter of training batches of the widest."""
        return self.get_buffer(f"num_batches_tracked_{self.template.widest}")
