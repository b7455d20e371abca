"""Runs the sweeps of this folder, and names their tables after the device and the versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from subnetact.device import find_device, machine
from subnetact.profile.cli import build_parser, main

TABLES = Path(__file__).parent / "tables"


def run(family: str, pixels: int, arguments: list[str]) -> int:
    """Profile a family with `python -m subnetact.profile`.

    Args:
        family: the family, with random weights.
        pixels: height and width of its images.
        arguments: the sweep's own options; options in `sys.argv` override them.

    Returns:
        The exit status.
    """
    shape = ["--input-shape", "3", str(pixels), str(pixels)]
    wanted = ["--family", family, *shape, "--threads", "1", *arguments, *sys.argv[1:]]
    return main(["--out", f"{TABLES / table_name(wanted)}.json", *wanted])


def table_name(arguments: list[str]) -> str:
    """Return the name of a sweep's table: device, versions, family, input, mode, and dtype.

    Args:
        arguments: the options of `python -m subnetact.profile`.
    """
    args = build_parser().parse_args(arguments)
    device = find_device(args.device)
    facts = machine(device)
    channels, height, width = [1, 1, *args.input_shape][-3:]
    pixels = f"{width}px" if (channels, height) == (3, width) else "x".join(map(str, args.input_shape))
    parts = [facts["device_name"], f"torch{facts['torch'].split('+')[0]}", args.family, pixels, args.mode]
    if device.type == "cpu":
        parts.insert(1, f"{args.threads}thread")
    if args.dtype not in (None, "float32"):
        parts.append(args.dtype)
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts)
