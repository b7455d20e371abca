"""Which subnets are hot: those pinned, and the most used ones that fit in the budget."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.engine.cache import ByteCache
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.outputs import agree
from subnetact.engine.ready_subnet import Bound, ReadySubnet
from subnetact.supernet.supernet import Supernet

__all__ = ["PROMOTE_AFTER", "Promoter"]

PROMOTE_AFTER = 32
"""Uses after which a subnet that is not hot is considered."""

_log = logging.getLogger("subnetact.engine")


@dataclass(frozen=True, eq=False)
class _Fused:
    program: FusedProgram
    bound: Bound
    versions: list[int]

    def __call__(self, x: Tensor) -> Any:
        return self.program(x)

    def fresh(self, bound: Bound) -> bool:
        return self.bound is bound and bound.versions() == self.versions


class _Place:
    """Keeps room for a program that is being made."""


class Promoter:
    """Specialises subnets within a budget, in a thread of its own unless asked to do it now.

    Args:
        cache: where programs are kept, within its budget.
        supernet: binds the views that programs are made of.
        dtype: what programs compute in.
    """

    KIND = "packed"
    WAIT_S = 1.0
    """Seconds to wait for a program that was dropped while a call runs through it."""

    def __init__(self, cache: ByteCache, supernet: Supernet, dtype: torch.dtype | None) -> None:
        self._cache = cache
        self._supernet = supernet
        self._dtype = dtype
        self._working = Lock()
        self._pinned: set[int] = set()
        self._warned = False

    def program(self, subnet: ReadySubnet, bound: Bound, example: Tensor | None) -> _Fused | None:
        """Return a hot subnet's program, or None; count the use."""
        fused: _Fused | None = self._cache.get((self.KIND, subnet.id))
        if fused is not None:
            if fused.fresh(bound):
                return fused
            self._cache.drop((self.KIND, subnet.id))
            subnet.uses = PROMOTE_AFTER
        subnet.uses += 1
        wanted = subnet.uses >= PROMOTE_AFTER
        if wanted and example is not None and not subnet.refused and self._working.acquire(blocking=False):
            since, subnet.since, subnet.uses = subnet.since, self._cache.now, 0
            try:
                Thread(target=self._later, args=(subnet, bound, example, since), daemon=True).start()
            except RuntimeError:  # no thread to be had: a later use tries again
                self._working.release()
        return None

    def pin(self, subnet: ReadySubnet, bound: Bound, example: Tensor) -> bool:
        """Make a subnet hot now and until it is unpinned; tell whether it is."""
        with self._working:
            self._pinned.add(subnet.id)
            fused: _Fused | None = self._cache.get((self.KIND, subnet.id))
            if fused is not None and fused.fresh(bound):
                self._cache.pin((self.KIND, subnet.id), True)
                return True
            made = self._make(subnet, bound, example, math.inf)
            if not made:
                self._pinned.discard(subnet.id)
            return made

    def unpin(self, subnet: int) -> None:
        """Let a program make room for others."""
        self._pinned.discard(subnet)
        self._cache.pin((self.KIND, subnet), False)

    def drop(self, subnet: int) -> None:
        """Forget a subnet."""
        self._pinned.discard(subnet)
        self._cache.drop((self.KIND, subnet))

    def holds(self, subnet: int) -> bool:
        """Tell whether a subnet is hot."""
        return (self.KIND, subnet) in self._cache

    def _later(self, subnet: ReadySubnet, bound: Bound, example: Tensor, since: int) -> None:
        try:
            # A program that was used while this subnet earned its place is worth as much: it stays.
            pinned = subnet.id in self._pinned
            self._make(subnet, bound, example, math.inf if pinned else since)
        finally:
            self._working.release()

    def _make(self, subnet: ReadySubnet, bound: Bound, example: Tensor, before: float) -> bool:
        key, place = (self.KIND, subnet.id), (self.KIND, "place")
        size = 4 if self._dtype is None else self._dtype.itemsize
        nbytes = size * sum(m.weight.numel() for m in bound.view.modules() if isinstance(m, nn.Conv2d))
        if not self._cache.make_room(nbytes, self.KIND, before, self.WAIT_S):
            return False
        self._cache.put(place, _Place(), nbytes, self.KIND, before, pinned=True)
        try:
            program = self._program(subnet, bound, example)
        finally:
            self._cache.drop(place)
        if program is None:
            return False
        program.limit(partial(self._cache.grow, key))
        fused, pinned = _Fused(program, bound, bound.versions()), subnet.id in self._pinned
        kept = self._cache.put(key, fused, program.nbytes, self.KIND, before, pinned)
        if subnet.bound is None:
            self._cache.drop(key)
        return kept

    def _program(self, subnet: ReadySubnet, bound: Bound, example: Tensor) -> FusedProgram | None:
        versions = bound.versions()
        try:
            program = self._checked(subnet, bound, example)
        except Exception as error:
            current = bound.current(self._supernet, subnet.spec) and bound.versions() == versions
            if not current:
                return None  # it changed meanwhile; the next use tries again
            subnet.refused = True
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(level, "%s cannot be specialised and runs as a view: %s", subnet, error)
            return None
        return program if bound.versions() == versions else None

    def _checked(self, subnet: ReadySubnet, bound: Bound, example: Tensor) -> FusedProgram:
        device = next(bound.view.parameters()).device
        generator = torch.Generator().manual_seed(0)
        batch = torch.stack([example] * 2)
        if batch.is_floating_point():
            batch = torch.randn(batch.shape, generator=generator, dtype=batch.dtype)
        x = batch.to(device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        view, row = self._supernet.private_view(subnet.spec)
        if row is not bound.row or self._supernet.weights_generation != bound.weights_generation:
            raise ValueError("its statistics were replaced")
        with torch.inference_mode():
            program = FusedProgram(view, self._dtype)
            output, expected = program(x), view(x)
        tolerance = (1e-3, 1e-4) if self._dtype is None else (0.1, 0.1)
        if not agree(output, expected, *tolerance):
            raise ValueError("the fused network gives other outputs")
        return program
