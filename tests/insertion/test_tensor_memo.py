"""What a model remembers between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from subnetact.insertion.tensor_memo import forget_


def test_a_memo_that_is_keyed_by_shape_does_not_grow() -> None:
    network = nn.Linear(2, 2)
    network.memo = {0: torch.zeros(2)}  # type: ignore[assignment]
    forget_(network)
    memo: Any = network.memo
    for key in range(1000):
        memo[key] = torch.zeros(2)
    assert float(memo[999].sum()) == 0
    with pytest.raises(KeyError):
        memo[0]
