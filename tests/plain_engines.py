"""Engines for tests that need the subnets, the weights and an example of one, and none of its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import subnetact
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet


def plain_engine(supernet: Supernet, specs: Sequence[SubnetSpec], example: Any) -> subnetact.Engine:
    """Return an engine whose subnets run as views, with BatchNorm statistics of their own or without."""
    return subnetact.Engine(
        supernet, specs, example=example, memory_budget_mb=0, allow_uncalibrated=True, check=False
    )
