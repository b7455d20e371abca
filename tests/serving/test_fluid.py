"""The fluid bound: no policy answers more accurately."""

import numpy as np
import pytest

from subnetact.serving import make_policy
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import bursty, poisson


def test_the_fluid_bound_of_a_steady_load_is_the_hull_there(a40):
    tau0 = 6.26507 / 16
    spaced = np.arange(0, 20_000, tau0 / 8)
    assert fluid_bound(spaced, a40, slo_ms=36.0, workers=8) == pytest.approx(73.822, abs=0.05)
    overload = np.arange(0, 20_000, tau0 / 16)
    assert fluid_bound(overload, a40, slo_ms=36.0, workers=8) == pytest.approx(73.822 / 2, rel=0.01)
    assert fluid_bound(np.arange(0, 2000, 10.0), a40, slo_ms=36.0, workers=8) == pytest.approx(80.158)


def test_no_policy_exceeds_the_fluid_bound(a40):
    for trace in (bursty(3000, 9800, 8, 1, seed=0), poisson(21_000, 0.5, seed=1)):
        bound = fluid_bound(trace, a40, slo_ms=36.0, workers=8)
        assert bound <= fluid_bound(trace, a40, step_ms=7.0, slo_ms=36.0, workers=8) + 1e-9
        for name in ("hullfit", "slackfit:4", "maxbatch", "fixed:0"):
            for rule in ("serve", "drop"):
                result = simulate(trace, a40, make_policy(name, a40, 36.0), 36.0, 8, rule)
                assert result.effective_accuracy <= bound + 1e-9
