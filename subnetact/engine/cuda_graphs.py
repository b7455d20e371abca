"""CUDA graphs: the kernel launches of a subnet at one batch size, recorded once and replayed.

A graph is captured when a subnet first runs at a batch size, if the graphs' part of the memory budget has
room, and stays until the subnet is removed. The tests use a backend that stands in for CUDA.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from subnetact.device import ran_out_of_memory
from subnetact.engine.budget import Budget
from subnetact.engine.inputs import laid_out
from subnetact.engine.ready_subnet import Bound
from subnetact.files.fork import new_lock

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that graphs are captured for. A batch is padded to the next of these sizes."""

Call: TypeAlias = Callable[[Tensor], Any]
_log = logging.getLogger("subnetact.engine")


@dataclass(frozen=True, eq=False)
class Captured:
    """A recorded call: every `replay` reads its input tensor and writes `output`, of shape (N, ...)."""

    replay: Callable[[], None]
    output: Tensor
    nbytes: int


@dataclass(frozen=True, eq=False)
class _Graph:
    captured: Captured
    x: Tensor
    call: Call
    moment: Any

    def replay(self, x: Tensor) -> Tensor:
        """Run a batch, padded with zeros."""
        samples = x.shape[0]
        self.x[:samples].copy_(x)
        self.x[samples:].zero_()
        self.captured.replay()
        return self.captured.output[:samples].clone()


class Graphs:
    """The graphs of one engine. They share one memory pool, so only one is replayed at a time."""

    def __init__(self, budget: Budget, backend: CudaGraphs) -> None:
        self.budget = budget
        self._backend = backend
        self._replaying = new_lock()
        self._graphs: dict[Any, _Graph | None] = {}  # None: it runs eagerly
        self._level = logging.WARNING  # of the first failure

    def run(self, subnet: int, bound: Bound, call: Call, x: Any, part: int = 0) -> Any:
        """Run a batch through the graph of the next size, or eagerly; `part` is the number of a block."""
        if not isinstance(x, Tensor) or not 1 <= x.shape[0] <= GRAPH_SIZES[-1]:
            return call(x)
        size = GRAPH_SIZES[bisect_left(GRAPH_SIZES, x.shape[0])]
        key = subnet, part, size, x.shape[1:], x.dtype
        if key in self._graphs and self._graphs[key] is None:
            return call(x)
        with self._replaying:
            graph = self._graphs.get(key)
            if graph is None or graph.call is not call or graph.moment != bound.moment():
                graph = self._capture(key, bound, call, x, size)
            if graph is not None:
                return self._backend.run(partial(graph.replay, x))
        return call(x)

    def drop(self, subnet: int) -> None:
        """Remove the graphs of a subnet id."""
        with self._replaying:
            for key in [key for key in self._graphs if key[0] == subnet]:
                del self._graphs[key]
                self.budget.free(key)

    def _capture(self, key: Any, bound: Bound, call: Call, x: Tensor, size: int) -> _Graph | None:
        self._graphs.pop(key, None)
        self.budget.free(key)
        moment = bound.moment()
        padded = laid_out(torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device))
        if self.budget.used + padded.nbytes > self.budget.limit:
            self._graphs[key] = None
            return None
        try:
            captured = self._backend.capture(call, padded)
            output: Any = captured.output
            if not isinstance(output, Tensor) or output.shape[:1] != (size,):
                raise TypeError("the output is not one tensor of the batch's size")
            if (bound.supernet.state or bound.moment() != moment) and bound.changes_itself(padded):
                raise TypeError("its forward changes its own buffers")
        except Exception as error:
            if not ran_out_of_memory(error):  # Otherwise the next call tries again.
                self._graphs[key] = None
            text = "subnet %d runs eagerly at batch size %d: capture failed: %s"
            _log.log(self._level, text, key[0], size, error)
            self._level = logging.DEBUG
            return None
        if not self.budget.take(key, captured.nbytes):
            self._graphs[key] = None  # Running eagerly is cheaper than capturing again in every call.
            return None
        graph = self._graphs[key] = _Graph(captured, padded, call, moment)
        return graph


class CudaGraphs:
    """CUDA graphs in one memory pool, captured and replayed on one stream."""

    WARM_UPS = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Call, x: Tensor) -> Captured:
        """Run `call(x)` `WARM_UPS` times on the stream, then record it; replays see new values of `x`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                call(x)
        self._stream.synchronize()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets other threads use CUDA during the capture.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = call(x)
        grown = max(0, torch.cuda.memory_reserved(self._device) - before)
        return Captured(graph.replay, output, grown + x.nbytes + output.nbytes)

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream; the caller's stream waits for the result."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        current.wait_stream(self._stream)
        output.record_stream(current)
        return output


def graph_backend(device: torch.device) -> CudaGraphs | None:
    """Return what captures graphs on a device, or None."""
    return CudaGraphs(device) if device.type == "cuda" else None
