"""An export that is being written holds one checkpoint, whatever is loaded meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subnetact
from subnetact.errors import StaleWeights
from subnetact.export import (
    load_exported,
    onnx,
    to_onnx,
    to_torchscript,
    torchscript,
)
from subnetact.supernet.supernet import Supernet

X = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def as_onnx(engine: subnetact.Engine, path: Path) -> Callable[[int], Tensor]:
    before = engine.fingerprint
    exported = load_exported(to_onnx(engine, path, progress=False), progress=False, trusted=True)
    assert exported.fingerprint == before
    return lambda i: exported(X, subnet=i)


def as_script(engine: subnetact.Engine, path: Path) -> Callable[[int], Tensor]:
    scripted: Any = to_torchscript(engine, path, progress=False)
    return lambda i: scripted(X, torch.tensor([i]))


WAYS = {
    "onnx": (onnx, "onnx_graph", as_onnx),
    "script": (torchscript, "record_network", as_script),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_export_holds_one_checkpoint(
    digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    module, name, export = WAYS[way]
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.25, width=0.5)]
    subnetact.calibrate(digits, specs, [X], progress=False)
    engine = subnetact.Engine(digits, specs, example=X[:1])
    expected = [digits.extract(spec)(X) for spec in specs]
    traced = getattr(module, name)

    def loading(*args: Any, **kwargs: Any) -> Any:
        found = traced(*args, **kwargs)
        state = {n: t * 1.5 if t.dim() > 1 else t for n, t in digits.state_dict().items()}
        digits.load_state_dict(state, norms=digits.norms)
        return found

    monkeypatch.setattr(module, name, loading)
    run = export(engine, tmp_path / "export")
    for i, right in enumerate(expected):
        assert not torch.allclose(digits(X, subnet=specs[i]), right, rtol=1e-2)
        torch.testing.assert_close(run(i), right, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_weights_that_change_while_they_are_copied_are_not_exported(
    digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = subnetact.Engine(digits, [digits.space.smallest()], example=X[:1], allow_uncalibrated=True)
    copied = Supernet.__getstate__

    def training(supernet: Supernet) -> Any:
        with torch.no_grad():
            digits.network.stem.weight.mul_(2)
        return copied(supernet)

    monkeypatch.setattr(Supernet, "__getstate__", training)
    for export in (as_onnx, as_script):
        with pytest.raises(StaleWeights, match="between two steps of the training"):
            export(engine, tmp_path / export.__name__)
        assert not list(tmp_path.iterdir())
