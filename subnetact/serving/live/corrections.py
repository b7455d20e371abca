"""Learned corrections of a latency table: how long batches really take, per subnet and batch size."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from threading import Lock

import numpy as np

from subnetact.errors import ProfileMismatch
from subnetact.files.documents import DocumentFormat, StrPath
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable

_NEXT_STEP = "give a file that Corrections.save() wrote, or remove it"
CORRECTIONS = DocumentFormat("corrections", "subnetact.corrections", 3, _NEXT_STEP)
_MEMORY = 64.0  # an average covers about the last 64 batches
_PRIOR = 8.0  # how many observations the next coarser average (cell to subnet to table) counts as
_FADE = 512  # further batches after which an observation counts half
_OLDEST = 2**53  # batches, since an average of a file was added to last
_CLIP = 5.0  # largest absolute log ratio that counts
_ENOUGH = 16  # observations before a subnet may drift
_ALL = (-1, -1)
_DRIFTED = "subnet %s takes %.2f times the latency of its table (threshold %.2f); profile this machine again"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorrectionsSnapshot:
    """Ratios of measured latency to the table's; arrays of shape (subnets, batch sizes).

    Attributes:
        mean: the ratio of the typical batch (geometric mean).
        planned: the ratio of a slow batch, two standard deviations above (about the 97th percentile).
    """

    mean: Floats
    planned: Floats


@dataclass(slots=True)
class _Running:
    """Running mean and variance of log(measured / table) over `n` observations, the last of batch `at`."""

    n: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    at: int = 0

    def left(self, now: int) -> float:
        """Return how many observations the past ones count as at batch number `now`."""
        return self.n * math.pow(0.5, (now - self.at) / _FADE)

    def add(self, x: float, at: int) -> None:
        """Learn x from batch number `at`."""
        self.n = n = min(self.left(at) + 1.0, _MEMORY)
        self.at = at
        deviation = x - self.mean
        self.mean += deviation / n
        self.variance = (1.0 - 1.0 / n) * (self.variance + deviation * deviation / n)

    def towards(self, mean: float, variance: float, now: int) -> tuple[float, float]:
        """Return mean and variance, shrunk towards the given ones if few observations are left."""
        n = self.left(now)
        weight = n / (n + _PRIOR)
        return mean + weight * (self.mean - mean), variance + weight * (self.variance - variance)


class Corrections:
    """How much longer than the table batches take, learned while serving. Threads may share one object.

    Every batch adds log(measured / table) to three averages of about the last 64 batches: of its cell of the
    table, of its subnet and of the whole table. With few observations, a cell is shrunk towards its subnet, a
    subnet towards the whole table, and that towards 0 (no correction). Observations count half after 512
    further batches, so that a subnet that was slow for a while is tried again.

    A subnet has drifted if its typical batch takes more than `threshold` times the latency of the `table`, or
    less than the inverse. The drift is logged once when it begins.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table, self.threshold = table, 1.5
        self.loads = 0  # how often a file replaced what was learned
        self._base: list[list[float]] = table.latency_ms.tolist()
        self._lock = Lock()
        # by subnet and column of the table; -1 stands for all of them
        self._averages: defaultdict[tuple[int, int], _Running] = defaultdict(_Running)
        self._drifted: set[int] = set()
        self.batches = 0

    def observe(self, subnet: int, batch_size: int, measured_ms: float) -> None:
        """Learn that a batch of the `subnet` with the planned `batch_size` took `measured_ms`."""
        column = self.table.pad_index[batch_size]
        expected = self._base[subnet][column]
        if not (measured_ms > 0.0 and expected > 0.0):
            return
        x = max(-_CLIP, min(_CLIP, math.log(measured_ms / expected)))
        with self._lock:
            self.batches += 1
            for cell in (_ALL, (subnet, -1), (subnet, column)):
                self._averages[cell].add(x, self.batches)

    def snapshot(self) -> CorrectionsSnapshot:
        """Return the ratios as they are now."""
        shape = len(self.table.subnets), len(self.table.batch_sizes)
        mean, variance = np.zeros(shape), np.zeros(shape)
        with self._lock:
            for i, j in sorted(self._averages):  # coarse ones first
                running = self._averages[i, j]
                coarser = max(i, 0), max(j, 0)
                found = running.towards(float(mean[coarser]), float(variance[coarser]), self.batches)
                cells = (slice(None) if i < 0 else i), (slice(None) if j < 0 else j)
                mean[cells], variance[cells] = found
        return CorrectionsSnapshot(np.exp(mean), np.exp(mean + 2.0 * np.sqrt(variance)))

    def drift(self) -> tuple[float, dict[int, float]]:
        """Return the ratio of measured latency to the table's, of all batches and of each drifted subnet.

        Subnets that newly drift are logged.
        """
        with self._lock:
            now, limit, before = self.batches, math.log(self.threshold), self._drifted
            overall = self._averages[_ALL].towards(0.0, 0.0, now)
            logs = {
                i: running.towards(*overall, now)[0]
                for (i, j), running in self._averages.items()
                if j < 0 <= i and round(running.n) >= _ENOUGH
            }
            # who has drifted goes on to drift until it is clearly below the threshold
            self._drifted = {i for i, log in logs.items() if abs(log) > (0.8 if i in before else 1.0) * limit}
            drifted = {i: math.exp(logs[i]) for i in sorted(self._drifted)}
        for i in drifted.keys() - before:  # not under the lock, because log handlers may be slow
            _log.warning(_DRIFTED, self.table.subnets[i], drifted[i], self.threshold)
        return math.exp(overall[0]), drifted

    def relax(self) -> None:
        """Make slow averages less slow; used when all requests are dropped and no batch runs to correct them.

        On the log scale, means above 0 and all standard deviations are halved: a ratio of 4 becomes 2.
        """
        with self._lock:
            for running in self._averages.values():
                running.mean = min(running.mean, 0.5 * running.mean)
                running.variance *= 0.25

    def save(self, path: StrPath) -> None:
        """Write what was learned to the file `path` as JSON; an interrupted write leaves an earlier one.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            averages = self._averages.items()
            rows = [(*cell, one.n, one.mean, one.variance, one.at - self.batches) for cell, one in averages]
        CORRECTIONS.write(path, {"table": _fingerprint(self.table), "averages": rows})

    def load(self, path: StrPath) -> None:
        """Replace what was learned by the content of a file `path` that `save` wrote.

        Raises:
            FileFormatError: The file is truncated, of another kind, or of a newer schema.
            ProfileMismatch: The corrections were learned on another table.
        """
        document = CORRECTIONS.read(path)
        if document.get("table") != _fingerprint(self.table):
            raise ProfileMismatch(
                f"{path}: learned on another latency table ({document.get('table')}, this batcher's is "
                f"{_fingerprint(self.table)}); start without this file, or serve with that table"
            )
        averages: defaultdict[tuple[int, int], _Running] = defaultdict(_Running)
        with CORRECTIONS.fields(path):
            rows, columns = range(-1, len(self.table.subnets)), range(-1, len(self.table.batch_sizes))
            for row in document["averages"]:
                i, j, n, mean, variance, at = row
                is_learned = abs(mean) <= _CLIP and 0.0 <= variance <= (2 * _CLIP) ** 2
                is_counted = 0.0 <= n <= _MEMORY and -_OLDEST <= at <= 0
                if not (i in rows and j in columns and is_learned and is_counted):
                    raise ValueError(f"the average {row}")
                averages[i, j] = _Running(n, mean, variance, at)
        with self._lock:
            for running in averages.values():
                running.at += self.batches
            self._averages = averages
            self.loads += 1


def _fingerprint(table: LatencyTable) -> str:
    text = json.dumps([table.subnets, table.batch_sizes])
    return hashlib.sha256(text.encode() + table.latency_ms.tobytes()).hexdigest()[:16]
