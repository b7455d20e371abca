"""What the room refuses, before anything starts: one table per kind of argument."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_runners import FOREVER, TABLE, Echo, NeverDecides, batcher_threads

from subnetact.errors import (
    BatchFailed,
    InvalidRequest,
    PipelineError,
    PolicyError,
    ProfileMismatch,
    TableError,
    TraceError,
)
from subnetact.latency.table import LatencyTable
from subnetact.serving import (
    Batcher,
    FairShares,
    Fixed,
    HullFit,
    PipelineModel,
    Preemptive,
    SlackFit,
    Stage,
    StageModel,
    Tenant,
    TenantBatcher,
    make_policy,
    plan_pipeline,
    poisson,
    simulate,
    superserve_a40,
)
from subnetact.serving.pipelines.graph import StageGraph
from subnetact.serving.pipelines.pipeline import Pipeline
from subnetact.serving.simulation.datasets import load_trace
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.simulator import WorkerEvent
from subnetact.serving.simulation.traces import bursty, from_counts, from_timestamps, time_varying

A40, HUGE = superserve_a40(), 10**400
OTHER = LatencyTable(["a", "b", "c"], [70.0, 80.0, 90.0], [1, 4], [[1.0, 2.0], [3.0, 6.0], [4.0, 8.0]])


BARE = type("Bare", (), {"decide": lambda self, context: (0, 1)})()  # has no table


class Plain:
    """A runner with nothing that is optional."""

    keys = TABLE.subnets

    def check(self, x: Any) -> None:
        """Accept everything."""

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        return inputs


class Shaped(Echo):
    """A runner of two input shapes."""

    samples = ("x", "xxxx")

    def shape_of(self, x: str) -> int:
        return int(len(x) > 1)


def row(call: Any, match: str, error: type[Exception] = PolicyError) -> Any:
    return pytest.param(call, error, match, id=match)


def batcher(engine: Any = None, **options: Any) -> Any:
    options = {"policy": Fixed(TABLE, 0), "slo_ms": 36.0, **options}
    return lambda: Batcher(Echo() if engine is None else engine, **options)


def simulated(policy: Any = None, arrivals_ms: Any = (0.0,), **options: Any) -> Any:
    policy = SlackFit(A40, slo_ms=36.0) if policy is None else policy
    options = {"slo_ms": 36.0, "workers": 8, **options}
    return lambda: simulate(arrivals_ms, A40, policy, **options)


def echo_stage(name: str = "a", table: LatencyTable | None = TABLE, **options: Any) -> Stage:
    return Stage(name, Echo(), table=table, **options)


def pipeline(*stages: Any, slo_ms: float = 1e6) -> Any:
    return lambda: Pipeline(stages, slo_ms=slo_ms, sample="x", learn=False)


def tenants(*several: Tenant, **options: Any) -> Any:
    return lambda: TenantBatcher(list(several), **options)


def stage(**options: Any) -> Any:
    return lambda: StageModel("a", **{"tables": {"cpu": TABLE}, **options})


def planned(slo_ms: float, hardware: str = "cpu", rate: float = 20.0, **options: Any) -> Any:
    model = lambda: PipelineModel((StageModel("a", {hardware: TABLE}),), {"cpu": 1.0}, slo_ms)  # noqa: E731
    return lambda: plan_pipeline(poisson(rate, 1, seed=0), model(), **options)


BATCHERS = [
    row(lambda: Batcher(Echo()), "policy: none given; give a policy, or a table and slo_ms"),
    row(lambda: Batcher(Echo(), table=TABLE), "a table and slo_ms"),
    row(lambda: Batcher(Echo(), policy=Fixed(TABLE, 0)), "slo_ms: Fixed has none"),
    *(row(batcher(slo_ms=ms), "slo_ms") for ms in (0.0, -1.0, math.nan, math.inf, HUGE, True, "20", [1.0])),
    *(row(batcher(policy=policy), "policy: ") for policy in ("slackfit", SlackFit, 3, BARE)),
    *(row(batcher(workers=count), "workers") for count in (0, True)),
    *(row(batcher(max_queue=count), "max_queue") for count in (0, 2.5)),
    row(batcher(expired="pray"), "expired: 'pray' is not a rule; choose from serve, drop, defer"),
    row(batcher([]), "empty list"),
    row(batcher([Plain(), Plain()], workers=3), "3 for 2 engines"),
    row(batcher(Plain(), threads_per_worker=2), "no method enter_worker"),
    row(batcher(Plain(), threads_per_worker=0), "threads_per_worker"),
    row(batcher(Plain(), check_finite=True), "takes no `finite`"),
    *(row(batcher(watchdog_ms=ms), "watchdog_ms") for ms in (0.0, math.nan, HUGE, "x")),
    *(row(batcher(process=how), f"process: {how!r}.*spawned") for how in ("fork", 2, None)),
    *(row(batcher(spares=count), "spares") for count in (-1, True)),
    row(batcher(process=True, workers=0), "workers"),
    row(batcher(process=True, threads_per_worker=0), "threads_per_worker"),
    *(row(batcher(shares=shares), "shares: expected FairShares") for shares in (5, {"a": 1.0})),
    *(row(batcher(clock_ms=clock), "clock_ms") for clock in (3.0, lambda: math.nan)),
    *(row(batcher(table=wrong), "LatencyTable", TableError) for wrong in (5, "ab", [5])),
    row(batcher(policy=Preemptive(Fixed(TABLE, 0)), process=True), "use threads"),
    row(batcher(Plain(), policy=Preemptive(Fixed(TABLE, 0))), "Plain has no start"),
    row(batcher(policy=Fixed(TABLE.select([1, 0]), 0)), "profile this engine", ProfileMismatch),
    row(batcher(policy=Fixed(OTHER, 0)), "has 2", ProfileMismatch),
    row(batcher(policy=Fixed(OTHER, 0), table=TABLE), "made for other", ProfileMismatch),
    row(batcher(Shaped(), table=[TABLE] * 3), "2 input shapes", ProfileMismatch),
    row(batcher(Shaped(), table=[TABLE.select([1, 0]), TABLE]), "other subnets", ProfileMismatch),
]
SIMULATIONS = [
    row(simulated(arrivals_ms=[]), "empty", TraceError),
    row(simulated(arrivals_ms=[1.0, 0.5]), r"arrivals_ms\[1\]: 0.5 is before 1.0", TraceError),
    row(simulated(arrivals_ms=[0.0, math.nan]), r"arrivals_ms\[1\]: nan", TraceError),
    row(simulated(arrivals_ms=[0.0, math.inf]), "not finite", TraceError),
    row(simulated(arrivals_ms=[[0.0]]), "one dimension", TraceError),
    row(simulated(arrivals_ms=["a"]), "not numbers", TraceError),
    row(simulated(slo_ms=3.0), r"below the lowest .* give slo_ms of at least \d", TraceError),
    row(simulated(slo_ms=[36.0, 36.0]), "slo_ms: shape", TraceError),
    row(simulated(slo_ms=math.nan), "slo_ms", TraceError),
    row(simulated(min_accuracy=99.0), "above the best", TraceError),
    row(simulated(min_accuracy=-1.0), "min_accuracy", TraceError),
    row(simulated(workers=0), "workers"),
    row(simulated(expired="shrug"), "serve, drop, defer"),
    row(simulated(noise=-0.1), "noise"),
    row(simulated(overhead_ms=math.nan), "overhead_ms"),
    row(simulated(look_ms=-1.0), "look_ms"),
    row(simulated(blocks=0), "blocks"),
    row(simulated(events=[WorkerEvent(0.0, 8, False)]), "worker from 0 to 7", TraceError),
    row(simulated("slackfit"), "no policy object; make one .* for example HullFit"),
    row(simulated(BARE), "policy: "),
    row(lambda: simulate([0.0], TABLE, NeverDecides(), slo_ms=36.0, expired="serve"), "waiting"),
    row(simulated(Fixed(A40.select([0, 1]), 0)), "other subnets", ProfileMismatch),
    row(lambda: fluid_bound([0.0], A40, step_ms=0.0, slo_ms=36.0), "step_ms", TraceError),
    row(lambda: fluid_bound([0.0], A40, workers=0, slo_ms=36.0), "workers"),
    row(lambda: fluid_bound([], A40, slo_ms=36.0), "empty", TraceError),
    row(lambda: fluid_bound([0.0], A40, 8, 36.0), "positional", TypeError),  # workers are not the SLO
]
POLICIES = [
    row(lambda: SlackFit(A40, slo_ms=3.0), "slo_ms: 3.0 ms is below the lowest latency"),
    row(lambda: SlackFit(A40, slo_ms=math.nan), "slo_ms"),
    *(row(lambda b=b: SlackFit(A40, buckets=b, slo_ms=36.0), "buckets") for b in (0, 2.5)),
    row(lambda: SlackFit(A40, margin_ms=-1.0, slo_ms=36.0), "margin_ms"),
    row(lambda: HullFit(A40, slo_ms=1.0), "slo_ms"),
    row(lambda: HullFit(A40, margin=math.inf, slo_ms=36.0), "margin"),
    row(lambda: Fixed(A40, 6), "subnet"),
    row(lambda: Fixed(A40, "no such subnet"), "subnet"),  # type: ignore[arg-type]
    row(lambda: Preemptive(Preemptive(SlackFit(A40, 50.0))), "Preemptive"),
    *(
        row(lambda ms=ms: Preemptive(SlackFit(A40, 50.0), block_ms=ms), "block_ms")
        for ms in (-1.0, math.nan, "long")
    ),
    row(lambda: make_policy("nonsense", A40, 36.0), "choose from"),
    row(lambda: make_policy("slackfit:four", A40, 36.0), "whole number"),
    *(
        row(lambda name=name: make_policy(name, UNKNOWN, 36.0), "not known", TableError)
        for name in ("slackfit", "hullfit", "maxbatch", "maxacc", "cheapest", "modelswitching")
    ),
    *(row(lambda ms=ms: FairShares(burst_ms=ms), "burst_ms") for ms in (0, HUGE, True, "x")),
    *(row(lambda w=w: FairShares(weights={"a": w}), "weight of 'a'") for w in (math.nan, -1.0, HUGE, None)),
    *(row(lambda w=w: FairShares(weights={"a": w}), "weight of 'a'") for w in ("x", 5e-324, 1e308)),
    *(row(lambda w=w: FairShares(weights=w), "weights") for w in (5, None, {5: 1.0})),
]
UNKNOWN = A40.with_accuracy([math.nan, *A40.accuracy[1:]])
GOOD = Tenant("first", Echo(), 80.0, TABLE)
TENANTS = [
    row(tenants(), "at least one"),
    row(tenants(GOOD, GOOD), "two are called 'first'"),
    row(tenants(GOOD, workers=0), "workers"),
    row(tenants(Tenant("a", Echo(), 80.0, TABLE, share=0.0)), "share: 0.0"),
    row(tenants(Tenant("a", Echo(), 20.0)), "a table and slo_ms"),
    row(tenants(Tenant("a", Echo(), -1.0, TABLE)), "slo_ms"),
    row(tenants(GOOD, Tenant("odd", Echo(), 80.0, OTHER)), "has 2", ProfileMismatch),  # closes the first
]
CYCLE = {"a": {"b": False}, "b": {"c": False}, "c": {"a": False}}
PIPELINES = [
    row(call, match, PipelineError)
    for call, match in (
        (lambda: StageGraph(CYCLE), "cycle, 'a' before 'c' before 'b' before 'a'"),
        (lambda: StageGraph({"a": {"a": False}}), "cycle, 'a' before 'a'"),
        (lambda: StageGraph({"a": {"z": False}}), "follows 'z', which is none"),
        (pipeline(), "give at least one"),
        (pipeline(echo_stage(), echo_stage()), "two are called 'a'"),
        (pipeline(echo_stage(after=["b"]), echo_stage("b", after=["a"])), "cycle"),
        (pipeline(echo_stage(), echo_stage("b", after=["a"]), slo_ms=1.5), "shorter than the shortest path"),
        (pipeline(echo_stage(table=None)), "no latency table"),
        (
            pipeline(echo_stage(), echo_stage("b", after=["a"], prepare=lambda _: "refused")),
            "stage 'b' does not fit 'a'",
        ),
        (
            pipeline(echo_stage(), echo_stage("b", after={"a": lambda x: x.missing})),
            "stage 'b' does not fit 'a': AttributeError",
        ),
        (pipeline("a"), "expected Stage"),
        (planned(60.0, "tpu"), "'tpu', which has no price"),
        (planned(0.5), "shorter than the shortest path"),
        (planned(9.0, rate=5000.0, most_workers=2), "does not meet the SLO"),
        (stage(tables={}), "one per type of hardware"),
        (stage(tables={"cpu": TABLE, "gpu": TABLE.select([0])}), "all of the same subnets"),
        (stage(after={"b": 0.0}), "share of 'b' is 0.0"),
        (stage(min_accuracy=90.0), "the best subnet has 80.0"),
        (stage(inputs=(2**63,)), "whole numbers, 0 to 1000"),
    )
]
TRACES = [
    row(partial(make, *arguments, **options), match, TraceError)
    for match, make, several, options in (
        ("base_qps", bursty, [(-1, 5, 1, 1)], {}),
        ("cv2", bursty, [(1, 5, -1, 1)], {}),
        ("duration_s", bursty, [(1, 5, 1, 0)], {}),
        ("nan", bursty, [(1, math.nan, 1, 1)], {}),
        ("qps", time_varying, [(0, 5, 1)], {}),
        ("-1", time_varying, [(1, 5, -1)], {}),
        ("counts", from_counts, [([], 1), ([0, 0], 1), ([1, -1], 1), ([1, math.nan], 1)], {}),
        ("0", from_counts, [([1], 0)], {}),
        ("empty", from_timestamps, [([],)], {}),
        ("finite", from_timestamps, [([1.0, math.inf],)], {}),
        ("mean_qps", from_timestamps, [([1.0, 1.0],)], {"mean_qps": 5}),
        ("unknown", load_trace, [("unknown",)], {}),
        ("scale", load_trace, [("maf",)], {"scale": 0}),
        ("unit", load_trace, [(__file__,)], {"unit": "h"}),
    )
    for arguments in several
]


@pytest.mark.parametrize(
    ("call", "error", "match"), [*BATCHERS, *SIMULATIONS, *POLICIES, *TENANTS, *PIPELINES, *TRACES]
)
def test_what_cannot_work_is_refused_and_leaves_no_thread(
    call: Any, error: type[Exception], match: str
) -> None:
    before = batcher_threads()
    with pytest.raises(error, match=match):
        call()
    assert batcher_threads() <= before


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        *(((1, ms), "deadline_ms: ") for ms in (0, -1, 0.0, -1e-9, math.nan, math.inf, -math.inf)),
        ((1, True), "deadline_ms: True is not a number"),
        ((1, "36"), "deadline_ms: '36' is not a number"),
        ((1, 10**400), "deadline_ms: an int beyond every float"),
        (("refused", 36.0), "input: refused"),
        ((1, 36.0, 99.0), "min_accuracy: .*above the best subnet"),
        ((1, 36.0, math.nan), "min_accuracy: .*above the best subnet"),
        ((1, 36.0, 10**400), "min_accuracy: an int beyond"),
        ((1, 36.0, "high"), "min_accuracy: 'high' is not a number"),
        ((1, 36.0, None, 1.5), "priority: 1.5 is not an int"),
        ((1, 36.0, None, True), "priority: True is not an int"),
        *(((1, 36.0, None, p), "more than 64 bits") for p in (10**5000, 2**63, -(2**63) - 1)),
        *(((1, 36.0, None, 0, client), "client") for client in (7, None, [], b"x")),
        ((math.nan, 36.0), "input: not finite"),
    ],
)
def test_requests_that_are_refused_are_counted_and_never_queued(arguments: Any, match: str) -> None:
    x, deadline_ms, floor, priority, client = (*arguments, *(None, 0, "")[len(arguments) - 2 :])
    with Batcher(Echo(), policy=Fixed(TABLE, 0), slo_ms=36.0, check_finite=True) as live:
        with pytest.raises(InvalidRequest, match=match):
            live.submit(x, deadline_ms, min_accuracy=floor, priority=priority, client=client)
        stats = live.stats()
        assert (stats.refused, stats.submitted) == (1, 0)
        assert live.submit(1, 2.0**40).result(60).output == 1


class Answers:
    """A policy that gives a wrong answer first, then right ones."""

    table = TABLE

    def __init__(self, wrong: Any) -> None:
        self.answers = iter([wrong])

    def decide(self, context: Any) -> Any:
        answer = next(self.answers, (np.int64(0), np.int32(1)))
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "wrong",
    [
        *((0.0, 1.0), 0, ("a", 1), (0, 1, 2), (2, 1), (-1, 1), (0, 0), (0, 5)),
        ZeroDivisionError("Answers answered no"),
    ],
)
def test_a_wrong_answer_of_a_policy_fails_its_requests_only(wrong: Any) -> None:
    with pytest.raises((PolicyError, ZeroDivisionError), match="Answers answered"):
        simulate([0.0], TABLE, Answers(wrong), slo_ms=36.0, workers=1, expired="serve")
    with Batcher(Echo(), policy=Answers(wrong), slo_ms=36.0) as live:
        with pytest.raises(BatchFailed, match="Answers answered"):
            live.submit("x", FOREVER).result(60)
        assert live.submit("y", FOREVER).result(60).output == "y"
