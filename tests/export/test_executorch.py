"""Methods of one ExecuTorch program give its runtime the outputs of the subnets, with several inputs, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import subnetact
from subnetact.errors import MissingExtra
from subnetact.export import to_executorch
from subnetact.supernet.supernet import Supernet

IMAGES = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))


class Pair(nn.Module):
    """Takes two inputs, and returns two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits, and the sum that they are made of."""
        both = torch.relu(self.first(a + b))
        return {"logits": self.second(both), "sum": a + b}


def test_every_subnet_is_a_method(digits: Supernet, tmp_path: Path) -> None:
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.5, width=0.5)]
    subnetact.calibrate(digits, specs, [IMAGES], progress=False)
    engine = subnetact.Engine(digits, specs, example=IMAGES[:1])
    path = to_executorch(engine, tmp_path / "digits.pte", batch_size=2, progress=False)
    program = runtime.load_program(path)
    assert program.method_names == {"subnet_0", "subnet_1"}
    for i, spec in enumerate(specs):
        (output,) = program.load_method(f"subnet_{i}").execute([IMAGES])
        torch.testing.assert_close(output, digits(IMAGES, subnet=spec), atol=5e-5, rtol=1e-4)


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    torch.manual_seed(0)
    x = {"a": torch.randn(1, 8), "b": torch.randn(1, 8)}
    supernet = subnetact.insert_(Pair().eval(), example=x)
    engine = subnetact.Engine(supernet, [supernet.space.smallest()], example=x)
    program = runtime.load_program(to_executorch(engine, tmp_path / "pair.pte", progress=False))
    outputs = program.load_method("subnet_0").execute([x["a"], x["b"]])
    for output, wanted in zip(outputs, engine(x, 0).values(), strict=True):
        torch.testing.assert_close(output, wanted, atol=5e-5, rtol=1e-4)


def test_without_the_package_the_error_says_what_to_install(
    digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("executorch", "executorch.exir"):
        monkeypatch.setitem(sys.modules, name, None)
    specs = [digits.space.smallest()]
    subnetact.calibrate(digits, specs, [IMAGES], progress=False)
    engine = subnetact.Engine(digits, specs, example=IMAGES[:1])
    with pytest.raises(MissingExtra, match="pip install executorch"):
        to_executorch(engine, tmp_path / "digits.pte")
