"""The committed results of benchmarks/coverage.py meet the bounds, and small models still give them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS: dict[str, Any] = json.loads((BENCHMARKS / "results" / "coverage.json").read_text())
MODELS: dict[str, dict[str, Any]] = RESULTS["models"]


@pytest.mark.parametrize(
    ("source", "count", "share"),
    [
        *(("torchvision", 80, 0.9), ("timm", 80, 0.7), ("transformers", 52, 0.9), ("detection", 12, 0.9)),
        *(("segmentation", 6, 0.9), ("smp", 12, 0.9), ("yolo", 3, 0.9), ("diffusers", 2, 0.9)),
        *(("audio", 2, 0.9), ("monai", 6, 0.9), ("hand", 2, 0.9)),
    ],
)
def test_enough_models_are_elastic_and_none_is_wrong(source: str, count: int, share: float) -> None:
    own = {name: facts for name, facts in MODELS.items() if name.startswith(f"{source}:")}
    assert len(own) >= count
    assert sum(len(facts.get("axes", {})) >= 2 for facts in own.values()) >= share * len(own)
    for name, facts in own.items():
        if "axes" in facts:
            assert facts["wrong"] == [], name
        else:
            assert facts.get("refused"), f"{name} neither became elastic nor was refused with a reason"
    assert RESULTS["large_images"]["torchvision:resnet50@224"]["wrong"] == []
    assert {"device_name", "threads", "torch", "python", "timm", "transformers"} <= RESULTS["machine"].keys()


@pytest.fixture(scope="module")
def coverage() -> Callable[..., Any]:
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    return runpy.run_path(str(BENCHMARKS / "coverage.py"))["coverage"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [
        *("torchvision:squeezenet1_1", "timm:ese_vovnet19b_slim", "hand:nanogpt", "hand:nanogpt_own_sizes"),
        *(f"transformers:{name}" for name in ("t5", "modernbert", "electra", "distilbert", "mpnet")),
    ],
)
def test_a_model_gives_the_committed_results(coverage: Callable[..., Any], name: str) -> None:
    found, committed = coverage(*name.split(":")), MODELS[name]
    assert found["wrong"] == []
    assert found["parameters"] == committed["parameters"]
    assert found["axes"].keys() == committed["axes"].keys()
    for axis, shares in committed["axes"].items():
        assert found["axes"][axis] == pytest.approx(shares, abs=0.02), axis
    assert found["smallest"] == pytest.approx(committed["smallest"], abs=0.02)
