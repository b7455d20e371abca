"""Who may use a server: bearer tokens, compared in constant time."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike

from subnetact.errors import MissingFile, ServeError
from subnetact.files.atomic import read_regular
from subnetact.serve.exchange import Refusal

SHORTEST = 16


class Access:
    """Checks the `Authorization` header against the names of clients per token; without any, all may enter.

    `Bearer TOKEN`, or `Basic` with the token as the password, which is all that browsers know.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        if any(len(token) < SHORTEST for token in tokens):
            raise ServeError(f"tokens: every token needs at least {SHORTEST} characters")
        # Digests have equal lengths, so that comparing reveals none.
        digests = [hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest() for token in tokens]
        self._names = list(zip(digests, tokens.values(), strict=True))
        self.needed = bool(tokens)

    def client(self, authorization: str | None, address: str, open_: bool = False) -> str:
        """Return the client's name, or its address if no token is needed; `open_` addresses need none."""
        if not self.needed:
            return address
        given = hashlib.sha256(_token_of(authorization or "")).digest()
        # Every token is compared, whichever fits.
        found = [name for digest, name in self._names if hmac.compare_digest(digest, given)]
        if found or open_:
            return "".join(found)
        message = "give the server's token: Authorization: Bearer TOKEN"
        needed = {"WWW-Authenticate": 'Bearer, Basic realm="subnetact"'}
        raise Refusal(401, "Unauthorized", message, needed)


def read_tokens(path: str | PathLike[str]) -> dict[str, str]:
    """Return the name of the client per token from the file `path`.

    It has one token per line, after the name of its client and a space if there are several.

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
    for n, words in enumerate(map(str.split, lines), 1):
        if not words:
            continue
        if len(words) > 2 or words[-1] in tokens:
            raise ServeError(f"token file: line {n} must be NAME TOKEN or TOKEN, and no token may repeat")
        tokens[words[-1]] = words[0] if len(words) == 2 else f"token {n}"
    if not tokens:
        raise ServeError("token file: there is no token in it; write one per line")
    return tokens


def _token_of(authorization: str) -> bytes:
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("latin-1")
    with suppress(ValueError):
        if kind.lower() == "basic":
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""
