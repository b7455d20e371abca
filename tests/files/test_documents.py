"""Files that are missing, damaged, foreign or newer are refused alike, whatever they should hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subnetact.engine.bundle import load_bundle
from subnetact.errors import FileFormatError, MissingFile
from subnetact.export.subnet_program import export_format
from subnetact.files.atomic import replacing
from subnetact.files.documents import DocumentFormat, FolderFormat, parse_json
from subnetact.files.journal import Journal
from subnetact.latency.table import LatencyTable
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
def test_every_reader_refuses_hostile_files_with_their_name(
    tmp_path: Path, reader: str, contents: str
) -> None:
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


def test_a_folder_is_no_document(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="it is a folder and not a file"):
        NOTE.read(tmp_path)


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    NOTE.write(path, {"text": "ä", "n": [1, None]})
    assert NOTE.read(path) == {"kind": "tests.note", "schema": 2, "text": "ä", "n": [1, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        NOTE.write(path, {"n": float("nan")})
    assert NOTE.read(path)["text"] == "ä"


def test_a_file_that_replaces_another_has_the_usual_permissions(tmp_path: Path) -> None:
    path, usual = tmp_path / "note.json", tmp_path / "usual"
    usual.touch()
    for _ in range(2):
        with replacing(path) as temporary:
            temporary.chmod(0o600)
        assert path.stat().st_mode == usual.stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"note.json", "usual"}
    with pytest.raises(MissingFile, match="create it first"), replacing(tmp_path / "no" / "note.json"):
        pass


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


def test_json_of_hostile_text_is_a_value_error() -> None:
    assert parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    for text in ("[" * 200_000, "1" * 5000, b"\xff", ""):
        with pytest.raises(ValueError, match=r".+"):
            parse_json(text)
