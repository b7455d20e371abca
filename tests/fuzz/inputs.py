"""Makes damaged and hostile inputs from valid ones."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

from subnetact.files import journal

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.5, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *(10**5, 2**31, 2**63, 10**30, 10**400, "", "x", "0", "nan", "../x", "/dev/zero", "é\ud800", "a" * 3000),
    *([], {}, [[]], [None], [1, [2]], {"a": 1}, {"": {}}, [0.7], ["x"], [[[[[[]]]]]], [10**400]),
)


class Finding(Exception):
    """The library raised something that is none of its own errors."""


def changed(value: Any, source: random.Random) -> Any:
    """Return a JSON value with one to three of its parts replaced, removed or doubled."""
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        value = changed_once(value, source)
    return value


def changed_once(value: Any, source: random.Random) -> Any:
    if isinstance(value, dict) and value and source.random() < 0.9:
        key = source.choice(list(value))
        if source.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed_once(value[key], source)}
    if isinstance(value, (list, tuple)) and value and source.random() < 0.9:
        i = source.randrange(len(value))
        if source.random() < 0.1:
            return [*value[:i], *value[i + 1 :]]
        if source.random() < 0.1:
            return [*value[: i + 1], *value[i:]]
        return [*value[:i], changed_once(value[i], source), *value[i + 1 :]]
    return source.choice(NASTY)


def damaged(data: bytes, source: random.Random) -> bytes:
    """Return bytes that are cut, or of which some are changed."""
    raw = bytearray(data)
    kind = source.random()
    if kind < 0.2:
        return bytes(raw[: source.randrange(len(raw) + 1)])
    for _ in range(source.choice((1, 2, 8))):
        if raw:
            at = source.randrange(min(len(raw), 4096) if kind < 0.7 else len(raw))
            raw[at] = source.randrange(256)
    return bytes(raw)


def text(value: Any) -> bytes:
    """Return a JSON value as bytes; NaN and half characters stay in it."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def json_file(path: Path, source: random.Random) -> None:
    """Change a file of JSON in place: a value of it, or its bytes."""
    data = path.read_bytes()
    hostile = damaged(data, source) if source.random() < 0.3 else text(changed(json.loads(data), source))
    path.write_bytes(hostile)


def lines_file(path: Path, source: random.Random) -> None:
    """Change one line of a file with one JSON value per line."""
    lines = path.read_bytes().splitlines()
    i = source.randrange(len(lines))
    bytewise = source.random() < 0.2
    lines[i] = damaged(lines[i], source) if bytewise else text(changed(json.loads(lines[i]), source))
    path.write_bytes(b"\n".join(lines) + b"\n")


def journal_file(path: Path, source: random.Random) -> None:
    """Change a journal, with the right checksums most of the time, as an attacker can."""
    if source.random() < 0.2:
        lines_file(path, source)
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    i = source.randrange(len(lines))
    lines[i] = changed({name: value for name, value in lines[i].items() if name != "sum"}, source)
    known, written = "", []
    for line in lines:
        if isinstance(line, dict) and line:
            line.pop("sum", None)
            signed_line, known = journal.signed(known, line)
            written.append(signed_line.encode("utf-8", "surrogatepass"))
        else:
            written.append(text(line) + b"\n")
    path.write_bytes(b"".join(written))


def tensor_file(path: Path, source: random.Random) -> None:
    """Change a safetensors file in place: JSON in its metadata, its header, or its bytes."""
    data = path.read_bytes()
    if source.random() < 0.3:
        path.write_bytes(damaged(data, source))
        return
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    facts = header.get("__metadata__", {})
    inner = [name for name in facts if facts[name][:1] in ("{", "[")]
    if inner and source.random() < 0.8:
        name = source.choice(inner)
        facts[name] = json.dumps(changed(json.loads(facts[name]), source))
    else:
        header = changed(header, source)
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])


def signed(index: Path, document: dict[str, Any]) -> None:
    """Write the index of a folder with the right checksums, as an attacker can."""
    document.pop("checksum", None)
    files = document.get("files")
    for name in files if isinstance(files, dict) else ():
        path = index.parent / name if isinstance(name, str) and "\0" not in name else index.parent
        if path.is_file() and path.parent == index.parent:
            data = path.read_bytes()
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    whole = json.dumps(document, sort_keys=True).encode()
    index.write_text(json.dumps({**document, "checksum": hashlib.sha256(whole).hexdigest()}))
