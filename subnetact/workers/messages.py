"""Messages between a worker process and its parent: a kind, some bytes, and file descriptors."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

__all__ = [
    "ANSWER",
    "CHANGE",
    "DONE",
    "FAILED",
    "RUN",
    "receive",
    "receive_descriptors",
    "send",
]

RUN = b"r"
CHANGE = b"c"
ANSWER = b"a"
DONE = b"d"
FAILED = b"f"
_HEADER = struct.Struct("!cHI")


def send(pipe: socket.socket, kind: bytes, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one message. The other end reads it before it gets the next one.

    Args:
        pipe: a stream socket.
        kind: the kind, one byte.
        data: the content.
        descriptors: file descriptors; they follow the message.

    Raises:
        OSError: the other end is closed.
    """
    pipe.sendall(_HEADER.pack(kind, len(descriptors), len(data)) + data)
    if descriptors:
        socket.send_fds(pipe, [b"."], list(descriptors))


def receive(pipe: socket.socket) -> tuple[bytes, bytes, int]:
    """Wait for one message.

    Args:
        pipe: a stream socket.

    Returns:
        The kind, the content, and the number of file descriptors that follow.

    Raises:
        EOFError: the other end is closed.
        OSError: the connection was reset.
    """
    kind, descriptors, size = _HEADER.unpack(_exactly(pipe, _HEADER.size))
    return kind, _exactly(pipe, size) if size else b"", descriptors


def receive_descriptors(pipe: socket.socket, count: int) -> list[int]:
    """Return the file descriptors that follow a message.

    Args:
        pipe: a stream socket.
        count: their number.

    Raises:
        EOFError: the other end is closed.
    """
    if not count:
        return []
    data, descriptors, _, _ = socket.recv_fds(pipe, 1, count)
    if not data or len(descriptors) != count:
        raise EOFError
    return descriptors


def _exactly(pipe: socket.socket, size: int) -> bytes:
    data = pipe.recv(size)
    if len(data) == size:
        return data
    parts = bytearray(data)
    while data and len(parts) < size:
        data = pipe.recv(size - len(parts))
        parts += data
    if len(parts) < size:
        raise EOFError
    return bytes(parts)
