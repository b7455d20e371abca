"""Latency tables: what makes one, what they answer, and the files they are kept in."""

import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import subnetact
import subnetact.serving
from subnetact.errors import FileFormatError, TableError
from subnetact.latency.table import LatencyTable


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


def test_statistics_and_stamp_round_trip(tmp_path):
    table = small()
    table.save(tmp_path / "t.json")
    again = LatencyTable.load(tmp_path / "t.json")
    assert again == table
    assert again.stamp["device"] == "test"
    assert again.statistics["std"][1, 0] == 0.3


def test_what_scales_latencies_scales_the_statistics_that_are_latencies() -> None:
    statistics = {
        "p99": [[4.0, 5.0]], "stable": [[1, 0]], "p99_of_view": [[9.0, 7.0]], "stable_of_view": [[0, 1]],
    }  # fmt: skip
    twice = LatencyTable(["a"], [50.0], [1, 2], [[2.0, 3.0]], statistics).scaled(2)
    assert {name: values.tolist() for name, values in twice.statistics.items()} == {
        "p99": [[8.0, 10.0]], "stable": [[1, 0]], "p99_of_view": [[18.0, 14.0]], "stable_of_view": [[0, 1]],
    }  # fmt: skip


def test_select_and_scaled():
    table = small().select([1, 0], batch_sizes=[1])
    assert table.subnets == ("b", "a")
    assert table.accuracy == (75.0, 70.0)
    np.testing.assert_array_equal(table.latency_ms, [[4.0], [3.0]])
    np.testing.assert_array_equal(table.statistics["std"], [[0.3], [0.1]])
    np.testing.assert_array_equal(small().scaled(2.0).latency_ms[0], [6.0, 4.0])
    with pytest.raises(TableError, match="subnet 2"):
        small().select([2])
    with pytest.raises(TableError, match="batch size 3"):
        small().select(batch_sizes=[3])


def test_a_table_cannot_be_changed():
    table = small()
    with pytest.raises(ValueError, match="read-only"):
        table.latency_ms[0, 0] = 1.0
    with pytest.raises(AttributeError, match="cannot assign to field"):
        table.accuracy = (1.0, 2.0)
    with pytest.raises(TypeError):
        table.stamp["device"] = "other"


def test_the_array_of_the_caller_is_copied():
    cells = np.ones((2, 2))
    table = small(latency_ms=cells)
    cells[0, 0] = 9.0
    assert table.latency_ms[0, 0] == 1.0


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


def test_a_newer_schema_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "t.json"
    small().save(path)
    document = json.loads(path.read_text())
    for change, message in (
        ({"schema": 2}, "schema 2"),
        ({"schema": "1"}, "of schema 1, this version reads 1"),
        ({"kind": "other"}, "not a latency table"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(FileFormatError, match=message):
            LatencyTable.load(path)
    path.write_text(json.dumps(document)[:-20])
    with pytest.raises(FileFormatError, match="not readable"):
        LatencyTable.load(path)
    path.write_bytes(b"\x80\x04\xff")
    with pytest.raises(FileFormatError, match="not readable"):
        LatencyTable.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(FileFormatError, match="not a latency table"):
        LatencyTable.load(path)
    for field in ("subnets", "accuracy", "batch_sizes", "latency_ms", "statistics", "stamp"):
        path.write_text(json.dumps({key: value for key, value in document.items() if key != field}))
        with pytest.raises(FileFormatError, match=field):
            LatencyTable.load(path)
    path.write_text(json.dumps(document | {"latency_ms": [[1.0, -2.0], [1.0, 1.0]]}))
    with pytest.raises(TableError, match="-2"):
        LatencyTable.load(path)


def test_an_interrupted_save_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    small().save(path)
    before = path.read_text()

    def fail(*_):
        raise OSError("disk gone")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        small(accuracy=[1.0, 2.0]).save(path)
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_unknown_accuracy_survives_on_disk_and_is_refused_by_schedulers(tmp_path):
    table = LatencyTable(["a", "b"], [float("nan"), 70.0], [1, 2], [[1, 2], [3, 4]])
    table.save(tmp_path / "t.json")
    loaded = LatencyTable.load(tmp_path / "t.json")
    assert loaded == table
    for use in (
        lambda t: subnetact.SlackFit(t, slo_ms=36.0),
        lambda t: subnetact.simulate([0.0], t, subnetact.serving.Fixed(t, 0), slo_ms=36.0),
    ):
        with pytest.raises(TableError, match="accuracy of 'a' is not known"):
            use(loaded)
    known = loaded.with_accuracy([60.0, 70.0])
    assert (
        subnetact.simulate([0.0], known, subnetact.SlackFit(known, slo_ms=36.0), slo_ms=36.0).attainment
        == 1.0
    )


def test_tables_and_schedulers_import_no_torch():
    code = (
        "import sys, subnetact.latency, subnetact.serving.live.batcher,"
        " subnetact.serving.simulation.simulator, subnetact.serving.simulation.cli,"
        " subnetact.serving.pipelines.planner;"
        "print([name for name in ('torch', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
