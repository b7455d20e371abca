"""Which windows are trusted, and records that survive a kill at any byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import FileFormatError, ResumeMismatch
from subnetact.journal import Journal
from subnetact.windows import agreeing, statistics_of, summaries


def window(median: float, runs: int = 5) -> dict[str, np.ndarray]:
    return {"host_ms": median * np.linspace(0.99, 1.01, runs)}


@given(st.lists(st.floats(1.0, 3.0), min_size=3, max_size=9), st.floats(0.0, 0.2))
def test_three_fastest_that_agree_count(medians: list[float], tolerance: float) -> None:
    kept, stable = agreeing([{"host_ms": np.array([m])} for m in medians], tolerance)
    rising = sorted(medians)
    triples = [t for t in zip(rising, rising[1:], rising[2:], strict=False) if t[2] / t[0] <= 1 + tolerance]
    assert stable == bool(triples)
    chosen = sorted(medians[i] for i in kept)
    assert len(set(kept)) == len(kept) >= 3
    if stable:
        assert chosen[0] == triples[0][0]
        assert chosen[-1] <= chosen[0] * (1 + tolerance)
        assert chosen == [m for m in rising if chosen[0] <= m <= chosen[0] * (1 + tolerance)]
    else:
        spans = [c / a for a, c in zip(rising, rising[2:], strict=False)]
        assert chosen[-1] / chosen[0] == min(spans)


@given(st.lists(st.floats(1.5, 50.0), max_size=5), st.permutations(range(8)))
def test_disturbed_windows_do_not_change_what_is_calm(slow: list[float], order: list[int]) -> None:
    calm = [window(1.0), window(1.01), window(1.02)]
    mixed = [*calm, *(window(m) for m in slow)]
    shuffled = [mixed[i] for i in order if i < len(mixed)]
    expected = statistics_of(calm, 0.05, [50, 99])
    found = statistics_of(shuffled, 0.05, [50, 99])
    assert found["stable"] == 1.0
    assert found["windows"] == len(mixed)
    for name in ("calm_p50", "calm_p99", "calm_mean", "calm_min", "calm_std"):
        assert found[name] == pytest.approx(expected[name])
    assert found["p99"] >= expected["p99"]
    assert found["calm_p50"] <= found["p99"]


def test_fewer_than_three_windows_are_never_stable() -> None:
    for count in (1, 2):
        found = statistics_of([window(1.0)] * count, 0.05, [50])
        assert found["stable"] == 0.0
        assert found["calm_p50"] == found["p50"]


def test_a_lucky_fast_window_is_not_believed() -> None:
    found = statistics_of([window(0.5), window(1.0), window(1.0), window(1.0)], 0.05, [50])
    assert found["stable"] == 1.0
    assert found["calm_p50"] == pytest.approx(1.0)


def test_the_devices_clock_has_statistics_of_its_own() -> None:
    one = {"host_ms": np.array([2.0, 3.0]), "device_ms": np.array([1.0, 1.5])}
    found = statistics_of([one] * 3, 0.05, [50, 99.9])
    assert found["device_p50"] == 1.25
    assert found["device_calm_p50"] == 1.25
    assert found["p99.9"] > found["p50"] == 2.5
    assert found["runs"] == 6
    assert summaries([50, 99.9]) == ["mean", "p50", "p99.9", "calm_mean", "calm_p50", "calm_p99.9"]


def test_a_journal_cut_at_any_byte_goes_on_with_whole_records(tmp_path: Path) -> None:
    path, facts = tmp_path / "j.jsonl", {"threads": 1, "settings": {"order": "interleaved"}}
    journal = Journal(path, facts)
    for i in range(3):
        journal.append("window", cell=[0, i, 1], host_ms=[0.5 * i])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:cut])
        resumed = Journal(path, facts)
        kept = sum(end <= cut for end in ends[1:])
        assert [line["cell"][1] for line in resumed.of("window")] == list(range(kept))
        resumed.append("window", cell=[0, 9, 1], host_ms=[1.0])
        assert [line["cell"][1] for line in Journal(path, facts)] == [*range(kept), 9]


def test_a_journal_of_another_environment_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    facts = {"threads": 1, "torch": "2.13", "settings": {"order": "interleaved", "warmup_ms": 20.0}}
    Journal(path, facts)
    changed = {**facts, "threads": 2, "settings": {"order": "sequential", "warmup_ms": 20.0}}
    Journal(path, changed)  # nothing was recorded yet
    Journal(path, facts).append("window", cell=[0, 0, 1])
    with pytest.raises(
        ResumeMismatch, match=r"settings\.order 'interleaved' and 'sequential'; threads 1 and 2"
    ):
        Journal(path, changed)
    with pytest.raises(ResumeMismatch, match="1 records of an earlier run"):
        Journal(path, facts, resume=False)
    assert len(Journal(path, facts)) == 1


@pytest.mark.parametrize(
    "text", ["", "{}", "[]\n", '{"kind": "other"}\n', "\x00\n", '{"kind": 3}\n{"a": 1}\n']
)
def test_other_files_are_not_taken_for_a_journal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="not a journal"):
        Journal(path, {})
    assert path.read_text() == text


def test_a_newer_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path, {}).append("window", cell=[0, 0, 1])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(lines[0]), "schema": 2}), *lines[1:], ""]))
    with pytest.raises(FileFormatError, match="schema 2"):
        Journal(path, {})
