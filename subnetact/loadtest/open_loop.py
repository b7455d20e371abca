"""An open-loop client: every request is sent at its time in a trace, whether or not others were answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from subnetact.serving import bursty, load_trace, poisson, time_varying
from subnetact.serving.simulation.traces import from_timestamps


class Reply(NamedTuple):
    """The content of an answer: the class, the subnet that ran, and its profiled accuracy in percent."""

    label: int
    subnet: int
    accuracy: float


class Refused(Exception):
    """The server returned an error; the message is the name of the error."""


class Sent(NamedTuple):
    """What became of one request; times count from when it should have been sent."""

    outcome: str  # `answered`, `unanswered`, or the name of the error
    lag_ms: float  # how much later than intended it was sent
    latency_ms: float  # until the answer or error
    reply: Reply | None


#: takes the number of a request and the time it has left, in ms; returns its reply or raises `Refused`
Send = Callable[[int, float], Awaitable[Reply]]


async def run_open_loop(
    arrivals_ms: Sequence[float],
    send: Send,
    budget_ms: float,
    give_up_ms: float = 5000.0,
    tell: Callable[[Sent], object] | None = None,
    clock_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> list[Sent]:
    """Send the requests of a trace at their times, each with `budget_ms`; return what became of them.

    Times count from when a request should have been sent, so that a client that falls behind does not hide
    how long requests wait (coordinated omission). What has no answer `give_up_ms` after the last one was sent
    is unanswered. `tell` is called with every outcome.
    """

    async def one(i: int, due_ms: float, lag_ms: float) -> Sent:
        reply, outcome = None, "answered"
        try:
            if lag_ms >= budget_ms:
                raise Refused("SentTooLate")
            reply = await send(i, budget_ms - lag_ms)
        except Refused as error:
            outcome = str(error)
        except (OSError, ValueError) as error:  # the connection broke, or the answer is no HTTP
            outcome = type(error).__name__
        sent = Sent(outcome, lag_ms, (clock_s() - started) * 1e3 - due_ms, reply)
        if tell is not None:
            tell(sent)
        return sent

    tasks: list[asyncio.Task[Sent]] = []
    started = clock_s()
    for i, due_ms in enumerate(arrivals_ms):
        early_s = started + due_ms / 1e3 - clock_s()
        if early_s > 0:
            await sleep(early_s)
        tasks.append(asyncio.create_task(one(i, due_ms, (clock_s() - started) * 1e3 - due_ms)))
    if not tasks:
        return []
    _, waiting = await asyncio.wait(tasks, timeout=give_up_ms / 1e3)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    missing = Sent("unanswered", float("nan"), float("nan"), None)
    return [missing if task in waiting else task.result() for task in tasks]


def trace(name: str, rate: float, seconds: float, cv2: float = 4.0, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return the arrival times of a trace, in ms, ascending.

    `name` is `poisson`; `bursty`, half of whose rate is steady and the other half has gaps of `cv2`;
    `time_varying`, whose rate rises from half to one and a half times the mean; a recorded trace (`maf`,
    `azure_llm`, `servegen`); or the path of a file of one column of time stamps, text or CSV. The
    mean `rate` is per second, and what comes after `seconds` is cut.
    """
    if name == "poisson":
        return poisson(rate, seconds, seed)
    if name == "bursty":
        return bursty(rate / 2, rate / 2, cv2, seconds, seed)
    if name == "time_varying":
        return time_varying(rate / 2, 1.5 * rate, 2 * rate / seconds, cv2, seconds / 4, seconds / 4, seed)
    arrivals = from_timestamps(load_trace(name, seed=seed), mean_qps=rate)
    return arrivals[arrivals < seconds * 1e3]


def summary(sent: Sequence[Sent], labels: Sequence[int] | None, slo_ms: float) -> dict[str, Any]:
    """Summarise a run: shares of all requests in time, accuracies in percent, times in ms, and counts.

    An answer is in time if its latency is at most `slo_ms`; the right class of request i is
    `labels[i % len(labels)]`. `measured_accuracy` and `profiled_accuracy` are of the answers in time,
    `effective_accuracy` of all requests; without `labels` nobody knows those that count right answers.
    """
    met = [(i, s.reply) for i, s in enumerate(sent) if s.reply is not None and s.latency_ms <= slo_ms]
    count, of_right = max(1, len(sent)), {}
    if labels is not None:
        right = sum(reply.label == labels[i % len(labels)] for i, reply in met)
        of_right = {
            "measured_accuracy": 100 * right / max(1, len(met)),
            "effective_accuracy": 100 * right / count,
        }
    outcomes = Counter(s.outcome for s in sent)
    outcomes["late"] = outcomes.pop("answered", 0) - len(met)
    outcomes["met"] = len(met)
    return {
        "requests": len(sent),
        "attainment": len(met) / count,
        **of_right,
        "profiled_accuracy": float(np.mean([reply.accuracy for _, reply in met])) if met else 0.0,
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


def table(report: dict[str, Any]) -> str:
    """Return the table of what `summary` returned."""

    def listed(found: dict[Any, Any], form: str) -> str:
        return "  ".join(form.format(name, number) for name, number in found.items()) or "-"

    rows = {
        "requests": f"{report['requests']}",
        "answered in time": f"{100 * report['attainment']:.2f} %",
        "accuracy served": f"{report['profiled_accuracy']:.2f} % by the table",
    }
    if "measured_accuracy" in report:
        rows["right, of those"] = f"{report['measured_accuracy']:.2f} %"
        rows["right and in time"] = f"{report['effective_accuracy']:.2f} % of all requests"
    rows["latency, ms"] = listed(report["latency_ms"], "{} {:.1f}")
    rows["sent late by, ms"] = listed(report["lag_ms"], "{} {:.1f}")
    rows["outcomes"] = listed(report["outcomes"], "{} {}")
    rows["subnets in time"] = listed(report["subnets"], "{}: {}")
    return "\n".join(f"{name:<20}{text}" for name, text in rows.items())
