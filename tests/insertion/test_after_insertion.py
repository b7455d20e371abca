"""What follows an insertion works on its result: calibration, search, profiles, serving and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import subnetact
import subnetact.serving
from subnetact.errors import ExportError
from subnetact.export import load_exported, to_onnx, to_torchscript
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import fill_unused_, masked_reference, private_copy

timm = pytest.importorskip("timm")
pytest.importorskip("torchvision")

BATCHES = [torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
X = BATCHES[0]
VIT = "vit_tiny_patch16_224", 64, 2


def make(name: str, image: int = 0, depth: int = 0) -> Supernet:
    torch.manual_seed(0)
    options = {"img_size": image, "depth": depth} if image else {}
    model = timm.create_model(name, num_classes=10, **options).eval()
    supernet = subnetact.insert_(model, example=X)
    if supernet.norm_operators():
        subnetact.calibrate(supernet, supernet.space.sample(0, 4), BATCHES, progress=False)
    return supernet


@pytest.fixture(scope="module")
def resnet() -> Supernet:
    return make("resnet10t")


@pytest.fixture(scope="module", params=["resnet10t", "vit_tiny"])
def engine(request: pytest.FixtureRequest, resnet: Supernet) -> subnetact.Engine:
    supernet = resnet if request.param == "resnet10t" else make(*VIT)
    return subnetact.Engine(supernet, supernet.space.sample(0, 4), example=X[:1])


def test_search_finds_subnets_of_an_inserted_model(resnet: Supernet) -> None:
    result = subnetact.search(
        resnet,
        accuracy=lambda spec: float(sum(resnet.space.resolve(spec))),
        latency=lambda spec: float(resnet.space.resolve(spec)[0] + 1),
        evaluations=12,
        seed=0,
    )
    assert result.front


def test_an_engine_serves_profiles_and_saves_an_inserted_model(
    engine: subnetact.Engine, tmp_path: Path
) -> None:
    supernet = engine.supernet
    for i, spec in enumerate(engine.specs):
        view = supernet.extract(spec)(X)
        torch.testing.assert_close(engine(X, subnet=i), view, rtol=0, atol=5e-5)
    table = subnetact.profile_latency(engine, batch_sizes=[1, 2], min_time_ms=1, windows=2)
    policy = subnetact.serving.Fixed(table.with_accuracy([1.0, 2.0, 3.0, 4.0]), subnet=1)
    with subnetact.Batcher(engine, policy=policy, slo_ms=600_000.0) as batcher:
        answer = batcher.submit(X[0], deadline_ms=600_000.0).result(timeout=600)
    torch.testing.assert_close(answer.output, supernet.extract(engine.specs[1])(X[:1])[0], rtol=0, atol=5e-5)
    engine.save(tmp_path / "bundle")
    again = subnetact.Engine.load(tmp_path / "bundle", supernet=rebuilt(supernet))
    torch.testing.assert_close(again(X, subnet=0), engine(X, subnet=0), rtol=0, atol=5e-5)


def rebuilt(supernet: Supernet) -> Supernet:
    return make("resnet10t") if supernet.norm_operators() else make(*VIT)


def test_exports_of_an_inserted_model_compute_what_its_subnets_compute(
    engine: subnetact.Engine, tmp_path: Path
) -> None:
    to_torchscript(engine, tmp_path / "model.pt", progress=False)
    scripted = torch.jit.load(tmp_path / "model.pt")
    expected = [engine.supernet.extract(spec)(X) for spec in engine.specs]
    for i, output in enumerate(expected):
        torch.testing.assert_close(scripted(X, torch.tensor([i])), output, rtol=0, atol=5e-5)
    to_onnx(engine, tmp_path / "onnx", subnets=engine.specs[:2], progress=False)
    programs = load_exported(tmp_path / "onnx", trusted=True)
    torch.testing.assert_close(programs(X, subnet=1), expected[1], rtol=0, atol=5e-5)


def test_onnx(resnet: Supernet, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    engine = subnetact.Engine(resnet, resnet.space.sample(0, 2), example=X[:1])
    to_onnx(engine, tmp_path / "onnx", subnets=engine.specs[:1], progress=False)
    (path,) = sorted((tmp_path / "onnx").glob("*.onnx"))
    session = runtime.InferenceSession(path)
    (output,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    expected = resnet.extract(engine.specs[0])(X)
    torch.testing.assert_close(torch.from_numpy(output), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "regnetx_002"])
def test_norms_with_an_activation_are_calibrated_as_in_the_masked_model(name: str) -> None:
    """With one batch, calibrated statistics are what BatchNorm in training mode computes on the batch."""
    supernet = make(name)
    kinds = {type(operator.template).__name__ for operator in supernet.norm_operators().values()}
    assert "BatchNormAct2d" in kinds
    specs = supernet.space.sample(3, 3)
    subnetact.calibrate(supernet, specs, [X], progress=False)
    engine = subnetact.Engine(supernet, specs, example=X[:1])
    largest = supernet.space.resolve(supernet.space.largest())
    for i, spec in enumerate(specs):
        network = supernet.network
        row, zeroed = supernet.space.resolve(spec), private_copy(network)
        fill_unused_(zeroed, network, row, 0.0)
        masked = masked_reference(zeroed, network, row, largest)
        for module in masked.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.training = True  # a view refuses train()
        with torch.no_grad():
            expected = masked(X)
        torch.testing.assert_close(engine(X, subnet=i), expected, rtol=0, atol=5e-5)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


def test_a_transformer_encoder_of_torch_is_exported_in_the_way_that_the_refusal_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    supernet = subnetact.insert_(Encoder().eval(), example=x)
    engine = subnetact.Engine(supernet, supernet.space.sample(0, 1), example=x[:1])
    with pytest.raises(ExportError, match=r"use subnetact\.export\.to_onnx or to_pt2"):
        to_torchscript(engine, tmp_path / "model.pt", progress=False)
    to_onnx(engine, tmp_path / "programs", progress=False)
    expected = supernet.extract(engine.specs[0])(x)
    programs = load_exported(tmp_path / "programs", trusted=True)
    torch.testing.assert_close(programs(x, subnet=0), expected, rtol=0, atol=5e-5)
