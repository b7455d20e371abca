"""TrainingState: the file with which a distillation that was stopped goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subnetact.errors import ResumeMismatch, TrainingError
from subnetact.files.documents import DocumentFormat
from subnetact.files.journal import differing
from subnetact.files.tensors import documented_tensors, write_tensors
from subnetact.operators.tensor_version import tensor_place
from subnetact.supernet.supernet import Supernet
from subnetact.training.processes import rank_and_count

STATE = DocumentFormat("a training state", "subnetact.training", 2, "choose another file, or remove it")


@dataclass
class TrainingState:
    """Weights, optimizer, others (scheduler, gradient scaler) and facts in one file, of one `environment`.

    Randomness needs no state: every batch has a seed of its own. The last save took `cost_s` seconds.
    """

    path: str | os.PathLike[str] | None
    environment: Mapping[str, Any]
    supernet: Supernet
    optimizer: torch.optim.Optimizer
    others: Mapping[str, Any]
    cost_s: float = 0.0

    def load(self) -> dict[str, Any] | None:
        """Restore everything, and return the facts; None if there is no file yet."""
        path = self.path
        if path is None or not os.path.exists(path):
            return None
        with documented_tensors(path, STATE, passing=(ResumeMismatch,)) as (document, stored):
            environment = json.loads(json.dumps(dict(self.environment)))
            if others := sorted(differing(dict(document["environment"]), environment)):
                raise ResumeMismatch(
                    f"{path}: was begun with others: {'; '.join(others)}. Give the same supernet, as it was "
                    "before the training, and the same arguments, or remove the file to begin anew"
                )
            own = self._weights()
            wrong = [n for n, t in own.items() if n not in stored or stored[n].shape != t.shape]
            if wrong:
                raise ValueError(f"{wrong[0]} is missing or of another shape")
            numbers = document["optimizer"]["state"].items()
            state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in numbers}
            for name, tensor in stored.items():
                if name.startswith("optimizer/"):
                    _, index, key = name.split("/", 2)
                    state.setdefault(int(index), {})[key] = tensor
            facts = dict(document["facts"])
            self.optimizer.load_state_dict({"state": state, "param_groups": document["optimizer"]["groups"]})
            for name, other in self.others.items():
                other.load_state_dict(document[name])
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(stored[name])
        return facts

    def save(self, facts: Mapping[str, Any]) -> None:
        """Replace the file; WriteError if the disk is full, and the earlier version stays."""
        if self.path is None or rank_and_count()[0]:
            return
        began = time.perf_counter()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._weights().items()}
        given, numbers = self.optimizer.state_dict(), dict[str, dict[str, Any]]()
        for index, entries in given["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{key}"] = value.detach().cpu().contiguous()
                else:
                    numbers.setdefault(str(index), {})[key] = value
        document = {
            **STATE.header,
            "environment": dict(self.environment),
            "facts": dict(facts),
            "optimizer": {"state": numbers, "groups": given["param_groups"]},
            **{name: other.state_dict() for name, other in self.others.items()},
        }
        try:
            text = json.dumps(document)
        except TypeError as error:
            raise TrainingError(
                f"resume: the optimizer or the scheduler holds what no file can hold ({error}); use ones of "
                "torch, whose state is tensors and numbers, or train without resume"
            ) from error
        write_tensors(self.path, tensors, {"document": text})
        self.cost_s = time.perf_counter() - began

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, those that share memory once."""
        named = reversed(self.supernet.network.state_dict().items())
        places = {tensor_place(tensor): (f"weights/{name}", tensor) for name, tensor in named}
        return dict(reversed(places.values()))
