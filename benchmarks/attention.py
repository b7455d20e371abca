"""Compares the engine with the alternatives on attention networks: AutoFormer, DynaBERT, a ViT, and a BERT.

    python benchmarks/attention.py [--networks autoformer dynabert vit bert] [--sizes smallest largest]
        [--batch-sizes 1 8] [--threads 1] [--seconds 20] [--compile] [--out benchmarks/results/attention.json]

AutoFormer-tiny runs at 224 pixels, DynaBERT-base and the BERT-base of Hugging Face on 128 tokens, and timm's
ViT-small at 224 pixels, with random weights. All contenders of a cell run in one process, in turns. A pass
runs every contender once, in random order. A ratio is the median, over all passes, of a contender's time
divided by the time of upstream's network in eager mode (`upstream_eager`): the extracted weights, computed as
upstream's code computes them. For AutoFormer these are tables with an entry per pair of tokens and feature,
for DynaBERT scores and softmax as separate operations and a GELU of five operations (`peers.py`). timm and
Hugging Face are their own upstream. Cells are added to `--out`, so that they may be measured in pieces.
`--profile` prints where the time of the fused program goes, and measures nothing. `--report` draws the plot
and writes the table into results/attention.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bar_plot import plot_bars
from interleaved_passes import interleaved_ms, ratios
from peers import as_upstream_autoformer, as_upstream_dynabert, import_torchvision
from results_section import write_section
from torch import Tensor

import subnetact
from ofa_adapters import load
from subnetact.comparison import FUSED, equal
from subnetact.device import machine
from subnetact.supernet.batches import logits
from subnetact.supernet.supernet import Supernet

BASE = "upstream_eager"
BUDGET_MB = 2048.0
KINDS = {
    "products": (
        "mkl::_mkl_linear",
        "mkldnn::_linear_pointwise",
        "mkldnn::_convolution_pointwise",
        "aten::mkldnn_convolution",
        "aten::addmm",
        "aten::mm",
        "aten::bmm",
    ),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "norms": ("aten::native_layer_norm",),
    "activations": ("aten::gelu", "aten::gelu_"),
}
"""What the profile of a program is summed up by; all other operations are `rest`."""
Network = tuple[Supernet, Callable[[Any], Any], Callable[[int], Tensor]]


def network_of(name: str) -> Network:
    """Return a supernet, what makes upstream's network of an extracted one, and what makes a batch."""
    torch.manual_seed(0)

    def same(network: Any) -> Any:
        return network

    if name == "autoformer":
        return load(name).eval(), as_upstream_autoformer, lambda n: torch.randn(n, 3, 224, 224)
    if name == "dynabert":
        return load(name).eval(), as_upstream_dynabert, lambda n: torch.randint(0, 30522, (n, 128))
    if name == "vit":
        import_torchvision()
        import timm

        network: Any = timm.create_model("vit_small_patch16_224")
        network.eval()
        supernet = subnetact.insert_(network, example=torch.randn(1, 3, 224, 224))
        return supernet.eval(), same, lambda n: torch.randn(n, 3, 224, 224)
    import_torchvision()
    from transformers import BertConfig, BertForSequenceClassification

    network = BertForSequenceClassification(BertConfig())
    network.eval()
    supernet = subnetact.insert_(network, example=torch.randint(0, 30522, (1, 128)))
    return supernet.eval(), same, lambda n: torch.randint(0, 30522, (n, 128))


def measure(args: argparse.Namespace, name: str, size: str, batch: int) -> dict[str, Any]:
    supernet, as_upstream, inputs = network_of(name)
    spec = getattr(supernet.space, size)()
    x = inputs(batch)
    extracted: Any = supernet.extract(spec).eval()
    upstream = as_upstream(copy.deepcopy(extracted))
    runs: dict[str, Callable[[], Any]] = {
        BASE: partial(upstream, x),
        "extracted_eager": partial(extracted, x),
    }
    if args.compile:
        import torch._inductor.config as inductor

        torch.compiler.reset()
        inductor.freezing = True
        compiled: Any = torch.compile(upstream, dynamic=False)
        runs["torch_compile"] = partial(compiled, x)
    engines = {
        kind: subnetact.Engine(
            supernet, [spec], example=x[:1], memory_budget_mb=budget, allow_uncalibrated=True, check=False
        )
        for kind, budget in (("zero_copy", 0.0), ("fused", BUDGET_MB))
    }
    pinned = engines["fused"].pin(0)
    runs.update((kind, partial(engine, x, subnet=0)) for kind, engine in engines.items())
    if args.profile:
        print(profiled(runs["fused"]).table(sort_by="self_cpu_time_total", row_limit=12))
        return {}
    with torch.inference_mode():
        expected = logits(runs[BASE]())
        difference = {}
        for kind, run in runs.items():
            run()
            output = logits(run())
            difference[kind] = float((output - expected).abs().max())
            if not equal(output, expected, FUSED):
                raise RuntimeError(f"{kind} differs from upstream by {difference[kind]}")
        times = interleaved_ms(runs, args.seconds)
    return {
        "network": name,
        "size": size,
        "batch": batch,
        "passes": len(times[BASE]),
        "median_ms": {kind: median(taken) for kind, taken in times.items()},
        "ratio": ratios(times, BASE),
        "fused_to_zero_copy": ratios(times, "zero_copy")["fused"],
        "fused": pinned.fused,
        "reason": pinned.reason,
        "fused_MiB": engines["fused"].stats().fused_bytes / 2**20,
        "fused_share": shares(runs["fused"]),
        "largest_output": float(expected.abs().max()),
        "largest_difference": difference,
    }


def profiled(run: Callable[[], Any]) -> Any:
    """Return the operations of three runs, with their times."""
    with torch.inference_mode(), torch.profiler.profile() as profile:
        for _ in range(3):
            run()
    return profile.key_averages()


def shares(run: Callable[[], Any]) -> dict[str, float]:
    """Return the shares of a run's time that kinds of operations take."""
    taken = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in profiled(run):
        kind = next((kind for kind, names in KINDS.items() if event.key in names), "rest")
        taken[kind] += event.self_cpu_time_total
    return {kind: one / sum(taken.values()) for kind, one in taken.items()}


def report(result: dict[str, Any], out: Path) -> None:
    """Draw the plot, and write the figures into results/attention.md."""
    on, cells = result["machine"], result["cells"]
    labels = [f"{cell['network']}\n{cell['size']}\nbatch {cell['batch']}" for cell in cells]
    title = f"{on['device_name']}, {on['threads']} thread(s)"
    axis = "time / upstream's network in eager mode"
    plot_bars([cell["ratio"] for cell in cells], labels, title, axis, out.with_suffix(".png"))
    names = list(dict.fromkeys(kind for cell in result["cells"] for kind in cell["ratio"] if kind != BASE))
    lines = [
        f"{on['device_name']}, {on['threads']} thread(s), torch {on['torch']}, float32. `ms` is the time of "
        "upstream's network in eager mode; the other columns are times divided by that time, medians over "
        "interleaved passes. The last three columns are the fused program's time divided by that of the "
        "view (zero_copy), the memory of its packed weights, and the shares of its time that matrix products "
        "and convolutions, attention (`scaled_dot_product_attention`) and everything else take.",
        "",
        f"| network | ms | {' | '.join(names)} | fused / zero_copy | MiB | products, attention, else |",
        f"|{'---|' * (len(names) + 5)}",
    ]
    for cell in result["cells"]:
        ratios = " | ".join(f"{cell['ratio'][n]:.2f}" if n in cell["ratio"] else "-" for n in names)
        lines.append(
            f"| {cell['network']}, {cell['size']}, batch {cell['batch']} | "
            f"{cell['median_ms'][BASE]:.0f} | {ratios} | {cell['fused_to_zero_copy']:.2f} | "
            f"{cell['fused_MiB']:.0f} | {shared(cell)} |"
        )
    write_section("attention", lines)


def shared(cell: dict[str, Any]) -> str:
    found = cell.get("fused_share")
    if found is None:
        return "-"
    products, attention = found["products"], found["attention"]
    return ", ".join(f"{100 * one:.0f} %" for one in (products, attention, 1 - products - attention))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    networks = ["autoformer", "dynabert", "vit", "bert"]
    parser.add_argument("--networks", nargs="+", default=networks, choices=networks)
    parser.add_argument("--sizes", nargs="+", default=["smallest", "largest"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="per cell, at least 7 passes")
    parser.add_argument("--compile", action="store_true", help="also torch.compile with freezing")
    parser.add_argument(
        "--profile", action="store_true", help="print a profile of the fused program and stop"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.json"))
    parser.add_argument("--report", action="store_true", help="draw, write the page in results/ and stop")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"cells": []}
    if args.report:
        return report(result, args.out)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    result["machine"] = machine(torch.device("cpu"))
    for name in args.networks:
        for size in args.sizes:
            for batch in args.batch_sizes:
                cell = measure(args, name, size, batch)
                if not cell:
                    continue
                key = (name, size, batch)
                others = [c for c in result["cells"] if (c["network"], c["size"], c["batch"]) != key]
                result["cells"] = sorted(
                    [*others, cell],
                    key=lambda c: (networks.index(c["network"]), c["size"] != "smallest", c["batch"]),
                )
                args.out.write_text(json.dumps(result, indent=1) + "\n")
                ratios = "  ".join(f"{kind} {ratio:.3f}" for kind, ratio in cell["ratio"].items())
                print(f"{name} {size} batch {batch}: {cell['median_ms'][BASE]:.1f} ms  {ratios}", flush=True)
    return None


if __name__ == "__main__":
    main()
