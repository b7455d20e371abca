"""The embedded supernet: a small OFA-ResNet-style network trained on handwritten digits, and its data."""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ofa_adapters.layout import conv_norm
from ofa_adapters.networks.ofa_resnet50 import Bottleneck, bottleneck_elastic
from subnetact.errors import SpecError, extra_needed
from subnetact.operators import Elastic, LayerSelect, WeightSlice
from subnetact.space import Axis, AxisValues, SubnetSpace, make_divisible
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.supernet import Supernet

__all__ = [
    "Digits",
    "distort",
    "load_digits_supernet",
    "new_digits_supernet",
    "read_digits",
    "undistorted_digits",
    "validation_and_test",
]

SIDE = 16
"""Height and width of the images in pixels."""
STAGE_WIDTHS = (48, 96, 192)
DEPTHS = (1, 2, 3)
EXPANDS = (0.25, 0.5)
WIDTHS = (0.125, 0.25, 0.5, 1.0)
DIGITS_WEIGHTS = "digits_supernet.safetensors"


class DigitsNet(nn.Module):
    """The full network: a 3x3 stem, three stages of three blocks, mean over the map, classifier."""

    def __init__(self) -> None:
        super().__init__()
        stages, in_ = [], STAGE_WIDTHS[0]
        self.stem, self.bn = nn.Conv2d(1, in_, 3, 1, 1, bias=False), nn.BatchNorm2d(in_)
        for stage, out in enumerate(STAGE_WIDTHS):
            mid = make_divisible(out * EXPANDS[-1])
            first = Bottleneck(in_, mid, out, 1 if stage == 0 else 2, {})
            rest = (Bottleneck(out, mid, out, None, {}) for _ in range(DEPTHS[-1] - 1))
            stages.append(nn.Sequential(first, *rest))
            in_ = out
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(in_, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 1, 16, 16) to logits (N, 10)."""
        x = self.stages(F.relu(self.bn(self.stem(x))))
        return self.classifier(x.mean((2, 3)))  # type: ignore[no-any-return]


def _sizes(values: AxisValues) -> dict[str, int]:
    (width,) = values["width"]
    sizes = {}
    for stage, base in enumerate(STAGE_WIDTHS):
        depth, expand = values["depth"][stage], values["expand"][stage]
        out = make_divisible(base * width)
        sizes[f"stage{stage}"] = out
        sizes[f"stage{stage}.mid"] = make_divisible(out * expand)
        sizes.update({f"stage{stage}.keep{i}": int(i < depth) for i in range(1, DEPTHS[-1])})
    return sizes


def _elastic() -> dict[str, Elastic]:
    elastic = {
        **conv_norm("stem", "bn", None, "stage0"),
        "classifier": WeightSlice.on(in_=f"stage{len(STAGE_WIDTHS) - 1}"),
    }
    before = "stage0"
    for stage in range(len(STAGE_WIDTHS)):
        out = f"stage{stage}"
        kept = {str(i): f"{out}.keep{i}" for i in range(1, DEPTHS[-1])}
        elastic[f"stages.{stage}"] = LayerSelect.on(**kept)
        for i in range(DEPTHS[-1]):
            elastic |= bottleneck_elastic(f"stages.{stage}.{i}", before, f"{out}.mid", out, i == 0)
            before = out
    return elastic


@cache
def _space() -> SubnetSpace:
    names = [f"stage{stage}" for stage in range(len(STAGE_WIDTHS))]
    axes = [
        Axis.uniform("depth", names, DEPTHS),
        Axis.uniform("expand", names, EXPANDS),
        Axis.uniform("width", ["all"], WIDTHS),
    ]
    return SubnetSpace("digits", axes, _sizes)


def new_digits_supernet() -> Supernet:
    """Return the supernet with random weights; its depth and expand ratio are those of each stage."""
    supernet = put_operators_(DigitsNet(), _space(), _elastic())
    supernet.origin = {"name": "digits", "constructor": {}}
    return supernet


def load_digits_supernet() -> Supernet:
    """Return the trained supernet that ships with the package (float16 on disk, float32 in memory)."""
    supernet = new_digits_supernet()
    with as_file(files("subnetact") / "data" / DIGITS_WEIGHTS) as path:
        supernet.load_state_dict(load_file(path))
    return supernet.eval()


class Digits(NamedTuple):
    """Handwritten digits: images (N, 1, 16, 16), or (N, 1, 8, 8) if undistorted, and labels (N,)."""

    images: Tensor
    labels: Tensor


def read_digits(seed: int = 0) -> tuple[Digits, Digits]:
    """Return what the shipped supernet was trained for: distorted digits as (training, held-out) sets.

    Every third of scikit-learn's 1,797 digits is held out; the supernet has never seen these 599. Other seeds
    distort the same digits in other ways.

    Example:
        >>> training, held_out = read_digits()
        >>> subnetact.evaluate(supernet, specs, [held_out])
    """
    generator = torch.Generator().manual_seed(seed)
    plain = undistorted_digits()
    training, held_out = (Digits(distort(data.images, generator), data.labels) for data in plain)
    return training, held_out


def validation_and_test(copies: int = 3, seed: int = 0) -> tuple[Digits, Digits]:
    """Return the distorted held-out digits as two sets of different digits, to choose on and to test on."""
    seen = [read_digits(seed + i)[1] for i in range(copies)]
    first, second = (
        Digits(torch.cat([s.images[i::2] for s in seen]), torch.cat([s.labels[i::2] for s in seen]))
        for i in range(2)
    )
    return first, second


def undistorted_digits() -> tuple[Digits, Digits]:
    """Return the digits as images (N, 1, 8, 8) in 0..1, as (training, held-out) sets, for `distort`."""
    with extra_needed("the digits come with scikit-learn: pip install 'subnetact[demo]'"):
        from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy((data.images / 16).astype(np.float32)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    held_out = torch.arange(len(labels)) % 3 == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, scale, shear, shift, dim, cover and add noise: (N, 1, 8, 8) -> (N, 1, 16, 16)."""
    n = len(images)
    if images.shape[1:] != (1, 8, 8):
        raise SpecError(
            f"distort takes images (N, 1, 8, 8) of undistorted_digits(), got {tuple(images.shape)}"
        )

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(n, *shape).uniform_(low, high, generator=generator)

    angle = uniform(-math.pi / 6, math.pi / 6)
    scale, stretch = uniform(0.8, 1.5), uniform(0.8, 1.25)
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    first = torch.stack([cos * stretch, -sin + uniform(-0.25, 0.25), uniform(-0.2, 0.2)], 1)
    second = torch.stack([sin, cos / stretch, uniform(-0.2, 0.2)], 1)
    affine = torch.stack([first, second], 1)
    grid = F.affine_grid(affine, [n, 1, SIDE, SIDE], align_corners=False)
    x = F.grid_sample(images, grid, align_corners=False) * uniform(0.5, 1.0, 1, 1, 1)
    for _ in range(2):
        rows, columns = torch.arange(SIDE).view(1, SIDE, 1), torch.arange(SIDE).view(1, 1, SIDE)
        top, left, size = uniform(0, SIDE, 1, 1), uniform(0, SIDE, 1, 1), uniform(2, 5, 1, 1)
        inside = (rows >= top) & (rows < top + size) & (columns >= left) & (columns < left + size)
        x = torch.where(inside.unsqueeze(1), uniform(0, 1, 1, 1, 1), x)
    return x + 0.2 * torch.randn(x.shape, generator=generator)
