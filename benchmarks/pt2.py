"""Measures subnets of OFA-ResNet50 without Python: one .pt2 with shared weights, and ONNX files beside it.

    python benchmarks/pt2.py [--subnets 2 6 9 10] [--size 96] [--rounds 7] [--out benchmarks/results/pt2.json]

Weights are random. The C++ programs are `examples/cpp/run_pt2.cpp` and `run_onnx.cpp`, built here; they
need g++, cmake and ninja, and the second one `pip install openvino`. Memory is resident memory of the
process: after the file was loaded and every subnet has run, less what it was before, the median of 9
processes. Latencies are those of the largest and the smallest subnet on one thread. Every round runs
each runtime in turns; the figure is the median of the rounds' medians, and the ratio the median of the
rounds' ratios to the fused Engine in Python. Frozen packages of AOTInductor, one for each batch size,
are there as a trial: ONNX files reach their speed with one file for all batch sizes. Compiling takes
about 20 seconds for each subnet.
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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor
from tqdm import tqdm

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
    """Build the C++ programs, and return their folder."""
    places = [torch.utils.cmake_prefix_path]
    if openvino := find_spec("openvino"):
        places.append(str(Path(str(openvino.origin)).parent / "cmake"))
    prefix = f"-DCMAKE_PREFIX_PATH={';'.join(places)}"
    subprocess.run(["cmake", "-G", "Ninja", "-S", SOURCE, "-B", folder, prefix], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)
    return folder


def in_cpp(
    program: Path, path: Path, engine: subnetact.Engine, batches: list[Tensor], *arguments: str
) -> str:
    """Run a C++ program, which compares every output with the supernet's, and return what it prints."""
    cases = path.with_suffix(".cases")
    with torch.no_grad():
        outputs = [[engine.supernet(x, subnet=spec) for x in batches] for spec in engine.specs]
    torch.save({"inputs": [[x] for x in batches], "outputs": outputs, "refused": []}, cases)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [str(program), str(path), str(cases), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def file_sizes(path: Path) -> dict[str, float]:
    """Return the size of a file and of its parts in MiB."""
    with ZipFile(path) as file:
        parts = {
            part: sum(entry.file_size for entry in file.infolist() if f"/data/{part}/" in entry.filename)
            for part in ("weights", "aotinductor")
        }
    return {part: round(size / MIB, 2) for part, size in {"file": path.stat().st_size, **parts}.items()}


def memory(
    program: Path, folder: Path, supernet: Any, specs: list[Any], batches: list[Tensor]
) -> dict[str, Any]:
    """Export so many subnets, and return sizes and resident memory in MiB."""
    engine = subnetact.Engine(supernet, specs, example=batches[0], backend="views")
    path = folder / f"{len(specs)}.pt2"
    start = time.perf_counter()
    to_pt2(engine, path)
    seconds = time.perf_counter() - start
    printed = [in_cpp(program, path, engine, batches, "1", "0") for _ in range(REPEATS)]
    figures = [list(map(float, re.findall(r"(?:before|loaded|ran) ([\d.]+)", text))) for text in printed]
    before, loaded, ran = (statistics.median(figure) for figure in zip(*figures, strict=True))
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


def frozen_packages(view: Any, batches: list[Tensor], folder: Path) -> list[Callable[[Tensor], Any]]:
    """Return AOTInductor's programs of one subnet with folded and packed weights, for each batch size."""
    programs: list[Callable[[Tensor], Any]] = []
    for x in batches:
        options = {"freezing": True, "aot_inductor.package_constants_in_so": True}
        place = str(folder / f"frozen-{len(x)}.pt2")
        with torch.no_grad():  # torch folds and packs weights only without gradients
            graph = torch.export.export(view, (x,), strict=False)
            torch._inductor.aoti_compile_and_package(graph, package_path=place, inductor_configs=options)
        programs.append(torch._inductor.aoti_load_package(place))
    return programs


def latency(
    programs: Path, folder: Path, supernet: Any, batches: list[Tensor], rounds: int
) -> list[dict[str, Any]]:
    """Return the latencies of the largest and the smallest subnet in every runtime."""
    import onnxruntime

    specs = [supernet.space.largest(), supernet.space.smallest()]
    engine = subnetact.Engine(supernet, specs, example=batches[0])
    assert engine.is_fused(0), engine.stats().unfused
    path = to_pt2(engine, folder / "shared.pt2")
    onnx = [to_onnx(engine, folder / "onnx") / f"subnet-{i}.onnx" for i in engine.ids]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    provider = ["CPUExecutionProvider"]
    sessions = [onnxruntime.InferenceSession(file, options, providers=provider) for file in onnx]
    frozen = frozen_packages(supernet.private_view(specs[0])[0], batches, folder)
    rows: dict[tuple[str, int, int], list[float]] = {}
    for _ in tqdm(range(rounds), desc="rounds", disable=None):
        for batch, x in enumerate(batches):
            for i in engine.ids:
                calls = {
                    "Engine": partial(engine, x, i),
                    "onnxruntime": partial(sessions[i].run, None, {"input": x.numpy()}),
                }
                if i == 0:
                    calls["AOTInductor, frozen for one batch size"] = partial(frozen[batch], x)
                for name, call in calls.items():
                    rows.setdefault((name, i, batch), []).append(median_ms(call))
        ways = {"C++, .pt2": ("run_pt2", ["1", str(REPEATS)])}
        if (programs / "run_onnx").exists():
            ways["C++, ONNX in OpenVINO"] = (
                "run_onnx",
                [f"{i}={onnx[i]}" for i in engine.ids] + [str(REPEATS)],
            )
        for name, (program, arguments) in ways.items():
            printed = in_cpp(programs / program, path, engine, batches, *arguments)
            for subnet, number, ms in re.findall(r"subnet (\d+) batch (\d+) median_ms ([\d.]+)", printed):
                rows.setdefault((name, int(subnet), int(number)), []).append(float(ms))
    return [
        {
            "runtime": name,
            "subnet": ("largest", "smallest")[i],
            "batch_size": len(batches[batch]),
            "ms": round(statistics.median(values), 2),
            "rounds_ms": [round(value, 2) for value in values],
            "of_the_engine": round(
                statistics.median(
                    one / other for one, other in zip(values, rows["Engine", i, batch], strict=True)
                ),
                3,
            ),
        }
        for (name, i, batch), values in sorted(rows.items(), key=lambda row: row[0][1:])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subnets", nargs="*", type=int, default=[2, 6, 9, 10])
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
        "load_average": os.getloadavg()[0],
        "machine": machine(torch.device("cpu")),
        "family": "ofa_resnet50",
        "image_size": args.size,
    }
    weights = sum(t.numel() * t.element_size() for t in supernet.state_dict().values())
    result["weights_MiB"] = round(weights / MIB, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = built(folder / "build")
        result["latency"] = latency(programs, folder, supernet, batches, args.rounds)
        write_json(args.out, result)
        for row in result["latency"]:
            print(row)
        result["memory"] = []
        for count in args.subnets:
            result["memory"].append(memory(programs / "run_pt2", folder, supernet, specs[:count], batches))
            print(result["memory"][-1])
            write_json(args.out, result)


if __name__ == "__main__":
    main()
