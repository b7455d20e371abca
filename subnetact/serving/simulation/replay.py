"""Reads a batcher's decision log, so that other policies can be simulated on the arrivals of a live run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from subnetact.errors import FileFormatError
from subnetact.files.documents import StrPath
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.decision_log import DECISION_LOG
from subnetact.serving.simulation.result import Decision, SimulationResult, count_batch


@dataclass(frozen=True)
class LiveRun:
    """The requests of a live batcher and their outcomes.

    Attributes:
        arrivals_ms: when each request arrived, ms after the first one, ascending, shape (n,).
        slo_ms: time from arrival to deadline of each request, ms, shape (n,).
        floors: minimum accuracy of each request, percent, shape (n,).
        measured: the latency table of the batcher, with the mean measured latency for every subnet and batch
            size that ran.
        result: what was counted, with `decisions`. Requests that failed, were cancelled or refused, or were
            waiting when the batcher closed count as `unserved`.
        policy: name of the policy's class.
        workers: number of workers.
        expired: the rule for expired requests.
    """

    arrivals_ms: Floats
    slo_ms: Floats
    floors: Floats
    measured: LatencyTable
    result: SimulationResult
    policy: str
    workers: int
    expired: str

    @classmethod
    def load(cls, path: StrPath) -> LiveRun:
        """Return the run of a log that `Batcher(decision_log=path)` wrote; a last line cut short is left out.

        Raises:
            MissingFile: there is no such file.
            FileFormatError: the file is not a decision log, has a newer schema, is damaged, or holds no
                request.
        """
        header, entries, _ = DECISION_LOG.read_lines(path)
        with DECISION_LOG.fields(path):
            return _run_of(header, entries, path)


def _run_of(header: dict[str, Any], entries: list[dict[str, Any]], path: StrPath) -> LiveRun:
    table = LatencyTable.from_json(header["table"])
    result = SimulationResult(served_by=[0] * len(table.subnets))
    total, count = np.zeros(table.latency_ms.shape), np.zeros(table.latency_ms.shape)
    requests: list[tuple[float, float, float]] = []  # arrival, time given, minimum accuracy
    decisions: list[Decision] = []
    for entry in entries:
        k = len(entry["a"])
        requests += zip(entry["a"], entry["d"], entry.get("f", [0.0] * k), strict=True)
        if "s" not in entry:
            result.dropped += entry["o"] == "dropped"
            result.unserved += entry["o"] != "dropped"
            continue
        start, took, subnet, met = entry["t"], entry["ms"], entry["s"], int(entry["met"])
        count_batch(result, subnet, table.accuracy[subnet], met, k - met, start + took)
        seen = entry["w"], entry["queued"], entry["slack"]
        decisions.append(Decision(start, *seen, subnet, entry["b"], k, start + took))
        cell = subnet, table.pad_index[entry["b"]]
        total[cell] += took
        count[cell] += 1
    if not requests:
        raise FileFormatError(f"{path}: no request arrived; there is nothing to replay")
    arrivals, slos, floors = np.array(sorted(requests, key=lambda request: request[0])).T
    result.requests = len(requests)
    result.decisions = sorted(one._replace(t_ms=one.t_ms - arrivals[0]) for one in decisions)
    latency = np.divide(total, count, out=table.latency_ms.copy(), where=count > 0)
    measured = LatencyTable(table.subnets, table.accuracy, table.batch_sizes, latency)
    setting = str(header["policy"]), int(header["workers"]), str(header["expired"])
    return LiveRun(arrivals - arrivals[0], slos, floors, measured, result, *setting)
