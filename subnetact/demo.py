"""The whole path on the embedded trained supernet: `python -m subnetact.demo`.

Loads the supernet trained on handwritten digits, repairs the accuracy of its subnets, profiles them on
this machine, and serves a burst of real digit images under deadlines, next to two fixed networks.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subnetact.calibration.calibrate import calibrate
from subnetact.device import machine
from subnetact.digits import (
    Digits,
    distort,
    load_digits_supernet,
    read_digits,
)
from subnetact.engine.engine import Engine
from subnetact.errors import RequestError, UncalibratedSubnetWarning
from subnetact.latency.table import LatencyTable
from subnetact.nas.search import Candidate
from subnetact.pareto import pareto_front
from subnetact.profile.sweep import profile_latency
from subnetact.serving.live.batcher import Batcher, Decided
from subnetact.serving.policies import Fixed, SlackFit
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.traces import bursty
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["main"]

BATCH_SIZES = (1, 2, 4, 8, 16)
SERVED = 8


@dataclass(frozen=True)
class Run:
    """What one policy did with the trace."""

    name: str
    requests: int
    met: int
    profiled: float
    right: int
    decisions: list[Decided]
    started_ms: float

    @property
    def row(self) -> str:
        """The run as one line of the table."""
        return (
            f"{self.name:<26}{100 * self.met / self.requests:>11.2f} %{self.profiled:>12.2f} %"
            f"{100 * self.right / max(self.met, 1):>12.2f} %{100 * self.right / self.requests:>13.2f} %"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0."""
    parser = argparse.ArgumentParser("python -m subnetact.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("subnetact_demo.png"), help="where to draw")
    parser.add_argument("--candidates", type=int, default=40, help="subnets to choose from")
    parser.add_argument("--seconds", type=float, default=9.0, help="length of the trace")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if not args.out.parent.is_dir() or args.seconds <= 0 or args.candidates < 2:
        parser.error("--out needs a folder that exists, --seconds a positive number, --candidates at least 2")
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)  # the client shares the interpreter with the server
    try:
        _demonstrate(args)
    finally:
        torch.set_num_threads(threads)
        sys.setswitchinterval(interval)
    return 0


def _demonstrate(args: argparse.Namespace) -> None:
    supernet = load_digits_supernet()
    parameters = sum(p.numel() for p in supernet.parameters())
    print(f"Supernet: {supernet.space}, {parameters:,} parameters. Machine: {_machine()}")
    training, held_out = read_digits()
    generator = torch.Generator().manual_seed(args.seed)
    pool = [distort(part, generator) for part in torch.split(training.images[:600], 200)]
    validation = _views_of(Digits(held_out.images[::2], held_out.labels[::2]), 3, generator)
    test = _views_of(Digits(held_out.images[1::2], held_out.labels[1::2]), 3, generator)

    specs = supernet.space.sample(args.seed, args.candidates)
    shown = [specs[0], *specs[2:6], specs[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        before = [_accuracy(supernet, spec, test) for spec in shown]
    calibrate(supernet, specs, pool)
    print("\nAccuracy on held-out digits (%), one set of weights:")
    print(f"{'shared statistics':>20}{'SubnetNorm':>14}   subnet")
    for shared, spec in zip(before, shown, strict=True):
        print(f"{shared:>20.1f}{_accuracy(supernet, spec, test):>14.1f}   {spec}")

    front = _front(supernet, specs, validation)
    engine = Engine(supernet, [c.spec for c in front], example=test.images[0])
    table = profile_latency(
        engine, BATCH_SIZES, [c.accuracy for c in front], statistic="p90", min_time_ms=120
    )
    print(f"\nPareto set of {len(specs)} candidates, profiled here (p90 latency in ms):")
    print("  accuracy  " + "".join(f"{f'batch {b}':>10}" for b in BATCH_SIZES) + "   subnet")
    for key, percent, row in zip(table.subnets, table.accuracy, table.latency_ms, strict=True):
        print(f"{percent:>8.1f} % " + "".join(f"{ms:>10.2f}" for ms in row) + f"   {key}")

    slo_ms, arrivals_ms, burst_qps, capacity_qps = _trace(table, args.seconds, args.seed)
    print(
        f"\nServing {len(arrivals_ms):,} digit images live, SLO {slo_ms:.0f} ms. Burst: {burst_qps:.0f}/s; "
        f"the largest subnet alone sustains {capacity_qps:.0f}/s."
    )
    policies: list[tuple[str, Policy]] = [
        ("SlackFit, all subnets", SlackFit(table, slo_ms=slo_ms, margin_ms=2.0, margin=0.3)),
        ("fixed, largest subnet", Fixed(table, len(front) - 1)),
        ("fixed, smallest subnet", Fixed(table, 0)),
    ]
    runs = [asyncio.run(_serve(name, policy, engine, test, arrivals_ms, slo_ms)) for name, policy in policies]
    print(f"{'policy':<26}{'in time':>13}{'profiled':>14}{'measured':>14}{'effective':>15}")
    for run in runs:
        print(run.row)
    print(
        "in time: answered within the SLO, of all requests. profiled: mean accuracy the table promises for\n"
        "those. measured: how many of those carry the right label. effective: right and in time, of all."
    )
    _draw(args.out, table, runs[0], arrivals_ms, capacity_qps)
    print(f"Figure: {args.out}")


def _machine() -> str:
    facts = machine(torch.device("cpu"))
    return f"{facts['device_name']}, {facts['cpus']} CPUs, torch {facts['torch']}, 1 thread"


def _views_of(data: Digits, copies: int, generator: torch.Generator) -> Digits:
    images = torch.cat([distort(data.images, generator) for _ in range(copies)])
    return Digits(images, data.labels.repeat(copies))


def _accuracy(supernet: Supernet, spec: SubnetSpec, data: Digits) -> float:
    with torch.inference_mode():
        right = supernet(data.images, subnet=spec).argmax(1) == data.labels
    return 100 * float(right.float().mean())


def _front(supernet: Supernet, specs: list[SubnetSpec], data: Digits) -> list[Candidate]:
    """Evaluate every candidate and keep at most SERVED Pareto-optimal ones, spread over latency."""
    engine = Engine(supernet, specs, example=data.images[0])
    quick = profile_latency(engine, [8], warmup_ms=5, min_time_ms=30)
    candidates = [
        Candidate(spec, _accuracy(supernet, spec, data), float(ms))
        for spec, ms in zip(specs, quick.latency_ms[:, 0], strict=True)
    ]
    front = pareto_front(candidates, cost=lambda c: c.latency_ms, gain=lambda c: c.accuracy)
    kept = {round(i) for i in np.linspace(0, len(front) - 1, min(SERVED, len(front)))}
    return [front[i] for i in sorted(kept)]


def _trace(
    table: LatencyTable, seconds: float, seed: int
) -> tuple[float, np.ndarray[Any, Any], float, float]:
    """Choose SLO and rates from the profile: lulls the largest subnet can serve, and a burst it cannot."""
    throughput = [
        max(1e3 * b / ms for b, ms in zip(BATCH_SIZES, row, strict=True)) for row in table.latency_ms
    ]
    slo_ms = max(20.0, math.ceil(2.5 * table.latency_ms[-1][BATCH_SIZES.index(8)]))
    lull, burst = 0.4 * throughput[-1], min(2.0 * throughput[-1], 0.6 * throughput[0])
    burst = max(burst, 1.3 * throughput[-1])
    third = seconds / 3
    parts = [
        third * 1e3 * i + bursty(0.5 * qps, 0.5 * qps, 4.0, third, seed + i)
        for i, qps in enumerate((lull, burst, lull))
    ]
    return slo_ms, np.concatenate(parts), burst, throughput[-1]


async def _serve(
    name: str, policy: Policy, engine: Engine, data: Digits, arrivals_ms: np.ndarray[Any, Any], slo_ms: float
) -> Run:
    """Send the trace in real time; a request never waits for an earlier one's answer."""
    decisions: list[Decided] = []
    served: list[tuple[bool, float]] = []

    async def one(i: int) -> None:
        try:
            answer = await batcher.infer(images[i % len(images)], deadline_ms=slo_ms)
        except RequestError:
            return
        if answer.met:
            right = int(answer.output.argmax()) == labels[i % len(labels)]
            served.append((right, answer.accuracy))

    images, labels = list(data.images), data.labels.tolist()
    async with Batcher(
        engine, policy=policy, slo_ms=slo_ms, on_decision=decisions.append, learn=False
    ) as batcher:  # SlackFit is given margins of its own
        started = time.perf_counter()
        tasks = []
        for i, due_ms in enumerate(arrivals_ms):
            delay = started + due_ms / 1e3 - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(i)))
        await asyncio.gather(*tasks)
    profiled = float(np.mean([accuracy for _, accuracy in served])) if served else 0.0
    right = sum(right for right, _ in served)
    return Run(name, len(arrivals_ms), len(served), profiled, right, decisions, started * 1e3)


def _draw(
    path: Path, table: LatencyTable, run: Run, arrivals_ms: np.ndarray[Any, Any], capacity_qps: float
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True, constrained_layout=True)
    width = 0.1
    bins = np.arange(0, arrivals_ms[-1] / 1e3 + width, width)
    counts, edges = np.histogram(arrivals_ms / 1e3, bins)
    axes[0].stairs(counts / width, edges, fill=True, color="tab:gray")
    axes[0].axhline(capacity_qps, color="tab:red", ls="--", label="capacity of the largest subnet")
    axes[0].set_ylabel("arrivals per second")
    axes[0].legend(loc="upper right")
    seconds = [(d.t_ms - run.started_ms) / 1e3 for d in run.decisions]
    axes[1].scatter(seconds, [table.accuracy[d.subnet] for d in run.decisions], s=4, color="tab:blue")
    axes[1].set_ylabel("accuracy of the\nchosen subnet (%)")
    axes[2].scatter(seconds, [d.k for d in run.decisions], s=4, color="tab:green")
    axes[2].set_ylabel("batch")
    axes[2].set_xlabel("seconds")
    axes[0].set_title(
        f"{run.name}: {100 * run.met / run.requests:.2f} % of {run.requests:,} requests in time"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
