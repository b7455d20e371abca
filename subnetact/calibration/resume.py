"""Progress: a calibration's unfinished work in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subnetact import __version__
from subnetact.calibration.calibration_norm import CalibrationNorm
from subnetact.calibration.run import CalibrationRun
from subnetact.documents import DocumentFormat, parse_json, replacing
from subnetact.errors import ResumeMismatch
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet

__all__ = ["Progress", "identity"]

UNFINISHED = DocumentFormat(
    "an unfinished calibration",
    "subnetact.calibration",
    1,
    "remove it to calibrate anew, or give a path of its own",
)


def identity(
    supernet: Supernet, specs: Sequence[SubnetSpec], rule: str | None, tolerance: float | None
) -> dict[str, str]:
    """Return what unfinished work must agree on to be gone on with, apart from the data."""
    rules = sorted({rule or norm.rule for norm in supernet.norm_operators().values()})
    keys = blake2b("\n".join(sorted(spec.key for spec in specs)).encode(), digest_size=8)
    return {
        "weights": supernet.fingerprint(),
        "subnets": f"{len(specs)} of {supernet.space.id}, {keys.hexdigest()}",
        "rule": ", ".join(rules),
        "tolerance": str(tolerance),
        "device": next(supernet.network.parameters()).device.type,
        "versions": f"subnetact {__version__}, torch {torch.__version__}",
    }


class Progress:
    """A file with the averages so far; written atomically.

    Args:
        path: the file; read where it exists.
        identity: of the calibration to go on with.

    Attributes:
        seconds: the time that the work in the file took.

    Raises:
        ResumeMismatch: the file is of another calibration.
        FileFormatError: it is truncated, of another kind, or of a newer schema.
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
            self.seconds = float(self._stored["seconds"])

    def _read(self) -> None:
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

    def enters(self, x: Tensor, given: int, finished: int) -> bool:
        """Take note of the next batch and tell whether it is still to be worked on.

        Raises:
            ResumeMismatch: the batches up to here are not those of the file.
        """
        self._digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
        self._digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        self._given = given
        theirs = self._stored["digest"] if self._stored.get("given") == given else None
        if theirs is not None and theirs != self._digest.hexdigest():
            raise self._mismatch(f"its first {given} batches are others")
        return given > finished

    def check_length(self, given: int) -> None:
        """Refuse data that has fewer batches than the file.

        Raises:
            ResumeMismatch: it has.
        """
        if self._stored and given < self._stored["given"]:
            raise self._mismatch(f"it has {self._stored['given']} batches, the data only {given}")

    def save(self, run: CalibrationRun, seconds: float) -> None:
        """Write the averages of a run as they are between two subnets."""
        tensors, norms = {}, []
        for norm in run.norms():
            width = 0 if norm.average is None else len(norm.average)
            channels = 0 if norm.average is None else norm.average[0].numel()
            norms.append((width, channels, norm.batches, norm.weight, norm.weight_squares))
        averages = [t.cpu() for norm in run.norms() for t in norm.average or ()]
        for dtype in {t.dtype for t in averages}:
            tensors[f"averages.{dtype}"] = torch.cat([t for t in averages if t.dtype == dtype])
        dtypes = [str(norm.average[0].dtype) if norm.average else "" for norm in run.norms()]
        stopped = []
        for i, (spec, (row, batches)) in enumerate(run.stopped.items()):
            stopped.append((spec.to_json(), list(row.channels.items()), batches))
            tensors[f"row.{i}"] = row.flat.cpu()
        progress = {
            "identity": self._identity,
            "given": self._given,
            "digest": self._digest.hexdigest(),
            "finished": run.finished,
            "position": run.position,
            "norms": norms,
            "dtypes": dtypes,
            "alone": run.alone_batches(),
            "stopped": stopped,
            "layers": [run.layers_computed, run.layers_alone],
            "seconds": self.seconds + seconds,
        }
        header = {**UNFINISHED.metadata, "progress": json.dumps(progress)}
        with replacing(self._path) as temporary:
            save_file(tensors, temporary, header)

    def restore(self, run: CalibrationRun) -> None:
        """Bring a prepared run to where the file is.

        Raises:
            ResumeMismatch: the run has other layers.
            FileFormatError: the file contradicts itself.
        """
        if not self._stored:
            return
        norms = run.norms()
        if len(norms) != len(self._stored["norms"]):
            raise self._mismatch("it has other layers")
        with UNFINISHED.fields(self._path):
            ends = dict.fromkeys(self._tensors, 0)
            for norm, state, dtype in zip(norms, self._stored["norms"], self._stored["dtypes"], strict=True):
                self._restore_norm(norm, [int(n) for n in state], f"averages.{dtype}", ends, run.device)
            run.alone_batches(self._stored["alone"])
            stopped = {}
            for i, (spec, channels, batches) in enumerate(self._stored["stopped"]):
                row = NormRow(
                    {name: int(n) for name, n in channels}, self._tensors[f"row.{i}"].to(run.device)
                )
                stopped[SubnetSpec.from_json(spec)] = row, int(batches)
            run.layers_computed, run.layers_alone = map(int, self._stored["layers"])
            run.restore(int(self._stored["finished"]), int(self._stored["position"]), stopped)

    def _restore_norm(
        self,
        norm: CalibrationNorm,
        state: Sequence[int],
        name: str,
        ends: dict[str, int],
        device: torch.device,
    ) -> None:
        width, channels, norm.batches, norm.weight, norm.weight_squares = state
        parts = []
        for _ in range(width):
            part = self._tensors[name][ends[name] : ends[name] + channels]
            if part.shape != (norm.module.num_features,):
                raise ValueError(f"{norm.norm.path} has {norm.module.num_features} channels, not {len(part)}")
            ends[name] += channels
            parts.append(part.to(device, copy=True))
        norm.average = tuple(parts) or None
