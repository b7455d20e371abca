"""The one comparator: what is equal within a tolerance, and what is not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from subnetact.comparison import EXACT, FUSED, MASKED, ROUNDED, SIXTEEN_BITS, equal, is_as_near, tensors_in
from subnetact.errors import InsertError

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
def test_outputs_are_equal_within_a_tolerance(
    found: Any, expected: Any, tolerance: Any, result: bool
) -> None:
    assert equal(found, expected, tolerance) is result


def test_outputs_at_low_precision_and_complex_numbers_are_compared_as_they_are() -> None:
    noise = torch.tensor([1.0, -1.0] * 4 + [1.0])
    assert is_as_near([X - 0.1 * noise], [X + 0.1 * noise], [X])
    assert not is_as_near([X - 0.3 * noise], [X + 0.1 * noise], [X])
    assert not is_as_near([X], [X, X], [X])
    numbers = torch.complex(X, X.flip(0))
    assert equal(numbers * (1 + 1e-6), numbers, ROUNDED)
    assert not equal(numbers.conj(), numbers, MASKED)
    assert not equal(numbers * 1j, numbers, MASKED)


class Holder:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class Answer(NamedTuple):
    scores: torch.Tensor
    rest: Any


class DynamicCache(Holder):
    """A cache by its name."""


def circle() -> Holder:
    outer = Holder(x=X)
    vars(outer)["inner"] = {"outer": outer, "x": [X + 1, outer]}
    return outer


@pytest.mark.parametrize(
    ("output", "count"),
    [
        (X, 1),
        ([X, (X, {"a": X})], 3),
        (Answer(X, None), 1),
        (Holder(x=X, y=[X], z="text", n=3, nothing=None), 2),
        (Slotted(X), 1),
        (Slotted(Slotted([X, X])), 2),
        (X.numpy(), 1),
        (np.array(["text"]), 0),
        (Normal(X, torch.tensor(0.1), validate_args=False), 2),
        (circle(), 2),
        ([Holder(x=X)] * 3, 1),
        ([X, DynamicCache(key=X, value=X)], 1),
        (Holder(x=X, past=DynamicCache(key=X)), 1),
        (Holder(x=X, function=lambda: X, rows=iter([X])), 1),
        (Holder(x=X, kind=Holder, part=torch.nn.Linear(2, 2)), 1),
    ],
)
def test_tensors_are_found_once_in_objects_and_circles_but_not_in_caches(output: Any, count: int) -> None:
    tensors = tensors_in(output)
    assert len(tensors) == count
    assert all(tensor.shape[-1:] in ((9,), ()) for tensor in tensors)


@pytest.mark.parametrize("output", [iter([X]), (x for x in [X]), lambda: X, [X, {"a": map(abs, [X])}]])
def test_an_iterator_or_a_function_in_an_output_is_refused(output: Any) -> None:
    with pytest.raises(InsertError, match="in which tensors cannot be followed"):
        tensors_in(output)


@pytest.mark.parametrize("large", [-1e9, 1e6, -1e4, float(torch.finfo(torch.float32).min), float("-inf")])
@pytest.mark.parametrize("tolerance", [EXACT, ROUNDED, MASKED])
def test_a_large_number_that_is_equal_allows_nothing(large: float, tolerance: Any) -> None:
    beside = torch.tensor([large])
    assert equal(torch.cat([X, beside]), torch.cat([X, beside]), tolerance)
    assert not equal(torch.cat([1.01 * X, beside]), torch.cat([X, beside]), tolerance)


@pytest.mark.parametrize(
    ("differing", "dtype", "result"),
    [(0, torch.int64, True), (1, torch.int64, True), (1, torch.bool, True), (3, torch.int64, False)],
)
def test_a_share_of_whole_numbers_may_differ(differing: int, dtype: torch.dtype, result: bool) -> None:
    expected = torch.zeros(200, dtype=dtype)
    output = expected.clone()
    output[:differing] = 1
    assert equal(output, expected, ROUNDED._replace(unequal=0.01)) is result
    assert equal(output, expected, ROUNDED) is (differing == 0)
