import numpy as np
import pytest
from papers.tuner import Tuner

from subnetact.errors import PolicyError, TraceError
from subnetact.serving.planning.planner import plan
from subnetact.serving.policies import Fixed, HullFit
from subnetact.serving.simulation.simulator import WorkerEvent, simulate
from subnetact.serving.simulation.traces import bursty, poisson


def test_the_plan_is_the_least_that_meets_the_target(a40):
    trace = bursty(1500, 4900, 4, 4, seed=3)
    found = plan(trace, a40, 36.0, 0.999, candidates={"hullfit": lambda t: HullFit(t, 36.0)}, expired="serve")
    slower = a40.scaled(1.1)
    assert (
        simulate(
            trace, slower, HullFit(slower, slo_ms=36.0), workers=found.workers, slo_ms=36.0, expired="serve"
        ).attainment
        >= 0.999
    )
    assert (
        simulate(
            trace,
            slower,
            HullFit(slower, slo_ms=36.0),
            workers=found.workers - 1,
            slo_ms=36.0,
            expired="serve",
        ).attainment
        < 0.999
    )
    assert found.tried["hullfit", found.workers] == found.result.attainment


def test_the_plan_prefers_fewer_workers_then_accuracy(a40):
    trace = poisson(1500, 3, seed=0)
    found = plan(
        trace,
        a40,
        candidates={
            "large": lambda t: Fixed(t, 5),
            "small": lambda t: Fixed(t, 0),
            "better": lambda t: Fixed(t, 1),
        },
        slo_ms=36.0,
        expired="serve",
    )
    assert (found.policy, found.workers) == ("better", 1)
    accurate = plan(
        trace,
        a40,
        min_mean_accuracy=79.0,
        candidates={"s": lambda t: Fixed(t, 0), "hull": lambda t: HullFit(t, 36.0)},
        slo_ms=36.0,
        expired="serve",
    )
    assert accurate.policy == "hull"
    assert accurate.result.mean_accuracy >= 79.0


def test_an_unreachable_target_is_an_error(a40):
    with pytest.raises(PolicyError, match="not reached with 2 workers"):
        plan(
            poisson(20_000, 1, seed=0),
            a40,
            most_workers=2,
            candidates={"hull": lambda t: HullFit(t, 36.0)},
            slo_ms=36.0,
            expired="serve",
        )
    with pytest.raises(PolicyError, match="attainment"):
        plan([0.0], a40, attainment=1.5, slo_ms=36.0, expired="serve")
    with pytest.raises(TraceError):
        plan([], a40, slo_ms=36.0, expired="serve")


def test_the_tuner_adds_at_once_and_removes_after_its_patience(a40):
    base = poisson(2000, 10, seed=0)
    tuner = Tuner(base, 2, a40, longest_ms=10_000.0, slo_ms=36.0)
    now, history = 0.0, []
    rng = np.random.default_rng(1)
    for second in range(60):
        rate = 9000 if 10 <= second < 15 else 1000 if second < 40 else 100
        for _ in range(10):
            times = np.sort(now + rng.random(rng.poisson(rate / 10)) * 100.0)
            now += 100.0
            history.append((now, tuner.step(now, times.tolist())))
    calm = [workers for t, workers in history if t <= 10_000]
    assert set(calm) == {2}
    assert dict(history)[10_500.0] >= 6
    busy = max(workers for _, workers in history)
    assert busy <= 12
    until = max(t for t, workers in history if workers == busy)
    assert 15_000 <= until - 15_000.0 <= 17_000
    assert history[-1][1] == 1


def test_tuned_workers_save_an_unplanned_surge(a40):
    surge = np.concatenate([poisson(2000, 4, seed=1), 4000 + poisson(9000, 4, seed=2)])
    planned = poisson(2000, 10, seed=3)
    tuner, running, seen = Tuner(planned, 1, a40, most_workers=12, slo_ms=36.0), 1, 0
    events = [WorkerEvent(float(surge[0]), worker, False) for worker in range(1, 12)]
    for now in np.arange(surge[0] + 100.0, surge[-1] + 100.0, 100.0).tolist():
        upto = int(np.searchsorted(surge, now, side="right"))
        wanted = tuner.step(now, surge[seen:upto].tolist())
        events += [WorkerEvent(now, worker, True) for worker in range(running, wanted)]
        events += [WorkerEvent(now, worker, False) for worker in range(wanted, running)]
        running, seen = wanted, upto
    tuned = simulate(
        surge, a40, HullFit(a40, slo_ms=36.0), workers=12, events=events, slo_ms=36.0, expired="serve"
    )
    fixed = simulate(surge, a40, HullFit(a40, slo_ms=36.0), workers=1, slo_ms=36.0, expired="serve")
    assert tuned.attainment > 0.95
    assert fixed.attainment < 0.5
