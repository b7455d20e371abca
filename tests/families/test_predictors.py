"""The accuracy predictors against upstream's own, and the latency predictor."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import subnetact
from ofa_adapters import encode, load
from subnetact.errors import CheckpointError, SearchError, SpecError
from subnetact.supernet.supernet import Supernet

SIZES = [128, 144, 160, 176, 192, 224, 240, 256]


def upstream_predictor(family: str) -> Any:
    pytest.importorskip("ofa", reason="parity with the upstream package needs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ofa.nas.accuracy_predictor import AccuracyPredictor, MobileNetArchEncoder, ResNetArchEncoder
    if family == "ofa_resnet50":
        encoder = ResNetArchEncoder(
            image_size_list=SIZES,
            depth_list=[0, 1, 2],
            expand_list=[0.2, 0.25, 0.35],
            width_mult_list=[0.65, 0.8, 1.0],
        )
    else:
        encoder = MobileNetArchEncoder(
            image_size_list=SIZES, ks_list=[3, 5, 7], expand_list=[3, 4, 6], depth_list=[2, 3, 4]
        )
    torch.manual_seed(3)
    predictor = AccuracyPredictor(encoder, checkpoint_path=None, device="cpu")
    predictor.base_acc.data.fill_(0.75)
    return predictor


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3"])
def test_predictions_are_upstreams(family: str, tmp_path: Path) -> None:
    upstream = upstream_predictor(family)
    path = tmp_path / "predictor.pth"
    torch.save({"state_dict": upstream.state_dict()}, path)
    space = load(family, None).space
    predictor = subnetact.AccuracyPredictor.from_checkpoint(path, partial(encode, space, image_size=192))
    ours, theirs = predictor.state_dict(), upstream.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    specs = space.sample(0, 22)
    configs = [{**space.format(spec), "image_size": 192} for spec in specs]
    with torch.no_grad():
        expected = 100 * upstream.predict_acc(configs)
    np.testing.assert_allclose(predictor(specs), expected.numpy(), rtol=1e-5)
    assert predictor(specs[3]) == pytest.approx(predictor(specs)[3], rel=1e-5)
    assert len({round(percent, 6) for percent in predictor(specs)}) > 15


def test_the_tutorials_predictor_loads_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU()]
    theirs = nn.Sequential(*layers, nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))
    torch.save(theirs.state_dict(), tmp_path / "acc_predictor.pth")
    space = load("ofa_mbv3", None).space
    features = partial(encode, space, image_size=224, encoding="tutorial")
    predictor = subnetact.AccuracyPredictor.from_checkpoint(tmp_path / "acc_predictor.pth", features)
    specs = [space.sample(seed) for seed in range(5)]
    with torch.no_grad():
        expected = 100 * theirs(torch.stack([torch.from_numpy(features(spec)) for spec in specs]))
    np.testing.assert_allclose(predictor(specs), expected[:, 0].numpy(), rtol=1e-5)


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_what_is_no_predictor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = subnetact.AccuracyPredictor.from_checkpoint
    space = load("ofa_mbv3", None).space
    features = partial(encode, space, image_size=224)
    torch.save({"state_dict": Harmful()}, tmp_path / "harmful.pth")
    (tmp_path / "short.pth").write_bytes(b"PK\x03\x04 truncated")
    for name in ("harmful.pth", "short.pth", "missing.pth"):
        with pytest.raises(CheckpointError, match=name):
            make(tmp_path / name, features)
    assert "must not run" not in capsys.readouterr().out
    good = subnetact.AccuracyPredictor(features, 128).state_dict()
    with pytest.raises(CheckpointError, match="hidden layers"):
        make({"layers.0.0.weight": good["layers.0.0.weight"]}, features)
    with pytest.raises(CheckpointError, match="no state_dict"):
        make({"state_dict": {"a": 1}}, features)  # type: ignore[dict-item]
    other = subnetact.AccuracyPredictor(lambda _: np.zeros(82), 128)
    with pytest.raises(SpecError, match="reads 128 features"):
        other(space.smallest())


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3"])
def test_latencies_that_follow_a_law_are_predicted(family: str, small: Callable[[str], Supernet]) -> None:
    supernet = small(family)
    costs = subnetact.CostModel(supernet, (3, 64, 64))

    def law(spec: subnetact.SubnetSpec) -> float:
        cost = costs(spec)
        return 0.3 + cost.macs / 2e7 + cost.activation_bytes / 1e6

    rng = random.Random(1)
    specs = list({supernet.space.sample(rng) for _ in range(60)})
    measured = [law(spec) for spec in specs]
    predictor = subnetact.LatencyPredictor.fit(supernet, specs, measured, batch_size=4, costs=costs)
    assert predictor.batch_size == 4
    assert predictor.error.mean_percent < 1.0
    assert predictor.error.rank_correlation > 0.99
    assert predictor.error.test == len(specs) > predictor.error.train > 0.7 * len(specs)
    fresh = [supernet.space.sample(rng) for _ in range(20)]
    np.testing.assert_allclose(predictor(fresh), [law(spec) for spec in fresh], rtol=0.05)
    assert (predictor.weights >= 0).all()


def test_the_reported_error_is_that_of_unseen_subnets(digits: Supernet) -> None:
    rng = np.random.default_rng(0)
    specs = list({digits.space.sample(rng) for _ in range(60)})
    noise = rng.uniform(1, 3, len(specs))
    error = subnetact.LatencyPredictor.fit(digits, specs, noise, input_shape=(1, 16, 16)).error
    assert error.mean_percent > 20
    assert error.rank_correlation < 0.5
    assert error.worst_percent > error.mean_percent


def test_really_measured_latencies_can_be_fitted(digits: Supernet) -> None:
    rng = random.Random(2)
    specs = list({digits.space.sample(rng) for _ in range(16)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", subnetact.errors.UncalibratedSubnetWarning)
        engine = subnetact.Engine(digits, specs, example=torch.zeros(1, 16, 16), allow_uncalibrated=True)
        table = subnetact.profile_latency(engine, [1], warmup_ms=1, min_time_ms=5, rounds=1, progress=False)
    predictor = subnetact.LatencyPredictor.fit(digits, specs, table.latency_ms[:, 0], input_shape=(1, 16, 16))
    assert 0 <= predictor.error.mean_percent <= predictor.error.worst_percent
    assert "rank correlation" in str(predictor.error)
    assert all(ms > 0 for ms in predictor(specs))


def test_fits_that_cannot_be_are_refused(digits: Supernet) -> None:
    specs = [digits.space.sample(seed) for seed in range(20)]
    fit = partial(subnetact.LatencyPredictor.fit, digits, input_shape=(1, 16, 16))
    for given, ms, words in (
        (specs, [1.0], "one positive number"),
        (specs, [0.0] * 20, "one positive number"),
        (specs, [float("nan")] * 20, "one positive number"),
        (specs[:1] * 20, [1.0] * 20, "distinct"),
    ):
        with pytest.raises(SearchError, match=words):
            fit(given, ms)
    with pytest.raises(SearchError, match="input_shape"):
        subnetact.LatencyPredictor.fit(digits, specs, [1.0] * 20)
