"""Latencies of steps: rounded up, interpolated, kept in bundles; what cannot be a table is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from generation_tables import KEYS, step_table
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import TableError
from subnetact.generation import StepTable
from subnetact.latency.table import LatencyTable


def test_a_step_takes_its_sequences_and_its_prompts() -> None:
    table = step_table()
    assert table.latencies_ms(1, 10)[0] == pytest.approx(1.1)
    assert table.latencies_ms(3, 10)[0] == pytest.approx(1.4), "as long as four sequences"
    assert table.latencies_ms(1, 33)[0] == pytest.approx(1.65), "the next context"
    assert table.latencies_ms(1, 5000)[0] == pytest.approx(1.65), "the largest context"
    assert table.latencies_ms(32, 10)[0] == pytest.approx(2 * 2.6), "in proportion to the largest number"
    assert table.latencies_ms(0, 1, 8)[1] == pytest.approx(1.3 * 1.4)
    assert table.latencies_ms(0, 1, 36)[1] == pytest.approx(1.3 * (1 + 0.05 * 36)), "between two prompts"
    assert table.latencies_ms(0, 1, 128)[1] == pytest.approx(2 * 1.3 * 4.2)
    both = table.latencies_ms(4, 20)[1] + table.latencies_ms(0, 1, 8)[1]
    assert table.latencies_ms(4, 20, 8)[1] == pytest.approx(both - 1.3), "the weights are read once"
    one = StepTable(table.decode, table.prefill.select(batch_sizes=[8]))
    assert one.latencies_ms(4, 20, 8)[1] == pytest.approx(both), "nothing tells what is read once"
    assert table.latencies_ms(0, 20)[1] == 0.0


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 300), st.integers(0, 300), st.integers(0, 2))
def test_more_work_never_takes_less_time(few: int, more: int, context: int, prompt: int, subnet: int) -> None:
    table = step_table()
    low, high = sorted((few, more))
    for less, work in (
        ((low, context, prompt), (high, context, prompt)),
        ((low, context, low), (low, context, high)),
    ):
        assert table.latencies_ms(*less)[subnet] <= table.latencies_ms(*work)[subnet] + 1e-9


def test_a_table_comes_back_from_the_tables_of_an_engine() -> None:
    table = step_table()
    names = ["scheduler", "prefill", "decode-128", "decode-32"]  # in any order
    tables = {name: {"scheduler": table.prefill, **table.to_tables()}[name] for name in names}
    found = StepTable.from_tables(tables)
    assert (list(found.decode.items()), found.prefill) == (list(table.decode.items()), table.prefill)
    assert found.with_accuracy([1.5, 2.5, 3.5]).accuracy == (1.5, 2.5, 3.5)
    for lacking in ({}, {"scheduler": table.prefill}, {"prefill": table.prefill}):
        with pytest.raises(TableError, match="no step table"):
            StepTable.from_tables(lacking)


def _other(**changes: Any) -> LatencyTable:
    facts = {"keys": KEYS, "sizes": [1, 4, 16], "first": 1.0} | changes
    rows = [[1.0 + i for i in range(len(facts["sizes"]))] for _ in facts["keys"]]
    rows[0][0] = facts["first"]
    return LatencyTable(facts["keys"], [50.0] * len(facts["keys"]), facts["sizes"], rows)


@pytest.mark.parametrize(
    ("decode", "prefill", "words"),
    [
        ({}, _other(), "decode: empty"),
        ([_other()], _other(), "mapping"),
        ({0: _other()}, _other(), "0 is not a positive integer"),
        ({True: _other()}, _other(), "True is not a positive integer"),
        ({16: _other(), 8: _other()}, _other(), "8 does not ascend from 16"),
        ({8: "steps.json"}, _other(), "got str"),
        ({8: _other(), 16: _other(keys=["a", "b", "c"])}, _other(), "different subnets"),
        ({8: _other()}, _other(keys=["a", "b", "c"]), "different subnets"),
        ({8: _other(), 16: _other(sizes=[1, 2])}, _other(), "different numbers"),
        ({8: _other(first=math.nan)}, _other(), "not measured"),
    ],
)
def test_what_is_no_step_table_is_refused(decode: Any, prefill: Any, words: str) -> None:
    with pytest.raises(TableError, match=words):
        StepTable(decode, prefill)
