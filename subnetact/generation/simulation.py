"""simulate_generation: predicts what a policy does with a trace of prompts (no torch)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from subnetact.errors import TraceError
from subnetact.generation.completion import TokenDeadlines
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_table import StepTable
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count, expired_rule
from subnetact.serving.scheduling.context import Policy

__all__ = ["Prompt", "SimulatedGeneration", "simulate_generation"]

MOST_TOKENS = 1_000_000
"""No prompt or answer of a trace is longer."""
LATEST_MS = 1e15
"""No request of a trace arrives later, nor earlier than this time before 0."""


@dataclass(frozen=True)
class Prompt:
    """One request of a trace.

    Attributes:
        arrival_ms: when it arrives.
        tokens: length of its prompt.
        answer: how many tokens are generated.
        deadlines: when they are due.
    """

    arrival_ms: float
    tokens: int
    answer: int
    deadlines: TokenDeadlines


@dataclass(frozen=True)
class SimulatedGeneration:
    """What a policy did.

    Attributes:
        tokens: how many tokens were asked for.
        in_time: how many came before they were due.
        accuracy_in_time: sum of the accuracies of the subnets that generated those, in percent.
        dropped: requests whose first token could not come in time.
        steps: how many steps were computed.
        ended_ms: when the last step ended.
        first_ms: time from the arrival to the first token of every request that got one, in ms.
    """

    tokens: int
    in_time: int
    accuracy_in_time: float
    dropped: int
    steps: int
    ended_ms: float
    first_ms: tuple[float, ...] = ()

    @property
    def attainment(self) -> float:
        """Share of the tokens that came in time, from 0 to 1."""
        return self.in_time / self.tokens if self.tokens else 1.0

    @property
    def effective_accuracy(self) -> float:
        """Accuracy of the subnets that answered in time, averaged over all tokens, in percent."""
        return self.accuracy_in_time / self.tokens if self.tokens else 0.0


class _Sequence:
    __slots__ = ("done", "left", "prompt")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.left, self.done = prompt, prompt.tokens, 0

    @property
    def due_ms(self) -> float:
        return self.prompt.deadlines.due_ms(self.prompt.arrival_ms, self.done)


def simulate_generation(
    prompts: Iterable[Prompt],
    table: StepTable,
    *,
    token_ms: float,
    policy: Callable[[LatencyTable], Policy] | None = None,
    max_sequences: int = 16,
    step_tokens: int = 512,
    expired: str = "drop",
) -> SimulatedGeneration:
    """Predict which tokens of a trace come in time, with the rules of `Generator`.

    Every step takes exactly the time that the table says.

    Args:
        prompts: the trace, in any order.
        table: the latencies of steps.
        token_ms: the usual time from one token to the next, in ms.
        policy: as for `StepPolicy`.
        max_sequences: the largest number of active sequences.
        step_tokens: the largest number of tokens that one step computes.
        expired: `drop` or `serve`, as for `Generator`.

    Returns:
        Counts of tokens and steps.

    Raises:
        TraceError: a prompt or an answer has no token or more than a million, or a request arrives at no
            finite time.
        PolicyError: an argument is out of range.
        TableError: the accuracy of a subnet is not known.
    """
    chooser = StepPolicy(table, token_ms, policy)
    check_count(max_sequences, "max_sequences")
    check_count(step_tokens, "step_tokens")
    drop = expired_rule(expired) == "drop"
    trace = deque(sorted(map(_checked, prompts), key=lambda one: one.arrival_ms))
    asked, in_time, accuracy, dropped, steps = sum(one.answer for one in trace), 0, 0.0, 0, 0
    waiting: list[tuple[float, int, _Sequence]] = []
    active: list[_Sequence] = []
    now, arrived, first_ms = 0.0, 0, []
    while trace or waiting or active:
        if not waiting and not active:
            now = max(now, trace[0].arrival_ms)
        while trace and trace[0].arrival_ms <= now:
            sequence = _Sequence(trace.popleft())
            heapq.heappush(waiting, (sequence.due_ms, arrived, sequence))
            arrived += 1
        while drop and waiting and waiting[0][0] < now:
            heapq.heappop(waiting)
            dropped += 1
        if drop:
            begun = [running for running in active if running.done or running.due_ms >= now]
            dropped += len(active) - len(begun)
            active = begun
        while waiting and len(active) < max_sequences:
            active.append(heapq.heappop(waiting)[2])
        if not active:
            continue
        decoding = [running for running in active if not running.left]
        budget, computed = step_tokens - len(decoding), []
        for running in active:
            if running.left and budget > 0:
                part = min(running.left, budget)
                computed.append((running, part))
                budget -= part
        prompt_tokens = sum(part for _, part in computed)
        context = 1.0
        if decoding:
            context = sum(running.prompt.tokens + running.done for running in decoding) / len(decoding)
        due = [running.due_ms for running in decoding] + [running.due_ms for running, _ in computed]
        left = [running.prompt.answer - running.done for running in active]
        pace = chooser.pace(now, left, [due for due, _, _ in heapq.nsmallest(max_sequences, waiting)])
        subnet = chooser.choose(
            now, due, sequences=len(decoding), context=context, prompt_tokens=prompt_tokens, pace_ms=pace
        )
        now += table.latency_ms(subnet, len(decoding), context, prompt_tokens)
        steps += 1
        for running, part in computed:
            running.left -= part
        for running in (*decoding, *(running for running, _ in computed if not running.left)):
            if now <= running.due_ms:
                in_time += 1
                accuracy += chooser.accuracy(subnet)
            if not running.done:
                first_ms.append(now - running.prompt.arrival_ms)
            running.done += 1
        active = [running for running in active if running.done < running.prompt.answer]
    return SimulatedGeneration(asked, in_time, accuracy, dropped, steps, now, tuple(first_ms))


def _checked(prompt: Prompt) -> Prompt:
    """Return the request, if it can be simulated."""
    counts = (prompt.tokens, prompt.answer)
    if any(isinstance(n, bool) or not isinstance(n, Integral) or not 1 <= n <= MOST_TOKENS for n in counts):
        raise TraceError(
            f"a request at {prompt.arrival_ms} ms has no prompt or no answer that can be simulated "
            f"({prompt.tokens!r} and {prompt.answer!r} tokens); give whole numbers from 1 to {MOST_TOKENS:,}"
        )
    if not isinstance(prompt.arrival_ms, Real) or not abs(prompt.arrival_ms) <= LATEST_MS:
        raise TraceError(
            f"a request arrives at {prompt.arrival_ms!r:.40} ms; allowed are times up to {LATEST_MS:.0e} ms"
        )
    return prompt
