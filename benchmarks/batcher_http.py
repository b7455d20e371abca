"""Compares `python -m subnetact.serve` with LitServe running one fixed subnet, with the same client.

All servers are started, and those that are not measured are stopped (SIGSTOP): some poll while they wait.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT
from load_test import ask_server, summary, trace
from tqdm import tqdm

from subnetact.digits import validation_and_test
from subnetact.serve.digits_engine import digits_engine, profiled

SLO_MS = 60.0
RESERVE_MS = 10.0
CV2 = 4.0
LITSERVE = ROOT / "benchmarks" / "litserve_server.py"


def http_section(
    seeds: Sequence[int], seconds: float, rates: Sequence[float], fixed: Sequence[int] = range(6)
) -> dict[str, Any]:
    """Measure every server at every rate and seed, in random order; return medians over the seeds."""
    engine, data = digits_engine(), validation_and_test(3, seed=1)[1]
    engine.tables["cpu"] = profiled(engine)
    images, labels = list(data.images.numpy()), data.labels.tolist()
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bundle = str(Path(folder) / "bundle")
        engine.save(bundle)
        servers = _start(stack, bundle, fixed)
        for url, pid in servers.values():  # the first requests of a server also pay for lazy loading
            with _awake(pid):
                asyncio.run(ask_server(url, images, trace("poisson", 50, 1.0).tolist(), 1e4, body="json"))
        for qps, seed in tqdm([(q, s) for q in rates for s in seeds], desc="over HTTP"):
            arrivals = trace("bursty", qps, seconds, CV2, seed).tolist()
            order = list(servers)
            rng.shuffle(order)
            for name in order:
                url, pid = servers[name]
                with _awake(pid):
                    sent = asyncio.run(
                        ask_server(url, images, arrivals, SLO_MS, reserve_ms=RESERVE_MS, body="json")
                    )
                found = summary(sent, labels, SLO_MS)
                runs.setdefault(f"{qps:g}", {}).setdefault(name, []).append(found)
    return {
        "slo_ms": SLO_MS,
        "reserve_ms": RESERVE_MS,
        "seconds": seconds,
        "cv2": CV2,
        "rates": {
            qps: {name: _medians(found) for name, found in by_name.items()} for qps, by_name in runs.items()
        },
    }


def _start(stack: ExitStack, bundle: str, fixed: Sequence[int]) -> dict[str, tuple[str, int]]:
    """Start every server, wait until it answers, and stop it; return address and process group by name."""
    commands: dict[str, list[str]] = {}
    for where, options in (("threads", []), ("processes", ["--worker-processes"])):
        policies = ["slackfit:4", "hullfit"]
        if where == "processes":
            policies += [f"fixed:{i}" for i in fixed]
        for policy in policies:
            server = ["-m", "subnetact.serve", "--policy", policy, *options]
            commands[f"ours in {where}, {policy}"] = [*server, "--slo-ms", f"{SLO_MS - RESERVE_MS:g}"]
    for i in fixed:
        commands[f"LitServe, fixed {i}"] = [
            str(ROOT / "benchmarks" / "litserve_server.py"),
            "--subnet",
            str(i),
        ]
    servers = {}
    for name, command in commands.items():
        port = _free_port()
        pid = stack.enter_context(_running([*command, "--bundle", bundle, "--port", str(port)]))
        servers[name] = f"http://127.0.0.1:{port}/infer", pid
        _wait_for(f"http://127.0.0.1:{port}/health" + ("z" if name.startswith("ours") else ""))
        os.killpg(pid, signal.SIGSTOP)
    return servers


@contextmanager
def _awake(pid: int) -> Iterator[None]:
    """Let a server that is stopped go on."""
    os.killpg(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGSTOP)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def _running(command: list[str]) -> Iterator[int]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **quiet)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(url: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("attainment", "measured_accuracy", "effective_accuracy", "requests")
    return {
        **{name: median(run[name] for run in found) for name in names},
        "latency_p99_ms": median(run["latency_ms"].get("p99", float("nan")) for run in found),
        "effective_accuracy_by_seed": [run["effective_accuracy"] for run in found],
    }
