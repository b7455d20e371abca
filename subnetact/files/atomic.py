"""Files and folders that are replaced as a whole: readers find the old version or the new one, never a part.

A writer prepares the new version under a temporary name beside the target, flushes it to the disk and renames
it. The writer holds a lock on the temporary version as long as it lives. A temporary version without a lock
was left behind by a writer that was killed, and the next writer of the same target removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from subnetact.errors import FileFormatError, MissingFile, SubnetActError, WriteError

try:
    import fcntl
except ImportError:  # Windows has no such locks; temporary versions are not removed there.
    fcntl = None  # type: ignore[assignment]

__all__ = ["one_version", "read_regular", "replacing", "replacing_folder", "require_regular"]

Result = TypeVar("Result")
SUFFIX = "partial"
TRIES = 100
"""How often a reader begins again because the folder was replaced while the reader was at work."""
_HERE = -100
_EXCHANGE = 2
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def require_regular(path: str | os.PathLike[str]) -> None:
    """Check that a path names an ordinary file, so that reading it neither waits nor goes on for ever.

    Args:
        path: the file; symbolic links are followed.

    Raises:
        MissingFile: there is no such file.
        FileFormatError: the path names a folder, a device, a pipe or a socket, or cannot be looked up.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFile(f"{path}: no file is there; give the path of an existing file") from error
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: not readable ({error})") from error
    if not stat.S_ISREG(mode):
        raise FileFormatError(f"{path}: not readable, it is {_kind(mode)} and not a file; give a file")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of an ordinary file.

    Args:
        path: the file; symbolic links are followed.

    Raises:
        OSError: the file cannot be read.
        FileFormatError: the path names a device, a pipe or a socket.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise FileFormatError(f"{path}: not readable, it is {_kind(mode)} and not a file; give a file")
        return file.read()


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces `path`, on error it is removed.

    The new file is on the disk before it replaces the old one. It gets the permissions that any new file of
    this process gets. If `path` is a symbolic link, the file that it points to is replaced.

    Args:
        path: the file; an earlier one is replaced.

    Raises:
        MissingFile: the folder of the file does not exist.
        WriteError: `path` is a folder, a device, a pipe or a socket, or the file cannot be written, for
            example because the disk is full. An earlier file is then unchanged.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise MissingFile(f"{target}: its folder {target.parent} does not exist; create it first")
    with _errors_of(target):
        if target.exists() and not target.is_file():
            kind = _kind(target.stat().st_mode)
            raise WriteError(f"{target}: is {kind}, which no file can replace; choose another path")
        _remove_leftovers(target)
        with _temporary(target, _create) as temporary:
            usual = temporary.stat().st_mode & 0o777
            yield temporary
            temporary.chmod(usual)
            _flush(temporary)
            os.replace(temporary, target)
            _flush(target.parent)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], marker: str, noun: str) -> Iterator[Path]:
    """Yield a temporary folder next to `path`; on success it replaces `path`, on error it is removed.

    At every moment there is an earlier version or the new one, complete and on the disk. If several
    processes write the same folder, one of them after the other puts its version into place.

    Args:
        path: new, empty, or a folder that holds `marker`, which is then replaced as a whole. If it is a
            symbolic link, the folder that it points to is replaced.
        marker: the file that every folder of this kind holds.
        noun: the kind with an article, for messages.

    Raises:
        FileFormatError: the folder holds something else.
        WriteError: the folder cannot be written, for example because the disk is full. An earlier version is
            then unchanged.
    """
    target = Path(os.path.realpath(path))
    with _errors_of(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent):
            _refuse_others(target, marker, noun)
        _remove_leftovers(target)
        with _temporary(target, os.mkdir) as temporary:
            yield temporary
            for inner in (temporary, *temporary.rglob("*")):
                _flush(inner)
            with _locked(target.parent):
                _refuse_others(target, marker, noun)
                _exchange_or_move(temporary, target)
            _flush(target.parent)


def one_version(path: str | os.PathLike[str], read: Callable[[Path], Result]) -> Result:
    """Read several files of a folder such that all of them are of one version.

    If another process replaces the folder meanwhile, reading begins again.

    Args:
        path: a folder that `replacing_folder` wrote.
        read: gets the folder to read from. It may be called several times, and must change nothing.

    Returns:
        What `read` returned.

    Raises:
        FileFormatError: the folder was replaced again and again. Errors of `read` are raised as they are.
    """
    target = Path(path)
    for _ in range(TRIES):
        previous = _previous(Path(os.path.realpath(target)))
        folder = target if target.exists() or not previous.exists() else previous
        with _held(folder, target) as same:
            try:
                result = read(folder)
            except Exception:
                if same():
                    raise
                continue
            if same():
                return result
    raise FileFormatError(f"{target}: is replaced faster than it can be read; let one process write it")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no ordinary file")


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


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


@contextmanager
def _temporary(target: Path, create: Callable[[Path], Any]) -> Iterator[Path]:
    """Yield a new file or folder beside the target, locked; in the end it is removed if it is still there."""
    while True:
        path = target.with_name(f".{target.name}.{token_hex(8)}.{SUFFIX}")
        create(path)
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # Another writer took it for a leftover before it was locked.
            continue
        _lock(lock)
        if _is_at(lock, path):
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


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process after the other into the block."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary versions of writers that were killed."""
    if fcntl is None:
        return
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.{SUFFIX}")
    for path in [Path(entry) for entry in os.scandir(target.parent) if name.fullmatch(entry.name)]:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if _lock(handle, wait=False):
                    _remove(path)
            finally:
                os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # This file system cannot do it.
            raise
    finally:
        os.close(handle)


def _refuse_others(target: Path, marker: str, noun: str) -> None:
    previous = _previous(target)
    if not target.exists() and (previous / marker).is_file():
        os.rename(previous, target)  # The last writer was killed between its two renamings.
    if target.exists() and (
        not target.is_dir() or (any(target.iterdir()) and not (target / marker).is_file())
    ):
        raise FileFormatError(f"{target}: holds something else than {noun}; choose a new directory")


def _previous(target: Path) -> Path:
    """Where the earlier version is while the new one takes its place, if the two cannot be exchanged."""
    return target.with_name(f".{target.name}.previous")


def _exchange_or_move(new: Path, target: Path) -> None:
    """Put a folder at the target; if there is an earlier version, `new` is afterwards its path."""
    if not target.exists():
        os.rename(new, target)
    elif not _exchange(new, target):
        previous = _previous(target)
        _remove(previous)
        os.rename(target, previous)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(previous, target)
            raise
        _flush(target.parent)
        _remove(previous)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False if this system or file system cannot do it."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, "renameat2", None)
    if function is None or function(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = errno.ENOSYS if function is None else ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
            raise OSError(code, os.strerror(code), str(other))
        return False
    return True


@contextmanager
def _held(folder: Path, target: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether the folder is still the version of the target to read."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        places = (target, _previous(Path(os.path.realpath(target))), target)
        yield lambda: not any(place.exists() for place in places)
        return
    except OSError:  # Not readable, or Windows, which opens no folders.
        yield lambda: True
        return
    try:
        yield lambda: _is_at(handle, folder) and (folder == target or not target.exists())
    finally:
        os.close(handle)
