"""Calibrates 20 subnets of OFA-ResNet50, and compares with upstream's `set_running_statistics`.

    python benchmarks/calibrate.py [--parts speed exact saved table] [--pixels 128] [--batch 16]
        [--batches 1] [--windows 3] [--threads 1] [--out benchmarks/results/calibrate.json]

Upstream is the PyPI package `ofa` with the same random weights, images and subnets. Each subnet is made
active and `set_running_statistics` is called, as the package's users do. Both sides run in one process and
take turns. A window is one calibration by each side, and the ratio is the median of the ratios of the
windows.

There are two sets of subnets. `independent` are random subnets, which have little in common. `pareto` are
neighbours, as an evolutionary search leaves them on its front: each differs from an earlier one in one or two
slots. `--report` writes the figures in `--out` into results/calibrate.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import upstream_network
from results_section import write_section
from torch import Tensor
from tqdm import tqdm

import subnetact
import subnetact.calibration
from ofa_adapters import load
from ofa_adapters.registry import family_of
from subnetact.calibration.run import CalibrationRun
from subnetact.device import machine
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import Supernet

FAMILY = "ofa_resnet50"


def independent(supernet: Supernet, count: int, seed: int = 0) -> list[SubnetSpec]:
    return supernet.space.sample(seed, count + 2)[2:]


def pareto(supernet: Supernet, count: int, seed: int = 0) -> list[SubnetSpec]:
    """Return a few random subnets, and mutants with one or two slots of an earlier subnet changed."""
    rng, space = random.Random(seed), supernet.space
    found = dict.fromkeys(independent(supernet, max(2, count // 10), seed))
    while len(found) < count:
        values = {axis: list(slots) for axis, slots in rng.choice(list(found)).values}
        for _ in range(rng.choice((1, 2))):
            axis = rng.choice(space.axes)
            slot = rng.randrange(len(axis.slots))
            values[axis.name][slot] = rng.choice(axis.slots[slot].choices)
        # A slot that was unused and is used now takes its first choice.
        full = {
            axis.name: [
                s.choices[0] if v is None else v for s, v in zip(axis.slots, values[axis.name], strict=True)
            ]
            for axis in space.axes
        }
        found[space.spec(**full)] = None
    return list(found)


SETS: dict[str, Callable[[Supernet, int], list[SubnetSpec]]] = {"independent": independent, "pareto": pareto}


def by_upstream(
    upstream: Any, supernet: Supernet, specs: list[SubnetSpec], batches: list[Tensor]
) -> tuple[float, list[dict[str, Tensor]]]:
    """Return upstream's seconds, and the statistics it leaves in its own buffers."""
    from ofa.imagenet_classification.elastic_nn.utils import set_running_statistics

    rename, seconds, found = family_of(FAMILY).rename, 0.0, []
    loader = [(batch, torch.zeros(len(batch))) for batch in batches]
    for spec in specs:
        start = time.perf_counter()
        upstream.set_active_subnet(**supernet.space.format(spec))
        set_running_statistics(upstream, loader)
        seconds += time.perf_counter() - start
        found.append({rename(n): t.clone() for n, t in upstream.state_dict().items() if "running_" in n})
    return seconds, found


def difference(
    supernet: Supernet, specs: list[SubnetSpec], theirs: list[dict[str, Tensor]]
) -> dict[str, float]:
    """Return the largest |a - b| / (1 + |b|) of all means and of all variances."""
    worst = {"mean": 0.0, "var": 0.0}
    for spec, buffers in zip(specs, theirs, strict=True):
        row = supernet.norms.get(spec)
        assert row is not None  # just calibrated
        for path, pair in row.pairs().items():
            for name, own in zip(worst, pair, strict=True):
                other = buffers[f"{path}.running_{name}"][: len(own)]
                worst[name] = max(worst[name], float(((own - other).abs() / (1 + other.abs())).max()))
    return worst


def images(args: argparse.Namespace, batch: int, batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 3, args.pixels, args.pixels, generator=generator) for _ in range(batches)]


def speed(args: argparse.Namespace, upstream: Any, supernet: Supernet) -> dict[str, Any]:
    batches = images(args, args.batch, args.batches)
    result: dict[str, Any] = {"batch": args.batch, "batches": args.batches, "subnets": args.subnets}
    for name, choose in SETS.items():
        specs = choose(supernet, args.subnets)
        ours: list[float] = []
        theirs: list[float] = []
        statistics: list[dict[str, Tensor]] = []
        subnetact.calibrate(supernet, specs[:1], [batches[0][:2]], progress=False)
        by_upstream(upstream, supernet, specs[:1], [batches[0][:2]])
        report = subnetact.calibration.CalibrationReport()
        for _ in tqdm(range(args.windows), desc=name):
            seconds, statistics = by_upstream(upstream, supernet, specs, batches)
            theirs.append(seconds)
            start = time.perf_counter()
            report = subnetact.calibrate(supernet, specs, batches, progress=False)
            ours.append(time.perf_counter() - start)
        result[name] = {
            "windows": args.windows,
            "upstream_s": median(theirs),
            "ours_s": median(ours),
            "ratio": median(a / b for a, b in zip(ours, theirs, strict=True)),
            "ratios": [a / b for a, b in zip(ours, theirs, strict=True)],
            "layers_saved": report.saved,
            "kept_MiB": report.kept_mb,
            "largest_difference": difference(supernet, specs, statistics),
        }
    return result


def exact(args: argparse.Namespace, upstream: Any, supernet: Supernet) -> dict[str, Any]:
    """Compare both sides in float64, where rounding hides nothing, and the float32 results with that."""
    specs, batches = SETS["pareto"](supernet, 3), images(args, 4, 1)
    doubles = [batch.double() for batch in batches]
    upstream64, supernet64 = copy.deepcopy(upstream).double(), copy.deepcopy(supernet).double()
    _, theirs32 = by_upstream(upstream, supernet, specs, batches)
    _, theirs64 = by_upstream(upstream64, supernet64, specs, doubles)
    subnetact.calibrate(supernet64, specs, doubles, progress=False)
    subnetact.calibrate(supernet, specs, batches, progress=False)
    return {
        "ours_float64_to_upstream_float64": difference(supernet64, specs, theirs64),
        "ours_float32_to_upstream_float64": difference(supernet, specs, theirs64),
        "upstream_float32_to_upstream_float64": difference(supernet64, specs, theirs32),
    }


def saved(args: argparse.Namespace, upstream: Any, supernet: Supernet) -> dict[str, Any]:  # noqa: ARG001
    """Count the layers that are computed with sharing and without."""
    result: dict[str, Any] = {}
    for name, choose in SETS.items():
        for count in args.counts:
            run = CalibrationRun(supernet, choose(supernet, count), None, float("inf"))
            with torch.no_grad():
                list(run.batch(torch.zeros(1, 3, 32, 32)))
            together, alone = run.shared.layers, sum(map(run.shared.alone, run.specs))
            result.setdefault(name, {})[count] = {
                "layers_together": together,
                "layers_alone": alone,
                "saved": 1 - together / alone,
            }
    return result


def table(args: argparse.Namespace, upstream: Any, supernet: Supernet) -> dict[str, Any]:  # noqa: ARG001
    """Measure the norm table in memory, and its file, which stores equal statistics once."""
    result: dict[str, Any] = {}
    for name, choose in SETS.items():
        for count in (100, 1000):
            norms = NormTable(supernet.space.id)
            norms.update(rows(supernet, choose(supernet, count)))
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "norms.safetensors"
                norms.save(path)
                result.setdefault(name, {})[count] = {
                    "memory_MiB": norms.nbytes() / 2**20,
                    "file_MiB": path.stat().st_size / 2**20,
                }
    return result


def rows(supernet: Supernet, specs: list[SubnetSpec]) -> dict[SubnetSpec, NormRow]:
    """Return statistics rows of random numbers, which are equal wherever calibrated rows would be equal."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    run = CalibrationRun(supernet, specs, None, float("inf"))
    found = {}
    for spec in specs:
        norms, used = run.shared.norms(spec), dict[str, tuple[Tensor, Tensor]]()
        for path, (shared, _) in supernet.statistics(spec).items():
            norm, channels = id(norms[path]), len(shared)
            if norm not in made:
                made[norm] = torch.randn(channels), torch.rand(channels)
            used[path] = made[norm]
        found[spec] = NormRow.of(used)
    return found


def report(result: dict[str, Any]) -> None:
    """Write the figures into results/calibrate.md."""
    on = result["machine"]
    where = f"{on['device_name']}, {on['threads']} thread(s), torch {on['torch']}"
    lines = [f"{where}, {result['pixels']} px, float32."]
    if "speed" in result:
        found = result["speed"]
        lines += [
            "",
            f"{found['subnets']} subnets on {found['batches']} x {found['batch']} images; medians of windows "
            "in which the two take turns:",
            "",
            "| subnets | upstream, s | ours, s | ratio | layers saved "
            "| largest difference of means, of variances |",
            "|---|---|---|---|---|---|",
        ]
        for name in SETS:
            cell = found[name]
            far = cell["largest_difference"]
            lines.append(
                f"| {name} | {cell['upstream_s']:.1f} | {cell['ours_s']:.1f} | {cell['ratio']:.2f} | "
                f"{cell['layers_saved']:.0%} | {far['mean']:.1e}, {far['var']:.1e} |"
            )
    if "exact" in result:
        lines += ["", "| largest difference of statistics | means | variances |", "|---|---|---|"]
        lines += [
            f"| {name.replace('_', ' ')} | {far['mean']:.1e} | {far['var']:.1e} |"
            for name, far in result["exact"].items()
        ]
    if "saved" in result:
        counts = list(next(iter(result["saved"].values())))
        lines += ["", f"| layers saved | {' | '.join(map(str, counts))} |", "|---|" + "---|" * len(counts)]
        for name, cells in result["saved"].items():
            shares = " | ".join(f"{c['saved']:.0%}" for c in cells.values())
            lines.append(f"| {name} | {shares} |")
    if "table" in result:
        lines += ["", "| norm table, MiB | in memory | file |", "|---|---|---|"]
        lines += [
            f"| {count} {name} | {c['memory_MiB']:.1f} | {c['file_MiB']:.1f} |"
            for name, cells in result["table"].items()
            for count, c in cells.items()
        ]
    write_section("calibrate", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["speed", "exact", "saved", "table"])
    parser.add_argument("--subnets", type=int, default=20)
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 100, 300])
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibrate.json"))
    parser.add_argument("--report", action="store_true", help="write the page in results/ and stop")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.report:
        return report(result)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", DeprecationWarning)
    upstream = upstream_network(FAMILY)
    supernet = load(FAMILY, upstream.state_dict())
    result.update(machine=machine(torch.device("cpu")), pixels=args.pixels)
    parts = {"speed": speed, "exact": exact, "saved": saved, "table": table}
    for part in args.parts:
        result[part] = parts[part](args, upstream, supernet)
        print(part, json.dumps(result[part], indent=1), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
