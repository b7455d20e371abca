"""ONNX files and ExecuTorch programs compute what the supernet does, of one checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from elastic_networks import one_width
from torch import Tensor, nn

from subnetact import Axis, Engine, SubnetSpace, calibrate, insert_
from subnetact.device import MachineFacts, machine_facts
from subnetact.errors import ExportError, FileFormatError, MissingExtra, PrecisionError, StaleWeights
from subnetact.export import load_exported, onnx, to_executorch, to_onnx, to_torchscript, torchscript
from subnetact.operators import ElasticKernel, KernelConv2d
from subnetact.operators import kernel_table as kernels
from subnetact.operators.kernel_table import kernel_for
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("read_once")]
IMAGES = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def engine(digits: Supernet) -> Engine:
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.5, width=0.5)]
    calibrate(digits, specs, [IMAGES], progress=False)
    return Engine(digits, specs, example=IMAGES[:1], accuracy=[None, 61.5])


def test_files_equal_the_supernet_at_any_batch_size(engine: Engine, tmp_path: Path) -> None:
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


def test_a_lack_is_said(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_outputs_without_a_name_are_numbered(output_of: Any, names: list[str], tmp_path: Path) -> None:
    supernet = one_width(Returning(output_of), {"wide": "out"}, (2, 4))
    engine = Engine(supernet, [supernet.space.largest()], example=torch.zeros(1, 3))
    folder = to_onnx(engine, tmp_path / "onnx", progress=False)
    session = onnxruntime.InferenceSession(folder / "subnet-0.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == names


def test_weights_that_changed_in_place_and_several_outputs(tmp_path: Path) -> None:
    space = SubnetSpace("own", [Axis.uniform("k", ["all"], [3, 5])], lambda v: {"k": v["k"][0]})
    supernet = insert_(TwoHeads().eval(), space, {"depth": ElasticKernel.on(kernel="k")})
    x = torch.randn(3, 4, 6, 6)
    engine = Engine(supernet, [space.smallest()], example=x[:1])
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


X = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def as_onnx(engine: Engine, path: Path) -> Callable[[int], Tensor]:
    before = engine.fingerprint
    exported = load_exported(to_onnx(engine, path, progress=False), progress=False, trusted=True)
    assert exported.fingerprint == before
    return lambda i: exported(X, subnet=i)


def as_script(engine: Engine, path: Path) -> Callable[[int], Tensor]:
    scripted: Any = to_torchscript(engine, path, progress=False)
    return lambda i: scripted(X, torch.tensor([i]))


WAYS = {"onnx": (onnx, "onnx_graph", as_onnx), "script": (torchscript, "record_network", as_script)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_checkpoint(digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    module, name, export = WAYS[way]
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.25, width=0.5)]
    calibrate(digits, specs, [X], progress=False)
    engine = Engine(digits, specs, example=X[:1])
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
def test_changing_weights_are_not_exported(
    digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(digits, [digits.space.smallest()], example=X[:1], allow_uncalibrated=True)
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


PAIR = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def test_every_subnet_is_a_method(engine: Engine, tmp_path: Path) -> None:
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    path = to_executorch(engine, tmp_path / "digits.pte", batch_size=2, progress=False)
    program = runtime.load_program(path)
    assert program.method_names == {"subnet_0", "subnet_1"}
    for i, spec in enumerate(engine.specs):
        (output,) = program.load_method(f"subnet_{i}").execute([PAIR])
        torch.testing.assert_close(output, engine.supernet(PAIR, subnet=spec), atol=5e-5, rtol=1e-4)


def test_a_missing_package_is_named(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("executorch", "executorch.exir"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="pip install executorch"):
        to_executorch(engine, tmp_path / "digits.pte")


runs_int8 = pytest.mark.skipif(
    not kernel_for("int8", machine_facts("cpu")).name, reason="int8 is refused on this machine"
)


@pytest.fixture(scope="module")
def int8_engine() -> Engine:
    convs = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
    network = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    supernet = one_width(network, {"0": "out", "2": "both", "4": "both", "7": "in"})
    space = supernet.enable_precision("int8")
    small = space.spec(w=4, precision="int8")
    specs = [small, space.at_precision(small, "float32")]
    return Engine(supernet, specs, example=torch.zeros(1, 1, 16, 16))


@runs_int8
@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_int8_files_equal_the_views(
    int8_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_onnx(int8_engine, tmp_path / "programs", progress=False)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kernels, "machine_facts", MachineFacts)
        with pytest.raises(PrecisionError, match="precision int8"):
            load_exported(tmp_path / "programs", trusted=True)
    exported = load_exported(tmp_path / "programs", trusted=True)
    assert exported.keys == int8_engine.keys
    x = torch.randn(2, 1, 16, 16)
    for i in range(2):
        torch.testing.assert_close(exported(x, subnet=i), int8_engine(x, subnet=i), rtol=1e-4, atol=1e-4)
    assert not torch.equal(exported(x, 0), exported(x, 1))
    session = onnxruntime.InferenceSession(tmp_path / "programs" / "subnet-0.onnx")
    got = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    expected = int8_engine(x, subnet=0)
    assert (got - expected).norm() < 0.02 * expected.norm(), "halves may round the other way"
    import onnx

    graph = onnx.load(tmp_path / "programs" / "subnet-0.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulInteger") == 2, "the convolutions between the first layer and the last"


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_torchscript_has_float32_subnets_only(int8_engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"precision=int8.*to_onnx or to_pt2"):
        to_torchscript(int8_engine, tmp_path / "model.pt", progress=False)
    exact = int8_engine.specs[1]
    written = to_torchscript(int8_engine, tmp_path / "model.pt", subnets=[exact], progress=False)
    x = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(written(x, torch.tensor([0])), int8_engine(x, subnet=1), rtol=1e-4, atol=1e-4)
