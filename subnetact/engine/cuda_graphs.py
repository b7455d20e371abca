"""CUDA graphs: the kernel launches of a subnet at one batch size, recorded once and replayed.

This module has not run on hardware yet; the tests use a backend that stands in for CUDA.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from subnetact.engine.cache import ByteCache
from subnetact.engine.ready_subnet import Bound

__all__ = ["GRAPH_SIZES", "Captured", "GraphBackend", "Graphs", "cuda_graphs"]

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that graphs are captured for. A batch is padded to the next of these sizes."""

_log = logging.getLogger("subnetact.engine")


@dataclass(frozen=True, eq=False)
class Captured:
    """A recorded call.

    Attributes:
        replay: runs the call again, on the values that its input tensor holds then.
        output: the tensor that every replay writes, of shape (N, ...).
        nbytes: the bytes of device memory that the recording holds.
    """

    replay: Callable[[], None]
    output: Tensor
    nbytes: int


class GraphBackend(Protocol):
    """Records calls on a device. `Engine(graph_backend=...)` takes one; tests use a stand-in for CUDA."""

    def capture(self, call: Callable[[Tensor], Any], x: Tensor) -> Captured:
        """Record `call(x)`.

        Args:
            call: a function of one batch. It may be run before, to warm up.
            x: the batch, of shape (N, ...). The recording reads this tensor, so replays see its new values.

        Returns:
            The recording.
        """

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream of all captures, after the work that is queued on the caller's stream.

        Args:
            work: a function without arguments that returns a tensor.

        Returns:
            The tensor, which the caller's stream may use.
        """


@dataclass(frozen=True, eq=False)
class _Graph:
    captured: Captured
    x: Tensor
    call: Callable[[Tensor], Any]
    versions: list[int]


class Graphs:
    """The graphs of one engine. They share one memory pool, so only one is replayed at a time.

    Args:
        cache: keeps the graphs within its budget; the least recently used ones are evicted.
        backend: records and replays calls.
    """

    KIND = "graphs"

    def __init__(self, cache: ByteCache, backend: GraphBackend) -> None:
        self._cache = cache
        self._backend = backend
        self._replaying = Lock()
        self._keys: dict[int, set[Any]] = {}
        self._failed: set[Any] = set()
        self._warned = False

    def run(self, subnet: int, bound: Bound, call: Callable[[Tensor], Any], x: Any, part: int = 0) -> Any:
        """Run a batch through the graph of the next batch size in `GRAPH_SIZES`.

        A batch runs eagerly if it is larger than every graph, if its graph cannot be captured, or if the
        graph does not fit in the budget.

        Args:
            subnet: the id of the subnet.
            bound: its current view. A graph of older weights is captured again.
            call: the function to capture: the view or the fused program.
            x: the batch, of shape (N, ...). The batch is padded with zeros.
            part: tells graphs of several parts of one subnet from each other.

        Returns:
            The output without the padding, in memory of its own.
        """
        if not isinstance(x, Tensor) or not 1 <= x.shape[0] <= GRAPH_SIZES[-1]:
            return call(x)
        size = GRAPH_SIZES[bisect_left(GRAPH_SIZES, x.shape[0])]
        key = self.KIND, subnet, part, size, x.shape[1:], x.dtype
        if key in self._failed:
            return call(x)
        with self._replaying:
            graph: _Graph | None = self._cache.get(key)
            if graph is None or graph.call is not call or graph.versions != bound.versions():
                graph = self._capture(key, subnet, bound, call, x, size)
            if graph is not None:
                held = graph
                return self._backend.run(lambda: _replay(held, x))
        return call(x)

    def drop(self, subnet: int) -> None:
        """Remove the graphs of a subnet id."""
        with self._replaying:
            for key in self._keys.pop(subnet, ()):
                self._cache.drop(key)
                self._failed.discard(key)

    def _capture(
        self, key: Any, subnet: int, bound: Bound, call: Callable[[Tensor], Any], x: Tensor, size: int
    ) -> _Graph | None:
        self._cache.drop(key)
        self._keys.setdefault(subnet, set()).add(key)
        versions = bound.versions()
        padded = torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        if x.dim() == 4:
            padded = padded.contiguous(memory_format=torch.channels_last)
        if not self._cache.make_room(padded.numel() * padded.element_size(), self.KIND):
            return None
        try:
            captured = self._backend.capture(call, padded)
            output: Any = captured.output
            if not isinstance(output, Tensor) or output.shape[:1] != (size,):
                raise TypeError("the output is not one tensor of the batch's size")
            if bound.versions() != versions and bound.changes_itself(padded):
                raise TypeError("its forward changes its own buffers")
        except Exception as error:
            self._failed.add(key)
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(
                level, "subnet %d runs eagerly at batch size %d: capture failed: %s", subnet, size, error
            )
            return None
        graph = _Graph(captured, padded, call, versions)
        if not self._cache.put(key, graph, captured.nbytes, self.KIND):
            self._failed.add(key)  # Running eagerly is cheaper than capturing again in every call.
            return None
        return graph


def _replay(graph: _Graph, x: Tensor) -> Tensor:
    samples = x.shape[0]
    graph.x[:samples].copy_(x)
    graph.x[samples:].zero_()
    graph.captured.replay()
    return graph.captured.output[:samples].clone()


class _CudaGraphs:
    """CUDA graphs in one memory pool, captured and replayed on one stream."""

    WARM_UPS = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[Tensor], Any], x: Tensor) -> Captured:
        """Run the call `WARM_UPS` times on the stream, then capture the call."""
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
        own = sum(t.numel() * t.element_size() for t in (x, output))
        return Captured(graph.replay, output, grown + own)

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream; the caller's stream waits for the result."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        current.wait_stream(self._stream)
        output.record_stream(current)
        return output


def cuda_graphs(device: torch.device) -> GraphBackend:
    """Return the backend that captures CUDA graphs on a device."""
    return _CudaGraphs(device)
