"""Measures the memory per resident subnet that views of OFA-ResNet50 take beyond weights and norm table.

    python benchmarks/memory.py [--views 1000] [--json benchmarks/results/memory.json]

Every subnet gets random statistics, so that it has a statistics row of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from ofa_adapters import load
from subnetact.device import machine
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def random_row(supernet: Supernet, spec: SubnetSpec) -> NormRow:
    shared = supernet.statistics(spec)
    return NormRow.of({path: (torch.zeros_like(m), torch.ones_like(v)) for path, (m, v) in shared.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--views", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    supernet = load("ofa_resnet50")
    specs = supernet.space.sample(0, args.views)
    supernet.norms.update({spec: random_row(supernet, spec) for spec in tqdm(specs, desc="statistics rows")})
    supernet.subnet(supernet.space.smallest()), supernet.subnet(supernet.space.largest())
    before = resident_bytes()
    build_ms, held = [], []
    for spec in tqdm(specs, desc="views"):
        start = time.perf_counter()
        held.append(supernet.subnet(spec))
        build_ms.append((time.perf_counter() - start) * 1e3)
    view_kib = (resident_bytes() - before) / len(held) / 1024
    choose = []
    for spec in random.Random(0).choices(specs, k=10_000):
        start = time.perf_counter()
        supernet.subnet(spec)
        choose.append((time.perf_counter() - start) * 1e6)
    weights = sum(p.numel() * p.element_size() for p in supernet.state_dict().values())
    result = {
        "machine": machine(torch.device("cpu")),
        "supernet": "ofa_resnet50",
        "views": len(held),
        "weights_MiB": weights / 2**20,
        "norm_table_KiB_per_subnet": supernet.norms.nbytes() / len(held) / 1024,
        "view_KiB_per_subnet": view_kib,
        "build_view_ms_median": median(build_ms),
        "choose_built_view_us_median": median(choose),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
