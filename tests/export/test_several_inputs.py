"""Exports of a network with two inputs, token ids and an attention mask."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from small_families import small_constructor, small_inputs
from torch import Tensor, nn

from ofa_adapters import load
from subnetact import Engine
from subnetact.errors import ExportError, InvalidRequest
from subnetact.export import ExportedEngine, load_exported, to_onnx, to_pt2, to_torchscript, to_triton


def batch(n: int) -> dict[str, Tensor]:
    """Different sentences, every second one with padding, which the mask hides."""
    inputs = small_inputs("dynabert", n)
    inputs["attention_mask"][0, 7:] = 0
    return inputs


@pytest.fixture(scope="module")
def engine() -> Engine:
    supernet = load("dynabert", None, **{**small_constructor("dynabert"), "num_hidden_layers": 2}).eval()
    example = {name: part[:1] for name, part in small_inputs("dynabert").items()}
    return Engine(supernet, [supernet.space.smallest(), supernet.space.largest()], example=example)


@pytest.fixture(scope="module")
def exported(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> ExportedEngine:
    folder = tmp_path_factory.mktemp("named") / "programs"
    to_onnx(engine, folder, progress=False)
    return load_exported(folder, progress=False, trusted=True)


class Masked(nn.Module):
    """A network that adds up what the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.last = nn.Embedding(90, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.last((self.inner(self.embed(ids)).relu() * mask[..., None]).sum(1))


@pytest.fixture(scope="module")
def paired() -> Engine:
    supernet = one_width(Masked(), {"inner": "out", "last": "in"})
    ids, mask = (part[:1] for part in small_inputs("dynabert").values())
    return Engine(supernet, [supernet.space.smallest()], example=(ids, mask))


def test_loaded_files_take_named_inputs(engine: Engine, exported: ExportedEngine) -> None:
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


def test_wrong_batches_are_refused(exported: ExportedEngine) -> None:
    x = batch(3)
    ids, mask = x["input_ids"], x["attention_mask"]
    wrong: list[Any] = [ids, {"input_ids": ids}, {**x, "attention_mask": mask[:2]}, ()]
    for given in (*wrong, {**x, "attention_mask": mask.float()}):
        with pytest.raises(InvalidRequest, match="input"):
            exported(given, 0)


def test_onnx_names_its_inputs(engine: Engine, paired: Engine, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    to_onnx(engine, tmp_path / "named", subnets=engine.specs[:1], progress=False)
    to_onnx(paired, tmp_path / "paired", progress=False)
    x = batch(3)
    exported = load_exported(tmp_path / "paired", progress=False, trusted=True)
    pair = tuple(x.values())
    torch.testing.assert_close(exported(pair, 0), paired(pair, 0), rtol=5e-5, atol=5e-5)
    for folder, names in (("named", list(x)), ("paired", ["input_0", "input_1"])):
        expected = engine(x, 0) if folder == "named" else paired(tuple(x.values()), 0)
        session = onnxruntime.InferenceSession(str(tmp_path / folder / "subnet-0.onnx"))
        assert sorted(i.name for i in session.get_inputs()) == sorted(names)
        given = {name: part.numpy() for name, part in zip(names, x.values(), strict=True)}
        (output,) = session.run(None, given)
        torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-4, atol=1e-4)


def test_torchscript_takes_the_engine_and_triton_says_where_to_go(engine: Engine, tmp_path: Path) -> None:
    to_torchscript(engine, tmp_path / "model.pt", progress=False)
    module, x = torch.jit.load(str(tmp_path / "model.pt")), batch(3)
    for subnet in engine.ids:
        found = module(*x.values(), torch.tensor([subnet]))
        torch.testing.assert_close(found, engine(x, subnet), rtol=5e-5, atol=5e-5)
    with pytest.raises(ExportError, match=r"one input and one output tensor.*serve the engine"):
        to_triton(engine, tmp_path, name="bert")


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_lengths_are_free_between_those_of_the_examples(native: bool, engine: Engine, tmp_path: Path) -> None:
    """And the first axis down to one; ids and mask keep one length."""
    onnxruntime = pytest.importorskip("onnxruntime")
    x = small_inputs("dynabert", 4)
    most = x["input_ids"].shape[1]
    cut = [{name: part[:n, :length] for name, part in x.items()} for n, length in ((1, 5), (4, most), (3, 6))]
    example = [{name: part[:1] for name, part in one.items()} for one in cut[:2]]
    several = Engine(engine.supernet, engine.specs, example=example, padding=dict.fromkeys(x, 0))
    to_onnx(several, tmp_path / "onnx", subnets=engine.specs[1:], progress=False)
    exported = load_exported(tmp_path / "onnx", trusted=True)
    others = [exported]
    if native:
        if not shutil.which("g++"):
            pytest.skip("AOTInductor needs a C++ compiler: install g++")
        path = to_pt2(several, tmp_path / "model.pt2", subnets=engine.specs[1:], progress=False)
        others.append(load_exported(path, trusted=True))
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "subnet-0.onnx")
    to_torchscript(several, tmp_path / "model.pt", subnets=engine.specs[1:], progress=False)
    scripted, zero = torch.jit.load(tmp_path / "model.pt"), torch.tensor([0])
    assert {tuple(one.shape) for one in session.get_inputs()} == {("batch", "axis_a")}
    for batch in cut:
        with torch.no_grad():
            expected = engine.supernet.subnet(engine.specs[1])(**batch)
        assert torch.equal(scripted(*batch.values(), zero), expected)
        for other in others:
            torch.testing.assert_close(other(batch, subnet=0), expected, rtol=1e-4, atol=1e-4)
        (output,) = session.run(None, {name: part.numpy() for name, part in batch.items()})
        torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-4, atol=1e-4)
    singles = [{name: part[0] for name, part in batch.items()} for batch in cut]
    assert len(exported.run(0, singles, 4)) == 3
    for one in (exported, *others):
        with pytest.raises(InvalidRequest, match=r"shape \(4,\), this engine serves .* \(5,\)"):
            one({name: part[:, :4] for name, part in x.items()}, subnet=0)
        with pytest.raises(
            InvalidRequest, match=r"attention_mask.*shape \(5,\), this engine serves .* \(6,\)"
        ):
            one({**cut[2], "attention_mask": cut[2]["attention_mask"][:, :5]}, subnet=0)
    ids, mask = x["input_ids"], x["attention_mask"]
    for wrong in ((ids[:, :4], mask[:, :4]), (ids, mask[:, :6]), (ids, mask[:1]), (ids.int(), mask)):
        with pytest.raises(Exception, match=r"this file takes \w+: int64 batch\S+ axis_a:5:"):
            scripted(*wrong, *list(x.values())[2:], zero)
