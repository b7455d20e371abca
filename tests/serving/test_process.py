"""A batcher belongs to its process, ends whatever its policy does, and takes numbers of any kind."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from subnetact import Batcher, LatencyTable, SlackFit
from subnetact.errors import BatcherClosed, InvalidRequest, PolicyError, QueueFull
from subnetact.serving import Fixed
from subnetact.serving.scheduling.context import Context

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 2, 4], [[1.0, 1.5, 2.0], [3.0, 4.0, 6.0]])


class Echo:
    """Answers every input with itself."""

    keys = TABLE.subnets

    def check(self, x: Any) -> None:
        """Accept everything."""

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        return list(inputs)


class NeverDecides:
    """A policy that waits for more requests, whatever happens."""

    table = TABLE

    def decide(self, context: Context) -> None:
        return None


@pytest.mark.parametrize("expired", ["serve", "drop", "defer"])
def test_close_ends_although_the_policy_never_decides(expired: str) -> None:
    batcher = Batcher(Echo(), policy=NeverDecides(), slo_ms=1e6, expired=expired)
    futures = [batcher.submit(x, deadline_ms=1e6) for x in range(9)]
    closing = threading.Thread(target=batcher.close, daemon=True)
    closing.start()
    closing.join(timeout=60.0)
    assert not closing.is_alive()
    assert [future.result(0).output for future in futures] == list(range(9))
    assert {future.result(0).subnet for future in futures} == {0}


@pytest.mark.parametrize("number", [np.float16(40.0), np.float32(40.0), np.int64(40), 40, 40.0])
def test_a_deadline_of_any_number_type_is_kept_exactly(number: Any) -> None:
    """On a clock that has run for days, 16-bit deadlines would be infinite and 32-bit ones 24 ms later."""
    clock = [1e9]

    class Slow(Echo):
        def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
            clock[0] += 50.0
            return list(inputs)

    with Batcher(Slow(), policy=Fixed(TABLE, 0), slo_ms=20.0, clock_ms=lambda: clock[0]) as batcher:
        answer = batcher.submit(0, deadline_ms=number).result(60.0)
    assert answer.met is False


def test_sums_of_times_stay_finite() -> None:
    with Batcher(Echo(), policy=Fixed(TABLE, 0), slo_ms=20.0) as batcher:
        for _ in range(3):
            batcher.submit(0, deadline_ms=1e308).result(60.0)
        assert all(math.isfinite(h.total) for h in batcher.stats().histograms.values())
        with pytest.raises(InvalidRequest, match="finite"):
            batcher.submit(0, deadline_ms=math.inf)


@pytest.mark.parametrize("slo_ms", [0.0, -1.0, math.nan, math.inf, "20", None, [1.0]])
def test_a_usual_time_that_is_no_time_is_refused(slo_ms: Any) -> None:
    with pytest.raises(PolicyError, match="slo_ms"):
        Batcher(Echo(), policy=NeverDecides(), slo_ms=slo_ms)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_the_batcher_stayed_behind() -> None:
    with Batcher(Echo(), policy=SlackFit(TABLE, slo_ms=20.0)) as batcher:
        with batcher._driver.lock:  # the child inherits a lock that nobody there releases
            child = os.fork()
            if child == 0:
                told = 0
                try:
                    for use in (
                        lambda: batcher.submit(0, deadline_ms=20.0),
                        lambda: batcher.submit(0, deadline_ms=-1.0),
                        batcher.stats,
                        batcher.replan,
                        batcher.__enter__,
                    ):
                        try:
                            use()
                        except BatcherClosed as error:
                            told += "forked" in str(error)
                    told += not batcher.drain(timeout=1.0)
                    batcher.close()
                finally:
                    os._exit(told)
        end = time.monotonic() + 60.0
        done, status = os.waitpid(child, os.WNOHANG)
        while not done and time.monotonic() < end:
            time.sleep(0.01)
            done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done, "the child hangs"
        assert os.waitstatus_to_exitcode(status) == 6
        assert batcher.submit(0, deadline_ms=1e7).result(60.0).output == 0


def test_requests_from_many_threads_each_get_one_outcome_while_the_batcher_closes() -> None:
    """Clients add requests without the lock; those that come too late are refused, and none is forgotten."""

    def client(start: int, batcher: Batcher, answered: list[int], expected: list[int]) -> None:
        futures = []
        for x in range(start, start + 400):
            try:
                futures.append((x, batcher.submit(x, deadline_ms=1e7)))
            except QueueFull:
                continue
            except BatcherClosed:
                break
        answered.extend(x for x, future in futures if future.result(60.0).output == x)
        expected.extend(x for x, _ in futures)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20):
            batcher = Batcher(Echo(), policy=SlackFit(TABLE, slo_ms=1e7), max_queue=1000)
            answered: list[int] = []
            expected: list[int] = []

            threads = [
                threading.Thread(target=client, args=(1000 * t, batcher, answered, expected))
                for t in range(4)
            ]
            for thread in threads:
                thread.start()
            while batcher.stats().submitted < 100:
                time.sleep(0.0)
            batcher.close()
            for thread in threads:
                thread.join(timeout=60.0)
                assert not thread.is_alive()
            assert sorted(answered) == sorted(expected)
            stats = batcher.stats()
            assert stats.submitted == len(answered) == stats.met + stats.late
    finally:
        sys.setswitchinterval(switch)
