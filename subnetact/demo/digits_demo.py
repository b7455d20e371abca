"""The whole path on the embedded trained supernet: `python -m subnetact.demo`.

The demo loads the supernet that was trained on handwritten digits, repairs the accuracy of its subnets by
calibration, profiles them on this machine, and serves a burst of real digit images under deadlines. The
same arrivals are served three times: with all subnets, and with the largest and the smallest subnet alone.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from subnetact.calibration.calibrate import calibrate
from subnetact.demo.machine_notes import machine_notes, share_of_core
from subnetact.device import machine
from subnetact.digits import Digits, load_digits_supernet, read_digits, validation_and_test
from subnetact.engine.engine import Engine
from subnetact.errors import DeadlinePassed, QueueFull, UncalibratedSubnetWarning
from subnetact.files.documents import write_json
from subnetact.latency.pareto import pareto_front
from subnetact.latency.table import LatencyTable
from subnetact.nas.evaluation import evaluate
from subnetact.nas.search import Candidate
from subnetact.profile.sweep import profile_latency
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies import Fixed, HullFit
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.traces import bursty
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Run", "demonstrate_digits"]

Floats: TypeAlias = npt.NDArray[np.float64]

BATCH_SIZES = (1, 2, 4, 8, 16)
SUBNETS = 8
"""Pareto-optimal subnets that are served."""
PROFILE_MS = 300.0
"""Time spent on every cell of the latency table, in ms, so that slow phases of the machine are seen too."""
BIN_MS = 100.0
"""Width of the bins of the figure, in ms."""


@dataclass(frozen=True)
class Run:
    """What one contender did with the trace.

    Attributes:
        name: the contender.
        in_time: whether each request was answered within the SLO, of shape (requests,).
        right: whether each request was answered in time and with the right label, of shape (requests,).
        accuracy: accuracy in percent that the table promises for the subnet that answered each request in
            time, of shape (requests,); NaN if the request was missed.
        late_ms: how long after its due time the client sent each request, of shape (requests,).
        slowdown: typical latency of a batch, as a multiple of the profiled one.
    """

    name: str
    in_time: npt.NDArray[np.bool_]
    right: npt.NDArray[np.bool_]
    accuracy: Floats
    late_ms: Floats
    slowdown: float

    @property
    def figures(self) -> dict[str, Any]:
        """The run as numbers that JSON can hold; shares in percent of all requests, times in ms."""
        return {
            "name": self.name,
            "requests": len(self.in_time),
            "in_time": 100 * float(self.in_time.mean()),
            "right_and_in_time": 100 * float(self.right.mean()),
            "late_p99_ms": float(np.percentile(self.late_ms, 99)),
            "slowdown": self.slowdown,
        }

    @property
    def row(self) -> str:
        """The run as one line of the printed table."""
        met = max(int(self.in_time.sum()), 1)
        promised = float(self.accuracy[self.in_time].sum()) / met
        return (
            f"{self.name:<26}{100 * self.in_time.mean():>11.2f} %{promised:>12.2f} %"
            f"{100 * self.right.sum() / met:>12.2f} %{100 * self.right.mean():>13.2f} %"
        )


def demonstrate_digits(
    plt: Any,
    out: Path,
    seconds: float,
    seed: int,
    candidates: int = 40,
    profile_ms: float = PROFILE_MS,
    report: Path | None = None,
) -> None:
    """Take the whole path on the embedded supernet for digits, print tables and draw a figure.

    Args:
        plt: matplotlib's pyplot.
        out: file of the figure.
        seconds: length of the trace, in s.
        seed: seed of candidates, digits and arrivals.
        candidates: number of subnets to choose from.
        profile_ms: time spent on every cell of the latency table, in ms.
        report: file for the figures as JSON. If None, there is none.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    supernet = load_digits_supernet()
    parameters = sum(p.numel() for p in supernet.parameters())
    print(f"Supernet: {supernet.space}, {parameters:,} parameters. Machine: {_machine()}")
    training, _ = read_digits(seed)
    pool = torch.split(training.images[:600], 200)
    validation, test = validation_and_test(3, seed)

    specs = supernet.space.sample(random.Random(seed), candidates)
    shown = [specs[0], *specs[2:6], specs[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        before = evaluate(supernet, shown, [test])
    calibrate(supernet, specs, pool)
    print("\nAccuracy on held-out digits (%), one set of weights:")
    print(f"{'shared statistics':>20}{'SubnetNorm':>14}   subnet")
    for shared, own, spec in zip(before, evaluate(supernet, shown, [test]), shown, strict=True):
        print(f"{shared:>20.1f}{own:>14.1f}   {spec}")

    front = _front(supernet, specs, validation)
    engine = Engine(supernet, [c.spec for c in front], example=test.images[:1])
    share = [share_of_core()]
    table = profile_latency(
        engine, BATCH_SIZES, [c.accuracy for c in front], statistic="p90", min_time_ms=profile_ms
    )
    print(f"\nPareto set of {len(specs)} candidates, profiled here (p90 latency in ms):")
    print("  accuracy  " + "".join(f"{f'batch {b}':>10}" for b in BATCH_SIZES) + "   subnet")
    for key, percent, cells in zip(table.subnets, table.accuracy, table.latency_ms, strict=True):
        print(f"{percent:>8.1f} % " + "".join(f"{ms:>10.2f}" for ms in cells) + f"   {key}")

    slo_ms, arrivals_ms, burst_qps, capacity_qps = _trace(table, seconds, seed)
    print(
        f"\nServing {len(arrivals_ms):,} digit images live, SLO {slo_ms:.0f} ms. Burst: {burst_qps:.0f}/s; "
        f"the largest subnet alone sustains {capacity_qps:.0f}/s."
    )
    policies: list[tuple[str, Policy]] = [
        ("HullFit, all subnets", HullFit(table, slo_ms=slo_ms)),
        ("fixed, largest subnet", Fixed(table, len(front) - 1)),
        ("fixed, smallest subnet", Fixed(table, 0)),
    ]
    runs = []
    gc.collect()
    gc.freeze()  # a full collection that visits all objects of torch would stop the server for tens of ms
    try:
        for name, policy in policies:
            runs.append(asyncio.run(_serve(name, policy, engine, test, arrivals_ms, slo_ms)))
            share.append(share_of_core())
    finally:
        gc.unfreeze()
    print(f"{'policy':<26}{'in time':>13}{'profiled':>14}{'measured':>14}{'right+in time':>15}")
    for run in runs:
        print(run.row)
    print(
        "in time: share of all requests that were answered within the SLO (SLO attainment). profiled: mean\n"
        "accuracy that the table promises for those. measured: share of those that carry the right label.\n"
        "right+in time: share of all requests that were answered within the SLO with the right label."
    )
    for note in machine_notes(runs, share, slo_ms):
        print(f"NOTE: {note}")
    _draw(plt, out, runs, arrivals_ms, capacity_qps)
    print(f"Figure: {out}")
    if report is not None:
        found = {
            "machine": machine(torch.device("cpu")),
            "seed": seed,
            "slo_ms": slo_ms,
            "burst_qps": burst_qps,
            "capacity_qps": capacity_qps,
            "share_of_core": share,
            "notes": machine_notes(runs, share, slo_ms),
            "contenders": [run.figures for run in runs],
        }
        write_json(report, found)


def _machine() -> str:
    facts = machine(torch.device("cpu"))
    return f"{facts['device_name']}, {facts['cpus']} CPUs, torch {facts['torch']}, 1 thread"


def _front(supernet: Supernet, specs: list[SubnetSpec], data: Digits) -> list[Candidate]:
    """Evaluate every candidate and keep at most SUBNETS Pareto-optimal ones, spread over latency."""
    engine = Engine(supernet, specs, example=data.images[:1])
    quick = profile_latency(engine, [8], warmup_ms=5, min_time_ms=30)
    candidates = [
        Candidate(spec, percent, float(ms))
        for spec, percent, ms in zip(
            specs, evaluate(supernet, specs, [data]), quick.latency_ms[:, 0], strict=True
        )
    ]
    front = pareto_front(candidates, cost=lambda c: c.latency_ms, gain=lambda c: c.accuracy)
    kept = {round(i) for i in np.linspace(0, len(front) - 1, min(SUBNETS, len(front)))}
    return [front[i] for i in sorted(kept)]


def _trace(table: LatencyTable, seconds: float, seed: int) -> tuple[float, Floats, float, float]:
    """Choose the SLO and the rates from the profile: lulls the largest subnet can serve, a burst it cannot.

    The burst stays below half of what the smallest subnet sustains, so that the machine may become slower
    after it was profiled.
    """
    throughput = [
        max(1e3 * b / ms for b, ms in zip(BATCH_SIZES, cells, strict=True)) for cells in table.latency_ms
    ]
    slo_ms = max(40.0, math.ceil(3.0 * table.latency_ms[-1][BATCH_SIZES.index(8)]))
    lull, burst = 0.35 * throughput[-1], min(2.0 * throughput[-1], 0.45 * throughput[0])
    burst = max(burst, 1.2 * throughput[-1])
    third = seconds / 3
    parts = [
        third * 1e3 * i + bursty(0.5 * qps, 0.5 * qps, 4.0, third, seed + i)
        for i, qps in enumerate((lull, burst, lull))
    ]
    return slo_ms, np.concatenate(parts), burst, throughput[-1]


async def _serve(
    name: str, policy: Policy, engine: Engine, data: Digits, arrivals_ms: Floats, slo_ms: float
) -> Run:
    """Send the trace in real time; a request never waits for an earlier one's answer.

    The batcher gets the profile and nothing else: it learns in service what batches really take. Labels are
    compared after the trace, because every operation of the client on a tensor would wait for the
    interpreter's lock, which the server needs.
    """
    count = len(arrivals_ms)
    in_time, right = np.zeros(count, bool), np.zeros(count, bool)
    accuracy, late_ms = np.full(count, np.nan), np.zeros(count)
    images, outputs = list(data.images), dict[int, Any]()

    async def one(i: int) -> None:
        try:
            answer = await batcher.infer(images[i % len(images)], deadline_ms=slo_ms)
        except (DeadlinePassed, QueueFull):
            return
        if answer.met:
            outputs[i], accuracy[i] = answer.output, answer.accuracy

    async with Batcher(engine, policy=policy, slo_ms=slo_ms) as batcher:
        started = time.perf_counter()
        tasks = []
        for i, due_ms in enumerate(arrivals_ms):
            delay = started + due_ms / 1e3 - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            late_ms[i] = (time.perf_counter() - started) * 1e3 - due_ms
            tasks.append(asyncio.create_task(one(i)))
        await asyncio.gather(*tasks)
        slowdown, _ = batcher.corrections.drift()
    met = list(outputs)
    in_time[met] = True
    if met:
        labels = data.labels[torch.tensor(met) % len(images)]
        right[met] = (torch.stack(list(outputs.values())).argmax(1) == labels).numpy()
    return Run(name, in_time, right, accuracy, late_ms, slowdown)


def _draw(plt: Any, path: Path, runs: Sequence[Run], arrivals_ms: Floats, capacity_qps: float) -> None:
    """Draw arrivals, and for every contender accuracy and misses per bin of BIN_MS."""
    figure, axes = plt.subplots(
        3, 1, figsize=(9, 7.5), sharex=True, constrained_layout=True, height_ratios=(1, 2, 1.3)
    )
    edges = np.arange(0, arrivals_ms[-1] + BIN_MS, BIN_MS)
    which = np.minimum(np.searchsorted(edges, arrivals_ms, side="right") - 1, len(edges) - 2)
    counts = np.bincount(which, minlength=len(edges) - 1)
    seconds = edges / 1e3
    axes[0].stairs(counts / (BIN_MS / 1e3), seconds, fill=True, color="tab:gray")
    axes[0].axhline(capacity_qps, color="tab:red", ls="--", label="the largest subnet sustains")
    axes[0].set_ylabel("arrivals\nper second")
    axes[0].legend(loc="upper right")
    for run, color in zip(runs, ("tab:blue", "tab:red", "tab:green"), strict=True):
        _draw_run(axes[1], axes[2], run, which, counts, seconds, color)
    axes[1].set_ylabel("accuracy of what was\nanswered in time (%)")
    axes[1].legend(loc="lower right")
    axes[2].set_ylabel("missed (%)")
    axes[2].set_xlabel("seconds")
    ours = runs[0]
    axes[0].set_title(
        f"All subnets: {100 * ours.in_time.mean():.1f} % of {len(arrivals_ms):,} requests in time, "
        f"{100 * ours.right.mean():.1f} % right and in time\n"
        f"largest alone: {100 * runs[1].in_time.mean():.1f} % and {100 * runs[1].right.mean():.1f} %; "
        f"smallest alone: {100 * runs[2].in_time.mean():.1f} % and {100 * runs[2].right.mean():.1f} %",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_run(
    accuracy: Axes,
    missed: Axes,
    run: Run,
    which: npt.NDArray[np.intp],
    counts: npt.NDArray[np.intp],
    seconds: Floats,
    color: str,
) -> None:
    bins = len(counts)
    met = np.bincount(which, weights=run.in_time, minlength=bins)
    total = np.bincount(which, weights=np.nan_to_num(run.accuracy), minlength=bins)
    middle = (seconds[:-1] + seconds[1:]) / 2
    mean = np.where(met > 0, total / np.maximum(met, 1), np.nan)
    share = np.where(counts > 0, 100 * (1 - met / np.maximum(counts, 1)), np.nan)
    accuracy.plot(middle, mean, color=color, lw=1.5, label=run.name)
    bad = share > 0
    accuracy.scatter(middle[bad], mean[bad], marker="x", s=18 + share[bad] / 3, color=color, lw=1.2)
    missed.plot(middle, share, color=color, lw=1.5)
