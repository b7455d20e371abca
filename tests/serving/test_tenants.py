"""Tenants: shares of the workers' time, floods, planning, and workers that move."""

from __future__ import annotations

import contextlib
import math
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_runners import FOREVER, Echo, Sleeping
from virtual_time import VirtualTime

from subnetact.errors import BatcherClosed, DeadlinePassed, InvalidRequest, PolicyError, QueueFull
from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, Preemptive, Tenant, TenantBatcher
from subnetact.serving.live.turns import Turn, Turns

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[4.0, 8.0], [8.0, 16.0]])
OTHER = LatencyTable(["x"], [90.0], [1, 2], [[5.0, 8.0]])


def tenants(time: VirtualTime | None = None, **options: Any) -> list[Tenant]:
    """Two tenants whose runners take no time, or what their tables say of `time`."""
    options = {"learn": False, **options}
    if time is not None:
        options["clock_ms"] = time
    return [
        Tenant(name, Sleeping(time, table) if time else Echo(table), 80.0, table, options=dict(options))
        for name, table in (("first", TABLE), ("second", OTHER))
    ]


def opened(time: VirtualTime, several: list[Tenant], workers: int = 1) -> TenantBatcher:
    batcher: TenantBatcher = time.watch(TenantBatcher(several, workers))
    return batcher


# -- turns -----------------------------------------------------------------------------------------------


def test_turns_go_to_whoever_used_the_least_of_its_share_and_nobody_saves_up_a_claim() -> None:
    turns, now = Turns({"a": 3.0, "b": 1.0, "late": 1.0}), 0.0
    wanted = {name: Turn(0, name) for name in ("a", "b", "late")}
    for wanting, shares in (("ab", {"a": 90, "b": 30}), (("b", "late"), {"b": 60, "late": 60})):
        got = []
        for _ in range(120):
            for name in wanting:
                turns.want(wanted[name])
            (turn,) = (wanted[name] for name in wanting if turns.begin(wanted[name], now))
            got.append(turn.name)
            now += 2.0
            with turns.lock:
                turns.end(turn, now)
                turns.end(turn, now + 100.0)  # a second end changes nothing
        assert {name: got.count(name) for name in wanting} == pytest.approx(shares, abs=1)
    assert sum(turns.used_ms.values()) == now


# -- live ------------------------------------------------------------------------------------------------


def test_every_tenant_has_its_own_queue_limits_and_figures() -> None:
    time, flood = VirtualTime(), list[Any]()

    def submit_many() -> None:
        for _ in range(200):
            flood.append(batcher.submit("first", "x", 5000.0))

    with opened(time, tenants(time, max_queue=3)) as batcher:
        first, second = batcher.submit("first", "x", 500.0), batcher.submit("second", "y", 500.0)
        time.run()
        assert (first.result(0).output, second.result(0).accuracy) == ("x", 90.0)
        with pytest.raises(PolicyError, match="'third' is none"):
            batcher.submit("third", "x", 500.0)
        with pytest.raises(InvalidRequest):
            batcher.submit("first", "refused", 500.0)
        with pytest.raises(QueueFull):
            submit_many()
        other = batcher.submit("second", "y", 500.0)  # its own limit is not reached
        time.run()
        assert all(future.done() for future in [*flood, other])
        stats = batcher.stats()
        assert (stats["first"].batcher.full, stats["second"].batcher.met) == (1, 2)
        assert stats["first"].used_ms > 0
        assert 'subnetact_requests_total{outcome="met",tenant="second"} 2.0' in batcher.prometheus()
        assert set(batcher.batchers) == {"first", "second"}


@pytest.mark.parametrize("urgent_first", [False, True])
def test_a_batch_that_hangs_after_an_urgent_one_releases_the_turn(urgent_first: bool, wait_for: Any) -> None:
    time, hung = VirtualTime(), []

    def hang(position: int) -> None:
        if position == 8 and not hung:
            hung.append(position)
            time.sleep(math.inf)

    policy = Preemptive(Fixed(TABLE, 0), block_ms=0.0)
    options = {"learn": False, "clock_ms": time, "watchdog_ms": 600.0}
    slow = Tenant("slow", Sleeping(time, TABLE, scale=50.0), 500.0, policy=policy, options=options)
    with opened(time, [slow, tenants(time)[1]]) as batcher:
        long = batcher.submit("slow", hang, FOREVER)
        time.run(25.0)
        urgent = [batcher.submit("slow", lambda _: None, 100.0)] if urgent_first else []
        time.run(600.0)
        assert hung
        assert batcher.stats()["slow"].batcher.preempted == urgent_first
        waiting = batcher.submit("second", "y", FOREVER)
        time.run(1000.0)  # more than the watchdog gives the batch
        wait_for(lambda: batcher.stats()["slow"].batcher.hung == 1)
        wait_for(lambda: batcher.stats()["slow"].batcher.revived == 1)
        time.run()
        assert waiting.result(60).output == "y"
        assert long.exception(60) is None
        assert all(future.done() for future in urgent)
        time.wake_all()


def test_closing_in_a_callback_does_not_wait_for_the_other_tenants(wait_for: Any) -> None:
    """Their workers wait for the turn of the very thread that runs the callback."""
    before = set(threading.enumerate())
    began, go, closed = threading.Event(), threading.Event(), threading.Event()
    batcher = TenantBatcher(tenants())
    held = batcher.submit("first", lambda: (began.set(), go.wait(60)), FOREVER)
    held.add_done_callback(lambda _: (batcher.close(), closed.set()))
    assert began.wait(60)
    waiting = batcher.submit("second", "y", FOREVER)
    go.set()
    assert closed.wait(60)
    assert waiting.result(60).output == "y"
    with pytest.raises(BatcherClosed):
        batcher.submit("second", "z", FOREVER)
    batcher.close()
    wait_for(lambda: set(threading.enumerate()) <= before, 60)


def test_a_tenant_that_hangs_while_it_closes_does_not_hold_the_worker(wait_for: Any) -> None:
    now, started, gate, before = [0.0], threading.Event(), threading.Event(), set(threading.enumerate())

    def hang() -> None:
        started.set()
        gate.wait(60)

    bad, good = tenants(clock_ms=lambda: now[0])
    bad.options["watchdog_ms"] = 100.0
    batcher = TenantBatcher([bad, good])
    held = batcher.submit("first", hang, 110.0)
    assert started.wait(60)
    waiting = batcher.submit("second", "x", FOREVER)
    now[0] = 120.0
    batcher.close()  # without the watchdog, only once the gate opens
    assert not gate.is_set()
    assert waiting.result(0).output == "x"
    assert isinstance(held.exception(0), DeadlinePassed)
    gate.set()
    wait_for(lambda: set(threading.enumerate()) <= before, 60)


def replay(
    time: VirtualTime, batcher: TenantBatcher, rates: dict[str, float], seconds: float, seed: int
) -> dict[str, Any]:
    """Send Poisson arrivals for every tenant; return the futures by tenant."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {name: [] for name in rates}

    def send(name: str) -> None:
        with contextlib.suppress(QueueFull):
            found[name].append(batcher.submit(name, "x", 80.0))

    times = {n: np.cumsum(rng.exponential(1.0 / r, int(r * seconds * 1.5))) for n, r in rates.items()}
    events = sorted((float(at), name) for name, all_of in times.items() for at in all_of if at < seconds)
    time.send((1e3 * at, partial(send, name)) for at, name in events)
    return found


def test_a_flood_for_one_tenant_does_not_break_the_other() -> None:
    """The first gets three times what a worker can do in full batches of its cheapest subnet."""
    time = VirtualTime()
    with opened(time, tenants(time)) as batcher:
        sent = replay(time, batcher, {"first": 1500.0, "second": 62.5}, 0.2, 0)
        assert all(future.done() for future in sent["first"] + sent["second"])
        stats = batcher.stats()
    assert stats["first"].batcher.attainment < 0.8  # there was a flood
    assert stats["second"].batcher.attainment >= 0.99


def test_a_tenant_whose_requests_another_worker_took_wants_no_turn_any_more() -> None:
    time = VirtualTime()
    with opened(time, tenants(time), workers=2) as batcher:
        many = [batcher.submit("second", "y", FOREVER) for _ in range(4)]
        time.run(1.0)
        one = batcher.submit("first", "x", FOREVER)
        time.run(1.0)
        many += [batcher.submit("second", "y", FOREVER) for _ in range(8)]
        time.run()
        assert one.result(0).met
        assert all(future.result(0).met for future in many)
