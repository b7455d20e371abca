"""Policies that give invalid answers or raise: every request still ends, and the batcher goes on."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from subnetact.errors import BatcherClosed, BatchFailed, PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies import Fixed, SlackFit
from subnetact.serving.scheduling.context import Context
from subnetact.serving.simulation.simulator import simulate

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 2], [[1.0, 2.0], [2.0, math.nan]])


class Echo:
    keys = TABLE.subnets

    def check(self, x: Any) -> None:
        pass

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        return list(inputs)


class Answers:
    """A policy that gives wrong answers first, then right ones."""

    def __init__(self, *wrong: Any) -> None:
        self.table = TABLE
        self.wrong = list(wrong)

    def decide(self, context: Context) -> Any:
        return self.wrong.pop(0) if self.wrong else (0, 1)


@pytest.mark.parametrize("wrong", [(0.0, 1.0), 0, ("a", 1), (0, 1, 2), (9, 1), (0, 99)])
def test_a_wrong_answer_fails_its_requests_only(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="Answers answered"):
        simulate([0.0], TABLE, Answers(wrong), slo_ms=36.0, workers=1, expired="serve")
    with Batcher(Echo(), policy=Answers(wrong), slo_ms=36.0) as batcher:
        with pytest.raises(BatchFailed, match="Answers answered"):
            batcher.submit("x", deadline_ms=1e7).result(timeout=60)
        assert batcher.submit("y", deadline_ms=1e7).result(timeout=60).output == "y"


def test_an_answer_that_cannot_run_fails_its_requests_only() -> None:
    began, go = threading.Event(), threading.Event()

    class Held(Echo):
        def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
            began.set()
            assert go.wait(60)
            return list(inputs)

    with Batcher(Held(), policy=Answers((0, 1), (1, 2)), slo_ms=36.0, max_queue=10) as batcher:
        held = batcher.submit("held", deadline_ms=1e7)
        assert began.wait(60)
        queued = [batcher.submit(i, deadline_ms=1e7) for i in range(6)]
        go.set()
        assert held.result(timeout=60).output == "held"
        errors = [future.exception(timeout=60) for future in queued]
        assert any(isinstance(error, BatchFailed) for error in errors), "two cannot run on it"
        assert all(error is None or isinstance(error, BatchFailed) for error in errors)
        assert batcher.submit("y", deadline_ms=1e7).result(timeout=60).output == "y"


def test_numpy_integers_are_answers() -> None:
    with Batcher(Echo(), policy=Answers((np.int64(1), np.int32(1))), slo_ms=36.0) as batcher:
        assert batcher.submit("x", deadline_ms=1e7).result(timeout=60).subnet == 1


def test_a_policy_that_cannot_observe_harms_nobody() -> None:
    class Blind(Answers):
        def observe(self, *_: float) -> None:
            raise RuntimeError("no eyes")

    with Batcher(Echo(), policy=Blind(), slo_ms=36.0) as batcher:
        for i in range(3):
            assert batcher.submit(i, deadline_ms=1e7).result(timeout=60).output == i
        assert batcher.stats().met == 3


@pytest.mark.parametrize(
    "policy", ["slackfit", SlackFit, 3, type("Bare", (), {"decide": lambda self, c: (0, 1)})()]
)
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(PolicyError, match="policy: "):
        Batcher(Echo(), policy=policy, slo_ms=36.0)
    with pytest.raises(PolicyError, match="policy: "):
        simulate([0.0], TABLE, policy, slo_ms=36.0, workers=8, expired="serve")


def test_a_closed_batcher_cannot_be_entered_again() -> None:
    with Batcher(Echo(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        pass
    with pytest.raises(BatcherClosed):
        batcher.__enter__()
