"""Which outputs hold numbers that are not finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from subnetact.serving.live.finite import not_finite


@pytest.mark.parametrize(
    "bad",
    [
        *(torch.tensor([1.0, math.nan]), torch.full((100, 100), math.inf)),
        torch.tensor(-math.inf, dtype=torch.float16),
        *(math.nan, np.array([1.0, math.inf]), np.float32("nan"), [0.0, math.inf]),
        (torch.zeros(2), {"scores": torch.tensor([math.nan])}),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_is_not_finite_is_found_among_others_of_its_kind(bad: Any) -> None:
    good = _finite(bad)
    assert not_finite([good, bad, good, bad]) == [1, 3]
    assert not_finite([good, good]) == []
    assert not_finite(["another kind", bad]) == [1]


def _finite(value: Any) -> Any:
    """Return a value of the same form whose numbers are all finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_finite, value))
    return torch.nan_to_num(value) if isinstance(value, torch.Tensor) else np.nan_to_num(value)


@pytest.mark.parametrize(
    "fine",
    [
        *(torch.full((4,), 3e38), torch.full((3,), 6e4, dtype=torch.float16)),
        torch.ones(2, dtype=torch.bool),
        *(1e308, "text", None, np.array(["a"]), np.array([object()]), torch.zeros(0), (), [], {}),
        *(torch.eye(2).to_sparse(), torch.tensor([1 + 2j]), [np.zeros(3), "a", torch.zeros(1)]),
    ],
    ids=lambda fine: type(fine).__name__,
)
def test_what_is_finite_or_holds_no_numbers_passes(fine: Any) -> None:
    assert not_finite([fine, fine]) == []
    assert not_finite([fine, math.nan]) == [1]
