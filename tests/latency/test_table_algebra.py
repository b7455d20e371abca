"""Interpolation and comparison of latency tables; figures."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import MissingExtra, TableError
from subnetact.latency.plot import plot_front
from subnetact.latency.table import LatencyTable
from subnetact.serving.simulation.datasets import superserve_a40

STAMP = {"device": "cpu", "device_name": "one", "threads": 1, "measured": "today", "note": "same"}


@st.composite
def tables(draw: st.DrawFn) -> LatencyTable:
    rows = draw(st.integers(1, 4))
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=2, max_size=5)))
    cells = draw(
        st.lists(
            st.lists(st.floats(1e-3, 1e4), min_size=len(sizes), max_size=len(sizes)),
            min_size=rows,
            max_size=rows,
        )
    )
    keys = [f"s{i}" for i in range(rows)]
    p99 = [[2 * ms for ms in row] for row in cells]
    return LatencyTable(keys, [50.0 + i for i in range(rows)], sizes, cells, {"p99": p99}, STAMP)


@given(tables(), st.data())
def test_interpolation_passes_through_what_was_measured_and_rises_between(
    table: LatencyTable, data: st.DataObject
) -> None:
    rising = table.monotone()
    sizes = table.batch_sizes
    for i, key in enumerate(table.subnets):
        for j, size in enumerate(sizes):
            assert table.latency_at(i, size) == table.latency_at(key, size) == table.latency_ms[i, j]
    between = sorted(data.draw(st.lists(st.floats(sizes[0], sizes[-1]), min_size=2, max_size=6)))
    values = [rising.latency_at(0, size) for size in between]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(values))
    j = data.draw(st.integers(1, len(sizes) - 1))
    share = data.draw(st.floats(0, 1))
    ends = table.latency_ms[0, j - 1], table.latency_ms[0, j]
    inside = table.latency_at(0, sizes[j - 1] + share * (sizes[j] - sizes[j - 1]))
    assert min(ends) * (1 - 1e-9) <= inside <= max(ends) * (1 + 1e-9)
    for outside in (sizes[0] - 1, sizes[-1] + 1, math.nan):
        with pytest.raises(TableError, match="nothing is extrapolated"):
            table.latency_at(0, outside)


def test_interpolation_is_linear_and_honest_about_cells_that_cannot_run() -> None:
    table = LatencyTable(["a"], [70.0], [2, 4, 8], [[2.0, 6.0, math.nan]])
    assert table.latency_at("a", 3) == 4.0
    assert math.isnan(table.latency_at("a", 5))
    assert table.latency_at("a", 4) == 6.0
    for wrong in ("b", 1, -1, True):
        with pytest.raises(TableError, match="not in the table"):
            table.latency_at(wrong, 2)


def one(key: str, size: int, ms: float, **stamp: Any) -> LatencyTable:
    return LatencyTable([key], [math.nan], [size], [[ms]], stamp={**STAMP, **stamp})


def test_a_comparison_names_the_worst_cell_and_what_differs() -> None:
    first = LatencyTable(
        ["a", "b"], [70.0, 80.0], [1, 2], [[1.0, 2.0], [4.0, math.nan]], {"p50": [[1, 2], [4, 5]]}, STAMP
    )
    second = LatencyTable(
        ["b", "a"], [80.0, 70.0], [1, 2], [[3.0, 5.0], [1.02, 2.0]], stamp={**STAMP, "threads": 2}
    )
    comparison = first.compare(second)
    np.testing.assert_allclose(comparison.ratios, [[1.02, 1.0], [0.75, math.nan]])
    assert comparison.outside(5.0) == [("b", 1, 0.75)]
    assert comparison.only_second == 1
    assert comparison.only_first == 0
    assert dict(comparison.differing) == {"threads": (1, 2)}
    report = comparison.report(5.0)
    assert "median ratio 1.0000, worst 0.7500 at batch size 1 of b" in report
    assert "the most different cell is still 0.0 % off" in first.compare(first.scaled(1.2)).report(5.0)
    assert "1 of 3 cells differ by more than 5 %" in report
    assert "divided by the median ratio, the most different cell is still 33.3 % off" in report
    assert "the tables differ in (first, second):\n  threads: 1, 2" in report
    assert "the tables differ" not in first.compare(first).report(5.0)
    assert not comparison.within(100.0)  # a cell is missing in the first
    assert first.select([0]).compare(second.select([1])).within(2.1)
    assert not first.select([0]).compare(second.select([1])).within(1.9)
    assert first.compare(first, "p50").within(0.0)
    with pytest.raises(TableError, match="no 'p50'"):
        first.compare(second, "p50")
    with pytest.raises(TableError, match="no measured cell in common"):
        first.select([0]).compare(second.select([0]))
    with pytest.raises(TableError, match="no measured cell in common"):
        first.compare(one("b", 2, 1.0))


def test_the_committed_a40_table_is_the_authors() -> None:
    folder = Path(__file__).parents[2] / "profiling" / "tables"
    committed = LatencyTable.load(folder / "nvidia-a40_torch2.9.1_ofa_resnet50_224px.json")
    comparison = committed.compare(superserve_a40((1, 2, 4, 8, 16, 32)))
    assert comparison.within(0.0)


def test_fractions_for_percent_are_pointed_out() -> None:
    table = one("a", 1, 1.0)
    with pytest.warns(UserWarning, match=r"percent, 0 to 100.*0\.76.*76 percent"):
        table.with_accuracy([0.76])
    assert table.with_accuracy([76.0]).accuracy == (76.0,)
    assert table.with_accuracy([0.0]).accuracy == (0.0,)


def test_a_front_is_drawn_or_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = LatencyTable(
        [f"s{i}" for i in range(40)], [40.0 + i for i in range(40)], [1, 2, 4],
        [[1.0 + i, 2.0 + i, math.nan if i == 39 else 3.0 + i] for i in range(40)],
    )  # fmt: skip
    unknown = LatencyTable(["a", "b"], [math.nan] * 2, [1, 2], [[1.0, 2.0], [3.0, math.nan]])
    plot_front(table, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "front.png").stat().st_size > 5000
    with pytest.raises(TableError, match="accuracy of 'a' is not known"):
        plot_front(unknown, tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"subnetact\[plot\]"):
        plot_front(table, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
