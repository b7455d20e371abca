"""Cells that cannot run, or were not measured, are chosen by no policy."""

import math
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import PolicyError, TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import Fixed, make_policy, policy_names
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import poisson

SIZES = [1, 2, 4, 8]


@st.composite
def tables_without_memory(draw):
    """The larger the subnet, the sooner its memory runs out; the smallest runs batch 1 at least."""
    rows = draw(st.integers(1, 4))
    fits = sorted(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), reverse=True)
    fits[0] = max(1, fits[0])
    cells = [
        [(1.0 + i) * (2.0 + 0.5 * size) if j < fits[i] else math.nan for j, size in enumerate(SIZES)]
        for i in range(rows)
    ]
    return LatencyTable([f"s{i}" for i in range(rows)], [60.0 + i for i in range(rows)], SIZES, cells)


@settings(max_examples=25)
@given(tables_without_memory(), st.floats(0.2, 3.0), st.sampled_from(["serve", "drop"]), st.booleans())
def test_no_policy_chooses_a_cell_without_memory(table, load, rule, floors):
    arrivals = poisson(1000 * load, 0.2, seed=1)
    runs = [not math.isnan(row[0]) for row in table.latency_ms]
    reached = [percent for percent, can in zip(table.accuracy, runs, strict=True) if can]
    demanded = [reached[i % len(reached)] for i in range(len(arrivals))] if floors else None
    for name in policy_names(table):
        fixed = int(name.partition(":")[2]) if name.startswith("fixed") else None
        if fixed is not None and (floors or not runs[fixed]):
            continue
        result = simulate(
            arrivals,
            table,
            make_policy(name, table, 36.0),
            slo_ms=36.0,
            workers=2,
            expired=rule,
            min_accuracy=demanded,
            decisions=True,
        )
        for decision in result.decisions:
            assert not math.isnan(table.latency_ms[decision.subnet, table.pad_index[decision.k]])


def test_subnets_that_cannot_run_at_all_are_refused_by_name(a40):
    cells = a40.latency_ms.copy()
    cells[5] = math.nan
    table = LatencyTable(a40.subnets, a40.accuracy, a40.batch_sizes, cells)
    with pytest.raises(PolicyError, match="runs at no batch size"):
        make_policy("fixed:5", table, 36.0)
    with pytest.raises(TraceError, match="above the best subnet"):
        simulate(
            np.zeros(2),
            table,
            make_policy("hullfit", table, 36.0),
            min_accuracy=[a40.accuracy[5]] * 2,
            slo_ms=36.0,
            workers=8,
            expired="serve",
        )


def test_a_hole_between_measured_sizes_is_padded_to_the_next(a40):
    cells = a40.latency_ms.copy()
    cells[:, 1] = math.nan  # batch size 2 of a merged table, say
    table = LatencyTable(a40.subnets, a40.accuracy, a40.batch_sizes, cells)
    arrivals = poisson(300, 0.5, seed=0)
    for name, rule in product(policy_names(table), ("serve", "drop")):
        result = simulate(
            arrivals, table, make_policy(name, table, 36.0), slo_ms=36.0, workers=2, expired=rule
        )
        assert result.attainment > 0.5, name
    assert np.isnan(table.latency_ms).sum() == len(table.subnets)


def test_a_policy_that_asks_for_the_impossible_is_told_so(a40):
    cells = a40.latency_ms.copy()
    cells[5, 2:] = math.nan
    table = LatencyTable(a40.subnets, a40.accuracy, a40.batch_sizes, cells)

    class Stubborn:
        def __init__(self):
            self.table = table

        def decide(self, context):
            return 5, 8

    with pytest.raises(PolicyError, match="cannot run there"):
        simulate(np.zeros(8), table, Stubborn(), slo_ms=36.0, workers=1, expired="serve")


def test_the_batcher_pads_to_a_size_that_was_measured():
    table = LatencyTable(["a"], [70.0], [1, 2, 4], [[1.0, math.nan, 2.0]])
    dispatcher = Dispatcher(Fixed(table, 0), [table], [0.0], 36.0, "serve", print)
    assert [dispatcher.padded(0, k) for k in (1, 2, 3, 4)] == [1, 4, 4, 4]
    assert [dispatcher.expected_ms(0, k) for k in (1, 2)] == [1.0, 2.0]


def test_what_floors_cost_is_kept_once_for_each_accuracy():
    table = LatencyTable(["a", "b"], [70.0, 80.0], [1], [[1.0], [2.0]])
    dispatcher = Dispatcher(Fixed(table, 0), [table], [0.0], 36.0, "serve", print)
    floors = [60.0 + i / 1000 for i in range(20_000)]
    tracemalloc.start()
    try:
        costs = {dispatcher.least_ms(floor) for floor in floors}
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert costs == {1.0, 2.0}
    assert kept_bytes < 50_000, "20,000 costs take megabytes"
