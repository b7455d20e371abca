"""What the sweeps share: where a table of this device and these versions belongs, and what it is drawn as."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from subnetact.profile import main
from subnetact.timing import find_device, machine

TABLES = Path(__file__).parent / "tables"


def run(family: str, pixels: int, arguments: list[str]) -> int:
    """Profile a family with `python -m subnetact.profile`; what the command line says wins."""
    given = sys.argv[1:]

    def value(option: str, default: str) -> str:
        return given[given.index(option) + 1] if option in given else default

    device = find_device(value("--device", "cuda" if torch.cuda.is_available() else "cpu"))
    threads = value("--threads", "1")
    mode = value("--mode", "zero-copy")
    facts = machine(device)
    parts = [facts["device_name"], f"torch{facts['torch'].split('+')[0]}", family, f"{pixels}px", mode]
    if device.type == "cpu":
        parts.insert(1, f"{threads}thread")
    name = "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts)
    shape = ["--input-shape", "3", str(pixels), str(pixels)]
    own = ["--family", family, *shape, "--out", f"{TABLES / name}.json", "--threads", threads]
    return main([*own, *arguments, *given])
