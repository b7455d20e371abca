"""The parameters of a request: how much time it has, and how accurate its answer must be."""

from __future__ import annotations

from functools import cache
from typing import Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field

from subnetact.errors import InvalidRequest
from subnetact.serve.exchange import Headers, shortened, validated

__all__ = ["Ask", "Strict", "Terms", "header_values", "read_ask", "too_long"]


class Strict(BaseModel):
    """A body, or a part of one: no truth value is a number, and no text either."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Terms(Strict):
    """What every request may ask for; a name in a header is `x-deadline-ms` and so on."""

    deadline_ms: float | None = Field(default=None, gt=0, description="time to the answer, in ms")
    min_accuracy: float | None = Field(
        default=None, ge=0, le=100, description="minimum accuracy of the answering subnet, in percent"
    )
    priority: int | None = Field(
        default=None,
        gt=-(2**31),
        lt=2**31,
        description="requests of lower priority expire first",
    )


class Ask(Terms):
    """What a request of `/infer` asks for besides its input."""

    output: Literal["class", "values", "npy"] | None = Field(
        default=None,
        description="class, the index of the largest score; values, all outputs as JSON; or npy, the output "
        "as a NumPy file. If absent, class if the output is one vector, otherwise values",
    )


def read_ask(ask: Terms, query: bytes, headers: Headers, usual_ms: float, longest_ms: float) -> float:
    """Fill what a body leaves out from the query, then from headers; return the deadline, usual or given.

    Raises:
        InvalidRequest: a parameter is malformed, or the deadline is beyond the longest one.
    """
    texts = header_values(Terms, headers)
    if query:
        try:
            texts |= parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
        except (ValueError, UnicodeDecodeError):
            raise InvalidRequest("query: not readable; give name=value pairs") from None
    given = vars(ask)  # pydantic's setattr takes 20 us
    if texts:
        found = vars(validated(Ask.model_validate_strings, texts))
        given |= {name: found[name] for name in texts if given.get(name, name) is None}
    if given["deadline_ms"] is None:
        given["deadline_ms"] = usual_ms
    if given["deadline_ms"] > longest_ms:
        raise too_long("deadline_ms", given["deadline_ms"], longest_ms)
    return float(given["deadline_ms"])


def header_values(model: type[BaseModel], headers: Headers) -> dict[str, str]:
    """Return the fields of a model that are given as headers."""
    return {name: text for name, key in _header_names(model) if (text := headers.get(key)) is not None}


@cache
def _header_names(model: type[BaseModel]) -> list[tuple[str, bytes]]:
    return [(name, f"x-{name.replace('_', '-')}".encode()) for name in model.model_fields]


def too_long(name: str, value: float, longest_ms: float) -> InvalidRequest:
    """Return the error of a time that is longer than the limit of the server."""
    return InvalidRequest(f"{name}: got {shortened(value)}, the most is {longest_ms:g} ms")
