"""The profiles that SuperServe's authors publish: JSON, times in nanoseconds, batch sizes listed per subnet.

They are in github.com/dhruvsgarg/once-for-all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subnetact.errors import FileFormatError, TableError
from subnetact.files.documents import DocumentFormat

__all__ = ["read_superserve"]

STAGES = ("forward", "deserialize", "h2d_copy", "postprocess", "d2h_copy", "total")
STATISTICS = ("mean", "std", "p99")
PROFILE = DocumentFormat(
    "a SuperServe profile", "", 0, "give a file that the profiler of SuperServe's authors wrote"
)
"""For messages only: these files name no kind and no schema."""


def read_superserve(path: str | os.PathLike[str], stage: str = "forward") -> dict[str, Any]:
    """Read a profile; see `LatencyTable.from_superserve`.

    Args:
        path: the file.
        stage: "forward", the model's own latency; another of the file's stages; or "total", their sum.

    Returns:
        The arguments with which `TableArrays.from_arrays` makes a table of the means of that stage, ms.

    Raises:
        MissingFile: there is no such file.
        FileFormatError: the file has another layout.
        TableError: the stage is unknown.
    """
    if stage not in STAGES:
        raise TableError(f"stage: {stage!r} is unknown; choose from {', '.join(STAGES)}")
    found = PROFILE.read_json(path)
    models = found.get("models") if isinstance(found, dict) else None
    if not isinstance(models, list) or not models:
        raise FileFormatError(
            f"{path}: not a SuperServe profile; it has no list 'models'; {PROFILE.next_step}"
        )
    with PROFILE.fields(path):
        measured = [_by_batch(model, stage) for model in models]
        sizes = sorted(set().union(*measured))
        dimensions = [model["subnet_dimension"] for model in models]
        keys = [_key(model["id"], dimension) for model, dimension in zip(models, dimensions, strict=True)]
        accuracy = [_known(model["accuracy"]) for model in models]
    cells = {
        name: [[times.get(size, {}).get(name, math.nan) for size in sizes] for times in measured]
        for name in STATISTICS
    }
    stamp = {
        "source": Path(path).name,
        "layout": "SuperServe",
        "stage": stage,
        "statistic": "mean",
        "subnet_dimension": dimensions,
    }
    return {
        "subnets": keys,
        "accuracy": accuracy,
        "batch_sizes": sizes,
        "latency_ms": cells["mean"],
        "statistics": cells,
        "stamp": stamp,
    }


def _by_batch(model: Mapping[str, Any], stage: str) -> dict[int, dict[str, float]]:
    """Return the statistics of one subnet in ms, by batch size and name."""
    found = {}
    for entry in model["latency_and_batch_ns"]:
        times = entry if stage == "total" else entry["stages"][stage]
        statistics = {name: float(times[name]) / 1e6 for name in STATISTICS if times.get(name) is not None}
        if "mean" not in statistics:
            raise KeyError("mean")
        found[int(entry["batch_size"])] = statistics
    return found


def _known(percent: float) -> float:
    """Return an accuracy; these files write a negative number if it is not known."""
    return math.nan if percent < 0 else float(percent)


def _key(identity: int, dimension: Mapping[str, list[Any]]) -> str:
    axes = {"depth_values": "d", "elasticity_ratio": "e", "width_multiplier": "w"}
    spelt = " ".join(f"{short}={','.join(map(str, dimension[name]))}" for name, short in axes.items())
    return f"{identity}: {spelt}"
