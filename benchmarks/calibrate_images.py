"""Measures how many images, and which, a calibration of the digits supernet needs.

    python benchmarks/calibrate_images.py [--draws 5] [--out benchmarks/results/calibrate_images.json]

Five subnets, the smallest, the largest and three random ones, are calibrated on images that are drawn from
the training digits, and measured on the held-out digits, distorted in four ways.

  curve    draws of 4 to 1,198 images, all in one batch
  batches  600 images in batches of several sizes
  choice   600 images sorted by class; all images of two classes; and 600 images that are dimmed, scaled to
           0..16, inverted, or nothing but noise

Every figure is of the same draws, the first of them with seed 0. `--report` draws the plot and prints the
tables of docs/howto/calibrate.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import subnetact
from subnetact.device import machine
from subnetact.digits import Digits, load_digits_supernet, read_digits
from subnetact.spec import SubnetSpec

SIZES = (4, 8, 16, 32, 64, 128, 300, 600, 1198)
BATCHES = (1, 2, 4, 8, 10, 100, 600)
DRAWN, PER_BATCH = 600, 100
COPIES = 4
"""How often the held-out digits are distorted."""
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "half as bright": lambda x: x / 2,
    "scaled to 0..16": lambda x: x * 16,
    "inverted": lambda x: 1 - x,
    "noise": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
}


def measure(draws: int) -> dict[str, Any]:
    """Return the accuracies, percent, as lists (draws, subnets), by part and setting."""
    supernet, (training, _) = load_digits_supernet(), read_digits()
    specs = supernet.space.sample(0, 5)
    seen = [read_digits(seed=k)[1] for k in range(COPIES)]
    held_out = Digits(torch.cat([s.images for s in seen]), torch.cat([s.labels for s in seen]))
    orders = [
        torch.randperm(len(training.images), generator=torch.Generator().manual_seed(seed))
        for seed in range(draws)
    ]
    drawn = [training.images[order[:DRAWN]] for order in orders]
    settings: dict[str, dict[str, list[Sequence[Tensor]]]] = {
        "curve": {str(n): [[training.images[order[:n]]] for order in orders] for n in SIZES},
        "batches": {str(n): [pieces(images, n) for images in drawn] for n in BATCHES},
        "choice": {
            "as they come": [pieces(images, PER_BATCH) for images in drawn],
            "sorted by class": [pieces(sorted_by_class(training, order), PER_BATCH) for order in orders],
            "two classes": [[of_two_classes(training, k % 5)] for k in range(draws)],
            **{
                name: [pieces(change(images), PER_BATCH) for images in drawn]
                for name, change in CHANGES.items()
            },
        },
    }
    found: dict[str, Any] = {"subnets": [str(spec) for spec in specs], "images": len(held_out.labels)}
    for part, cells in settings.items():
        found[part] = {}
        for name, calibrations in cells.items():
            bar = tqdm(calibrations, desc=f"{part} {name}", disable=None)
            found[part][name] = [accuracies(supernet, specs, batches, held_out) for batches in bar]
            print(part, name, np.mean(found[part][name], 0).round(1), flush=True)
    return found


def pieces(values: Tensor, size: int) -> list[Tensor]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def sorted_by_class(training: Digits, order: Tensor) -> Tensor:
    chosen = order[:DRAWN]
    return training.images[chosen[training.labels[chosen].argsort(stable=True)]]


def of_two_classes(training: Digits, pair: int) -> Tensor:
    return training.images[training.labels // 2 == pair]


def accuracies(
    supernet: subnetact.Supernet, specs: list[SubnetSpec], batches: Sequence[Tensor], held_out: Digits
) -> list[float]:
    subnetact.calibrate(supernet, specs, batches, progress=False)
    loader = zip(pieces(held_out.images, PER_BATCH), pieces(held_out.labels, PER_BATCH), strict=True)
    return list(subnetact.evaluate(supernet, specs, list(loader)))


def report(result: dict[str, Any], out: Path) -> None:
    """Draw the curve, and print the tables of the page in Markdown."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    curve = {int(n): np.array(values) for n, values in result["curve"].items()}
    full = curve[max(curve)].mean(0)
    labels = ["smallest", "largest", *(f"random {i}" for i in range(1, len(full) - 1))]
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for i, label in enumerate(labels):
        lost = np.array([values[:, i].mean() for values in curve.values()]) - full[i]
        spread = np.array([values[:, i].std(ddof=1) for values in curve.values()])
        axes.errorbar(list(curve), lost, spread, label=f"{label}, {full[i]:.1f} %", capsize=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(curve), [f"{n:,}" for n in curve], fontsize=8)
    axes.set_xlabel("images of the calibration, in one batch")
    axes.set_ylabel(f"accuracy - that with {max(curve):,} images, points")
    on = result["machine"]
    where = f"{on['device_name']}, torch {on['torch']}"
    title = f"Digits, {result['draws']} draws, mean and standard deviation ({where})"
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(out.with_suffix(".png"), dpi=110)
    plt.close(figure)
    print("| images | " + " | ".join(f"{n:,}" for n in curve) + " |\n" + "|---" * (len(curve) + 1) + "|")
    for i, label in enumerate(labels):
        print(f"| {label} | " + " | ".join(f"{v[:, i].mean():.1f}" for v in curve.values()) + " |")
    worst = [min(v.mean(0) - full) for v in curve.values()]
    print("| most lost on average | " + " | ".join(f"{w:.1f}" for w in worst) + " |")
    print("| most lost in one draw | " + " | ".join(f"{(v - full).min():.1f}" for v in curve.values()) + " |")
    for part, base in (("batches", "600"), ("choice", "as they come")):
        reference = np.array(result[part][base])
        for name, values in result[part].items():
            lost = (np.array(values) - reference).mean(0)
            print(f"| {part} {name} | " + " | ".join(f"{x:+.1f}" for x in lost) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibrate_images.json"))
    parser.add_argument("--report", action="store_true", help="draw and print what is in --out, and stop")
    args = parser.parse_args()
    if args.report:
        return report(json.loads(args.out.read_text()), args.out)
    torch.set_num_threads(1)
    result = {"machine": machine(torch.device("cpu")), "draws": args.draws, **measure(args.draws)}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return report(result, args.out)


if __name__ == "__main__":
    main()
