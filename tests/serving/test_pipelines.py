"""Pipelines: the graph, the split of deadlines, the live pipeline, and its simulation beside it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import read_pages
import torch
from fake_runners import Sleeping
from virtual_time import VirtualTime

from subnetact.digits import undistorted_digits
from subnetact.errors import BatcherClosed, BatchFailed, DeadlinePassed, InvalidRequest
from subnetact.latency.table import LatencyTable
from subnetact.serving import HullFit, Pipeline, PipelineModel, Stage, StageModel, plan_pipeline, poisson
from subnetact.serving.pipelines.model import StageChoice, estimate_pipeline
from subnetact.serving.pipelines.pipeline import PipelineStats
from subnetact.serving.simulation.simulator import simulate

FAST = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])


class Tagging(Sleeping):
    """Answers (subnet, input), at once if it has no time; the input "raise" raises."""

    def __init__(self, table: LatencyTable = FAST, time: VirtualTime | None = None) -> None:
        super().__init__(time, table)  # type: ignore[arg-type]

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        if self.time is not None:
            super().run(subnet, inputs, batch_size)
        if "raise" in inputs:
            raise ValueError("this input")
        return [x if isinstance(x, list) else (subnet, x) for x in inputs]


def pipeline(*stages: Stage, sample: Any = "x", slo_ms: float = 1e6, **options: Any) -> Pipeline:
    return Pipeline(stages, slo_ms=slo_ms, sample=sample, learn=False, **options)


def engine(name: str, table: LatencyTable = FAST, **options: Any) -> Stage:
    return Stage(name, Tagging(table), table=table, **options)


def gated() -> tuple[Stage, threading.Event]:
    """Return a first stage, which holds the input "hold" until the event is set."""
    gate = threading.Event()
    return Stage("a", lambda x: gate.wait(60) if x == "hold" else x), gate


# -- the graph ---------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused_and_counted() -> None:
    between: list[PipelineStats] = []

    def prepare(x: Any) -> Any:
        if isinstance(x, BaseException):
            raise x
        if x != "later":
            return x
        between.append(live.stats())
        return "refused"

    with pipeline(engine("a"), engine("b", prepare=prepare), engine("c", after=["a"])) as live:
        with pytest.raises(InvalidRequest, match="takes 2 ms at least"):
            live.submit("x", 1.9)
        with pytest.raises(InvalidRequest, match="deadline_ms"):
            live.submit("x", float("nan"))
        for x in ("refused", "later"):
            with pytest.raises(InvalidRequest, match="refused"):
                live.submit(x)
        for error in (ValueError("this input"), SystemExit("this input")):
            with pytest.raises(BatchFailed, match="this input"):
                live.submit(error)
        assert live.submit("x").result(60).met
        for stats, counted in ((between[0], (0, 0, 3, 0)), (live.stats(), (1, 0, 6, 0))):
            assert (stats.submitted, stats.failed, stats.refused, stats.open) == counted
    with pytest.raises(BatcherClosed):
        live.submit("x")
    assert live.stats().refused == 7


# -- live ----------------------------------------------------------------------------------------------


def test_outputs_travel_along_the_edges_taken_and_a_stage_has_options_of_its_batcher(tmp_path: Any) -> None:
    stages = [
        Stage("split", lambda x: list(x), options={"decision_log": tmp_path / "log.jsonl"}),
        Stage("upper", str.upper, after=["split"], each=True, inputs=3),
        Stage("many", lambda x: f"{len(x)} letters", after={"upper": lambda x: len(x) > 2}),
        Stage("join", lambda x: x, after=["upper", "many"]),
        Stage("count", len, after="split"),
    ]
    with pipeline(*stages, sample="abc", threads_per_worker=1) as live:
        answer = live.submit("abc").result(60)
        assert answer.output == {"join": {"upper": ["A", "B", "C"], "many": "3 letters"}, "count": 3}
        assert live.submit("ab").result(60).output == {"join": {"upper": ["A", "B"]}, "count": 2}
        assert live.submit("").result(60).output == {"join": {"upper": []}, "count": 0}
        assert [len(answer.stages[name]) for name in ("split", "upper", "many", "join")] == [1, 3, 1, 1]
        assert answer.met
        for times in answer.stages.values():
            assert all(t.waited_ms >= 0 and 0 <= t.ran_ms <= answer.latency_ms for t in times)
        assert live.stats().met == 3
    assert (tmp_path / "log.jsonl").stat().st_size > 0


def leave(x: Any) -> Any:
    if "leave" in x:
        raise SystemExit("no more")
    return x


def test_a_request_fails_with_the_error_of_its_stage_and_no_other_does() -> None:
    with pipeline(engine("a"), Stage("b", lambda x: x[1] + "", after=["a"], prepare=leave)) as live:
        good = [live.submit("x") for _ in range(5)]
        for x, words in (("raise", "this input"), (3, "TypeError"), ("leave", "SystemExit: no more")):
            with pytest.raises(BatchFailed, match=words):
                live.submit(x).result(60)
        assert [future.result(60).output for future in good] == ["x"] * 5
        stats = live.stats()
        assert (stats.met, stats.failed, stats.open) == (5, 3, 0)


def test_the_slack_of_a_stage_is_what_the_expected_tail_leaves() -> None:
    slow = FAST.scaled(10.0)
    with pipeline(
        engine("a"), engine("b", slow, after={"a": lambda _: True}), slo_ms=220.0, clock_ms=lambda: 0.0
    ) as live:
        live.submit("x").result(60)
        slack = {name: one.stats().histograms["slack_ms"].total for name, one in live.batchers.items()}
    # works 2 and 20: the first stage gets 1/11 of the time, the second what is left
    assert slack["a"] == pytest.approx(20.0)
    assert slack["b"] > 150.0
    with pipeline(
        engine("a"), engine("b", slow.scaled(3.0), after={"a": lambda _: True}), slo_ms=20.0
    ) as live:
        assert live.submit("x", 1e6).result(60).met, "the slack of others permits it"


def test_a_request_that_cannot_reach_the_end_in_time_is_dropped_between_stages() -> None:
    time = VirtualTime()
    awake = [True]

    def nap(x: Any) -> Any:
        if not awake[0]:
            time.sleep(60.0)
        return x

    stages = Stage("a", nap), engine("b", FAST.scaled(20.0), after=["a"])
    with pipeline(*stages, slo_ms=70.0, clock_ms=time) as live:
        time.watch(live)
        awake[0] = False  # the example has run
        dropped, answered = live.submit("x"), live.submit("x", 500.0)
        time.run()
        with pytest.raises(DeadlinePassed, match="stage 'b' cannot lead to an answer in time"):
            dropped.result(60)
        assert live.stats().dropped == 1
        assert answered.result(60).met


def test_a_guessed_latency_is_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]

    def work(x: Any) -> None:
        now[0] += 2.0

    slow = Stage("slow", work, expected_ms=0.05)
    with Pipeline([slow], slo_ms=1000.0, sample="x", clock_ms=lambda: now[0]) as live:
        for _ in range(40):
            live.submit("x").result(60)
        assert live.batchers["slow"].stats().correction > 2.0  # it is learned
    assert "profile this machine" not in caplog.text


@pytest.mark.parametrize("drain", [True, False])
def test_closing_in_a_callback_returns_and_finishes_what_was_accepted(drain: bool, wait_for: Any) -> None:
    before, closed = set(threading.enumerate()), threading.Event()
    first, gate = gated()
    live = pipeline(first, engine("b", after=["a"]))
    futures = [live.submit(x) for x in ("hold", "y", "z", "w")]
    assert futures.pop().cancel(), "it is withdrawn"
    futures[0].add_done_callback(lambda _: (live.close(drain), closed.set()))
    futures[1].add_done_callback(lambda _: leave(["leave"]))  # which ends no other request
    gate.set()
    assert closed.wait(60)
    for future in futures:
        assert drain is False or future.result(60).met
        assert isinstance(future.exception(60), BatcherClosed | None)
    with pytest.raises(BatcherClosed):
        live.submit("x")
    live.close()
    wait_for(lambda: set(threading.enumerate()) <= before, 60)
    stats = live.stats()
    assert (stats.cancelled, stats.open) == (1, 0)


def test_closing_in_callbacks_of_requests_that_closing_and_cancelling_end_returns() -> None:
    first, gate = gated()
    live = pipeline(first)
    held, waiting = live.submit("hold"), live.submit("x")
    waiting.add_done_callback(lambda _: (live.close(), gate.set()))
    closing = threading.Thread(target=live.close, kwargs={"drain": False}, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert held.done()
    assert isinstance(waiting.exception(0), BatcherClosed)
    first, gate = gated()
    live = pipeline(first)
    future = live.submit("hold")
    future.add_done_callback(lambda _: (gate.set(), live.close()))  # the request is answered meanwhile
    assert future.cancel()
    stats = live.stats()
    assert (stats.met + stats.cancelled, stats.open) == (1, 0)


def test_requests_that_are_cancelled_at_any_time_have_one_outcome() -> None:
    stages = [
        engine("a", prepare=lambda x: [x]),
        engine("b", prepare=lambda x: [x]),
        Stage("c", lambda x: [1, 2], after=["a", "b"]),
        Stage("d", lambda x: x, after=["c"], each=True, inputs=2),
    ]
    with pipeline(*stages) as live:
        futures = [live.submit("x") for _ in range(200)]
        cancelled = [future.cancel() for future in futures[::2]]
        assert all(future.result(60).output == [1, 2] for future in futures[1::2])
    stats = live.stats()
    assert (stats.submitted, stats.open) == (200, 0)
    assert stats.met + stats.cancelled == 200
    assert stats.cancelled <= sum(cancelled)
    assert not any(batcher.stats().queued for batcher in live.batchers.values())


# -- simulation ------------------------------------------------------------------------------------------


def model(slo_ms: float = 60.0, **first: Any) -> PipelineModel:
    cheap, dear = FAST.scaled(2.0), FAST
    return PipelineModel(
        (
            StageModel("a", {"cpu": cheap, "gpu": dear}, **first),
            StageModel("b", {"cpu": cheap.scaled(3.0), "gpu": dear}, {"a": 0.7}, inputs=(1, 2, 3)),
        ),
        {"cpu": 1.0, "gpu": 3.0},
        slo_ms,
    )


CHOICES = {"a": StageChoice("cpu", 2, 4), "b": StageChoice("cpu", 4, 4)}


def test_one_stage_is_simulated_as_simulate_does() -> None:
    arrivals = poisson(300, 5, seed=1)
    alone = PipelineModel((StageModel("a", {"cpu": FAST}),), {"cpu": 1.0}, 20.0)
    found = estimate_pipeline(arrivals, alone, {"a": StageChoice("cpu", 2, 4)})
    direct = simulate(arrivals, FAST, HullFit(FAST, 20.0), 20.0, 2, "defer", requests=True)
    assert found.attainment == direct.attainment
    assert direct.log is not None
    np.testing.assert_array_equal(found.latency_ms, direct.log.finish_ms - arrivals)


def test_the_simulation_follows_edges_and_numbers_of_inputs() -> None:
    arrivals = poisson(100, 10, seed=2)
    found = estimate_pipeline(arrivals, model(), CHOICES)
    assert len(found.stages["a"].arrivals_ms) == len(arrivals)
    assert len(found.stages["b"].arrivals_ms) == pytest.approx(len(arrivals) * 0.7 * 2, rel=0.1)
    overloaded = estimate_pipeline(poisson(4000, 2, seed=0), model(), CHOICES)
    assert overloaded.attainment < 0.9
    assert overloaded.percentile_ms(99.0) > 60.0


def test_a_request_that_takes_no_last_stage_ends_with_the_last_that_it_takes() -> None:
    edges = {"a": {}, "b": {"a": 1.0}, "c": {"b": 1e-9}}
    stages = tuple(StageModel(name, {"cpu": FAST}, after) for name, after in edges.items())
    choices = dict.fromkeys("abc", StageChoice("cpu", 1, 1))
    found = estimate_pipeline([0.0], PipelineModel(stages, {"cpu": 1.0}, 60.0), choices)
    assert found.stages["c"].result.requests == 0
    first = found.stages["b"].arrivals_ms[0]
    assert first > 0.0
    assert found.latency_ms[0] >= first + FAST.fastest_ms


def test_the_plan_meets_the_percentile_at_the_least_cost_of_all_small_plans() -> None:
    arrivals = poisson(400, 1, seed=3)
    found = plan_pipeline(arrivals, model(), most_workers=16)
    assert found.estimate.percentile_ms(99.0) <= 60.0
    easy = plan_pipeline(poisson(20, 5, seed=3), model(200.0, min_accuracy=70.0))
    assert easy.choices["a"].min_accuracy == 80.0, "it is raised when that is free"
    cheaper = [
        choices
        for a in range(1, 5)
        for b in range(1, 12)
        for kinds in (("cpu", "cpu"), ("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu"))
        if model().cost(choices := {"a": StageChoice(kinds[0], a, 4), "b": StageChoice(kinds[1], b, 4)})
        < found.cost
    ]
    assert cheaper
    for choices in cheaper:
        assert estimate_pipeline(arrivals, model(), choices).percentile_ms(99.0) > 60.0


def test_the_simulation_predicts_the_live_percentile() -> None:
    """The 99th percentile of the simulation is within 5 % of the live one, with engines in virtual time."""
    tables = {"a": FAST.scaled(5.0), "b": FAST.scaled(8.0)}
    slo_ms, arrivals = 300.0, poisson(40, 4, seed=5)
    described = PipelineModel(
        (StageModel("a", {"cpu": tables["a"]}), StageModel("b", {"cpu": tables["b"]}, {"a": 1.0}, (2,))),
        {"cpu": 1.0},
        slo_ms,
    )
    choices = {"a": StageChoice("cpu", 1, 4), "b": StageChoice("cpu", 2, 4)}
    found = estimate_pipeline(arrivals, described, choices)
    time = VirtualTime()
    first, second = Tagging(tables["a"]), Tagging(tables["b"])
    stages = [
        Stage("a", first, table=tables["a"]),
        Stage("b", second, ["a"], lambda x: [x, x], True, 2.0, tables["b"], workers=2),
    ]
    with pipeline(*stages, slo_ms=slo_ms, clock_ms=time) as live:
        time.watch(live)
        first.time = second.time = time  # the example has run
        futures = time.send((float(at), partial(live.submit, "x")) for at in arrivals - arrivals[0])
        latencies = [future.result(60).latency_ms for future in futures]
    percentile = np.percentile(latencies, 99, method="inverted_cdf")
    assert percentile == pytest.approx(found.percentile_ms(99.0), rel=0.05)


def test_a_perfect_detector_finds_every_digit() -> None:
    pages = read_pages.compose(undistorted_digits()[1], 20, torch.Generator().manual_seed(0))
    maps = read_pages.maps_of(pages)
    maps[:, 0] = 20.0 * maps[:, 0] - 10.0
    counts = set()
    for image, one, digits in zip(pages.images, maps, pages.digits, strict=True):
        found = read_pages.cut({"page": image, "find": one})
        assert sorted(place for _, place in found) == sorted(place for place, _ in digits)
        for tile, (row, column) in found:
            assert torch.equal(tile, image[:, row : row + 16, column : column + 16])
        counts.add(len(digits))
    assert len(counts) > 5


def test_only_digits_in_their_place_and_read_right_count() -> None:
    digits = [((0, 0), 3), ((40, 20), 7)]
    assert read_pages.matches([((2, 3), None), ((40, 30), None)], digits) == 1
    assert read_pages.matches([((2, 3), 3), ((41, 20), 8)], digits) == 1
    assert read_pages.matches([((41, 20), 7), ((1, 1), 3)], digits) == 2
