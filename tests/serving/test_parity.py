"""The live batcher and the simulator drive the same scheduler: on one trace they do the same, run by run."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_runners import Sleeping
from virtual_time import VirtualTime

from subnetact.latency.table import LatencyTable
from subnetact.serving import Batcher, FairShares, Preemptive, SlackFit, make_policy, poisson, simulate

BLOCKS = 8
TABLE = LatencyTable(
    ["a", "b", "c"], [70.0, 75.0, 80.0], [1, 2, 4], [[2.0, 3.0, 4.0], [4.0, 6.0, 9.0], [8.0, 13.0, 20.0]]
)


@pytest.mark.parametrize("shares", [None, FairShares(burst_ms=5.0, weights={"a": 2.0})])
@pytest.mark.parametrize("expired", ["drop", "defer", "serve"])
@pytest.mark.parametrize("name", ["slackfit", "hullfit", "maxbatch", "preemptive"])
def test_the_simulator_does_what_the_live_batcher_does(name: str, expired: str, shares: Any) -> None:
    rng = np.random.default_rng(len(name))
    arrivals = poisson(420, 0.2, seed=2)
    arrivals = np.round(arrivals - arrivals[0], 3)
    count = len(arrivals)
    slo = rng.choice([15.0, 40.0, 90.0], count)
    floors, priority = rng.choice([0.0, 0.0, 75.0, 80.0], count), rng.choice([0, 0, 2], count)
    clients = rng.choice(["a", "b", "c"], count).tolist()

    def policy() -> Any:
        return Preemptive(SlackFit(TABLE, 40.0)) if name == "preemptive" else make_policy(name, TABLE, 40.0)

    asks: Any = {"min_accuracy": floors, "priority": priority, "clients": clients, "shares": shares}
    predicted = simulate(arrivals, TABLE, policy(), slo, 1, expired, blocks=BLOCKS, requests=True, **asks)
    engine = Sleeping(VirtualTime(), TABLE, blocks=BLOCKS)
    options: Any = {"slo_ms": float(np.median(slo)), "learn": False, "clock_ms": engine.time}
    with Batcher(engine, policy=policy(), expired=expired, shares=shares, **options) as batcher:
        engine.time.watch(batcher)
        engine.time.send(
            (at, partial(batcher.submit, i, given, min_accuracy=floor, priority=int(p), client=client))
            for i, (at, given, floor, p, client) in enumerate(
                zip(arrivals.tolist(), slo.tolist(), floors.tolist(), priority, clients, strict=True)
            )
        )
        stats = batcher.stats()
    log = predicted.log
    assert log is not None
    times = zip(log.start_ms, log.finish_ms, log.subnet, strict=True)
    expected = {i: facts for i, facts in enumerate(times) if facts[2] >= 0}
    ran = {x: (run.began_ms, run.ended_ms, run.subnet) for run in engine.finished for x in run.inputs}
    assert set(ran) == set(expected)
    for i, seen in ran.items():
        assert seen == pytest.approx(expected[i], abs=1e-6)
    assert (stats.met, stats.late, stats.dropped) == (predicted.met, predicted.late, predicted.dropped)
    assert stats.preempted == predicted.preempted
    assert (name != "preemptive") or shares is not None or stats.preempted > 0
