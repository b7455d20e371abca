"""Files and folders that are replaced as a whole: readers find the old version or the new one, never a part.

A writer prepares the new version under a temporary name beside the target, flushes it to the disk and renames
it. It holds a lock on the temporary version as long as it lives, so that the next writer of the same target
removes what killed writers left behind. A folder cannot be renamed over another one: the earlier version is
moved aside for a moment, where `one_version` and the next writer find it if the process is killed just then.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from subnetact.errors import FileFormatError, MissingFile, SubnetActError, WriteError

try:
    import fcntl
except ImportError:  # Windows has no such locks; what killed writers leave is not removed there.
    fcntl = None  # type: ignore[assignment]


Result = TypeVar("Result")
SUFFIX = "partial"
MOST_READS = 100
"""How often a reader begins again because the folder was replaced while the reader was at work."""


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise MissingFile or FileFormatError unless a path is an ordinary file, so that reading it ends."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFile(f"{path}: no file is there; give the path of an existing file") from error
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: not readable ({error})") from error
    if not stat.S_ISREG(mode):
        raise FileFormatError(f"{path}: not readable, it is {_kind(mode)} and not a file; give a file")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of an ordinary file; MissingFile or FileFormatError if it cannot be read."""
    require_regular(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileFormatError(f"{path}: not readable ({error})") from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` (or what it links to) on success, and goes on error."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise MissingFile(f"{target}: its folder {target.parent} does not exist; create it first")
    with _errors_of(target):
        if target.exists() and not target.is_file():
            kind = _kind(target.stat().st_mode)
            raise WriteError(f"{target}: is {kind}, which no file can replace; choose another path")
        with _temporary(target, Path.touch) as temporary:
            usual = temporary.stat().st_mode & 0o777
            yield temporary
            temporary.chmod(usual)
            _flush(temporary)
            os.replace(temporary, target)
            _flush(target.parent)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], marker: str, noun: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path`: new, empty, or a folder that holds the file `marker`."""
    target = Path(os.path.realpath(path))
    former = _former(target)
    with _errors_of(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent):
            _refuse_others(target, marker, noun)
        with _temporary(target, Path.mkdir) as temporary:
            yield temporary
            for inner in (temporary, *temporary.rglob("*")):
                _flush(inner)
            with _locked(target.parent):
                _refuse_others(target, marker, noun)
                _remove(former)
                if target.exists():
                    os.rename(target, former)
                os.rename(temporary, target)
                _flush(target.parent)
                _remove(former)


def one_version(path: str | os.PathLike[str], read: Callable[[Path], Result]) -> Result:
    """Return what `read` returns of a folder; it is called again if the folder is replaced meanwhile."""
    target = Path(path)
    former = _former(Path(os.path.realpath(target)))
    for _ in range(MOST_READS):
        folder = former if former.exists() and not target.exists() else target
        before = _version(folder)
        try:
            result = read(folder)
        except Exception:
            missing = not any(place.exists() for place in (target, former, target))
            if missing or (before is not None and _version(folder) == before):
                raise
        else:
            if _version(folder) == before:
                return result
    raise FileFormatError(f"{target}: is replaced faster than it can be read; let one process write it")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


@contextmanager
def _errors_of(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, SubnetActError):
            raise
        raise WriteError(
            f"{target}: not written ({error.strerror or error}); an earlier version is unchanged"
        ) from error


@contextmanager
def _temporary(target: Path, create: Callable[[Path], Any]) -> Iterator[Path]:
    """Yield a new file or folder beside the target, locked; in the end it is removed if it is still there."""
    _remove_leftovers(target)
    while True:
        path = target.with_name(f".{target.name}.{token_hex(8)}.{SUFFIX}")
        create(path)
        with suppress(FileNotFoundError):  # Another writer may take it for a leftover before it is locked.
            lock = os.open(path, os.O_RDONLY)
            _lock(lock)
            if path.exists():
                break
            os.close(lock)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _lock(handle: int, wait: bool = True) -> bool:
    """Lock an open file or folder until it is closed; tell whether the lock was free."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # It is taken, or this file system has no locks.
        return False
    return True


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Yield a handle of a file or folder, open for reading."""
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process after the other into the block."""
    with _opened(folder) as handle:
        _lock(handle)
        yield


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary versions of writers that were killed."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.{SUFFIX}")
    for path in [Path(entry) for entry in os.scandir(target.parent) if name.fullmatch(entry.name)]:
        with suppress(OSError), _opened(path, os.O_NONBLOCK | os.O_NOFOLLOW) as handle:
            if _lock(handle, wait=False):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    with _opened(path) as handle:
        try:
            os.fsync(handle)
        except OSError as error:  # Some file systems cannot do it.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise


def _refuse_others(target: Path, marker: str, noun: str) -> None:
    former = _former(target)
    if not target.exists() and (former / marker).is_file():
        os.rename(former, target)  # The last writer was killed between its two renamings.
    ours = target.is_dir() and (not any(target.iterdir()) or (target / marker).is_file())
    if target.exists() and not ours:
        raise FileFormatError(f"{target}: holds something else than {noun}; choose a new directory")


def _former(target: Path) -> Path:
    """Where the earlier version of a folder is while the new one takes its place."""
    return target.with_name(f".{target.name}.former")


def _version(folder: Path) -> tuple[int, int] | None:
    """Return what differs between two versions of a folder; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
