"""The recorded traces and the latency table that are part of the package.

The JSON file beside each recorded trace names its source and licence.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TraceError
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable
from subnetact.serving.simulation.trace_file import read_times
from subnetact.serving.simulation.traces import bursty, check, from_counts, from_timestamps, time_varying

_DATA = files("subnetact") / "data"
_FILES = {
    "maf": "maf2019_per_minute",
    "azure_llm": "azure_llm2023_conv_arrivals",
    "servegen": "servegen_rates_10min",
}
TRACES = (*_FILES, "bursty", "time_varying")
"""The names that `load_trace` accepts."""


def trace_series(name: str) -> dict[str, npt.NDArray[Any]]:
    """Return the recorded arrays of the trace `name` ("maf", "azure_llm" or "servegen"), by their names."""
    with as_file(_DATA / "traces" / f"{_FILES[name]}.npz") as path, np.load(path) as archive:
        return dict(archive)


def superserve_a40(batch_sizes: Sequence[int] = (1, 2, 4, 8, 16)) -> LatencyTable:
    """Return the latency table of SuperServe: six subnets of OFA-ResNet50 on an NVIDIA A40.

    Args:
        batch_sizes: batch sizes of the table, out of 1, 2, 4, 8, 16 and 32.

    Returns:
        The latencies of the forward pass as SuperServe's authors measured them, with the statistic "std".
    """
    with as_file(_DATA / "profiles" / "superserve_a40_ofa_resnet50.json") as path:
        return LatencyTable.load(path).select(batch_sizes=batch_sizes)


def load_trace(
    name: str,
    scale: float = 1.0,
    seed: int = 0,
    duration_s: float | None = None,
    column: str | int | None = None,
    unit: str | None = None,
) -> Floats:
    """Return a trace of the reference suite, or of a file.

    * maf: Azure Functions 2019. One day is compressed to 120 s, with a mean rate of 6400 per second, clipped
      at 8750 per second. Arrivals within one recorded minute are a Poisson process.
    * azure_llm: recorded arrivals of an Azure LLM service. One hour is compressed to a mean rate of 6400 per
      second.
    * servegen: two weeks of the model service "m_mid", compressed to 120 s with a mean rate of 6400 per
      second. Arrivals within one recorded bin of ten minutes are a Poisson process.
    * bursty: 30 s of `bursty` with a base of 1500 and a variant of 5550 per second, squared coefficient of
      variation 8.
    * time_varying: `time_varying` from 2500 to 7400 per second, at 500 per second squared.

    Args:
        name: one of `TRACES`, or the path of a text or CSV file with one request per line, in any order. A
            first line without numbers names the columns. Times are numbers or dates (ISO 8601, UTC).
        scale: factor on every rate.
        seed: seed of all random numbers.
        duration_s: keep only the arrivals before this time, s. If None, keep all.
        column: the column of a file that holds the arrival times: its name, or its number from 1. It may be
            None if the file has one column only.
        unit: the unit of numbers in a file: "s", "ms" or "us". If None, the one at the end of the column's
            name (`arrival_s`), or else ms.

    Returns:
        Arrival times, ms, ascending, shape (n,).

    Raises:
        TraceError: there is no such trace, the file holds no times, or an argument is out of range.

    Example:
        >>> arrivals_ms = load_trace("requests.csv", column="arrival_s")
    """
    check(scale=scale)
    if name == "bursty":
        arrivals = bursty(1500 * scale, 5550 * scale, 8.0, 30.0, seed)
    elif name == "time_varying":
        arrivals = time_varying(2500 * scale, 7400 * scale, 500 * scale, seed=seed)
    elif name == "azure_llm":
        arrivals = from_timestamps(trace_series(name)["arrival_ms"], mean_qps=6400 * scale)
    elif name == "servegen":
        arrivals = from_counts(trace_series(name)["m_mid_rate"], 120.0, 6400 * scale, seed=seed)
    elif name == "maf":
        counts = trace_series(name)["sum14d_union"]
        arrivals = from_counts(counts, 120.0, 6400 * scale, peak_qps=8750 * scale, seed=seed)
    else:
        try:
            arrivals = from_timestamps(read_times(name, column, unit)) / scale
        except OSError as error:
            raise TraceError(
                f"trace: {name!r} is no readable file and not known; choose from {', '.join(TRACES)}"
            ) from error
    return arrivals if duration_s is None else arrivals[arrivals < duration_s * 1000.0]
