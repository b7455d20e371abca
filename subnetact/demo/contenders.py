"""Contenders that serve one trace, one after the other: notes on the machine, a table and a figure."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from subnetact.device import machine
from subnetact.errors import DeadlinePassed, QueueFull, TraceError
from subnetact.files.documents import write_json
from subnetact.latency.arrays import Floats
from subnetact.latency.plot import need_matplotlib
from subnetact.serving.simulation.traces import bursty
from subnetact.supernet.supernet import Supernet

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
