"""GeneratorStats: what a generator has done so far, and what its metrics say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subnetact.serving.live.stats import documented, stat


@documented
@dataclass(frozen=True)
class GeneratorStats:
    """Counts since the generator was made."""

    requests: int = stat("Counter", "accepted requests.")
    finished: int = stat("Counter", "requests that ended by a stop token or by their number of tokens.")
    expired: int = stat("Counter", "requests that ended with `DeadlinePassed`.")
    cancelled: int = stat("Counter", "requests that their clients cancelled.")
    failed: int = stat("Counter", "requests whose step raised.")
    shed: int = stat("Counter", "requests of priority below 0 that left a full queue for others.")
    tokens: int = stat("Counter", "generated tokens.")
    late: int = stat("Counter", "tokens that came after they were due.")
    lifted: int = stat(
        "Counter",
        "steps with a more accurate subnet than the deadlines alone chose, because one sequence demands it "
        "and others do not.",
    )
    recomputed: int = stat("Counter", "phases that began by computing all keys and values again.")
    steps: Mapping[int, int] = stat("", "id of a subnet -> how many steps it ran.", dict)
    active: int = stat("Gauge", "requests under way.")
    running: int = stat("Gauge", "requests that have a place in steps.")
    waiting: int = stat("Gauge", "requests that wait for a place.")
    cache_used: float = stat("Gauge", "share of the key-value cache that is in use, from 0 to 1.", 0.0)
    slowdown: float = stat("Gauge", "how long steps take, as a multiple of the table's latency.", 1.0)
    up: bool = stat("Gauge", "whether steps are computed: the thread lives, and no step hangs.", False)
