"""Exported repositories on a real Triton server, with concurrent clients (tritonclient, http and grpc).

The server is the one that nvidia-pytriton bundles: its core and its Python backend. It has no libtorch
backend; `libtorch_backend.py` stands in for that one, under its name and with the exported config.pbtxt as
it is, so that what is seen here is Triton's own parsing, scheduling and dynamic batching.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_exports import digits_engine

from subnetact import Engine, LatencyTable
from subnetact.export import to_triton

ENVIRONMENT = os.environ.get("SUBNETACT_TRITON_ENV", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ENVIRONMENT, reason="needs a server: tests/export/triton_env.sh DIR, SUBNETACT_TRITON_ENV=DIR"
    ),
]
HERE = Path(__file__).parent
IMAGES = torch.randn(48, 1, 16, 16, generator=torch.Generator().manual_seed(1))
Request = dict[str, Any]
Answer = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return digits_engine(IMAGES)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A running server."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.python = Path(ENVIRONMENT).absolute() / "bin" / "python"
        (site,) = self.python.parent.parent.glob("lib/python3*/site-packages")
        bundled = site / "pytriton" / "tritonserver"
        backends = folder / "backends"
        shutil.copytree(bundled / "backends" / "python", backends / "python")
        stub = bundled / "python_backend_stubs" / site.parent.name.removeprefix("python")
        (backends / "python" / "triton_python_backend_stub").symlink_to(stub / "triton_python_backend_stub")
        (backends / "pytorch").mkdir()
        shutil.copy(HERE / "libtorch_backend.py", backends / "pytorch" / "model.py")
        self.folder, self.log = folder, folder / "server.log"
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        binary = bundled / "bin" / "tritonserver"
        options = [f"--model-repository={repository}", f"--backend-directory={backends}"]
        for name, port in self.ports.items():
            options += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
        options += ["--model-control-mode=explicit", "--disable-auto-complete-config"]
        options += [f"--load-model={name}" for name in ("coded", "deadlines", "example")]
        path = f"{self.python.parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [binary, *options], stdout=log, stderr=log, cwd=folder, env=environment
            )

    def get(self, path: str, post: bool = False) -> Any:
        url = f"http://127.0.0.1:{self.ports['http']}/v2/{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, data=b"{}" if post else None), timeout=60
        ) as r:
            return json.loads(r.read() or "null")

    def metrics(self, model: str) -> dict[str, float]:
        """Return Triton's metrics of a model: the name and the labels that matter, and the number."""
        url = f"http://127.0.0.1:{self.ports['metrics']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            lines = response.read().decode().splitlines()
        found: dict[str, float] = {}
        for name, labels, number in re.findall(r"^(\w+)\{(.*)\} (\S+)$", "\n".join(lines), re.MULTILINE):
            if f'model="{model}"' in labels:
                values = re.findall(r'(?:outcome|subnet)="(.*?)"', labels)
                key = " ".join([name, *values])
                found[key] = found.get(key, 0.0) + float(number)
        return found

    def wait(self) -> None:
        end = time.monotonic() + 90
        while time.monotonic() < end and self.process.poll() is None:
            try:
                return self.get("health/ready") or None
            except OSError:
                time.sleep(0.2)
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def ask(self, requests: list[Request], protocol: str) -> list[Answer]:
        """Send all requests at once from twelve threads of another process."""
        arrays: dict[str, Any] = {}
        for i, request in enumerate(requests):
            for name, (array, kind) in request["inputs"].items():
                arrays[f"{i}.{name}"] = array
                request["inputs"][name] = [f"{i}.{name}", kind]
        sent, received = self.folder / "requests.npz", self.folder / "answers.npz"
        np.savez(sent, job=np.array(json.dumps(requests)), **arrays)
        client = [self.python, HERE / "triton_client.py", protocol, f"127.0.0.1:{self.ports[protocol]}"]
        subprocess.run([*client, sent, received], check=True, timeout=120)
        answers: list[Answer] = [{} for _ in requests]
        with np.load(received) as found:
            for key in found:
                i, name = key.split(".", 1)
                answers[int(i)][name] = found[key]
        return answers


@pytest.fixture(scope="module")
def server(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    table = LatencyTable(
        engine.keys, [60.0, 70.0, 80.0], [1, 4], [[50.0, 51.0], [60.0, 61.0], [9_000.0, 9_500.0]]
    )
    to_triton(engine, repository, name="coded", max_batch_size=8, queue_delay_us=20_000)
    # Requests that are sent one after another get the best subnet that their deadlines permit from SlackFit;
    # HullFit would count how many arrive, and save time for more at the made-up latencies.
    to_triton(engine, repository, "python", name="deadlines", table=table, slo_ms=20_000, policy="slackfit")
    saved = tmp_path_factory.mktemp("saved") / "bundle"
    engine.tables["scheduler"] = table
    engine.save(saved)
    options = ["--bundle", saved, "--repository", repository, "--name", "example", "--slo-ms", "20000"]
    example = [sys.executable, "examples/triton_repository.py", *options]
    root = HERE.parent.parent
    subprocess.run(example, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True, timeout=120)
    # Triton's Python ignores PYTHONPATH, and finds what lies beside model.py.
    for version in repository.glob("*_batcher/1"):
        for package in ("subnetact", "ofa_adapters"):
            (version / package).symlink_to(root / package)
    config = repository / "deadlines_batcher" / "config.pbtxt"
    text = config.read_text()
    assert '"learn": true' in text
    config.write_text(text.replace('"learn": true', '"learn": false'))  # the made-up latencies must decide
    shutil.copytree(repository / "coded", repository / "broken")
    config = repository / "broken" / "config.pbtxt"
    config.write_text(config.read_text().replace("TYPE_BOOL dims: [ -1 ]", "TYPE_BOOL dims: [ -2 ]"))
    running = Server(repository, tmp_path_factory.mktemp("server"))
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(60)


@pytest.fixture
def coded() -> Callable[..., Request]:
    def make(x: torch.Tensor, subnet: int) -> Request:
        code = np.zeros((len(x), subnet + 1), dtype=np.bool_)
        inputs = {"INPUT__0": (x.numpy(), "FP32"), "INPUT__1": (code, "BOOL")}
        return {"model": "coded", "inputs": inputs, "outputs": ["OUTPUT__0"], "parameters": {}}

    return make


def deadlines(x: torch.Tensor, **parameters: Any) -> Request:
    inputs = {"INPUT__0": (x.numpy(), "FP32")}
    outputs = ["OUTPUT__0", "SUBNET", "MET"]
    return {"model": "deadlines", "inputs": inputs, "outputs": outputs, "parameters": parameters}


def close(answer: Answer, want: torch.Tensor) -> bool:
    return "error" not in answer and bool(
        torch.allclose(torch.from_numpy(answer["OUTPUT__0"]), want, atol=5e-5, rtol=1e-3)
    )


def test_the_server_accepts_the_configs_and_would_refuse_others(server: Server) -> None:
    assert server.get("models/coded/config")["max_batch_size"] == 8
    assert server.get("models/deadlines/config")["platform"] == "ensemble"
    assert server.get("models/deadlines_batcher/config")["backend"] == "python"
    with pytest.raises(urllib.error.HTTPError):
        server.get("repository/models/broken/load", post=True)
    assert "'broken': model input 'INPUT__1' dimension must be integer" in server.log.read_text()


def test_the_examples_repository_is_served(server: Server, engine: Engine) -> None:
    asked = {**deadlines(IMAGES[:3], deadline_ms=20_000, min_accuracy=79), "model": "example"}
    [answer] = server.ask([asked], "http")
    assert answer["SUBNET"].ravel().tolist() == [2, 2, 2]
    assert close(answer, engine(IMAGES[:3], subnet=2))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_concurrent_clients_with_mixed_subnets(
    server: Server, engine: Engine, coded: Callable[..., Request], protocol: str
) -> None:
    subnets = [(i // 4) % 3 for i in range(len(IMAGES))]
    answers = server.ask([coded(x[None], i) for x, i in zip(IMAGES, subnets, strict=True)], protocol)
    for x, subnet, answer in zip(IMAGES, subnets, answers, strict=True):
        assert close(answer, engine(x[None], subnet=subnet)), answer.get("error")
    batches = [json.loads(b) for b in re.findall(r"LIBTORCH-BATCH (.*)", server.log.read_text())]
    assert max(map(len, batches)) > 1, "Triton formed no batch; nothing was shown"
    assert all(len({tuple(shape) for shape in batch}) == 1 for batch in batches)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_deadlines_choose_the_subnet(server: Server, engine: Engine, protocol: str) -> None:
    requests = [
        deadlines(IMAGES[:1]),
        deadlines(IMAGES[1:2], deadline_ms=8_000),
        deadlines(IMAGES[2:5], deadline_ms=7_000),
        deadlines(IMAGES[5:6], min_accuracy=75),
        deadlines(IMAGES[6:7], deadline_ms=1),
        deadlines(IMAGES[7:8], deadline_ms="soon"),
    ]
    alone = [server.ask([request], protocol)[0] for request in requests]
    assert alone[0]["SUBNET"].tolist() == [[2]]
    assert alone[1]["SUBNET"].tolist() == [[1]]
    assert set(alone[2]["SUBNET"].flatten().tolist()) <= {0, 1}
    assert alone[3]["SUBNET"].tolist() == [[2]]
    assert "DeadlinePassed" in str(alone[4]["error"])
    assert "InvalidRequest: deadline_ms" in str(alone[5]["error"])
    for start, answer in zip((0, 1, 2, 5), alone[:4], strict=True):
        for row, subnet in enumerate(answer["SUBNET"][:, 0]):
            one = {"OUTPUT__0": answer["OUTPUT__0"][row : row + 1]}
            assert close(one, engine(IMAGES[start + row][None], subnet=int(subnet)))


def test_refusals_are_failures_and_the_batchers_metrics_are_tritons(server: Server) -> None:
    time.sleep(0.5)  # Metrics are reported every 100 ms, also those of the test before.
    before = server.metrics("deadlines"), server.metrics("deadlines_batcher")
    requests = [
        deadlines(IMAGES[:3]),
        deadlines(IMAGES[:1], deadline_ms=1),
        deadlines(IMAGES[:1], min_acuracy=50),
        deadlines(IMAGES[:2], min_accuracy=99),
        {**deadlines(IMAGES[:1]), "timeout": 1},
        {**deadlines(IMAGES[:1]), "timeout": 8_000_000, "priority": 1},
    ]
    answers = [
        server.ask([{**request, "inputs": dict(request["inputs"])}], protocol)[0]
        for request in requests
        for protocol in ("http", "grpc")
    ]
    assert answers[0]["SUBNET"].tolist() == [[2]] * 3
    assert answers[10]["SUBNET"].tolist() == answers[11]["SUBNET"].tolist() == [[1]]
    assert all("DeadlinePassed" in str(answers[i]["error"]) for i in (2, 3, 8, 9))
    assert "'min_acuracy' is not known" in str(answers[4]["error"])
    time.sleep(0.5)
    after = server.metrics("deadlines"), server.metrics("deadlines_batcher")

    def grown(which: int, name: str) -> float:
        return after[which][name] - before[which].get(name, 0.0)

    assert grown(0, "nv_inference_request_success") == 4
    # This server counts every failure of an ensemble twice.
    assert grown(0, "nv_inference_request_failure") in (8, 16)
    assert grown(1, "subnetact_requests_total met") == 8
    assert grown(1, "subnetact_requests_total dropped") == 4
    assert grown(1, "subnetact_refused_total") == 2
    assert grown(1, "subnetact_served_total 1") == 2
    assert grown(1, "subnetact_accuracy_ratio_sum") == pytest.approx(6 * 0.8 + 2 * 0.7)
