import numpy as np
from papers.tuner import Tuner

from subnetact.serving.policies import HullFit
from subnetact.serving.simulation.simulator import WorkerEvent, simulate
from subnetact.serving.simulation.traces import poisson


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
