"""Do low-rank corrections pay beside statistics per subnet, in a network with BatchNorm?

The timm example's ResNet, calibrated on 1,024 distorted digits; behind every residual block, a correction of
rank 16 is fitted by ridge regression from the block's output to what the largest subnet has there, block after
block, on the same images, and kept where it helps on a quarter that it was not fitted to.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peers import import_torchvision
from torch import Tensor, nn

import subnetact
from subnetact.digits import read_digits

import_torchvision()
import distil_timm_model  # noqa: E402

RANK, RIDGE = 16, 0.3


def rows(maps: Tensor) -> Tensor:
    """Return (positions, channels), of every fourth position."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)[::4]


def fitted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the weights (out, in) and bias that bring x nearer to y, or None where they do not help."""
    count = len(x) * 3 // 4
    mean, center = x[:count].mean(0), (y - x)[:count].mean(0)
    a, b = x[:count] - mean, (y - x)[:count] - center
    penalty = RIDGE * a.square().sum(0).mean() * torch.eye(a.shape[1])
    weights = torch.linalg.solve(a.T @ a + penalty, a.T @ b)
    _, _, basis = torch.linalg.svd(a @ weights, full_matrices=False)
    weights = (weights @ basis[:RANK].T @ basis[:RANK]).T
    bias = center - weights @ mean
    held, target = x[count:], y[count:]
    before = (target - held).square().sum()
    after = (target - held - held @ weights.T - bias).square().sum()
    return (weights, bias) if after < before else None


@torch.no_grad()
def correct(model: nn.Module, whole: nn.Module, images: Tensor) -> int:
    """Hook corrections into an extracted network; return how many."""
    hooked = 0
    for path, block in model.named_modules():
        if type(block).__name__ != "BasicBlock":
            continue
        seen = dict[str, Tensor]()
        handles = [
            m.get_submodule(path).register_forward_hook(lambda m, a, y, k=k: seen.update({k: y}))
            for k, m in (("own", model), ("full", whole))
        ]
        model(images), whole(images)
        for handle in handles:
            handle.remove()
        own = rows(seen["own"])
        if (found := fitted(own, rows(seen["full"])[:, : own.shape[1]])) is not None:
            w, b = found

            def add(m: nn.Module, a: Any, y: Tensor, w: Tensor = w, b: Tensor = b) -> Tensor:
                return y + nn.functional.conv2d(y, w[:, :, None, None], b)

            block.register_forward_hook(add)
            hooked += 1
    return hooked


def right(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return round(float((model(images).argmax(1) == labels).float().mean()) * 100, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("model.pt"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.seeds):
        model, test = distil_timm_model.pretrained(args.model, 500), read_digits()[1]
        supernet = subnetact.insert_(model, example=test.images[:2], choices=(0.5, 0.75, 1.0))
        subnetact.reorder_(supernet, "l1", test.images[:2])
        torch.manual_seed(seed)
        batches = [x for x, _ in distil_timm_model.DistortedDigits()][:16]
        scores = subnetact.nas.score_layers(supernet, batches[:8], progress=False)
        largest = supernet.space.largest()
        whole = supernet.extract(largest).eval()
        for share in (0.3, 0.4, 0.5, 0.6):
            spec = scores.best({"macs": share})
            subnetact.calibrate(supernet, [spec], batches, progress=False)
            part = supernet.extract(spec).eval()
            before = right(part, *test)
            hooked = correct(part, whole, torch.cat(batches))
            print(
                json.dumps(
                    {
                        "seed": seed,
                        "share": share,
                        "calibrated": before,
                        "corrected": right(part, *test),
                        "blocks": hooked,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
