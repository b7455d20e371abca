"""Compares the engine with the alternatives: forward times, switching, memory.

    python benchmarks/engine.py [--families ofa_resnet50 ofa_mbv3] [--pixels 224] [--threads 1]
        [--only forward switch memory] [--compile] [--out benchmarks/results/engine.json]

Upstream is the PyPI package `ofa` with the same random weights. All contenders of a cell run in one process,
in turns. A pass runs every contender once, in random order. A ratio is the median, over all passes, of a
contender's time divided by the time of upstream's extracted network in eager mode (`extracted_eager`).
`--report` draws the plots of a JSON file that was measured before and writes its figures into
results/engine.md.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, Run, interleaved_ms, options_of, plot_bars, ratios, resident_mb, run, table
from peers import upstream_network
from torch import Tensor

import subnetact
from ofa_adapters import load
from subnetact.comparison import FUSED, ROUNDED, equal
from subnetact.device import synchronize
from subnetact.engine.ready_subnet import Bound
from subnetact.spec import SubnetSpec
from subnetact.supernet import NormRow, Supernet, statistics_of
from subnetact.supernet.views import private_view

BASE = "extracted_eager"
ROOMY_MB = 2048.0
SWITCHES = {
    "choose_among_1000_us": "choose one of 1000 built views, us",
    "build_view_ms": "build a view, ms",
    "engine_register_ms": "register a subnet in the engine, ms",
    "upstream_set_active_subnet_us": "upstream: `set_active_subnet`, us",
    "upstream_extract_ms": "upstream: `get_active_subnet`, ms",
    "load_state_dict_from_disk_ms": "load an extracted network's weights from disk, ms",
}


def sizes_of(supernet: Supernet) -> dict[str, SubnetSpec]:
    """Return the smallest and the largest subnet, and of 21 samples the one of median parameter count."""
    rng = random.Random(0)
    sampled = sorted(
        (supernet.space.sample(rng) for _ in range(21)),
        key=lambda s: sum(p.numel() for p in private_view(supernet, s)[0].parameters()),
    )
    return {
        "smallest": supernet.space.smallest(),
        "middle": sampled[10],
        "largest": supernet.space.largest(),
    }


def contenders(
    supernet: Supernet, upstream: Any, spec: SubnetSpec, x: Tensor, with_compile: bool
) -> dict[str, Callable[[], Any]]:
    device = x.device
    extracted: Any
    if upstream is None:
        extracted = supernet.extract(spec)
    else:
        upstream.set_active_subnet(**supernet.space.format(spec))
        extracted = upstream.get_active_subnet(preserve_weight=True).eval().to(device)
    in_channels_last = copy.deepcopy(extracted).to(memory_format=torch.channels_last)
    x_last = x.contiguous(memory_format=torch.channels_last)
    runs: dict[str, Callable[[], Any]] = {
        BASE: lambda: extracted(x),
        "extracted_channels_last": lambda: in_channels_last(x_last),
    }
    if upstream is not None:
        runs["upstream_dynamic"] = lambda: upstream(x)
    scripting: Any = torch.jit
    scripted = scripting.freeze(scripting.trace(extracted, x))
    if device.type == "cpu":
        scripted = scripting.optimize_for_inference(scripted)
    runs["torchscript_frozen"] = lambda: scripted(x)
    if with_compile:
        torch.compiler.reset()  # Otherwise the ninth network of a class runs eagerly, without a message.
        mode = "max-autotune" if device.type == "cuda" else "default"
        compiled: Any = torch.compile(extracted, mode=mode, dynamic=False)
        runs["torch_compile"] = lambda: compiled(x)
    runs["view"] = lambda: supernet(x, subnet=spec)
    for name, budget in (("zero_copy", 0.0), ("fused", ROOMY_MB)):
        engine = subnetact.Engine(
            supernet,
            [spec],
            example=x[:1],
            memory_budget_mb=budget,
            allow_uncalibrated=True,
        )
        if name == "fused" and not engine.pin(0):
            raise RuntimeError(f"{spec} could not become a fused program")
        runs[name] = partial(engine, x, subnet=0)
    return runs


def forward(args: argparse.Namespace, family: str) -> list[dict[str, Any]]:
    try:
        upstream = upstream_network(family).to(args.device)
        supernet = load(family, upstream.state_dict()).to(args.device)
    except ImportError:
        print(
            "ofa is not installed: extracted networks are made by this package, which are the same networks"
        )
        upstream, supernet = None, load(family).to(args.device)
    cells = []
    for size, spec in sizes_of(supernet).items():
        for batch in args.batch_sizes:
            x = torch.randn(batch, 3, args.pixels, args.pixels, device=args.device)
            runs = contenders(supernet, upstream, spec, x, args.compile)
            cells.append(
                {"family": family, "size": size, "batch": batch, **timed(runs, x.device, args.seconds)}
            )
            ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in cells[-1]["ratio"].items())
            print(
                f"{family} {size} batch {batch}: {cells[-1]['median_ms'][BASE]:.1f} ms  {ratios}", flush=True
            )
    return cells


def timed(runs: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, Any]:
    difference = {}
    with torch.inference_mode():
        expected = runs[BASE]()
        for name, run in runs.items():
            run(), run()
            output = run()
            difference[name] = float((output - expected).abs().max())
            folded = name in ("fused", "torchscript_frozen", "torch_compile")
            if not equal(output, expected, FUSED if folded else ROUNDED):
                raise RuntimeError(f"{name} differs from upstream by {difference[name]}")
        times = interleaved_ms(runs, seconds, 5, partial(synchronize, device))
    return {
        "passes": len(times[BASE]),
        "median_ms": {name: median(taken) for name, taken in times.items()},
        "ratio": ratios(times, BASE),
        "ratio_to_channels_last": ratios(times, "extracted_channels_last"),
        "largest_output": float(expected.abs().max()),
        "largest_difference": difference,
    }


def rows_for(supernet: Supernet, specs: list[SubnetSpec]) -> None:
    """Give every subnet random statistics of its own. Only their size matters here."""
    rows = {}
    for spec in specs:
        shared = statistics_of(supernet, spec)
        used = {path: (torch.randn(len(m)) / 10, torch.rand(len(m)) + 0.5) for path, (m, _) in shared.items()}
        rows[spec] = NormRow.of(used)
    supernet.norms.update(rows)


def switch(args: argparse.Namespace, family: str) -> dict[str, Any]:
    upstream = upstream_network(family)
    supernet = load(family, upstream.state_dict())
    specs = supernet.space.sample(1, 1000)
    rows_for(supernet, specs)
    engine = subnetact.Engine(supernet, specs, device=args.device)
    choose, build, bind, activate, extract, from_disk = [], [], [], [], [], []
    rng = random.Random(2)
    for i in rng.choices(range(1000), k=20_000):
        start = time.perf_counter_ns()
        engine.ready(i)
        choose.append((time.perf_counter_ns() - start) / 1e3)
    for spec in specs[:100]:
        start = time.perf_counter_ns()
        private_view(supernet, spec)
        build.append((time.perf_counter_ns() - start) / 1e6)
        start = time.perf_counter_ns()
        Bound.of(supernet, spec)
        bind.append((time.perf_counter_ns() - start) / 1e6)
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs[:15]:
            config = supernet.space.format(spec)
            start = time.perf_counter_ns()
            upstream.set_active_subnet(**config)
            activate.append((time.perf_counter_ns() - start) / 1e3)
            start = time.perf_counter_ns()
            network = upstream.get_active_subnet(preserve_weight=True)
            extract.append((time.perf_counter_ns() - start) / 1e6)
            file = Path(folder) / "subnet.pt"
            torch.save(network.state_dict(), file)
            start = time.perf_counter_ns()
            network.load_state_dict(torch.load(file, weights_only=True))
            from_disk.append((time.perf_counter_ns() - start) / 1e6)
    return {
        "choose_among_1000_us": median(choose),
        "build_view_ms": median(build),
        "engine_register_ms": median(bind),
        "upstream_set_active_subnet_us": median(activate),
        "upstream_extract_ms": median(extract),
        "load_state_dict_from_disk_ms": median(from_disk),
    }


def memory(args: argparse.Namespace, family: str) -> dict[str, Any]:  # noqa: ARG001
    supernet = load(family)
    specs = supernet.space.sample(1, 1000)
    rows_for(supernet, specs)
    private_view(supernet, specs[0])
    table = supernet.norms.nbytes() / len(specs) / 2**20
    before = resident_mb()
    engine = subnetact.Engine(supernet, specs[:1])
    found: dict[str, Any] = {"weights_MiB": engine.stats().weights / 2**20, "resident": {}}
    for count in (1, 10, 100, 1000):
        for spec in specs[len(engine) : count]:
            engine.register(spec)
        found["resident"][count] = {"engine_MiB": resident_mb() - before, "norm_table_MiB": table * count}
    copies = [
        sum(t.numel() * t.element_size() for t in (*view.parameters(), *view.buffers()))
        for view in (private_view(supernet, spec)[0] for spec in specs)
    ]
    for count, held in found["resident"].items():
        held["copies_MiB"] = sum(copies[:count]) / 2**20
    return found


def report(result: dict[str, Any]) -> list[str]:
    """Draw the plots, and return the lines of results/engine.md."""
    on = result["machine"]
    for family, cells in result["forward"].items():
        labels = [f"{cell['size']}\nbatch {cell['batch']}" for cell in cells]
        title = f"{family}, {result['pixels']} px, {on['device_name']}, {on['threads']} thread(s)"
        figure = RESULTS / f"engine_{family}.png"
        axis = "time / upstream's extracted network"
        plot_bars([cell["ratio"] for cell in cells], labels, title, axis, figure)
    lines = [
        f"{on['device_name']}, {on['threads']} thread(s), torch {on['torch']}, {result['pixels']} px, "
        "float32. `ms` is the time of upstream's extracted network in eager mode; the other columns are "
        "times divided by that time, medians over interleaved passes.",
    ]
    for family, cells in result["forward"].items():
        names = [name for name in cells[0]["ratio"] if name != BASE]
        earlier = list(cells[0].get("earlier", {}).get("ratio", ()))
        titles = [*names, *(f"{name} (another run)" for name in earlier)]
        rows = []
        for cell in cells:
            found = [cell["ratio"][name] for name in names]
            found += [cell["earlier"]["ratio"][name] for name in earlier]
            what = f"{cell['size']}, batch {cell['batch']}"
            rows.append([what, f"{cell['median_ms'][BASE]:.1f}", *(f"{one:.2f}" for one in found)])
        lines += ["", *table([family, "ms", *titles], rows)]
    for family, found in result.get("switch", {}).items():
        lines += ["", f"| time to switch, {family} | |", "|---|---|"]
        lines += [f"| {SWITCHES[name]} | {value:.3g} |" for name, value in found.items()]
    for family, found in result.get("memory", {}).items():
        lines += [
            "",
            f"| {family}, weights {found['weights_MiB']:.0f} MiB; resident subnets | beyond weights and "
            "norm table, MiB | norm table, MiB | copies, MiB |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {count} | {m['engine_MiB']:.1f} | {m['norm_table_MiB']:.1f} | {m['copies_MiB']:.0f} |"
            for count, m in found["resident"].items()
        ]
    return lines


def part_of(measure: Callable[[argparse.Namespace, str], Any], first: bool, this: Run) -> None:
    """Measure a part for the families, or for the first of them, and keep each."""
    this.known["pixels"] = this.args.pixels
    for family in this.args.families[:1] if first else this.args.families:
        this.known.setdefault(measure.__name__, {})[family] = measure(this.args, family)
        this.save()


def main() -> None:
    measures = (forward, switch, memory)
    parts = {each.__name__: partial(part_of, each, each is not forward) for each in measures}
    parser = options_of(__doc__, "engine", parts)
    add = parser.add_argument
    add("--families", nargs="+", default=["ofa_resnet50", "ofa_mbv3"])
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 16])
    add("--pixels", type=int, default=224)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seconds", type=float, default=10.0, help="per forward cell, at least 5 passes")
    add("--compile", action="store_true", help="also torch.compile, which takes minutes")
    warnings.simplefilter("ignore", subnetact.errors.UncalibratedSubnetWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    run(parser, "engine", parts, report, machine_of_each=False)


if __name__ == "__main__":
    main()
