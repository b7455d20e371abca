"""UnfinishedFile: the file with which an interrupted calibration goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from subnetact import __version__
from subnetact.calibration.run import CalibrationRun
from subnetact.errors import ResumeMismatch
from subnetact.files.atomic import require_regular
from subnetact.files.documents import DocumentFormat, parse_json
from subnetact.files.tensors import write_tensors
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import tensors_of
from subnetact.supernet.supernet import Supernet

__all__ = ["UnfinishedFile", "identity"]

UNFINISHED = DocumentFormat(
    "an unfinished calibration",
    "subnetact.calibration",
    1,
    "remove it to calibrate anew, or give a path of its own",
)


def identity(
    supernet: Supernet, specs: Sequence[SubnetSpec], rule: str | None, largest_error: float | None
) -> dict[str, str]:
    """Return what two calibrations must have in common so that one can go on with the work of the other.

    The data must be the same as well; `UnfinishedFile.enters` compares the batches.

    Args:
        supernet: the supernet.
        specs: the subnets to calibrate.
        rule: the rule of averaging; if None, that of each BatchNorm.
        largest_error: the relative standard error at which subnets stop, 0.01 for one percent, or None.

    Returns:
        Facts in words, by name; `ResumeMismatch` names those that differ.
    """
    rules = sorted({rule or norm.rule for norm in supernet.norm_operators().values()})
    keys = blake2b("\n".join(sorted(spec.key for spec in specs)).encode(), digest_size=8)
    return {
        "weights": supernet.fingerprint(),
        "subnets": f"{len(specs)} of {supernet.space.id}, {keys.hexdigest()}",
        "rule": ", ".join(rules),
        "tolerance": str(largest_error),
        "device": next(supernet.network.parameters()).device.type,
        "versions": f"subnetact {__version__}, torch {torch.__version__}",
    }


class UnfinishedFile:
    """A file with the averages of a calibration so far.

    Args:
        path: the file. If it exists, it is read.
        identity: what `identity` returned for the calibration.

    Attributes:
        seconds: the time that the work in the file took.

    Raises:
        ResumeMismatch: the file is of another calibration.
        FileFormatError: the file is damaged, of another kind, or of a newer schema.
    """

    def __init__(self, path: str | PathLike[str], identity: Mapping[str, str]) -> None:
        self._path = Path(path)
        self._identity = dict(identity)
        self._digest = blake2b(digest_size=16)
        self._given = 0
        self._stored: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self.seconds = 0.0
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        require_regular(self._path)
        with (
            UNFINISHED.readable(self._path, unreadable=(SafetensorError,)),
            UNFINISHED.fields(self._path),
            safe_open(self._path, framework="pt") as file,
        ):
            header = file.metadata()
            UNFINISHED.check_metadata(header, self._path)
            self._stored = parse_json(header["progress"])
            self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            theirs = self._stored["identity"]
            needed = {"seconds", "given", "digest", "finished", "position"}
            needed |= {"norms", "dtypes", "alone", "stopped", "layers"}
            if not isinstance(theirs, dict) or not needed <= set(self._stored):
                raise KeyError(f"it lacks {sorted(needed - set(self._stored))}")
            self.seconds = float(self._stored["seconds"])
            if not isinstance(self._stored["norms"], list):
                raise TypeError("its norms are no list")
            if not math.isfinite(self.seconds) or not isinstance(self._stored["given"], int):
                raise ValueError("its progress is no number")
        different = [
            f"{name} ({theirs.get(name)} there, {own} here)"
            for name, own in self._identity.items()
            if theirs.get(name) != own
        ]
        if different:
            raise self._mismatch(f"it has other {'; '.join(different)}")

    def _mismatch(self, what: str) -> ResumeMismatch:
        return ResumeMismatch(
            f"{self._path}: unfinished work of another calibration, {what}; remove it, or name another file"
        )

    def enters(self, x: Any, given: int, finished: int) -> bool:
        """Take the next batch into the checksum of the data, and tell whether the batch has to be run.

        Args:
            x: the batch: a tensor of shape (N, ...), or a tuple or dictionary of such tensors.
            given: the number of this batch, from 1.
            finished: the number of batches that all subnets have taken already.

        Raises:
            ResumeMismatch: the batches so far are not those of the file.
        """
        for part in tensors_of(x):
            self._digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
            self._digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        self._given = given
        theirs = self._stored["digest"] if self._stored.get("given") == given else None
        if theirs is not None and theirs != self._digest.hexdigest():
            raise self._mismatch(f"its first {given} batches are others")
        return given > finished

    def check_length(self, given: int) -> None:
        """Check that the data has at least as many batches as the file.

        Args:
            given: the number of batches of the data.

        Raises:
            ResumeMismatch: the data has fewer batches.
        """
        if self._stored and given < self._stored["given"]:
            raise self._mismatch(f"it has {self._stored['given']} batches, the data only {given}")

    def save(self, run: CalibrationRun, seconds: float) -> None:
        """Write the state of a run, atomically.

        Args:
            run: the run, between two subnets.
            seconds: the time that the run took since it was started or resumed.

        Raises:
            MissingFile: the folder of the file does not exist.
            WriteError: the file cannot be written.
        """
        facts, tensors = run.state()
        progress = {
            "identity": self._identity,
            "given": self._given,
            "digest": self._digest.hexdigest(),
            "seconds": self.seconds + seconds,
            **facts,
        }
        header = {**UNFINISHED.metadata, "progress": json.dumps(progress)}
        write_tensors(self._path, tensors, header)

    def restore(self, run: CalibrationRun) -> None:
        """Bring a prepared run to the state in the file. Without a file, the run stays as it is.

        Raises:
            ResumeMismatch: the run has other layers.
            FileFormatError: the file contradicts itself.
        """
        if not self._stored:
            return
        if len(run.norms()) != len(self._stored["norms"]):
            raise self._mismatch("it has other layers")
        with UNFINISHED.fields(self._path):
            run.restore(self._stored, self._tensors)
