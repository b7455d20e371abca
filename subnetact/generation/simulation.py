"""simulate_generation: predicts which tokens of a trace of prompts come in time (no torch)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from subnetact.errors import TraceError
from subnetact.generation.completion import TokenDeadlines
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_scheduler import Event, StepRequest, StepScheduler, TokenCame
from subnetact.generation.step_table import StepTable

__all__ = ["Prompt", "SimulatedGeneration", "simulate_generation"]

MOST_TOKENS, LATEST_MS = 1_000_000, 1e15
"""No prompt or answer of a trace is longer, and no request arrives later, or earlier than this before 0."""


@dataclass(frozen=True)
class Prompt:
    """One request of a trace.

    Attributes:
        arrival_ms: when it arrives.
        tokens: length of its prompt.
        answer: how many tokens are generated.
        deadlines: when they are due.
        min_accuracy: minimum accuracy of the subnets that generate them, in percent.
    """

    arrival_ms: float
    tokens: int
    answer: int
    deadlines: TokenDeadlines
    min_accuracy: float = 0.0


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
) -> SimulatedGeneration:
    """Predict which tokens of a trace come in time, if every step takes exactly the time of the table.

    Args:
        prompts: the trace, in any order.
        table: the latencies of steps.
        token_ms, max_sequences, step_tokens, expired: as for `Generator`, whose rules hold.

    Returns:
        Counts of tokens and steps.

    Raises:
        TraceError: a prompt or an answer has no token or more than a million, or a time or a minimum accuracy
            is out of range.
        PolicyError: an argument is out of range.
        InvalidRequest: no subnet is as accurate as a request demands.
        TableError: the accuracy of a subnet is not known.
    """
    chooser = StepPolicy(table, token_ms)
    scheduler = StepScheduler(chooser, places=max_sequences, step_tokens=step_tokens, expired=expired)
    trace = deque(sorted(map(_checked, prompts), key=lambda one: one.arrival_ms))
    asked, in_time, accuracy = sum(one.answer for one in trace), 0, 0.0
    first_ms: list[float] = []
    for _, event in replay(trace, scheduler):
        if isinstance(event, TokenCame):
            if len(event.request.tokens) == 1:
                first_ms.append(event.request.first_ms)
            if not event.late:
                in_time += 1
                accuracy += table.accuracy[event.subnet]
    dropped, steps = scheduler.counts["expired"], sum(scheduler.steps)
    return SimulatedGeneration(asked, in_time, accuracy, dropped, steps, tuple(first_ms))


def replay(trace: deque[Prompt], scheduler: StepScheduler) -> Iterator[tuple[float, Event]]:
    """Yield what happens to the requests of a trace, and when, if steps take as long as the table says."""
    now = 0.0
    while trace or scheduler.requests:
        if not scheduler.requests:
            now = max(now, trace[0].arrival_ms)
        while trace and trace[0].arrival_ms <= now:
            one = trace.popleft()
            request = StepRequest(range(one.tokens), one.answer, one.deadlines, one.min_accuracy, owner=one)
            scheduler.submit(request, one.arrival_ms)
        scheduler.prepare(now)
        for event in scheduler.tick(now):
            yield now, event
        if step := scheduler.next_step(now):
            now += step.tabled_ms
            for event in scheduler.step_done([0] * len(step.answered), now):
                yield now, event


def _checked(prompt: Prompt) -> Prompt:
    """Return the request, if it can be simulated."""
    for counted, n in (("prompt", prompt.tokens), ("answer", prompt.answer)):
        if isinstance(n, bool) or not isinstance(n, Integral) or not 1 <= n <= MOST_TOKENS:
            raise TraceError(
                f"a request at {prompt.arrival_ms} ms has no {counted} that can be simulated ({n!r} tokens); "
                f"give whole numbers from 1 to {MOST_TOKENS:,}"
            )
    for name, low, high in (("arrival_ms", -LATEST_MS, LATEST_MS), ("min_accuracy", 0.0, 100.0)):
        value: Any = getattr(prompt, name)
        if not isinstance(value, Real) or not low <= value <= high:  # type: ignore[operator]
            raise TraceError(
                f"a request has {name} {value!r:.40}; allowed are numbers from {low:g} to {high:g}"
            )
    return prompt
