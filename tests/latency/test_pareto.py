"""Pareto dominance: fronts, hypervolume and even choices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnetact import pareto_front
from subnetact.errors import TableError
from subnetact.latency.pareto import hypervolume, non_dominated, spread


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_a_front_holds_exactly_the_items_that_nothing_dominates(points: list[tuple[int, int]]) -> None:
    front = pareto_front(points, cost=lambda r: r[0], gain=lambda r: r[1])

    def dominates(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a != b and a[0] <= b[0] and a[1] >= b[1]

    assert set(front) == {point for point in points if not any(dominates(other, point) for other in points)}
    assert front == sorted(set(front))


def test_a_front_refuses_nan() -> None:
    with pytest.raises(TableError, match="NaN"):
        pareto_front([1.0, float("nan")], cost=lambda r: r, gain=lambda r: r)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=12))
def test_hypervolume_counts_dominated_cells(rows: list[tuple[int, int, int]]) -> None:
    cells = {(x, y, z) for a, b, c in rows for x in range(a) for y in range(b, 4) for z in range(c, 4)}
    assert hypervolume(rows, (0, 4, 4)) == len(cells)
    flat = [(a, b) for a, b, _ in rows]
    assert hypervolume(flat, (0, 4)) == len({(x, y) for a, b in flat for x in range(a) for y in range(b, 4)})


def test_hypervolume_of_a_front_at_many_batch_sizes() -> None:
    """Accuracies up to that of a subnet cost at least its latencies, so that the volume is a sum of boxes."""
    load = np.linspace(0.01, 1.0, 100)
    latencies = np.outer(load, range(1, 6))
    boxes = np.diff(load, prepend=0.0) @ (6.0 - latencies).prod(1)
    assert hypervolume(np.column_stack([load, latencies]), (0.0, *[6.0] * 5)) == pytest.approx(boxes)


def test_the_default_reference_is_the_worst_of_the_points() -> None:
    points = [(70.0, 1.0), (75.0, 2.0), (60.0, 4.0)]
    assert hypervolume(points) == hypervolume(points, (60.0, 4.0)) == 40.0
    for wrong in ([], [70.0], [(70.0, float("nan"))], [(1, 2), (3,)], "x"):
        with pytest.raises(TableError, match="points"):
            hypervolume(wrong)
    for reference in ((60.0,), "ab"):
        with pytest.raises(TableError, match="reference"):
            hypervolume(points, reference)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40, unique=True), st.integers(2, 45))
def test_a_spread_is_distinct_ascending_and_has_the_ends(values: list[int], size: int) -> None:
    ordered = sorted(values)
    chosen = spread(ordered, size)
    assert len(chosen) == min(size, len(values))
    assert chosen == sorted(set(chosen))
    if len(values) > 1:
        assert (chosen[0], chosen[-1]) == (0, len(values) - 1)


def test_a_spread_is_even_where_it_can_be() -> None:
    assert spread(list(range(101)), 11) == list(range(0, 101, 10))
    crowded = [*range(50), *range(50, 1001, 50)]
    assert [crowded[i] for i in spread(crowded, 21)] == list(range(0, 1001, 50))


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 4)] * n), max_size=20)))
def test_non_dominated_points_are_the_first_of_each_kind(points: list[tuple[int, ...]]) -> None:
    costs = np.array(points, dtype=np.float64).reshape(len(points), -1 if points else 2)

    def dominated(point: tuple[int, ...]) -> bool:
        return any(
            other != point and all(x <= y for x, y in zip(other, point, strict=True)) for other in points
        )

    expected = {points.index(point) for point in points if not dominated(point)}
    found = non_dominated(costs)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [points[i] for i in found] == sorted(points[i] for i in found)
