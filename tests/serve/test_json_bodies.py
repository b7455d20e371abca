"""JSON bodies mean what `json.loads` reads, whatever their length; what is no JSON is refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import InvalidRequest
from subnetact.serve.base_app import SHORT
from subnetact.serve.exchange import read_json
from subnetact.serve.payloads import Signature

SQUARE = Signature(torch.zeros(1, 64, 64))
TOKENS = (*"][, -+01.\n", "e5", "E+2", ".5", "00", "][", "],[", "null", "true", '"', "1e999", "-0", "9" * 30)
TOKENS += ("]e5", "].5", "]+", "e[", "[e5", "NaN", "Infinity", "\ud800", "{}")


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def meaning(text: bytes) -> torch.Tensor | None:
    """Return the input that a text holds by the standard library, or None if it holds none."""
    try:
        values = json.loads(text.decode(), parse_constant=refuse_constant)["input"]
        flat = np.array(values, dtype=object)
        if flat.shape not in ((4096,), (1, 64, 64)) or not set(map(type, flat.flat)) <= {int, float}:
            return None
        found = torch.tensor(flat.astype(np.float64), dtype=torch.float32).reshape(1, 64, 64)
        return None if found.isinf().any() else found
    except (ValueError, TypeError, KeyError):
        return None


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_a_damaged_long_body_is_refused_or_means_what_json_says(seed: int) -> None:
    source = random.Random(seed)
    values = [round(source.uniform(-9, 9), 4) for _ in range(4096)]
    rows = [[values[i : i + 64] for i in range(0, 4096, 64)]]
    text = json.dumps(source.choice((values, rows)))
    for _ in range(source.choice((0, 1, 1, 2))):
        at, token = source.randrange(1, len(text)), source.choice(TOKENS)
        if source.random() < 0.5:  # beside a bracket or a comma, where a reader takes texts apart
            at = max(text.find(source.choice("],["), at), 0) + source.randrange(2)
        text = text[:at] + token + text[at + source.randrange(2) :]
    body = f'{{"input": {text}, "deadline_ms": 50}}'.encode("utf-8", "surrogatepass")
    assert len(body) > SHORT // 2
    try:
        expected = meaning(body)
    except UnicodeDecodeError:
        expected = None
    try:
        found = SQUARE.from_values(read_json(body)["input"])
    except InvalidRequest:
        found = None
    assert (found is None) == (expected is None)
    assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize("padding", [0, 2 * SHORT])
@pytest.mark.parametrize(
    "text",
    [
        *(b"{", b"", b"[1,]", b"[1 2]", b"[01]", b"[1.]", b"[.5]", b"[+1]"),
        *(b"[1[2]]", b"[[1]2]", b"[[1]e5]", b"[1]]", b"[NaN]", b"[Infinity]", b"[-Infinity]", b"[1e999]"),
        b"[" + b"9" * 400 + b"]",
        b'"\\ud800"',
        b'"\xff"',
        b'"\x01"',
        b"\xef\xbb\xbf[]",
        "[]".encode("utf-16"),
        b"[" * 2000 + b"]" * 2000,
        b"[" * 50_000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
    ],
)
def test_what_is_no_json_is_refused_at_any_length(text: bytes, padding: int) -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        read_json(text + b" " * padding)


@pytest.mark.parametrize("padding", [0, 2 * SHORT])
def test_the_last_of_equal_names_counts(padding: int) -> None:
    assert read_json(b'{"a": 1, "a": [2]}' + b" " * padding) == {"a": [2]}


FLOATS = Signature(torch.zeros(2, 2))
WHOLE = Signature(torch.zeros(2, 2, dtype=torch.int8))
SIGNS = Signature(torch.zeros(2, 2, dtype=torch.bool))
SCALAR = Signature(torch.tensor(0.0))


MEANT = [
    (FLOATS, [1, 2.5, -3, 0], [[1.0, 2.5], [-3.0, 0.0]]),
    (FLOATS, [[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]]),
    (FLOATS, [10**30, 0, 0, 0], [[1e30, 0.0], [0.0, 0.0]]),
    (WHOLE, [1, -128, 127, 0], [[1, -128], [127, 0]]),
    (SIGNS, [True, False, 1, 0], [[True, False], [True, False]]),
    (SCALAR, 2.5, 2.5),
    (SCALAR, [2.5], 2.5),
]
MEANINGLESS: list[tuple[Signature, list[object]]] = [
    (FLOATS, [[value, 1, 1, 1] for value in (True, "1", None, 1e39)]),
    (FLOATS, [[1, 2, 3], [1, 2, 3, 4, 5], [[1, 2, 3, 4]], [[1, 2], [3]], [[[1], [2]], [[3], [4]]]]),
    (FLOATS, [[[1, 2], 3], 5, {}, "abcd", None]),
    (WHOLE, [[value, 2, 3, 4] for value in (1.0, 128, 10**30, True)]),
    (SIGNS, [[2, 0, 0, 0], [1.0, 0, 0, 0]]),
    (SCALAR, [[[2.5]], True]),
]


def test_values_are_those_of_the_dtype_in_the_shape() -> None:
    for signature, values, expected in MEANT:
        found = signature.from_values(values)
        assert torch.equal(found, torch.tensor(expected, dtype=signature.parts[0].dtype))
    for signature, several in MEANINGLESS:
        for wrong in several:
            with pytest.raises(InvalidRequest, match="nested like it or all"):
                signature.from_values(wrong)
