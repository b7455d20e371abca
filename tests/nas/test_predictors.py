"""Predictors and `evaluate`, against upstream's predictors, laws to be found, and counts by hand."""

from __future__ import annotations

import json
import pickle
import random
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_families import small_supernet
from torch import nn

import subnetact
import subnetact.costs
import subnetact.nas
from ofa_adapters import encode, load
from subnetact import SubnetSpec, calibrate, evaluate
from subnetact.digits import load_digits_supernet
from subnetact.errors import CheckpointError, ForeignSpec, MissingExtra, SearchError, SpecError
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
    predictor = subnetact.nas.AccuracyPredictor.from_checkpoint(path, partial(encode, space, image_size=192))
    ours, theirs = predictor.network.state_dict(), upstream.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    specs = space.sample(0, 22)
    configs = [{**space.format(spec), "image_size": 192} for spec in specs]
    with torch.no_grad():
        expected = 100 * upstream.predict_acc(configs)
    percent = [predictor(spec) for spec in specs]
    np.testing.assert_allclose(percent, expected.numpy(), rtol=1e-5)
    assert len({round(one, 6) for one in percent}) > 15


def test_the_tutorials_predictor_loads_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU()]
    theirs = nn.Sequential(*layers, nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))
    torch.save(theirs.state_dict(), tmp_path / "acc_predictor.pth")
    space = load("ofa_mbv3", None).space
    features = partial(encode, space, image_size=224, encoding="tutorial")
    predictor = subnetact.nas.AccuracyPredictor.from_checkpoint(tmp_path / "acc_predictor.pth", features)
    specs = [space.sample(seed) for seed in range(5)]
    with torch.no_grad():
        expected = 100 * theirs(torch.stack([torch.from_numpy(features(spec)) for spec in specs]))
    np.testing.assert_allclose([predictor(spec) for spec in specs], expected[:, 0].numpy(), rtol=1e-5)


def test_a_fit_predicts_what_it_has_not_seen_as_well_as_it_says() -> None:
    supernet = load_digits_supernet()
    golden = json.loads((Path(__file__).parents[1] / "golden" / "digits" / "accuracy.json").read_text())
    true = dict(zip(supernet.space.enumerate(), golden["accuracy"], strict=True))
    specs = supernet.space.sample(0, 40)
    fit = partial(subnetact.nas.AccuracyPredictor.fit, supernet.space)
    predictor = fit(specs, [true[spec] for spec in specs])
    off = np.array([abs(predictor(spec) - true[spec]) for spec in true if spec not in specs])
    assert predictor.error is not None
    assert 0.5 * off.mean() < predictor.error.mean_percent < 2 * off.mean() < 4
    assert "points off on average" in str(predictor.error)
    assert pickle.loads(pickle.dumps(predictor))(specs[0]) == predictor(specs[0])
    noise = np.random.default_rng(0).uniform(50, 80, len(specs))
    chance = fit(specs, noise).error
    assert chance is not None
    assert chance.rank_correlation < 0.5
    assert chance.mean_percent > 5
    for values, words in ((noise[:3], "one finite number"), (noise * np.nan, "one finite number")):
        with pytest.raises(SearchError, match=words):
            fit(specs, values)
    with pytest.raises(SearchError, match="at least 8 distinct subnets, got 1"):
        fit(specs[:1] * 9, noise[:9])
    with pytest.raises(ForeignSpec):
        predictor(load("ofa_mbv3", None).space.smallest())


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_what_is_no_predictor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = subnetact.nas.AccuracyPredictor.from_checkpoint
    space = load("ofa_mbv3", None).space
    features = partial(encode, space, image_size=224)
    torch.save({"state_dict": Harmful()}, tmp_path / "harmful.pth")
    (tmp_path / "short.pth").write_bytes(b"PK\x03\x04 truncated")
    for name in ("harmful.pth", "short.pth", "missing.pth"):
        with pytest.raises(CheckpointError, match=name):
            make(tmp_path / name, features)
    assert "must not run" not in capsys.readouterr().out
    good = subnetact.nas.AccuracyPredictor(features, 128).network.state_dict()
    with pytest.raises(CheckpointError, match="hidden layers"):
        make({"layers.0.0.weight": good["layers.0.0.weight"]}, features)
    with pytest.raises(CheckpointError, match="no state_dict"):
        make({"state_dict": {"a": 1}}, features)  # type: ignore[dict-item]
    other = subnetact.nas.AccuracyPredictor(lambda _: np.zeros(82), 128)
    with pytest.raises(SpecError, match="reads 128 features"):
        other(space.smallest())


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3"])
def test_latencies_that_follow_a_law_are_predicted(family: str) -> None:
    supernet = small_supernet(family)
    costs = subnetact.costs.CostModel(supernet, torch.empty(1, 3, 64, 64))

    def law(spec: SubnetSpec) -> float:
        cost = costs(spec)
        return 0.3 + cost.macs / 2e7 + cost.activation_bytes / 1e6

    rng = random.Random(1)
    specs = list({supernet.space.sample(rng) for _ in range(60)})
    measured = [law(spec) for spec in specs]
    predictor = subnetact.nas.LatencyPredictor.fit(costs, specs, measured, batch_size=4)
    assert predictor.batch_size == 4
    assert predictor.error.mean_percent < 1.0
    assert predictor.error.rank_correlation > 0.99
    assert predictor.error.test == len(specs) > predictor.error.train > 0.7 * len(specs)
    fresh = [supernet.space.sample(rng) for _ in range(20)]
    np.testing.assert_allclose([predictor(spec) for spec in fresh], [law(spec) for spec in fresh], rtol=0.05)
    assert (predictor.weights >= 0).all()
    assert "rank correlation" in str(predictor.error)


def test_the_reported_error_is_that_of_unseen_subnets_and_fits_that_cannot_be_are_refused(
    digits: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    specs = list({digits.space.sample(rng) for _ in range(60)})
    costs = subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))
    fit = partial(subnetact.nas.LatencyPredictor.fit, costs)
    error = fit(specs, rng.uniform(1, 3, len(specs))).error
    assert error.mean_percent > 20
    assert error.rank_correlation < 0.5
    assert error.worst_percent > error.mean_percent
    specs = specs[:20]
    for given, ms, words in (
        (specs, [1.0], "one positive number"),
        (specs, [0.0] * 20, "one positive number"),
        (specs, [float("nan")] * 20, "one positive number"),
        (specs[:1] * 20, [1.0] * 20, "distinct"),
    ):
        with pytest.raises(SearchError, match=words):
            fit(given, ms)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match=r"subnetact\[nas\]"):
        fit(specs, [1.0] * len(specs))


def test_evaluation_counts_right_answers(digits: Supernet) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 1, 16, 16, generator=generator), torch.arange(n) % 10) for n in (20, 7)]
    specs = [digits.space.sample(seed) for seed in (1, 2)]
    found = evaluate(digits, specs, batches, calibration=[batches[0][0]])
    assert not len(digits.norms)
    calibrate(digits, specs[1:], [batches[0][0]])
    assert evaluate(digits, specs, batches, calibration=[batches[0][0]]) == found
    assert list(digits.norms) == specs[1:]
    calibrate(digits, specs[:1], [batches[0][0]])
    expected = []
    for spec in specs:
        network = digits.extract(spec)
        with torch.no_grad():
            right = sum(int((network(x).argmax(1) == y).sum()) for x, y in batches)
        expected.append(100 * right / 27)
    assert found == pytest.approx(expected)
    assert evaluate(digits, specs[1:], batches) == pytest.approx(expected[1:])
    for wrong in ([], [torch.zeros(2, 1, 16, 16)], [(torch.zeros(2, 1, 16, 16), torch.zeros(3))]):
        with pytest.raises(SpecError, match="batch"):
            evaluate(digits, specs, wrong)
