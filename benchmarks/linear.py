"""Compares the kernels of linear layers and of 1 x 1 convolutions, and networks of linear layers as views and
as fused programs.

    python benchmarks/linear.py [--threads 1] [--seconds 2] [--out benchmarks/results/linear.json]

`subnetact/engine/packed_linear.py` chooses a kernel by the maker of the processor, `packed_conv.py` there by
the size of a convolution, and `fusion_plan.py` whether networks of linear layers are fused at all; this is
their trial. All
contenders of a cell run in turns in one process. A figure is the median of the CPU time of the calling
thread divided by that of the plain product, or of the network itself, which other work on the machine hardly
moves.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.device import machine
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.packed_conv import PackedConv
from subnetact.engine.packed_linear import PackedLinear, is_intel
from subnetact.operators.operation_traits import operation_of

SIZES = ((192, 192), (192, 768), (768, 192), (768, 768), (768, 3072), (512, 1000))
ROWS = (1, 8, 32, 197, 788)
POINTWISE = ((1, 240, 64), (14, 40, 240), (14, 240, 40), (28, 40, 120), (7, 960, 160), (56, 24, 72),
             (14, 512, 512), (7, 1024, 2048))  # fmt: skip
"""Height and width, inputs and outputs of 1 x 1 convolutions."""
NETWORKS = (
    (256, 4, 32, 1),
    (256, 4, 128, 1),
    (256, 4, 32, 8),
    (768, 2, 8, 1),
    (768, 2, 32, 1),
    (768, 2, 128, 1),
)
"""Width, layers, tokens and batch size of transformer encoders."""


def shares(contenders: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median time of every contender, as a share of the first one's."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.inference_mode():
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(times[next(iter(times))]) < 15:
            for name, run in contenders.items():
                run()  # Its weights are in the caches then, as in a server that runs one subnet.
                for _ in range(3):
                    start = time.thread_time()
                    run()
                    times[name].append(time.thread_time() - start)
    first = median(next(iter(times.values())))
    return {name: round(median(found) / first, 3) for name, found in times.items()}


def product(inputs: int, outputs: int, rows: int) -> dict[str, Callable[[], Any]]:
    """Return the contenders of one size: plain, packed by MKL, packed by oneDNN, and what is chosen here."""
    layer, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    mkl = torch.ops.mkl._mkl_reorder_linear_weight(weight, 256)
    onednn = torch.ops.mkldnn._reorder_linear_weight(weight, 512)
    shape: Tensor = torch.empty(1).expand(outputs, inputs)
    chosen = PackedLinear(layer)
    return {
        "plain": lambda: F.linear(x, weight, bias),
        "mkl": lambda: torch.ops.mkl._mkl_linear(x, mkl, shape, bias, rows),
        "onednn": lambda: torch.ops.mkldnn._linear_pointwise(x, onednn, bias, "none", [], ""),
        "chosen": lambda: chosen.forward(x),
    }


def pointwise(side: int, inputs: int, outputs: int, batch: int) -> dict[str, Callable[[], Any]]:
    """Return the contenders of a 1 x 1 convolution and a ReLU: plain, by oneDNN, as a product, the chosen."""
    conv = nn.Conv2d(inputs, outputs, 1)
    x = torch.randn(batch, inputs, side, side).contiguous(memory_format=torch.channels_last)
    settings = [0, 0], [1, 1], [1, 1], 1
    weight, bias = conv.weight.detach(), conv.bias
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *settings, x.shape)
    flat = weight.flatten(1).contiguous()
    chosen = PackedConv(conv, activation=operation_of(torch.relu))
    return {
        "plain": lambda: conv(x).relu_(),
        "onednn": lambda: torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *settings, "relu", [], ""),
        "product": lambda: F.linear(x.permute(0, 2, 3, 1), flat, bias).relu_(),
        "chosen": lambda: chosen(x),
    }


class Block(nn.Module):
    """One layer of a transformer encoder, written with linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // 64

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        n, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.out(found.transpose(1, 2).reshape(n, tokens, width))
        summed: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return summed


def network(width: int, layers: int, tokens: int, size: int) -> dict[str, Callable[[], Any]]:
    """Return an encoder, its fused program, and the frozen TorchScript of it, each with own weights."""
    encoder = nn.Sequential(*(Block(width) for _ in range(layers))).eval()
    x = torch.randn(size, tokens, width)
    with torch.no_grad():
        frozen = torch.jit.freeze(torch.jit.trace(copy.deepcopy(encoder), x))  # type: ignore[no-untyped-call]
    found = {"view": lambda: encoder(x), "torchscript": lambda: frozen(x)}
    with torch.inference_mode(), suppress(ValueError):  # Nothing is packed on some machines.
        fused = FusedProgram(copy.deepcopy(encoder), x)
        found["fused"] = lambda: fused(x)
    return found


def main() -> None:
    """Measure, print and write all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per cell")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/linear.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "aten": torch.backends.cpu.get_cpu_capability(),
        "intel": is_intel(),
        "threads": args.threads,
        "products": [],
        "pointwise": [],
        "networks": [],
    }
    cells = [(*size, rows) for size in SIZES for rows in ROWS]
    for inputs, outputs, rows in tqdm(cells, "products"):
        cell = shares(product(inputs, outputs, rows), args.seconds)
        found["products"].append({"inputs": inputs, "outputs": outputs, "rows": rows, "of_plain": cell})
    for shape, batch in tqdm([(shape, n) for shape in POINTWISE for n in (1, 8)], "1 x 1 convolutions"):
        cell = shares(pointwise(*shape, batch), args.seconds)
        side, inputs, outputs = shape
        found["pointwise"].append(
            {"side": side, "inputs": inputs, "outputs": outputs, "batch": batch, "of_plain": cell}
        )
    for width, layers, tokens, size in tqdm(NETWORKS, "networks"):
        cell = shares(network(width, layers, tokens, size), 3 * args.seconds)
        found["networks"].append(
            {"width": width, "layers": layers, "tokens": tokens, "batch": size, "of_view": cell}
        )
        print(found["networks"][-1])
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
