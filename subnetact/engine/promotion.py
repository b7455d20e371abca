"""Promotion: which subnets become fused programs within the memory budget.

Pinned subnets come first. Then a subnet that was used `PROMOTE_AFTER` times becomes a fused program if it
fits, or if it can evict programs that were not used in the meantime.
"""

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
from subnetact.supernet.storage import checksum
from subnetact.supernet.supernet import Supernet

__all__ = ["PROMOTE_AFTER", "PinResult", "Promoter"]

PROMOTE_AFTER = 32
"""Number of uses after which a subnet that runs as a view is considered for promotion."""

_log = logging.getLogger("subnetact.engine")


@dataclass(frozen=True)
class PinResult:
    """The answer of `Engine.pin`. It is true if the subnet runs as a fused program now.

    Attributes:
        fused: whether the subnet is a fused program now.
        reason: why it is not, in one line. It is empty if the subnet is fused.
    """

    fused: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.fused


@dataclass(frozen=True, eq=False)
class _Promoted:
    program: FusedProgram
    bound: Bound
    versions: list[int]
    sums: list[int]

    def __call__(self, x: Tensor) -> Any:
        return self.program(x) if self.program.accepts(x) else self.bound.view(x)

    def fresh(self, bound: Bound) -> bool:
        """Tell whether the program was made from the current weights and statistics."""
        return self.bound is bound and bound.versions() == self.versions


class _Reservation:
    """Stands in the cache for a program that is being made."""


class Promoter:
    """Makes fused programs of subnets, in a background thread or, if a subnet is pinned, at once.

    Every new program is run on two random inputs and compared with the view before it is used.

    Args:
        cache: keeps the programs within its budget.
        supernet: binds the views that programs are made of.
        dtype: what programs compute in. If None, they compute in the dtype of the weights.
    """

    KIND = "fused"
    """The kind of the cache's entries."""
    WAIT_S = 1.0
    """Seconds to wait for an evicted program until the last call through it has ended."""

    def __init__(self, cache: ByteCache, supernet: Supernet, dtype: torch.dtype | None) -> None:
        self._cache = cache
        self._supernet = supernet
        self._dtype = dtype
        self._working = Lock()
        self._pinned: set[int] = set()
        self._warned = False

    def program(self, subnet: ReadySubnet, bound: Bound, example: Tensor | None) -> _Promoted | None:
        """Return the fused program of a subnet, or None if there is none now, and count the use.

        Args:
            subnet: the subnet that is about to run. Its uses are counted; enough of them start its promotion.
            bound: its current view. A program that was made from older weights is discarded.
            example: one input without a batch dimension. If None, the subnet is not promoted.
        """
        promoted: _Promoted | None = self._cache.get((self.KIND, subnet.id))
        if promoted is not None:
            if promoted.fresh(bound):
                return promoted
            self._cache.drop((self.KIND, subnet.id))
            subnet.uses = PROMOTE_AFTER
        subnet.uses += 1
        wanted = subnet.uses >= PROMOTE_AFTER
        if wanted and example is not None and not subnet.refused and self._working.acquire(blocking=False):
            since, subnet.since, subnet.uses = subnet.since, self._cache.now, 0
            try:
                Thread(target=self._promote, args=(subnet, bound, example, since), daemon=True).start()
            except RuntimeError:  # The system has no thread left; a later use tries again.
                self._working.release()
        return None

    def pin(self, subnet: ReadySubnet, bound: Bound, example: Tensor) -> PinResult:
        """Make the fused program of a subnet now and protect it from eviction.

        Args:
            subnet: the subnet.
            bound: its current view.
            example: one input without a batch dimension.

        Returns:
            Whether the subnet has a fused program now. If it has none, the reason is that the network cannot
            be fused, or that the budget is too small.
        """
        with self._working:
            self._pinned.add(subnet.id)
            promoted: _Promoted | None = self._cache.get((self.KIND, subnet.id))
            if promoted is not None and promoted.fresh(bound):
                self._cache.pin((self.KIND, subnet.id), True)
                return PinResult(True)
            if self._make(subnet, bound, example, math.inf):
                return PinResult(True)
            self._pinned.discard(subnet.id)
            mib = self._cache.budget / 2**20
            small = f"it does not fit in the budget of {mib:.4g} MiB beside the programs that are pinned"
            return PinResult(False, subnet.refused or small)

    @property
    def pinned(self) -> frozenset[int]:
        """The subnet ids that are pinned."""
        return frozenset(self._pinned)

    def unpin(self, subnet: int) -> None:
        """Stop protecting the program of a subnet id from eviction."""
        self._pinned.discard(subnet)
        self._cache.pin((self.KIND, subnet), False)

    def drop(self, subnet: int) -> None:
        """Remove the program of a subnet id, pinned or not."""
        self._pinned.discard(subnet)
        self._cache.drop((self.KIND, subnet))

    def holds(self, subnet: int) -> bool:
        """Tell whether a subnet id has a fused program now."""
        return (self.KIND, subnet) in self._cache

    def matches(self, subnet: ReadySubnet) -> bool:
        """Tell whether the fused program of a subnet, if there is one, was made of the present weights."""
        promoted: _Promoted | None = self._cache.get((self.KIND, subnet.id))
        if promoted is None or subnet.bound is None or not promoted.fresh(subnet.bound):
            return True  # Without a program, or with one that the next call discards, nothing is stale.
        return checksum(promoted.bound.read) == promoted.sums

    def _promote(self, subnet: ReadySubnet, bound: Bound, example: Tensor, since: int) -> None:
        try:
            # A program that was used while this subnet collected its uses is worth as much, so it stays.
            pinned = subnet.id in self._pinned
            self._make(subnet, bound, example, math.inf if pinned else since)
        finally:
            self._working.release()

    def _make(self, subnet: ReadySubnet, bound: Bound, example: Tensor, before: float) -> bool:
        key, place = (self.KIND, subnet.id), (self.KIND, "reservation")
        size = 4 if self._dtype is None else self._dtype.itemsize
        nbytes = size * sum(m.weight.numel() for m in bound.view.modules() if isinstance(m, nn.Conv2d))
        if not self._cache.make_room(nbytes, self.KIND, before, self.WAIT_S):
            return False
        self._cache.put(place, _Reservation(), nbytes, self.KIND, before, pinned=True)
        try:
            sums = checksum(bound.read)
            program = self._program(subnet, bound, example)
        finally:
            self._cache.drop(place)
        if program is None:
            return False
        program.limit(partial(self._cache.grow, key))
        promoted, pinned = _Promoted(program, bound, bound.versions(), sums), subnet.id in self._pinned
        kept = self._cache.put(key, promoted, program.nbytes, self.KIND, before, pinned)
        if subnet.bound is None:  # It was removed in the meantime.
            self._cache.drop(key)
        return kept

    def _program(self, subnet: ReadySubnet, bound: Bound, example: Tensor) -> FusedProgram | None:
        versions = bound.versions()
        try:
            program = self._checked(subnet, bound, example)
        except Exception as error:
            current = bound.current(self._supernet, subnet.spec) and bound.versions() == versions
            if not current:
                return None  # Weights or statistics changed in the meantime; the next use tries again.
            subnet.refused = " ".join(str(error).split()) or type(error).__name__
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(level, "%s runs as a view, not as a fused program: %s", subnet, subnet.refused)
            return None
        return program if bound.versions() == versions else None

    def _checked(self, subnet: ReadySubnet, bound: Bound, example: Tensor) -> FusedProgram:
        """Make a program and compare its output with the view's, on two random inputs."""
        device = next(bound.view.parameters()).device
        generator = torch.Generator().manual_seed(0)
        batch = torch.stack([example] * 2)
        if batch.is_floating_point():
            batch = torch.randn(batch.shape, generator=generator, dtype=batch.dtype)
        x = batch.to(device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        view, statistics_row = self._supernet.private_view(subnet.spec)
        moved = self._supernet.weights_generation != bound.weights_generation
        if moved or statistics_row is not bound.statistics_row:
            raise ValueError("its statistics were replaced")
        with torch.inference_mode():
            program = FusedProgram(view, self._dtype, x)
            output, expected = program(x), view(x)
        tolerance = (1e-3, 1e-4) if self._dtype is None else (0.1, 0.1)
        if not agree(output, expected, *tolerance):
            raise ValueError("the outputs of the fused program differ from those of the view")
        return program
