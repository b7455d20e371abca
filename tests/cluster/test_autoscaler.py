"""How many replicas the exported loads ask for, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from subnetact import LatencyTable
from subnetact.cluster.autoscaler import Autoscaling, input_ms_at_floor, replicas_needed
from subnetact.errors import ServeError

TABLE = LatencyTable(["small", "large"], [70.0, 80.0], [1, 2, 4, 8], [[5, 6, 8, 12], [20, 30, 50, 90]])


@pytest.mark.parametrize(
    ("slo_ms", "floor", "found"),
    [
        (200.0, 60.0, 12 / 8),
        (200.0, 70.0, 12 / 8),
        (200.0, 75.0, 90 / 8),
        (150.0, 75.0, 50 / 4),  # a batch of 8 would take more than half of the SLO
    ],
)
def test_an_input_at_the_floor_takes_its_share_of_the_fastest_batch(slo_ms, floor, found):
    assert input_ms_at_floor(TABLE, slo_ms, floor) == found


@pytest.mark.parametrize(("slo_ms", "floor"), [(200.0, 80.5), (30.0, 75.0)])
def test_a_floor_that_no_batch_reaches_in_time_is_refused(slo_ms, floor):
    with pytest.raises(ServeError, match=r"the best has 80 %; give a lower floor"):
        input_ms_at_floor(TABLE, slo_ms, floor)


def test_no_replica_gets_more_than_seven_tenths_of_what_it_can_and_none_comes_and_goes():
    context, running = SimpleNamespace(target_num_replicas=2, aggregated_metrics=None), []
    assert replicas_needed(context) == (2, {})
    loads = {(): 2, (0.0, 0.0): 1, (0.2, 0.3): 1, (0.7, 0.7): 2, (0.7, 0.71): 3, (3.0, 0.0): 5}
    for load, found in loads.items():
        context.aggregated_metrics = {"load": dict(enumerate(load))}
        assert replicas_needed(context) == (found, {})
    context.target_num_replicas = 1
    for load in (0.68, 0.72, 0.66, 0.72, 0.55, 0.51, 0.49):
        context.aggregated_metrics = {"load": {"all": load}}
        context.target_num_replicas, _ = replicas_needed(context)
        running.append(context.target_num_replicas)
    assert running == [1, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("counts", [{"least": 0}, {"least": 4, "most": 2}])
def test_bounds_that_contradict_each_other_are_refused(counts):
    with pytest.raises(ServeError, match="autoscaling: from"):
        Autoscaling(accuracy_floor=70.0, **counts)
