"""Tenants: shares of the workers' time, floods, planning, and workers that move."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_runners import TABLE as COMMANDS
from process_runners import CommandRunner, command

from subnetact.errors import BatchFailed, InvalidRequest, PolicyError, ProfileMismatch, QueueFull
from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, Preemptive, Tenant, TenantBatcher, Veltair
from subnetact.serving.live.turns import WorkerTurns

TABLE = LatencyTable.from_arrays(["a", "b"], [70.0, 80.0], [1, 4], [[4.0, 8.0], [8.0, 16.0]])
OTHER = LatencyTable.from_arrays(["x"], [90.0], [1, 2], [[5.0, 8.0]])
FOREVER = 1e7


class StandIn:
    """A runner that sleeps for the table's latency; inputs that are functions are called."""

    def __init__(self, table: LatencyTable) -> None:
        self.keys = table.subnets
        self._table = table
        self.threads: set[str] = set()

    def check(self, x: Any) -> None:
        if x == "refused":
            raise InvalidRequest("input: refused")

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        self.threads.add(threading.current_thread().name)
        time.sleep(self._table.latency_ms[subnet][self._table.batch_sizes.index(batch_size)] / 1e3)
        return [x() if callable(x) else x for x in inputs]


def tenants(**options: Any) -> list[Tenant]:
    quiet = {"learn": False}
    return [
        Tenant("first", StandIn(TABLE), 80.0, TABLE, options=quiet, **options),
        Tenant("second", StandIn(OTHER), 80.0, OTHER, options=quiet, **options),
    ]


# -- turns -----------------------------------------------------------------------------------------------


def test_turns_go_to_whoever_used_the_least_of_its_share() -> None:
    turns = WorkerTurns({"a": 3.0, "b": 1.0})
    end = time.perf_counter() + 0.6

    def use(name: str) -> None:
        while time.perf_counter() < end:
            turn = turns.take(0, name)
            time.sleep(0.002)
            turns.end(turn)

    threads = [threading.Thread(target=use, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert turns.used_ms["a"] / turns.used_ms["b"] == pytest.approx(3.0, rel=0.35)


def test_nobody_saves_up_a_claim() -> None:
    turns = WorkerTurns({"a": 1.0, "b": 1.0})
    for _ in range(20):
        turn = turns.take(0, "a")
        time.sleep(0.002)
        turns.end(turn)
    first = turns.take(0, "b")  # b was away, and starts where a is now
    turns.end(first)
    assert turns._virtual["b"] > turns._virtual["a"] / 2
    turns.end(first)  # a second end changes nothing
    assert 0 not in turns._holders


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TenantBatcher([]), "at least one"),
        (lambda: TenantBatcher([tenants()[0]] * 2), "two are called 'first'"),
        (lambda: TenantBatcher(tenants(), workers=0), "workers"),
        (lambda: TenantBatcher(tenants(share=0.0)), "share 0.0"),
        (
            lambda: TenantBatcher(tenants(memory_mb=9.0), 2, groups=1, period_ms=50.0, memory_mb=10.0),
            "memory_mb",
        ),
        (lambda: Tenant("a", StandIn(TABLE), 20.0), "neither a table nor a policy"),
        (lambda: Tenant("a", StandIn(TABLE), -1.0, TABLE), "slo_ms"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    before = threading.active_count()
    with pytest.raises(PolicyError, match=message):
        make()
    assert threading.active_count() == before


def test_a_bad_table_closes_what_was_opened() -> None:
    before = threading.active_count()
    with pytest.raises(ProfileMismatch):
        TenantBatcher([tenants()[0], Tenant("odd", StandIn(OTHER), 80.0, TABLE)])
    assert threading.active_count() == before


# -- live ------------------------------------------------------------------------------------------------


def test_every_tenant_has_its_own_queue_limits_and_figures() -> None:
    with TenantBatcher(tenants(max_queue=3)) as batcher:
        assert batcher.submit("first", "x", 500.0).result(5).output == "x"
        assert batcher.submit("second", "y", 500.0).result(5).accuracy == 90.0
        with pytest.raises(PolicyError, match="'third' is none"):
            batcher.submit("third", "x", 500.0)
        with pytest.raises(InvalidRequest):
            batcher.submit("first", "refused", 500.0)
        flood: list[Any] = []

        def submit_many() -> None:
            for _ in range(200):
                flood.append(batcher.submit("first", "x", 5000.0))

        with pytest.raises(QueueFull):
            submit_many()
        assert batcher.submit("second", "y", 500.0).result(5).met  # its own limit is not reached
        for future in flood:
            future.result(5)
        stats = batcher.stats()
        assert stats["first"].batcher.full == 1
        assert stats["second"].batcher.met == 2
        assert stats["first"].used_ms > 0
        assert stats["first"].workers == (0,)
        assert "subnetact" in batcher.batcher("second").prometheus()


def test_a_failing_tenant_does_not_harm_another() -> None:
    def fail() -> None:
        raise SystemExit("killed")

    with TenantBatcher(tenants(), workers=1) as batcher:
        bad = [batcher.submit("first", fail, 3000.0) for _ in range(2)]
        good = [batcher.submit("second", "y", 3000.0) for _ in range(20)]
        assert [f.result(10).output for f in good] == ["y"] * 20
        assert all(isinstance(f.exception(10), BatchFailed) for f in bad)


class InBlocks(StandIn):
    """Runs batches in ten blocks of 20 ms; every input is told when a block has ended."""

    blocks = 10

    def start(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        run = InBlocks(self._table)
        run.inputs, run.position = list(inputs), 0
        return run

    def step(self, blocks: int = 1, go_on: Any = None) -> bool:
        while self.position < self.blocks:
            time.sleep(0.02 * blocks)
            self.position += blocks
            for x in self.inputs:
                x(self.position)
            if not go_on(self.position / self.blocks):
                break
        return self.position >= self.blocks

    def outputs(self) -> Any:
        return self.inputs


@pytest.mark.parametrize("deadline_ms", [100.0, 5000.0])
def test_a_batch_gives_way_to_urgent_requests_of_another_tenant(deadline_ms: float) -> None:
    """A batch of 200 ms is suspended after a block; it is not if the other tenant can wait for its end."""
    started, urgent = threading.Event(), deadline_ms < 200.0
    slow = Tenant(
        "slow",
        InBlocks(TABLE),
        500.0,
        policy=Preemptive(Fixed(TABLE, 0), block_ms=0.0),
        options={"learn": False},
    )
    for _ in range(3):  # another process may hold up one run
        with TenantBatcher([slow, tenants()[1]]) as batcher:
            long = batcher.submit("slow", lambda _: started.set(), FOREVER)
            assert started.wait(5)
            answer = batcher.submit("second", "x", deadline_ms).result(5)
            assert long.done() is not urgent
            long.result(5)
            stats = batcher.stats()
        assert stats["slow"].batcher.preempted == urgent
        assert stats["slow"].batcher.met == stats["second"].batcher.met == 1
        assert answer.met
        if not urgent or answer.waited_ms < 2 * 20.0:
            return
    pytest.fail(f"waited {answer.waited_ms} ms")


def test_a_suspended_batch_does_not_count_as_hanging() -> None:
    started = threading.Event()
    slow = Tenant(
        "slow",
        InBlocks(TABLE),
        500.0,
        policy=Preemptive(Fixed(TABLE, 0), block_ms=0.0),
        options={"learn": False, "watchdog_ms": 300.0},
    )
    other = Tenant("second", StandIn(OTHER), 80.0, OTHER, options={"learn": False, "watchdog_ms": 5000.0})
    with TenantBatcher([slow, other]) as batcher:
        long = batcher.submit("slow", lambda _: started.set(), FOREVER)
        assert started.wait(5)
        urgent = batcher.submit("second", lambda: time.sleep(0.4), 150.0)
        urgent.result(5)
        long.result(5)
        stats = batcher.stats()
    assert stats["slow"].batcher.preempted == 1
    assert stats["slow"].batcher.hung == 0


class Crowded(StandIn):
    """Takes as many times the table's latency as there are batches on the device; a batch is one block."""

    running = 0
    blocks = position = 1

    def start(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        run = Crowded(self._table)
        run.work = subnet, inputs, batch_size
        return run

    def step(self, blocks: int = 1, go_on: Any = None) -> bool:
        Crowded.running += 1
        for _ in range(Crowded.running):
            StandIn.run(self, *self.work)
        Crowded.running -= 1
        return True

    def outputs(self) -> Any:
        return self.work[1]


def test_blocks_are_long_alone_and_short_beside_another_tenant() -> None:
    """The table says how much co-runners slow a tenant down; what it measures tells how many there are."""
    latency = TABLE.latency_ms
    table = LatencyTable.from_arrays(
        TABLE.subnets, TABLE.accuracy, [1, 4], latency, co_runners=[0, 1], co_runner_ms=[latency, 2 * latency]
    )
    policies = [
        Preemptive(Veltair(table, lambda given: Fixed(given, 0)), block_ms=3.9) for _ in ("first", "second")
    ]
    given = [
        Tenant(name, Crowded(table), 80.0, policy=policy, options={"learn": False, "expired": "serve"})
        for name, policy in zip(("first", "second"), policies, strict=True)
    ]
    with TenantBatcher(given, workers=2) as batcher:
        batcher.batcher("first").assign([0])
        batcher.batcher("second").assign([1])
        for future in [batcher.submit("first", "x", FOREVER) for _ in range(60)]:
            future.result(5)
        assert policies[0].block_length(10, 8.0) >= 3
        futures = [batcher.submit(name, "x", FOREVER) for _ in range(120) for name in ("first", "second")]
        for future in futures[:160]:
            future.result(10)
        assert policies[0].block_length(10, 8.0) <= 2
        for future in futures:
            future.result(10)


def test_a_tenant_that_hangs_while_it_closes_does_not_hold_the_worker() -> None:
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(10)

    bad, good = tenants()
    bad.options["watchdog_ms"] = 100.0
    batcher = TenantBatcher([bad, good])
    held = batcher.submit("first", hang, 110.0)
    assert started.wait(5)
    waiting = batcher.submit("second", "x", FOREVER)
    begin = time.perf_counter()
    batcher.close()
    assert time.perf_counter() - begin < 5.0  # the call that hangs takes 10 s
    assert waiting.result(0).output == "x"
    assert held.exception(0) is not None
    gate.set()


def test_a_tenant_may_run_in_processes_beside_one_that_runs_in_threads(tmp_path: Path) -> None:
    apart = {"process": True, "spares": 0, "learn": False}
    one = Tenant("apart", CommandRunner(tmp_path), 80.0, COMMANDS, options=apart)
    with TenantBatcher([one, tenants()[1]]) as batcher:
        futures = [batcher.submit("apart", command("pid"), FOREVER) for _ in range(10)]
        futures += [batcher.submit("second", os.getpid, FOREVER) for _ in range(10)]
        ids = [int(np.ravel(future.result(60).output)[0]) for future in futures]
        assert set(ids[:10]) == set(batcher.batcher("apart").processes)
        assert set(ids[10:]) == {os.getpid()}
        assert os.getpid() not in ids[:10]


def replay(batcher: TenantBatcher, rates: dict[str, float], seconds: float, seed: int) -> dict[str, Any]:
    """Send Poisson arrivals for every tenant; return the futures by tenant."""
    rng = np.random.default_rng(seed)
    events = sorted(
        (at, name)
        for name, rate in rates.items()
        for at in np.cumsum(rng.exponential(1.0 / rate, int(rate * seconds * 1.5)))
        if at < seconds
    )
    found: dict[str, Any] = {name: [] for name in rates}
    start = time.perf_counter()
    for at, name in events:
        time.sleep(max(0.0, start + at - time.perf_counter()))
        with contextlib.suppress(QueueFull):
            found[name].append(batcher.submit(name, "x", 80.0))
    return found


def test_a_flood_for_one_tenant_does_not_break_the_other() -> None:
    """The first gets three times what a worker can do, the second half of its share.

    Other processes may hold up one run, so there are three.
    """
    capacity = tenants()[0].capacity_qps, tenants()[1].capacity_qps
    found = []
    for seed in range(3):
        with TenantBatcher(tenants(), workers=1) as batcher:
            sent = replay(batcher, {"first": 3.0 * capacity[0], "second": 0.25 * capacity[1]}, 1.5, seed)
            for future in sent["first"] + sent["second"]:
                future.exception(10)
            stats = batcher.stats()
        assert stats["first"].batcher.attainment < 0.8  # there was a flood
        found.append(stats["second"].batcher.attainment)
        if found[-1] >= 0.99:
            return
    pytest.fail(f"attainment of the second tenant: {found}")


def test_the_plan_follows_the_load_and_loses_nothing() -> None:
    apart = {"period_ms": 60_000.0, "groups": 2, "memory_mb": 10.0}  # a worker holds one model
    with TenantBatcher(tenants(memory_mb=6.0), workers=3, **apart) as batcher:  # type: ignore[arg-type]
        assert [len(s.workers) for s in batcher.stats().values()] == [3, 3]  # until the first plan
        found = []
        for rates, most in (({"first": 500.0, "second": 40.0}, 0), ({"first": 40.0, "second": 300.0}, 1)):
            batcher.plan()
            futures = replay(batcher, rates, 0.5, seed=most)
            found += [future for some in futures.values() for future in some]
            grouping = batcher.plan()
            serves = [set(stats.workers) for stats in batcher.stats().values()]
            assert serves[0].isdisjoint(serves[1])
            assert [len(workers) for workers in serves] == ([2, 1] if most == 0 else [1, 2])
            assert len(set(grouping.group_of)) == 2
        more = [batcher.submit(name, "x", FOREVER) for name in ("first", "second") for _ in range(20)]
        for future in more:
            future.result(10)
        for future in found:
            future.exception(10)
        for stats in batcher.stats().values():
            counters = stats.batcher
            assert counters.submitted == counters.met + counters.late + counters.dropped
            assert counters.failed == counters.closed == 0


def test_plans_need_the_arrivals_that_a_period_notes() -> None:
    with TenantBatcher(tenants()) as batcher, pytest.raises(PolicyError, match="period_ms"):
        batcher.plan()


def test_a_moved_worker_finishes_its_batch_first() -> None:
    started, gate = threading.Event(), threading.Event()

    def hold() -> str:
        started.set()
        gate.wait(5)
        return "done"

    with TenantBatcher(tenants(), workers=2) as batcher:
        held = batcher.submit("first", hold, FOREVER)
        assert started.wait(5)
        batcher.batcher("first").assign([])
        waiting = batcher.submit("first", "later", FOREVER)
        gate.set()
        assert held.result(5).output == "done"
        time.sleep(0.05)
        assert not waiting.done()  # nobody serves the tenant now
        batcher.batcher("first").assign([1])
        assert waiting.result(5).output == "later"
        with pytest.raises(PolicyError, match="7 is none"):
            batcher.batcher("first").assign([7])
        batcher.batcher("first").assign([])
        last = batcher.submit("first", "last", FOREVER)
    assert last.result(5).output == "last"  # closing brings the workers back


def test_planning_by_itself(wait_for: Any) -> None:
    with TenantBatcher(tenants(), workers=2, period_ms=30.0) as batcher:
        wait_for(lambda: len(batcher.plans) >= 2)
        assert batcher.plans[0][1].headroom > 1.0


def test_clients_on_an_event_loop() -> None:
    import asyncio

    async def ask() -> Any:
        with TenantBatcher(tenants()) as batcher:
            return await asyncio.gather(*(batcher.infer("first", i, 500.0) for i in range(5)))

    assert [answer.output for answer in asyncio.run(ask())] == [0, 1, 2, 3, 4]
