"""Minimum accuracies come to the accuracies of subnets, once, and every policy plans for these."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fake_runners import FOREVER, Echo
from hypothesis import assume, given
from hypothesis import strategies as st

from subnetact.errors import InvalidRequest, PolicyError, TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving import (
    Batcher,
    CheapestFeasible,
    Fixed,
    HullFit,
    MaxAcc,
    MaxBatch,
    SlackFit,
    Tenant,
    TenantBatcher,
    poisson,
    simulate,
    superserve_a40,
)
from subnetact.serving.scheduling.checks import check_deadline
from subnetact.serving.scheduling.context import ArrivalMeter, Context
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request

TABLE = LatencyTable(["a", "b", "c"], [70.0, 75.0, 80.0], [1], [[1.0], [2.0], [math.nan]])


@st.composite
def tables(draw: Any) -> LatencyTable:
    rows = draw(st.integers(1, 7))
    cell = st.one_of(st.integers(10, 300), st.just(math.nan)) if draw(st.booleans()) else st.integers(10, 300)
    cells = draw(st.lists(st.lists(cell, min_size=3, max_size=3), min_size=rows, max_size=rows))
    accuracy = draw(st.lists(st.integers(70, 80), min_size=rows, max_size=rows))
    assume(not np.isnan(np.array(cells, dtype=float)).all())
    names = [f"s{i}" for i in range(rows)]
    return LatencyTable(names, [float(a) for a in accuracy], [1, 2, 4], np.array(cells) / 10.0)


def meeting(table: LatencyTable, floor: float) -> tuple[LatencyTable, list[int]]:
    """The rows of the subnets that meet a floor, and their numbers in the whole table."""
    rows = [i for i, percent in enumerate(table.accuracy) if percent >= floor]
    keys, accuracy = [table.subnets[i] for i in rows], [table.accuracy[i] for i in rows]
    return LatencyTable(keys, accuracy, table.batch_sizes, table.latency_ms[rows]), rows


def asked(policy: Any, slack_ms: float, queued: int, floor: float = 0.0) -> tuple[int, int]:
    context = Context(EDFQueue(), ArrivalMeter(), [0.0], 40.0)
    for _ in range(queued):
        context.queue.push(Request(Ask(slack_ms, floor), 0.0))
    context.queued, context.slack_ms, context.floor = queued, slack_ms, floor
    answer: tuple[int, int] = policy.decide(context)
    return answer


@given(table=tables(), asks=st.lists(st.integers(690, 810).map(lambda i: i / 10), min_size=1, max_size=9))
def test_a_floor_is_met_by_the_subnets_that_meet_the_minimum_accuracy(
    table: LatencyTable, asks: list[float]
) -> None:
    runs = (~np.isnan(table.latency_ms)).any(axis=1)
    running = [percent for percent, run in zip(table.accuracy, runs, strict=True) if run]
    floors = Floors(table)
    assert floors.best == max(running)
    for ask in asks:
        if ask > max(running):
            with pytest.raises(PolicyError, match="no subnet reaches"):
                floors(ask)
            continue
        floor = floors(ask)
        assert [percent >= floor for percent in running] == [percent >= ask for percent in running]
        assert floor in (0.0, *running)
        assert floor != min(running), "a floor that every subnet meets is none"
    met = np.array([ask for ask in asks if ask <= max(running)])
    assert floors.of_all(met).tolist() == [floors(ask) for ask in met]


@given(table=tables(), data=st.data())
def test_a_policy_decides_for_a_floor_as_for_a_table_of_the_subnets_that_meet_it(
    table: LatencyTable, data: Any
) -> None:
    floors = Floors(table)
    floor = data.draw(st.sampled_from(floors.accuracies))
    part, rows = meeting(table, floor)
    slack, queued = data.draw(st.floats(0.0, 45.0)), data.draw(st.integers(1, 6))
    made = [(policy(table), policy(part)) for policy in (MaxBatch, MaxAcc, CheapestFeasible)]
    if part.fastest_ms <= 40.0:
        made += [(SlackFit(table, 40.0, buckets), SlackFit(part, 40.0, buckets)) for buckets in (1, 3, 8)]
    for whole, alone in made:
        subnet, size = asked(whole, slack, queued, floor)
        expected, expected_size = asked(alone, slack, queued)
        assert (subnet, size) == (rows[expected], expected_size), type(whole).__name__


def test_requests_are_queued_with_floors_and_not_with_what_clients_wrote() -> None:
    class Asked(Fixed):
        floors: tuple[float, ...] = ()

        def decide(self, context: Context) -> tuple[int, int]:
            self.floors += (context.floor,)
            return super().decide(context)

    asks, floors = (0.0, 12.5, 70, 70.1, 75), (0.0, 0.0, 0.0, 75.0, 75.0)
    policy = Asked(TABLE, 1)
    simulate([10.0 * i for i in range(5)], TABLE, policy, 36.0, min_accuracy=asks)
    assert policy.floors == floors
    with pytest.raises(TraceError, match="above the best subnet"):
        simulate([0.0], TABLE, policy, 36.0, min_accuracy=76.0)
    policy = Asked(TABLE, 1)
    with Batcher(Echo(TABLE), policy=policy, slo_ms=FOREVER, learn=False) as batcher:
        for ask in asks:
            assert batcher.submit("x", min_accuracy=ask).result(20).met
        for beyond in (75.1, 80.0):
            with pytest.raises(InvalidRequest, match="above the best subnet"):
                batcher.submit("x", min_accuracy=beyond)
    assert policy.floors == floors
    with TenantBatcher([Tenant("t", Echo(TABLE), 36.0, TABLE)]) as tenants:
        assert tenants.submit("t", "x", 5000.0, min_accuracy=70.1).result(20).subnet == 1


def test_very_long_deadlines_count_as_the_longest() -> None:
    for deadline, meant in ((5, 5.0), (np.float32(2.5), 2.5), (1e308, 1e12)):
        assert check_deadline(deadline) == meant


def test_requests_with_floors_wait_for_others_of_their_kind_while_time_is_short() -> None:
    table = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [4.0, 16.0]])
    policy, meter = HullFit(table, 60.0), ArrivalMeter()
    for floor, made in ((80.0, policy), (75.0, policy.retabled(table.scaled(2.0)))):
        assert asked(made, 50.0, 4, floor)[0] == 1
    meter.extend([i * 0.7 for i in range(1000)])  # one request per 0.7 ms: too many for "b"
    answers = []
    for slack in (50.0, 6.0):
        context = Context(EDFQueue(), meter, [700.0], 60.0)
        context.now_ms = 700.0
        for i in range(8):
            context.queue.push(Request(Ask(slack + 10 * i, 80.0 if i == 0 else 0.0), 700.0))
        context.queued, context.slack_ms, context.floor = 8, slack, 80.0
        answers.append(policy.decide(context)[0])
    assert answers == [0, 1]


@pytest.mark.parametrize("expired", ["serve", "drop"])
def test_floors_cost_few_deadlines_close_to_saturation(expired: str) -> None:
    table = superserve_a40()
    times = poisson(12_000.0, 3.0, seed=3)
    draw = np.random.default_rng(5).random(len(times))
    floors = np.where(draw < 0.1, 79.44, np.where(draw < 0.3, 78.25, 0.0))
    found = simulate(times, table, HullFit(table, 36.0), 36.0, 8, expired, min_accuracy=floors)
    assert found.attainment > 0.99
