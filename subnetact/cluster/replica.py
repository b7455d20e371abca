"""One replica: an engine and a batcher with a deadline queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from subnetact.errors import DeadlinePassed, FileFormatError, RequestError
from subnetact.serve.app import infer_rows
from subnetact.serve.base_app import unix_ms
from subnetact.serve.source import Source
from subnetact.serving.live.answers import Answer
from subnetact.serving.live.batcher import monotonic_ms

Reply = Sequence[Answer] | RequestError
"""The answers to all rows, with their outputs as arrays; or the error."""


def to_arrays(x: Any) -> Any:
    """Return a tree of tensors as NumPy arrays, which Ray sends without a copy; NumPy has no bfloat16."""
    return tree_map_only(
        lambda leaf: isinstance(leaf, Tensor) and leaf.dtype != torch.bfloat16,
        lambda leaf: leaf.detach().cpu().contiguous().numpy(),
        x,
    )


def to_tensors(x: Any) -> Any:
    """Return the tree that `to_arrays` was given; arrays that may not be written are copied."""
    return tree_map_only(np.ndarray, lambda a: torch.from_numpy(a if a.flags.writeable else a.copy()), x)


class EngineReplica:
    """Loads a bundle, whose weights all replicas of a machine share, and answers requests.

    An input stands for `input_ms` in the load of a replica, see `Autoscaling`.
    """

    def __init__(
        self, source: Source, input_ms: float = 0.0, clock_ms: Callable[[], float] = monotonic_ms
    ) -> None:
        torch.set_num_threads(source.threads_per_worker)
        self._bundle = Path(source.bundle or "")
        self._files = self._tensor_files()
        self.engine = source.engine(mapped=True)
        table = source.latency_table(self.engine)
        self.engine.warm_up(table.batch_sizes)  # the first requests would be late
        self._input_ms, self._arrived, self._clock_ms, self._since_ms = input_ms, 0, clock_ms, clock_ms()
        self.batcher = source.batcher(self.engine, table)

    async def answer(self, xs: Sequence[Any], left_ms: float, due_ms: float, **ask: Any) -> Reply:
        """Answer the rows of one request, arrays, or return its error: Ray would log and wrap a raised one.

        The answers are due at `due_ms`, in ms since 1970, and in `left_ms` whatever the clock here says.
        """
        self._arrived += len(xs)
        left_ms = min(left_ms, due_ms - unix_ms())
        try:
            if left_ms <= 0.0:
                raise DeadlinePassed("the deadline passed on the way")
            answers = await infer_rows(self.batcher, [to_tensors(x) for x in xs], left_ms, **ask)
        except RequestError as error:
            return error
        return [answer._replace(output=to_arrays(answer.output)) for answer in answers]

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load since the last call; Ray asks for it once per second."""
        now_ms, stats = self._clock_ms(), self.batcher.stats()
        busy_ms = self._arrived * self._input_ms * stats.correction
        load = busy_ms / max(now_ms - self._since_ms, 1.0) / stats.workers
        self._arrived, self._since_ms = 0, now_ms
        return {"load": load}

    def check_health(self) -> None:
        """Raise if no worker is up or the mapped weights were written over, so that Ray starts another."""
        now = self._tensor_files()
        if any(now.get(file, facts) != facts for file, facts in self._files.items()):
            raise FileFormatError(
                f"bundle {self._bundle}: it was written over while it is served; save it to a new folder, or "
                "replace its files instead of changing them"
            )
        if not self.batcher.stats().workers_up:
            raise RuntimeError("no worker of the batcher is up")

    def _tensor_files(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return size and time of change of the bundle's tensors, which stay mapped, by name and inode."""
        try:
            found = [(path.name, path.stat()) for path in self._bundle.glob("*.safetensors")]
        except OSError:  # The bundle is being replaced.
            return {}
        return {(name, stat.st_ino): (stat.st_size, stat.st_mtime_ns) for name, stat in found}

    def close(self) -> None:
        """Finish accepted requests and end the threads. A second call does nothing."""
        self.batcher.close()

    def __del__(self) -> None:
        if hasattr(self, "batcher"):  # the constructor may have failed
            self.close()
