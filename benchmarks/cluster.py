"""Compares ways to serve pages of 16 digits from replicas, and kills replicas.

python benchmarks/cluster.py --only live --seeds 0     (needs the extra `ray`; minutes per seed)
python benchmarks/cluster.py --only faults
python benchmarks/cluster.py --report
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import ROOT, Run, options_of, run, table
from load_test import HttpClient, Reply, Sent, run_open_loop, trace

from subnetact import profile_latency
from subnetact.digits import validation_and_test
from subnetact.serve.digits_engine import digits_engine

HERE = ROOT / "benchmarks"
PAGE = 16
SIZES = (1, 4, 16, 32, 64)
SLO_MS = 250.0
RESERVE_MS = 10.0
CV2 = 4.0
RATES = (10.0, 20.0, 40.0, 80.0)
SECONDS = 12.0
KILL_S = 10.0
OURS = ("cluster_server.py", "ours", "--slo-ms", f"{SLO_MS - RESERVE_MS:g}")
SERVERS: dict[str, tuple[str, ...]] = {
    "ours, 2 threads": ("-m", "subnetact.serve", "--workers", "2", "--slo-ms", f"{SLO_MS - RESERVE_MS:g}"),
    "ours, 2 processes": (
        *("-m", "subnetact.serve", "--workers", "2", "--worker-processes"),
        *("--slo-ms", f"{SLO_MS - RESERVE_MS:g}"),
    ),
    "ours, Ray, 1 replica of 2 threads": (*OURS, "--replicas", "1", "--threads", "2"),
    "ours, Ray, 2 replicas": OURS,
    "plain Ray Serve, subnet 0": ("cluster_server.py", "plain", "--subnet", "0"),
    "plain Ray Serve, subnet 3": ("cluster_server.py", "plain", "--subnet", "3"),
    "plain Ray Serve, subnet 5": ("cluster_server.py", "plain", "--subnet", "5"),
}
FAULTY = "ours, Ray, 2 replicas"


class Pages:
    """Digits that no subnet has seen, 16 per page, as bodies of requests."""

    def __init__(self) -> None:
        data = validation_and_test(3, seed=1)[1]
        count = len(data.images) // PAGE
        images = data.images[: count * PAGE].numpy().reshape(count, PAGE, 1, 16, 16)
        self.labels = data.labels[: count * PAGE].numpy().reshape(count, PAGE)
        self.npy = [_npy(page) for page in images]
        tensor: dict[str, Any] = {"name": "input", "shape": [PAGE, 1, 16, 16], "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": PAGE * 1024}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        self.head = len(head)
        self.protocol = [head + page.astype("<f4").tobytes() for page in images]


def _npy(page: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, page)
    return file.getvalue()


async def ask_pages(
    url: str, ours: bool, pages: Pages, arrivals: Sequence[float], slo_ms: float
) -> list[tuple[Sent, int]]:
    """Send pages in an open loop; return what became of each, and how many of its digits were right."""
    right: dict[int, int] = {}

    async def send(i: int, left_ms: float) -> Reply:
        k = i % len(pages.npy)
        if ours:
            wishes = {"x_deadline_ms": f"{left_ms:.3f}", "inference_header_content_length": str(pages.head)}
            body = await client.post(pages.protocol[k], **wishes)
            size = PAGE * 10 * 4
            facts = json.loads(body[: len(body) - size])["parameters"]
            scores = np.frombuffer(body[len(body) - size :], "<f4").reshape(PAGE, 10)
            reply = Reply(0, 0, facts["accuracy"])
        else:
            scores = np.load(io.BytesIO(await client.post(pages.npy[k])), allow_pickle=False)
            reply = Reply(0, 0, 0.0)
        right[i] = int((scores.argmax(1) == pages.labels[k]).sum())
        return reply

    async with HttpClient(f"{url}/v2/models/digits/infer" if ours else f"{url}/pages") as client:
        sent = await run_open_loop(arrivals, send, slo_ms - RESERVE_MS)
    return [(one, right.get(i, 0)) for i, one in enumerate(sent)]


def summarise(found: Sequence[tuple[Sent, int]], slo_ms: float) -> dict[str, Any]:
    """Return attainment, the digits that were right among the pages in time, and among all pages."""
    met = [n for sent, n in found if _in_time(sent, slo_ms)]
    outcomes = Counter(sent.outcome.partition(":")[0] for sent, _ in found)
    latencies = [sent.latency_ms for sent, _ in found if sent.reply is not None]
    return {
        "pages": len(found),
        "attainment": 100 * len(met) / len(found),
        "right": 100 * sum(met) / (PAGE * max(1, len(met))),
        "right_in_time": 100 * sum(met) / (PAGE * len(found)),
        "latency_p50_ms": float(np.percentile(latencies, 50)) if latencies else None,
        "latency_p99_ms": float(np.percentile(latencies, 99)) if latencies else None,
        "outcomes": dict(outcomes),
    }


@contextmanager
def running(command: Sequence[str], bundle: str) -> Iterator[tuple[str, int]]:
    """Start a server; yield its address and its process id."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    program = [str(HERE / command[0]), *command[1:]] if command[0].endswith(".py") else list(command)
    named = ["--name", "digits"] if command[0] == "-m" else []
    process = subprocess.Popen(
        [sys.executable, *program, "--bundle", bundle, "--port", str(port), *named],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("listening on"):
                break
        else:
            raise RuntimeError(f"{command}: the server did not start")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def saved_bundle() -> Iterator[str]:
    """Profile the digits engine for batches up to four pages and save the bundle."""
    torch.set_num_threads(1)
    engine = digits_engine()
    engine.prepare(SIZES)
    accuracy = [float("nan") if known is None else known for known in engine.accuracy]
    engine.tables["cpu"] = profile_latency(
        engine, SIZES, accuracy, statistic="p90", warmup_ms=5, min_time_ms=60
    )
    with tempfile.TemporaryDirectory() as folder:
        bundle = str(Path(folder) / "digits")
        engine.save(bundle)
        yield bundle


def live_section(seeds: Sequence[int], names: Sequence[str], rates: Sequence[float]) -> list[dict[str, Any]]:
    """Measure every server at every rate, one server at a time."""
    pages, results = Pages(), []
    with saved_bundle() as bundle:
        order = list(names)
        random.Random(seeds[0]).shuffle(order)
        for name in order:
            with running(SERVERS[name], bundle) as (url, _):
                ours = name.startswith("ours")
                warm = trace("poisson", 15, 2.0).tolist()
                asyncio.run(ask_pages(url, ours, pages, warm, 1e4))
                for seed in seeds:
                    for rate in rates:
                        arrivals = trace("bursty", rate, SECONDS, CV2, seed).tolist()
                        found = summarise(asyncio.run(ask_pages(url, ours, pages, arrivals, SLO_MS)), SLO_MS)
                        results.append({"server": name, "rate": rate, "seed": seed, **found})
                        print(name, rate, {k: v for k, v in found.items() if k != "pages"}, flush=True)
    return results


def faults_section(seed: int, rate: float = 10.0, seconds: float = 60.0) -> dict[str, Any]:
    """Kill a replica every 10 s for 60 s; every page has to be answered once, or refused by a typed error."""
    pages = Pages()
    found: dict[str, Any] = {"rate": rate, "seconds": seconds, "deadline_ms": 1000.0, "every_s": KILL_S}
    with saved_bundle() as bundle, running(SERVERS[FAULTY], bundle) as (url, pid):
        asyncio.run(ask_pages(url, True, pages, trace("poisson", 15, 2.0).tolist(), 1e4))
        arrivals = trace("poisson", rate, seconds, seed=seed).tolist()
        for name, kills in (("without", False), ("with", True)):
            killed: list[int] = []

            async def run(kills: bool = kills, killed: list[int] = killed) -> list[tuple[Sent, int]]:
                task = asyncio.create_task(_kill_replicas(pid, killed)) if kills else None
                try:
                    return await ask_pages(url, True, pages, arrivals, 1000.0)
                finally:
                    if task is not None:
                        task.cancel()

            found[name] = {**summarise(asyncio.run(run()), 1000.0), "killed": len(killed)}
            print(name, found[name], flush=True)
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as response:
            lines = response.read().decode().splitlines()
        found["retried"] = sum(
            float(line.split()[-1]) for line in lines if line.startswith("subnetact_retried_total")
        )
    return found


def _in_time(sent: Sent, slo_ms: float) -> bool:
    return sent.reply is not None and sent.latency_ms <= slo_ms


async def _kill_replicas(pid: int, killed: list[int]) -> None:
    rng = random.Random(0)
    while True:
        await asyncio.sleep(KILL_S / 2 if not killed else KILL_S)
        alive = [child for child in _children(pid) if _title(child).startswith("ray::ServeReplica")]
        if alive:
            victim = rng.choice(alive)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)


def _children(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        waiting += (below := parents.get(waiting.pop(), []))
        found += below
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def report(results: dict[str, Any]) -> list[str]:
    """Return the lines of results/cluster.md."""
    lines: list[str] = []
    live = results.get("live", [])
    rates = sorted({run["rate"] for run in live})
    if live:
        rows = []
        for name in dict.fromkeys([*SERVERS, *(run["server"] for run in live)]):
            runs = [[r for r in live if r["server"] == name and r["rate"] == rate] for rate in rates]
            rows.append([name, *map(_cell, runs)])
        lines += table(["server", *(f"{rate:g} pages/s" for rate in rates)], rows)
    faults = results.get("faults")
    if faults:
        lines += ["", f"{faults['rate']:g} pages/s for {faults['seconds']:g} s, due in 1 s:", ""]
        for how in ("without", "with"):
            run = faults[how]
            lines.append(
                f"* {run['killed']} replicas killed: {run['attainment']:.1f} % of {run['pages']} pages in "
                f"time, latency p99 {run['latency_p99_ms']:.0f} ms, {run['outcomes']}"
            )
    return lines


def _cell(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return "-"
    middle: Callable[[str], float] = lambda key: median(run[key] for run in runs)  # noqa: E731
    found = f"{middle('attainment'):.1f} / {middle('right'):.1f} / **{middle('right_in_time'):.1f}**"
    return found if len(runs) == 1 else f"{found} ({len(runs)})"


def live(this: Run) -> None:
    """Measure servers, and keep what is known of others, and of other seeds and rates."""
    chosen = {name: set(getattr(this.args, f"{name}s")) for name in ("server", "seed", "rate")}
    kept = [run for run in this.known.get("live", []) if any(run[k] not in v for k, v in chosen.items())]
    this.known["live"] = kept + live_section(this.args.seeds, this.args.servers, this.args.rates)


def faults(this: Run) -> dict[str, Any]:
    return faults_section(this.args.seeds[0])


def main() -> None:
    parts = {"live": live, "faults": faults}
    parser = options_of(__doc__, "cluster", parts)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="pages per second")
    parser.add_argument("--servers", nargs="+", default=[*SERVERS], choices=[*SERVERS])
    run(parser, "cluster", parts, report, ["ray", "numpy"], machine_of_each=False)


if __name__ == "__main__":
    main()
