"""ONNX files of subnets give onnxruntime the supernet's outputs."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact import Axis, SubnetSpace
from subnetact.errors import FileFormatError, MissingExtra
from subnetact.export import load_exported, to_onnx
from subnetact.operators import ElasticKernel, KernelConv2d
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

IMAGES = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.5, width=0.5)]
    subnetact.calibrate(digits, specs, [IMAGES], progress=False)
    return subnetact.Engine(digits, specs, example=IMAGES[:1], accuracy=[None, 61.5])


def test_files_equal_the_supernet_at_any_batch_size(engine: subnetact.Engine, tmp_path: Path) -> None:
    folder = to_onnx(engine, tmp_path / "onnx", subnets=engine.specs[1:2], progress=False)
    assert json.loads((folder / "export.json").read_text())["subnets"] == [engine.specs[1].to_json()]
    session = onnxruntime.InferenceSession(folder / "subnet-0.onnx", providers=["CPUExecutionProvider"])
    (taken,), (answered,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, taken.shape) == ("input", ["batch", 1, 16, 16])
    assert (answered.name, answered.shape) == ("output", ["batch", 10])
    metadata = session.get_modelmeta().custom_metadata_map
    about = {key.removeprefix("subnetact."): json.loads(text) for key, text in metadata.items()}
    assert SubnetSpec.from_json(about["subnet"]) == engine.specs[1]
    assert (about["accuracy"], about["fingerprint"]) == (61.5, engine.supernet.fingerprint())
    assert (about["torch"], about["inputs"]) == (
        torch.__version__,
        [f"input: float32 batch:1:{2**30} 1 16 16"],
    )
    assert about["machine"]["device"] == "cpu"
    for size in (1, 2, 5):
        (output,) = session.run(["output"], {"input": IMAGES[:size].numpy()})
        want = engine.supernet(IMAGES[:size], subnet=engine.specs[1])
        torch.testing.assert_close(torch.from_numpy(output), want, atol=1e-4, rtol=1e-3)


def test_lengths_between_those_of_the_examples_run_and_have_a_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        return_dict=False,
    )
    bert = transformers.BertForSequenceClassification(config).eval()
    original = deepcopy(bert)

    def tokens(size: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(size, length, dtype=torch.long)
        mask[0, length - 2 :] = 0
        return {"input_ids": torch.randint(1, 60, (size, length)), "attention_mask": mask}

    supernet = subnetact.insert_(bert, example=[tokens(2, 12), tokens(1, 12)])
    engine = subnetact.Engine(supernet, [supernet.space.largest()], example=[tokens(1, 5), tokens(1, 32)])
    folder = to_onnx(engine, tmp_path / "onnx", progress=False)
    session = onnxruntime.InferenceSession(folder / "subnet-0.onnx", providers=["CPUExecutionProvider"])
    assert {given.name: given.shape for given in session.get_inputs()} == {
        "input_ids": ["batch", "axis_a"],
        "attention_mask": ["batch", "axis_a"],
    }
    for size, length in ((1, 7), (4, 24), (3, 16)):
        x = tokens(size, length)
        (output,) = session.run(None, {name: part.numpy() for name, part in x.items()})
        with torch.no_grad():
            (want,) = original(**x)
        torch.testing.assert_close(torch.from_numpy(output), want, atol=5e-5, rtol=5e-5)


def test_what_is_missing_is_said(
    engine: subnetact.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileFormatError, match="holds something else"):
        to_onnx(engine, tmp_path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    with pytest.raises(MissingExtra, match=r"needs onnxscript: pip install 'subnetact\[onnx\]'"):
        to_onnx(engine, tmp_path / "onnx")


class TwoHeads(nn.Module):
    """A kernel made by a matrix, and a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = KernelConv2d(4, (3, 5), matrices=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.depth(x)
        return {"map": x, "mean": x.mean((2, 3))}


class Returning(nn.Module):
    """A layer whose output each test puts into another structure."""

    def __init__(self, output_of: Any) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 4)
        self.output_of = output_of

    def forward(self, x: Tensor) -> Any:
        return self.output_of(self.wide(x))


@pytest.mark.parametrize(
    ("output_of", "names"),
    [
        (lambda x: {"a": (x, x + 1), "b": x + 2}, ["output_0", "output_1", "output_2"]),
        (lambda x: {"a": None, "b": x}, ["output_0"]),
        (lambda x: {"input": x}, ["output_0"]),
    ],
)
def test_outputs_without_a_name_of_their_own_are_numbered(
    output_of: Any, names: list[str], tmp_path: Path
) -> None:
    space = SubnetSpace("own", [Axis.uniform("w", ["all"], [2, 4])], lambda v: {"w": v["w"][0]})
    network = Returning(output_of).eval()
    supernet = subnetact.insert_(network, space, {"wide": subnetact.WeightSlice.on(out="w")})
    engine = subnetact.Engine(supernet, [space.largest()], example=torch.zeros(1, 3))
    folder = to_onnx(engine, tmp_path / "onnx", progress=False)
    session = onnxruntime.InferenceSession(folder / "subnet-0.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == names


def test_weights_that_changed_in_place_and_several_outputs(tmp_path: Path) -> None:
    space = SubnetSpace("own", [Axis.uniform("k", ["all"], [3, 5])], lambda v: {"k": v["k"][0]})
    supernet = subnetact.insert_(TwoHeads().eval(), space, {"depth": ElasticKernel.on(kernel="k")})
    x = torch.randn(3, 4, 6, 6)
    engine = subnetact.Engine(supernet, [space.smallest()], example=x[:1])
    old = engine.fingerprint
    engine(x, subnet=0)
    with torch.no_grad():
        supernet.network.get_parameter("depth.5to3_matrix").add_(torch.randn(9, 9))
    folder = to_onnx(engine, tmp_path / "onnx", progress=False)
    session = onnxruntime.InferenceSession(folder / "subnet-0.onnx", providers=["CPUExecutionProvider"])
    got = session.run(["map", "mean"], {"input": x.numpy()})
    want = supernet(x, subnet=space.smallest())
    torch.testing.assert_close(torch.from_numpy(got[0]), want["map"], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.from_numpy(got[1]), want["mean"], atol=1e-4, rtol=1e-3)
    stamped = json.loads((folder / "export.json").read_text())["fingerprint"]
    assert stamped == supernet.fingerprint() != old
    loaded = load_exported(folder, trusted=True)
    assert loaded.fingerprint == supernet.fingerprint()
    assert torch.allclose(loaded(x, subnet=0)["map"], want["map"], atol=1e-4, rtol=1e-3)
