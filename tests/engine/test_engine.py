"""An engine runs the subnets that are registered with it, and refuses what it cannot run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import subnetact
from subnetact.errors import InvalidRequest, NotCalibrated, SpecError
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)
X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    subnetact.calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    return subnetact.Engine(digits, specs, example=EXAMPLE[None])


def test_ids_run_their_subnets(engine: subnetact.Engine) -> None:
    assert len(engine) == 3
    for i, spec in enumerate(engine.specs):
        expected = engine.supernet(X, subnet=spec)
        assert engine.keys[i] == spec.key
        torch.testing.assert_close(engine(X, subnet=i), expected, rtol=5e-5, atol=5e-5)
        torch.testing.assert_close(engine.ready(i)(X), expected, rtol=5e-5, atol=5e-5)
        outputs = engine.run(i, list(X), 8)
        assert len(outputs) == 5
        torch.testing.assert_close(torch.stack(list(outputs)), expected, rtol=5e-5, atol=5e-5)


def test_unknown_ids_are_refused(engine: subnetact.Engine) -> None:
    for wrong in (-1, 3):
        with pytest.raises(SpecError, match=rf"no subnet {wrong}; this engine has 0\.\.2"):
            engine(X, subnet=wrong)


def test_inputs_are_checked(engine: subnetact.Engine) -> None:
    engine.check(X[0])
    for wrong in (X, X[0].double(), X[0, 0], "digit", None):
        with pytest.raises(InvalidRequest, match="input: "):
            engine.check(wrong)


def test_uncalibrated_and_repeated_subnets_are_refused(digits: Supernet) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    with pytest.raises(NotCalibrated, match=r"2 of 2 subnets .* allow_uncalibrated"):
        subnetact.Engine(digits, specs, example=EXAMPLE[None])
    with pytest.warns(subnetact.errors.UncalibratedSubnetWarning):
        assert len(subnetact.Engine(digits, specs, example=EXAMPLE[None], allow_uncalibrated=True)) == 2
    for wrong in ([], [specs[0]] * 2):
        with pytest.raises(SpecError, match="distinct"):
            subnetact.Engine(digits, wrong, example=EXAMPLE[None])


def test_an_engine_follows_the_configuration_of_another(engine: subnetact.Engine, tmp_path: Path) -> None:
    replica = subnetact.Engine.from_config(copy.deepcopy(engine.supernet), engine.config)
    engine.register(engine.specs[1], accuracy=80.0)
    engine.remove(0)
    assert engine.pin(2)
    replica.follow(engine.config)
    engine.save(tmp_path)
    for same in (replica, subnetact.Engine.load(tmp_path)):
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
    digits.adopt_statistics()
    engine = subnetact.Engine(digits, [spec], example=[x[:1], x[:1, :, :8]])
    digits.to(torch.float64)
    assert engine.config.sample[0].dtype == torch.float64
    engine.check(x[0].double())
    with pytest.raises(InvalidRequest, match="float32"):
        engine.check(x[0])
    assert [sample.dtype for sample in engine.samples] == [torch.float64] * 2
    engine.save(tmp_path)
    loaded = subnetact.Engine.load(tmp_path)
    copied = subnetact.Engine.from_config(copy.deepcopy(digits), engine.config)
    for same in (loaded, copied):
        torch.testing.assert_close(same(x.double(), 0), engine(x.double(), 0), rtol=0, atol=5e-5)
