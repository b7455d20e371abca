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
    curve = {int(n): np.array(values) for n, values in result["curve"].items()}
    draw(curve, result, out.with_suffix(".png"))
    most = max(curve)
    print_row("images", *(f"{n:,}" for n in curve))
    print_row(*["---"] * (len(curve) + 1))
    for row in zip(*(grouped(values.mean(0)).items() for values in curve.values()), strict=True):
        print_row(f"{row[0][0]}, %", *(f"{percent:.1f}" for _, percent in row))
    lost = [curve[most].mean(0) - values.mean(0) for values in curve.values()]
    print_row("lost, the worst of the five", *(f"{x.max():.1f}" for x in lost))
    spread = [values.std(0, ddof=1).max() for values in curve.values()]
    print_row("deviation between draws", *(f"{x:.1f}" for x in spread))
    for part, base in (("batches", str(DRAWN)), ("choice", "as they come")):
        print("")
        print_row(part, *(f"{name}, points" for name in grouped(lost[0])))
        print_row(*["---"] * 4)
        reference = np.array(result[part][base])
        for name, values in result[part].items():
            change = grouped((np.array(values) - reference).mean(0))
            print_row(name, *(f"{round(points, 1) + 0.0:+.1f}" for points in change.values()))


def grouped(values: Any) -> dict[str, float]:
    """Return the value of the smallest subnet, that of the largest, and the mean of those of the others."""
    return {"smallest": values[0], "largest": values[1], "three others": values[2:].mean()}


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def draw(curve: dict[int, Any], result: dict[str, Any], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    full = curve[max(curve)].mean(0)
    labels = ["smallest", "largest", *(f"random {i}" for i in range(1, len(full) - 1))]
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for i, label in enumerate(labels):
        lost = [values[:, i].mean() - full[i] for values in curve.values()]
        spread = [values[:, i].std(ddof=1) for values in curve.values()]
        axes.errorbar(list(curve), lost, spread, label=f"{label}, {full[i]:.1f} %", capsize=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(curve), [f"{n:,}" for n in curve], fontsize=8)
    axes.set_xlabel("images of the calibration, in one batch")
    axes.set_ylabel(f"accuracy - that with {max(curve):,} images, points")
    where = f"{result['machine']['device_name']}, torch {result['machine']['torch']}"
    axes.set_title(f"Digits, {result['draws']} draws, mean and standard deviation ({where})", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


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
