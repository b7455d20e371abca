"""The whole path on the embedded trained supernet: `python -m subnetact.demo`."""

from __future__ import annotations

import math
import random
import warnings
from argparse import Namespace
from functools import partial

import numpy as np
import torch

from subnetact.calibration.calibrate import calibrate
from subnetact.demo.contenders import Run, Trace, compare, header, lulls_and_burst, serve
from subnetact.digits import Digits, load_digits_supernet, read_digits, validation_and_test
from subnetact.engine.engine import Engine
from subnetact.errors import UncalibratedSubnetWarning
from subnetact.latency.arrays import Floats
from subnetact.latency.pareto import pareto_front
from subnetact.latency.table import LatencyTable
from subnetact.nas.evaluation import evaluate
from subnetact.nas.search import Candidate
from subnetact.profile.sweep import BATCH_SIZES, profile_latency
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies import Fixed, HullFit
from subnetact.serving.scheduling.context import Policy
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

SUBNETS = 8  # Pareto-optimal ones that are served
PROFILE_MS = 300.0  # per cell of the latency table, so that slow phases of the machine are seen too


def demonstrate_digits(args: Namespace) -> None:
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
