import json
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, HullFit, SlackFit, make_policy
from subnetact.serving.simulation.datasets import TRACES, load_trace, superserve_a40, trace_series
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.simulator import WorkerEvent, simulate
from subnetact.serving.simulation.traces import bursty, from_counts, from_timestamps, poisson, time_varying

NAMES = ["hullfit", "slackfit", "slackfit:3", "maxbatch", "maxacc", "modelswitching", "cheapest"]
RULES = ["serve", "drop", "defer"]


def one_subnet(latency_ms, batch_sizes=(1,)):
    return LatencyTable(["only"], [80.0], list(batch_sizes), [list(latency_ms)])


def served(trace, policy, slo_ms=36.0, workers=8, expired="serve", **options):
    return simulate(trace, policy.table, policy, slo_ms, workers, expired, **options)


@st.composite
def arrivals(draw, most=60):
    gaps = draw(st.lists(st.floats(0, 6), min_size=1, max_size=most))
    return np.cumsum(np.round(gaps, 2))


@pytest.mark.parametrize("name", [*NAMES, "fixed:5"])
@settings(max_examples=25)
@given(times=arrivals(), data=st.data())
def test_every_request_has_one_fate_and_batches_obey_the_rules(a40, name, times, data):
    def of_all(values):
        return st.lists(values, min_size=len(times), max_size=len(times))

    slo = data.draw(of_all(st.floats(6, 50)))
    floors = data.draw(st.one_of(st.none(), of_all(st.sampled_from([0.0, 78.25, 79.0]))))
    workers, rule = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(RULES))
    facts = {"min_accuracy": floors, "decisions": True, "requests": True}
    result = served(times, make_policy(name, a40, 36.0), slo, workers, rule, **facts)
    assert result.met + result.late + result.dropped == result.requests == len(times)
    assert result.unserved == 0
    assert rule == "drop" or result.dropped == 0
    log = result.log
    ran = ~np.isnan(log.finish_ms)
    assert ran.sum() == result.met + result.late == sum(result.served_by)
    assert np.all(log.start_ms[ran] >= times[ran])
    met = log.finish_ms[ran] <= times[ran] + np.array(slo)[ran]
    assert met.sum() == result.met
    accuracy = np.array(a40.accuracy)[log.subnet[ran]]
    assert result.accuracy_sum == pytest.approx(accuracy[met].sum())
    if floors is not None:
        assert np.all(accuracy >= np.array(floors)[ran])
    takes = [a40.latency_ms[d.subnet, a40.pad_index[d.k]] for d in result.decisions]
    assert sum(d.k for d in result.decisions) == ran.sum()
    assert all(d.batch_size == a40.padded(d.k) for d in result.decisions)
    finish = [d.t_ms + takes_ms for d, takes_ms in zip(result.decisions, takes, strict=True)]
    assert [d.finish_ms for d in result.decisions] == finish
    for worker in range(workers):
        mine = [d for d in result.decisions if d.worker == worker]
        assert all(a.finish_ms <= b.t_ms for a, b in pairwise(mine))


@settings(max_examples=60)
@given(times=arrivals(), workers=st.integers(1, 3), size=st.integers(0, 5))
def test_work_is_conserved_and_leaves_in_order_of_deadline(a40, times, workers, size):
    result = served(times, Fixed(a40, size), workers=workers, decisions=True, requests=True)
    starts = result.log.start_ms
    assert np.all(np.diff(starts) >= 0)
    moments = {*times, *(d.finish_ms for d in result.decisions)}
    assert all(d.t_ms in moments for d in result.decisions)
    for t in times:
        busy = sum(d.t_ms <= t < d.finish_ms for d in result.decisions)
        waits = (times <= t) & (starts > t)
        assert busy == workers or not waits.any()


@pytest.mark.parametrize("name", NAMES)
def test_runs_repeat_from_their_seed_and_a_policy_object_starts_afresh(a40, name):
    trace, policy = bursty(1000, 4000, 4, 2, seed=1), make_policy(name, a40, 36.0)
    facts = {"noise": 0.05, "overhead_ms": 0.2, "decisions": True}
    runs = [served(trace, policy, seed=seed, **facts) for seed in (3, 3, 4)]
    assert runs[0].decisions == runs[1].decisions
    assert runs[0].summary() == runs[1].summary()
    assert runs[0].decisions != runs[2].decisions


def test_an_idle_server_waits_as_md1_queueing_theory_says():
    service_ms, load, count = 1.0, 0.7, 5000
    table = one_subnet([service_ms])
    trace = poisson(1000 * load / service_ms, 250, seed=2)
    work = np.arange(len(trace)) * service_ms - trace
    waits = work - np.minimum.accumulate(work)  # Lindley: the server was idle before the least work
    assert np.mean(waits) == pytest.approx(load * service_ms / (2 * (1 - load)), rel=0.02)
    log = served(trace[:count], Fixed(table, 0), 1e6, 1, requests=True).log
    np.testing.assert_allclose(log.start_ms - trace[:count], waits[:count], atol=1e-6)


def test_ties_are_broken_for_the_client_and_for_the_first_worker():
    table = one_subnet([5.0, 6.0], (1, 4))

    def decided(arrivals, workers):
        result = served(arrivals, Fixed(table, 0), workers=workers, decisions=True)
        return [(d.worker, d.t_ms, d.k, d.finish_ms) for d in result.decisions]

    assert decided([0.0, 0.0, 0.0, 6.0], 1) == [(0, 0.0, 3, 6.0), (0, 6.0, 1, 11.0)], "arrivals come first"
    table = one_subnet([5.0])
    assert [worker for worker, *_ in decided([0.0, 0.0, 0.0, 5.0], 3)] == [0, 1, 2, 0]
    for arrivals, slo_ms in (([0.0], 5.0), ([0.0, 0.0], 9.999)):
        assert served(arrivals, Fixed(table, 0), slo_ms, 1).met == 1, "at its deadline"


def test_rules_for_expired_requests_differ_as_described():
    policy = Fixed(one_subnet([5.0]), 0)
    runs = {rule: served([0.0, 0.0, 0.0, 7.0], policy, 9.0, 1, rule, requests=True) for rule in RULES}
    found = {rule: (run.met, run.late, run.dropped) for rule, run in runs.items()}
    assert found == {"serve": (1, 3, 0), "drop": (2, 0, 2), "defer": (2, 2, 0)}
    assert runs["defer"].log.finish_ms.tolist() == [5.0, 10.0, 20.0, 15.0]


def test_a_dead_worker_gives_its_batch_back(a40):
    policy = Fixed(one_subnet([10.0]), 0)
    events = [WorkerEvent(4.0, 0, False), WorkerEvent(50.0, 0, True)]
    result = served([0.0], policy, 100.0, 1, events=events, requests=True)
    assert (result.met, result.preempted) == (1, 0)
    assert result.log.start_ms[0] == 50.0
    never = served([0.0, 60.0], policy, 100.0, 1, events=events[:1])
    assert (never.met, never.unserved) == (0, 2)
    events = [WorkerEvent(1000.0, w, False) for w in range(6)]
    fewer = served(bursty(1500, 3000, 2, 3, 1), HullFit(a40, slo_ms=36.0), events=events)
    assert fewer.met + fewer.late + fewer.dropped == fewer.requests
    assert fewer.dropped <= 6 * 16, "of the batches that were lost"


@pytest.mark.parametrize("policy", [SlackFit, HullFit])
def test_a_lost_worker_costs_accuracy_and_not_deadlines(policy):
    sizes = (1, 2, 4, 8, 16)
    cells = [[(1.0 + i) * (0.5 + 0.25 * size) for size in sizes] for i in range(5)]
    table = LatencyTable([f"s{i}" for i in range(5)], [70.0, 73.0, 76.0, 78.0, 80.0], sizes, cells)
    lost = [WorkerEvent(0.0, 1, False)]
    whole, fewer = (
        simulate(poisson(3000, 2, seed=0), table, policy(table, slo_ms=36.0), 36.0, 3, events=events)
        for events in ([], lost)
    )
    assert whole.attainment >= 0.995
    assert fewer.attainment >= 0.99
    assert whole.mean_accuracy - 6.0 < fewer.mean_accuracy < whole.mean_accuracy - 0.5


def test_noise_and_overhead_are_real_but_hidden(a40):
    trace = poisson(500, 4, seed=0)
    for extra, spread in ((0.0, 0.0), (0.3, 0.05)):
        facts = {"noise": spread, "overhead_ms": extra, "decisions": True, "seed": 1}
        decisions = served(trace, Fixed(a40, 2), **facts).decisions
        takes = [a40.latency_ms[d.subnet, a40.pad_index[d.k]] for d in decisions]
        ratio = [(d.finish_ms - d.t_ms - extra) / ms for d, ms in zip(decisions, takes, strict=True)]
        assert np.mean(ratio) == pytest.approx(1.0, abs=0.01)
        assert np.std(ratio) == pytest.approx(spread, abs=0.01)


def test_switching_a_worker_costs_its_delay(a40):
    class Alternate:
        table, switch_ms = a40, 30.0

        def __init__(self):
            self.turn = 0

        def decide(self, context):
            self.turn += 1
            return self.turn % 2, 1

    result = served([0.0, 100.0, 200.0], Alternate(), slo_ms=400.0, workers=1, decisions=True)
    took = [d.finish_ms - d.t_ms for d in result.decisions]
    assert took == pytest.approx([a40.latency_ms[1, 0], a40.latency_ms[0, 0] + 30, a40.latency_ms[1, 0] + 30])
    assert result.switches == 2


def test_a_policy_may_leave_workers_idle_but_not_for_ever(a40):
    class First:
        table = a40

        def decide(self, context):
            return (0, 1) if context.worker == 0 else None

    result = served(poisson(100, 2, seed=0), First(), workers=4, decisions=True)
    assert {d.worker for d in result.decisions} == {0}


def test_the_fluid_bound_of_a_steady_load_is_the_hull_there(a40):
    tau0 = 6.26507 / 16
    spaced = np.arange(0, 20_000, tau0 / 8)
    assert fluid_bound(spaced, a40, slo_ms=36.0, workers=8) == pytest.approx(73.822, abs=0.05)
    overload = np.arange(0, 20_000, tau0 / 16)
    assert fluid_bound(overload, a40, slo_ms=36.0, workers=8) == pytest.approx(73.822 / 2, rel=0.01)
    assert fluid_bound(np.arange(0, 2000, 10.0), a40, slo_ms=36.0, workers=8) == pytest.approx(80.158)


def test_no_policy_exceeds_the_fluid_bound(a40):
    for trace in (bursty(3000, 9800, 8, 1, seed=0), poisson(21_000, 0.5, seed=1)):
        bound = fluid_bound(trace, a40, slo_ms=36.0, workers=8)
        assert bound <= fluid_bound(trace, a40, step_ms=7.0, slo_ms=36.0, workers=8) + 1e-9
        for name in ("hullfit", "slackfit:4", "maxbatch", "fixed:0"):
            for rule in ("serve", "drop"):
                result = simulate(trace, a40, make_policy(name, a40, 36.0), 36.0, 8, rule)
                assert result.effective_accuracy <= bound + 1e-9


def cv2(times):
    gaps = np.diff(times)
    return gaps.var() / gaps.mean() ** 2


@pytest.mark.parametrize("seed", [0, 1])
def test_bursty_has_its_rate_and_its_burstiness(seed):
    both = bursty(1000, 4000, 4.0, 60, seed)
    assert len(both) / 60 == pytest.approx(5000, rel=0.02)
    assert np.all(np.diff(both) >= 0)
    assert both[0] >= 0
    assert both[-1] < 60_000
    for wanted in (0.5, 1.0, 4.0, 8.0):
        assert cv2(bursty(0, 4000, wanted, 60, seed)) == pytest.approx(wanted, rel=0.08)
    np.testing.assert_allclose(np.diff(bursty(500, 0, 1.0, 2)), 2.0)
    np.testing.assert_allclose(np.diff(bursty(0, 500, 0.0, 2)), 2.0)


def test_time_varying_ramps_between_its_rates():
    times = time_varying(1000, 5000, 1000, cv2=2.0, lead_s=5, tail_s=10, seed=0) / 1000
    rate = np.histogram(times, [0, 5, 6, 7, 8, 9, 19])[0] / [5, 1, 1, 1, 1, 10]
    assert rate == pytest.approx([1000, 1500, 2500, 3500, 4500, 5000], rel=0.12)
    assert times[-1] <= 19
    down = time_varying(5000, 1000, 4000, cv2=0.0, lead_s=1, tail_s=1)
    assert len(down) == pytest.approx(5000 + 3000 + 1000, abs=2)


def test_seeds_decide():
    for make in (
        lambda seed: bursty(10, 500, 2, 3, seed),
        lambda seed: time_varying(100, 200, 50, seed=seed),
        lambda seed: from_counts([5, 9, 2], 3, seed=seed),
        lambda seed: poisson(100, 3, seed),
    ):
        np.testing.assert_array_equal(make(1), make(1))
        assert len(make(1)) != len(make(2)) or np.any(make(1) != make(2))


def test_counts_become_a_poisson_process_in_every_bin():
    many = from_counts(np.full(100, 50), 100, seed=0)
    in_bins = np.histogram(many, np.arange(101) * 1000.0)[0]
    assert in_bins.var() == pytest.approx(50, rel=0.4)
    assert in_bins.mean() == pytest.approx(50, rel=0.1)
    scaled, clipped = (from_counts([4, 0, 8], 300, 1000, peak_qps=peak) for peak in (None, 1500))
    for times, per_s in ((scaled, [1000, 0, 2000]), (clipped, [1000, 0, 1500])):
        in_bins = np.histogram(times, [0, 1e5, 2e5, 3e5])[0] / 100
        assert in_bins == pytest.approx(per_s, rel=0.02)


def test_timestamps_are_sorted_and_scaled():
    times = from_timestamps([3.0, 1.0, 2.0])
    np.testing.assert_allclose(times, [0, 1, 2])
    squeezed = from_timestamps(np.arange(0, 5000, 7.0), mean_qps=2000)
    assert np.diff(squeezed) == pytest.approx(0.5)


def test_every_shipped_trace_loads_and_names_its_source_and_licence():
    for name in TRACES:
        times = load_trace(name, duration_s=5.0)
        assert len(times) > 5000, name
        assert np.all(np.diff(times) >= 0), name
        assert times[-1] < 5000.0, name
    for name in ("maf", "azure_llm", "servegen"):
        [path] = (files("subnetact") / "data" / "traces").glob(f"{name}*.json")
        notes = json.loads(path.read_text(encoding="utf-8"))
        assert notes["license"]["redistribution_with_attribution"]
        assert notes["attribution"]
        assert all(len(values) > 100 for values in trace_series(name).values())


def test_the_maf_trace_and_the_shipped_profile_are_the_published_ones():
    times, table = load_trace("maf"), superserve_a40()
    assert len(times) / 120 == pytest.approx(6390, rel=0.005)
    assert np.histogram(times, np.arange(0, 120_001, 1000))[0].max() < 8750 * 1.05
    assert (table.latency_ms.shape, table.accuracy[0], table.latency_ms[0, 4]) == ((6, 5), 73.822, 6.26507)
    assert table.latency_ms[5, 1] < table.latency_ms[4, 1]
    assert superserve_a40([1, 32]).batch_sizes == (1, 32)


FORMS = {
    "one per line": ("{}\n", "0 20 2000", {}),
    "comments": ("# ms\n\n{} # first\n", "0 20 2000", {}),
    "a header": ("arrival_ms\n{}\n", "0 20 2000", {}),
    "a unit in the header": ("size,arrival_s\n7,{}\n", "0 0.02 2", {"column": "arrival_s"}),
    "the argument counts": ("arrival_s\n{}\n", "0 20 2000", {"unit": "ms"}),
    "a column without a name": ("{}\t9\n", "0 20000 2000000", {"column": 1, "unit": "us"}),
    "semicolons and quotes": ('"a, b";t\n"x, y";{}\n', "0 20 2000", {"column": 2}),
    "dates": ("time,n\n2026-11-16 18:15:{}Z,1\n", "46 46.02 48", {"column": "time"}),
    "a first column with empty cells": ("user\tarrival_ms\n\t{}\n", "0 20 2000", {"column": "arrival_ms"}),
    "an index without a name": ("\tt\n1\t{}\n", "0 20 2000", {"column": "t"}),
    "numbers and lines in quotes": ('text,t\n"a # b, c\r",{}\n', "0 20 2000", {"column": "t"}),
    "names that begin like numbers": ("t,inference_ms,95th\n{},5,6\n", "0 20 2000", {"column": "t"}),
    "exponents": ("{}\n", "0e0 .2e2 2.0E+3", {}),
    "time zones": ("t\n{}\n", "2026-11-16T00:30:46+02:00 2026-11-15T22:30:46.02Z 2026-11-15T16:30:48-06", {}),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS)
def test_the_times_in_a_file_are_read_in_every_usual_form(form, tmp_path):
    line, times, settings = FORMS[form]
    *header, row, _ = line.split("\n")
    file = tmp_path / "t.csv"
    file.write_text("\n".join([*header, *(row.format(time) for time in times.split())]))
    assert np.allclose(load_trace(str(file), **settings), [0.0, 20.0, 2000.0])
    assert np.allclose(load_trace(str(file), 2.0, **settings), [0.0, 10.0, 1000.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("", {}, "is empty"),
        ("# nothing\n", {}, "is empty"),
        ('""\n', {}, "is empty"),
        (f'text,t\n"{"a" * 200_000}",1\n', {"column": "t"}, "is no CSV or text file .*shorter cells"),
        ("a,b\n1,2\n", {}, "has 2 columns; choose one with column .*: a, b, 1, 2"),
        ("a,b\n1,2\n", {"column": "c"}, "got c"),
        ("1\nabc\n", {}, "column 1 of .* holds no times .*abc"),
        ("a,b\n1,2\n,3\n", {"column": "a"}, "column a of .* holds no times"),
    ],
)
def test_a_file_without_times_is_refused_in_one_error(text, settings, words, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=words):
        load_trace(str(file), **settings)
