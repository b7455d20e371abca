"""When the median of a cell counts as known, and the statistics of its windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnetact.profile.stability import is_stable, median_interval, statistics_of


def windows(*medians: float) -> list[dict[str, np.ndarray]]:
    return [{"host_ms": median * np.linspace(0.9, 1.1, 5)} for median in medians]


@pytest.mark.parametrize("count", [5, 6, 8, 11, 15])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(0)
    draws = rng.exponential(1.0, (4000, count))  # skewed, as latencies are
    held = [low <= np.log(2) <= high for low, high in map(median_interval, draws)]
    assert 0.89 <= np.mean(held) <= 0.98


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_the_interval_is_of_order_statistics(values: list[float]) -> None:
    low, high = median_interval(values)
    if len(values) < 5:
        assert (low, high) == (-math.inf, math.inf)
    else:
        assert low in values
        assert high in values
        assert min(values) <= low <= np.median(values) <= high <= max(values)


def test_a_cell_is_stable_when_its_median_is_known() -> None:
    assert is_stable(windows(1.0, 1.02, 0.98, 1.0, 1.01), 3)
    assert not is_stable(windows(1.0, 1.02, 0.98, 1.0, 1.08), 3)
    assert not is_stable(windows(1.0, 1.0, 1.0, 1.0), 3)  # too few to say
    disturbed = windows(1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.01, 9.0)
    assert is_stable(disturbed, 3)  # a minority of outliers
    assert statistics_of(disturbed, 3, [50])["p50"] == pytest.approx(1.0, rel=0.05)


def test_windows_of_slow_minutes_are_no_independent_samples() -> None:
    slow = [1.2 if 10 <= i % 30 < 20 else 1.0 for i in range(60)]
    spread = [1.2 if i % 3 == 0 else 1.0 for i in range(60)]
    assert sorted(slow) == sorted(spread)
    assert is_stable(windows(*spread), 5)
    assert not is_stable(windows(*slow), 5)


@pytest.mark.parametrize("count", [11, 15, 16, 23, 24, 31, 60])
def test_a_few_disturbed_windows_do_not_make_a_cell_unstable(count: int) -> None:
    values = [1.0] * count
    values[2] = values[-2] = 3.0
    assert is_stable(windows(*values), 3)


def test_statistics_are_of_all_runs_by_clock() -> None:
    one = {"host_ms": np.array([2.0, 3.0]), "device_ms": np.array([1.0, 1.5])}
    found = statistics_of([one] * 5, 5, [50, 99.9])
    assert found["device_p50"] == 1.25
    assert found["p99.9"] > found["p50"] == found["mean"] == 2.5
    assert (found["min"], found["std"], found["device_min"]) == (2.0, 0.5, 1.0)
    assert (found["runs"], found["windows"], found["stable"]) == (10, 5, 1)


def test_a_cell_beside_other_work_is_not_stable_however_alike_its_windows_are() -> None:
    def beside(*busy: float) -> list[dict[str, np.ndarray]]:
        alike = windows(*[1.0] * len(busy))
        return [{**window, "busy": np.array([share])} for window, share in zip(alike, busy, strict=True)]

    assert is_stable(beside(0.0, 0.01, 0.0, 0.02, 0.0), 5)
    assert is_stable(beside(0.0, 0.6, 0.0, 0.6, 0.0), 5)  # a minority
    slow = beside(0.3, 0.35, 0.0, 0.35, 0.4)
    assert not is_stable(slow, 5)
    assert statistics_of(slow, 5, [50])["busy"] == 0.35
    assert "busy" not in statistics_of(windows(1.0), 5, [50])
