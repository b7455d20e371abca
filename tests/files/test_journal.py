"""Records of a journal survive a kill at any byte, and journals of another kind are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from subnetact.errors import FileFormatError, ResumeMismatch
from subnetact.files.journal import Journal
from subnetact.profile.measurements import Measurements


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
        assert [line["cell"][1] for line in Journal(path, facts).of("window")] == [*range(kept), 9]


def test_a_journal_of_another_environment_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    facts = {"threads": 1, "torch": "2.13", "settings": {"order": "interleaved", "warmup_ms": 20.0}}
    Journal(path, facts)
    changed = {**facts, "threads": 2, "settings": {"order": "sequential", "warmup_ms": 20.0}}
    Journal(path, changed)  # nothing was recorded yet
    Journal(path, facts).append("window", cell=[0, 0, 1])
    words = (
        r"on another machine: settings\.order was 'interleaved', is 'sequential'; threads was 1, is 2\. Use"
    )
    with pytest.raises(ResumeMismatch, match=words):
        Journal(path, changed)
    with pytest.raises(ResumeMismatch, match="1 records of an earlier run"):
        Journal(path, facts, resume=False)
    assert len(Journal(path, facts).of("window")) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: not readable as a journal"),
        ("{}", "line 1: not readable as a journal"),
        ("[]\n", "not a journal"),
        ('{"kind": "other"}\n', "not a journal"),
        ("\x00\n", "line 1: not readable as a journal"),
        ('{"kind": 3}\n{"a": 1}\n', "not a journal"),
        ('{"kind": "subnetact.journal", "schema": 1, "environment": {}}\n{"a": 1}\n', "damaged: .*'sum'"),
    ],
)
def test_other_files_are_not_taken_for_a_journal(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=words):
        Journal(path, {})
    assert path.read_text() == text


def test_a_newer_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path, {}).append("window", cell=[0, 0, 1])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(lines[0]), "schema": 2}), *lines[1:], ""]))
    with pytest.raises(FileFormatError, match="schema 2"):
        Journal(path, {})


def test_an_edited_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"threads": 1})
    for i in range(3):
        journal.append("window", cell=[0, i, 1], host_ms=[0.5, float("nan")])
    whole = path.read_text().splitlines(keepends=True)
    edited = {
        3: [*whole[:2], whole[2].replace("0.5", "0.4"), whole[3]],
        4: [*whole[:3], whole[3].replace("[0, 2, 1]", "[0, 0, 1]")],
        2: [whole[0], *whole[2:]],
    }
    for line, lines in edited.items():
        path.write_text("".join(lines))
        with pytest.raises(FileFormatError, match=rf"j\.jsonl, line {line}: changed since it was written"):
            Journal(path, {"threads": 1})


def test_a_record_is_replaced_by_one_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"threads": 1})
    journal.append("window", ms=1.0)
    for done in range(3):
        journal.replace("progress", done=done)
        journal.append("window", ms=2.0 + done)
    for found in (journal, Journal(path, {"threads": 1})):
        assert [line["done"] for line in found.of("progress")] == [2]
        assert [line["ms"] for line in found.of("window")] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "facts",
    [
        {"cell": ["", 0]},
        {"cell": ["", 0, "1"]},
        {"cell": ["", -1, 1]},
        {"cell": ["view", "view", 1]},
        {"cell": ["fused", 0, 1]},
        {"cell": ["", 0, 1], "host_ms": "x"},
        {"cell": ["", 0, 1], "host_ms": [[1.0], [1.0, 2.0]]},
        {"cell": ["", 0, 1], "host_ms": [float("inf")]},
        {"cell": ["", 0, 1], "host_ms": []},
        {"cell": ["", 0, 1], "host_ms": [10**400]},
    ],
)
def test_impossible_measurements_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    journal = Journal(tmp_path / "j.jsonl", {})
    journal.append("window", **facts)
    with pytest.raises(FileFormatError, match=r"j\.jsonl: damaged"):
        Measurements(journal)
