"""simulate_generation: predicts which tokens of a trace of prompts come in time (no torch)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from subnetact.errors import DeadlinePassed, InvalidRequest, PolicyError, TraceError
from subnetact.generation.completion import TokenDeadlines
from subnetact.generation.phases import CacheKinds, Phase, checked_phases
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_request import StepRequest, TokenAsk
from subnetact.generation.step_scheduler import StepScheduler
from subnetact.generation.step_table import StepTable
from subnetact.serving.scheduling.checks import check_within

COUNT, TIME, PERCENT = (1, 1e6, True), (-1e15, 1e15, False), (0.0, 100.0, False)
RANGES = {"tokens": COUNT, "answer": COUNT, "arrival_ms": TIME, "min_accuracy": PERCENT}


@dataclass(frozen=True)
class Prompt:
    """One request of a trace.

    Attributes:
        arrival_ms: when it arrives.
        tokens: length of its prompt.
        answer: how many tokens are generated.
        deadlines: when they are due.
        min_accuracy: minimum accuracy of the subnets that generate them, in percent.
        phases: as of `Generator.submit`; they end by `tokens`, as nobody knows the tokens here, or earlier
            by `thinking`.
    """

    arrival_ms: float
    tokens: int
    answer: int
    deadlines: TokenDeadlines
    min_accuracy: float = 0.0
    phases: Sequence[Phase] = (Phase(),)


@dataclass(frozen=True)
class SimulatedGeneration:
    """What came of a trace.

    Attributes:
        tokens: how many tokens were asked for.
        in_time: how many came before they were due.
        accuracy_in_time: sum of the accuracies of the subnets that generated those, in percent.
        dropped: requests whose first token could not come in time.
        steps: how many steps were computed.
        first_ms: time from the arrival to the first token of every request that got one, in ms.
    """

    tokens: int
    in_time: int
    accuracy_in_time: float
    dropped: int
    steps: int
    first_ms: tuple[float, ...] = ()

    @property
    def attainment(self) -> float:
        """Share of the tokens that came in time, from 0 to 1."""
        return self.in_time / self.tokens if self.tokens else 1.0

    @property
    def effective_accuracy(self) -> float:
        """Accuracy of the subnets that answered in time, averaged over all tokens, in percent."""
        return self.accuracy_in_time / self.tokens if self.tokens else 0.0


def simulate_generation(
    prompts: Iterable[Prompt],
    table: StepTable,
    *,
    token_ms: float,
    max_sequences: int = 16,
    step_tokens: int = 512,
    expired: str = "drop",
    caches: Sequence[int] | None = None,
    thinking: Mapping[int, float] | None = None,
) -> SimulatedGeneration:
    """Predict which tokens of a trace come in time, if every step takes exactly the time of the table.

    Args:
        prompts: the trace, in any order.
        table: the latencies of steps.
        token_ms, max_sequences, step_tokens, expired: as for `Generator`, whose rules hold.
        caches: a number per subnet; those of one number continue on each other's caches, and between others
            a phase computes them again. If None, all continue.
        thinking: as for `Generator`.

    Returns:
        Counts of tokens and steps.

    Raises:
        TraceError: a prompt or an answer has no token or more than a million, or a time or a minimum accuracy
            is out of range.
        PolicyError: an argument is out of range.
        InvalidRequest: no subnet is as accurate as a request demands, or the phases of one cannot be.
        TableError: the accuracy of a subnet is not known.
    """
    chooser = StepPolicy(table, token_ms, thinking=thinking)
    if caches is not None and len(caches) != len(table.subnets):
        raise PolicyError(f"caches: {len(caches)} numbers; give one for each of {len(table.subnets)} subnets")
    kinds = None if caches is None else CacheKinds(caches, caches)
    rules: Any = {"step_tokens": step_tokens, "expired": expired, "kinds": kinds}
    scheduler = StepScheduler(chooser, places=max_sequences, **rules)
    trace = deque(sorted(map(_checked, prompts), key=lambda one: one.arrival_ms))
    asked, in_time, accuracy = sum(one.answer for one in trace), 0, 0.0
    first_ms: list[float] = []
    for now, request in replay(trace, scheduler):
        count = len(request.tokens)  # 0 if it was dropped
        if count == 1:
            first_ms.append(request.times_ms[0])
        if count and now <= request.ask.deadlines.latest_ms(request.accepted_ms, count - 1):
            in_time += 1
            accuracy += table.accuracy[request.subnets[-1]]
    dropped, steps = scheduler.counts["expired"], sum(scheduler.steps)
    return SimulatedGeneration(asked, in_time, accuracy, dropped, steps, tuple(first_ms))


def replay(trace: deque[Prompt], scheduler: StepScheduler) -> Iterator[tuple[float, StepRequest]]:
    """Yield who gets a token or is dropped, and when, if steps take as long as the table says."""
    now = 0.0
    while trace or scheduler.requests:
        if not scheduler.requests:
            now = max(now, trace[0].arrival_ms)
        while trace and trace[0].arrival_ms <= now:
            one = trace.popleft()
            ask = TokenAsk(range(one.tokens), one.answer, one.deadlines, one.min_accuracy, phases=one.phases)
            request = StepRequest(ask, one)
            try:
                scheduler.submit(request, one.arrival_ms)
            except DeadlinePassed as error:
                request.outcome = error
                yield one.arrival_ms, request
        scheduler.prepare(now)
        yield from zip(repeat(now), scheduler.tick(now), strict=False)
        scheduler.candidates(now).take_all()
        if step := scheduler.begin(now):
            now += step.tabled_ms
            yield from zip(repeat(now), scheduler.step_done([-1] * len(step.answered), now), strict=False)


def _checked(prompt: Prompt) -> Prompt:
    """Return the request, if it can be simulated."""
    try:
        for name, (low, high, whole) in RANGES.items():
            check_within(getattr(prompt, name), name, low, high, whole)
    except InvalidRequest as error:
        raise TraceError(f"a prompt has {error}") from None
    if any(one.end is not None and one.tokens is None for one in checked_phases(prompt.phases, math.inf)):
        raise TraceError(
            "a prompt has a phase that only an end token ends, which nobody knows; give it tokens"
        )
    return prompt
