"""ONNX files of subnets give onnxruntime the supernet's outputs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import onnxruntime
import pytest
import torch

import subnetact
import subnetact.export.onnx
from subnetact.errors import ExportError, FileFormatError
from subnetact.export import to_onnx
from subnetact.supernet import Supernet

IMAGES = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.5, width=0.5)]
    subnetact.calibrate(digits, specs, [IMAGES], progress=False)
    return subnetact.Engine(digits, specs, example=IMAGES[0])


def test_files_equal_the_supernet_at_any_batch_size(engine: subnetact.Engine, tmp_path: Path) -> None:
    folder = to_onnx(engine, tmp_path / "onnx", subnets=[1], progress=False)
    subnets = json.loads((folder / "export.json").read_text())["subnets"]
    assert [subnet["id"] for subnet in subnets] == [1]
    for subnet in subnets:
        session = onnxruntime.InferenceSession(folder / subnet["file"], providers=["CPUExecutionProvider"])
        for size in (1, 2, 5):
            (output,) = session.run(["output"], {"input": IMAGES[:size].numpy()})
            want = engine.supernet(IMAGES[:size], subnet=engine.specs[subnet["id"]])
            torch.testing.assert_close(torch.from_numpy(output), want, atol=1e-4, rtol=1e-3)


def test_what_is_missing_is_said(
    engine: subnetact.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileFormatError, match="holds something else"):
        to_onnx(engine, tmp_path)
    hidden = lambda name: None if name == "onnxscript" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(subnetact.export.onnx, "find_spec", hidden)
    with pytest.raises(ExportError, match=r"needs onnxscript: pip install 'subnetact\[onnx\]'"):
        to_onnx(engine, tmp_path / "onnx")
