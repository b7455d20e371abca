"""Documents and journals: foreign or newer ones are refused, and records survive a kill at any byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subnetact.engine.bundle import load_bundle
from subnetact.errors import FileFormatError, MissingFile, ResumeMismatch
from subnetact.export.subnet_program import export_format
from subnetact.files.documents import DocumentFormat, FolderFormat
from subnetact.files.journal import Journal
from subnetact.latency.table import LatencyTable
from subnetact.profile.sweep import Measurements
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.simulation.replay import LiveRun
from subnetact.supernet.norm_table import NormTable

NOTE = DocumentFormat("a note", "tests.note", 2, "write another")


TABLE = LatencyTable(["a"], [70.0], [1], [[1.0]])


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "latency table": ("table.json", LatencyTable.load),
    "norm table": ("norms.safetensors", NormTable.load),
    "corrections": ("corrections.json", Corrections(TABLE).load),
    "decision log": ("log.jsonl", LiveRun.load),
    "journal": ("journal.jsonl", lambda path: Journal(path, {})),
    "bundle": ("elastic.json", lambda path: load_bundle(path.parent, None, False, {})),
    "export": ("export.json", lambda path: export_format("subnetact.test").read_version(path.parent, print)),
}


CONTENTS = {
    "empty": b"",
    "not text": b"\x80\x04\xff\n",
    "cut off": b'{"kind": "subnetact.lat',
    "nested deeply": b"[" * 200_000 + b"\n",
    "a huge integer": b'{"kind": 1' + b"0" * 5000 + b"}\n",
    "a list": b"[1, 2]\n",
    "another kind": b'{"kind": "other", "schema": 1}\n',
    "a kind of another type": b'{"kind": ["other"], "schema": 1}\n',
}


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_hostile_files_by_name(tmp_path: Path, reader: str, contents: str) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    path.write_bytes(CONTENTS[contents])
    with pytest.raises(FileFormatError, match=name):
        read(path)
    assert path.read_bytes() == CONTENTS[contents]


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_pipes_without_waiting_for_a_writer(tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileFormatError, match=rf"{name}.* a pipe"):
        read(tmp_path / name)


@pytest.mark.parametrize("reader", sorted(set(READERS) - {"journal"}))  # which makes a missing file
def test_every_reader_tells_that_a_file_is_missing(tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    with pytest.raises(MissingFile, match=rf"{name}.*give|{name}.*write|{name}.*save|{name}.*remove"):
        read(tmp_path / "nowhere" / name)
    assert issubclass(MissingFile, FileNotFoundError)


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    NOTE.write(path, {"text": "ä", "n": [1, None]})
    assert NOTE.read(path) == {"kind": "tests.note", "schema": 2, "text": "ä", "n": [1, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        NOTE.write(path, {"n": float("nan")})
    assert NOTE.read(path)["text"] == "ä"
    with pytest.raises(FileFormatError, match="it is a folder and not a file"):
        NOTE.read(tmp_path)


@pytest.mark.parametrize("schema", [0, 1, 3, -1, True, None, "2", 2.0, [2]])
def test_only_the_present_schema_is_read(tmp_path: Path, schema: Any) -> None:
    path = tmp_path / "note.json"
    path.write_text(json.dumps({"kind": "tests.note", "schema": schema}))
    with pytest.raises(FileFormatError, match=r"a note of schema .*reads 2; update subnetact"):
        NOTE.read(path)


def test_lines_end_with_the_last_line_break(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(json.dumps(NOTE.header) + '\n{"a": 1}\n{"a": ')
    header, documents, length = NOTE.read_lines(path)
    assert (header, documents) == (NOTE.header, [{"a": 1}])
    assert path.read_bytes()[:length].endswith(b'{"a": 1}\n')
    path.write_text(json.dumps(NOTE.header) + "\n{\n")
    with pytest.raises(FileFormatError, match=r"notes\.jsonl, line 2: not readable as a note"):
        NOTE.read_lines(path)


def test_a_folder_names_what_changed(tmp_path: Path) -> None:
    notes = FolderFormat("a folder of notes", "tests.notes", 1, "write another", "index.json")
    folder = tmp_path / "notes"
    with notes.writing(folder, {"by": "me"}) as inside:
        (inside / "sub").mkdir()
        (inside / "sub" / "a.txt").write_text("a")
    read: Callable[[], Any] = lambda: notes.read_version(folder, lambda _, index: index)  # noqa: E731
    assert read()["by"] == "me"
    assert list(read()["files"]) == ["sub/a.txt"]
    for damage in (lambda path: path.write_text("b"), Path.unlink):
        damage(folder / "sub" / "a.txt")
        with pytest.raises(FileFormatError, match=r"a\.txt: missing, truncated or changed"):
            read()
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"me"', '"you"'))
    with pytest.raises(FileFormatError, match=r"index\.json: changed since it was written"):
        read()


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
