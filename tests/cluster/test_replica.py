"""One replica and the central queue's runner, without Ray."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from subnetact import Batcher, Engine, SlackFit
from subnetact.cluster.arrays import to_arrays, to_tensors
from subnetact.cluster.central import RemoteRunner
from subnetact.cluster.deadline import Deadline
from subnetact.cluster.forecast import ReplicaReport
from subnetact.cluster.replica import SENDERS, EngineReplica
from subnetact.errors import FileFormatError
from subnetact.serve.source import Source
from subnetact.serving import Answer


@pytest.fixture(scope="module")
def source(digits_bundle):
    return Source(bundle=digits_bundle, slo_ms=1e7, policy="slackfit:2")


@pytest.fixture(scope="module")
def replica(source):
    replica = EngineReplica(source)
    yield replica
    replica.close()


IMAGES = torch.rand(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def ask(replica, images=IMAGES, deadline_ms=1e7, sender="test", **more):
    rows = [to_arrays(image) for image in images]
    return asyncio.run(replica.answer(rows, tuple(Deadline.after(deadline_ms)), sender, **more))


def test_answers_are_the_engines(replica):
    reply = ask(replica, min_accuracy=80.0)
    assert not reply.error
    expected = replica.engine(IMAGES, subnet=1)
    for row, fields in zip(expected, reply.answers, strict=True):
        answer = Answer(*fields)
        assert isinstance(answer.output, np.ndarray)
        assert np.allclose(answer.output, row.numpy(), atol=5e-4)
        assert (answer.subnet, answer.accuracy, answer.met) == (1, 82.0, True)


@pytest.mark.parametrize("central", [False, True])
def test_a_new_replica_has_run_every_batch_size_before_it_gets_requests(source, central, monkeypatch):
    ran, run = set(), Engine._run
    monkeypatch.setattr(Engine, "_run", lambda self, subnet, x: (ran.add(len(x)), run(self, subnet, x))[1])
    EngineReplica(source, central=central)
    assert ran >= {1, 8}


@pytest.mark.parametrize(
    ("images", "more", "error"),
    [
        (IMAGES, {"deadline_ms": -1.0}, "DeadlinePassed"),
        (IMAGES, {"min_accuracy": 99.0}, "InvalidRequest"),
        (torch.zeros(1, 1, 16, 15), {}, "InvalidRequest"),
    ],
)
def test_errors_are_returned(replica, images, more, error):
    reply = ask(replica, images, **more)
    assert reply.error == error
    assert reply.message
    assert not reply.answers


def test_the_report_counts_the_inputs_of_every_sender(replica):
    ask(replica, sender="one")
    ask(replica, IMAGES[:2], sender="two")
    ask(replica, deadline_ms=-1.0, sender="two")
    first, second = (ReplicaReport.read(replica.record_routing_stats()) for _ in range(2))
    assert second.number == first.number + 1
    assert (second.received["one"], second.received["two"]) == (5, 7)
    assert second.received == second.finished
    assert (second.queued, second.running, second.free_ms) == (0, 0, 0.0)
    correction = replica.batcher.stats().correction
    assert second.per_input_ms == pytest.approx(4.0 / 8 * correction, rel=0.2)
    assert second.one_ms == pytest.approx(1.0 * correction, rel=0.2)


def test_senders_that_are_long_gone_are_forgotten(replica):
    for i in range(SENDERS + 50):
        ask(replica, IMAGES[:1], deadline_ms=-1.0, sender=f"gone {i}")
    report = ReplicaReport.read(replica.record_routing_stats())
    assert len(report.received) == SENDERS
    assert len(replica._finished) <= SENDERS


def test_figures_for_autoscaling_are_of_the_time_since_the_last_call(replica):
    replica.record_autoscaling_stats()
    ask(replica, min_accuracy=80.0)
    found = replica.record_autoscaling_stats()
    assert found["arrivals_per_s"] > 0
    assert (found["attainment"], found["accuracy"]) == (1.0, pytest.approx(82.0))
    again = replica.record_autoscaling_stats()
    assert again == {"arrivals_per_s": 0.0, "attainment": 1.0, "accuracy": 82.0}
    replica.check_health()


def test_what_was_not_answered_in_time_counts_for_autoscaling(replica):
    """Two requests come too late, one does not fit any subnet, and the sender refused 20 inputs by itself."""
    replica.record_autoscaling_stats()
    ask(replica)
    for more in ({"deadline_ms": -1.0}, {"deadline_ms": 1e-3, "turned_away": 20}, {"min_accuracy": 99.0}):
        assert ask(replica, **more).error
    found = replica.record_autoscaling_stats()
    assert found["attainment"] == 5 / 35
    assert replica.record_autoscaling_stats()["attainment"] == 1.0


def test_a_replica_of_a_central_queue_only_runs_batches(source):
    replica = EngineReplica(source, central=True)
    assert replica.record_routing_stats() == {} == replica.record_autoscaling_stats()
    replica.check_health()
    outputs = asyncio.run(replica.run(1, [to_arrays(x) for x in IMAGES], 8))
    assert np.allclose(np.stack(outputs), replica.engine(IMAGES, subnet=1).numpy(), atol=5e-4)


class Lost(Exception):
    pass


def test_a_central_queue_retries_the_batch_of_a_replica_that_died(source):
    """Each runner sends its batches away; the first batch is lost with its replica."""
    engine = source.engine(mapped=True)
    lost = []

    def run(subnet, inputs, batch_size):
        if not lost:
            lost.append(len(inputs))
            raise Lost
        return [to_arrays(y) for y in engine.run(subnet, [to_tensors(x) for x in inputs], batch_size)]

    table = engine.tables["cpu"]
    runners = [RemoteRunner(engine, run, (Lost,)) for _ in range(2)]
    policy = SlackFit(table, slo_ms=1e7)
    with Batcher(runners, policy=policy, check_finite=True) as batcher:
        futures = [batcher.submit(x, 1e7, min_accuracy=80.0) for x in IMAGES]
        outputs = torch.stack([future.result(30).output for future in futures])
        stats = batcher.stats()
    assert torch.allclose(outputs, engine(IMAGES, subnet=1), atol=5e-4)
    assert (stats.met, stats.retried, stats.died) == (5, lost[0], 1)


def test_a_sender_that_was_forgotten_is_not_counted_again(replica, monkeypatch):
    """Each of them is forgotten before its answer comes."""
    monkeypatch.setattr("subnetact.cluster.replica.SENDERS", 2)
    row = [to_arrays(IMAGES[0])]

    async def ask_all():
        deadline = tuple(Deadline.after(1e7))
        return await asyncio.gather(*(replica.answer(row, deadline, f"sender {i}") for i in range(6)))

    assert not any(reply.error for reply in asyncio.run(ask_all()))
    assert set(replica._finished) <= set(replica._received)


def test_trees_of_tensors_travel_as_arrays():
    x = {"a": torch.arange(3), "b": (torch.ones(2), [torch.zeros(1, dtype=torch.bfloat16)])}
    sent = to_arrays(x)
    assert isinstance(sent["a"], np.ndarray)
    sent["b"][0].flags.writeable = False  # as arrays from shared memory are
    back = to_tensors(sent)
    assert torch.equal(back["a"], x["a"])
    assert torch.equal(back["b"][0], x["b"][0])
    assert back["b"][1][0].dtype == torch.bfloat16
    back["b"][0].add_(1)
    assert sent["b"][0].tolist() == [1.0, 1.0]


def test_a_replica_refuses_a_bundle_that_was_replaced(source, tmp_path):
    """A replica that starts later, after a crash for example, must not serve other weights."""
    bundle = tmp_path / "bundle"
    shutil.copytree(source.bundle, bundle)
    pinned = replace(source, bundle=str(bundle)).pinned()
    EngineReplica(pinned).close()
    engine = pinned.engine()
    with torch.no_grad():
        engine.supernet.network.classifier.bias.add_(1.0)
    engine.verify(refresh=True)
    engine.save(bundle)
    with pytest.raises(FileFormatError, match="replaced"):
        EngineReplica(pinned)
    EngineReplica(pinned.pinned()).close()


def test_weights_that_are_written_over_end_the_replica(source, tmp_path):
    """Saving the bundle again makes new files, which do not matter; writing into its files does."""
    bundle = tmp_path / "digits"
    shutil.copytree(source.bundle, bundle)
    replica = EngineReplica(replace(source, bundle=str(bundle)))
    try:
        expected = replica.engine(IMAGES, subnet=1)
        replica.engine.save(bundle)
        replica.check_health()
        assert torch.equal(replica.engine(IMAGES, subnet=1), expected)
    finally:
        replica.close()
    replica = EngineReplica(replace(source, bundle=str(bundle)))
    try:
        with (bundle / "weights.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"half")
        with pytest.raises(FileFormatError, match="written over"):
            replica.check_health()
    finally:
        replica.close()
