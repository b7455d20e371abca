"""Ranks and crowding distances of NSGA-II."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from subnetact.latency.pareto import non_dominated
from subnetact.nas.nsga2 import crowding_distance, non_dominated_ranks

COSTS = st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=30)


@given(rows=COSTS)
def test_ranks_peel_fronts(rows: list[list[int]]) -> None:
    costs = np.array(rows, dtype=np.float64)
    rank = non_dominated_ranks(costs)

    def dominates(a: list[int], b: list[int]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    for i, row in enumerate(rows):
        above = [rank[j] for j, other in enumerate(rows) if dominates(other, row)]
        assert rank[i] == (max(above) + 1 if above else 0)
    front = non_dominated(costs)
    assert {tuple(rows[i]) for i in front} == {
        tuple(r) for r, level in zip(rows, rank, strict=True) if level == 0
    }
    assert len({tuple(rows[i]) for i in front}) == len(front)
    distance = crowding_distance(costs, rank)
    assert (distance >= 0).all()
    for column in costs[rank == 0].T:
        assert any(np.isinf(distance[rank == 0][column == column.min()]))
