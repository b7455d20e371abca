"""Measures .pt2 files on OFA-ResNet50: size, memory and latency in C++, against the Engine and onnxruntime.

    python benchmarks/pt2.py [--subnets 2 6 9] [--size 96] [--rounds 7] [--out benchmarks/results/pt2.json]

Weights are random. The C++ program is `examples/cpp/run_pt2.cpp`, built here; it needs g++, cmake and ninja.
Memory is resident memory of its process: after the file was loaded and every subnet has run, less what it was
before. Latencies are of the largest subnet on one thread. Every round runs each runtime in turns; the figure
is the median of the rounds' medians. Compiling takes about 20 seconds for each subnet.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

import subnetact
from ofa_adapters import load
from subnetact.device import machine
from subnetact.export import to_onnx, to_pt2
from subnetact.files.documents import write_json

SOURCE = Path(__file__).parents[1] / "examples" / "cpp"
MIB = 2**20
BATCHES = (1, 2)
REPEATS = 9


def built(folder: Path) -> Path:
    """Build the C++ program."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-G", "Ninja", "-S", SOURCE, "-B", folder, prefix], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "run_pt2"], check=True)
    return folder / "run_pt2"


def in_cpp(program: Path, path: Path, engine: subnetact.Engine, batches: list[Tensor], repeats: int) -> str:
    """Run the C++ program, which compares every output with the Engine's, and return what it prints."""
    cases = path.with_suffix(".cases")
    outputs = [[engine(x, i) for x in batches] for i in engine.ids]
    torch.save({"inputs": [[x] for x in batches], "outputs": outputs, "refused": []}, cases)
    command = [str(program), str(path), str(cases), "1", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def file_sizes(path: Path) -> dict[str, float]:
    """Return the size of a file and of its parts in MiB."""
    with ZipFile(path) as file:
        parts = {
            part: sum(entry.file_size for entry in file.infolist() if f"/data/{part}/" in entry.filename)
            for part in ("weights", "aotinductor", "frozen")
        }
    return {part: round(size / MIB, 2) for part, size in {"file": path.stat().st_size, **parts}.items()}


def memory(
    program: Path, folder: Path, supernet: Any, specs: list[Any], batches: list[Tensor]
) -> dict[str, Any]:
    """Export so many subnets without frozen copies, and return sizes and resident memory in MiB."""
    engine = subnetact.Engine(supernet, specs, example=batches[0], fuse=False)
    path = folder / f"{len(specs)}.pt2"
    start = time.perf_counter()
    to_pt2(engine, path)
    seconds = time.perf_counter() - start
    printed = in_cpp(program, path, engine, batches, 0)
    before, loaded, ran = map(float, re.findall(r"(?:before|loaded|ran) ([\d.]+)", printed))
    return {
        "subnets": len(specs),
        "export_s_per_subnet": round(seconds / len(specs), 1),
        "MiB": file_sizes(path),
        "resident_MiB_loaded": round(loaded - before, 1),
        "resident_MiB_after_runs": round(ran - before, 1),
    }


def median_ms(run: Callable[[], Any]) -> float:
    times = []
    run()
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def latency(
    program: Path, folder: Path, supernet: Any, batches: list[Tensor], rounds: int
) -> list[dict[str, Any]]:
    """Return the latencies of the largest subnet, frozen and shared in C++, of the Engine and onnxruntime."""
    import onnxruntime

    spec = supernet.space.largest()
    engine = subnetact.Engine(supernet, [spec], example=batches[0])
    assert engine.is_fused(0), engine.stats().unfused
    to_pt2(engine, folder / "shared.pt2")
    to_pt2(engine, folder / "frozen.pt2", frozen_mb=1000, frozen_batches=BATCHES)
    to_onnx(engine, folder / "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        folder / "onnx" / "subnet-0.onnx", options, providers=["CPUExecutionProvider"]
    )
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for batch, x in enumerate(batches):
            found.setdefault(("Engine", batch), []).append(median_ms(lambda x=x: engine(x, 0)))  # type: ignore[misc]
            values = {"input": x.numpy()}
            call = median_ms(lambda values=values: session.run(None, values))  # type: ignore[misc]
            found.setdefault(("onnxruntime", batch), []).append(call)
        for name in ("frozen", "shared"):
            printed = in_cpp(program, folder / f"{name}.pt2", engine, batches, REPEATS)
            for _, batch_number, ms in re.findall(r"subnet (\d+) batch (\d+) median_ms ([\d.]+)", printed):
                found.setdefault((f"C++ {name}", int(batch_number)), []).append(float(ms))
    return [
        {
            "runtime": name,
            "batch_size": len(batches[batch]),
            "ms": round(statistics.median(values), 2),
            "rounds_ms": [round(value, 2) for value in values],
            "of_the_engine": round(
                statistics.median(
                    own / theirs for own, theirs in zip(values, found["Engine", batch], strict=True)
                ),
                3,
            ),
        }
        for (name, batch), values in sorted(found.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subnets", nargs="*", type=int, default=[2, 6, 9])
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pt2.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    supernet = load("ofa_resnet50").eval()
    space = supernet.space
    specs = [space.largest(), space.smallest(), *space.sample(0, max([2, *args.subnets]))]
    specs = list(dict.fromkeys(specs))[: max([2, *args.subnets])]
    subnetact.calibrate(supernet, specs, [torch.randn(4, 3, args.size, args.size)], progress=False)
    batches = [torch.randn(size, 3, args.size, args.size) for size in BATCHES]
    result: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "family": "ofa_resnet50",
        "image_size": args.size,
    }
    weights = sum(t.numel() * t.element_size() for t in supernet.state_dict().values())
    result["weights_MiB"] = round(weights / MIB, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = built(folder / "build")
        result["latency"] = latency(program, folder, supernet, batches, args.rounds)
        write_json(args.out, result)
        for row in result["latency"]:
            print(row)
        result["memory"] = []
        for count in args.subnets:
            result["memory"].append(memory(program, folder, supernet, specs[:count], batches))
            print(result["memory"][-1])
            write_json(args.out, result)


if __name__ == "__main__":
    main()
