"""Measures the search.

  truth     measures the true accuracy of all 864 subnets of the digits supernet, each one calibrated; the
            accuracies are kept in results/search_digits_accuracy.json, and an unfinished file is continued
  digits    compares the fronts that evolution and random search find with a tenth of these evaluations
            with the front of all subnets
  families  compares evolution with random search on large spaces, with made-up accuracies and latencies

`--report` draws the plot and writes the page results/search.md. What was measured once, the surrogate, few
evaluations, the winner's curse, the cost model and the predictors, is in results/trials.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, Run, options_of, run, table
from tqdm import tqdm

import subnetact
import subnetact.nas
from ofa_adapters import load
from subnetact.costs import CostModel
from subnetact.device import machine
from subnetact.digits import (
    SIDE,
    distort,
    load_digits_supernet,
    undistorted_digits,
)
from subnetact.files.atomic import replacing
from subnetact.latency.pareto import hypervolume, pareto_front
from subnetact.spec import SubnetSpec

TRUTH = RESULTS / "search_digits_accuracy.json"
SEEDS = tuple(range(10))
COPIES = 4
"""Distortions of each held-out digit."""
FAMILIES = ("ofa_resnet50", "ofa_mbv3")
Objective = Callable[[SubnetSpec], float]


def truth(this: Run) -> dict[str, Any]:
    """Evaluate every subnet of the digits supernet, those in the file excepted."""
    supernet = load_digits_supernet()
    specs = list(supernet.space.enumerate())
    generator = torch.Generator().manual_seed(0)
    training, held_out = undistorted_digits()
    pool = [distort(part, generator) for part in torch.split(training.images[:600], 200)]
    loader = [(distort(held_out.images, generator), held_out.labels) for _ in range(COPIES)]
    data: dict[str, Any] = {
        "space": supernet.space.id,
        "supernet": supernet.fingerprint(),
        "what": f"top-1 accuracy in percent on {COPIES * len(held_out.labels)} distorted held-out digits, "
        "each subnet calibrated on 600 distorted training digits; in the order of space.enumerate()",
        "machine": machine(torch.device("cpu")),
        "accuracy": [],
    }
    if this.args.truth.exists():
        before = json.loads(this.args.truth.read_text())
        if before["supernet"] != data["supernet"]:
            raise SystemExit(f"{this.args.truth} is of other weights; move it away")
        data = before
    done = len(data["accuracy"])
    for start in tqdm(range(done, len(specs), 8), desc="blocks of 8 subnets"):
        data["accuracy"] += subnetact.evaluate(supernet, specs[start : start + 8], loader, calibration=pool)
        with replacing(this.args.truth) as temporary:
            temporary.write_text(json.dumps(data) + "\n")
    return {"subnets": len(specs), "lowest": min(data["accuracy"]), "highest": max(data["accuracy"])}


def true_digits(path: Path) -> tuple[Any, dict[SubnetSpec, float], dict[SubnetSpec, float], dict[str, Any]]:
    """Return the digits supernet, every subnet's true accuracy and MACs in millions, and the file."""
    data = json.loads(path.read_text())
    supernet = load_digits_supernet()
    specs = list(supernet.space.enumerate())
    if len(data["accuracy"]) != len(specs) or data["supernet"] != supernet.fingerprint():
        raise SystemExit(f"{path} is incomplete or of other weights; run --only truth first")
    model = CostModel(supernet, torch.empty(1, 1, SIDE, SIDE))
    macs = {spec: model(spec).macs / 1e6 for spec in specs}
    return supernet, dict(zip(specs, data["accuracy"], strict=True)), macs, data


def share(found: Sequence[subnetact.nas.Candidate], reference: tuple[float, float], whole: float) -> float:
    """Return the hypervolume of subnets as a share of the hypervolume `whole`."""
    points = [(c.accuracy, c.latency_ms) for c in front_of(found)]
    return hypervolume(points, reference) / whole


def front_of(found: Iterable[subnetact.nas.Candidate]) -> list[subnetact.nas.Candidate]:
    return pareto_front(found, cost=lambda c: c.latency_ms, gain=lambda c: c.accuracy)


def searches(
    supernet: subnetact.Supernet,
    accuracy: Objective,
    latency: Objective,
    evaluations: int,
    methods: Iterable[str],
    seeds: Iterable[int],
) -> dict[str, list[subnetact.nas.SearchResult]]:
    """Run the same search by several methods, once per seed."""
    return {
        method: [
            subnetact.search(
                supernet,
                accuracy,
                latency,
                evaluations=evaluations,
                method=method,
                seed=seed,
                progress=False,
            )
            for seed in seeds
        ]
        for method in methods
    }


def shares_of_all(runs: dict[str, list[subnetact.nas.SearchResult]]) -> dict[str, list[float]]:
    """Return the hypervolume of every run as a share of the hypervolume of all runs together."""
    every = [c for found in runs.values() for run in found for c in run.evaluated]
    reference = min(c.accuracy for c in every), max(c.latency_ms for c in every)
    whole = hypervolume([(c.accuracy, c.latency_ms) for c in front_of(every)], reference)
    return {
        method: [share(run.evaluated, reference, whole) for run in found] for method, found in runs.items()
    }


def digits(this: Run) -> dict[str, Any]:
    """Search a tenth of the digits space; the accuracies are true ones, the latency is the MACs."""
    supernet, accuracy, macs, data = true_digits(this.args.truth)
    points = [(accuracy[spec], macs[spec]) for spec in accuracy]
    reference = min(a for a, _ in points), max(m for _, m in points)
    whole = hypervolume(points, reference)
    front = pareto_front(accuracy, cost=macs.__getitem__, gain=accuracy.__getitem__)
    result: dict[str, Any] = {
        "what": data["what"],
        "subnets": len(accuracy),
        "evaluations": len(accuracy) // 10,
        "front": [[macs[spec], accuracy[spec]] for spec in front],
        "all": [[round(m, 4), round(a, 3)] for a, m in points],
        "reference": reference,
    }
    runs = searches(
        supernet,
        accuracy.__getitem__,
        macs.__getitem__,
        result["evaluations"],
        ("evolution", "random"),
        SEEDS[: this.args.seeds],
    )
    for method, found in runs.items():
        shares = [share(run.evaluated, reference, whole) for run in found]
        worst = found[int(np.argmin(shares))]
        result[method] = {
            "share_of_hypervolume": shares,
            "worst_front": [[c.latency_ms, c.accuracy] for c in worst.front],
        }
        print(f"digits, {method}: {min(shares):.4f} at the worst of {len(shares)} seeds")
    return result


def made_up_accuracy(space: subnetact.SubnetSpace) -> Callable[[SubnetSpec], float]:
    """Return a made-up accuracy: a saturating function of depth, widths and kernels, block by block.

    The function predicts nothing. It rewards balance: a slot adds less the larger its choice is, so that
    among subnets with equal operations neither very deep nor very wide ones are the best.
    """
    tops = [slot.choices[-1] for axis in space.axes for slot in axis.slots]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, len(tops))

    def accuracy(spec: SubnetSpec) -> float:
        values = [value for chosen in space.values(spec).values() for value in chosen]
        shares = [0.0 if v is None else float(v) / float(top) for v, top in zip(values, tops, strict=True)]
        return float(80 - 40 * np.exp(-3 * float(weights @ np.sqrt(shares)) / weights.sum()))

    return accuracy


def large_space(family: str) -> tuple[subnetact.Supernet, Objective, Objective]:
    """Return a supernet of a large space with a made-up accuracy and a made-up latency."""
    supernet = load(family)
    model = CostModel(supernet, torch.empty(1, 3, 224, 224))

    def milliseconds(spec: SubnetSpec) -> float:
        cost = model(spec)
        return 2 + cost.macs / 1e8 + cost.activation_bytes / 5e7

    return supernet, made_up_accuracy(supernet.space), milliseconds


def families(this: Run) -> dict[str, Any]:
    """Compare evolution with random search on large spaces, with the same number of evaluations."""
    result: dict[str, Any] = {
        "what": "accuracy: a made-up saturating function of the choices; latency: a made-up 2 ms + 1 ms "
        "per 100 million multiply-accumulates + 1 ms per 50 MB of activations, at 224 px",
        "evaluations": this.args.evaluations,
    }
    for family in FAMILIES:
        runs = searches(
            *large_space(family),
            this.args.evaluations,
            ("evolution", "random"),
            SEEDS[: min(5, this.args.seeds)],
        )
        shares = shares_of_all(runs)
        result[family] = {
            method: {
                "share_of_hypervolume": shares[method],
                "subnets_in_front": [len(front_of(run.evaluated)) for run in found],
                "front": [[c.latency_ms, c.accuracy] for c in found[0].front],
            }
            for method, found in runs.items()
        }
        for method, some in shares.items():
            print(f"{family}, {method}: {min(some):.4f} .. {max(some):.4f}")
    return result


def report(result: dict[str, Any]) -> list[str]:
    """Draw the plots, and return the lines of results/search.md."""
    lines = []
    if "digits" in result and "families" in result:
        plot(result)
        lines += fronts(result)
    return lines


def fronts(result: dict[str, Any]) -> list[str]:
    """Return what the searches found, as lines of Markdown."""
    found, large, methods = result["digits"], result["families"], ("evolution", "random")
    shares = {method: found[method]["share_of_hypervolume"] for method in methods}
    small = [[m, f"{min(s):.4f}", f"{np.mean(s):.4f}", f"{max(s):.4f}"] for m, s in shares.items()]
    rows = []
    for family in FAMILIES:
        for method in methods:
            s, sizes = (large[family][method][key] for key in ("share_of_hypervolume", "subnets_in_front"))
            of_front = f"{min(sizes)} to {max(sizes)}"
            rows.append([f"{family}, {method}", f"{min(s):.4f}", f"{np.mean(s):.4f}", of_front])
    return [
        f"**Digits**, {found['subnets']} subnets, true accuracies ({found['what'].split(';')[0]}), MACs as "
        f"latency; {found['evaluations']} evaluations, {len(shares['evolution'])} seeds. Hypervolume as a "
        "share of the whole space's:",
        "",
        *table(["", "worst seed", "mean", "best"], small),
        "",
        f"**Large spaces**, {large['evaluations']} evaluations, 5 seeds, made-up objectives "
        f"({large['what']}). "
        "Hypervolume as a share of all runs' together:",
        "",
        *table(["", "worst seed", "mean", "subnets in the front"], rows),
        "",
        "![Fronts of evolution and random search](search.png)",
    ]


def plot(result: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    found = result["digits"]
    axes[0].scatter(*zip(*found["all"], strict=True), s=3, color="tab:gray", label="all subnets")
    axes[0].step(*zip(*found["front"], strict=True), where="post", color="black", label="exhaustive front")
    for method, colour in (("evolution", "tab:blue"), ("random", "tab:orange")):
        axes[0].step(
            *zip(*found[method]["worst_front"], strict=True),
            where="post",
            color=colour,
            label=f"{method}, its worst seed",
        )
    axes[0].set(xlabel="million MACs", ylabel="true accuracy (%)", xscale="log")
    axes[0].set_title(f"digits: {found['evaluations']} of {found['subnets']} subnets evaluated")
    for axis, family in zip(axes[1:], FAMILIES, strict=True):
        for method, colour in (("evolution", "tab:blue"), ("random", "tab:orange")):
            points = result["families"][family][method]["front"]
            axis.plot(*zip(*points, strict=True), ".-", color=colour, label=method)
        axis.set(xlabel="made-up latency (ms)", ylabel="made-up accuracy")
        axis.set_title(f"{family}: {result['families']['evaluations']} evaluations")
    for axis in axes:
        axis.legend()
    figure.savefig(RESULTS / "search.png", dpi=110)
    plt.close(figure)


def main() -> None:
    parts = {each.__name__: each for each in (truth, digits, families)}
    parser = options_of(__doc__, "search", parts)
    add = parser.add_argument
    add("--truth", type=Path, default=TRUTH, help="file of the true accuracies")
    add("--evaluations", type=int, default=1000, help="per search of a large space")
    add("--seeds", type=int, default=len(SEEDS), help="searches per method, 1 to 10")
    run(parser, "search", parts, report)


if __name__ == "__main__":
    main()
