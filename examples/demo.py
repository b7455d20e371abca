"""Serve a burst of requests live on an embedded model, beside fixed subnets, and draw a figure.

    python examples/demo.py [--seconds 9] [--seed 0] [--out FIGURE] [--json FILE]

The demo loads the supernet that was trained on handwritten digits, repairs the accuracy of its subnets by
calibration, profiles them on this machine, and serves a burst of real digit images under deadlines. The same
arrivals are served several times: with all subnets, and with single ones.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from subnetact.calibration.calibrate import calibrate
from subnetact.command import reported, run_command
from subnetact.device import machine
from subnetact.digits import Digits, load_digits_supernet, read_digits, validation_and_test
from subnetact.engine.engine import Engine
from subnetact.errors import DeadlinePassed, QueueFull, TraceError, UncalibratedSubnetWarning
from subnetact.files.documents import write_json
from subnetact.latency.arrays import Floats
from subnetact.latency.pareto import pareto_front
from subnetact.latency.plot import need_matplotlib
from subnetact.latency.table import LatencyTable
from subnetact.nas.evaluation import evaluate
from subnetact.nas.search import Candidate
from subnetact.profile.sweep import BATCH_SIZES, profile_latency
from subnetact.serving import Fixed, HullFit
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.traces import bursty
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

SUBNETS = 8  # Pareto-optimal ones that are served
PROFILE_MS = 300.0  # per cell of the latency table, so that slow phases of the machine are seen too
BUSY_SHARE = 0.9  # of a core; a computing thread that gets less shares the machine with other work
DRIFT = 1.5  # times the profiled latency of batches, or its inverse, mean another machine
COLORS = ("tab:blue", "tab:red", "tab:green", "tab:orange")


@dataclass(frozen=True)
class Run:
    """What one contender did with the items of a trace: requests or tokens."""

    name: str
    accuracy: Floats  # in percent, as profiled, of the subnet of every item in time; NaN for the others
    right: Floats  # whether every item came in time and right, or how likely
    late_ms: Floats  # how long after its due time the client sent every request
    slowdown: float  # typical latency of a batch, as a multiple of the profiled one
    more: Mapping[str, float] = field(default_factory=dict)  # further shares, in percent

    @property
    def in_time(self) -> npt.NDArray[np.bool_]:
        """Whether every item came in time."""
        return ~np.isnan(self.accuracy)

    @property
    def shares(self) -> dict[str, float]:
        """The columns of the printed table, in percent."""
        promised = float(np.nansum(self.accuracy)) / max(int(self.in_time.sum()), 1)
        in_time, score = 100 * float(self.in_time.mean()), 100 * float(self.right.mean())
        return {"in time": in_time, "profiled": promised, **self.more, "right and in time": score}

    @property
    def figures(self) -> dict[str, Any]:
        """The run as numbers that JSON can hold."""
        shares = {name.replace(" ", "_"): share for name, share in self.shares.items()}
        known = {"name": self.name, "items": len(self.in_time), "slowdown": self.slowdown}
        return {**known, **shares, "late_p99_ms": float(np.percentile(self.late_ms, 99))}


@dataclass(frozen=True)
class Trace:
    """When items are due or arrive, in ms, and what subnets alone sustain, in items per second."""

    due_ms: Floats
    slo_ms: float
    sustained: Mapping[str, float]
    bin_ms: float = 100.0  # of the figure


def header(supernet: Supernet) -> dict[str, Any]:
    """Print the supernet and the machine; return the facts of the machine."""
    facts = machine(torch.device("cpu"))
    parameters = sum(p.numel() for p in supernet.parameters())
    print(f"Supernet: {supernet.space}, {parameters:,} parameters. Machine: {facts['device_name']}, ", end="")
    print(f"{facts['cpus']} CPUs, torch {facts['torch']}, 1 thread")
    return facts


def lulls_and_burst(
    lull: float, burst: float, seconds: Sequence[float], seed: int, steady: float = 0.5, cv2: float = 4.0
) -> Floats:
    """Return arrivals, in ms, of a lull, a burst and a lull, from rates per second."""
    parts = [
        1e3 * sum(seconds[:i]) + bursty(steady * qps, (1 - steady) * qps, cv2, seconds[i], seed + i)
        for i, qps in enumerate((lull, burst, lull))
    ]
    found: Floats = np.concatenate(parts)
    if not len(found):
        raise TraceError(f"no request arrives within {sum(seconds):g} s; serve for longer")
    return found


def serve(arrivals_ms: Floats, submit: Callable[[int, float], Any]) -> tuple[list[Any], Floats]:
    """Call `submit(number, beginning in s)` in real time; return answers, None if dropped, and delays in ms.

    A request that fails for another reason than its deadline or a full queue raises here.
    """
    sent: dict[int, Any] = {}
    answers: list[Any] = [None] * len(arrivals_ms)
    late_ms = np.zeros(len(arrivals_ms))
    begun = time.perf_counter()
    for i, due_ms in enumerate(arrivals_ms):
        time.sleep(max(0.0, begun + due_ms / 1e3 - time.perf_counter()))
        late_ms[i] = 1e3 * (time.perf_counter() - begun) - due_ms
        with suppress(QueueFull):
            sent[i] = submit(i, begun)
    for i, one in sent.items():
        with suppress(DeadlinePassed, QueueFull):
            answers[i] = one.result()
    return answers, late_ms


def share_of_core(seconds: float = 0.2) -> float:
    """Return the share of a core that a thread gets which does nothing but compute."""
    wall, own = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < seconds:
        sum(range(1000))
    return (time.thread_time() - own) / (time.perf_counter() - wall)


def machine_notes(runs: Sequence[Run], share: Sequence[float], slo_ms: float) -> list[str]:
    """Return why the result says more about the machine than about the policies, a sentence per reason."""
    run = max(runs, key=lambda run: abs(math.log(run.slowdown)))
    late_ms, steady = max(run.figures["late_p99_ms"] for run in runs), 1 / DRIFT < run.slowdown < DRIFT
    found = {
        f"other programs use this machine: a computing thread got {100 * min(share):.0f} % of a core. "
        "Run the demo again on an idle machine before you trust these figures.": min(share) < BUSY_SHARE,
        f"the machine changed its speed after it was profiled: {run.slowdown:.2f} times the profiled "
        f"latency while '{run.name}' was served; the contenders did not have the same machine.": not steady,
        f"the client itself was late: 1 % of the requests were sent more than {late_ms:.0f} ms after "
        "they were due, so the load was burstier than intended.": late_ms > slo_ms / 4,
    }
    return [note for note, holds in found.items() if holds]


def compare(
    contenders: Sequence[Callable[[], Run]],
    trace: Trace,
    out: Path,
    report: Path | None,
    facts: Mapping[str, Any],
) -> None:
    """Serve the trace by every contender; print a table, draw a figure, and write the numbers as JSON.

    The contender with all subnets, the largest and the smallest one come first.
    """
    need_matplotlib()  # before the work is done
    share, runs = [share_of_core()], []
    gc.collect()
    gc.freeze()  # a full collection that visits all objects of torch would stop the server for tens of ms
    try:
        for one in contenders:
            runs.append(one())
            share.append(share_of_core())
    finally:
        gc.unfreeze()
    print(f"{'contender':<24}" + "".join(f"{name:>19}" for name in runs[0].shares))
    for run in runs:
        print(f"{run.name:<24}" + "".join(f"{percent:>17.2f} %" for percent in run.shares.values()))
    for note in (notes := machine_notes(runs, share, trace.slo_ms)):
        print(f"NOTE: {note}")
    shown = runs[:3] + sorted(runs[3:], key=lambda run: -run.right.mean())[:1]
    of = "{}: {in time:.1f} % in time, {right and in time:.1f} % right and in time"
    draw(out, shown, trace, "\n".join(of.format(run.name, **run.shares) for run in shown))
    print(f"Figure: {out}")
    if report is not None:
        found = {"share_of_core": share, "notes": notes, "contenders": [run.figures for run in runs]}
        write_json(report, {**facts, **found})


def draw(path: Path, runs: Sequence[Run], trace: Trace, title: str) -> None:
    """Draw what was asked for, and for every contender accuracy and misses, per bin."""
    figure: Any = need_matplotlib()(figsize=(9, 7.5), layout="constrained")
    asked, accuracy, missed = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2, 1.3))
    edges = np.arange(0, trace.due_ms.max() + trace.bin_ms, trace.bin_ms)
    counts = np.histogram(trace.due_ms, edges)[0]
    asked.stairs(1e3 * counts / trace.bin_ms, edges / 1e3, fill=True, color="tab:gray", alpha=0.5)
    for (name, rate), color in zip(trace.sustained.items(), COLORS[1:], strict=False):
        asked.axhline(rate, color=color, ls="--", label=f"the {name} subnet sustains")
    middle = (edges[:-1] + edges[1:]) / 2e3
    for run, color in zip(runs, COLORS, strict=False):
        met = np.histogram(trace.due_ms[run.in_time], edges)[0]
        total = np.histogram(trace.due_ms, edges, weights=np.nan_to_num(run.accuracy))[0]
        share = np.where(counts > 0, 100 * (1 - met / np.maximum(counts, 1)), np.nan)
        mean = np.where(met > 0, total / np.maximum(met, 1), np.nan)
        accuracy.plot(middle, mean, color=color, label=run.name)
        missed.plot(middle, share, color=color)
    asked.set(ylabel="asked for\nper second", title=title)
    accuracy.set(ylabel="accuracy of what was\nanswered in time (%)")
    missed.set(ylabel="missed (%)", xlabel="seconds")
    asked.legend()
    accuracy.legend()
    figure.savefig(path, dpi=110)


def demonstrate_digits(args: argparse.Namespace) -> None:
    """Take the whole path on the embedded supernet for digits, print tables and draw a figure."""
    seed = args.seed
    supernet = load_digits_supernet()
    facts = header(supernet)
    training, _ = read_digits(seed)
    validation, test = validation_and_test(3, seed)
    specs = supernet.space.sample(random.Random(seed), args.candidates)
    shown = [specs[0], *specs[2:6], specs[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        before = evaluate(supernet, shown, [test])
    calibrate(supernet, specs, torch.split(training.images[:600], 200))
    print("\nAccuracy on held-out digits (%), one set of weights:")
    print(f"{'shared statistics':>20}{'SubnetNorm':>14}   subnet")
    for shared, own, spec in zip(before, evaluate(supernet, shown, [test]), shown, strict=True):
        print(f"{shared:>20.1f}{own:>14.1f}   {spec}")

    front = _front(supernet, specs, validation)
    engine = Engine(supernet, [c.spec for c in front], example=test.images[:1])
    accuracy = [c.accuracy for c in front]
    how = {"min_time_ms": args.profile_ms, "mode": "as served"}
    table = profile_latency(engine, BATCH_SIZES, accuracy, "p90", **how)
    print(f"\nPareto set of {len(specs)} candidates, profiled here (p90 latency in ms):")
    print("  accuracy  " + "".join(f"{f'batch {b}':>10}" for b in BATCH_SIZES) + "   subnet")
    for key, percent, cells in zip(table.subnets, table.accuracy, table.latency_ms, strict=True):
        print(f"{percent:>8.1f} % " + "".join(f"{ms:>10.2f}" for ms in cells) + f"   {key}")

    trace, burst = _trace(table, args.seconds, seed)
    print(
        f"\nServing {len(trace.due_ms):,} digit images live, SLO {trace.slo_ms:.0f} ms. Burst: {burst:.0f}/s;"
        f" the largest subnet alone sustains {trace.sustained['largest']:.0f}/s."
    )
    policies: dict[str, Policy] = {
        "HullFit, all subnets": HullFit(table, slo_ms=trace.slo_ms),
        "fixed, largest subnet": Fixed(table, len(front) - 1),
        "fixed, smallest subnet": Fixed(table, 0),
    }
    rates = {"burst_qps": burst, "capacity_qps": trace.sustained["largest"]}
    known = {"machine": facts, "seed": seed, "slo_ms": trace.slo_ms, **rates}
    runs = [partial(_serve, *one, engine, test, trace.due_ms, trace.slo_ms) for one in policies.items()]
    compare(runs, trace, args.out, args.json, known)
    print(
        "in time: share of all requests that were answered within the SLO (SLO attainment). profiled: mean\n"
        "accuracy that the table promises for those. measured: share of those that carry the right label.\n"
        "right and in time: share of all requests, answered within the SLO with the right label."
    )


def _front(supernet: Supernet, specs: list[SubnetSpec], data: Digits) -> list[Candidate]:
    """Evaluate every candidate and keep at most SUBNETS Pareto-optimal ones, spread over latency."""
    engine = Engine(supernet, specs, example=data.images[:1])
    quick = profile_latency(engine, [8], warmup_ms=5, min_time_ms=30)
    found = zip(specs, evaluate(supernet, specs, [data]), quick.latency_ms[:, 0], strict=True)
    candidates = [Candidate(spec, percent, float(ms)) for spec, percent, ms in found]
    front = pareto_front(candidates, cost=lambda c: c.latency_ms, gain=lambda c: c.accuracy)
    kept = {round(i) for i in np.linspace(0, len(front) - 1, min(SUBNETS, len(front)))}
    return [front[i] for i in sorted(kept)]


def _trace(table: LatencyTable, seconds: float, seed: int) -> tuple[Trace, float]:
    """Choose the SLO and the rates from the profile: lulls the largest subnet can serve, a burst it cannot.

    The burst stays below half of what the smallest subnet sustains, so that the machine may become slower
    after it was profiled.
    """
    throughput = (1e3 * np.array(BATCH_SIZES) / table.latency_ms).max(1)
    slo_ms = max(40.0, math.ceil(3.0 * table.latency_ms[-1][BATCH_SIZES.index(8)]))
    largest = float(throughput[-1])
    burst = max(min(2.0 * largest, 0.45 * float(throughput[0])), 1.2 * largest)
    arrivals_ms = lulls_and_burst(0.35 * largest, burst, [seconds / 3] * 3, seed)
    return Trace(arrivals_ms, slo_ms, {"largest": largest}), burst


def _serve(
    name: str, policy: Policy, engine: Engine, data: Digits, arrivals_ms: Floats, slo_ms: float
) -> Run:
    """Send the trace in real time. Labels are compared afterwards: the server needs the interpreter's lock.

    The batcher gets the profile and nothing else: it learns in service what batches really take.
    """
    images = list(data.images)
    with Batcher(engine, policy=policy, slo_ms=slo_ms) as batcher:
        served, late_ms = serve(arrivals_ms, lambda i, _: batcher.submit(images[i % len(images)], slo_ms))
        slowdown, _ = batcher.corrections.drift()
    answers = [answer if answer and answer.met else None for answer in served]
    accuracy = np.array([answer.accuracy if answer else np.nan for answer in answers])
    labels = [int(answer.output.argmax()) if answer else -1 for answer in answers]
    right = np.array(labels) == np.resize(data.labels.numpy(), len(labels))
    measured = 100 * float(right.sum()) / max(len(answers) - answers.count(None), 1)
    return Run(name, accuracy, right, late_ms, slowdown, {"measured": measured})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demonstration with the options of `sys.argv` if None are given; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("subnetact_demo.png"), help="file of the figure")
    add("--json", type=Path, help="also write the figures of every contender to this file")
    add("--candidates", type=int, default=40, help="subnets to choose from")
    add("--seconds", type=float, default=9.0, help="length of the trace")
    add("--profile-ms", type=float, default=PROFILE_MS, help="time spent per cell of the latency table")
    add("--seed", type=int, default=0, help="seed of candidates, requests and arrivals")
    args = parser.parse_args(arguments)
    folders = all(path is None or path.parent.is_dir() for path in (args.out, args.json))
    times = all(0 < time < math.inf for time in (args.seconds, args.profile_ms))
    if not folders or not times or args.candidates < 2:
        parser.error(
            "--out and --json need folders that exist, --seconds and --profile-ms finite numbers above 0, "
            "--candidates at least 2"
        )
    log = logging.getLogger("subnetact.serving")
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        stack.callback(log.setLevel, log.level)
        torch.set_num_threads(1)
        sys.setswitchinterval(5e-4)  # the client shares the interpreter with the server
        log.setLevel(logging.ERROR)  # a machine that changed its speed gets a note at the end
        return reported(demonstrate_digits, args, "demo")


if __name__ == "__main__":
    run_command(main)
