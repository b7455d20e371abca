import json
from importlib.resources import files

import numpy as np
import pytest

from subnetact.errors import TraceError
from subnetact.serving.simulation.datasets import TRACES, load_trace, superserve_a40, trace_series
from subnetact.serving.simulation.traces import bursty, from_counts, from_timestamps, poisson, time_varying


def cv2(times):
    gaps = np.diff(times)
    return gaps.var() / gaps.mean() ** 2


@pytest.mark.parametrize("seed", [0, 1])
def test_bursty_has_its_rate_and_its_burstiness(seed):
    both = bursty(1000, 4000, 4.0, 60, seed)
    assert len(both) / 60 == pytest.approx(5000, rel=0.02)
    assert np.all(np.diff(both) >= 0)
    assert both[0] >= 0
    assert both[-1] < 60_000
    for wanted in (0.5, 1.0, 4.0, 8.0):
        assert cv2(bursty(0, 4000, wanted, 60, seed)) == pytest.approx(wanted, rel=0.08)
    np.testing.assert_allclose(np.diff(bursty(500, 0, 1.0, 2)), 2.0)
    np.testing.assert_allclose(np.diff(bursty(0, 500, 0.0, 2)), 2.0)


def test_time_varying_ramps_between_its_rates():
    times = time_varying(1000, 5000, 1000, cv2=2.0, lead_s=5, tail_s=10, seed=0) / 1000
    rate = np.histogram(times, [0, 5, 6, 7, 8, 9, 19])[0] / [5, 1, 1, 1, 1, 10]
    assert rate == pytest.approx([1000, 1500, 2500, 3500, 4500, 5000], rel=0.12)
    assert times[-1] <= 19
    down = time_varying(5000, 1000, 4000, cv2=0.0, lead_s=1, tail_s=1)
    assert len(down) == pytest.approx(5000 + 3000 + 1000, abs=2)


def test_seeds_decide():
    for make in (
        lambda seed: bursty(10, 500, 2, 3, seed),
        lambda seed: time_varying(100, 200, 50, seed=seed),
        lambda seed: from_counts([5, 9, 2], 3, seed=seed),
        lambda seed: poisson(100, 3, seed),
    ):
        np.testing.assert_array_equal(make(1), make(1))
        assert len(make(1)) != len(make(2)) or np.any(make(1) != make(2))


def test_counts_become_a_poisson_process_in_every_bin():
    many = from_counts(np.full(100, 50), 100, seed=0)
    in_bins = np.histogram(many, np.arange(101) * 1000.0)[0]
    assert in_bins.var() == pytest.approx(50, rel=0.4)
    assert in_bins.mean() == pytest.approx(50, rel=0.1)
    scaled, clipped = (from_counts([4, 0, 8], 300, 1000, peak_qps=peak) for peak in (None, 1500))
    for times, per_s in ((scaled, [1000, 0, 2000]), (clipped, [1000, 0, 1500])):
        in_bins = np.histogram(times, [0, 1e5, 2e5, 3e5])[0] / 100
        assert in_bins == pytest.approx(per_s, rel=0.02)


def test_timestamps_are_sorted_and_scaled():
    times = from_timestamps([3.0, 1.0, 2.0])
    np.testing.assert_allclose(times, [0, 1, 2])
    squeezed = from_timestamps(np.arange(0, 5000, 7.0), mean_qps=2000)
    assert np.diff(squeezed) == pytest.approx(0.5)


def test_every_shipped_trace_loads_and_names_its_source_and_licence():
    for name in TRACES:
        times = load_trace(name, duration_s=5.0)
        assert len(times) > 5000, name
        assert np.all(np.diff(times) >= 0), name
        assert times[-1] < 5000.0, name
    for name in ("maf", "azure_llm", "servegen"):
        [path] = (files("subnetact") / "data" / "traces").glob(f"{name}*.json")
        notes = json.loads(path.read_text(encoding="utf-8"))
        assert notes["license"]["redistribution_with_attribution"]
        assert notes["attribution"]
        assert all(len(values) > 100 for values in trace_series(name).values())


def test_the_maf_trace_and_the_shipped_profile_are_the_published_ones():
    times, table = load_trace("maf"), superserve_a40()
    assert len(times) / 120 == pytest.approx(6390, rel=0.005)
    assert np.histogram(times, np.arange(0, 120_001, 1000))[0].max() < 8750 * 1.05
    assert (table.latency_ms.shape, table.accuracy[0], table.latency_ms[0, 4]) == ((6, 5), 73.822, 6.26507)
    assert table.latency_ms[5, 1] < table.latency_ms[4, 1]
    assert superserve_a40([1, 32]).batch_sizes == (1, 32)


FORMS = {
    "one per line": ("{}\n", "0 20 2000", {}),
    "comments": ("# ms\n\n{} # first\n", "0 20 2000", {}),
    "a header": ("arrival_ms\n{}\n", "0 20 2000", {}),
    "a unit in the header": ("size,arrival_s\n7,{}\n", "0 0.02 2", {"column": "arrival_s"}),
    "the argument counts": ("arrival_s\n{}\n", "0 20 2000", {"unit": "ms"}),
    "a column without a name": ("{}\t9\n", "0 20000 2000000", {"column": 1, "unit": "us"}),
    "semicolons and quotes": ('"a, b";t\n"x, y";{}\n', "0 20 2000", {"column": 2}),
    "dates": ("time,n\n2026-11-16 18:15:{}Z,1\n", "46 46.02 48", {"column": "time"}),
    "a first column with empty cells": ("user\tarrival_ms\n\t{}\n", "0 20 2000", {"column": "arrival_ms"}),
    "an index without a name": ("\tt\n1\t{}\n", "0 20 2000", {"column": "t"}),
    "numbers and lines in quotes": ('text,t\n"a # b, c\r",{}\n', "0 20 2000", {"column": "t"}),
    "names that begin like numbers": ("t,inference_ms,95th\n{},5,6\n", "0 20 2000", {"column": "t"}),
    "exponents": ("{}\n", "0e0 .2e2 2.0E+3", {}),
    "time zones": ("t\n{}\n", "2026-11-16T00:30:46+02:00 2026-11-15T22:30:46.02Z 2026-11-15T16:30:48-06", {}),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS)
def test_the_times_in_a_file_are_read_in_every_usual_form(form, tmp_path):
    line, times, settings = FORMS[form]
    *header, row, _ = line.split("\n")
    file = tmp_path / "t.csv"
    file.write_text("\n".join([*header, *(row.format(time) for time in times.split())]))
    assert np.allclose(load_trace(str(file), **settings), [0.0, 20.0, 2000.0])
    assert np.allclose(load_trace(str(file), 2.0, **settings), [0.0, 10.0, 1000.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("", {}, "is empty"),
        ("# nothing\n", {}, "is empty"),
        ('""\n', {}, "is empty"),
        (f'text,t\n"{"a" * 200_000}",1\n', {"column": "t"}, "is no CSV or text file .*shorter cells"),
        ("a,b\n1,2\n", {}, "has 2 columns; choose one with column .*: a, b, 1, 2"),
        ("a,b\n1,2\n", {"column": "c"}, "got c"),
        ("1\nabc\n", {}, "column 1 of .* holds no times .*abc"),
        ("a,b\n1,2\n,3\n", {"column": "a"}, "column a of .* holds no times"),
    ],
)
def test_a_file_without_times_is_refused_in_one_error(text, settings, words, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=words):
        load_trace(str(file), **settings)
