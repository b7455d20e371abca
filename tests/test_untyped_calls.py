"""Calls with arguments that Python or torch would refuse in their own words end in errors of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subnetact import Axis, Engine, SubnetSpace, SubnetSpec, Supernet, calibrate, evaluate
from subnetact.errors import (
    CheckpointError,
    DeviceError,
    EngineError,
    ExportError,
    IllegalChoice,
    InsertError,
    SpecError,
)
from subnetact.export import to_triton
from subnetact.operators import LayerNormSlice, SubnetNorm, WeightSlice
from subnetact.space import Slot

SPACE = SubnetSpace("s", [Axis("w", (Slot("it", (0.5, 1.0)),))], lambda v: {"c": int(8 * v["w"][0])})
HUGE = 10**400
NUMBERED = "abcdefghijklmn"
"""Names of cases, because Python does not write the largest of the numbers."""


@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, 10**5000, float("inf"), float("nan"), np.float64("inf")], ids=NUMBERED[:6]
)
def test_huge_values_are_no_choices(value: Any) -> None:
    with pytest.raises(IllegalChoice, match=r"w\[0\] \(it\): .* is not a choice; choose from 0\.5, 1\.0"):
        SPACE.spec(w=[value])
    with pytest.raises(SpecError):
        SPACE.check(SubnetSpec(SPACE.id, (("w", (value,)),)))


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(3),
        torch.zeros(2),
        [1, 2],
        "spec",
        None,
        {},
        {"space": "s", "values": {"w": "0.5"}},
        {"space": "s", "values": [1]},
        {"space": None, "values": {"w": [1]}},
        {"space": "s", "values": {"w": [HUGE]}},
        {"space": "s", "values": {"w": [10**5000]}},
        {"space": "s", "values": {"w": [float("nan")]}},
        {"space": "s", "values": {"w": [[1]]}},
        {"space": "s", "values": {"w": [True]}},
    ],
    ids=NUMBERED,
)
def test_what_is_no_specification_is_refused_in_one_line(data: Any) -> None:
    with pytest.raises(SpecError, match="specification") as caught:
        SubnetSpec.from_json(data)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_specifications_still_make_the_round() -> None:
    spec = SPACE.smallest()
    assert SubnetSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("operator", [WeightSlice, SubnetNorm, LayerNormSlice])
def test_an_operator_is_described_with_on(operator: Any) -> None:
    with pytest.raises(InsertError, match=rf"describe a module with {operator.__name__}\.on\("):
        operator(out="c")
    with pytest.raises(InsertError, match=r"is made by insert_"):
        operator("c")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda s: Engine(s, [s.space.largest()], memory_budget_mb="8"),
            EngineError,
            "memory_budget_mb: '8' must",
        ),
        (lambda s: Engine(s, [s.space.largest()], device=3.5), DeviceError, "device '3.5' cannot be used"),
        (lambda s: calibrate(s, [s.space.largest()], None), SpecError, r"calibrate takes lists .*\[batch\]"),
        (lambda s: calibrate(s, None, [torch.zeros(1, 1, 16, 16)]), SpecError, r"calibrate takes lists"),
        (lambda s: calibrate(s, [s.space.largest()], "images"), SpecError, r"calibrate takes lists"),
        (lambda s: evaluate(s, [s.space.largest()], None), SpecError, r"write \[\(inputs, labels\)\]"),
        (lambda s: s.check(torch.zeros(0, 1, 16, 16)), SpecError, "without values, which shows nothing"),
        (lambda s: s.load_state_dict(None), CheckpointError, "expected tensors by name, got NoneType"),
        (
            lambda s: s.load_state_dict({n: t.tolist() for n, t in s.state_dict().items()}),
            CheckpointError,
            "stem.weight is no tensor",
        ),
    ],
)
def test_arguments_of_another_kind_are_told_what_is_expected(
    digits: Supernet, call: Callable[[Supernet], Any], error: type[Exception], words: str
) -> None:
    before = {name: tensor.clone() for name, tensor in digits.state_dict().items()}
    with pytest.raises(error, match=words):
        call(digits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in digits.state_dict().items())


@pytest.mark.parametrize("name", [None, 3, b"digits", ""])
def test_the_name_of_a_triton_model_is_a_string(digits: Supernet, tmp_path: Path, name: Any) -> None:
    with pytest.raises(ExportError, match=r"name: .* is not a model name"):
        to_triton(digits, tmp_path, "python", name=name)
