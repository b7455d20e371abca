"""StoredOutputs: what a teacher returns for every batch of the first epoch, on disk, so that it runs once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.comparison import equal
from subnetact.errors import FileFormatError, TrainingError, WriteError
from subnetact.files.tensors import read_tensors, write_tensors
from subnetact.supernet.batches import call_with, describe_input, hash_tensors, map_tensors
from subnetact.supernet.load import warn_caller
from subnetact.training.task import Task


class StoredOutputs:
    """Returns what is learnt of a teacher, from a file per batch that is named by what decides its content.

    That is the teacher with its weights, the inputs and the `facts`. What no name tells, such as the code of
    `output=`, is compared: the first outputs that are read are computed once more.
    """

    def __init__(
        self, folder: str | os.PathLike[str], teacher: Callable[..., Any] | None, task: Task, facts: str
    ) -> None:
        self._folder, self._teacher, self._task = Path(folder), teacher, task
        self._compared = self._warned = False
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        if teacher is None or not self._folder.is_dir():
            raise TrainingError(
                f"stored: {folder} must be a folder, for the outputs of a teacher that stays as it is and "
                'teaches; give teacher="frozen" or a network, and distillation above 0'
            )
        network = teacher if isinstance(teacher, nn.Module) else nn.Module()
        facts += f" {task.name} {network!r} {getattr(teacher, 'config', None)}"
        self._digest = blake2b(facts.encode(), digest_size=16)
        hash_tensors(self._digest, (*network.parameters(), *network.buffers()))

    def __call__(self, x: Any, first: bool) -> Tensor:
        """Return the outputs for the inputs of a batch, and store them if it is of the first epoch."""
        digest, stored = self._digest.copy(), None
        digest.update(repr(map_tensors(lambda t: t.dtype, x)).encode())
        hash_tensors(digest, x)
        path = self._folder / f"{digest.hexdigest()}.safetensors"
        with suppress(FileFormatError):  # There is none, or it is damaged.
            stored = read_tensors(path)["outputs"]
        if stored is not None and self._compared:
            return stored
        with torch.no_grad():
            outputs = self._task.output(call_with(self._teacher, x), x)  # type: ignore[arg-type]
        if stored is None:
            self._write(path, outputs, first)
        elif not equal(stored, outputs.cpu()):
            raise TrainingError(
                f"stored: the outputs in {self._folder} are not those of this teacher and this output=; give "
                "another folder, or remove it"
            )
        self._compared = self._compared or stored is not None
        return outputs if stored is None else stored

    def _write(self, path: Path, outputs: Any, first: bool) -> None:
        if not isinstance(outputs, Tensor):
            raise TrainingError(
                f"stored: one tensor can be stored, and {describe_input(outputs)} is learnt; give output=, a "
                "function that returns a tensor, or leave stored out"
            )
        why: Any = "batches change from epoch to epoch; give a list of them"
        if first:
            try:
                write_tensors(path, {"outputs": outputs.detach().cpu().contiguous()})
                return
            except WriteError as error:
                why = error
        if not self._warned:
            self._warned = True
            warn_caller(f"stored: the teacher runs again in every epoch: {why}", RuntimeWarning)
