"""Latency tables: what makes one, what they answer, their files, comparison, and where they were measured."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import subnetact
import subnetact.serving
from subnetact import Batcher, SlackFit, simulate
from subnetact.device import machine
from subnetact.errors import (
    FileFormatError,
    LatencyTableWarning,
    MissingExtra,
    PolicyError,
    ProfileMismatch,
    TableError,
)
from subnetact.latency.origin import doubts, require_measured_on, restamped
from subnetact.latency.plot import plot_front
from subnetact.latency.table import LatencyTable
from subnetact.serving import HullFit
from subnetact.serving.simulation.datasets import superserve_a40


def small(**changes):
    arguments = {
        "subnets": ["a", "b"],
        "accuracy": [70.0, 75.0],
        "batch_sizes": [1, 4],
        "latency_ms": [[3.0, 2.0], [4.0, math.nan]],
        "statistics": {"std": [[0.1, 0.2], [0.3, math.nan]]},
        "stamp": {"device": "test", "repeats": 5},
    }
    return LatencyTable(**(arguments | changes))


@st.composite
def tables(draw):
    rows = draw(st.integers(1, 5))
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=5)))
    cell = st.one_of(st.just(math.nan), st.floats(1e-3, 1e4))
    cells = draw(
        st.lists(st.lists(cell, min_size=len(sizes), max_size=len(sizes)), min_size=rows, max_size=rows)
    )
    cells[0][0] = 1.5
    accuracy = draw(st.lists(st.floats(0, 100), min_size=rows, max_size=rows))
    return LatencyTable([f"s{i}" for i in range(rows)], accuracy, sizes, cells)


@given(tables())
def test_documents_round_trip(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("table") / "t.json"
    table.save(path)
    again = LatencyTable.load(path)
    assert again == table
    np.testing.assert_array_equal(again.latency_ms, table.latency_ms)
    assert pickle.loads(pickle.dumps(table)) == table
    assert hash(again) == hash(table)


@given(tables())
def test_monotone_is_the_least_rising_table_above(table):
    rising = table.monotone().latency_ms
    np.testing.assert_array_equal(np.isnan(rising), np.isnan(table.latency_ms))
    for before, after in zip(table.latency_ms, rising, strict=True):
        kept = after[~np.isnan(after)]
        assert np.all(np.diff(kept) >= 0)
        for j, value in enumerate(after):
            if not math.isnan(value):
                assert value == np.nanmax(before[: j + 1])


@given(tables())
def test_padded_is_the_smallest_profiled_size(table):
    for k in range(1, table.batch_sizes[-1] + 1):
        padded = table.padded(k)
        assert padded >= k
        assert padded == min(size for size in table.batch_sizes if size >= k)
        assert table.batch_sizes[table.pad_index[k]] == padded
    for k in (0, -1, table.batch_sizes[-1] + 1):
        with pytest.raises(TableError, match="not profiled"):
            table.padded(k)


def test_what_scales_latencies_scales_the_statistics_that_are_latencies() -> None:
    statistics = {
        "p99": [[4.0, 5.0]], "stable": [[1, 0]], "p99_of_view": [[9.0, 7.0]], "stable_of_view": [[0, 1]],
    }  # fmt: skip
    twice = LatencyTable(["a"], [50.0], [1, 2], [[2.0, 3.0]], statistics).scaled(2)
    assert twice.latency_ms.tolist() == [[4.0, 6.0]]
    assert {name: values.tolist() for name, values in twice.statistics.items()} == {
        "p99": [[8.0, 10.0]], "stable": [[1, 0]], "p99_of_view": [[18.0, 14.0]], "stable_of_view": [[0, 1]],
    }  # fmt: skip


def test_select():
    table = small().select([1, 0], batch_sizes=[1])
    assert table.subnets == ("b", "a")
    assert table.accuracy == (75.0, 70.0)
    np.testing.assert_array_equal(table.latency_ms, [[4.0], [3.0]])
    np.testing.assert_array_equal(table.statistics["std"], [[0.3], [0.1]])
    with pytest.raises(TableError, match="subnet 2"):
        small().select([2])
    with pytest.raises(TableError, match="batch size 3"):
        small().select(batch_sizes=[3])


def test_a_table_cannot_be_changed():
    cells = np.ones((2, 2))
    table = small(latency_ms=cells)
    cells[0, 0] = 9.0
    assert table.latency_ms[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        table.latency_ms[0, 0] = 1.0
    with pytest.raises(AttributeError, match="cannot assign to field"):
        table.accuracy = (1.0, 2.0)
    with pytest.raises(TypeError):
        table.stamp["device"] = "other"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subnets": []}, "empty"),
        ({"subnets": ["a", "a"]}, "'a' appears more than once"),
        ({"accuracy": [70.0]}, "1 values for 2 subnets"),
        ({"accuracy": [70.0, math.inf]}, r"accuracy\[1\].*finite"),
        ({"accuracy": [70.0, 170.0]}, "accuracy of 'b'.*percentage"),
        ({"batch_sizes": [4, 1]}, r"batch_sizes\[1\]: 1 does not ascend"),
        ({"batch_sizes": [0, 1]}, r"batch_sizes\[0\]"),
        ({"batch_sizes": [1, 2.5]}, "positive integer"),
        ({"batch_sizes": []}, "batch_sizes: empty"),
        ({"latency_ms": [[1.0, -2.0], [1.0, 1.0]]}, "'a' at batch size 4: -2.0"),
        ({"latency_ms": [[1.0, 2.0], [math.inf, 1.0]]}, "'b' at batch size 1: inf"),
        ({"latency_ms": [[1.0, 2.0], [0.0, 1.0]]}, "'b' at batch size 1: 0.0"),
        ({"latency_ms": [[1.0, 2.0]]}, r"shape \(1, 2\)"),
        ({"latency_ms": [[1.0, 2.0], [1.0]]}, "not an array"),
        ({"latency_ms": [[math.nan] * 2] * 2}, "every cell is NaN"),
        ({"statistics": {"p99": [[1.0, 1.0], [1.0, -1.0]]}}, "'p99'.*'b' at batch size 4"),
        ({"stamp": {"when": object()}}, "stamp"),
        ({"batch_sizes": [1, 10**9]}, r"batch_sizes\[1\]: 1000000000 is larger than 65536"),
        ({"batch_sizes": [1, 10**5000]}, "is larger than 65536"),
        ({"accuracy": [10**400, 1.0]}, "no larger than a float can be"),
    ],
)
def test_bad_numbers_name_the_cell(changes, message):
    with pytest.raises(TableError, match=message):
        small(**changes)


def test_documents_that_lack_a_field_or_hold_bad_numbers_are_refused(tmp_path):
    table, path = small(), tmp_path / "t.json"
    table.save(path)
    again = LatencyTable.load(path)
    assert (again, again.stamp["device"], again.statistics["std"][1, 0]) == (table, "test", 0.3)
    document = json.loads(path.read_text())
    for field in ("subnets", "accuracy", "batch_sizes", "latency_ms", "statistics", "stamp"):
        path.write_text(json.dumps({key: value for key, value in document.items() if key != field}))
        with pytest.raises(FileFormatError, match=field):
            LatencyTable.load(path)
    path.write_text(json.dumps(document | {"latency_ms": [[1.0, -2.0], [1.0, 1.0]]}))
    with pytest.raises(TableError, match="-2"):
        LatencyTable.load(path)


def test_unknown_accuracy_survives_on_disk_and_is_refused_by_schedulers(tmp_path):
    table = LatencyTable(["a", "b"], [float("nan"), 70.0], [1, 2], [[1, 2], [3, 4]])
    table.save(tmp_path / "t.json")
    loaded = LatencyTable.load(tmp_path / "t.json")
    assert loaded == table

    def simulated(table, slo_ms):
        return simulate([0.0], table, subnetact.serving.Fixed(table, 0), slo_ms=slo_ms)

    for use in (SlackFit, simulated):
        with pytest.raises(TableError, match="accuracy of 'a' is not known"):
            use(loaded, slo_ms=36.0)
    known = loaded.with_accuracy([60.0, 70.0])
    policy = SlackFit(known, slo_ms=36.0)
    assert simulate([0.0], known, policy, slo_ms=36.0).attainment == 1.0


def test_tables_and_schedulers_import_no_torch():
    rooms = ("live.batcher", "simulation.simulator", "simulation.cli", "pipelines.planner")
    code = f"import sys, subnetact.latency, {', '.join(f'subnetact.serving.{room}' for room in rooms)};"
    code += "print([name for name in ('torch', 'scipy', 'matplotlib') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


STAMP = {"device": "cpu", "device_name": "one", "threads": 1, "measured": "today", "note": "same"}


@st.composite
def measured_tables(draw: st.DrawFn) -> LatencyTable:
    rows = draw(st.integers(1, 4))
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=2, max_size=5)))
    row = st.lists(st.floats(1e-3, 1e4), min_size=len(sizes), max_size=len(sizes))
    cells = draw(st.lists(row, min_size=rows, max_size=rows))
    keys = [f"s{i}" for i in range(rows)]
    p99 = [[2 * ms for ms in row] for row in cells]
    return LatencyTable(keys, [50.0 + i for i in range(rows)], sizes, cells, {"p99": p99}, STAMP)


@given(measured_tables(), st.data())
def test_interpolation_passes_through_what_was_measured(table: LatencyTable, data: st.DataObject) -> None:
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


CPU = torch.device("cpu")


def table(unstable: int = 0, **stamp: Any) -> LatencyTable:
    stable = np.ones((2, 2))
    stable.flat[:unstable] = 0
    return LatencyTable(["small", "large"], [60, 70], [1, 4], [[10, 20], [30, 40]], {"stable": stable}, stamp)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"python": "2.7", "cpus": 512, "system": "Plan 9", "operator": "Ann"}, ()),
        ({"device_name": "Intel E5"}, ("device_name Intel E5",)),
        ({"processor": "family 23 model 49 stepping 0"}, ("processor family 23 model 49",)),
        ({"instructions": "AVX2"}, ("instructions AVX2",)),
        ({"torch": "1.0", "threads": 77}, ("torch 1.0", "threads 77 (here 3)")),
        ({"device": "cuda"}, ("device cuda (here cpu)",)),
    ],
)
def test_what_changes_latencies_makes_doubtful(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    here = machine(CPU) | {"threads": 3}
    text = doubts(table(**{**here, **changes}), Echo(), threads=3)
    assert bool(text) == bool(words)
    assert all(word in text for word in words)


def test_facts_that_a_stamp_lacks_are_not_compared_and_unstable_cells_are_counted() -> None:
    assert doubts(table(), Echo()) == doubts(table(torch=torch.__version__), Echo()) == ""
    assert doubts(table(device="an A40", source="a paper"), Echo()) == ""
    assert doubts(table(unstable=3), Echo()) == "3 of 4 cells are unstable"


class Echo:
    keys = ("small", "large")
    device = CPU

    def check(self, x: Any) -> None: ...

    def run(self, subnet: int, inputs: list[Any], batch_size: int) -> list[Any]:
        return inputs


def test_a_batcher_warns_once_of_all_its_tables_and_engines() -> None:
    foreign = table(unstable=1, **machine(CPU) | {"device_name": "Intel E5"})
    with pytest.warns(LatencyTableWarning) as caught:
        Batcher([Echo(), Echo()], table=foreign, slo_ms=50).close()
    (text,) = [str(one.message) for one in caught]
    assert "Intel E5" in text
    assert "1 of 4 cells" in text
    assert "python -m subnetact.profile" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Batcher(Echo(), table=table(**machine(CPU)), slo_ms=50).close()
        nameless = type("Nameless", (Echo,), {"device": property()})()  # a runner need not say where it runs
        Batcher(nameless, table=foreign, slo_ms=50).close()


def test_a_short_slo_is_blamed_on_another_machine_only_if_there_was_one() -> None:
    with pytest.raises(PolicyError, match=r"another machine .*Intel E5 .*subnetact\.profile.* at least 10"):
        HullFit(table(**machine(CPU) | {"device_name": "Intel E5"}), slo_ms=1.0)
    with pytest.raises(PolicyError, match=r"lowest latency of the table; give slo_ms of at least 10"):
        HullFit(table(**machine(CPU)), slo_ms=1.0)


def test_a_table_follows_new_values_of_the_same_weights_and_nothing_else() -> None:
    present = {"supernet": "new", "space": "s", "dtype": "float32"}
    known = table(supernet="old", space="s", dtype="float32", measured="monday")
    assert restamped(known, {"old"}, present).stamp == {**known.stamp, "supernet": "new"}
    for other in (
        table(supernet="other", space="s", dtype="float32"),
        table(supernet="old", space="s", dtype="bfloat16"),
        table(supernet="old", space="t", dtype="float32"),
        table(),
    ):
        assert restamped(other, {"old"}, present) is other
    with pytest.raises(ProfileMismatch, match=r"tables\['cpu'\]: measured on supernet old, .* is new"):
        require_measured_on(known, known.subnets, "new", "tables['cpu']")
    with pytest.raises(ProfileMismatch, match="subnet 1 is 'large', but the engine's is 'larger'"):
        require_measured_on(known, ("small", "larger"), "old")
    require_measured_on(known, None, "old")
    require_measured_on(table(), ["small", "large"], None)
