"""Half of a pretrained transformer in minutes, without training: scores of layers, a budget, corrections.

The model is a small vision transformer that is trained here first, on handwritten digits, because no weights
need to be downloaded for it; bring your own, and inputs like those that it will see. Run `pip install
'subnetact[demo,nas]' timm` and `python examples/half_without_training.py`. The figures of a language model
are in `docs/howto/budget.md`.
"""

from __future__ import annotations

import argparse
from typing import Any

import timm
import torch
from torch import nn

import subnetact
from subnetact.digits import Digits, undistorted_digits
from subnetact.nas import score_layers


def pretrained(data: Digits, steps: int) -> nn.Module:
    """Return an ordinary trained model."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 6, "num_heads": 4}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        chosen = torch.randint(len(data.labels), (64,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.images[chosen]), data.labels[chosen])
        torch.autograd.backward(loss)
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pretraining", type=int, default=1500, help="steps of the ordinary model")
    args = parser.parse_args()
    training, held_out = undistorted_digits()
    model = pretrained(training, args.pretraining)

    # Every block has a size of its own: neurons and heads, and it may be skipped.
    supernet = subnetact.insert_(
        model, example=training.images[:2], axes=("ffn", "heads", "depth"), each_block=True
    )
    space = supernet.space
    subnetact.reorder_(supernet, "taylor", batches=[(training.images[:256], training.labels[:256])])
    inputs = list(torch.split(training.images[:512], 128))  # No labels are needed from here on.
    scores = score_layers(supernet, inputs[:2])
    test = list(zip(*(torch.split(part, 128) for part in held_out), strict=True))

    def accuracy(spec: subnetact.SubnetSpec) -> float:
        return subnetact.evaluate(supernet, [spec], test, progress=False)[0]

    print(f"the whole model: {accuracy(space.largest()):.1f} % right")
    largest = scores.costs(space.largest()).macs
    half = {axis.name: axis.slots[0].choices[0] for axis in space.axes}
    alike = space.spec(**{**half, "depth": 1.0})
    share = scores.costs(alike).macs / largest
    print(f"the same half of every block, {share:.2f} of the multiply-accumulates: {accuracy(alike):.1f} %")
    for budget in (share, 0.65, 0.8):
        chosen = scores.best({"macs": budget})
        plain = accuracy(chosen)
        report = subnetact.calibrate(supernet, [chosen], inputs, corrections=8)
        corrected = f"with {report.corrected[chosen]} corrections {accuracy(chosen):.1f} %"
        print(f"chosen for {budget:.2f}: {plain:.1f} %, {corrected}")
        print(f"    {chosen.key}")
    engine = subnetact.Engine(supernet, scores.front(5), example=training.images[:1])
    print(f"an engine of {len(engine.specs)} subnets is ready")


if __name__ == "__main__":
    main()
