"""Graphs: launches recorded once per (subnet, batch size) and replayed, on CUDA.

Not yet seen on hardware: tested with a backend that stands in for CUDA.
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
"""Batch sizes that graphs are captured for; a batch is padded to the next of them."""

_log = logging.getLogger("subnetact.engine")


@dataclass(frozen=True, eq=False)
class Captured:
    """A recorded call.

    Attributes:
        replay: runs it again.
        output: the tensor every replay writes, of shape (N, ...).
        nbytes: device memory it holds.
    """

    replay: Callable[[], None]
    output: Tensor
    nbytes: int


class GraphBackend(Protocol):
    """What records calls on a device."""

    def capture(self, call: Callable[[Tensor], Any], x: Tensor) -> Captured:
        """Record `call(x)` for this very tensor; run it before as often as it needs."""

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream of all captures, after what the caller's stream has been given."""


@dataclass(frozen=True, eq=False)
class _Graph:
    captured: Captured
    x: Tensor
    call: Callable[[Tensor], Any]
    versions: list[int]


class Graphs:
    """The graphs of one engine, which share one memory pool: never two replays at once.

    Args:
        cache: where they are kept; those used least recently make room for others.
        backend: records and replays.
    """

    KIND = "graphs"

    def __init__(self, cache: ByteCache, backend: GraphBackend) -> None:
        self._cache = cache
        self._backend = backend
        self._replaying = Lock()
        self._keys: dict[int, set[Any]] = {}
        self._failed: set[Any] = set()
        self._warned = False

    def run(self, subnet: int, bound: Bound, call: Callable[[Tensor], Any], x: Any) -> Any:
        """Run x of shape (N, ...) through the graph of the next larger size, or eagerly where none can be.

        The output is the caller's own. Rows of the padding are zeros and are cut off.
        """
        if not isinstance(x, Tensor) or not 1 <= x.shape[0] <= GRAPH_SIZES[-1]:
            return call(x)
        size = GRAPH_SIZES[bisect_left(GRAPH_SIZES, x.shape[0])]
        key = self.KIND, subnet, size, x.shape[1:], x.dtype
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
        """Forget the graphs of a subnet."""
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
            self._failed.add(key)  # it does not fit: capturing it again and again would cost more
            return None
        return graph


def _replay(graph: _Graph, x: Tensor) -> Tensor:
    rows = x.shape[0]
    graph.x[:rows].copy_(x)
    graph.x[rows:].zero_()
    graph.captured.replay()
    return graph.captured.output[:rows].clone()


class _CudaGraphs:
    """CUDA graphs in one pool, captured and replayed on one stream."""

    WARM_UPS = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[Tensor], Any], x: Tensor) -> Captured:
        """Warm up on the stream, then capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                call(x)
        self._stream.synchronize()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may run other CUDA work meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = call(x)
        grown = max(0, torch.cuda.memory_reserved(self._device) - before)
        own = sum(t.numel() * t.element_size() for t in (x, output))
        return Captured(graph.replay, output, grown + own)

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream; the caller's stream waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        current.wait_stream(self._stream)
        output.record_stream(current)
        return output


def cuda_graphs(device: torch.device) -> GraphBackend:
    """Return the backend of a CUDA device."""
    return _CudaGraphs(device)
