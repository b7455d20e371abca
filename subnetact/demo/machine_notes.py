"""Notes on the machine: when a result says more about the machine than about the policies."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Contender", "machine_notes", "share_of_core"]

BUSY_SHARE = 0.9
"""A computing thread that gets less than this share of a core shares the machine with other work."""
DRIFT = 1.5
"""Batches that take this many times their profiled latency, or its inverse, mean another machine."""


class Contender(Protocol):
    """What the notes need to know of a run."""

    @property
    def name(self) -> str:
        """Name of the contender."""

    @property
    def slowdown(self) -> float:
        """Typical latency, as a multiple of the profiled one."""

    @property
    def late_ms(self) -> Any:
        """How long after its due time the client sent each request, of shape (requests,)."""


def share_of_core(seconds: float = 0.2) -> float:
    """Return the share of a core that a thread gets which does nothing but compute.

    Args:
        seconds: how long to compute.
    """
    wall, own = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < seconds:
        sum(range(1000))
    return (time.thread_time() - own) / (time.perf_counter() - wall)


def machine_notes(runs: Sequence[Contender], share: Sequence[float], slo_ms: float) -> list[str]:
    """Return the reasons for which the result says more about the machine than about the policies.

    Args:
        runs: what the contenders did.
        share: shares of a core that `share_of_core` found before and after serving.
        slo_ms: time that every request was given, in ms.

    Returns:
        One sentence per reason; none if the machine was quiet and kept its speed.
    """
    found = []
    if min(share) < BUSY_SHARE:
        found.append(
            f"other programs use this machine: a computing thread got {100 * min(share):.0f} % of a core. "
            "Run the demo again on an idle machine before you trust these figures."
        )
    run = max(runs, key=lambda run: abs(math.log(run.slowdown)))
    if not 1 / DRIFT < run.slowdown < DRIFT:
        found.append(
            f"the machine changed its speed after it was profiled: {run.slowdown:.2f} times the profiled "
            f"latency while '{run.name}' was served, so the contenders did not have the same machine."
        )
    late_ms = max(float(np.percentile(run.late_ms, 99)) for run in runs)
    if late_ms > slo_ms / 4:
        found.append(
            f"the client itself was late: 1 % of the requests were sent more than {late_ms:.0f} ms after "
            "they were due, so the load was burstier than intended."
        )
    return found
