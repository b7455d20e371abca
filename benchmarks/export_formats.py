"""Measures the formats with one program per subnet: agreement, sizes, load time, memory.

TorchScript is measured by export.py, and .pt2 files by pt2.py.

    python benchmarks/export_formats.py [--families ...] [--formats ...] [--full]
        [--out benchmarks/results/export_formats.json]
    python benchmarks/export_formats.py --routes [--seconds 20]
        [--out benchmarks/results/export_formats_routes.json]

`--routes` measures instead how long one subnet takes by each route to it: the ONNX file in onnxruntime, the
TorchScript file, the fused Engine and the view. All run in one process on one thread, in turns in a random
order, at batch sizes 1, 2, 4 and 8, on three subnets of the digits supernet, of OFA-ResNet50 (random weights,
its full size, 96 x 96 pixels) and of OFA-MobileNetV3 (the same).

Families have a small size, that of the golden files. Their weights are upstream's if there are golden files
for the family, else random. `--full` adds ofa_resnet50 at its full size, of which three subnets share 184 MiB
of weights.

Load time and growth of resident memory are measured in a fresh process that loads and runs the files. Before,
it has imported torch and the library that loads the format, and has run a convolution.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import interleaved_ms, ratios
from torch import Tensor

import subnetact
from ofa_adapters import families, load
from subnetact.device import machine
from subnetact.digits import load_digits_supernet
from subnetact.export import to_onnx, to_torchscript

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from small_families import small_inputs, small_supernet

FAMILIES = families()
MIB = 2**20
BATCHES = (1, 2, 5)


def small_engine(family: str, subnets: int) -> subnetact.Engine:
    return engine_of(small_supernet(family), next(iter(small_inputs(family).values()))[:1], subnets)


def full_engine(subnets: int) -> subnetact.Engine:
    torch.manual_seed(0)
    return engine_of(load("ofa_resnet50").eval(), torch.randn(1, 3, 224, 224), subnets)


def engine_of(supernet: Any, example: Tensor, subnets: int) -> subnetact.Engine:
    specs = supernet.space.sample(0, subnets)
    return subnetact.Engine(supernet, specs, example=example, allow_uncalibrated=True)


def weight_bytes(engine: subnetact.Engine) -> int:
    return sum(t.numel() * t.element_size() for t in engine.supernet.state_dict().values())


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def batch_of(example: Tensor, size: int) -> Tensor:
    """Return a batch of `size` different inputs with the example's shape and dtype."""
    if example.is_floating_point():
        return torch.randn(size, *example.shape, generator=torch.Generator().manual_seed(size))
    return torch.stack([example.roll(i) for i in range(size)])


def agreement(engine: subnetact.Engine, run: Callable[[int, Tensor], Tensor], dynamic: bool = True) -> float:
    """Return the largest difference from eager outputs, relative to the largest eager output."""
    worst = 0.0
    for i, spec in enumerate(engine.specs):
        for size in BATCHES if dynamic else (1,):
            x = batch_of(engine.sample, size)
            with torch.inference_mode():
                want = engine.supernet(x, subnet=spec)
            worst = max(worst, float((run(i, x) - want).abs().max() / want.abs().max()))
    return worst


def fresh(folder: Path) -> dict[str, float]:
    """Load and run an exported folder in a separate process, and return its figures."""
    command = [sys.executable, __file__, "--load", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measurement(engine: subnetact.Engine, folder: Path, worst: float, pattern: str) -> dict[str, Any]:
    files = len(list(folder.glob(pattern)))
    return {
        "subnets": len(engine),
        "bit_equal": worst == 0.0,
        "largest_relative_difference": worst,
        "program_files": files,
        "weights_stored": "per subnet",
        "dynamic_subnet": False,
        "dynamic_batch": True,
        "bytes": folder_bytes(folder),
        "bytes_of_weights": weight_bytes(engine),
        **fresh(folder),
    }


def onnx(engine: subnetact.Engine, folder: Path) -> dict[str, Any]:
    import onnxruntime

    to_onnx(engine, folder)
    sessions = [
        onnxruntime.InferenceSession(folder / f"subnet-{i}.onnx", providers=["CPUExecutionProvider"])
        for i in range(len(engine))
    ]
    worst = agreement(engine, lambda i, x: torch.from_numpy(sessions[i].run(None, {"input": x.numpy()})[0]))
    return measurement(engine, folder, worst, "*.onnx")


FORMATS: dict[str, Callable[[subnetact.Engine, Path], dict[str, Any]]] = {
    "ONNX": onnx,
}
"""For each format, a function that exports an engine into a new folder and measures the export."""


def resident_bytes() -> int:
    """Return the resident memory of this process, without freed memory that the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def load_and_measure(folder: Path) -> dict[str, float]:
    """Run in the fresh process: return the load time in ms and the growth of resident memory in MiB."""
    torch.set_num_threads(1)
    facts = json.loads((folder / "export.json").read_text())
    dtype, shape = facts["sample"]
    x = torch.zeros(1, *shape, dtype=getattr(torch, dtype))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    torch.conv2d(torch.zeros(1, 8, 64, 64), torch.zeros(8, 8, 3, 3))
    before = resident_bytes()
    start = time.perf_counter()
    runs = [
        onnxruntime.InferenceSession(folder / f"subnet-{i}.onnx", options, providers=["CPUExecutionProvider"])
        for i in range(len(facts["subnets"]))
    ]
    calls = [partial(run.run, None, {"input": x.numpy()}) for run in runs]
    load_ms = (time.perf_counter() - start) * 1e3
    after = resident_bytes()
    for call in calls:
        call()
    return {
        "load_ms": round(load_ms, 1),
        "resident_MiB_loaded": round((after - before) / MIB, 1),
        "resident_MiB_after_runs": round((resident_bytes() - before) / MIB, 1),
    }


def measure(name: str, engine: subnetact.Engine) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {"format": name, **FORMATS[name](engine, Path(folder) / "export")}


def routes(
    name: str, supernet: Any, shape: tuple[int, ...], folder: Path, seconds: float
) -> list[dict[str, Any]]:
    """Return the latency of three subnets by every route, in ms on one thread."""
    import onnxruntime

    space = supernet.space
    between = next(spec for spec in space.sample(1, 5) if spec not in (space.smallest(), space.largest()))
    specs = [space.smallest(), between, space.largest()]
    batches = {size: torch.randn(size, *shape) for size in (1, 2, 4, 8)}
    engine = subnetact.Engine(
        supernet, specs, example=batches[1], allow_uncalibrated=True, memory_budget_mb=2000
    )
    to_onnx(engine, folder / "onnx")
    scripted: Any = to_torchscript(engine, folder / "model.pt")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    rows = []
    for i, spec in enumerate(specs):
        assert engine.is_fused(i), engine.stats().unfused
        file = folder / "onnx" / f"subnet-{i}.onnx"
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        view, number = supernet.subnet(spec), torch.tensor([i])
        for size, x in batches.items():
            runs: dict[str, Callable[[], Any]] = {
                "onnxruntime": partial(session.run, None, {"input": x.numpy()}),
                "Engine": partial(engine, x, i),
                "TorchScript": partial(scripted, x, number),
                "view": partial(view, x),
            }
            with torch.inference_mode():
                for _ in range(3):  # TorchScript optimises in its first calls
                    (onnx_output,), *outputs = [run() for run in runs.values()]
                for output in (torch.from_numpy(onnx_output), *outputs[:-1]):
                    torch.testing.assert_close(output, outputs[-1], atol=1e-3, rtol=1e-3)
                times = interleaved_ms(runs, seconds)
            row: dict[str, Any] = {
                "network": name,
                "subnet": ("smallest", "between", "largest")[i],
                "batch_size": size,
            }
            row["passes"] = len(times["view"])
            row["ms"] = {route: round(median(taken), 3) for route, taken in times.items()}
            row["of_the_engine"] = {route: round(r, 3) for route, r in ratios(times, "Engine").items()}
            print(row, flush=True)
            rows.append(row)
    return rows


def measure_routes(out: Path | None, seconds: float) -> None:
    import onnxruntime

    torch.manual_seed(0)
    result: dict[str, Any] = {"machine": machine(torch.device("cpu")), "onnxruntime": onnxruntime.__version__}
    result["rows"] = []
    for name in ("digits", "ofa_resnet50", "ofa_mbv3"):
        supernet = load_digits_supernet() if name == "digits" else load(name).eval()
        shape = (1, 16, 16) if name == "digits" else (3, 96, 96)
        with tempfile.TemporaryDirectory() as folder:
            result["rows"] += routes(name, supernet, shape, Path(folder), seconds)
        if out:
            out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--routes", action="store_true")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--load", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load_and_measure(args.load)))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", subnetact.errors.UncalibratedSubnetWarning)
    if args.routes:
        measure_routes(args.out, args.seconds)
        return
    result: dict[str, Any] = {"machine": machine(torch.device("cpu")), "rows": []}
    for family in [*args.families, *(["full"] if args.full else [])]:
        full = family == "full"
        about = {"family": "ofa_resnet50" if full else family, "size": "full" if full else "small"}
        for name in args.formats:
            engine = full_engine(3) if full else small_engine(family, 2)
            result["rows"].append({**about, **measure(name, engine)})
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
