"""The one comparator: what is equal within a tolerance, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subnetact.comparison import EXACT, FUSED, ROUNDED, SIXTEEN_BITS, equal, is_as_near

X = torch.linspace(-2, 2, 9)


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "result"),
    [
        (X, X.clone(), EXACT, True),
        (X + 2 * 0.9e-5, X, EXACT, True),
        (X + 2 * 1.1e-5, X, EXACT, False),
        (1e-6 * X, 1.1e-6 * X, ROUNDED, False),
        (1e-6 * X, 1.1e-6 * X, FUSED, True),
        (X, X.double(), SIXTEEN_BITS, False),
        (X, X[:-1], SIXTEEN_BITS, False),
        (X.half() + 0.05, X.half(), EXACT, True),
        (X.half() + 0.2, X.half(), EXACT, False),
        (X.int(), X.int() + 1, SIXTEEN_BITS, False),
        (X / 0, X / 0, EXACT, True),
        (torch.full_like(X, torch.nan), X, SIXTEEN_BITS, False),
        ({"a": [X, 1]}, {"a": [X, 1]}, EXACT, True),
        ({"a": [X, 1]}, {"a": [X, 2]}, EXACT, False),
        ({"a": X}, {"b": X}, EXACT, False),
        ([X], [X, X], EXACT, False),
    ],
)
def test_outputs_are_equal_within_the_tolerance_and_in_structure(
    found: Any, expected: Any, tolerance: Any, result: bool
) -> None:
    assert equal(found, expected, tolerance) is result


def test_an_output_at_a_low_precision_may_be_off_in_another_way_but_not_by_more() -> None:
    noise = torch.tensor([1.0, -1.0] * 4 + [1.0])
    assert is_as_near([X - 0.1 * noise], [X + 0.1 * noise], [X])
    assert not is_as_near([X - 0.3 * noise], [X + 0.1 * noise], [X])
    assert not is_as_near([X], [X, X], [X])
