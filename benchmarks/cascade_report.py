"""Compare cascades with single subnets, from the answers and times that `cascade.py` has written.

`cascade.py --report` writes `results/cascade.json` and `docs/figures/cascade.png`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
CONFIDENCES: dict[str, Callable[[Any], Any]] = {
    "margin": lambda p: np.diff(np.sort(p, -1)[..., -2:], axis=-1)[..., 0],
    "probability": lambda p: p.max(-1),
    "entropy": lambda p: (p * np.log(p + 1e-30)).sum(-1),
}
SHARES = np.arange(0.05, 0.96, 0.05)
"""Shares of the inputs chosen on that are asked again: each gives a threshold."""
GRID = np.linspace(0.0, 1.0, 41)
"""Where gains are measured: 0 is the time of the quickest subnet of the hull, 1 that of the most accurate."""
Points = NDArray[np.float64]


def halves(answers: Any, seed: int) -> dict[str, tuple[Any, Any]]:
    """Return answers and labels to choose on, and to measure on; no digit or docstring is in both."""
    rng = np.random.default_rng(seed)
    groups, group = np.unique(answers["group"].numpy(), return_inverse=True)
    drawn = rng.permutation(len(groups))[group] % 2
    parts = [torch.from_numpy(rng.permutation(np.flatnonzero(drawn == i))) for i in range(2)]
    sets = [(answers["logits"][:, part], answers["labels"][part]) for part in parts]
    return dict(zip(("validation", "test"), sets, strict=True))


def pairs(taken: Any, size: int) -> list[tuple[int, int]]:
    """Return all pairs of a quicker and a slower subnet."""
    each = [ms[size - 1] for ms in taken["subnet_ms"]]
    return [(i, j) for i in range(len(each)) for j in range(len(each)) if each[i] < each[j]]


def points(split: Any, levels: Any, taken: Any, size: int, way: str) -> Points:
    """Return the ms per input and the accuracy of all single subnets, then of cascades (2, candidates)."""
    logits, labels = split
    ms, choice = np.array(taken["subnet_ms"])[:, :size], np.array(taken["choice_ms"][str(size)])
    right = 100.0 * (logits.argmax(-1) == labels).numpy()
    sure = CONFIDENCES.get(way, CONFIDENCES["margin"])(logits.softmax(-1).numpy())
    found = [np.stack([ms[:, -1], right.mean(-1)])]
    for small, large in pairs(taken, size):
        asked = sure[small] < levels[small][:, None]
        if way == "pooled":  # those that are asked again wait until they fill a batch
            cost = choice[-1] + asked.mean(-1) * ms[large, -1]
        else:
            again = asked[:, : asked.shape[1] // size * size].reshape(len(asked), -1, size).sum(-1)
            cost = (choice + np.array([0.0, *ms[large]]))[again].mean(-1)
        found.append(np.stack([ms[small, -1] + cost, np.where(asked, right[large], right[small]).mean(-1)]))
    joined = np.concatenate(found, 1)
    return np.stack([joined[0] / size, joined[1]])


def hull(ms: Any, accuracy: Any) -> list[int]:
    """Return the vertices of the upper concave hull, from the quickest to the most accurate."""
    kept: list[int] = []
    for i in np.lexsort((-accuracy, ms)):
        if kept and accuracy[i] <= accuracy[kept[-1]]:
            continue
        while len(kept) > 1:
            a, b = kept[-2:]
            if (accuracy[b] - accuracy[a]) * (ms[i] - ms[a]) > (accuracy[i] - accuracy[a]) * (ms[b] - ms[a]):
                break
            kept.pop()
        kept.append(int(i))
    return kept


def compared(answers: Any, taken: Any, size: int, way: str) -> dict[str, Any]:
    """Return what cascades gain in points at equal times, for one seed and batch size."""
    probabilities = answers["validation"][0].softmax(-1).numpy()
    levels = np.quantile(CONFIDENCES.get(way, CONFIDENCES["margin"])(probabilities), SHARES, axis=1).T
    chosen_on, test = (points(answers[part], levels, taken, size, way) for part in ("validation", "test"))
    singles = len(levels)
    base, every, hindsight = hull(*chosen_on[:, :singles]), hull(*chosen_on), hull(*test[:, :singles])
    first, last = chosen_on[0, base[0]], chosen_on[0, base[-1]]
    budget = first + GRID * (last - first)
    ms, accuracy = (np.interp(budget, chosen_on[0, every], test[i, every]) for i in range(2))
    single = np.interp(ms, test[0, base], test[1, base])
    reached = np.flatnonzero(accuracy >= test[1, base[-1]])
    used = [pairs(taken, size)[(i - singles) // len(SHARES)] for i in every if i >= singles]
    return {
        "gain": accuracy - single,
        "single": single,
        "over_hindsight": accuracy - np.interp(ms, test[0, hindsight], test[1, hindsight]),
        "time_of_the_accuracy_of_the_largest": float(ms[reached[0]] / last) if len(reached) else None,
        "time_over_plan": float((ms / budget - 1.0).max()),
        "pairs": sorted(set(used)),
        "range": float(last / first),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one figure for all seeds, and the curves."""
    gain = np.stack([run["gain"] for run in runs])
    mean = gain.mean(0)
    return {
        "mean_gain": float(mean.mean()),
        "mean_gain_of_seeds": gain.mean(1).tolist(),
        "mean_gain_over_hindsight": float(np.mean([run["over_hindsight"] for run in runs])),
        "of_the_range_at_least_1": float((mean >= 1.0).mean()),
        "of_the_range_below_0": float((mean < 0.0).mean()),
        "curve": {
            "mean": mean.round(3).tolist(),
            "least": gain.min(0).tolist(),
            "most": gain.max(0).tolist(),
        },
        "single": np.mean([run["single"] for run in runs], 0).tolist(),
        **{name: [run[name] for run in runs] for name in list(runs[0])[3:]},
    }


def draw(result: dict[str, Any]) -> None:
    """Draw the gain over the whole range, with the least and the most of the seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, network in zip(axes, ("digits", "minilm"), strict=True):
        for size in result[network]["batches"]:
            found = result[network]["batches"][size]["margin"]
            (line,) = axis.plot(GRID, found["curve"]["mean"], label=f"batches of {size}")
            axis.fill_between(
                GRID, found["curve"]["least"], found["curve"]["most"], color=line.get_color(), alpha=0.1
            )
        for level, style in ((0.0, "-"), (1.0, ":")):
            axis.axhline(level, color="black", linewidth=0.6, linestyle=style)
        axis.set_title({"digits": "digits", "minilm": "all-MiniLM-L6-v2"}[network], fontsize=10)
        axis.set_xlabel("time: 0 is the quickest subnet, 1 the most accurate")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("points over single subnets in equal time")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "figures" / "cascade.png", dpi=110)


def report(work: Path) -> None:
    """Compare all networks, batch sizes and confidences, and write the results and the figure."""
    taken = {name: json.loads((work / f"times_{name}.json").read_text()) for name in ("digits", "minilm")}
    result: dict[str, Any] = {"times": taken, "grid": GRID.tolist()}
    for network in ("digits", "minilm"):
        files = [torch.load(path) for path in sorted(work.glob(f"{network}_*.pt"))]
        answers = [halves(files[seed % len(files)], seed) for seed in range(5)]
        tests = [a["test"] for a in answers]
        right = [(logits.argmax(-1) == y).double().mean(-1).mul(100).tolist() for logits, y in tests]
        result[network] = {"files": len(files), "accuracy": right, "batches": {}}
        for size in map(int, taken[network]["choice_ms"]):
            ways = result[network]["batches"][str(size)] = {}
            for way in (*CONFIDENCES, "pooled"):
                found = ways[way] = summary([compared(a, taken[network], size, way) for a in answers])
                shown = {k: f"{v:+.2f}" for k, v in found.items() if isinstance(v, float)}
                print(network, size, way, shown)
    short = json.loads(json.dumps(result), parse_float=lambda x: round(float(x), 4))
    (ROOT / "benchmarks" / "results" / "cascade.json").write_text(json.dumps(short) + "\n")
    draw(result)
