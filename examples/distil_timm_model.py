"""Distil a pretrained timm model, so that its narrow and shallow subnets keep their accuracy.

The model is a small ResNet that is trained here first, on distorted handwritten digits, because no weights
need to be downloaded for it; bring your own with `timm.create_model(name, pretrained=True)` and your own
DataLoader. Run `pip install 'subnetact[demo,plot]' timm` and `python examples/distil_timm_model.py`.
Kill it whenever you like: it goes on from its last step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import subnetact
from subnetact.digits import distort, read_digits, undistorted_digits
from subnetact.training import DistillationReport, distill_


class DistortedDigits:
    """Batches of digits that are distorted anew in every epoch; a DataLoader does as well."""

    def __init__(self) -> None:
        self.images, self.labels = undistorted_digits()[0]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.split(torch.randperm(len(self.labels)), 64):
            generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())))
            yield distort(self.images[chosen], generator), self.labels[chosen]


def pretrained(path: Path, steps: int) -> nn.Module:
    """Return an ordinary trained model, from its file if it was trained before."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "resnet18", in_chans=1, num_classes=10, channels=(16, 32, 64, 128), stem_width=8, stem_type="deep"
    )
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    optimizer, step = torch.optim.AdamW(model.parameters(), 2e-3), 0
    while step < steps:
        for x, labels in DistortedDigits():
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), labels))
            optimizer.step()
            step += 1
            if step == steps:
                break
    torch.save(model.state_dict(), path)
    return model.eval()


def draw(report: DistillationReport, path: Path) -> None:
    """Draw the metric before and after, and the losses of the training."""
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    left.plot(report.before, "o--", label="before")
    left.plot(report.after, "o-", label="after")
    left.set(xlabel="subnet, the largest first", ylabel=f"{report.metric}, held-out data")
    steps, *losses = zip(*report.losses, strict=True)
    for name, values in zip(("largest", "smallest", "random"), losses, strict=True):
        right.plot(steps, values, label=name, linewidth=1)
    right.set(xlabel="step", ylabel="training loss", yscale="log")
    left.legend()
    right.legend()
    pyplot.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("distilled"), help="folder of the results")
    parser.add_argument("--pretraining", type=int, default=500, help="steps of the ordinary model")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the distillation")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = pretrained(args.out / "model.pt", args.pretraining)
    held_out = read_digits()[1]
    supernet = subnetact.insert_(model, example=held_out.images[:2], choices=(0.5, 0.75, 1.0))
    print(f"{supernet.space.size():.1e} subnets")
    report = distill_(
        supernet,
        DistortedDigits(),
        held_out=list(zip(*(torch.split(part, 128) for part in held_out), strict=True)),
        steps=args.steps,
        learning_rate=2e-3,
        resume=args.out / "state.safetensors",
    )
    print(report)
    report.save(args.out / "report.json")
    draw(report, args.out / "report.png")
    engine = subnetact.Engine(
        supernet,
        report.subnets,
        example=held_out.images[:1],
        accuracy=list(report.after),
        memory_budget_mb=64,
    )
    engine.save(args.out / "bundle")
    print(f"{args.out / 'bundle'} is ready to be profiled and served")


if __name__ == "__main__":
    main()
