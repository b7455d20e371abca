"""HullFit compared with SlackFit and the best fixed subnet on tables, loads and SLOs of many kinds.

    python benchmarks/policy_grid.py             # continues what an earlier run began; 30 minutes on one core
    python benchmarks/policy_grid.py --report    # write results/policy_grid.md and stop

Every cell is one setting: a latency table, a number of workers, a load, the burstiness of the arrivals, and
an SLO. All policies of a cell see the same arrivals. SlackFit (K = 4 and 8) has the margins of HullFit. The
best fixed subnet is chosen in hindsight: subnets are tried on the very arrivals that are reported, coarsely
and then finely over the Pareto-optimal ones. A cell in which HullFit is more than 0.1 points behind on its
first trace is measured on three more traces, and the means are reported. There are 400 random cells of each
of four seeds, none of which was used while the method and the constants of HullFit were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from harness import ROOT, Run, options_of, run, table
from tqdm import tqdm

from subnetact.latency import LatencyTable
from subnetact.serving import Fixed, HullFit, Policy, SlackFit, fluid_bound, simulate, superserve_a40
from subnetact.serving.policies import hullfit
from subnetact.serving.scheduling.frontier import pareto_of_batch

TABLES = ROOT / "profiling" / "tables"
MEASURED = {
    "mbv3": "intel-r-xeon-r-processor_1thread_torch2.13.0_ofa-mbv3_224px_zero-copy.json",
    "resnet50": "intel-r-xeon-r-processor_1thread_torch2.13.0_ofa-resnet50_96px_zero-copy.json",
    "a40_32": "nvidia-a40_torch2.9.1_ofa_resnet50_224px.json",
}
BATCHES: tuple[tuple[int, ...], ...] = (
    (1,),
    (1, 2, 4, 8),
    (1, 2, 4, 8, 16),
    (1, 2, 4, 8, 16, 32),
    tuple(range(1, 17)),
    (1, 2, 4, 8, 16, 32, 64, 128),
    (1, 8, 32, 128),
)
LOADS = (0.01, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0)
MARGIN, RESERVE = 0.1, hullfit.RESERVE
NEAR, FAR = 0.2, 0.5
REPEATS = 4
Floats = npt.NDArray[np.float64]
SEEDS = (71, 72, 73, 74)


class Cell(NamedTuple):
    """One setting of the grid.

    Attributes:
        table: the name of a measured table, or "affine" for latencies base * (share + (1 - share) * batch).
        share: the share of the latency at batch 1 that does not depend on the batch size.
        accuracy: "linear" or "concave" over the base latency, from 70 to 80 %, if the table has none.
        subnets: number of subnets.
        ratio: base latency of the largest subnet over that of the smallest.
        sizes: the batch sizes.
        base_ms: base latency of the smallest subnet, ms.
        jitter: standard deviation of a random factor on every latency, which makes the table non-monotone.
        workers: number of workers.
        load: arrival rate over the rate that the most accurate subnet sustains with batches within the SLO.
        cv2: squared coefficient of variation of the gaps between arrivals.
        slo: SLO over the latency of the most accurate subnet at batch 1.
        seed: seed of the table and of the arrivals.
    """

    table: str
    share: float
    accuracy: str
    subnets: int
    ratio: float
    sizes: tuple[int, ...]
    base_ms: float
    jitter: float
    workers: int
    load: float
    cv2: float
    slo: float
    seed: int


def regular_cells(workers: int) -> list[Cell]:
    """Return 54 cells: nine tables at six loads, with an SLO of 5 latencies and CV^2 2."""
    shapes = [("affine", share, accuracy) for share in (0.1, 0.5, 0.9) for accuracy in ("linear", "concave")]
    shapes += [(name, 0.0, "linear") for name in ("mbv3", "resnet50", "a40")]
    sizes = (1, 2, 4, 8, 16)
    return [
        Cell(table, share, accuracy, 6, 5.0, sizes, 2.0, 0.0, workers, load, 2.0, 5.0, 0)
        for load in (0.01, 0.3, 0.6, 0.9, 1.3, 1.8)
        for table, share, accuracy in shapes
    ]


def random_cells(count: int, seed: int) -> list[Cell]:
    """Return random cells of the full cross product of all dimensions."""
    rng = np.random.default_rng(seed)
    cells = []
    for i in range(count):
        measured = rng.random() < 0.2
        cells.append(
            Cell(
                str(rng.choice(["mbv3", "resnet50", "a40", "a40_32"])) if measured else "affine",
                round(float(rng.uniform(0.1, 0.95)), 3),
                str(rng.choice(["linear", "concave"])),
                int(rng.choice([2, 3, 6, 12, 50, 200, 1000])),
                float(rng.choice([1.5, 3.0, 5.0, 10.0])),
                BATCHES[rng.integers(len(BATCHES))],
                round(float(np.exp(rng.uniform(np.log(0.5), np.log(50.0)))), 3),
                float(rng.choice([0.0, 0.0, 0.05, 0.2])),
                int(rng.choice([1, 1, 2, 4, 8, 16, 64])),
                float(rng.choice(LOADS)),
                float(rng.choice([1.0, 2.0, 4.0, 8.0])),
                float(rng.choice([2.0, 3.0, 5.0, 10.0, 20.0])),
                seed * 100_000 + i,
            )
        )
    return cells


def table_of(cell: Cell) -> LatencyTable:
    """Return the latency table of a cell."""
    if cell.table == "a40":
        return superserve_a40()
    if cell.table in MEASURED:
        table = LatencyTable.load(TABLES / MEASURED[cell.table])
        known = not math.isnan(table.accuracy[0])
        return table if known else table.with_accuracy(_accuracies(table.latency_ms[:, 0], cell.accuracy))
    base = cell.base_ms * np.linspace(1.0, cell.ratio, cell.subnets)
    cells = base[:, None] * (cell.share + (1.0 - cell.share) * np.array(cell.sizes, dtype=np.float64))
    if cell.jitter:
        rng = np.random.default_rng(cell.seed)
        cells = cells * np.maximum(rng.normal(1.0, cell.jitter, cells.shape), 0.5)
    keys = [f"s{i}" for i in range(cell.subnets)]
    return LatencyTable(keys, _accuracies(base, cell.accuracy), cell.sizes, cells)


def _accuracies(base: Floats, kind: str) -> list[float]:
    x = (base - base.min()) / (base.max() - base.min())
    found: list[float] = (70.0 + 10.0 * (x if kind == "linear" else 1.0 - (1.0 - x) ** 2)).tolist()
    return found


class Trial:
    """The table, the SLO and the arrivals of a cell.

    Args:
        cell: the cell.
        requests: least number of requests; a trace lasts 40 SLOs if that takes more, up to 8 times that.
        repeat: number of the trace.
    """

    def __init__(self, cell: Cell, requests: int, repeat: int) -> None:
        self.cell = cell
        self.table = table = table_of(cell)
        best = int(np.argmax(table.accuracy))
        self.slo_ms = cell.slo * float(table.latency_ms[best, 0])
        row = table.latency_ms[best]
        fits = row <= self.slo_ms
        rate = cell.load * cell.workers * float((np.array(table.batch_sizes)[fits] / row[fits]).max())
        count = int(min(max(requests, 40.0 * rate * self.slo_ms), 8 * requests))
        shape = 1.0 / cell.cv2
        gaps = np.random.default_rng([cell.seed, repeat]).gamma(shape, 1.0 / (shape * rate), count)
        self.arrivals = np.cumsum(gaps)

    def run(self, policy: Policy) -> float:
        """Return the effective accuracy of a policy, percent."""
        return simulate(
            self.arrivals, self.table, policy, self.slo_ms, self.cell.workers, "drop", progress=False
        ).effective_accuracy

    def results(self) -> dict[str, float]:
        """Return the effective accuracy of every contender, percent."""
        table, slo_ms = self.table, self.slo_ms
        found = {
            f"slackfit:{k}": self.run(SlackFit(table, slo_ms, k, RESERVE * slo_ms, MARGIN)) for k in (4, 8)
        }
        found["fixed"] = self.best_fixed()
        found["hullfit"] = self.run(HullFit(table, slo_ms, MARGIN))
        return found

    def bound(self) -> float:
        """Return the fluid bound, percent."""
        step_ms = self.slo_ms / 36.0
        return fluid_bound(self.arrivals, self.table, self.slo_ms, workers=self.cell.workers, step_ms=step_ms)

    def best_fixed(self) -> float:
        """Return the effective accuracy of the best fixed subnet, percent.

        A subnet is not simulated if its accuracy, times the share of the requests that the workers can answer
        with it before the last deadline, is no more than what another one reaches.
        """
        table = self.table
        subnets = {o.subnet for j in range(len(table.batch_sizes)) for o in pareto_of_batch(table, j)}
        front = sorted(subnets, key=lambda i: table.accuracy[i])
        pace = np.nanmax(np.array(table.batch_sizes) / table.latency_ms[front], axis=1)
        answered = self.cell.workers * pace * (self.arrivals[-1] - self.arrivals[0] + self.slo_ms)
        most = np.array(table.accuracy)[front] * np.minimum(1.0, answered / len(self.arrivals))
        known: dict[int, float] = {}

        def best(places: Iterable[int]) -> int:
            found, most_found = -1, -math.inf
            for at in sorted(places, key=lambda at: -most[at]):
                if at not in known:
                    if most[at] <= most_found:
                        break
                    known[at] = self.run(Fixed(table, front[at]))
                if known[at] > most_found:
                    found, most_found = at, known[at]
            return found

        low, high = 0, len(front) - 1
        while high - low > 6:
            grid = sorted({round(low + (high - low) * i / 6) for i in range(7)})
            top = grid.index(best(grid))
            low, high = grid[max(top - 1, 0)], grid[min(top + 1, len(grid) - 1)]
        best(range(low, high + 1))
        return max(known.values())


def measure(cell: Cell, requests: int, bound: bool) -> dict[str, Any]:
    """Measure a cell; four times on new arrivals if HullFit is behind the first time."""
    runs: list[dict[str, float]] = []
    row: dict[str, Any] = {}
    for repeat in range(REPEATS):
        trial = Trial(cell, requests, repeat)
        runs.append(trial.results())
        leads = [run["hullfit"] - max(v for name, v in run.items() if name != "hullfit") for run in runs]
        if repeat == 0 and bound:
            row["bound"] = trial.bound()
            row["to_bound"] = {name: row["bound"] - value for name, value in runs[0].items()}
        if leads[0] > -0.5 * NEAR:
            break
    means = {name: mean(run[name] for run in runs) for name in runs[0]}
    other = max((value, name) for name, value in means.items() if name != "hullfit")
    return {
        **cell._asdict(),
        **row,
        "requests": len(trial.arrivals) * len(runs),
        "effective_accuracy": means,
        "best_other": other[1],
        "lead": means["hullfit"] - other[0],
        "standard_error": stdev(leads) / math.sqrt(len(leads)) if len(leads) > 1 else None,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the bounds are about."""
    leads = [row["lead"] for row in rows]
    found: dict[str, Any] = {
        "cells": len(rows),
        "share_near": mean(lead >= -NEAR for lead in leads),
        "share_not_far": mean(lead >= -FAR for lead in leads),
        "worst": min(leads),
        "best": max(leads),
        "mean_lead": mean(leads),
        "mean": {
            name: mean(row["effective_accuracy"][name] for row in rows)
            for name in rows[0]["effective_accuracy"]
        },
    }
    loaded = [row["to_bound"] for row in rows if "to_bound" in row and row["load"] > 0.1]
    if loaded:
        found["to_bound"] = {name: mean(gap[name] for gap in loaded) for name in loaded[0]}
    return found


def report(document: dict[str, Any]) -> list[str]:
    """Return the lines of results/policy_grid.md."""
    head = ["cells", "number", "mean lead", "more than 0.2, 0.5 points behind", "worst", "HullFit"]
    head += ["SlackFit, K = 4", "K = 8", "best fixed", "HullFit, SlackFit (K = 8) to the fluid bound"]
    table_rows = []
    for name, rows in document["cells"].items():
        found = summary(rows)
        means, gaps = found["mean"], found.get("to_bound")
        table_rows.append(
            [
                name,
                found["cells"],
                f"{found['mean_lead']:+.2f}",
                f"{1 - found['share_near']:.1%}, {1 - found['share_not_far']:.1%}",
                f"{found['worst']:+.2f}",
                *(f"{means[k]:.2f}" for k in ("hullfit", "slackfit:4", "slackfit:8", "fixed")),
                f"{gaps['hullfit']:.2f}, {gaps['slackfit:8']:.2f}" if gaps else "",
            ]
        )
    lines = table(head, table_rows)
    leads = [row["lead"] for name, rows in document["cells"].items() if "seed" in name for row in rows]
    if leads:
        quantiles = ", ".join(f"{np.quantile(leads, q):+.2f}" for q in (0.0, 0.01, 0.05, 0.5, 0.95, 1.0))
        lines += [
            "",
            f"Over all {len(leads)} random cells the lead is {mean(leads):+.2f} on average; its least value, "
            f"1st, 5th, 50th and 95th percentiles and greatest value are {quantiles}.",
        ]
    return lines


def cells(this: Run) -> None:
    """Measure the cells that are missing."""
    args, document = this.args, this.known
    setting = {"seeds": list(args.seeds), "requests": args.requests, "margin": MARGIN, "reserve": RESERVE}
    if document.setdefault("setting", setting) != setting:
        raise SystemExit(f"{args.out} has {document['setting']}; remove the file or give those options")
    plan = {f"random, seed {seed}": random_cells(args.cells, seed) for seed in args.seeds}
    plan |= {"regular, 1 worker": regular_cells(1), "regular, 4 workers": regular_cells(4)}
    rows = document.setdefault("cells", {})
    for name, every in plan.items():
        done = rows.setdefault(name, [])
        for cell in tqdm(every[len(done) :], desc=name):
            done.append(measure(cell, args.requests, bound=name.startswith("regular")))
            document["summary"] = {kind: summary(found) for kind, found in rows.items() if found}
            this.save()


def main() -> None:
    parser = options_of(__doc__, "policy_grid")
    add = parser.add_argument
    add("--cells", type=int, default=400, help="number of random cells per seed")
    add("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of the random cells")
    add("--requests", type=int, default=3000, help="least number of requests per trace")
    run(parser, "policy_grid", {"cells": cells}, report, ["subnetact", "numpy"], machine_of_each=False)


if __name__ == "__main__":
    main()
