"""Make a segmentation network of your own elastic, and teach its small subnets the task again.

A fully convolutional network on an encoder of timm learns drawn scenes of discs, squares and rings. Printed
is the mean IoU on scenes with more noise: sorted by importance and calibrated, then distilled; and that of
the smallest subnet trained alone, for as many steps. The JSON and the figure are from a run. For your data,
replace `scene`; for your network, `Segmenter`. Of a detector, make elastic what returns maps, and distil
these: labels=False, task="values", and as output= a function that joins them into one tensor.

Run `pip install 'subnetact[plot]' timm` and `python examples/elastic_segmentation.py --out DIR`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import subnetact
from subnetact.latency.plot import plot_front
from subnetact.training import distill_

CLASSES, EPOCHS = 4, 6


def scene(rng: np.random.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Draw an image (3, 48, 48) of some shapes, and its mask (48, 48)."""
    y, x = np.mgrid[:48, :48] / 48
    image, mask = np.full((3, 48, 48), rng.uniform(0, 1, (3, 1, 1))), np.zeros((48, 48), np.int64)
    for kind in rng.integers(1, CLASSES, rng.integers(2, 6)):
        (a, b), size = rng.uniform(0.1, 0.9, 2), rng.uniform(0.1, 0.22)
        r, square = np.hypot(x - a, y - b) / size, np.maximum(abs(x - a), abs(y - b)) / size
        inside = (r < 1, square < 0.85, abs(r - 0.75) < 0.25)[kind - 1]
        image[:, inside], mask[inside] = rng.uniform(0, 1, (3, 1)), kind
    return torch.tensor(image + rng.normal(0, noise, image.shape)).float(), torch.tensor(mask)


class Segmenter(nn.Module):
    """Maps images (N, 3, H, W) to scores (N, classes, H, W), the sum of those at four resolutions."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"channels": (16, 32, 64, 128), "stem_width": 16, "stem_type": "deep"}
        self.encoder = timm.create_model("resnet18", features_only=True, out_indices=range(4), **sizes)
        self.heads = nn.ModuleList(nn.Conv2d(n, CLASSES, 3, padding=1) for n in (32, 16, 32, 64))

    def forward(self, x: Tensor) -> Tensor:
        maps = [head(part) for head, part in zip(self.heads, self.encoder(x), strict=True)]
        return torch.stack([F.interpolate(part, x.shape[-2:], mode="bilinear") for part in maps]).sum(0)


def mean_iou(scores: Tensor, masks: Tensor) -> Tensor:
    found, true = F.one_hot(scores.argmax(1), CLASSES), F.one_hot(masks, CLASSES)
    return 100 * ((found & true).sum((0, 1, 2)) / (found | true).sum((0, 1, 2))).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("segmentation"), help="folder of the results")
    parser.add_argument("--scenes", type=int, default=1600, help="scenes of the training")
    parser.add_argument("--steps", type=int, default=400, help="of the distillation, with 16 scenes each")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    clear: Any = [scene(rng, 0.15) for _ in range(args.scenes)]
    noisy: Any = [scene(rng, 0.25) for _ in range(96)]
    batches, others = DataLoader(clear, 16, shuffle=True), list(DataLoader(noisy, 96))
    network, example = Segmenter(), noisy[0][0][None]
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    for images, masks in (batch for _ in range(EPOCHS) for batch in batches):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(network(images), masks))
        optimizer.step()
    supernet = subnetact.insert_(network.eval(), example=example)
    subnetact.reorder_(supernet, "l1", example=example)
    whole, small = map(supernet.extract, (supernet.space.largest(), supernet.space.smallest()))
    given = {"held_out": others, "metric": mean_iou, "steps": args.steps, "importance": None}
    report = distill_(supernet, batches, learning_rate=2e-3, **given)
    one = subnetact.insert_(small, example=example, axes=("width",), choices=(1.0,))
    alone = distill_(one, batches, whole, learning_rate=2e-3, distillation=0.5, **given)
    engine = subnetact.Engine(supernet, report.subnets, example=example)
    table = subnetact.profile_latency(engine, [1], accuracy=report.after, tolerance=20.0)
    plot_front(table, args.out / "front.png")
    found = {"alone": alone.after[0], "latency_ms": table.latency_ms[:, 0].tolist()}
    print(report, found)
    found = {**report.to_json(), **found, "machine": dict(table.stamp)}
    (args.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
