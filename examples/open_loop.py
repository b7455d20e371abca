"""An open-loop client: requests go out when the trace says, whatever became of earlier ones."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Refused", "Reply", "Send", "Sent", "run_open_loop", "summary"]


class Reply(NamedTuple):
    """What came back: the class, and which subnet of which profiled accuracy (percent) found it."""

    label: int
    subnet: int
    accuracy: float


class Refused(Exception):
    """The server answered with an error; the message is its name."""


class Sent(NamedTuple):
    """The fate of one request.

    Attributes:
        outcome: `answered`, or the name of the error, or `unanswered`.
        lag_ms: how much later than intended it was sent.
        latency_ms: from the intended time of sending to the answer, whatever it was.
        reply: of an answered request.
    """

    outcome: str
    lag_ms: float
    latency_ms: float
    reply: Reply | None


#: sends request i, which has so many ms left, and returns its reply or raises `Refused`
Send = Callable[[int, float], Awaitable[Reply]]


async def run_open_loop(
    arrivals_ms: Sequence[float], send: Send, budget_ms: float, give_up_ms: float = 5000.0
) -> list[Sent]:
    """Send the requests of a trace at their times.

    Time is counted from when a request should have gone out, so that a client that falls behind does
    not hide the waiting (coordinated omission); its deadline shrinks by the same.

    Args:
        arrivals_ms: intended times of sending, ascending, from the start.
        send: how.
        budget_ms: time a request is given, from its intended time of sending.
        give_up_ms: how long to wait after the last one has gone out.

    Returns:
        One entry per request, in order.
    """
    clock = time.perf_counter
    fates: list[Sent | None] = [None] * len(arrivals_ms)

    async def one(i: int, due_ms: float, lag_ms: float) -> None:
        reply, outcome = None, "answered"
        try:
            if lag_ms >= budget_ms:
                raise Refused("SentTooLate")
            reply = await send(i, budget_ms - lag_ms)
        except Refused as error:
            outcome = str(error)
        except OSError as error:
            outcome = type(error).__name__
        fates[i] = Sent(outcome, lag_ms, (clock() - started) * 1e3 - due_ms, reply)

    tasks: list[asyncio.Task[None]] = []
    started = clock()
    for i, due_ms in enumerate(arrivals_ms):
        early_s = started + due_ms / 1e3 - clock()
        if early_s > 0:
            await asyncio.sleep(early_s)
        tasks.append(asyncio.create_task(one(i, due_ms, (clock() - started) * 1e3 - due_ms)))
    waiting: set[asyncio.Task[None]] = set()
    if tasks:
        done, waiting = await asyncio.wait(tasks, timeout=give_up_ms / 1e3)
        for task in waiting:
            task.cancel()
        for task in done:
            task.result()
        await asyncio.gather(*waiting, return_exceptions=True)
    missing = Sent("unanswered", float("nan"), float("nan"), None)
    return [missing if fate is None or tasks[i] in waiting else fate for i, fate in enumerate(fates)]


def summary(sent: Sequence[Sent], labels: Sequence[int], slo_ms: float) -> dict[str, Any]:
    """Attainment, accuracy on the labels, and latency of a run.

    Args:
        sent: the fates.
        labels: the right class of request i is `labels[i % len(labels)]`.
        slo_ms: an answer is in time when its latency is at most this.

    Returns:
        `attainment`: in time, of all; `measured_accuracy`: percent right of those in time;
        `profiled_accuracy`: what the table promises for them; `effective_accuracy`: percent right and in
        time, of all; `latency_ms` of what was answered, and `lag_ms` of sending: percentiles;
        `outcomes`: how many by kind.
    """
    met = [(i, s.reply) for i, s in enumerate(sent) if s.reply is not None and s.latency_ms <= slo_ms]
    right = sum(reply.label == labels[i % len(labels)] for i, reply in met)
    count = max(1, len(sent))
    outcomes = Counter(s.outcome for s in sent)
    outcomes["late"] = outcomes.pop("answered", 0) - len(met)
    outcomes["met"] = len(met)
    return {
        "requests": len(sent),
        "attainment": len(met) / count,
        "measured_accuracy": 100 * right / max(1, len(met)),
        "profiled_accuracy": float(np.mean([reply.accuracy for _, reply in met])) if met else 0.0,
        "effective_accuracy": 100 * right / count,
        "latency_ms": _percentiles([s.latency_ms for s in sent if s.reply is not None]),
        "lag_ms": _percentiles([s.lag_ms for s in sent if s.outcome != "unanswered"]),
        "subnets": dict(sorted(Counter(reply.subnet for _, reply in met).items())),
        "outcomes": {kind: n for kind, n in sorted(outcomes.items()) if n},
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, [50, 90, 99, 100])
    return dict(zip(("p50", "p90", "p99", "max"), map(float, found), strict=True))
