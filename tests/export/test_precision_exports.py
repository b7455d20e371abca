"""Exports of int8 subnets: what can be written equals the view, and what cannot is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elastic_networks import one_width
from torch import nn

from subnetact import Engine
from subnetact.device import MachineFacts, machine_facts
from subnetact.errors import ExportError, PrecisionError
from subnetact.export import load_exported, to_onnx, to_torchscript
from subnetact.operators import kernel_table as kernels
from subnetact.operators.kernel_table import kernel_for

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


runs_int8 = pytest.mark.skipif(
    not kernel_for("int8", machine_facts("cpu")).name, reason="int8 is refused on this machine"
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    convs = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
    network = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    supernet = one_width(network, {"0": "out", "2": "both", "4": "both", "7": "in"})
    space = supernet.enable_precision("int8")
    small = space.spec(w=4, precision="int8")
    specs = [small, space.at_precision(small, "float32")]
    return Engine(supernet, specs, example=torch.zeros(1, 1, 16, 16))


@runs_int8
def test_loaded_int8_files(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_onnx(engine, tmp_path / "programs", progress=False)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kernels, "machine_facts", MachineFacts)
        with pytest.raises(PrecisionError, match="precision int8"):
            load_exported(tmp_path / "programs", trusted=True)
    exported = load_exported(tmp_path / "programs", trusted=True)
    x = torch.randn(2, 1, 16, 16)
    assert exported.keys == engine.keys
    for i in range(2):
        torch.testing.assert_close(exported(x, subnet=i), engine(x, subnet=i), rtol=1e-4, atol=1e-4)
    stored = torch.cat([exported(x, 0), exported(x, 1)])
    assert not torch.equal(stored[:2], stored[2:])


@runs_int8
def test_onnx_files_of_int8_subnets_equal_the_views(engine: Engine, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    to_onnx(engine, tmp_path / "onnx", subnets=engine.specs[:1], progress=False)
    import onnx

    graph = onnx.load(tmp_path / "onnx" / "subnet-0.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulInteger") == 2, "the convolutions between the first layer and the last"
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "subnet-0.onnx")
    x = torch.randn(2, 1, 16, 16)
    got = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    expected = engine(x, subnet=0)
    assert (got - expected).norm() < 0.02 * expected.norm(), "halves may round the other way"


def test_torchscript_has_float32_subnets_only(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"precision=int8.*to_onnx or to_pt2"):
        to_torchscript(engine, tmp_path / "model.pt", progress=False)
    exact = engine.specs[1]
    written = to_torchscript(engine, tmp_path / "model.pt", subnets=[exact], progress=False)
    x = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(written(x, torch.tensor([0])), engine(x, subnet=1), rtol=1e-4, atol=1e-4)
