"""The parameters of a request: how much time it has, and how accurate its answer must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from subnetact.errors import InvalidRequest
from subnetact.serve.exchange import Headers

__all__ = ["Ask", "read_ask", "read_number", "shortened", "time_ms"]

NAMES = ("deadline_ms", "min_accuracy", "priority", "output")
HEADERS = {b"x-deadline-ms": "deadline_ms", b"x-min-accuracy": "min_accuracy", b"x-priority": "priority"}
OUTPUTS = ("class", "values", "npy")


class Ask(NamedTuple):
    """What a request asks for besides its input.

    Attributes:
        deadline_ms: time that the request is given, in ms from its arrival.
        min_accuracy: minimum accuracy of the answering subnet, in percent. If None, any subnet may answer.
        priority: the higher, the more important. If None, 0.
        output: `class`, the index of the largest score, `values`, all outputs as JSON, or `npy`, the output
            as a NumPy file. If None, `class` if the output is one vector, otherwise `values`.
    """

    deadline_ms: float
    min_accuracy: float | None = None
    priority: int | None = None
    output: str | None = None


def read_ask(
    fields: Mapping[str, Any], query: bytes, headers: Headers, usual_ms: float, longest_ms: float
) -> Ask:
    """Read the parameters of a request; a field of the body comes before the query, and this before headers.

    Args:
        fields: the fields of the body.
        query: the query string of the address.
        headers: the headers.
        usual_ms: the deadline of a request that names none, in ms.
        longest_ms: the longest deadline, in ms.

    Raises:
        InvalidRequest: a parameter is malformed.
    """
    found: dict[str, Any] = {}
    for header, name in HEADERS.items():
        text = headers.get(header)
        if text is not None:
            found[name] = read_number(text, header.decode(), name == "priority")
    if query:
        _read_query(query, found)
    for name in NAMES:
        if fields.get(name) is not None:
            found[name] = fields[name]
    if not found:
        return Ask(usual_ms)
    deadline_ms = time_ms(found.get("deadline_ms", usual_ms), "deadline_ms", longest_ms)
    output = found.get("output")
    if output is not None and output not in OUTPUTS:
        raise InvalidRequest(f"output: {shortened(output)} is not known; choose from {', '.join(OUTPUTS)}")
    priority = found.get("priority")
    if priority is not None and (type(priority) is not int or abs(priority) >= 2**31):
        raise InvalidRequest(f"priority: {shortened(priority)} is not a whole number of 32 bits")
    min_accuracy = found.get("min_accuracy")
    if min_accuracy is not None and (type(min_accuracy) not in (int, float) or not 0 <= min_accuracy <= 100):
        raise InvalidRequest(f"min_accuracy: {shortened(min_accuracy)} is not a percentage from 0 to 100")
    return Ask(deadline_ms, min_accuracy, priority, output)


def time_ms(value: Any, name: str, longest_ms: float) -> float:
    """Return a time that a client gives.

    Args:
        value: the time, in ms.
        name: its name.
        longest_ms: the longest time that a client may give, in ms.

    Raises:
        InvalidRequest: it is no number, not above 0, or too long.
    """
    if type(value) not in (int, float) or not 0 < value <= longest_ms:
        raise InvalidRequest(
            f"{name}: {shortened(value)} is not a number > 0 and <= {longest_ms:g}, in ms from now"
        )
    return float(value)


def _read_query(query: bytes, found: dict[str, Any]) -> None:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
    except (ValueError, UnicodeDecodeError):
        raise InvalidRequest("query: not readable; give name=value pairs") from None
    for name, text in pairs:
        if name not in NAMES:
            raise InvalidRequest(f"query: {shortened(name)} is not known; give {', '.join(NAMES)}")
        found[name] = text if name == "output" else read_number(text, name, name == "priority")


def read_number(text: str, name: str, whole: bool = False) -> float:
    """Return a number from a header or a query.

    Args:
        text: the number.
        name: its name.
        whole: whether it has to be a whole number.

    Raises:
        InvalidRequest: the text is no number.
    """
    try:
        if len(text) <= 40 and "_" not in text:
            return int(text) if whole else float(text)
    except ValueError:
        pass
    raise InvalidRequest(f"{name}: {shortened(text)} is not a {'whole ' if whole else ''}number")


def shortened(value: object) -> str:
    """Return a value of a client as it may stand in a message."""
    try:
        text = repr(value)
    except ValueError:  # A whole number with more digits than Python prints.
        text = "a very long number"
    return text if len(text) <= 60 else f"{text[:57]}..."
