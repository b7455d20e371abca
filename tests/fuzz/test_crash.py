"""A writer that is killed at any system call leaves the earlier version or the new one, which loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fuzz.crash import WRITERS, kill_at, left_behind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ptrace is traced on Linux only")
STRIDE = {"bundle": 41, "export": 13}
"""How many system calls are passed over between two kills; crash.py tries all of them."""


@pytest.fixture(autouse=True)
def _traceable() -> None:
    try:
        kill_at(lambda: None, 1)
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_a_killed_writer_leaves_a_version_that_loads(tmp_path: Path, name: str, replaced: bool) -> None:
    writer, place, old = WRITERS[name], tmp_path / "place", tmp_path / "old"
    place.mkdir()
    writer.write(old, "old")
    found = []
    number = 3
    while (left := left_behind(writer, place, old if replaced else None, number)) is not None:
        found.append(left)
        number += STRIDE.get(name, 5)
    assert len(found) > 3
    assert set(found) <= ({"old", "new"} if replaced else {"nothing", "new"})
    assert found == sorted(found, key=["old", "nothing", "new"].index)


def test_the_number_of_a_call_is_exact(tmp_path: Path) -> None:
    def touch() -> None:
        for i in range(10):
            (tmp_path / str(i)).mkdir()

    counts = []
    for number in range(1, 40):
        if not kill_at(touch, number):
            break
        counts.append(len(list(tmp_path.iterdir())))
        for path in tmp_path.iterdir():
            path.rmdir()
    assert counts == sorted(counts)
    assert set(range(10)) <= set(counts)
