"""int8 products for CPUs without VNNI, compared with float32, over the layers of a network.

There, sums of two products of uint8 and int8 numbers saturate in 16 bits, so inputs have 7 bits: from -63 to
63, plus 64, with one scale per row of a linear layer and per sample of a convolution. oneDNN's kernels read a
weight in a layout of their own: packed for one subnet and kept (`kept`), or packed in every call
(`in_the_call`). `strided` is `torch._int_mm` on a slice, which needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from interleaved_passes import interleaved_ms
from torch import Tensor, nn

from subnetact.operators.lowered_weight import LoweredWeight

__all__ = ["layers_of", "packed_layers"]

MOST, ZERO = 63, 64
BASE = "float32"


def layers_of(network: nn.Module, x: Any) -> Counter[tuple[Any, ...]]:
    """Return how often a network runs a layer of each kind and shape, apart from grouped convolutions."""
    found: Counter[tuple[Any, ...]] = Counter()

    def note(module: Any, args: Any, _: Any) -> None:
        if isinstance(module, nn.Linear):
            found[
                "linear", args[0].numel() // module.in_features, module.in_features, module.out_features
            ] += 1
        elif module.groups == 1:
            settings = (module.out_channels, module.kernel_size, module.stride, module.padding)
            layer = ("convolution", tuple(args[0].shape), *settings)
            found[layer] += 1

    hooks = [
        module.register_forward_hook(note)
        for module in network.modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    with torch.inference_mode():
        network(x)
    for hook in hooks:
        hook.remove()
    return found


def packed_layers(layers: Counter[tuple[Any, ...]], seconds: float) -> dict[str, Any]:
    """Measure every layer, and add up the shortest times."""
    rows: list[dict[str, Any]] = []
    total: Counter[str] = Counter()
    for layer, times in layers.items():
        torch.manual_seed(0)
        runs, exact = (linear if layer[0] == "linear" else convolution)(*layer[1:])
        with torch.inference_mode():
            right = exact()
            off = {name: float((run() - right).norm() / right.norm()) for name, run in runs.items()}
            taken = {name: min(ms) for name, ms in interleaved_ms(runs, seconds, passes=3).items()}
        total.update({name: times * ms for name, ms in taken.items()})
        ratio = {name: ms / taken[BASE] for name, ms in taken.items()}
        rows.append({"layer": layer, "times": times, "ms": taken[BASE], "ratio": ratio, "error": off})
    everywhere = [name for name in total if all(name in row["ratio"] for row in rows)]
    return {
        "layers_ms": total[BASE],
        "ratio": {name: total[name] / total[BASE] for name in everywhere},
        "layers": rows,
    }


def linear(
    rows: int, features: int, out: int
) -> tuple[dict[str, Callable[[], Tensor]], Callable[[], Tensor]]:
    """Return the contenders for a linear layer, and the exact product that they are compared with."""
    x, full, bias = torch.randn(rows, features), torch.randn(out, features), torch.randn(out)
    short, scale = LoweredWeight.made(full, 8)
    assert scale is not None
    zeros, one = torch.zeros(out, dtype=torch.int32), torch.ones(out)
    kept = pack_linear(short)

    def run(multiply: Callable[[Tensor], Tensor], zero: int) -> Tensor:
        sizes = x.abs().amax(1, keepdim=True).mul_(1 / MOST)
        rounded = (x * sizes.reciprocal()).round_().add_(zero)
        return multiply(rounded).mul_(sizes).mul_(scale).add_(bias)

    def onednn(weight: Callable[[], Tensor], rounded: Tensor) -> Tensor:
        given = (rounded.to(torch.uint8), 1.0, ZERO, weight(), one, zeros, None, 1.0, 0, torch.float32)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(*given, "none", [], "")
        return product

    def strided(rounded: Tensor) -> Tensor:
        return torch._int_mm(rounded.to(torch.int8), short.t()).float()

    runs: dict[str, Callable[[], Tensor]] = {
        BASE: lambda: F.linear(x, full, bias),
        "kept": partial(run, partial(onednn, lambda: kept), ZERO),
        "in_the_call": partial(run, partial(onednn, lambda: pack_linear(short.clone())), ZERO),
        "strided": partial(run, strided, 0),
    }
    return runs, lambda: F.linear(x.double(), full.double(), bias.double()).float()


def pack_linear(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def convolution(
    shape: tuple[int, ...], out: int, kernel: Any, stride: Any, padding: Any
) -> tuple[dict[str, Callable[[], Tensor]], Callable[[], Tensor]]:
    """Return the contenders for a convolution: float32 is packed, as in fused programs."""
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    full = torch.randn(out, shape[1], *kernel)
    short, scale = LoweredWeight.made(full, 8)
    settings = [list(padding), list(stride), [1, 1], 1]
    plain = torch.ops.mkldnn._reorder_convolution_weight(full, *settings, list(shape))
    zeros = torch.zeros(out, dtype=torch.int32)

    def pack(weight: Tensor) -> Tensor:
        one = [1, *shape[1:]]
        packed: Tensor = torch.ops.onednn.qconv_prepack(
            weight, scale, 1.0, ZERO, *settings[1::-1], *settings[2:], one
        )
        return packed

    kept = pack(short)

    def run(weight: Callable[[], Tensor]) -> Tensor:
        flat = x.permute(0, 2, 3, 1).reshape(len(x), -1)
        sizes = flat.abs().amax(1, keepdim=True).mul_(1 / MOST)
        numbers = torch.mul(flat, sizes.reciprocal()).round_().add_(ZERO).to(torch.uint8)
        samples = numbers.view(len(x), 1, *shape[2:], shape[1]).permute(0, 1, 4, 2, 3)
        packed = weight()
        convolve = torch.ops.onednn.qconv2d_pointwise
        after = (None, *settings[1::-1], *settings[2:], 1.0, 0, torch.float32, "none", [], "")
        return torch.cat(
            [
                convolve(one, size, ZERO, packed, scale, zeros, *after)
                for one, size in zip(samples, sizes[:, 0].tolist(), strict=True)
            ]
        )

    runs: dict[str, Callable[[], Tensor]] = {
        BASE: lambda: torch.ops.mkldnn._convolution_pointwise(x, plain, None, *settings, "none", [], ""),
        "kept": lambda: run(lambda: kept),
        "in_the_call": lambda: run(lambda: pack(short.clone())),
    }
    return runs, lambda: F.conv2d(x, full, None, stride, padding)
