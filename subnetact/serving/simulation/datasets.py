"""The traces and the profile that ship with the package; their JSON files name source and licence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.simulation.traces import (
    bursty,
    from_counts,
    from_timestamps,
    time_varying,
)

__all__ = ["TRACES", "load_trace", "superserve_a40", "trace_info", "trace_series"]

Floats = npt.NDArray[np.float64]
_FILES = {
    "maf": "maf2019_per_minute",
    "azure_llm": "azure_llm2023_conv_arrivals",
    "servegen": "servegen_rates_10min",
}
TRACES = (*_FILES, "bursty", "time_varying")


def trace_series(name: str) -> dict[str, npt.NDArray[Any]]:
    """The recorded arrays of a shipped trace: "maf", "azure_llm" or "servegen".

    Raises:
        TraceError: no such trace.
    """
    with as_file(_data() / "traces" / f"{_file(name)}.npz") as path, np.load(path) as archive:
        return {key: archive[key] for key in archive.files}


def trace_info(name: str) -> dict[str, Any]:
    """Source, licence, attribution and statistics of a shipped trace."""
    text = (_data() / "traces" / f"{_file(name)}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def superserve_a40(batch_sizes: Sequence[int] = (1, 2, 4, 8, 16)) -> LatencyTable:
    """Six OFA-ResNet50 subnets on an NVIDIA A40, forward pass, as SuperServe's authors measured them."""
    text = (_data() / "profiles" / "superserve_a40_ofa_resnet50.json").read_text(encoding="utf-8")
    document = json.loads(text)
    rows = document["subnets"]
    cells = {
        kind: [[row["latency_ms"][str(size)][kind] for size in batch_sizes] for row in rows]
        for kind in ("mean", "std")
    }
    return LatencyTable.from_arrays(
        subnets=[f"{row['accuracy']:.3f}" for row in rows],
        accuracy=[row["accuracy"] for row in rows],
        batch_sizes=list(batch_sizes),
        latency_ms=cells["mean"],
        statistics={"std": cells["std"]},
        stamp={"device": document["device"], "source": document["source"], **document["hardware"]},
    )


def load_trace(name: str, scale: float = 1.0, seed: int = 0, duration_s: float | None = None) -> Floats:
    """Arrivals, ms, of one trace of the reference suite at its usual rate times `scale`.

    * maf: Azure Functions 2019, a day's shape squeezed to 120 s, mean 6400 arrivals a second, clipped at
      8750, Poisson inside a minute.
    * azure_llm: arrivals of an Azure LLM service, an hour squeezed to a mean of 6400.
    * servegen: two weeks of the model service "m_mid" squeezed to 120 s at a mean of 6400, Poisson inside
      a ten-minute bin.
    * bursty: base 1500, variant 5550, squared coefficient of variation 8.
    * time_varying: 2500 to 7400 at 500 per second squared.

    Args:
        name: one of `TRACES`.
        scale: multiplies every rate.
        seed: of everything that is drawn.
        duration_s: keep only arrivals before this time.

    Raises:
        TraceError: an unknown name, or arguments out of range.
    """
    if not (np.isfinite(scale) and scale > 0):
        raise TraceError(f"scale: {scale} must be finite and > 0")
    if name == "bursty":
        arrivals = bursty(1500 * scale, 5550 * scale, 8.0, 30.0 if duration_s is None else duration_s, seed)
    elif name == "time_varying":
        arrivals = time_varying(2500 * scale, 7400 * scale, 500 * scale, seed=seed)
    elif name == "azure_llm":
        arrivals = from_timestamps(trace_series(name)["arrival_ms"], mean_qps=6400 * scale)
    elif name == "servegen":
        arrivals = from_counts(trace_series(name)["m_mid_rate"], 120.0, 6400 * scale, seed=seed)
    else:
        counts = trace_series(name)["sum14d_union"]
        arrivals = from_counts(counts, 120.0, 6400 * scale, peak_qps=8750 * scale, seed=seed)
    return arrivals if duration_s is None else arrivals[arrivals < duration_s * 1000.0]


def _file(name: str) -> str:
    if name not in _FILES:
        raise TraceError(f"trace: {name!r} is not known; choose from {', '.join(TRACES)}")
    return _FILES[name]


def _data() -> Any:
    return files("subnetact") / "data"
