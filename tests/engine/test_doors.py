"""Engine, calibrate, evaluate and profile_latency check the supernet, and name the module that fails."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subnetact import Axis, Engine, SubnetSpace, Supernet, calibrate, evaluate, insert_, profile_latency
from subnetact.digits import new_digits_supernet
from subnetact.errors import EngineError, InsertError, InvalidRequest, SpecError, TableError
from subnetact.operators import LayerSelect, SubnetNorm, WeightSlice

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


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
    space = SubnetSpace(
        "forgetful",
        [Axis.uniform("c", ["it"], [4, 8]), Axis.uniform("keep", ["it"], [0, 1])],
        lambda v: {"c": v["c"][0], "keep": v["keep"][0]},
    )
    elastic = {
        "stem": WeightSlice.on(out="c"),
        "block": LayerSelect.on(**{"1": "keep"}),
        "block.0.conv": WeightSlice.on(in_="c", out="c"),
        "block.0.norm": SubnetNorm.on(channels="c"),
        "head": WeightSlice.on(in_="c"),
    }
    return insert_(Small().eval(), space, elastic)


BATCH = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
NAMED = r"c=4 keep=1 does not run .*block\.1\.conv.*WeightSlice"


def test_a_forgotten_module_that_no_given_subnet_needs_is_found_at_every_door() -> None:
    supernet = forgetful()
    smallest = [supernet.space.smallest()]
    with pytest.raises(InsertError, match=NAMED):
        calibrate(supernet, smallest, [BATCH], progress=False)
    assert len(supernet.norms) == 0
    calibrate(supernet, smallest, [BATCH], progress=False, check=False)
    with pytest.raises(InsertError, match=NAMED):
        Engine(supernet, smallest, example=BATCH[:1])
    engine = Engine(supernet, smallest, example=BATCH[:1], check=False)
    with pytest.raises(InsertError, match=NAMED):
        profile_latency(engine, [1], [50.0], progress=False)
    table = profile_latency(engine, [1], [50.0], warmup_ms=0, min_time_ms=1, progress=False, check=False)
    assert table.latency_ms.shape == (1, 1)


def test_a_subnet_that_does_not_run_is_named_by_evaluate_and_profile_latency() -> None:
    supernet = forgetful()
    broken = supernet.space.spec(c=4, keep=1)
    labels = torch.zeros(4, dtype=torch.long)
    with pytest.raises(
        SpecError, match=r"evaluate: c=4 keep=1 does not run on .* block\.1\.conv .*check\(x\)"
    ):
        evaluate(supernet, [broken], [(BATCH, labels)], progress=False)
    engine = Engine(
        supernet, [supernet.space.smallest()], example=BATCH[:1], allow_uncalibrated=True, check=False
    )
    engine.register(broken)
    with pytest.raises(
        TableError, match=r"subnet 1 \(c=4 keep=1\) does not run at batch size 1: block\.1\.conv"
    ):
        profile_latency(engine, [1], [50.0, 60.0], progress=False, check=False)


def test_the_check_runs_once_per_supernet_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, calls = new_digits_supernet().eval(), list[Any]()
    original = Supernet.check
    monkeypatch.setattr(
        Supernet, "check", lambda self, x, **options: (calls.append(x), original(self, x, **options))[1]
    )
    spec, image = [digits.space.smallest()], torch.zeros(1, 16, 16)
    calibrate(digits, spec, [torch.randn(20, 1, 16, 16)], progress=False)
    engine = Engine(digits, spec, example=image[None])
    profile_latency(engine, [1], [50.0], warmup_ms=0, min_time_ms=1, progress=False)
    assert len(calls) == 1
    digits.load_state_dict(digits.state_dict())
    Engine(digits, spec, example=image[None])
    assert len(calls) == 2


def test_accuracies_of_the_engine_are_in_the_table(digits: Supernet) -> None:
    specs = digits.space.sample(0, 3)
    engine = Engine(
        digits, specs, example=torch.zeros(1, 1, 16, 16), accuracy=[60.0, None, 70], allow_uncalibrated=True
    )
    table = profile_latency(engine, [1], warmup_ms=0, min_time_ms=1, progress=False)
    assert table.accuracy[0] == 60.0
    assert math.isnan(table.accuracy[1])
    assert table.accuracy[2] == 70.0


def test_accuracies_that_look_like_fractions_are_told(digits: Supernet) -> None:
    specs = digits.space.sample(0, 2)
    with pytest.warns(UserWarning, match=r"accuracy is in percent.*0\.97 of 1 is 97 percent"):
        Engine(digits, specs, accuracy=[0.93, 0.97], allow_uncalibrated=True)
    for wrong in (101.0, -1.0, float("nan"), "good", True):
        with pytest.raises(SpecError, match=r"accuracy of depth=.* is not a percentage; give 0 to 100"):
            Engine(digits, specs, accuracy=[wrong, 97.0], allow_uncalibrated=True)  # type: ignore[list-item]


def test_weights_that_cannot_be_run_are_refused_by_name() -> None:
    with torch.device("meta"):
        supernet = new_digits_supernet()
    with pytest.raises(EngineError, match=r"stem\.weight is on the meta device.*load"):
        Engine(supernet, [supernet.space.smallest()], allow_uncalibrated=True)
    supernet = new_digits_supernet()
    weight = supernet.network.classifier.weight
    supernet.network.classifier._parameters["weight"] = nn.Parameter(weight.detach().to_sparse())
    with pytest.raises(EngineError, match=r"classifier\.weight is of layout torch\.sparse_coo.*to_dense"):
        Engine(supernet, [supernet.space.smallest()], allow_uncalibrated=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_calibration_data_of_another_dtype_is_refused_by_name(digits: Supernet, dtype: torch.dtype) -> None:
    with pytest.raises(SpecError, match=r"stem \(Conv2d\): expected scalar type .* give batches"):
        calibrate(digits, [digits.space.smallest()], [torch.zeros(8, 1, 16, 16, dtype=dtype)], progress=False)


def test_an_example_that_the_network_does_not_take_stays_an_invalid_request(digits: Supernet) -> None:
    with pytest.raises(InvalidRequest, match="does not run on one sample of it"):
        Engine(digits, [digits.space.smallest()], example=torch.zeros(1, 3, 16, 16), allow_uncalibrated=True)
