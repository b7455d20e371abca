"""The example that turns a model of timm into a served supernet runs from its beginning to its end."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import subnetact

for package in ("timm", "torchvision", "torch_kirigami", "sklearn", "matplotlib", "scipy"):
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


def test_a_short_distillation_of_a_timm_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / "distil_timm_model.py"
    options = f"--pretraining 2 --steps 2 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [str(path), *options.split()])
    runpy.run_path(str(path), run_name="__main__")
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 2
    assert (tmp_path / "bundle").is_dir()


def test_a_short_distillation_of_an_embedder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = EXAMPLES / "distil_embedder.py"
    options = f"--training json --held-out email --minutes 0.001 --state {tmp_path / 'state.safetensors'}"
    monkeypatch.setattr(sys, "argv", [str(path), *options.split()])
    runpy.run_path(str(path), run_name="__main__")
    assert "100.0 % of the ten nearest texts are found by depth=1.0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_short_run_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / "finetune_own_model.py"
    spec = importlib.util.spec_from_file_location("finetune_own_model", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = "--steps 2 --elastic-steps 3 --doublings 1 --evaluations 4"
    monkeypatch.setattr(sys, "argv", [str(path), *options.split(), "--out", str(tmp_path)])
    quick = {"warmup_ms": 0.0, "min_time_ms": 5.0, "windows": 2, "max_windows": 2}

    def measured_shortly(*arguments: Any, **options: Any) -> subnetact.LatencyTable:
        return subnetact.profile_latency(*arguments, **{**options, **quick})

    monkeypatch.setattr(example, "profile_latency", measured_shortly)
    example.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == {"model": 2, "elastic": 3, "each separate network": 1}
    assert (tmp_path / "front.png").stat().st_size
    engine = subnetact.Engine.load(
        tmp_path / "bundle", supernet=example.new_supernet(str(tmp_path / "description.json"))
    )
    assert len(engine) == len(result["after"])
