"""The latency predictor: laws it must find, the error it reports, and fits it refuses."""

from __future__ import annotations

import random
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from small_families import small_supernet

import subnetact
import subnetact.costs
import subnetact.nas
from subnetact.errors import MissingExtra, SearchError
from subnetact.nas.prediction_error import require_scipy
from subnetact.supernet.supernet import Supernet


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3"])
def test_latencies_that_follow_a_law_are_predicted(family: str) -> None:
    supernet = small_supernet(family)
    costs = subnetact.costs.CostModel(supernet, torch.empty(1, 3, 64, 64))

    def law(spec: subnetact.SubnetSpec) -> float:
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


def test_the_reported_error_is_that_of_unseen_subnets(digits: Supernet) -> None:
    rng = np.random.default_rng(0)
    specs = list({digits.space.sample(rng) for _ in range(60)})
    noise = rng.uniform(1, 3, len(specs))
    costs = subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))
    error = subnetact.nas.LatencyPredictor.fit(costs, specs, noise).error
    assert error.mean_percent > 20
    assert error.rank_correlation < 0.5
    assert error.worst_percent > error.mean_percent


def test_really_measured_latencies_can_be_fitted(digits: Supernet) -> None:
    rng = random.Random(2)
    specs = list({digits.space.sample(rng) for _ in range(16)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", subnetact.errors.UncalibratedSubnetWarning)
        engine = subnetact.Engine(digits, specs, example=torch.zeros(1, 1, 16, 16), allow_uncalibrated=True)
        table = subnetact.profile_latency(engine, [1], warmup_ms=1, min_time_ms=5, windows=1, progress=False)
    costs = subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))
    predictor = subnetact.nas.LatencyPredictor.fit(costs, specs, table.latency_ms[:, 0])
    assert 0 <= predictor.error.mean_percent <= predictor.error.worst_percent
    assert "rank correlation" in str(predictor.error)
    assert all(predictor(spec) > 0 for spec in specs)


def test_fits_that_cannot_be_are_refused(digits: Supernet) -> None:
    specs = [digits.space.sample(seed) for seed in range(20)]
    fit = partial(
        subnetact.nas.LatencyPredictor.fit, subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))
    )
    for given, ms, words in (
        (specs, [1.0], "one positive number"),
        (specs, [0.0] * 20, "one positive number"),
        (specs, [float("nan")] * 20, "one positive number"),
        (specs[:1] * 20, [1.0] * 20, "distinct"),
    ):
        with pytest.raises(SearchError, match=words):
            fit(given, ms)


def test_without_scipy_the_error_names_the_extra(digits: Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [digits.space.sample(seed) for seed in range(20)]
    costs = subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match=r"subnetact\[nas\]"):
        subnetact.nas.LatencyPredictor.fit(costs, specs, [1.0] * len(specs))
    with pytest.raises(MissingExtra, match=r"subnetact\[nas\]"):
        require_scipy()
