"""One replica, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from subnetact import Engine, LatencyTable
from subnetact.cluster.autoscaler import Autoscaling, input_ms_at_floor, replicas_needed
from subnetact.cluster.replica import EngineReplica, to_arrays, to_tensors
from subnetact.errors import DeadlinePassed, FileFormatError, InvalidRequest, ServeError
from subnetact.serve.base_app import unix_ms
from subnetact.serve.source import Source


@pytest.fixture(scope="module")
def source(digits_bundle):
    return Source(bundle=digits_bundle, slo_ms=1e7, policy="slackfit:2")


@pytest.fixture(scope="module")
def clock():
    return [1000.0]


@pytest.fixture(scope="module")
def replica(source, clock):
    replica = EngineReplica(source, input_ms=3.0, clock_ms=lambda: clock[0])
    yield replica
    replica.close()


IMAGES = torch.rand(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def ask(replica, images=IMAGES, left_ms=1e7, due_in_ms=1e7, **more):
    rows = [to_arrays(image) for image in images]
    return asyncio.run(replica.answer(rows, left_ms, unix_ms() + due_in_ms, **more))


def test_answers_are_the_engines(replica):
    reply = ask(replica, min_accuracy=80.0)
    expected = replica.engine(IMAGES, subnet=1)
    for row, answer in zip(expected, reply, strict=True):
        assert isinstance(answer.output, np.ndarray)
        assert np.allclose(answer.output, row.numpy(), atol=5e-4)
        assert (answer.subnet, answer.accuracy, answer.met) == (1, 82.0, True)


def test_a_new_replica_has_run_every_batch_size_before_it_gets_requests(source, monkeypatch):
    ran, run = set(), Engine.__call__
    monkeypatch.setattr(
        Engine, "__call__", lambda self, x, subnet: (ran.add(len(x)), run(self, x, subnet))[1]
    )
    EngineReplica(source).close()
    assert ran >= {1, 8}


@pytest.mark.parametrize(
    ("images", "more", "error"),
    [
        (IMAGES, {"due_in_ms": -1.0}, DeadlinePassed),  # on the way, or by a clock that is ahead
        (IMAGES, {"left_ms": 1e-3}, DeadlinePassed),  # a clock that is behind gives no time
        (IMAGES, {"min_accuracy": 99.0}, InvalidRequest),
        (torch.zeros(1, 1, 16, 15), {}, InvalidRequest),
    ],
)
def test_errors_are_returned(replica, images, more, error):
    reply = pickle.loads(pickle.dumps(ask(replica, images, **more)))
    assert type(reply) is error
    assert str(reply)


def test_the_load_is_the_share_of_the_time_that_inputs_take_at_the_floor(replica, clock):
    replica.record_autoscaling_stats()
    ask(replica)
    ask(replica, due_in_ms=-1.0)
    clock[0] += 2000.0
    correction = replica.batcher.stats().correction
    assert replica.record_autoscaling_stats()["load"] == pytest.approx(10 * 3.0 * correction / 2000.0)
    clock[0] += 2000.0
    assert replica.record_autoscaling_stats() == {"load": 0.0}
    replica.check_health()


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
    bundle = shutil.copytree(source.bundle, tmp_path / "bundle")
    pinned = replace(source, bundle=str(bundle)).pinned()
    EngineReplica(pinned).close()
    engine = pinned.engine()
    with torch.no_grad():
        engine.supernet.network.classifier.bias.add_(1.0)
    engine.supernet.refresh()
    engine.save(bundle)
    with pytest.raises(FileFormatError, match="replaced"):
        EngineReplica(pinned)
    EngineReplica(pinned.pinned()).close()


def test_weights_that_are_written_over_end_the_replica(source, tmp_path):
    """Saving the bundle again makes new files, which do not matter; writing into its files does."""
    bundle = shutil.copytree(source.bundle, tmp_path / "digits")
    for again in (True, False):
        with contextlib.closing(EngineReplica(replace(source, bundle=str(bundle)))) as replica:
            expected = replica.engine(IMAGES, subnet=1)
            if again:
                replica.engine.save(bundle)
                replica.check_health()
                assert torch.equal(replica.engine(IMAGES, subnet=1), expected)
                continue
            with (bundle / "model.safetensors").open("r+b") as file:
                file.seek(-4, 2)
                file.write(b"half")
            with pytest.raises(FileFormatError, match="written over"):
                replica.check_health()


TABLE = LatencyTable(["small", "large"], [70.0, 80.0], [1, 2, 4, 8], [[5, 6, 8, 12], [20, 30, 50, 90]])


@pytest.mark.parametrize(
    ("slo_ms", "floor", "found"),
    [
        (200.0, 60.0, 12 / 8),
        (200.0, 70.0, 12 / 8),
        (200.0, 75.0, 90 / 8),
        (150.0, 75.0, 50 / 4),  # a batch of 8 would take more than half of the SLO
    ],
)
def test_an_input_at_the_floor_takes_its_share_of_the_fastest_batch(slo_ms, floor, found):
    assert input_ms_at_floor(TABLE, slo_ms, floor) == found


@pytest.mark.parametrize(("slo_ms", "floor"), [(200.0, 80.5), (30.0, 75.0)])
def test_a_floor_that_no_batch_reaches_in_time_is_refused(slo_ms, floor):
    with pytest.raises(ServeError, match=r"the best has 80 %; give a lower floor"):
        input_ms_at_floor(TABLE, slo_ms, floor)


def test_no_replica_gets_more_than_seven_tenths_of_what_it_can_and_none_comes_and_goes():
    context, running = SimpleNamespace(target_num_replicas=2, aggregated_metrics=None), []
    assert replicas_needed(context) == (2, {})
    loads = {(): 2, (0.0, 0.0): 1, (0.2, 0.3): 1, (0.7, 0.7): 2, (0.7, 0.71): 3, (3.0, 0.0): 5}
    for load, found in loads.items():
        context.aggregated_metrics = {"load": dict(enumerate(load))}
        assert replicas_needed(context) == (found, {})
    context.target_num_replicas = 1
    for load in (0.68, 0.72, 0.66, 0.72, 0.55, 0.51, 0.49):
        context.aggregated_metrics = {"load": {"all": load}}
        context.target_num_replicas, _ = replicas_needed(context)
        running.append(context.target_num_replicas)
    assert running == [1, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("counts", [{"least": 0}, {"least": 4, "most": 2}])
def test_bounds_that_contradict_each_other_are_refused(counts):
    with pytest.raises(ServeError, match="autoscaling: from"):
        Autoscaling(accuracy_floor=70.0, **counts)
