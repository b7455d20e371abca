from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, HullFit, SlackFit, make_policy
from subnetact.serving.simulation.simulator import WorkerEvent, simulate
from subnetact.serving.simulation.traces import bursty, poisson

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
