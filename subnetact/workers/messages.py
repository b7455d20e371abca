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
    """Send one message of a kind, one byte; file descriptors follow it."""
    pipe.sendall(_HEADER.pack(kind, len(descriptors), len(data)) + data)
    if descriptors:
        socket.send_fds(pipe, [b"."], list(descriptors))


def receive(pipe: socket.socket) -> tuple[bytes, bytes, int]:
    """Wait for a message; return its kind, its content, and the number of file descriptors that follow."""
    kind, descriptors, size = _HEADER.unpack(_exactly(pipe, _HEADER.size))
    return kind, _exactly(pipe, size) if size else b"", descriptors


def receive_descriptors(pipe: socket.socket, count: int) -> list[int]:
    """Return the file descriptors that follow a message."""
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
