"""Exports of a network with two inputs, token ids and an attention mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_families import small_inputs, small_supernet
from torch import Tensor

from subnetact import Engine
from subnetact.errors import ExportError, InvalidRequest
from subnetact.export import load_exported, to_exported_programs, to_onnx, to_torchscript, to_triton


def batch(n: int) -> dict[str, Tensor]:
    """Different sentences, every second one with padding, which the mask hides."""
    inputs = small_inputs("dynabert", n)
    inputs["attention_mask"][0, 7:] = 0
    return inputs


@pytest.fixture(scope="module")
def engine() -> Engine:
    supernet = small_supernet("dynabert")
    example = {name: part[:1] for name, part in small_inputs("dynabert").items()}
    return Engine(supernet, [supernet.space.smallest(), supernet.space.largest()], example=example)


@pytest.fixture(scope="module")
def paired() -> Engine:
    supernet = small_supernet("dynabert")
    ids, mask = (part[:1] for part in small_inputs("dynabert").values())
    return Engine(supernet, [supernet.space.smallest()], example=(ids, mask))


def test_graph_programs_take_named_inputs(engine: Engine, tmp_path: Path) -> None:
    to_exported_programs(engine, tmp_path / "programs", progress=False)
    exported = load_exported(tmp_path / "programs", progress=False, trusted=True)
    for n in (1, 4):
        x = batch(n)
        for subnet in engine.ids:
            expected = engine(x, subnet)
            torch.testing.assert_close(exported(x, subnet), expected, rtol=5e-5, atol=5e-5)
            swapped = dict(reversed(x.items()))
            torch.testing.assert_close(exported(swapped, subnet), expected, rtol=5e-5, atol=5e-5)
    singles = [{name: part[i] for name, part in batch(3).items()} for i in range(3)]
    outputs = exported.run(0, singles, 4)
    torch.testing.assert_close(torch.stack(list(outputs)), engine(batch(3), 0), rtol=5e-5, atol=5e-5)


def test_graph_programs_take_positional_inputs(paired: Engine, tmp_path: Path) -> None:
    to_exported_programs(paired, tmp_path / "programs", progress=False)
    exported = load_exported(tmp_path / "programs", progress=False, trusted=True)
    x = tuple(batch(3).values())
    torch.testing.assert_close(exported(x, 0), paired(x, 0), rtol=5e-5, atol=5e-5)


def test_wrong_batches_are_refused(engine: Engine, tmp_path: Path) -> None:
    to_exported_programs(engine, tmp_path / "programs", subnets=engine.specs[:1], progress=False)
    exported = load_exported(tmp_path / "programs", progress=False, trusted=True)
    x = batch(3)
    wrong: list[Any] = [
        x["input_ids"],
        {"input_ids": x["input_ids"]},
        {**x, "attention_mask": x["attention_mask"][:2]},
        {**x, "attention_mask": x["attention_mask"].float()},
        (),
    ]
    for given in wrong:
        with pytest.raises(InvalidRequest, match="input"):
            exported(given, 0)


def test_onnx_names_its_inputs(engine: Engine, paired: Engine, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    to_onnx(engine, tmp_path / "named", subnets=engine.specs[:1], progress=False)
    to_onnx(paired, tmp_path / "paired", progress=False)
    x = batch(3)
    expected = engine(x, 0)
    for folder, names in (("named", list(x)), ("paired", ["input_0", "input_1"])):
        session = onnxruntime.InferenceSession(str(tmp_path / folder / "subnet-0.onnx"))
        assert sorted(i.name for i in session.get_inputs()) == sorted(names)
        given = {name: part.numpy() for name, part in zip(names, x.values(), strict=True)}
        (output,) = session.run(None, given)
        torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-4, atol=1e-4)


def test_torchscript_takes_the_engine_as_it_is(engine: Engine, tmp_path: Path) -> None:
    to_torchscript(engine, tmp_path / "model.pt", progress=False)
    module = torch.jit.load(str(tmp_path / "model.pt"))
    x = batch(3)
    for subnet in engine.ids:
        found = module(*x.values(), torch.tensor([subnet]))
        torch.testing.assert_close(found, engine(x, subnet), rtol=5e-5, atol=5e-5)


def test_triton_says_where_to_go(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"to_torchscript or to_onnx .* or serve the Engine"):
        to_triton(engine, tmp_path, name="bert")
