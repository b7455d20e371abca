"""One TorchScript file that actuates any registered subnet (design: the row is an argument, never state)."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from torch import Tensor

from subnetact.engine import Engine
from subnetact.latency import LatencyTable
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet

__all__ = ["to_torchscript"]


def to_torchscript(
    source: Engine | Supernet,
    path: str | PathLike[str],
    subnets: Sequence[SubnetSpec] | None = None,
    *,
    table: LatencyTable | None = None,
    policy: SlackFit | None = None,
    inputs: Sequence[str] | None = None,
    example: Tensor | Sequence[Tensor] | None = None,
    freeze: bool = False,
    allow_uncalibrated: bool = False,
) -> None:
    """Write one TorchScript file that holds the weights once and runs any registered subnet."""
    raise NotImplementedError
