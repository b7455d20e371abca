"""Calls that no caller should make end in errors of the library, which say what to do, and change nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from functools import partial as of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_networks import one_width
from torch import nn

import ofa_adapters
from subnetact import (
    Axis,
    Batcher,
    Engine,
    SlackFit,
    SubnetSpace,
    Supernet,
    calibrate,
    evaluate,
    profile_latency,
    reorder_,
)
from subnetact.digits import new_digits_supernet
from subnetact.errors import (
    CheckpointError,
    DeviceError,
    EngineError,
    ExportError,
    FileFormatError,
    InsertError,
    InvalidRequest,
    PolicyError,
    SpecError,
    TableError,
)
from subnetact.export import load_exported, to_onnx, to_torchscript, to_triton
from subnetact.latency.table import LatencyTable
from subnetact.operators import LayerNormSlice, SubnetNorm, WeightSlice
from subnetact.training import sandwich_step

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
IMAGE, BATCH = torch.zeros(1, 16, 16), torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
TABLE = LatencyTable(["a", "b"], [60.0, 70.0], (1, 2), np.array([[2.0, 3.0], [4.0, 6.0]]))
NAN, HUGE = float("nan"), 10**400


class Given:
    """What the calls are made on: a supernet, its smallest subnet, an engine, and an empty folder."""

    def __init__(self, supernet: Supernet, folder: Path) -> None:
        self.supernet, self.folder, self.spec = supernet, folder, supernet.space.smallest()
        self.state = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}

    def new_engine(self, specs: Any = None, **options: Any) -> Engine:
        options = {"allow_uncalibrated": True, **options}
        return Engine(self.supernet, [self.spec] if specs is None else specs, **options)

    @cached_property
    def engine(self) -> Engine:
        return self.new_engine(example=IMAGE[None])

    def exampled(self, *examples: Any) -> list[Callable[[], Engine]]:
        return [of(self.new_engine, example=example) for example in examples]

    def padded(self, padding: Any) -> Engine:
        return self.new_engine(example=[torch.zeros(1, 1, n, n) for n in (14, 16)], padding=padding)

    def forgetful(self) -> Engine:
        network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        supernet = one_width(network, {"0": "out", "2": "in"})
        return Engine(supernet, list(supernet.space.enumerate()), example=torch.zeros(1, 4))


def step(x: Any = BATCH, **options: Any) -> Any:
    supernet = new_digits_supernet().train()
    return sandwich_step(supernet, x, torch.tensor([0, 1]), rng=random.Random(0), **options)


def new_head() -> Any:
    tensors = ofa_adapters.load("ofa_mbv3", width_mult=0.5, n_classes=10).state_dict()
    return ofa_adapters.load("ofa_mbv3", tensors, width_mult=0.5, n_classes=11)


def sized(size: Any) -> SubnetSpace:
    return SubnetSpace("own", [Axis.uniform("w", ["all"], [0.3])], lambda _: {"width": size})


Row = tuple[Any, str, list[Callable[[], Any]]]


def refusals(g: Given) -> Iterator[Row]:
    """Yield the error, what it says, and the calls that end in it."""
    network, operators = nn.Linear(2, 2), (WeightSlice, SubnetNorm, LayerNormSlice)
    # something else than is meant
    words = r"expected a Supernet, got Linear; subnetact\.insert_"
    yield InsertError, words, [of(Engine, network, []), of(calibrate, network, [], [])]
    exports = (to_onnx, to_torchscript, to_triton)
    words = r"expected an Engine, got Supernet; make one, Engine\("
    yield ExportError, words, [of(export, g.supernet, g.folder / "x") for export in exports]
    yield TableError, "expected an Engine, got Supernet", [of(profile_latency, g.supernet)]
    words = r"engine: Supernet has no run\(\.\.\.\) and keys"
    yield PolicyError, words, [of(Batcher, g.supernet, table=TABLE, slo_ms=10)]
    alone = [of(export, g.engine, g.folder / "m.pt", subnets=g.spec) for export in exports[:2]]
    yield SpecError, r"takes a list .*, got SubnetSpec; write \[spec\]", [of(g.new_engine, g.spec), *alone]
    yield SpecError, r"at least one; got .*depth.* twice", [of(g.new_engine, [g.spec, g.spec])]
    yield SpecError, "at least one; got none", [of(g.new_engine, [])]
    words = r"expected a LatencyTable, got .*LatencyTable\.load\(path\)"
    yield TableError, words, [of(SlackFit, wrong, slo_ms=36.0) for wrong in ("table.json", None)]
    words = r"norms: expected a NormTable, got str; NormTable\.load"
    yield SpecError, words, [of(setattr, g.supernet, "norms", "norms.safetensors")]
    yield DeviceError, "device '3.5' cannot be used", [of(g.new_engine, device=3.5)]
    batches = [of(calibrate, g.supernet, [g.spec], wrong) for wrong in (None, "images", 5)]
    words = r"calibrate takes lists .*\[batch\]"
    yield SpecError, words, [*batches, of(calibrate, g.supernet, None, [BATCH])]
    yield SpecError, r"write \[\(inputs, labels\)\]", [of(evaluate, g.supernet, [g.spec], None)]
    yield SpecError, "without values, which shows nothing", [of(g.supernet.check, BATCH[:0])]
    load, lists = g.supernet.load_state_dict, {name: t.tolist() for name, t in g.state.items()}
    yield CheckpointError, "expected tensors by name, got NoneType", [of(load, None)]
    yield CheckpointError, "stem.weight is no tensor", [of(load, lists)]
    words = r"describe a module with (WeightSlice|SubnetNorm|LayerNormSlice)\.on\("
    yield InsertError, words, [of(operator, out="c") for operator in operators]
    yield InsertError, r"is made by insert_", [of(operator, "c") for operator in operators]
    # examples and batches
    words = r"does not run on one sample of it, .* shape \(16, 16\): .*x\[None\] of one input x"
    yield InvalidRequest, words, g.exampled(IMAGE)
    words = r"expected a batch, .* first axis .* \(0, 1, 16, 16\); give x\[None\]"
    yield InvalidRequest, words, g.exampled(BATCH[:0])
    yield InvalidRequest, "first axis has one size", g.exampled((torch.zeros(2, 1), torch.tensor(1.0)))
    words = r"shape \(3, 16, 16\): stem .*; give a batch that the network"
    yield InvalidRequest, words, g.exampled(torch.zeros(1, 3, 16, 16))
    wrong = ([[3]], [IMAGE[None], 3], IMAGE.numpy(), [IMAGE.numpy()])
    yield InvalidRequest, r"example: expected a torch.Tensor, or a tuple or dict", g.exampled(*wrong)
    yield EngineError, "example: an empty list; give one batch, or one per shape", g.exampled([])
    words = r"w=4 does not run .*: 1 \(LayerNorm\): .* describe this module: \"1\": LayerNormSlice\.on\(f"
    yield InvalidRequest, words, [g.forgetful]
    wrong = (torch.zeros(2, 3, 16, 16), BATCH.double(), torch.zeros(16), BATCH.numpy(), (BATCH, BATCH))
    words = r"batch: got .*serves torch.float32 of shape \(N, 1, 16, 16\)"
    yield InvalidRequest, words, [of(g.engine, x, subnet=0) for x in wrong]
    yield InvalidRequest, "batch: ", [of(g.engine, x, 0) for x in (BATCH.to_sparse(), BATCH.to("meta"))]
    wrong = ([], None, 5, [None], [IMAGE.numpy()], [IMAGE, IMAGE[:, 1:]], [IMAGE.to_sparse()], {0: IMAGE})
    yield InvalidRequest, ".", [of(g.engine.run, 0, inputs, 1) for inputs in wrong]
    # numbers
    yield EngineError, "padding", [of(g.padded, wrong) for wrong in (HUGE, 1e300, NAN, True, "0")]
    sizes = (4, [0], [-1], [1.5], "8")
    words = r"batch_sizes: .* whole numbers of at least 1"
    yield EngineError, words, [of(g.engine.prepare, wrong) for wrong in sizes]
    yield EngineError, "batch", [of(g.engine.prepare, [10**12])]
    yield SpecError, ".", [of(g.engine.prepare, [1], ids=5)]
    budgets = [of(g.new_engine, memory_budget_mb=wrong) for wrong in ("8", HUGE, NAN, float("inf"), -1, True)]
    yield EngineError, "memory_budget_mb: .* must be a number of MiB", budgets
    words = r"there is no 'nonsense' here; choose from .*inductor"
    yield EngineError, words, [of(g.new_engine, backend="nonsense")]
    words = r"batch_sizes: 4 is one number; write \(4,\)"
    yield TableError, words, [of(profile_latency, g.engine, 4)]
    words = r"the size 'width' comes out as .*make it a whole number"
    yield SpecError, words, [of(sized, size) for size in (9.6, NAN, "8", None)]
    yield PolicyError, "slo_ms: '50' must be a number", [of(SlackFit, TABLE, slo_ms="50")]
    margin = of(SlackFit, TABLE, margin_ms=None, slo_ms=36.0)
    yield PolicyError, "margin_ms: None must be a number", [margin]
    # paths, names and checkpoints
    nowhere = g.folder / "nowhere"
    yield FileFormatError, r"nowhere.*expected a bundle; .*Engine\.save\(\) wrote", [of(Engine.load, nowhere)]
    yield FileFormatError, r"nowhere.*expected an export", [of(load_exported, nowhere, trusted=True)]
    words = r"nowhere/m\.pt is not a file in a folder that exists"
    yield ExportError, words, [of(to_torchscript, g.engine, nowhere / "m.pt")]
    words = r"its folder .*nowhere does not exist; create it first"
    yield FileNotFoundError, words, [of(TABLE.save, nowhere / "table.json")]
    names = [of(to_triton, g.engine, g.folder, name=name) for name in (None, 3, b"digits", "")]
    yield ExportError, r"name: .* is not a model name", names
    yield CheckpointError, r"^(?!.*known families).*show: n_classes=10 \(it was 11\).*classifier", [new_head]
    # training and sorting
    losses = (5, lambda *_: 5.0, lambda scores, _: scores.sum().detach())
    steps = [of(step, loss=wrong) for wrong in losses]
    steps += [of(step, distillation=wrong) for wrong in ("x", None, NAN)]
    steps += [of(step, teacher=5), of(step, backward=5), of(step, [1]), of(step, None)]
    yield SpecError, ".", steps
    modes = (torch.no_grad(), torch.inference_mode())
    yield SpecError, "gradients", [mode(step) for mode in modes]
    sort = of(reorder_, g.supernet, example=BATCH)
    sorts = [of(sort, dimensions=wrong) for wrong in (5, [5], "first.width")]
    sorts += [of(sort, batches=wrong) for wrong in (5, [5], [(1,)])]
    complex_numbers = of(sort, importance=lambda group: torch.zeros(group.units, dtype=torch.complex64))
    yield SpecError, ".", [*sorts, complex_numbers]


def test_wrong_calls_are_refused_in_words_and_change_nothing(digits: Supernet, tmp_path: Path) -> None:
    given, offenders = Given(digits, tmp_path), []
    for error, words, calls in refusals(given):
        for number, call in enumerate(calls):
            try:
                call()
                offenders.append(f"{words}, call {number}: it is accepted")
            except error as refusal:
                if not re.search(words, str(refusal)):
                    offenders.append(f"{words}, call {number}: {refusal}")
    assert not offenders
    assert all(torch.equal(tensor, given.state[name]) for name, tensor in digits.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_files_of_another_kind_are_named(digits: Supernet, tmp_path: Path) -> None:
    engine = Given(digits, tmp_path).engine
    engine.save(tmp_path / "bundle")
    to_torchscript(engine, tmp_path / "m.pt")
    torch.save({"a": torch.zeros(100)}, tmp_path / "damaged.pth")
    damaged = bytearray((tmp_path / "damaged.pth").read_bytes())
    damaged[damaged.rfind(b"PK\x01\x02")] ^= 0xFF
    (tmp_path / "damaged.pth").write_bytes(damaged)
    for name, words in (
        ("bundle", r"is a bundle, .*subnetact\.from_pretrained reads it"),
        ("m.pt", r"holds more than tensors .*TorchScript"),
        ("damaged.pth", r"damaged\.pth"),
    ):
        with pytest.raises(CheckpointError, match=words):
            ofa_adapters.load("ofa_mbv3", tmp_path / name)


def test_a_supernet_without_its_operators_is_refused_everywhere(digits: Supernet, tmp_path: Path) -> None:
    given = Given(digits, tmp_path)
    engine = given.engine
    engine.save(tmp_path / "bundle")
    network = digits.remove()
    calls: list[Callable[[], Any]] = [digits.remove, digits.state_dict, digits.fingerprint, given.new_engine]
    calls += [of(digits.extract, given.spec), of(digits.subnet, given.spec), of(digits, BATCH)]
    calls += [of(digits.load_state_dict, {}), of(calibrate, digits, [given.spec], [BATCH])]
    calls += [of(engine, BATCH, 0), of(engine.save, tmp_path / "bundle")]
    for call in calls:
        with pytest.raises(InsertError, match="removed"):
            call()
    kept = Engine.load(tmp_path / "bundle")
    torch.testing.assert_close(kept.supernet(BATCH), network(BATCH), rtol=0, atol=5e-5)
