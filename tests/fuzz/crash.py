"""Kills a process at every system call while it writes a file or a folder, and looks at what is left.

`python tests/fuzz/crash.py` tries every system call of every writer and writes `crash_points.json`;
`test_crash.py` tries a few of them. Linux only: the process is traced with ptrace, as strace does.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import subnetact
import subnetact.supernet
from subnetact import Engine, LatencyTable, calibrate
from subnetact.digits import load_digits_supernet
from subnetact.export.subnet_program import export_format

__all__ = ["WRITERS", "Writer", "kill_at", "left_behind"]

PATIENCE_S = 30
_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_SYSGOOD, _EXITKILL = 1, 0x100000


@dataclass(frozen=True)
class Writer:
    """Something that is written again and again.

    Attributes:
        write: writes version "old" or "new" to a path.
        read: returns the version that a path holds; raises MissingFile if there is none.
    """

    write: Callable[[Path, str], Any]
    read: Callable[[Path], str]


def kill_at(action: Callable[[], Any], number: int) -> bool:
    """Run an action in a child process, and kill it before its n-th system call, if it has as many.

    Return whether it was killed. `number` counts from 1.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # About forks of processes with threads.
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(PATIENCE_S)
            libc.ptrace(_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    if libc.ptrace(_SETOPTIONS, child, None, _SYSGOOD | _EXITKILL):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise PermissionError("this machine does not allow ptrace")
    calls, entering, passed = 0, True, 0
    while True:
        libc.ptrace(_SYSCALL, child, None, passed)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            raise RuntimeError(f"the writer was ended by signal {os.WTERMSIG(status)}")
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise RuntimeError("the writer failed by itself")
            return False
        stop = os.WSTOPSIG(status)
        passed = 0
        if stop != signal.SIGTRAP | 0x80:
            passed = stop
            continue
        calls += entering
        if entering and calls == number:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        entering = not entering


def left_behind(writer: Writer, folder: Path, old: Path | None, number: int) -> str | None:
    """Kill the writer of "new" at a system call; return "old", "new" or "nothing", or None if it finished.

    The folder is empty, and is emptied again; the earlier version is copied into it first, if there is one.
    """
    target = folder / "target"
    if old is not None:
        (shutil.copytree if old.is_dir() else shutil.copy)(old, target)
    try:
        if not kill_at(lambda: writer.write(target, "new"), number):
            return None
        try:
            return writer.read(target)
        except subnetact.errors.MissingFile:
            return "nothing"
    finally:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


_engines: dict[str, Engine] = {}


def _engine(version: str) -> Engine:
    if not _engines:
        torch.set_num_threads(1)  # A forked child has no other threads to wait for.
        images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
        for name, accuracy in (("old", 60.0), ("new", 70.0)):
            supernet = load_digits_supernet()
            specs = [supernet.space.smallest()]
            calibrate(supernet, specs, [images * accuracy], progress=False)
            with torch.no_grad():
                supernet.network.classifier.bias.fill_(accuracy)
            engine = Engine(supernet, specs, example=images[:1], accuracy=[accuracy])
            engine.tables["cpu"] = _table(name)
            _engines[name] = engine
    return _engines[version]


@cache
def _table(version: str) -> LatencyTable:
    return LatencyTable([_key()], [60.0 if version == "old" else 70.0], [1, 4], [[1.0, 2.0]])


def _key() -> str:
    return load_digits_supernet().space.smallest().key


def _read_bundle(path: Path) -> str:
    loaded = Engine.load(path, check=False, memory_budget_mb=0)  # Only what it holds is looked at.
    bias = float(loaded.supernet.network.classifier.bias.detach()[0])
    table = loaded.tables["cpu"].accuracy[0]
    assert loaded.accuracy[0] == bias == table, "the bundle is a mixture"
    (spec,), version = loaded.specs, "old" if bias == 60.0 else "new"
    assert torch.equal(_flat(loaded.supernet.norms, spec), _row(version)), (
        "the statistics are another version's"
    )
    return version


def _read_norms(path: Path) -> str:
    table = subnetact.supernet.NormTable.load(path)
    (version,) = (v for v in ("old", "new") if torch.equal(_flat(table, next(iter(table))), _row(v)))
    return version


def _flat(table: Any, spec: Any) -> Any:
    return table.get(spec).flat


def _row(version: str) -> Any:
    engine = _engine(version)
    return _flat(engine.supernet.norms, engine.specs[0])


def _write_export(path: Path, version: str) -> None:
    with export_format("subnetact.tests").writing(path, {"version": version}) as folder:
        for name in ("weights.pt", "program-0.pt2", "program-1.pt2"):
            (folder / name).write_text(version)


def _read_export(path: Path) -> str:
    version: str = export_format("subnetact.tests").read_version(
        path,
        lambda folder, facts: (
            facts["version"] if (folder / "program-1.pt2").read_text() == facts["version"] else ""
        ),
    )
    return version


def _read_table(path: Path) -> str:
    return "old" if LatencyTable.load(path) == _table("old") else "new"


_BUNDLE = Writer(lambda path, version: _engine(version).save(path), _read_bundle)
WRITERS = {
    "bundle": _BUNDLE,
    "latency table": Writer(lambda path, version: _table(version).save(path), _read_table),
    "norm table": Writer(lambda path, version: _engine(version).supernet.norms.save(path), _read_norms),
    "export": Writer(_write_export, _read_export),
}


def every_call(writer: Writer, old: Path | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as place:
        number = 1
        while (found := left_behind(writer, Path(place), old, number)) is not None:
            yield found
            number += 1


def main() -> None:
    """Try every system call, print what was left, and write it to `crash_points.json`."""
    found = {}
    for name, writer in WRITERS.items():
        with tempfile.TemporaryDirectory() as place:
            old = Path(place) / "old"
            writer.write(old, "old")
            for earlier in (old, None):
                start, counts = time.perf_counter(), {"old": 0, "new": 0, "nothing": 0}
                for left in every_call(writer, earlier):
                    counts[left] += 1
                label = f"{name}, {'replaced' if earlier else 'new'}"
                found[label] = counts
                print(f"{label}: {counts} in {time.perf_counter() - start:.0f} s", flush=True)
                if earlier and counts["nothing"]:
                    sys.exit(f"{label}: at {counts['nothing']} system calls neither version could be loaded")
    Path(__file__).with_name("crash_points.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
