"""What a table was measured on: the weights that are served, and this machine, or others."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from subnetact.errors import DeviceError, LatencyTableWarning, ProfileMismatch
from subnetact.latency.table import LatencyTable

COMPARED = ("device", "device_name", "instructions", "torch", "threads")
"""Facts of a stamp that change latencies; one that a stamp lacks is not compared."""
ELSEWHERE = "measured on another machine or in another way"
AGAIN = "measure again here: python -m subnetact.profile --bundle FOLDER --save-bundle FOLDER"


def scheduling_table(tables: Mapping[str, LatencyTable]) -> LatencyTable | None:
    """Return the table of a bundle that a server plans with: `scheduler`, or else the first."""
    return tables.get("scheduler") or next(iter(tables.values()), None)


def require_measured_on(
    table: LatencyTable, keys: Sequence[str] | None, fingerprint: str | None, name: str = "table"
) -> None:
    """Refuse a table of other subnets, or of other weights; None is not compared."""
    if keys is not None and tuple(keys) != table.subnets:
        for i, (mine, theirs) in enumerate(zip(keys, table.subnets, strict=False)):
            if mine != theirs:
                what = f"subnet {i} is {theirs!r}, but the engine's is {mine!r}"
                break
        else:
            what = f"{len(table.subnets)} subnets, but the engine has {len(keys)}"
        raise ProfileMismatch(f"{name}: {what}; profile this engine")
    stamped = table.stamp.get("supernet")
    if None not in (stamped, fingerprint) and fingerprint != stamped:
        raise ProfileMismatch(
            f"{name}: measured on supernet {stamped}, the engine's is {fingerprint}; profile this engine"
        )


def restamped(
    table: LatencyTable, former: Collection[str], fingerprint: str, facts: Mapping[str, Any]
) -> LatencyTable:
    """Return the table with a fingerprint, if it has one of `former` weights and the same further `facts`.

    Latencies depend on the sizes and the dtype of weights, and not on their values.
    """
    same = all(table.stamp.get(fact, value) == value for fact, value in facts.items())
    stamp = {**table.stamp, "supernet": fingerprint}
    return replace(table, stamp=stamp) if same and table.stamp.get("supernet") in former else table


def elsewhere(table: LatencyTable, device: Any = None, threads: int | None = None) -> str:
    """Say what differs between this machine and that of a profile; "" if nothing does, or torch is missing.

    Args:
        table: the table.
        device: the torch.device that is to be used here. If None, the table's, or the CPU if there is none.
        threads: the number of CPU threads that are to be used here. If None, torch's.
    """
    stamp = table.stamp
    with suppress(ImportError):
        if "torch" in stamp:
            from subnetact.device import find_device, machine  # They import torch.

            if device is None:
                device = find_device("cpu")
                with suppress(DeviceError):
                    device = find_device(stamp.get("device", "cpu"))
            here = machine(device) | ({} if threads is None else {"threads": threads})
            facts = [name for name in COMPARED if stamp.get(name, here[name]) != here[name]]
            return ", ".join(f"{name} {stamp[name]!s:.60} (here {here[name]})" for name in facts)
    return ""


def doubts(table: LatencyTable, device: Any, threads: int | None = None) -> str:
    """Say why a table's latencies may not be those of a device of this machine; "" if nothing speaks so."""
    others, (ran, unstable) = elsewhere(table, device, threads), count_stable(table)
    unsure = f"{unstable} of {ran} cells are unstable" if unstable else ""
    return "; ".join(filter(None, (others and f"{ELSEWHERE}: {others}", unsure)))


def warn_of_doubts(tables: Sequence[LatencyTable], engines: Sequence[Any], threads: int | None) -> None:
    """Warn once if tables may not be those of the devices of engines; one that has none is left out."""
    devices = dict.fromkeys(engine.device for engine in engines if hasattr(engine, "device"))
    texts = dict.fromkeys(doubts(table, device, threads) for device in devices for table in tables)
    if text := "; ".join(filter(None, texts)):
        warnings.warn(f"table: {text}; {AGAIN}", LatencyTableWarning, stacklevel=3)


def count_stable(table: LatencyTable) -> tuple[int, int]:
    """Return how many cells ran, beside every number of co-runners, and how many of them are not stable."""
    stable = [cells for name, cells in table.statistics.items() if name.startswith("stable")]
    return sum(int((~np.isnan(cells)).sum()) for cells in stable), sum(int((c == 0).sum()) for c in stable)
