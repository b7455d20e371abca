"""Promotion: which subnets become fused programs within the memory budget.

Pinned subnets come first. Then a subnet that was used `PROMOTE_AFTER` times becomes a fused program if it
fits, or if it can evict programs that were not used in the meantime.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.command import computing
from subnetact.device import ran_out_of_memory, synchronize
from subnetact.engine.cache import ByteCache
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.outputs import agree, is_as_near, replaced_samples
from subnetact.engine.packed_linear import can_pack_linear
from subnetact.engine.ready_subnet import Bound, ReadySubnet
from subnetact.errors import StaleWeights
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import call_with, map_tensors, tensors_of
from subnetact.supernet.storage import checksum
from subnetact.supernet.supernet import Supernet

__all__ = ["PROMOTE_AFTER", "PinResult", "Promoter"]

PROMOTE_AFTER = 32
"""Number of uses after which a subnet that runs as a view is considered for promotion."""

TURNS = 8
"""How often a new program and the view are timed, in turns."""
LONGEST_S = 0.5
"""Seconds after which the timing ends. At least three turns are timed."""
SLOWER = 1.03
"""A program is discarded if it takes this many times as long as the view, in every turn."""
NOTICEABLE_S = 1e-4
"""Differences of fewer seconds are not noticed: they are those of Python, not of the layers."""
FARTHER = 2.0
"""A program at int8 may be this many times as far from the float32 outputs as the view is, by the norm."""

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

    def __call__(self, x: Any) -> Any:
        """Run a batch; the view answers samples that the program would answer wrongly, and no others."""
        if self.program.accepts(x):
            return self.program(x)
        strange = self.program.strange(x) if x.numel() and x.dim() else None
        if strange is None or len(strange) == len(x):
            return call_with(self.bound.view, x)
        if not len(strange):
            return self.program(x)
        # The batch keeps its size, on which rounding may depend.
        answers = self.program(x.index_fill(0, strange, 0))
        part = x[strange].contiguous(memory_format=_layout(x))
        joined = replaced_samples(answers, call_with(self.bound.view, part), strange, len(x))
        return call_with(self.bound.view, x) if joined is None else joined

    def fresh(self, bound: Bound) -> bool:
        """Tell whether the program was made from the current weights and statistics."""
        return self.bound is bound and bound.versions() == self.versions


class _Reservation:
    """Stands in the cache for a program that is being made."""


class Promoter:
    """Makes fused programs of subnets, in a background thread or, if a subnet is pinned, at once.

    Every new program is run on two random inputs and compared with the view before it is used: its outputs
    must agree, and it must not be slower. A network that cannot be traced or takes several inputs keeps its
    own forward, with packed linear layers.

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

    def program(self, subnet: ReadySubnet, bound: Bound, example: Any) -> _Promoted | None:
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

    def pin(self, subnet: ReadySubnet, bound: Bound, example: Any) -> PinResult:
        """Make the fused program of a subnet now and protect it from eviction.

        Args:
            subnet: the subnet.
            bound: its current view.
            example: one input without a batch dimension.

        Returns:
            Whether the subnet has a fused program now. If it has none, the reason is that the network cannot
            be fused, or that the budget is too small.

        Raises:
            StaleWeights: `functional_call` ran on the supernet, whose tensors a program must not keep.
        """
        with self._working:
            self._pinned.add(subnet.id)
            promoted: _Promoted | None = self._cache.get((self.KIND, subnet.id))
            if promoted is not None and promoted.fresh(bound):
                self._cache.pin((self.KIND, subnet.id), True)
                return PinResult(True)
            made = False
            try:
                made = self._make(subnet, bound, example, math.inf)
            finally:
                if not made:
                    self._pinned.discard(subnet.id)
            if made:
                return PinResult(True)
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

    def _promote(self, subnet: ReadySubnet, bound: Bound, example: Any, since: int) -> None:
        try:
            # A program that was used while this subnet collected its uses is worth as much, so it stays.
            pinned = subnet.id in self._pinned
            with computing(), suppress(StaleWeights):  # During `functional_call`; a later use tries again.
                self._make(subnet, bound, example, math.inf if pinned else since)
        finally:
            self._working.release()

    def _make(self, subnet: ReadySubnet, bound: Bound, example: Any, before: float) -> bool:
        key, place = (self.KIND, subnet.id), (self.KIND, "reservation")
        size = 4 if self._dtype is None else self._dtype.itemsize
        modules: Iterable[Any] = bound.view.modules()
        layers = [m for m in modules if isinstance(m, nn.Conv2d) or can_pack_linear(m)]
        nbytes = size * sum(layer.weight.numel() for layer in layers)
        if not self._cache.make_room(nbytes, self.KIND, before, self.WAIT_S):
            return False
        self._cache.put(place, _Reservation(), nbytes, self.KIND, before, pinned=True)
        try:
            versions, sums = bound.versions(), checksum(bound.read)
            program = self._program(subnet, bound, example, versions)
        finally:
            self._cache.drop(place)
        if program is None:
            return False
        program.limit(partial(self._cache.grow, key))
        promoted, pinned = _Promoted(program, bound, versions, sums), subnet.id in self._pinned
        kept = self._cache.put(key, promoted, program.nbytes, self.KIND, before, pinned)
        if subnet.bound is None:  # It was removed in the meantime.
            self._cache.drop(key)
        return kept

    def _program(
        self, subnet: ReadySubnet, bound: Bound, example: Any, versions: list[int]
    ) -> FusedProgram | None:
        program, why = None, ""
        try:
            program = self._checked(subnet, bound, example)
        except StaleWeights:
            raise
        except Exception as error:
            if ran_out_of_memory(error) or not bound.current(self._supernet, subnet.spec):
                return None  # The next use tries again: there may be room then, or weights were exchanged.
            why = " ".join(str(error).split()) or type(error).__name__
        if bound.versions() != versions:  # They changed meanwhile, so the next use tries again.
            changing = bound.changes_itself(_probe(example, next(bound.view.parameters()).device))
            program, why = None, "its forward changes its own buffers" if changing else ""
        if why:
            subnet.refused = why
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(level, "%s runs as a view, not as a fused program: %s", subnet, why)
        return program

    def _checked(self, subnet: ReadySubnet, bound: Bound, example: Any) -> FusedProgram:
        """Make a program, and compare its output and its time with the view's on two random inputs."""
        x = _probe(example, next(bound.view.parameters()).device)
        causes: list[Exception] = []
        for traced in (True, False) if isinstance(x, Tensor) else (False,):
            view, statistics_row = self._supernet.private_view(subnet.spec)
            moved = self._supernet.generation.number != bound.weights_generation
            if moved or statistics_row is not bound.statistics_row:
                raise ValueError("its statistics were replaced")
            with torch.inference_mode():
                try:
                    program = FusedProgram(view, self._dtype, x, traced)
                except Exception as error:  # The first one says why the network cannot be traced.
                    causes.append(error)
                    continue
                cause = self._compare(program, bound.view, x, subnet.spec)
            if cause is None:
                return program
            causes.insert(0, cause)
        raise causes[0]

    def _compare(self, program: FusedProgram, view: nn.Module, x: Any, spec: SubnetSpec) -> Exception | None:
        """Compare a program with the view. Return why it cannot be used, or None if it can be used."""
        tolerance = (1e-3, 1e-4) if self._dtype is None else (0.1, 0.1)
        try:
            output, expected = program(x), call_with(view, x)
            if spec.precision == FLOAT32:
                equal = agree(output, expected, *tolerance)
            else:  # A number may round to another int8 number than in the view, and float32 is between.
                exact, _ = self._supernet.private_view(self._supernet.space.at_precision(spec, FLOAT32))
                equal = is_as_near(output, expected, call_with(exact, x), FARTHER)
            if not equal:
                return ValueError("the outputs of the fused program differ from those of the view")
        except Exception as error:
            return error
        mine, views = taken((program, partial(call_with, view)), x)
        if all(one > SLOWER * other + NOTICEABLE_S for one, other in zip(mine, views, strict=True)):
            return ValueError(
                f"the fused program is slower than the view: {min(mine) * 1e3:.3g} ms instead of "
                f"{min(views) * 1e3:.3g} ms for a batch of 2"
            )
        return None


def _layout(x: Tensor) -> torch.memory_format:
    """Return the memory format in which engines run a batch of single tensors."""
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def _probe(example: Any, device: torch.device) -> Any:
    """Return a batch of two inputs. A single tensor is random, other inputs are the example twice."""
    if isinstance(example, Tensor) and example.is_floating_point():
        shape, generator = (2, *example.shape), torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator, dtype=example.dtype).to(device)
        return x.contiguous(memory_format=_layout(x))
    return map_tensors(lambda t: torch.stack([t] * 2).to(device), example)


def taken(functions: Sequence[Callable[[Any], Any]], x: Any) -> list[list[float]]:
    """Run functions in turns and return the times of each, in seconds.

    Args:
        functions: what to time, each of one argument.
        x: the argument, whose tensors are on the device to wait for.
    """
    device = next(iter(tensors_of(x))).device
    times: list[list[float]] = [[] for _ in functions]
    begin = time.perf_counter()
    for turn in range(TURNS):
        for function, found in zip(functions, times, strict=True):
            start = time.perf_counter()
            function(x)
            synchronize(device)
            found.append(time.perf_counter() - start)
        if turn >= 2 and time.perf_counter() - begin > LONGEST_S:
            break
    return times
