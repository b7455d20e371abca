"""An engine runs the subnets that are registered with it, and names what fails."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from elastic_networks import PARTS
from torch import Tensor, nn

from subnetact import Axis, Engine, SubnetSpace, Supernet, calibrate, evaluate, insert_, profile_latency
from subnetact.digits import new_digits_supernet
from subnetact.errors import (
    EngineError,
    InsertError,
    InvalidRequest,
    NotCalibrated,
    SpecError,
    TableError,
    UncalibratedSubnetWarning,
)
from subnetact.operators import LayerSelect
from subnetact.supernet.statistics import adopt_statistics_

EXAMPLE = torch.zeros(1, 16, 16)
X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))
UNCALIBRATED = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


@pytest.fixture
def engine(digits: Supernet) -> Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    return Engine(digits, specs, example=EXAMPLE[None])


def test_ids_run_their_subnets(engine: Engine) -> None:
    assert len(engine) == 3
    assert not engine.is_fused([0])  # type: ignore[arg-type]
    engine.prepare(n for n in torch.tensor([1, 2]).numpy())
    for i, spec in enumerate(engine.specs):
        expected = engine.supernet(X, subnet=spec)
        assert engine.keys[i] == spec.key
        for output in (engine(X, subnet=i), engine.ready(i)(X), torch.stack(list(engine.run(i, list(X), 8)))):
            torch.testing.assert_close(output, expected, rtol=5e-5, atol=5e-5)
    assert engine.ready(torch.tensor(0)).id == 0  # type: ignore[arg-type]


@UNCALIBRATED
def test_ids_inputs_accuracies_and_weights_that_cannot_be_are_named(engine: Engine) -> None:
    digits, spec = engine.supernet, engine.specs[0]
    for wrong in (-1, 3):
        with pytest.raises(SpecError, match=rf"no subnet {wrong}; this engine has 0\.\.2"):
            engine(X, subnet=wrong)
    for no_id in ("0", 0.0, 1.5, True, None):
        for use in (engine.ready, engine.remove, lambda i: engine(X, subnet=i)):
            with pytest.raises(SpecError, match="is not an id; ids are ints"):
                use(no_id)
    engine.check(X[0])
    for x in (X, X[0].double(), X[0, 0], "digit", None):
        with pytest.raises(InvalidRequest, match="input: "):
            engine.check(x)
    with pytest.warns(UserWarning, match=r"accuracy is in percent.*0\.97 of 1 is 97 percent"):
        Engine(digits, engine.specs[:2], accuracy=[0.93, 0.97])
    for accuracy in (101.0, -1.0, float("nan"), "good", True):
        with pytest.raises(SpecError, match=r"accuracy of depth=.* is not a percentage; give 0 to 100"):
            Engine(digits, [spec], accuracy=[accuracy])  # type: ignore[list-item]
    with torch.device("meta"):
        empty = new_digits_supernet()
    with pytest.raises(EngineError, match=r"stem\.weight is on the meta device.*load"):
        Engine(empty, [spec], allow_uncalibrated=True)
    layer = digits.network.classifier
    layer._parameters["weight"] = nn.Parameter(layer.weight.detach().to_sparse())
    with pytest.raises(EngineError, match=r"classifier\.weight is of layout torch\.sparse_coo.*to_dense"):
        Engine(digits, [spec])


def test_uncalibrated_and_repeated_subnets_are_refused(digits: Supernet) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    with pytest.raises(NotCalibrated, match=r"2 of 2 subnets .* allow_uncalibrated"):
        Engine(digits, specs, example=EXAMPLE[None])
    with pytest.warns(UncalibratedSubnetWarning):
        assert len(Engine(digits, specs, example=EXAMPLE[None], allow_uncalibrated=True)) == 2


def test_an_engine_follows_the_configuration_of_another(engine: Engine, tmp_path: Path) -> None:
    replica = Engine.from_config(copy.deepcopy(engine.supernet), engine.config)
    engine.register(engine.specs[1], accuracy=80.0)
    engine.remove(0)
    assert engine.pin(2)
    replica.follow(engine.config)
    engine.save(tmp_path)
    for same in (replica, Engine.load(tmp_path)):
        assert (same.ids, same.specs, same.accuracy) == ((1, 2), engine.specs, (None, 80.0, None))
        assert same.pinned == engine.pinned == (2,)
        assert [same.is_fused(i) for i in range(3)] == [engine.is_fused(i) for i in range(3)]
        for i in same.ids:
            torch.testing.assert_close(same(X, i), engine(X, i), rtol=1e-4, atol=1e-4)
    engine.unpin(2)
    replica.follow(engine.config)
    assert replica.pinned == ()


def test_the_example_follows_the_dtype_of_the_weights(digits: Supernet, tmp_path: Path) -> None:
    spec, x = digits.space.largest(), torch.randn(3, 1, 16, 16)
    adopt_statistics_(digits)
    engine = Engine(digits, [spec], example=[x[:1], x[:1, :, :8]])
    digits.to(torch.float64)
    assert engine.config.sample[0].dtype == torch.float64
    engine.check(x[0].double())
    with pytest.raises(InvalidRequest, match="float32"):
        engine.check(x[0])
    assert [sample.dtype for sample in engine.samples] == [torch.float64] * 2
    engine.save(tmp_path)
    for same in (Engine.load(tmp_path), Engine.from_config(copy.deepcopy(digits), engine.config)):
        torch.testing.assert_close(same(x.double(), 0), engine(x.double(), 0), rtol=0, atol=5e-5)


# -- what a supernet is checked for ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 1), nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)).mean((2, 3)))


def forgetful() -> Supernet:
    """A supernet whose description lacks the second block, which the smallest subnet skips."""
    axes = [Axis.uniform("w", ["it"], [4, 8]), Axis.uniform("keep", ["it"], [0, 1])]
    space = SubnetSpace("forgetful", axes, lambda v: {"w": v["w"][0], "keep": v["keep"][0]})
    parts = {"stem": "out", "block.0.conv": "both", "block.0.norm": "norm", "head": "in"}
    elastic = {path: PARTS[part] for path, part in parts.items()}
    return insert_(Small().eval(), space, {"block": LayerSelect.on(**{"1": "keep"}), **elastic})


BATCH = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
NAMED = r"keep=1 w=4 does not run .*block\.1\.conv.*WeightSlice"


@UNCALIBRATED
def test_a_forgotten_module_that_no_given_subnet_needs_is_found_at_every_door() -> None:
    supernet, quick = forgetful(), {"warmup_ms": 0, "min_time_ms": 1, "progress": False, "check": False}
    smallest, broken = [supernet.space.smallest()], supernet.space.spec(w=4, keep=1)
    with pytest.raises(InsertError, match=NAMED):
        calibrate(supernet, smallest, [BATCH], progress=False)
    assert len(supernet.norms) == 0
    calibrate(supernet, smallest, [BATCH], progress=False, check=False)
    with pytest.raises(InsertError, match=NAMED):
        Engine(supernet, smallest, example=BATCH[:1])
    engine = Engine(supernet, smallest, example=BATCH[:1], check=False, allow_uncalibrated=True)
    with pytest.raises(InsertError, match=NAMED):
        profile_latency(engine, [1], [50.0], progress=False)
    assert profile_latency(engine, [1], [50.0], **quick).latency_ms.shape == (1, 1)  # type: ignore[arg-type]
    labels = torch.zeros(4, dtype=torch.long)
    with pytest.raises(
        SpecError, match=r"evaluate: keep=1 w=4 does not run on .* block\.1\.conv .*check\(x\)"
    ):
        evaluate(supernet, [broken], [(BATCH, labels)], progress=False)
    engine.register(broken)
    with pytest.raises(
        TableError, match=r"subnet 1 \(keep=1 w=4\) does not run at batch size 1: block\.1\.con"
    ):
        profile_latency(engine, [1], [50.0, 60.0], **quick)  # type: ignore[arg-type]
