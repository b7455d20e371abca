"""Compares fused programs with frozen TorchScript of the same subnets, and both with the extracted network.

    python benchmarks/frozen.py [--networks vit_tiny mobilenet_v3 resnet18 unet ofa_resnet50 ofa_mbv3]
        [--batch-sizes 1 8] [--threads 1] [--seconds 10] [--out benchmarks/results/frozen.json]

timm's ViT-tiny, torchvision's MobileNetV3 and ResNet-18, and a UNet become elastic with `insert_`; the OFA
networks are supernets already. The smallest and the largest subnet run at 224 pixels, with random weights.
TorchScript is traced from the extracted network and frozen; `optimized` also went through
`optimize_for_inference`. All contenders of a cell run in turns in one process. A figure is the median of the
CPU time of the calling thread divided by that of the extracted network, which other work on the machine
hardly moves. With `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` a machine with AVX-512 stands in for one
without. A line is added to `--out` for each cell, and cells of the same instructions are replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from linear import shares
from peers import import_torchvision
from torch import Tensor, nn
from tqdm import tqdm

import subnetact
from ofa_adapters import load
from subnetact.comparison import FUSED, equal
from subnetact.device import machine
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

BUDGET_MB = 2048.0
FAMILIES = ("ofa_resnet50", "ofa_mbv3")
PIXELS = 224
"""Height and width of the images."""


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A UNet of three levels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = double_conv(3, width), double_conv(width, 2 * width)
        self.middle, self.pool = double_conv(2 * width, 4 * width), nn.MaxPool2d(2)
        self.raise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = double_conv(4 * width, 2 * width)
        self.raise1, self.up1 = (
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            double_conv(2 * width, width),
        )
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 2, H, W)."""
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.raise2(self.middle(self.pool(second)))
        x = self.up2(torch.cat([second, x], 1))
        return self.head(self.up1(torch.cat([first, self.raise1(x)], 1)))  # type: ignore[no-any-return]


def supernet_of(name: str) -> Supernet:
    """Return the supernet of a network with random weights."""
    torch.manual_seed(0)
    if name in FAMILIES:
        return load(name).eval()
    import_torchvision()
    import timm
    import torchvision

    network: nn.Module = {
        "vit_tiny": lambda: timm.create_model("vit_tiny_patch16_224"),
        "mobilenet_v3": torchvision.models.mobilenet_v3_large,
        "resnet18": torchvision.models.resnet18,
        "unet": UNet,
    }[name]()
    pixels = PIXELS if name == "vit_tiny" else 64
    return subnetact.insert_(network.eval(), example=torch.randn(1, 3, pixels, pixels)).eval()


def contenders(supernet: Supernet, spec: SubnetSpec, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the runs of a cell, the extracted network first."""
    extracted = supernet.extract(spec).eval()
    scripting: Any = torch.jit
    frozen = scripting.freeze(scripting.trace(extracted, x))
    optimized = scripting.optimize_for_inference(scripting.freeze(scripting.trace(extracted, x)))
    engine = subnetact.Engine(
        supernet, [spec], example=x[:1], memory_budget_mb=BUDGET_MB, allow_uncalibrated=True, check=False
    )
    pinned = engine.pin(0)
    if not pinned:
        raise RuntimeError(f"{spec} could not become a fused program: {pinned.reason}")
    return {
        "extracted": lambda: extracted(x),
        "frozen": lambda: frozen(x),
        "optimized": lambda: optimized(x),
        "view": lambda: supernet(x, subnet=spec),
        "fused": lambda: engine(x, subnet=0),
    }


def main() -> None:
    """Measure, print and write all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ("vit_tiny", "mobilenet_v3", "resnet18", "unet", *FAMILIES)
    parser.add_argument("--networks", nargs="+", choices=every, default=every)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="per cell, at least")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/frozen.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    stamp = machine(torch.device("cpu"))
    document = json.loads(args.out.read_text()) if args.out.exists() else {}
    cells = document.setdefault(stamp["instructions"], {"machine": stamp, "cells": {}})["cells"]
    for name in tqdm(args.networks, "networks"):
        supernet = supernet_of(name)
        for size in ("smallest", "largest"):
            for batch in args.batch_sizes:
                x = torch.randn(batch, 3, PIXELS, PIXELS)
                with torch.inference_mode():
                    runs = contenders(supernet, getattr(supernet.space, size)(), x)
                    expected = runs["extracted"]()
                    wrong = [kind for kind, run in runs.items() if not equal(run(), expected, FUSED)]
                if wrong:
                    raise RuntimeError(f"{name} {size}: {', '.join(wrong)} differ from the extracted network")
                cell = shares(runs, args.seconds)
                cells[f"{name} {size}, batch {batch}"] = cell
                print(f"{name} {size}, batch {batch}: {cell}", flush=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
