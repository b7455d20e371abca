"""Who may use a server: bearer tokens, compared in constant time, and the names of the server."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from os import PathLike

from subnetact.errors import MissingFile, ServeError
from subnetact.files.atomic import read_regular

__all__ = ["Access", "read_tokens"]

SHORTEST = 16


class Access:
    """Checks the `Authorization` header: `Bearer TOKEN`, or `Basic` with the token as the password.

    Browsers, which watch the status page, know only the second form.

    Args:
        tokens: the name of the client per token. If empty, every client may use the server.
        hosts: names by which clients may address the server, without ports. If None, any name.

    Raises:
        ServeError: a token has fewer than 16 characters.
    """

    def __init__(self, tokens: Mapping[str, str], hosts: Iterable[str] | None = None) -> None:
        if any(len(token) < SHORTEST for token in tokens):
            raise ServeError(f"tokens: every token needs at least {SHORTEST} characters")
        self._names = [
            (_digest(token.encode("utf-8", "surrogateescape")), name) for token, name in tokens.items()
        ]
        self._hosts = None if hosts is None else frozenset(name.strip("[]").lower() for name in hosts)

    def client(self, authorization: str | None, address: str) -> str | None:
        """Return the name of the client, or None if the client may not use the server.

        Args:
            authorization: the value of the header.
            address: the client's address, which is the name if the server needs no token.
        """
        if not self._names:
            return address
        given = _digest(_token_of(authorization or ""))
        found = None
        for digest, name in self._names:  # Every token is compared, whichever fits.
            if hmac.compare_digest(digest, given):
                found = name
        return found

    def serves(self, host: str | None) -> bool:
        """Return whether the server may be addressed by a name.

        A web page of a foreign site can make a browser send requests to this machine (DNS rebinding); the
        browser then names the foreign site.

        Args:
            host: the value of the header `Host`. Without the header, the request is no browser's.
        """
        if self._hosts is None or host is None:
            return True
        name, colon, port = host.rpartition(":")
        name = name if colon and port.isdigit() and name else host
        return name.strip("[]").lower() in self._hosts


def read_tokens(path: str | PathLike[str]) -> dict[str, str]:
    """Read a file of tokens: one per line, after the name of its client and a space if there are several.

    Args:
        path: the file.

    Returns:
        The name of the client per token.

    Raises:
        MissingFile: the file cannot be read.
        FileFormatError: the path names a device, a pipe or a socket.
        ServeError: the file has no token, or the same token twice.
    """
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
    except (MissingFile, UnicodeDecodeError) as error:
        raise MissingFile(f"token file: {path} cannot be read ({error})") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) > 2 or words[-1] in tokens:
            raise ServeError(
                f"token file: line {number} must be NAME TOKEN or TOKEN, and no token may repeat"
            )
        tokens[words[-1]] = words[0] if len(words) == 2 else f"token {number}"
    if not tokens:
        raise ServeError("token file: there is no token in it; write one per line")
    return tokens


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()  # Digests have equal lengths, so that comparing reveals none.


def _token_of(authorization: str) -> bytes:
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("latin-1")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
