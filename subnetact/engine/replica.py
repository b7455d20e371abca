"""Replicas: the same engine in another process, and what that process has to do when the engine changes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subnetact.engine.engine import Engine
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["Registered", "follow", "rebuild", "registered", "warm_up"]


@dataclass(frozen=True)
class Registered:
    """The subnets of an engine at one moment.

    Attributes:
        specs: all subnets in id order.
        accuracy: of each subnet in percent, or None.
        served: the ids that are served.
        pinned: the ids whose fused programs are pinned.
        prepared: the batch sizes that the engine was prepared for.
    """

    specs: tuple[SubnetSpec, ...]
    accuracy: tuple[float | None, ...]
    served: tuple[int, ...]
    pinned: frozenset[int]
    prepared: tuple[int, ...]


def registered(engine: Engine) -> Registered:
    """Return the subnets of an engine. `Engine.changes` tells whether they have changed since."""
    return Registered(engine.specs, engine.accuracy, engine.ids, engine.pinned, engine.prepared)


def rebuild(supernet: Supernet, subnets: Registered, options: Mapping[str, Any]) -> Engine:
    """Make the replica of an engine.

    Args:
        supernet: the supernet, on the same weights.
        subnets: what is registered.
        options: the engine's `options`.
    """
    every = range(len(subnets.specs))
    engine = Engine(supernet, subnets.specs, accuracy=subnets.accuracy, check=False, removed=every, **options)
    follow(engine, subnets)
    return engine


def follow(engine: Engine, subnets: Registered) -> None:
    """Register and remove subnets of a replica until it has those of the engine.

    Args:
        engine: the replica.
        subnets: what is registered in the engine.
    """
    served = set(subnets.served)
    for i, (spec, percent) in enumerate(zip(subnets.specs, subnets.accuracy, strict=True)):
        if i in served:  # One that lacks statistics refuses its own calls, and no others.
            engine.register(spec, percent, bind=False)
        else:
            engine.reserve(spec, percent)
    for removed in set(engine.ids) - served:
        engine.remove(removed)
    for former in engine.pinned - subnets.pinned:
        engine.unpin(former)
    calibrated = _calibrated(engine)
    for subnet in (subnets.pinned - engine.pinned).intersection(calibrated):
        engine.pin(subnet)
    if engine.compiled and subnets.prepared != engine.prepared:
        engine.prepare(subnets.prepared, calibrated)


def warm_up(engine: Engine, batch_sizes: Sequence[int], limit_s: float) -> None:
    """Run the subnets of a replica once per batch size, small ones first, until the time is used up.

    Args:
        engine: the replica.
        batch_sizes: the batch sizes that will run.
        limit_s: the time after which no further subnet starts, in s.
    """
    if engine.compiled:
        return  # It runs what it was prepared for, and nothing else.
    end = time.monotonic() + limit_s
    for size in sorted(batch_sizes):
        for subnet in _calibrated(engine):
            if time.monotonic() > end:
                return
            engine.prepare((size,), [subnet])


def _calibrated(engine: Engine) -> list[int]:
    """Return the ids of the subnets that the engine does not refuse."""
    every = engine.options["allow_uncalibrated"]
    return [i for i in engine.ids if every or engine.supernet.calibrated(engine.specs[i])]
