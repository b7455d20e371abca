"""The policies of papers in benchmarks/papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from papers.coarse import Coarse
from papers.flex import Flex
from papers.optimum import exact_optimum
from papers.veltair import CoRunner, Veltair, simulate_beside

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, ModelSwitching, Preemptive, SlackFit, bursty, poisson, simulate

Make = Callable[[LatencyTable], Any]


def test_coarse_pays_for_switching(a40: LatencyTable) -> None:
    trace = np.concatenate([poisson(1000, 3, seed=0), 3000 + poisson(11000, 3, seed=1)])
    coarse, switching = (
        simulate(trace, a40, policy, 36.0, 8, "serve")
        for policy in (Coarse(a40, 36.0), ModelSwitching(a40, 36.0))
    )
    assert coarse.attainment < switching.attainment


def test_co_runners_slow_what_runs_beside_them() -> None:
    tables = {n: LatencyTable(["only"], [80.0], [1], [[ms]]) for n, ms in ((0.0, 5.0), (1.0, 9.0))}
    trace, runners = [0.0, 100.0, 200.0], [CoRunner(90.0, 150.0, 1.0)]
    result = simulate_beside(runners, trace, tables, Fixed(tables[0.0], 0), 36.0, decisions=True)
    assert result.decisions is not None
    assert [d.finish_ms - d.t_ms for d in result.decisions] == pytest.approx([5.0, 9.0, 5.0])


def test_veltair_estimates_co_runners(a40: LatencyTable) -> None:
    base, tables = a40.latency_ms, {0.0: a40, 1.0: a40.scaled(1.5), 2.0: a40.scaled(2.0)}
    trace = bursty(1500, 3000, 2, 8, seed=0)
    runners = [CoRunner(2000.0, 6000.0, 2.0)]
    aware, blind = (
        simulate_beside(runners, trace, tables, policy, 36.0, 8)
        for policy in (
            Veltair(tables, lambda t: SlackFit(t, buckets=4, slo_ms=36.0)),
            SlackFit(a40, buckets=4, slo_ms=36.0),
        )
    )
    assert aware.attainment > blind.attainment
    policy = Veltair(tables, lambda t: SlackFit(t, slo_ms=36.0))
    for _ in range(40):
        policy.observe(0, 8, base[0, 3], 1.75 * base[0, 3])
    assert policy.estimated_co_runners == pytest.approx(1.5, abs=0.01)


def test_flex_preempts_for_a_batch_worth_more() -> None:
    table = LatencyTable(["only"], [80.0], [1, 8], [[10.0, 10.0]])
    trace, settings = [0.0, 2.0, 2.0, 2.0, 2.0], {"requests": True, "blocks": 10}
    slos = [30.0, 11.0, 11.0, 11.0, 11.0]
    kept = simulate(trace, table, Flex(table, 0), slos, 1, "serve", **settings)  # type: ignore[arg-type]
    assert kept.log is not None
    assert kept.log.finish_ms.tolist() == [20.0, 12.0, 12.0, 12.0, 12.0]
    patient = simulate(trace, table, Flex(table, 0), 30.0, 1, "serve", blocks=10)
    assert patient.preempted == 0


def test_flex_keeps_its_competitive_bound() -> None:
    """Shepherd proves that FLEX with factor 3.03 serves at least 1 / 12.62 of what any schedule can."""
    table = LatencyTable(["a"], [100.0], [1, 2, 4], [[5.0, 6.0, 8.0]])
    rng = np.random.default_rng(0)
    for _ in range(60):
        arrivals = np.sort(rng.uniform(0.0, 40.0, 9))
        slo = rng.uniform(5.0, 30.0, 9)
        best = exact_optimum(arrivals, table, slo) / 100.0
        found = simulate(arrivals, table, Flex(table, 0), slo, 1, "drop", blocks=10).met
        assert found >= best / 5.0


@pytest.mark.parametrize(
    "make",
    [
        lambda t: Coarse(t, delay_ms=-1.0, slo_ms=36.0),
        lambda t: Flex(t, factor=1.0),
        lambda t: Flex(t, subnet=17),
        lambda t: Preemptive(Flex(t)),
        lambda t: Veltair({0.0: t}, lambda t: SlackFit(t, slo_ms=36.0)),
    ],
)
def test_bad_settings_are_refused(a40: LatencyTable, make: Make) -> None:
    with pytest.raises(PolicyError):
        make(a40)
