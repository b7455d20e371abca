"""Train the embedded digits supernet: sandwich rule with in-place distillation.

Each step trains the largest subnet on the labels, and the smallest and two random ones on the
largest one's predictions (BigNAS, ECCV'20, section 3.1; US-Nets, ICCV'19, section 3).
"""

import argparse
import copy
import random
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from subnetact.calibration.calibrate import calibrate
from subnetact.digits import (
    Digits,
    distort,
    new_digits_supernet,
    undistorted_digits,
)
from subnetact.nas.evaluation import evaluate
from subnetact.supernet import batch_norms, statistics_of
from subnetact.supernet.supernet import Supernet
from subnetact.training import sandwich_step


def train(supernet: Supernet, data: Digits, epochs: int, batch_size: int, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    steps = epochs * (len(data.labels) // batch_size)
    optimizer = torch.optim.AdamW(supernet.parameters(), lr=3e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    smoothed = partial(F.cross_entropy, label_smoothing=0.05)
    supernet.train()
    for _ in (bar := tqdm(range(steps), desc="training")):
        chosen = torch.randint(len(data.labels), (batch_size,), generator=generator)
        x, labels = distort(data.images[chosen], generator), data.labels[chosen]
        optimizer.zero_grad(set_to_none=True)
        losses = sandwich_step(supernet, x, labels, rng=rng, loss=smoothed)
        torch.nn.utils.clip_grad_norm_(supernet.parameters(), 2.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{next(iter(losses.values())):.3f}", refresh=False)
    supernet.eval()


def share_largest_statistics(supernet: Supernet, batches: list[torch.Tensor]) -> None:
    """Leave the largest subnet's statistics in the checkpoint, as published supernets do."""
    largest = supernet.space.largest()
    calibrated = copy.deepcopy(supernet)
    calibrate(calibrated, [largest], batches, progress=False)
    statistics, norms = statistics_of(calibrated, largest), batch_norms(supernet.network)
    for name, (mean, var) in statistics.items():
        norms[name].get_buffer("running_mean").copy_(mean)
        norms[name].get_buffer("running_var").copy_(var)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("digits_supernet.safetensors"))
    parser.add_argument("--epochs", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    training, held_out = undistorted_digits()
    supernet = new_digits_supernet()
    train(supernet, training, args.epochs, args.batch_size, args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    batches = [distort(part, generator) for part in torch.split(training.images, 200)]
    share_largest_statistics(supernet, batches)
    test = Digits(distort(held_out.images, generator), held_out.labels)
    specs = supernet.space.sample(0, 6)
    calibrate(supernet, specs, batches)
    for spec, percent in zip(specs, evaluate(supernet, specs, [test]), strict=True):
        print(f"{percent:5.1f} %  {spec}")
    save_file(
        {k: v.half() if v.is_floating_point() else v for k, v in supernet.state_dict().items()}, args.out
    )
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
