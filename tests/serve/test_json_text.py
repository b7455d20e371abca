"""Long JSON is read in pieces, and means what `json.loads` reads."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import InvalidRequest
from subnetact.serve.json_text import SHORT, NumberArray, read_json, tensor_json

SPACES = st.sampled_from(["", " ", "\n", "\t ", "  "])


def text_of(array, space):
    inner = (text_of(part, space) for part in array) if isinstance(array, list) else None
    return (
        f"{space}[{space}{f'{space},'.join(inner)}{space}]{space}"
        if inner is not None
        else f"{space}{array!r}"
    )


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([(6000,), (2, 3000), (3, 50, 40), (1, 1, 6000), (1500, 4)]),
    st.booleans(),
    SPACES,
    st.integers(0, 10**6),
)
def test_a_long_array_is_what_json_reads(shape, whole, space, seed):
    rng = np.random.default_rng(seed)
    given_ = rng.integers(-(2**40), 2**40, shape) if whole else rng.standard_normal(shape) * 1e5
    text = f'{{"a": 1.5, "input": {text_of(given_.tolist(), space)}, "b": [1, 2]}}'.encode()
    assert len(text) > SHORT
    found = read_json(text)
    assert isinstance(found["input"], NumberArray)
    assert np.array_equal(found["input"].shaped(shape), given_)
    assert (found["a"], found["b"]) == (1.5, [1, 2])
    with pytest.raises(ValueError, match=r"nested|reshape"):
        found["input"].shaped((7, *shape))


NUMBERS = b",".join(b"1.5" for _ in range(12_000))


@pytest.mark.parametrize(
    "text",
    [
        b"[" + NUMBERS,
        b"[" + NUMBERS + b",]",
        b"[" + NUMBERS + b",,1]",
        b"[" + NUMBERS + b" 1]",
        b"[" + NUMBERS + b"]]",
        b"[" + NUMBERS + b",-]",
        b"[" + NUMBERS + b",01]",
        b"[" + NUMBERS + b",1e]",
        b"[" + NUMBERS + b",." + b"]",
        b"[1[" + NUMBERS + b"]]",
        b"[[" + NUMBERS + b"]1]",
        b"[" + NUMBERS + b",1][1]",
        b"[" + b"1" * 40_000 + b"]",
        b"[" + NUMBERS + b"," + b"9" * 30 + b"]",
        b"[" * 50_000,
        b"[" * 50_000 + b"]" * 50_000,
        b"[" + b"{}," * 20_000 + b"{}]",
        b'["' + b"a" * 50_000 + b'"]',
        b"[" + b"[a," * 20_000,
        b"\xff" * 50_000,
    ],
    ids=range(20),
)
def test_long_texts_that_are_not_json_are_refused(text):
    """Refused by the reader, or by the shape that the array has to have."""
    found = None
    with contextlib.suppress(InvalidRequest):
        found = read_json(b'{"input": ' + text + b"}")["input"]
    if found is not None:
        assert isinstance(found, NumberArray)
        for shape in ((12_000,), (12_001,), (1, 12_000), (1, 12_001), (2, 12_000)):
            with pytest.raises(ValueError, match=r"nested|reshape"):
                found.shaped(shape)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 40_000))
def test_no_text_raises_anything_else(text, at):
    array = b'{"input": [' + NUMBERS + b"]}"
    with contextlib.suppress(InvalidRequest):
        read_json(array[:at] + text + array[at:])


def test_a_text_cannot_name_arrays_of_its_own():
    long = b"[" + NUMBERS + b"]"
    found = read_json(b'{"input": ' + long + ', "x": "\ue000array7", "y": "\ue000arrayx"}'.encode())
    assert (found["x"], found["y"]) == ("\ue000array7", "\ue000arrayx")


def test_values_that_json_does_not_have_become_null():
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    assert json.loads(tensor_json(values)) == [[1.0, None], [None, 2.0]]
    assert json.loads(tensor_json(torch.tensor([True, False]))) == [True, False]
