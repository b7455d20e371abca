"""Files and folders are replaced as a whole, by one writer at a time; leftovers of killed writers go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from elastic_networks import in_threads

from subnetact.errors import FileFormatError, MissingFile, WriteError
from subnetact.files.atomic import read_regular, replacing, replacing_folder, require_regular
from subnetact.files.documents import FolderFormat

NOTES = FolderFormat("a folder of notes", "tests.notes", 1, "write another", "index.json")


def write_notes(folder: Path, text: str) -> None:
    with NOTES.writing(folder, {"by": text}) as inside:
        for name in ("a.txt", "b.txt"):
            (inside / name).write_text(text)


def read_notes(folder: Path) -> set[str]:
    return NOTES.read_version(
        folder, lambda at, facts: {facts["by"], *((at / name).read_text() for name in ("a.txt", "b.txt"))}
    )


KILLED = """
import os, signal, sys
from subnetact.files.atomic import replacing, replacing_folder
with {call} as temporary:
    (temporary / "index.json" if temporary.is_dir() else temporary).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    call = "replacing(sys.argv[1])" if kind == "file" else "replacing_folder(sys.argv[1], 'index.json', 'x')"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED.format(call=call), str(path)], check=False)
        assert done.returncode == -signal.SIGKILL
        assert not path.exists()
    left = [p.name for p in tmp_path.iterdir()]
    assert len(left) == 1, "the second writer removes what the first one left"
    if kind == "file":
        with replacing(path) as temporary:
            temporary.write_text("whole")
    else:
        write_notes(path, "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_a_writer_that_lives_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "note"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
            assert first.exists()
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["note"]


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, folder_link = tmp_path / "link", tmp_path / "folder"
    link.symlink_to(tmp_path / "real" / "note")
    folder_link.symlink_to(tmp_path / "real" / "notes")
    for text in ("old", "new"):
        with replacing(link) as temporary:
            temporary.write_text(text)
        write_notes(folder_link, text)
        assert link.is_symlink()
        assert folder_link.is_symlink()
        assert (tmp_path / "real" / "note").read_text() == text
        assert read_notes(folder_link) == {text}


def test_devices_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, kind in ((Path("/dev/full"), "a device"), (pipe, "a pipe"), (folder, "a folder")):
        with pytest.raises(WriteError, match=f"is {kind}"), replacing(path):
            pass
        for read in (require_regular, read_regular):
            with pytest.raises((FileFormatError, IsADirectoryError), match=r"not a file|Is a directory"):
                read(path)
    assert pipe.is_fifo()
    assert Path("/dev/full").is_char_device()
    with pytest.raises(MissingFile):
        require_regular(tmp_path / "nothing")
    with pytest.raises(MissingFile, match="create it first"), replacing(tmp_path / "nowhere" / "note"):
        pass


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_a_typed_error_and_the_old_version_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    make: Callable[[], Any] = lambda: replacing(path)  # noqa: E731
    if kind == "folder":
        write_notes(path, "old")
        make = lambda: replacing_folder(path, "index.json", "notes")  # noqa: E731
    else:
        path.write_text("old")
    with pytest.raises(WriteError, match=r"notes: not written .No space left"), make():
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" if kind == "file" else read_notes(path) == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_readers_beside_two_writers_find_whole_versions(tmp_path: Path) -> None:
    folder, writing = tmp_path / "notes", [True, True]
    write_notes(folder, "first")

    def write(number: int) -> None:
        try:
            for i in range(15):
                write_notes(folder, f"{'ab'[number]}{i}")
        finally:
            writing[number] = False

    def read() -> None:
        while any(writing):
            assert len(read_notes(folder)) == 1

    in_threads(partial(write, 0), partial(write, 1), read, read)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_a_folder_between_two_renamings_is_found(tmp_path: Path) -> None:
    folder, former = tmp_path / "notes", tmp_path / ".notes.former"
    write_notes(folder, "old")
    folder.rename(former)
    assert read_notes(folder) == {"old"}
    with pytest.raises(ZeroDivisionError), NOTES.writing(folder, {}):
        raise ZeroDivisionError
    assert read_notes(folder) == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_permissions_are_the_usual_ones_at_every_moment(tmp_path: Path) -> None:
    """The process's mask for new files must not change, because other threads create files meanwhile."""
    over = threading.Event()
    seen: set[int] = set()

    def look() -> None:
        while not over.is_set():
            seen.add(int(Path("/proc/self/status").read_text().split("Umask:")[1].split()[0], 8))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(50):
        with replacing(tmp_path / "note") as temporary:
            temporary.chmod(0o600)
        write_notes(tmp_path / "notes", "x")
    over.set()
    thread.join()
    assert len(seen) == 1
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name, usual in (("notes", "folder"), ("note", "file")):
        assert (tmp_path / name).stat().st_mode == (tmp_path / usual).stat().st_mode
