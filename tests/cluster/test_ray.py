"""Replicas on a Ray cluster of two nodes on this machine: answers, a replica that is killed, the end."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from subnetact import Engine
from subnetact.errors import DeadlinePassed, MissingExtra, MissingFile, QueueFull, ServeError
from subnetact.serve.source import Source

ray_serve = pytest.importorskip(
    "subnetact.cluster.ray_serve", reason="needs Ray Serve: the extra `ray`", exc_type=MissingExtra
)
from subnetact.cluster import Autoscaling, build_app  # noqa: E402
from subnetact.cluster.application import ReplicaCount, app_from, client_of  # noqa: E402

ray, serve = ray_serve.ray, ray_serve.serve
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


IMAGES = torch.rand(24, 1, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(digits_bundle):
    return Source(bundle=digits_bundle, slo_ms=1e7, policy="slackfit:2")


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes with one replica's worth of CPU each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # On a busy machine, 5 s are too short.
    small = {"object_store_memory": 80 * 2**20, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    cluster.add_node(**small)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": _free_port()})
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def _free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def deployed(nodes, source):
    """Two replicas, one per node, with their HTTP interface: (port, handle of the replicas)."""
    texts = {"slo_ms": "1e7", "policy": source.policy, "replicas": "2", "cpus": "1.0", "name": "digits"}
    app = app_from({"bundle": source.bundle, **texts})  # as `serve run` calls it
    serve.run(app, name="digits", route_prefix="/digits")
    details = serve.status().proxies
    assert details
    port = ray.get(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve").get_http_config.remote()).port
    return port, serve.get_deployment_handle("replicas", "digits")


def call(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body if body is None else json.dumps(body), headers or {})
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()
    finally:
        connection.close()


def replica_pids():
    """Process ids and nodes of the replicas, by name."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in found if "digits#replicas#" in actor["name"]]
    pids = {}
    for name in names:
        try:
            actor = ray.get_actor(name, namespace="serve")
            pids[name] = ray.get(actor.__ray_call__.remote(lambda self: (os.getpid(), _node())), timeout=60)
        except Exception:
            continue
    return pids


def _node():
    return ray.get_runtime_context().get_node_id()


def mapped_weights(pid):
    """Bytes of the weights' file that a process maps, and those of them that it has copied."""
    mapped = copied = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = "model.safetensors" in line
        elif inside and line.startswith("Rss:"):
            mapped += int(line.split()[1]) * 1024
        elif inside and line.startswith(("Private_Dirty:", "Anonymous:")):
            copied += int(line.split()[1]) * 1024
    return mapped, copied


def test_the_http_interface_is_that_of_the_server(deployed, source):
    port, _ = deployed
    engine = Engine.load(source.bundle)
    expected = engine(IMAGES, subnet=1)
    for image, scores in zip(IMAGES[:4], expected, strict=False):
        body = {
            "input": image.flatten().tolist(),
            "deadline_ms": 30_000,
            "min_accuracy": 80,
            "output": "values",
        }
        status, _, text = call(port, "POST", "/digits/infer", body)
        answer = json.loads(text)
        assert (status, answer["subnet"], answer["met"]) == (200, 1, True)
        assert torch.allclose(torch.tensor(answer["output"]), scores, atol=1e-3)
    tensor = {"name": "input", "shape": [3, 1, 16, 16], "datatype": "FP32", "data": IMAGES[:3].tolist()}
    status, _, text = call(port, "POST", "/digits/v2/models/digits/infer", {"inputs": [tensor]})
    assert status == 200
    assert json.loads(text)["outputs"][0]["shape"] == [3, 10]
    assert call(port, "GET", "/digits/readyz")[0] == 200
    assert b"subnetact_submitted_total" in call(port, "GET", "/digits/metrics")[2]
    assert b"/infer" in call(port, "GET", "/digits/openapi.json")[2]
    assert b"<html" in call(port, "GET", "/digits/")[2]


def test_bad_requests_get_the_servers_errors(deployed):
    port, _ = deployed
    for body, status in (({"input": [1, 2]}, 400), ({"input": [0] * 256, "deadline_ms": 1e-4}, 504)):
        assert call(port, "POST", "/digits/infer", body)[0] == status
    assert call(port, "POST", "/digits/infer", {"input": [0] * 256, "min_accuracy": 99})[0] == 400
    assert call(port, "GET", "/digits/infer")[0] == 405


def test_replicas_of_both_nodes_share_the_weights_of_the_bundle(deployed):
    pids = replica_pids()
    assert len({node for _, node in pids.values()}) == 2
    for pid, _ in pids.values():
        mapped, copied = mapped_weights(pid)
        assert mapped > 500_000
        assert copied < mapped / 20


@pytest.fixture
def client(deployed, source):
    _, handle = deployed
    count = ReplicaCount("digits", 2)
    yield client_of(handle, source, source.engine(mapped=True), count)
    count.close()


def served():
    """Inputs that every replica has answered, by its name."""
    actors = {name: ray.get_actor(name, namespace="serve") for name in replica_pids()}
    return {name: ray.get(actor.__ray_call__.remote(_answered)) for name, actor in actors.items()}


def _answered(actor):
    stats = actor._replica_impl._user_callable_wrapper._callable.batcher.stats()
    return stats.met + stats.late


def test_a_burst_is_spread_and_what_cannot_be_in_time_is_not_served(client):
    before = served()

    async def burst():
        rows = [list(IMAGES[:4])] * 30
        return await asyncio.gather(*(client.infer_rows(xs, 1e7) for xs in rows))

    answers = asyncio.run(burst())
    assert all(len(rows) == 4 for rows in answers)
    after = served()
    assert sum(after.values()) - sum(before.values()) == 120
    assert all(after[name] > before[name] for name in before)

    async def too_short():
        return await asyncio.gather(
            *(client.infer_rows(list(IMAGES[:4]), 0.4) for _ in range(5)), return_exceptions=True
        )

    errors = asyncio.run(too_short())
    assert {type(error) for error in errors} == {DeadlinePassed}


def test_a_replica_that_is_killed_costs_no_request(client):
    """SIGKILL under load: every request has one outcome, and none is lost."""
    pids = replica_pids()
    victim = next(iter(pids.values()))[0]

    async def load():
        async def one(i):
            await asyncio.sleep(i * 0.02)
            if i == 50:
                os.kill(victim, signal.SIGKILL)
            return await client.infer_rows(list(IMAGES[i % 24 : i % 24 + 1]), 1e7)

        return await asyncio.gather(*(one(i) for i in range(150)), return_exceptions=True)

    results = asyncio.run(load())
    failed = [result for result in results if isinstance(result, BaseException)]
    assert not failed
    assert len(results) == 150
    end = time.monotonic() + 120
    while len(replica_pids().keys() - {n for n, (pid, _) in pids.items() if pid == victim}) < 2:
        assert time.monotonic() < end, "the replica was not replaced"
        time.sleep(0.5)


def test_replicas_follow_the_load(nodes, deployed, slow_bundle):
    """Accuracy gives way until its floor, a second replica comes and takes requests, and one goes again."""
    source = Source(bundle=slow_bundle, slo_ms=400.0)
    scaling = Autoscaling(accuracy_floor=78.0, most=2, patience_s=2.0)
    serve.delete("digits")
    app = build_app(source, autoscaling=scaling, cpus=0.5)
    serve.run(app, name="digits", route_prefix="/scaled")
    handle = serve.get_deployment_handle("replicas", "digits")
    count = ReplicaCount("digits", 1)
    client = client_of(handle, source, source.engine(mapped=True), count)
    images = list(torch.rand(8, 1, 64, 64))
    outcomes: Counter[str] = Counter()
    pause_s = [0.25]  # between two requests of a sender; empty at the end of the flood

    async def ask(deadline_ms, least=None):
        outcomes["sent"] += 1
        try:
            assert len(await client.infer_rows(images, deadline_ms, min_accuracy=least)) == 8
            outcomes["answered"] += 1
        except (QueueFull, DeadlinePassed):
            outcomes["refused"] += 1

    async def flood(first):
        await asyncio.sleep(first)
        while pause_s:
            await ask(400.0)
            await asyncio.sleep(sum(pause_s))

    async def until(condition):
        end = time.monotonic() + 180
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < end, (condition.__name__, count(), outcomes)
            await asyncio.sleep(0.2)

    def both_work():
        return count() == (2, 2) and sum(answered > 0 for answered in served().values()) == 2

    async def main():
        senders = [asyncio.ensure_future(flood(0.02 * i)) for i in range(12)]
        try:
            await until(lambda: count()[1] == 2)
            pause_s[0] = 1.0
            await until(both_work)
        finally:
            pause_s.clear()
            await asyncio.gather(*senders)
        busy = client.stats().mean_accuracy
        before = outcomes["answered"], outcomes["sent"]
        task = asyncio.ensure_future(until(lambda: count() == (1, 1)))
        while not task.done():
            await ask(10_000.0, 80.0)
            await asyncio.sleep(0.2)
        await task
        assert outcomes["answered"] - before[0] == outcomes["sent"] - before[1]  # the end of one costs none
        return busy

    try:
        assert asyncio.run(main()) < 82.0
    finally:
        count.close()
        serve.delete("digits")
    assert outcomes["answered"] + outcomes["refused"] == outcomes["sent"]
    stats = client.stats()
    assert stats.met + stats.late == 8 * outcomes["answered"]
    assert (stats.failed, stats.queued) == (0, 0)


@pytest.mark.parametrize("scale", [{"replicas": 4}, {"autoscaling": Autoscaling(70.0, most=4)}])
def test_no_request_waits_before_a_front_could_refuse_it(source, scale):
    """A front refuses inputs beyond `max_queue` per replica, so Ray must hand all requests to the front."""
    front = build_app(source, max_queue=50, **scale)._bound_deployment
    assert front.max_ongoing_requests >= 4 * 50 + 50
    assert front.max_queued_requests >= 1000


def test_settings_that_contradict_each_other_are_refused(source, tmp_path, monkeypatch):
    with pytest.raises(ServeError, match="no subnet reaches 90 %"):
        build_app(source, autoscaling=Autoscaling(accuracy_floor=90.0))
    with pytest.raises(ServeError, match="unexpected keyword argument 'queue'"):
        app_from({"bundle": source.bundle, "queue": "central"})
    with pytest.raises(ServeError, match="unexpected keyword argument 'floor'"):
        app_from({"bundle": source.bundle, "autoscaling": {"floor": 70.0}})
    with pytest.raises(MissingFile):
        build_app(tmp_path / "none")
    build_app(source, autoscaling=Autoscaling(accuracy_floor=70.0, most=2))
    monkeypatch.setattr("ray.__version__", "2.61.0")
    with pytest.raises(MissingExtra, match=r"2\.61\.0"):
        importlib.reload(ray_serve)
