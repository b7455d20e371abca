"""Compares int8 subnets with float32 and with the quantisation of torch and torchao; memory and switching.

    python benchmarks/precision.py [--families dynabert ofa_resnet50 ofa_mbv3] [--batch-sizes 1 8]
        [--only forward memory switch] [--out benchmarks/results/precision.json]

All contenders of a cell run in one process, in turns, in random order. A ratio is the median, over all
passes, of a contender's time divided by that of the extracted float32 network in eager mode. Measured cells
are written after each cell, and cells that the file has already are not measured again: a run may be split.
A machine that refuses a precision gets a row that says why. torchao is measured
if it is installed. `--report` draws the plot of a measured file and writes its figures into
results/precision.md.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from harness import RESULTS, Run, interleaved_ms, options_of, plot_bars, ratios, resident_mb, run, table
from torch import Tensor, nn

import subnetact
from ofa_adapters import load
from subnetact.operators.kernel_table import why_not
from subnetact.supernet import Supernet, batch_norms
from subnetact.supernet.bind import packed_bytes

BASE = "eager_float32"
ROOMY_MB = 2048.0
TOKENS, PIXELS = 128, 224
CPU = torch.device("cpu")


def supernet_of(family: str) -> Supernet:
    torch.manual_seed(0)
    supernet = load(family)
    for name, weight in supernet.named_parameters():
        if weight.dim() == 4:  # The default initialisation leaves deep networks without a signal.
            nn.init.kaiming_normal_(weight)
        elif weight.dim() == 2 and "embed" not in name and family == "dynabert":
            nn.init.normal_(weight, std=0.04)
    supernet.refresh()
    if batch_norms(supernet.network):  # Statistics of its own, so that activations have the usual sizes.
        batches = list(torch.randn(2, 4, 3, PIXELS, PIXELS))
        subnetact.calibrate(supernet, [supernet.space.largest()], batches, progress=False, check=False)
    return supernet.eval()


def inputs_of(family: str, batch: int) -> Tensor:
    torch.manual_seed(1)
    if family == "dynabert":
        return torch.randint(0, 30_000, (batch, TOKENS))
    return torch.randn(batch, 3, PIXELS, PIXELS).contiguous(memory_format=torch.channels_last)


def engine_of(supernet: Supernet, spec: Any, x: Tensor, budget: float) -> subnetact.Engine:
    return subnetact.Engine(
        supernet, [spec], example=x[:1], memory_budget_mb=budget, allow_uncalibrated=True, check=False
    )


def contenders(
    supernet: Supernet, spec: subnetact.SubnetSpec, x: Tensor, precisions: list[str]
) -> dict[str, Callable[[], Any]]:
    space = supernet.space
    exact = space.at_precision(spec, "float32")
    extracted: Any = supernet.extract(exact)
    runs: dict[str, Callable[[], Any]] = {BASE: lambda: extracted(x)}
    torchs: Any = torch.ao.quantization
    quantised = torchs.quantize_dynamic(copy.deepcopy(extracted), {nn.Linear}, torch.qint8)
    runs["quantize_dynamic"] = lambda: quantised(x)
    torchao = torchao_network(extracted)
    if torchao is not None:
        runs["torchao_eager"] = lambda: torchao(x)
    for precision in ("float32", *precisions):
        low = space.at_precision(spec, precision)
        runs[f"view_{precision}"] = partial(engine_of(supernet, low, x, 0.0), x, subnet=0)
        engine = engine_of(supernet, low, x, ROOMY_MB)
        if engine.pin(0):
            runs[f"fused_{precision}"] = partial(engine, x, subnet=0)
    return runs


def torchao_network(network: nn.Module) -> Any:
    """Return the network with torchao's dynamic int8 quantisation, or None if torchao is not installed."""
    try:
        torchao = import_module("torchao.quantization")
    except ImportError:
        return None
    made = copy.deepcopy(network)
    torchao.quantize_(made, torchao.Int8DynamicActivationInt8WeightConfig())
    return made


def timed(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
    error = {}
    with torch.inference_mode():
        expected = runs[BASE]()
        for name, run in list(runs.items()):
            run(), run()
            error[name] = float((run() - expected).norm() / expected.norm())
        times = interleaved_ms(runs, seconds)
    return {
        "passes": len(times[BASE]),
        "median_ms": {name: median(taken) for name, taken in times.items()},
        "ratio": ratios(times, BASE),
        "relative_error": error,
    }


def forward(this: Run) -> None:
    cells = this.known.setdefault("forward", [])
    for family in this.args.families:
        for batch in this.args.batch_sizes:
            if any(cell["family"] == family and cell["batch"] == batch for cell in cells):
                continue
            supernet = supernet_of(family)
            refused = {name: why for name in this.args.precisions if (why := why_not(name, CPU))}
            runnable = [name for name in this.args.precisions if name not in refused]
            if runnable:
                supernet.enable_precision(*runnable)
            runs = contenders(supernet, supernet.space.largest(), inputs_of(family, batch), runnable)
            facts = {"family": family, "batch": batch, "refused": refused}
            cells.append({**facts, **timed(runs, this.args.seconds)})
            ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in cells[-1]["ratio"].items())
            print(f"{family} batch {batch}: {cells[-1]['median_ms'][BASE]:.1f} ms  {ratios}", flush=True)
            this.save()


def refuses_int8(part: str, this: Run) -> bool:
    """Tell whether this machine refuses int8, and say so in the result."""
    why = why_not("int8", CPU)
    if why is not None:
        this.known.setdefault("refused", {})[part] = why
        print(f"{part}: int8 is refused, {why}", flush=True)
    return why is not None


def memory(this: Run) -> None:
    """Count the resident memory of 1000 subnets at each precision, each in a process of its own."""
    if refuses_int8("memory", this):
        return
    found = this.known.setdefault("memory", {})
    for family in this.args.families:
        for precision in ("float32", "int8"):
            if precision not in found.setdefault(family, {}):
                with get_context("spawn").Pool(1) as pool:
                    found[family][precision] = pool.apply(memory_of, (family, precision))
                print(family, precision, found[family][precision], flush=True)
                this.save()


def memory_of(family: str, precision: str) -> dict[str, float]:
    """Return what up to 1000 subnets take beyond the weights and the int8 copy, in MiB."""
    supernet = supernet_of(family)
    exact = supernet.space.sample(1, 1000)
    space = supernet.enable_precision("int8")
    specs = [space.at_precision(spec, precision) for spec in exact]
    largest = space.at_precision(space.largest(), precision)
    engine = subnetact.Engine(supernet, [largest], allow_uncalibrated=True)
    before = resident_mb()
    for spec in specs:
        engine.register(spec)
    return {
        "subnets": len(engine) - 1,
        "beyond_MiB": resident_mb() - before,
        "lowered_MiB": packed_bytes(supernet.network, "lowered") / 2**20,
        "weights_MiB": engine.stats().weights / 2**20,
    }


def switch(this: Run) -> None:
    """Measure how long choosing another subnet takes, which differs in the precision only."""
    if refuses_int8("switch_us", this):
        return
    found = this.known.setdefault("switch_us", {})
    for family in this.args.families:
        supernet = supernet_of(family)
        space = supernet.enable_precision("int8")
        specs = [space.at_precision(space.largest(), name) for name in ("float32", "int8")]
        engine = subnetact.Engine(supernet, specs, allow_uncalibrated=True)
        taken = []
        for i in range(20_000):
            start = time.perf_counter_ns()
            engine.ready(i % 2)
            taken.append((time.perf_counter_ns() - start) / 1e3)
        found[family] = median(taken)
        print(family, found[family], flush=True)
    this.save()


def report(result: dict[str, Any]) -> list[str]:
    """Draw the plot, and return the lines of results/precision.md."""
    on, cells = result["machine"], result["forward"]
    labels = [f"{cell['family']}\nbatch {cell['batch']}" for cell in cells]
    title = f"largest subnets, {on['device_name']}, {on['threads']} thread(s)"
    times = [cell["ratio"] for cell in cells]
    plot_bars(times, labels, title, "time / eager float32", RESULTS / "precision.png", top=1.6)
    names = list(dict.fromkeys(name for cell in result["forward"] for name in cell["ratio"] if name != BASE))
    lines = [
        f"{on['device_name']}, {on.get('instructions', 'AVX-512 VNNI')}, {on['threads']} thread(s), "
        f"torch {on['torch']}, largest subnets. `ms` is the "
        "time of the extracted float32 network in eager mode; the other columns are times divided by that "
        "time, medians over interleaved passes.",
        "",
    ]
    rows = []
    for cell in result["forward"]:
        shown = [f"{cell['ratio'][n]:.2f}" if n in cell["ratio"] else "-" for n in names]
        rows.append([f"{cell['family']}, batch {cell['batch']}", f"{cell['median_ms'][BASE]:.0f}", *shown])
    lines += table(["network", "ms", *names], rows)
    refusals = {name: why for cell in result["forward"] for name, why in cell.get("refused", {}).items()}
    lines += ["", *(f"{name} is refused: {why}." for name, why in refusals.items())]
    lines += [
        "",
        "| | subnets | at float32, MiB | at int8, MiB | the int8 copy, MiB | float32 weights, MiB | choosing "
        "the other precision, us |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, found in result.get("memory", {}).items():
        exact, low = found["float32"], found["int8"]
        lines.append(
            f"| {family} | {exact['subnets']} | {exact['beyond_MiB']:.1f} | {low['beyond_MiB']:.1f} | "
            f"{low['lowered_MiB']:.1f} | {low['weights_MiB']:.1f} | {result['switch_us'][family]:.2f} |"
        )
    return lines


def main() -> None:
    parts = {"forward": forward, "memory": memory, "switch": switch}
    parser = options_of(__doc__, "precision", parts)
    parser.add_argument("--families", nargs="+", default=["dynabert", "ofa_resnet50", "ofa_mbv3"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--precisions", nargs="+", default=["int8"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of timed running per cell")
    warnings.simplefilter("ignore")
    run(parser, "precision", parts, report, machine_of_each=False)


if __name__ == "__main__":
    main()
