"""Progress: the journal with which an interrupted calibration goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from subnetact import __version__
from subnetact.calibration.run import CalibrationRun
from subnetact.errors import SpecError
from subnetact.files.documents import StrPath
from subnetact.files.journal import Journal
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import hash_of
from subnetact.supernet.supernet import Supernet

PROGRESS = "progress"
"""The name of the only record: the averages so far, and the checksum of the batches that they are of."""


class Progress:
    """The averages of a calibration so far, in a journal that belongs to its weights and subnets."""

    def __init__(
        self,
        path: StrPath | None,
        save_every_s: float,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        rule: str | None,
    ) -> None:
        self._journal: Journal | None = None
        self._save_every_s = save_every_s
        self._began = self._saved = time.perf_counter()
        self._given, self._first, self._digest = 0, "", ""
        self._stored: dict[str, Any] = {"run": {}, "given": 0, "seconds": 0.0, "first": "", "digest": ""}
        if path is None:
            return
        keys = blake2b("\n".join(sorted(spec.key for spec in specs)).encode(), digest_size=8)
        environment = {
            "weights": supernet.fingerprint(),
            "subnets": f"{len(specs)} of {supernet.space.id}, {keys.hexdigest()}",
            "rule": ", ".join(sorted({rule or norm.rule for norm in supernet.norm_operators().values()})),
            "device": supernet.device.type,
            "versions": f"subnetact {__version__}, torch {torch.__version__}",
        }
        self._journal = Journal(path, environment)
        with self._journal.fields():
            for line in self._journal.of(PROGRESS):
                self._stored = {name: type(empty)(line[name]) for name, empty in self._stored.items()}

    @property
    def seconds(self) -> float:
        """The time that the calibration has taken, with earlier parts."""
        return float(self._stored["seconds"]) + time.perf_counter() - self._began

    def take(self, x: Any) -> None:
        """Take the next batch into the checksum, and refuse other batches than those of the file."""
        self._given += 1
        if self._journal is None:
            return
        now = self._digest = hash_of([x], self._digest)
        self._first = self._first or now
        stored = {1: self._stored["first"], self._stored["given"]: self._stored["digest"]}.get(self._given)
        if stored and stored != now:
            raise self._journal.mismatch(f"its first {self._given} batches are others. Give the same data")

    def check_length(self) -> None:
        """Refuse data of no batch, or of fewer batches than the file."""
        if not self._given:
            raise SpecError("calibration needs at least one batch, got none; a generator is read only once")
        if self._journal is not None and self._given < self._stored["given"]:
            raise self._journal.mismatch(
                f"it has {self._stored['given']} batches, the data only {self._given}. Give the same data"
            )

    def save(self, run: CalibrationRun, due: bool = True) -> None:
        """Keep the state of a run between two subnets, if it is `due` or the last time is long ago."""
        due = due or time.perf_counter() - self._saved >= self._save_every_s
        if due and self._journal is not None:
            digests = {"first": self._first, "digest": self._digest}
            facts = {"seconds": self.seconds, "run": run.state()}
            self._journal.replace(PROGRESS, given=self._given, **digests, **facts)
            self._saved = time.perf_counter()

    def restore(self, run: CalibrationRun) -> None:
        """Bring a prepared run to the state in the file, if there is one."""
        if self._journal is not None and self._stored["run"]:
            with self._journal.fields():
                run.restore(self._stored["run"])
