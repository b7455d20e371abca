"""Measures TorchScript files: agreement with the supernet, size, load time, memory, switching in C++.

    python benchmarks/export.py [--families ...] [--full]
    python benchmarks/export.py --report

Outputs are compared before saving and after loading. A separate process loads the file after it has loaded a
file whose network is the identity; its resident memory is what it has allocated, without pages of libraries.
`resident_MiB_beyond_file` is the memory that TorchScript itself needs, 1 to 2 KiB per operation of every
class. The programs of `examples/cpp` are built and run (g++, cmake, ninja). How long one subnet takes by
other routes is measured by `runtimes.py`; formats with one program per subnet are `programs_per_subnet` in
results/trials.json.

Families have a small size, that of the golden files. Their weights are upstream's if there are golden files
for the family, else random. `--full` adds ofa_resnet50 at its full size.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Run, options_of, run, table
from small_families import small_inputs, small_supernet
from torch import Tensor, nn
from tqdm import tqdm

import subnetact
from ofa_adapters import families, load
from subnetact import Axis, LayerSelect, SubnetSpace
from subnetact.export import to_torchscript
from subnetact.spec import SubnetSpec
from subnetact.supernet import NormRow, Supernet, batch_norms, statistics_of

MIB = 2**20
BATCHES = (1, 2, 5)
CPU_ONLY = ["CPUExecutionProvider"]

LOAD = """
import gc, json, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
kept = torch.jit.load(sys.argv[1])

def resident():
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

before, start = resident(), time.perf_counter()
module = torch.jit.load(sys.argv[2])
taken = time.perf_counter() - start
print(json.dumps({"load_ms": round(taken * 1e3, 1), "resident_bytes": resident() - before}))
"""


def registered(supernet: Supernet, count: int) -> list[SubnetSpec]:
    """Return distinct subnets, each with random statistics of its own if the family has BatchNorm."""
    specs = supernet.space.sample(0, count)
    generator = torch.Generator().manual_seed(0)
    for spec in specs if batch_norms(supernet.network) else ():
        own = {}
        for path, (shared, _) in statistics_of(supernet, spec).items():
            mean, var = torch.randn(2, len(shared), generator=generator)
            own[path] = mean / 9, 0.5 + var.abs()
        supernet.norms.update({spec: NormRow.of(own)})
    return specs


def weight_bytes(supernet: Supernet) -> int:
    return sum(t.numel() * t.element_size() for t in supernet.state_dict().values())


def equal(module: Any, supernet: Supernet, specs: list[SubnetSpec], inputs: dict[str, Tensor]) -> int:
    with torch.no_grad():
        return sum(
            torch.equal(supernet.subnet(spec)(**inputs), module(*inputs.values(), torch.tensor([i])))
            for i, spec in enumerate(tqdm(specs, desc="comparing", leave=False, disable=None))
        )


def loaded(path: Path) -> Any:
    return torch.jit.load(path)  # type: ignore[no-untyped-call]


def load_alone(path: Path, before: Path) -> dict[str, Any]:
    """Load a file in a separate process after another file; return the load time and the memory it adds."""
    size, command = path.stat().st_size, [sys.executable, "-c", LOAD, str(before), str(path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "load_ms": found["load_ms"],
        "resident_MiB_loaded": round(found["resident_bytes"] / MIB, 1),
        "resident_over_file": round(found["resident_bytes"] / size, 3),
        "resident_MiB_beyond_file": round((found["resident_bytes"] - size) / MIB, 2),
    }


class Nothing(nn.Module):
    """A network that is the identity; its one parameter, which it does not use, has the device."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x


def write_nothing(path: Path) -> None:
    """Write a file whose network is the identity, so that it contains only what every file contains."""
    space = SubnetSpace("nothing", [Axis.uniform("keep", ["all"], [1])], lambda _: {"keep": 1})
    network = nn.Sequential(nn.Sequential(Nothing()))
    supernet = subnetact.insert_(network, space, {"0": LayerSelect.on(**{"0": "keep"})})
    engine = subnetact.Engine(
        supernet, list(space.enumerate()), example=torch.zeros(1, 1), memory_budget_mb=0
    )
    to_torchscript(engine, path)


def in_cpp(
    driver: Path, folder: Path, inputs: dict[str, Tensor], outputs: list[Tensor], repeats: int
) -> dict[str, Any]:
    """Run every subnet in C++, and return the figures that the driver prints."""
    torch.save({"inputs": list(inputs.values()), "outputs": outputs}, folder / "cases.pt")
    command = [str(driver), str(folder / "model.pt"), str(folder / "cases.pt"), "8", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    wrong = [int(n) for n in re.findall(r"(?:subnets|threads) \d+ wrong (\d+)", done.stdout)]
    timed = re.search(
        r"actuate_us ([\d.]+)\nforward_us ([\d.]+) switch_us (-?[\d.]+) \+- ([\d.]+)", done.stdout
    )
    if timed is None or len(wrong) != 2:
        raise SystemExit(f"{driver}: {done.stdout}{done.stderr}")
    return {
        "cpp_wrong_one_thread": wrong[0],
        "cpp_wrong_eight_threads": wrong[1],
        "cpp_actuate_us": float(timed[1]),
        "cpp_forward_us": float(timed[2]),
        "cpp_switched_minus_same_us": float(timed[3]),
        "cpp_switched_minus_same_us_half_width_95": float(timed[4]),
    }


def build_driver(folder: Path) -> Path:
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    source = str(ROOT / "examples" / "cpp")
    subprocess.run(
        ["cmake", "-G", "Ninja", "-S", source, "-B", str(folder), prefix],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "actuate"


def torchscript(
    supernet: Supernet, inputs: dict[str, Tensor], count: int, driver: Path, folder: Path
) -> dict[str, Any]:
    specs = registered(supernet, count)
    path = folder / "model.pt"
    engine = subnetact.Engine(supernet, specs, example=inputs, memory_budget_mb=0)
    scripted = to_torchscript(engine, path)
    matches = {
        "before saving": equal(scripted, supernet, specs, inputs),
        "after loading": equal(loaded(path), supernet, specs, inputs),
    }
    fresh = load_alone(path, folder / "nothing.pt")
    with torch.no_grad():
        outputs = [supernet.subnet(spec)(**inputs) for spec in specs]
    weights, table = weight_bytes(supernet), supernet.norms.nbytes()
    return {
        "subnets": len(specs),
        "inputs": {name: list(x.shape) for name, x in inputs.items()},
        "bit_equal": all(n == len(specs) for n in matches.values()),
        "equal_subnets": matches,
        "program_files": 1,
        "weights_stored": "once",
        "dynamic_subnet": True,
        "dynamic_batch": True,
        "bytes": path.stat().st_size,
        "bytes_of_weights": weights,
        "bytes_of_norm_table": table,
        "bytes_over_weights_and_table": round(path.stat().st_size / (weights + table), 3),
        **fresh,
        **in_cpp(driver, folder, inputs, outputs, repeats=200 if weights > 2**26 else 2000),
    }


# -- parts and page ----------------------------------------------------------------------------------


def sized(this: Run) -> list[tuple[str, str]]:
    """Return the families with the sizes in which they are measured."""
    full = [("ofa_resnet50", "full")] if this.args.full else []
    return [(family, "small") for family in this.args.families] + full


def torchscript_part(this: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = build_driver(folder / "build")
        write_nothing(folder / "nothing.pt")
        found["methods_alone"] = load_alone(folder / "nothing.pt", folder / "nothing.pt")
        for family, size in sized(this):
            torch.manual_seed(0)
            image = {"x": torch.randn(1, 3, this.args.image_size, this.args.image_size)}
            full = size == "full"
            supernet = load(family) if full else small_supernet(family)
            inputs = image if full else small_inputs(family)
            facts = torchscript(supernet, inputs, this.args.subnets, driver, folder)
            found["rows"].append({"format": "TorchScript", "family": family, "size": size, **facts})
    return found


def report(known: dict[str, Any]) -> list[str]:
    on = known["torchscript"]["machine"]
    rows = []
    for row in known["torchscript"]["rows"]:
        share = row["bytes"] / (row["bytes_of_weights"] + row["bytes_of_norm_table"])
        rows.append(
            [
                row["family"] + (" (full size)" if row["size"] == "full" else ""),
                row["subnets"],
                "none" if row["bit_equal"] else f"{row['largest_relative_difference']:.0e}",
                f"{row['bytes'] / MIB:.1f}, {share:.2f}x",
                f"{row['load_ms']:.0f}",
            ]
        )
    head = ["family", "subnets", "difference from eager", "MiB, relative to weights + statistics", "load ms"]
    where = f"{on['device_name']}, {on['threads']} thread(s), torch {on['torch']}; relative differences."
    return [where, "", *table(head, rows)]


def main() -> None:
    parts = {"torchscript": torchscript_part}
    parser = options_of(__doc__, "export", parts)
    parser.add_argument("--families", nargs="*", default=list(families()))
    parser.add_argument("--subnets", type=int, default=50, help="of a TorchScript file")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--image-size", type=int, default=96, help="of TorchScript at full size")
    warnings.simplefilter("ignore", subnetact.errors.UncalibratedSubnetWarning)
    run(parser, "export", parts, report)


if __name__ == "__main__":
    main()
