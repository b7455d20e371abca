"""Inputs of several shapes: each is planned with the latencies of its shape, and batches hold one shape."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scheduled import Scheduled

from subnetact import Batcher, HullFit, LatencyTable, SlackFit
from subnetact.errors import DeadlinePassed, ProfileMismatch
from subnetact.serving import Fixed
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.request import Ask, Request

SIZES = (1, 2, 4)


def table(scale: float) -> LatencyTable:
    cells = scale * np.array([[1.0, 1.5, 2.0], [3.0, 4.0, 6.0], [5.5, 12.0, 18.0]])
    return LatencyTable(["a", "b", "c"], [70.0, 80.0, 90.0], SIZES, cells)


SHORT, LONG = table(1.0), table(10.0)


class Strings:
    """An engine of two shapes: strings of at most 4 and of at most 40 characters."""

    keys = SHORT.subnets
    samples = ("x" * 4, "x" * 40)

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()

    def check(self, x: Any) -> None:
        """Accept everything."""

    def shape_of(self, x: str) -> int:
        return int(len(x) > 4)

    def run(self, subnet: int, inputs: Sequence[str], batch_size: int) -> Sequence[Any]:
        self.gate.wait(20)
        self.batches.append(list(inputs))
        return list(inputs)


@pytest.mark.parametrize(("policy", "largest"), [(SlackFit, 4), (HullFit, 1)])
def test_batches_hold_one_shape(policy: Any, largest: int) -> None:
    engine = Strings()
    with Batcher(engine, policy=policy(LONG, slo_ms=1e5), table=[SHORT, LONG], learn=False) as batcher:
        first = batcher.submit("first", 1e5)
        inputs = ["ab", "a long string", "c", "another long one", "d", "the last long one"] * 3
        futures = [batcher.submit(x, 1e5) for x in inputs]
        engine.gate.set()
        assert [future.result(20).output for future in futures] == inputs
        assert first.result(20).output == "first"
    assert all(len({engine.shape_of(x) for x in batch}) == 1 for batch in engine.batches)
    assert max(map(len, engine.batches)) >= largest


def decide(shapes: dict[str, int], deadline_ms: float, policy: Any = SlackFit) -> tuple[int, int, list[str]]:
    """Return the subnet, the batch size and the requests of the first decision of an idle server."""
    dispatcher = Dispatcher(policy(LONG, slo_ms=500.0), [SHORT, LONG], [0.0], 500.0, "drop", print)
    for name, shape in shapes.items():
        request = Request(Ask(deadline_ms), 0.0, name)
        request.shape = shape
        dispatcher.queue.push(deadline_ms, request)
        dispatcher.arrivals.extend([0.0])
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    size = dispatcher.padded(batch.subnet, len(batch.part), batch.shape)
    return batch.subnet, size, [request.x for request in batch.part]


def test_the_table_of_the_shape_decides_how_accurate_an_answer_can_be() -> None:
    assert decide({"short": 0}, deadline_ms=20.0)[0] == 2
    assert decide({"long": 1}, deadline_ms=20.0)[0] == 0
    assert decide({"long": 1}, deadline_ms=200.0)[0] == 2


def test_fewer_requests_of_the_shape_than_planned_get_a_better_subnet() -> None:
    """SlackFit plans four long requests on subnet b in 60 ms; one alone can have subnet c in 55 ms."""
    shapes = {"long": 1, "s1": 0, "s2": 0, "s3": 0}
    subnet, size, items = decide(shapes, deadline_ms=100.0)
    assert (size, items) == (1, ["long"])
    assert subnet == 2


def opened(policy: Any, slo_ms: float) -> Scheduled:
    return Scheduled(policy, [SHORT, LONG], slo_ms=slo_ms, shape_of=Strings().shape_of)


def test_a_request_expires_by_the_latencies_of_its_shape() -> None:
    live = opened(Fixed(LONG, 0), slo_ms=50.0)
    live.admit("a long string", 5.0)
    short = live.admit("ab", 5.0)
    job = live.idle()
    assert live.ended() == {"a long string": DeadlinePassed}
    assert job is not None
    assert job.requests() == [short]
    assert job.expected_ms == 1.0


def test_what_one_shape_teaches_is_applied_to_the_others_in_proportion() -> None:
    live = opened(SlackFit(LONG, slo_ms=500.0), slo_ms=500.0)
    for _ in range(64):  # short requests take three times as long as their table says
        live.admit("ab", 400.0)
        job = live.idle()
        assert job is not None
        live.now += 3.0 * float(SHORT.latency_ms[job.subnet, 0])
        live.finish(job)
    assert live.learner.refresh(at_once=True)
    live.admit("a long string", 400.0)
    job = live.idle()
    assert job is not None
    assert job.expected_ms == pytest.approx(3.0 * float(LONG.latency_ms[job.subnet, 0]), rel=0.2)


def test_tables_must_fit_the_shapes() -> None:
    for tables in ([SHORT, LONG, LONG], [SHORT, table(10.0).with_accuracy([1.0, 2.0, 3.0])][:1] * 3):
        with pytest.raises(ProfileMismatch, match="2 input shapes"):
            Batcher(Strings(), policy=Fixed(LONG, 0), table=tables, slo_ms=50.0)
    other = LatencyTable(["a", "b", "z"], [70.0, 80.0, 90.0], SIZES, LONG.latency_ms)
    with pytest.raises(ProfileMismatch, match="other subnets"):
        Batcher(Strings(), policy=Fixed(LONG, 0), table=[other, LONG], slo_ms=50.0)
