"""What a table was measured on: whether these are the weights that are served, and this machine."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from subnetact.errors import DeviceError, LatencyTableWarning, ProfileMismatch
from subnetact.latency.table import LatencyTable

COMPARED = ("device", "device_name", "processor", "instructions", "torch", "threads")
"""Facts of a stamp that change latencies; one that a stamp lacks is not compared."""
ELSEWHERE = "measured on another machine or in another way"
AGAIN = (
    "measure again here: python -m subnetact.profile --bundle FOLDER --mode 'as served' --threads N "
    "--save-bundle FOLDER"
)


def scheduling_table(tables: Mapping[str, LatencyTable]) -> LatencyTable | None:
    """Return the table of a bundle that a server plans with: `scheduler`, or else the first."""
    return tables.get("scheduler") or next(iter(tables.values()), None)


def require_measured_on(
    table: LatencyTable, keys: Sequence[str] | None, fingerprint: str | None, name: str = "table"
) -> None:
    """Refuse a table of other subnets than `keys`, if these are given, or of other weights than stamped."""
    wrong, stamped = "", table.stamp.get("supernet")
    if keys is not None and tuple(keys) != table.subnets:
        pairs = enumerate(zip(keys, table.subnets, strict=False))
        differing = (f"subnet {i} is {b!r}, but the engine's is {a!r}" for i, (a, b) in pairs if a != b)
        wrong = next(differing, f"{len(table.subnets)} subnets, but the engine has {len(keys)}")
    elif stamped not in (None, fingerprint):
        wrong = f"measured on supernet {stamped}, the engine's is {fingerprint}"
    if wrong:
        raise ProfileMismatch(f"{name}: {wrong}; profile this engine")


def require_program(table: LatencyTable, program: str, advice: str) -> None:
    """Refuse a table that was measured on another kind of program than the one that will run.

    The stamp of a measured table names the kind: `engine`, `torchscript`, `torch.export`, `aotinductor` or
    `onnx`. Tables that were stamped before are of engines; a table without a stamp is accepted.
    """
    measured = table.stamp.get("program", "engine" if "mode" in table.stamp else program)
    if measured != program:
        raise ProfileMismatch(
            f"table: its latencies are those of the program {measured!r}, and {program!r} runs, which has "
            f"others; {advice}"
        )


def restamped(table: LatencyTable, former: Collection[str], present: Mapping[str, str]) -> LatencyTable:
    """Return a table with the `present` fingerprint, space and dtype, if only values of weights changed.

    Latencies do not depend on these. `former` are the fingerprints of earlier weights of the same supernet.
    """
    known = table.stamp.get("supernet") in former
    same = all(table.stamp.get(fact, value) == value for fact, value in present.items() if fact != "supernet")
    return replace(table, stamp={**table.stamp, **present}) if known and same else table


def elsewhere(table: LatencyTable, device: Any = None, threads: int | None = None) -> str:
    """Say what differs between this machine and that of a profile; "" if nothing does, or torch is missing.

    Args:
        table: the table.
        device: the torch.device that is to be used here. If None, one of the table's kind, or the CPU.
        threads: the number of CPU threads that are to be used here. If None, torch's.
    """
    stamp = table.stamp
    if "torch" not in stamp or find_spec("torch") is None:
        return ""
    from subnetact.device import find_device, machine  # They import torch.

    try:
        device = device or find_device(stamp.get("device", "cpu"))
    except DeviceError:
        device = find_device("cpu")
    here = machine(device)
    here["threads"] = stamp.get("threads") if here["device"] == "cuda" else threads or here["threads"]
    names = [name for name in COMPARED if stamp.get(name, here[name]) != here[name]]
    return ", ".join(f"{name} {stamp[name]!s:.60} (here {here[name]})" for name in names)


def doubts(table: LatencyTable, engine: Any, threads: int | None = None) -> str:
    """Say why a table's latencies may not be those of an engine on this machine; "" if nothing speaks so."""
    others = elsewhere(table, engine.device, threads)
    reasons = (others and f"{ELSEWHERE}: {others}", run_otherwise(table, engine), unsure(table))
    return "; ".join(filter(None, reasons))


def run_otherwise(table: LatencyTable, engine: Any) -> str:
    """Say which subnets an engine runs in another mode than a table was measured in; "" if none."""
    modes = {i: engine.mode_of(i) for i in engine.ids} if hasattr(engine, "mode_of") else {}
    pairs = [(mode, modes[i]) for i, mode in enumerate(table.modes) if modes.get(i, mode) != mode]
    ways = ", ".join(sorted({f"measured {measured}, which run {runs}" for measured, runs in pairs}))
    advice = 'measure what runs, profile_latency(engine, mode="as served")'
    return f"{len(pairs)} of {len(modes)} subnets were {ways}: {advice}" if pairs else ""


def unsure(table: LatencyTable) -> str:
    """Say how many cells are unstable, and how many of them waited for a CPU; "" if none is."""
    ran, unstable = count_stable(table)
    busy = [cells for name, cells in table.statistics.items() if name.startswith("busy")]
    shares = np.concatenate([cells.ravel() for cells in busy]) if busy else np.zeros(1)
    suspect = int((shares > table.stamp.get("tolerance", 100.0) / 100).sum())
    beside = f", {suspect} ran beside other work: up to {np.nanmax(shares):.0%} of the time went to it"
    return f"{unstable} of {ran} cells are unstable" + beside * bool(suspect) if unstable else ""


def warn_of_doubts(tables: Sequence[LatencyTable], engines: Sequence[Any], threads: int | None) -> None:
    """Warn once if tables may not be those of the devices of engines; one that has none is left out."""
    placed = [engine for engine in engines if hasattr(engine, "device")]
    if texts := {doubts(table, engine, threads) for engine in placed for table in tables} - {""}:
        warnings.warn(f"table: {'; '.join(sorted(texts))}; {AGAIN}", LatencyTableWarning, stacklevel=3)


def count_stable(table: LatencyTable) -> tuple[int, int]:
    """Return how many cells ran, in every mode that was measured, and how many of them are not stable."""
    stable = [cells for name, cells in table.statistics.items() if name.startswith("stable")]
    return sum(int((~np.isnan(cells)).sum()) for cells in stable), sum(int((c == 0).sum()) for c in stable)
