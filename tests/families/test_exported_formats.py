"""Families as ONNX files; test_registry.py traces every family."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import subnetact
from ofa_adapters import load
from subnetact.export import to_onnx

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


SHALLOW = {"ofa_mbv3": {"depth_list": [1, 2]}}
"""The time that an export takes grows with the number of layers."""


@pytest.fixture
def engine_of(
    inputs_of: Callable[..., Any], constructor_of: Callable[[str], dict[str, Any]]
) -> Callable[[str], tuple[subnetact.Engine, torch.Tensor]]:
    def make(family: str) -> tuple[subnetact.Engine, torch.Tensor]:
        supernet = load(family, None, **{**constructor_of(family), **SHALLOW.get(family, {})}).eval()
        for weight in supernet.parameters():
            if weight.dim() > 1:  # the default initialisation leaves deep networks without a signal
                torch.nn.init.kaiming_normal_(weight)
        (x,) = inputs_of(family, 5)
        space = supernet.space
        spec = space.sample(random.Random(3))
        return subnetact.Engine(supernet, [spec], example=x[:1], allow_uncalibrated=True), x

    return make


def eager(engine: subnetact.Engine, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return engine.supernet(x, subnet=engine.specs[0])


@pytest.mark.parametrize("family", ["autoformer", "ofa_mbv3"])  # test_several_inputs.py has dynabert
def test_onnx_equals_eager(family: str, engine_of: Callable[..., Any], tmp_path: Path) -> None:
    import onnxruntime

    engine, x = engine_of(family)
    to_onnx(engine, tmp_path / "onnx", progress=False)
    session = onnxruntime.InferenceSession(
        tmp_path / "onnx" / "subnet-0.onnx", providers=["CPUExecutionProvider"]
    )
    for batch in (x[:1], x):
        (output,) = session.run(["output"], {"input": batch.numpy()})
        want = eager(engine, batch)
        scale = float(want.abs().max())
        torch.testing.assert_close(torch.from_numpy(output), want, atol=1e-4 * max(1.0, scale), rtol=1e-3)
