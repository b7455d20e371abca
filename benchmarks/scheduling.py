"""Regenerates the scheduling evaluation on SuperServe's A40 table: tables and figures in benchmarks/results.

python benchmarks/scheduling.py                    # everything, about ten minutes on one core
python benchmarks/scheduling.py --only scaling     # one section; the others keep their earlier numbers
python benchmarks/scheduling.py --report           # writes the page
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import RESULTS, Run, options_of, run, table
from papers.optimum import exact_optimum
from tqdm import tqdm

from subnetact.latency import LatencyTable
from subnetact.serving import (
    Context,
    SlackFit,
    bursty,
    fluid_bound,
    load_trace,
    make_policy,
    poisson,
    simulate,
    superserve_a40,
    time_varying,
)
from subnetact.serving.policies.registry import policy_names
from subnetact.serving.scheduling.context import ArrivalMeter
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request
from subnetact.serving.simulation.datasets import trace_series
from subnetact.serving.simulation.figure import plot_comparison
from subnetact.serving.simulation.simulator import WorkerEvent
from subnetact.serving.simulation.traces import from_counts

TABLE = superserve_a40()
SLO_MS = 36.0
SETTING: dict[str, Any] = {"slo_ms": SLO_MS, "workers": 8, "expired": "serve"}
SLACKFITS = [f"slackfit:{k}" for k in (4, 8, 16, 32)]
STRONG = ["hullfit", *SLACKFITS, "maxbatch", "fixed:0", "fixed:1", "fixed:2"]
Floats = npt.NDArray[np.float64]
Section = dict[str, Any]
SETTING_IN_WORDS = "8 workers, SLO 36 ms, batches 1 to 16, rates x2.0, expired = serve, unless said"


def reference_suite(scale: float = 2.0, seed: int = 0) -> Iterator[tuple[str, Floats]]:
    for variant in (2950, 4900, 5550):
        for cv2 in (2, 4, 8):
            yield f"bursty {variant} cv2={cv2}", bursty(1500 * scale, variant * scale, cv2, 30, seed)
    for tau in (250, 500, 5000):
        yield f"time-varying tau={tau}", time_varying(2500 * scale, 7400 * scale, tau * scale, 8, 5, 10, seed)
    yield "maf", load_trace("maf", scale, seed)


def simulated(name: str, trace: Floats, **settings: Any) -> dict[str, float]:
    result = simulate(trace, TABLE, make_policy(name, TABLE, SLO_MS), **(SETTING | settings))
    return {
        "attainment": result.attainment,
        "mean_accuracy": result.mean_accuracy,
        "effective_accuracy": result.effective_accuracy,
        "missed": result.missed,
    }


def suite() -> Section:
    """Simulate the 13 traces under every policy (seed 0), and under the best policies on two more seeds."""
    section: Section = {}
    for seed in (0, 1, 2):
        names = list(dict.fromkeys([*SLACKFITS, *policy_names(TABLE)])) if seed == 0 else STRONG
        for trace_name, trace in tqdm(reference_suite(seed=seed), total=13, desc=f"suite, seed {seed}"):
            rows = {name: simulated(name, trace) for name in names}
            bound = fluid_bound(trace, TABLE, SLO_MS, workers=8)
            best = rows["hullfit"]["effective_accuracy"]
            other = max((rows[name]["effective_accuracy"], name) for name in names if name != "hullfit")
            section[f"{trace_name}, seed {seed}"] = {
                "requests": len(trace),
                "fluid_bound": bound,
                "gap_to_bound": bound - best,
                "lead_over_next": best - other[0],
                "next": other[1],
                "policies": rows,
            }
    section["summary"] = {
        "most_missed_share_hullfit": max(
            row["policies"]["hullfit"]["missed"] / row["requests"] for row in section.values()
        ),
        "largest_gap_to_bound": max(row["gap_to_bound"] for row in section.values()),
        "least_lead_over_next": min(row["lead_over_next"] for row in section.values()),
    }
    return section


def robustness() -> Section:
    """Simulate noise, overload, minimum accuracies and fewer workers."""
    maf = load_trace("maf", 2.0)
    section: Section = {
        "maf, 5 % noise + 0.3 ms": {
            name: simulated(name, maf, noise=0.05, overhead_ms=0.3) for name in ("hullfit", *SLACKFITS)
        }
    }
    for qps in (21_000, 24_000):
        even = np.arange(0.0, 30_000.0, 1000.0 / qps)
        for kind, trace in (("even", even), ("poisson", poisson(qps, 30, seed=1))):
            section[f"{qps} qps {kind}, drop"] = {
                name: simulated(name, trace, expired="drop")
                for name in ("hullfit", "slackfit", "maxbatch", "fixed:0")
            }
            section[f"{qps} qps {kind}, drop"]["capacity_share"] = (
                8 * 16 / 6.26507 * 1000 / len(trace) * 30.036
            )
    draw = np.random.default_rng(5).random(len(maf))
    minimum = np.where(draw < 0.1, 79.44, np.where(draw < 0.3, 78.25, 0.0))
    for rule in ("serve", "drop"):
        section[f"maf with minimum accuracies, {rule}"] = {
            name: simulated(name, maf, min_accuracy=minimum, expired=rule) for name in ("hullfit", "slackfit")
        }
    unclipped = from_counts(_maf_counts(), 120.0, 12_800)
    for kind, trace in (("maf", maf), ("maf unclipped", unclipped)):
        for rule in ("serve", "drop", "defer"):
            section[f"{kind}, 6 of 8 workers, {rule}"] = {
                name: simulated(name, trace, workers=6, expired=rule) for name in ("hullfit", "fixed:0")
            }
    return section


def _maf_counts() -> npt.NDArray[np.int64]:
    counts: npt.NDArray[np.int64] = trace_series("maf")["sum14d_union"]
    return counts


def faults() -> Section:
    """Let one of 8 workers die every 12 s until 4 are left, on the bursty trace (SuperServe, Fig. 11a)."""
    section: Section = {}
    events = [WorkerEvent(12_000.0 * (i + 1), 7 - i, False) for i in range(4)]
    for scale in (1.0, 1.5, 2.0):
        trace = bursty(1500 * scale, 2950 * scale, 2, 60, seed=0)
        rows = {}
        for name in ("hullfit", "slackfit:4", "slackfit", "fixed:2"):
            policy = make_policy(name, TABLE, SLO_MS)
            result = simulate(trace, TABLE, policy, events=events, requests=True, **SETTING)
            log = result.log
            assert log is not None
            met = log.finish_ms <= trace + SLO_MS
            accuracy = np.array(TABLE.accuracy)[log.subnet]
            phases = [(trace >= 12_000 * i) & (trace < 12_000 * (i + 1)) for i in range(5)]
            rows[name] = {
                "attainment": result.attainment,
                "attainment_by_workers": {8 - i: float(met[phase].mean()) for i, phase in enumerate(phases)},
                "accuracy_by_workers": {
                    8 - i: float(accuracy[phase & met].mean()) for i, phase in enumerate(phases)
                },
            }
        section[f"x{scale}: {4450 * scale:.0f} qps"] = rows
    return section


def scaling() -> Section:
    """Find the greatest Poisson rate with attainment >= 0.999, for 1 to 32 workers (SuperServe, Fig. 11b)."""
    section: Section = {}
    for name in ("hullfit", "fixed:0"):
        section[name] = {}
        for workers in tqdm((1, 2, 4, 8, 16, 32), desc=f"scaling, {name}"):
            low, high = 0.5, 1.05
            while high - low > 0.01:
                share = (low + high) / 2
                trace = poisson(share * workers * 16 / 6.26507 * 1000, 3.0, seed=workers)
                if simulated(name, trace, workers=workers)["attainment"] >= 0.999:
                    low = share
                else:
                    high = share
            section[name][workers] = round(low * workers * 16 / 6.26507 * 1000)
    return section


def small_instances() -> Section:
    """Compare policies with the exact optimum of SuperServe's zero-one program, which knows all arrivals."""
    rng = np.random.default_rng(11)
    section: Section = {}
    for slo in (12.0, 18.0, 36.0):
        gaps: dict[str, list[float]] = {"hullfit": [], "slackfit": [], "maxbatch": []}
        for workers, count, span in ((1, 8, 10), (1, 12, 10), (1, 12, 30), (2, 12, 20)):
            for _ in range(5):
                trace = np.sort(rng.uniform(0, span, count))
                optimum = exact_optimum(trace, TABLE, slo, workers)
                for name, found in gaps.items():
                    result = simulate(trace, TABLE, make_policy(name, TABLE, slo), slo, workers, "drop")
                    found.append(1 - result.accuracy_sum / optimum)
        section[f"slo {slo:g} ms"] = {name: float(np.mean(found)) for name, found in gaps.items()}
    for name in ("hullfit", "slackfit", "maxbatch"):
        section[f"mean gap, {name}"] = float(
            np.mean([row[name] for key, row in section.items() if key.startswith("slo")])
        )
    return section


def speed() -> Section:
    """Measure requests simulated per second (median of 5 runs), memory, and time per decision."""
    maf = load_trace("maf", 2.0)
    light = load_trace("maf", 1.0)
    section: Section = {"requests": len(maf)}
    for name in ("slackfit", "slackfit:4", "hullfit"):
        for label, trace in (("x2.0", maf), ("x1.0", light)):
            rates = []
            for _ in range(5):
                policy = make_policy(name, TABLE, SLO_MS)
                start = time.perf_counter()
                simulate(trace, TABLE, policy, **SETTING)
                rates.append(len(trace) / (time.perf_counter() - start))
            section[f"{name} maf {label}, requests/s"] = round(float(np.median(rates)))
    section["peak memory beyond the trace, KiB"] = {
        str(count): _peak_kib(maf[:count]) for count in (len(maf) // 10, len(maf))
    }
    for name in ("slackfit", "hullfit", "maxbatch", "maxacc", "modelswitching", "cheapest", "fixed"):
        section[f"{name} decision, 1000 subnets x 16 sizes, 1000 queued, us"] = decision_times(name)
    return section


def _peak_kib(trace: Floats) -> float:
    """Return the peak memory, KiB, that one simulation allocates in addition to its trace."""
    policy = SlackFit(TABLE, buckets=4, slo_ms=SLO_MS)
    tracemalloc.start()
    try:
        simulate(trace, TABLE, policy, **SETTING)
        return round(tracemalloc.get_traced_memory()[1] / 1024)
    finally:
        tracemalloc.stop()


def decision_times(name: str) -> dict[str, float]:
    """Return quantiles of the time per decision, us, over random states (median of 5 decisions each)."""
    rng = np.random.default_rng(0)
    accuracy = np.sort(rng.uniform(70, 80, 1000))
    share = (accuracy - 70) / 10
    sizes = np.arange(1, 17)
    cells = (2 + 2 * share)[:, None] + (0.15 * (1 + 2.5 * share**2))[:, None] * sizes
    cells = cells * rng.uniform(0.95, 1.05, cells.shape)
    keys = [str(i) for i in range(1000)]
    table = LatencyTable(keys, accuracy.tolist(), sizes.tolist(), cells)
    policy = make_policy(name, table, SLO_MS)
    taken = []
    for _ in range(1000):
        queue = EDFQueue()
        now = 1000.0
        for slack_ms in np.sort(rng.uniform(2, 36, 1000)).tolist():
            queue.push(Request(Ask(slack_ms), now))
        meter = ArrivalMeter()
        meter.extend(np.arange(0, now, 1 / rng.uniform(2, 45)).tolist())
        context = Context(queue, meter, (now + rng.uniform(0, 6, 8)).tolist(), SLO_MS)
        context.now_ms, context.queued, context.slack_ms = now, 1000, queue.deadline() - now
        context.free_at_ms[0] = now
        once = []
        for _ in range(5):
            start = time.perf_counter_ns()
            policy.decide(context)
            once.append((time.perf_counter_ns() - start) / 1000)
        taken.append(np.median(once))
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def figures() -> Section:
    """Draw attainment against accuracy for three traces."""
    drawn = []
    wanted = {"maf": "maf", "bursty 5550 cv2=8": "bursty", "time-varying tau=500": "time_varying"}
    for trace_name, trace in reference_suite():
        if trace_name not in wanted:
            continue
        names = [
            "hullfit",
            "slackfit:4",
            "slackfit:8",
            "maxbatch",
            "modelswitching",
            "fixed:0",
            "fixed:1",
            "fixed:2",
        ]
        results = {
            name: simulate(trace, TABLE, make_policy(name, TABLE, SLO_MS), **SETTING) for name in names
        }
        short = wanted[trace_name]
        bound = fluid_bound(trace, TABLE, SLO_MS, workers=8)
        plot_comparison(results, RESULTS / f"scheduling_{short}.png", trace_name, bound)
        drawn.append(f"scheduling_{short}.png")
    return {"files": drawn}


SECTIONS: dict[str, Callable[[], Section]] = {
    "speed": speed,
    "small_instances": small_instances,
    "robustness": robustness,
    "faults": faults,
    "scaling": scaling,
    "figures": figures,
    "suite": suite,
}


# -- the page ------------------------------------------------------------------------------------------

COLUMNS = ("slackfit:4", "slackfit:8", "slackfit:16", "slackfit:32", "maxbatch", "modelswitching")

PAPER = """\
The paper measured 8 RTX 2080 Ti. Here the A40 table of its authors is simulated with all rates doubled, so
that the workers are about as busy. Accuracy and attainment are comparable in kind, not digit by digit.
"""


def report(document: dict[str, Any]) -> list[str]:
    """Return the page with the sections that the document holds."""
    lines = [f"{SETTING_IN_WORDS}.", "", PAPER]
    for name, write in (
        ("suite", _suite),
        ("robustness", _robustness),
        ("faults", _faults),
        ("scaling", _scaling),
        ("small_instances", _small),
        ("speed", _speed),
    ):
        if name in document:
            lines += [*write(document[name]), ""]
    return lines[:-1]


def _cell(row: dict[str, float] | None) -> str:
    return "" if row is None else f"{row['effective_accuracy']:.2f} ({row['missed']})"


def _suite(section: dict[str, Any]) -> list[str]:
    summary = section["summary"]
    rows = []
    for name, entry in section.items():
        if name == "summary":
            continue
        policies = entry["policies"]
        fixed = [row for policy, row in policies.items() if policy.startswith("fixed")]
        best_fixed = max(fixed, key=lambda row: float(row["effective_accuracy"]))
        shown = [_cell(policies.get(policy)) for policy in ("hullfit", *COLUMNS)]
        rows.append([name, entry["requests"], *shown, _cell(best_fixed), f"{entry['gap_to_bound']:.3f}"])
    return [
        "## The reference suite: effective accuracy, % (missed requests)",
        "",
        *table(["trace", "requests", "hullfit", *COLUMNS, "best fixed", "hullfit to fluid bound"], rows),
        "",
        f"HullFit misses at most {summary['most_missed_share_hullfit']:.1e} of a trace's requests, is at "
        f"most {summary['largest_gap_to_bound']:.3f} points below the fluid bound, and at least "
        f"{summary['least_lead_over_next']:.3f} points above the next policy.",
        "",
        "SuperServe reports attainment above 0.999 on every bursty trace (mean 7000 qps), 0.991 to 1.0 on",
        "the time-varying ones, and 0.99999 on MAF, 4.65 points above the best single model of equal",
        "attainment. In this simulation SlackFit depends on the number of buckets, which the paper does not",
        "give: K = 4 keeps 2 to 3 ms in reserve by accident and reaches these values; K = 8 to 32 do not on",
        "the heavy traces.",
    ]


def _robustness(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, policies in section.items():
        for policy, row in policies.items():
            if isinstance(row, dict):
                rows.append([name, policy, f"{row['attainment']:.6f}", f"{row['effective_accuracy']:.3f}"])
    return [
        "## Noise, overload, minimum accuracies, fewer workers",
        "",
        *table(["setting", "policy", "attainment", "effective accuracy"], rows),
        "",
        "Overload exceeds the capacity of 8 workers: 20,431 qps in full batches of the cheapest subnet.",
    ]


def _faults(section: dict[str, Any]) -> list[str]:
    rows = []
    for load, policies in section.items():
        for policy, row in policies.items():
            accuracy = row["accuracy_by_workers"].values()
            rows.append(
                [load, policy, f"{row['attainment']:.5f}", " / ".join(f"{value:.2f}" for value in accuracy)]
            )
    return [
        "## One worker dies every 12 s, from 8 to 4",
        "",
        *table(["load", "policy", "attainment", "accuracy with 8 / 7 / 6 / 5 / 4 workers"], rows),
        "",
        "SuperServe reports an attainment of 0.999 down to 4 of 8 workers, with falling accuracy.",
    ]


def _scaling(section: dict[str, Any]) -> list[str]:
    counts = list(next(iter(section.values())))
    rows = [[policy, *(f"{row[count]:,}" for count in counts)] for policy, row in section.items()]
    return [
        "## Greatest Poisson rate (qps) with attainment >= 0.999, by workers",
        "",
        *table(["policy", *map(str, counts)], rows),
        "",
        "SuperServe reports linear scaling to about 33,000 qps on 32 workers, the limit of its router. The",
        "simulator has no router, so only the workers limit the rate.",
    ]


def _small(section: dict[str, Any]) -> list[str]:
    names = list(next(iter(section.values())))
    rows = [
        [key, *(f"{100 * row[name]:.2f}" for name in names)]
        for key, row in section.items()
        if isinstance(row, dict)
    ]
    rows.append(["mean", *(f"{100 * section[f'mean gap, {name}']:.2f}" for name in names)])
    return [
        "## Small instances: loss against the exact optimum of the zero-one program, %",
        "",
        *table(["8 or 12 requests, 1 or 2 workers", *names], rows),
    ]


def _speed(section: dict[str, Any]) -> list[str]:
    rows = []
    for name, value in section.items():
        shown = (
            ", ".join(f"{key}: {number:,}" for key, number in value.items())
            if isinstance(value, dict)
            else f"{value:,}"
        )
        rows.append([name, shown])
    return ["## Speed", "", *table(["what", "measured"], rows)]


def main() -> None:
    parser = options_of(__doc__, "scheduling", SECTIONS)
    parts = {name: partial(_measured, section) for name, section in SECTIONS.items()}
    run(parser, "scheduling", parts, report, ["subnetact", "numpy"], machine_of_each=False)


def _measured(section: Callable[[], Section], _: Run) -> Section:
    return section()


if __name__ == "__main__":
    main()
