"""Examples that train run from their beginning to their end, in small; Sphinx runs others for their pages."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.operators.kernel_table import why_not

for package in ("timm", "torchvision", "sklearn", "matplotlib", "scipy"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_committed_run_meets_its_bound() -> None:
    result = json.loads((EXAMPLES / "finetune_own_model.json").read_text())
    steps = result["steps"]
    assert steps["model"] + steps["elastic"] <= 5 * steps["each separate network"]
    assert len(result["separate"]) == 5
    for entry in result["separate"]:
        assert entry["of_subnet"] >= entry["accuracy"]
        assert entry["of_subnet"] >= entry["trained_longer"]["accuracy"] - 1.0


class Crepe(nn.Module):
    """The parts of the network of torchcrepe that the example reads, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv5, self.conv5_BN = nn.Conv2d(1, 8, (64, 1), (32, 1)), nn.BatchNorm2d(8)
        self.conv6, self.conv6_BN = nn.Conv2d(8, 8, (3, 1), padding=(1, 0)), nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8 * 7, 360)

    def layer(self, x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
        return nn.functional.max_pool2d(norm(conv(x).relu()), (2, 1))

    def embed(self, frames: Tensor) -> Tensor:
        return self.layer(frames[:, None, :, None], self.conv5, self.conv5_BN)


@pytest.mark.parametrize(
    ("name", "options"), [("elastic_segmentation", "--scenes 16"), ("elastic_pitch", "")]
)
def test_short_distillations(
    name: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchcrepe, real = ModuleType("torchcrepe"), subnetact.profile_latency
    load = SimpleNamespace(model=lambda device, capacity: None)
    vars(torchcrepe).update(load=load, infer=SimpleNamespace(model=Crepe()))
    monkeypatch.setitem(sys.modules, "torchcrepe", torchcrepe)
    quick = {"warmup_ms": 0.0, "min_time_ms": 5.0, "windows": 2, "max_windows": 2}
    monkeypatch.setattr(
        subnetact, "profile_latency", lambda *given, **named: real(*given, **{**named, **quick})
    )
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *options.split(), "--steps", "2", "--out", str(tmp_path)])
    runpy.run_path(str(path), run_name="__main__")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["steps"] == 2
    assert 0 <= found["alone"] <= 100
    assert len(found["latency_ms"]) == len(found["subnets"])
    assert (tmp_path / "front.png").stat().st_size


def test_a_short_distillation_of_an_embedder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = EXAMPLES / "distil_embedder.py"
    options = f"--training json --held-out email --minutes 0.001 --state {tmp_path / 'state.safetensors'}"
    monkeypatch.setattr(sys, "argv", [str(path), *options.split()])
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert "100.0 % of the ten nearest texts in" in shown
    assert ("precision=bfloat16" in shown) == (why_not("bfloat16", torch.device("cpu")) is None)
