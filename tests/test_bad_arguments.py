"""The most natural mistakes get errors of the package that say what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ofa_adapters
import subnetact
from subnetact import Axis, SubnetSpace
from subnetact.errors import (
    CheckpointError,
    EngineError,
    ExportError,
    FileFormatError,
    InsertError,
    InvalidRequest,
    PolicyError,
    SpecError,
    TableError,
)
from subnetact.export import (
    load_exported,
    to_onnx,
    to_torchscript,
    to_triton,
)
from subnetact.profile import cli as profile
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
IMAGE = torch.zeros(1, 16, 16)


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [digits.space.smallest(), digits.space.largest()]
    return subnetact.Engine(digits, specs, example=IMAGE[None], allow_uncalibrated=True)


def test_a_plain_network_is_no_supernet(tmp_path: Path) -> None:
    network: Any = nn.Linear(2, 2)
    for call in (
        lambda: subnetact.Engine(network, []),
        lambda: subnetact.calibrate(network, [], []),
    ):
        with pytest.raises(InsertError, match=r"expected a Supernet, got Linear; subnetact\.insert_"):
            call()


def test_a_supernet_is_no_engine(digits: Supernet, tmp_path: Path) -> None:
    given: Any = digits
    for export in (to_onnx, to_torchscript, to_triton):
        with pytest.raises(ExportError, match=r"expected an Engine, got Supernet; make one, Engine\("):
            export(given, tmp_path / "x")
    with pytest.raises(TableError, match="expected an Engine, got Supernet"):
        subnetact.profile_latency(given)
    table = subnetact.LatencyTable(["a"], [60.0], [1], [[1.0]])
    with pytest.raises(PolicyError, match=r"engine: Supernet has no run\(\.\.\.\) and keys"):
        subnetact.Batcher(given, table=table, slo_ms=10)


def test_one_specification_is_no_list(digits: Supernet, tmp_path: Path) -> None:
    spec: Any = digits.space.smallest()
    engine = subnetact.Engine(digits, [spec], allow_uncalibrated=True)
    for call in (
        lambda: subnetact.Engine(digits, spec),
        lambda: to_torchscript(engine, tmp_path / "m.pt", subnets=spec),
        lambda: to_onnx(engine, tmp_path / "p", subnets=spec),
    ):
        with pytest.raises(SpecError, match=r"takes a list .*, got SubnetSpec; write \[spec\]"):
            call()
    with pytest.raises(SpecError, match=r"at least one; got .*depth.* twice"):
        subnetact.Engine(digits, [spec, spec])
    with pytest.raises(SpecError, match="at least one; got none"):
        subnetact.Engine(digits, [])


def test_an_example_without_a_batch_axis_is_refused_at_once(digits: Supernet) -> None:
    for example, reason in (
        (IMAGE, r"does not run on one sample of it, .* shape \(16, 16\): .*x\[None\] of one input x"),
        (torch.zeros(0, 1, 16, 16), r"expected a batch, .* first axis .* \(0, 1, 16, 16\); give x\[None\]"),
        ((torch.zeros(2, 1), torch.tensor(1.0)), "first axis has one size"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            subnetact.Engine(digits, [digits.space.smallest()], example=example, allow_uncalibrated=True)


def test_a_description_that_forgets_a_module_is_told_where() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    space = SubnetSpace("own", [Axis.uniform("w", ["all"], [4, 8])], lambda v: {"width": v["w"][0]})
    elastic = {"0": subnetact.WeightSlice.on(out="width"), "2": subnetact.WeightSlice.on(in_="width")}
    supernet = subnetact.insert_(network, space, elastic)
    with pytest.raises(
        InvalidRequest,
        match=r"w=4 does not run .*: 1 \(LayerNorm\): .* describe this module: \"1\": LayerNormSlice\.on\(f",
    ):
        subnetact.Engine(supernet, [space.largest(), space.smallest()], example=torch.zeros(1, 4))


def test_an_example_that_no_subnet_runs_on_is_not_blamed_on_the_description(digits: Supernet) -> None:
    with pytest.raises(InvalidRequest, match=r"shape \(3, 16, 16\): stem .*; give a batch that the network"):
        subnetact.Engine(
            digits, [digits.space.smallest()], example=torch.zeros(1, 3, 16, 16), allow_uncalibrated=True
        )


def test_an_example_is_tensors(digits: Supernet) -> None:
    for example in ([[3]], [IMAGE[None], 3], IMAGE.numpy(), [IMAGE.numpy()]):
        with pytest.raises(InvalidRequest, match=r"example: expected a torch.Tensor, or a tuple or dict"):
            subnetact.Engine(digits, [digits.space.smallest()], example=example, allow_uncalibrated=True)
    with pytest.raises(EngineError, match="example: an empty list; give one batch, or one per shape"):
        subnetact.Engine(digits, [digits.space.smallest()], example=[], allow_uncalibrated=True)


def test_batches_that_do_not_fit_are_named(engine: subnetact.Engine) -> None:
    wrong: tuple[Any, ...] = (
        torch.zeros(2, 3, 16, 16),
        torch.zeros(2, 1, 16, 16, dtype=torch.float64),
        torch.zeros(16),
        np.zeros((2, 1, 16, 16)),
        (IMAGE[None], IMAGE[None]),
    )
    for x in wrong:
        with pytest.raises(
            InvalidRequest, match=r"batch: got .*serves torch.float32 of shape \(N, 1, 16, 16\)"
        ):
            engine(x, subnet=0)
    assert engine(IMAGE[None], subnet=0).shape == (1, 10)


def test_counts_and_numbers(engine: subnetact.Engine) -> None:
    engine.prepare(n for n in np.array([1, 2]))  # type: ignore[arg-type]
    for sizes in (4, [0], [-1], [1.5], "8"):
        with pytest.raises(EngineError, match=r"batch_sizes: .* whole numbers of at least 1"):
            engine.prepare(sizes)  # type: ignore[arg-type]
    with pytest.raises(TableError, match=r"batch_sizes: 4 is one number; write \(4,\)"):
        subnetact.profile_latency(engine, 4)  # type: ignore[arg-type]
    table = subnetact.LatencyTable(["a"], [60.0], [1], [[1.0]])
    for wrong in ("table.json", None):
        with pytest.raises(TableError, match=r"expected a LatencyTable, got .*LatencyTable\.load\(path\)"):
            subnetact.SlackFit(wrong, slo_ms=36.0)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="slo_ms: '50' must be a number"):
        subnetact.SlackFit(table, slo_ms="50")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="margin_ms: None must be a number"):
        subnetact.SlackFit(table, margin_ms=None, slo_ms=36.0)  # type: ignore[arg-type]


def test_sizes_are_whole_numbers() -> None:
    for size in (9.6, float("nan"), "8", None):
        with pytest.raises(SpecError, match=r"the size 'width' comes out as .*make it a whole number"):
            SubnetSpace("own", [Axis.uniform("w", ["all"], [0.3])], lambda _, s=size: {"width": s})
    for size in (np.True_, np.int16(1), torch.tensor(1), np.array(1.0)):
        space = SubnetSpace("own", [Axis.uniform("w", ["all"], [1])], lambda _, s=size: {"width": s})
        assert space.resolve(space.largest()) == (1,)
    space = SubnetSpace("own", [Axis.uniform("w", ["all"], [0.25])], lambda v: {"width": 32 * v["w"][0]})
    assert space.resolve(space.largest()) == (8,)


def test_paths_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"nowhere.*expected a bundle; .*Engine\.save\(\) wrote"):
        subnetact.Engine.load(tmp_path / "nowhere")
    with pytest.raises(FileFormatError, match=r"nowhere.*expected an export"):
        load_exported(tmp_path / "nowhere", trusted=True)


def test_paths_to_something_else(engine: subnetact.Engine, tmp_path: Path) -> None:
    engine.save(tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"is a bundle, .*subnetact\.from_pretrained reads it"):
        ofa_adapters.load("ofa_mbv3", tmp_path / "bundle")
    to_torchscript(engine, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"holds more than tensors .*TorchScript"):
        ofa_adapters.load("ofa_mbv3", tmp_path / "m.pt")
    with pytest.raises(ExportError, match=r"nowhere/m\.pt is not a file in a folder that exists"):
        to_torchscript(engine, tmp_path / "nowhere" / "m.pt")
    torch.save({"a": torch.zeros(100)}, tmp_path / "damaged.pth")
    damaged = bytearray((tmp_path / "damaged.pth").read_bytes())
    damaged[damaged.rfind(b"PK\x01\x02")] ^= 0xFF
    (tmp_path / "damaged.pth").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"damaged\.pth"):
        ofa_adapters.load("ofa_mbv3", tmp_path / "damaged.pth")
    table = subnetact.LatencyTable(["a"], [60.0], [1], [[1.0]])
    with pytest.raises(FileNotFoundError, match=r"its folder .*nowhere does not exist; create it first"):
        table.save(tmp_path / "nowhere" / "table.json")
    with pytest.raises(SpecError, match=r"norms: expected a NormTable, got str; NormTable\.load"):
        engine.supernet.norms = "norms.safetensors"


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "o.json")]
    with pytest.raises(SystemExit):
        profile.main(["--constructor", "{bad", *out])
    assert "'{bad' is no JSON object" in capsys.readouterr().err
    for sizes in (["4", "2"], ["0"]):
        assert profile.main(["--batch-sizes", *sizes, *out]) == 2
        assert "batch_sizes[" in capsys.readouterr().err


def test_a_checkpoint_of_our_own_with_another_head_is_still_the_familys() -> None:
    tensors = ofa_adapters.load("ofa_mbv3", width_mult=0.5, n_classes=10).state_dict()
    with pytest.raises(CheckpointError, match=r"show: n_classes=10 \(it was 11\).*classifier") as caught:
        ofa_adapters.load("ofa_mbv3", tensors, width_mult=0.5, n_classes=11)
    assert "none of the known families" not in str(caught.value)
