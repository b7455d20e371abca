"""StepScheduler: who is in the next step of generation, and when a request ends.

A state machine without lock, thread or clock: it is told what happens and when, and returns the requests that
got a token or an outcome by that.
`Generator` is threads around it, `simulate_generation` a loop around it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    PolicyError,
    QueueFull,
    RequestError,
)
from subnetact.generation.completion import Generated, TokenDeadlines, TokenLogprobs
from subnetact.generation.step_policy import StepPolicy
from subnetact.serving.scheduling.checks import check_count, check_positive
from subnetact.serving.scheduling.floors import Floors

__all__ = ["Step", "StepRequest", "StepScheduler"]

PATIENCE, LEAST_PATIENCE_MS, FIRST_PATIENCE_MS = 20.0, 1e4, 3e4
"""A step hangs after this multiple of its expected time, but not before these; the last is of first steps."""


@dataclass(eq=False, slots=True)
class StepRequest:
    """A request for tokens, and what came of it; `sampling` and `owner` are handed on to the driver."""

    prompt: Sequence[int]
    answer: int  # the largest number of tokens
    deadlines: TokenDeadlines
    min_accuracy: float = 0.0  # percent; once submitted, the least accuracy of a subnet that meets it
    stop: frozenset[int] = frozenset()
    logprobs: int | None = None
    sampling: Any = None
    owner: Any = None
    number: int = -1
    accepted_ms: float = 0.0
    left: int = 0  # tokens of the prompt, and of an answer that lost its place, that are not computed
    due_ms: float = 0.0  # of the next token
    first_ms: float = 0.0
    late: int = 0
    tokens: list[int] = field(default_factory=list)
    subnets: list[int] = field(default_factory=list)
    found: list[TokenLogprobs] = field(default_factory=list)
    outcome: Generated | RequestError | None = None  # once it has ended

    def generated(self, now_ms: float, finish: str) -> Generated:
        """Return the answer if it ends now."""
        times = self.late, self.first_ms, now_ms - self.accepted_ms
        return Generated(tuple(self.tokens), tuple(self.subnets), *times, finish, tuple(self.found))


@dataclass(slots=True)
class Step:
    """What one step computes; its size are sequences, their mean context and tokens of prompts."""

    parts: list[tuple[StepRequest, int]]  # and how many tokens of each
    subnet: int = 0
    began_ms: float = 0.0
    tabled_ms: float = 0.0  # how long it takes by the table
    answered: list[StepRequest] = field(init=False)  # those that get a token, in the same order
    size: tuple[int, float, int] = field(init=False)

    def __post_init__(self) -> None:
        self.answered = [one for one, tokens in self.parts if one.left <= tokens]
        held = [len(one.prompt) + len(one.tokens) for one, _ in self.parts if not one.left]
        prompts = sum([tokens for one, tokens in self.parts if one.left])
        self.size = len(held), sum(held) / len(held) if held else 1.0, prompts


Fits = Callable[[StepRequest, int], bool]
"""Takes memory for this number of tokens of a request, or returns False if there is none."""


class StepScheduler:
    """Decides what steps compute, one after the other. Times are in ms, of any clock.

    Sequences with a place go on, those past their prompts first; free places go to the requests whose next
    tokens are due first. A request whose first token cannot come in time any more is dropped if `expired` is
    `drop`. While a step hangs, every request ends whose next token is overdue. The arguments are those of
    `Generator`, where `places` is called `max_sequences`.
    """

    def __init__(
        self,
        policy: StepPolicy,
        *,
        places: int,
        step_tokens: int,
        expired: str = "drop",
        max_queue: float = math.inf,
        watchdog_ms: float | None = None,
    ) -> None:
        self.policy = policy
        self._places = check_count(places, "max_sequences")
        self._step_tokens = check_count(step_tokens, "step_tokens")
        if expired not in ("drop", "serve"):
            raise PolicyError(f"expired: {expired!r} is no rule for generation; choose from drop, serve")
        self._drop = expired == "drop"
        self._max_queue = max_queue
        self._watchdog_ms = None if watchdog_ms is None else check_positive(watchdog_ms, "watchdog_ms")
        self._floor = Floors(next(iter(policy.table.decode.values())))
        self.requests: dict[int, StepRequest] = {}  # those that have not ended
        self._active: dict[int, StepRequest] = {}  # those with a place, in the order in which they got it
        self._waiting: list[tuple[float, int, StepRequest]] = []  # the others; the first is due first
        self.step: Step | None = None
        self.closed: str | None = None  # why no request is accepted any more
        names = ("requests", "finished", "expired", "cancelled", "failed", "tokens", "late", "lifted")
        self.counts = dict.fromkeys(names, 0)
        self.steps = [0] * len(policy.table.subnets)  # how many each subnet ran
        self._numbers = itertools.count()
        self._limit_ms = math.inf  # when what runs is taken to hang

    def submit(self, request: StepRequest, now_ms: float) -> None:
        """Accept a request, or raise InvalidRequest, BatcherClosed or QueueFull."""
        try:
            request.min_accuracy = self._floor(request.min_accuracy)
        except PolicyError as error:
            raise InvalidRequest(str(error)) from error
        if self.closed is not None:
            raise BatcherClosed(f"the generator is closed{self.closed}")
        if len(self.requests) >= self._max_queue:
            raise QueueFull(f"{len(self.requests)} requests are under way; try again later")
        request.number, request.accepted_ms = next(self._numbers), now_ms
        request.due_ms = request.deadlines.due_ms(now_ms, 0)
        self.requests[request.number] = request
        self.counts["requests"] += 1
        self._wait(request)

    def cancel(self, request: StepRequest, now_ms: float) -> list[StepRequest]:
        """End a request with the tokens that it has."""
        return [request] if self._end(request, request.generated(now_ms, "cancelled"), "cancelled") else []

    def push_out(self, request: StepRequest) -> None:
        """Take the place of a request, whose tokens are computed again when it gets another one."""
        if self._active.pop(request.number, None) is not None:
            self._wait(request)

    def prepare(self, now_ms: float) -> None:
        """Take what runs from now on to hang after a while, although no step has begun; inf: never."""
        self._limit_ms = now_ms + (self._watchdog_ms or FIRST_PATIENCE_MS)

    def next_step(self, now_ms: float, fits: Fits = lambda *_: True) -> Step | None:
        """Begin the next step, for its most demanding request and the most urgent; None if there is none.

        If the policy raises, the step has begun nevertheless, and `failed` ends its requests.
        """
        parts, budget = list[tuple[StepRequest, int]](), self._step_tokens
        for request in sorted(self._active.values(), key=lambda one: one.left > 0):
            tokens = min(request.left or 1, budget)
            if tokens and fits(request, tokens):
                parts.append((request, tokens))
                budget -= tokens
        while budget and self._waiting and len(self._active) < self._places:
            request = self._waiting[0][2]
            tokens = min(request.left, budget)
            if not fits(request, tokens):
                break
            del self._waiting[0]
            self._active[request.number] = request
            parts.append((request, tokens))
            budget -= tokens
        self.step = step = Step(parts, began_ms=now_ms) if parts else None
        if not step:
            return None
        policy, floors = self.policy, [request.min_accuracy for request, _ in parts]
        slack_ms = min([request.due_ms for request, _ in parts]) - now_ms
        if self._waiting and len(self._active) >= self._places:
            left = [one.answer - len(one.tokens) for one in self._active.values()]
            due = [due for due, _, _ in self._waiting[: self._places]]
            slack_ms = min(slack_ms, policy.pace(now_ms, left, due))
        sequences, context, prompts = step.size
        step.subnet = policy.choose(
            slack_ms, sequences=sequences, context=context, prompt_tokens=prompts, floor=max(floors)
        )
        step.tabled_ms = policy.tabled_ms
        self.counts["lifted"] += policy.lifted and min(floors) < max(floors)
        least = LEAST_PATIENCE_MS if self.steps[step.subnet] else FIRST_PATIENCE_MS
        patience_ms = self._watchdog_ms or max(least, PATIENCE * policy.slowdown * step.tabled_ms)
        self._limit_ms = now_ms + patience_ms
        self.steps[step.subnet] += 1
        return step

    def step_done(
        self,
        tokens: Sequence[int],
        now_ms: float,
        logprobs: Iterable[TokenLogprobs | None] = itertools.repeat(None),
    ) -> list[StepRequest]:
        """Take the tokens of the requests that the step answers."""
        step, self.step = self.step, None
        assert step is not None
        answered = [request for request in step.answered if request.outcome is None]
        self.prepare(now_ms)
        self.policy.observe(step.tabled_ms, now_ms - step.began_ms)
        for request, computed in step.parts:
            request.left = max(request.left - computed, 0)
        for request, token, found in zip(step.answered, tokens, logprobs, strict=False):
            if request.outcome is not None:  # it ended while its step ran
                continue
            if not request.tokens:
                request.first_ms = now_ms - request.accepted_ms
            if found is not None:
                request.found.append(found)  # first, as clients on other threads read it behind the token
            request.tokens.append(token)
            request.subnets.append(step.subnet)
            late, count = now_ms > request.due_ms, len(request.tokens)
            request.late += late
            self.counts["tokens"] += 1
            self.counts["late"] += late
            request.due_ms = request.deadlines.due_ms(request.accepted_ms, count)
            if token in request.stop or count == request.answer:
                finish = "stop" if token in request.stop else "length"
                self._end(request, request.generated(now_ms, finish), "finished")
        return answered

    def failed(self, cause: Exception, now_ms: float) -> list[StepRequest]:
        """End the requests of the step that runs, because it raised."""
        parts, self.step = self.step.parts if self.step else [], None
        self.prepare(now_ms)
        error = BatchFailed(f"a step raised {type(cause).__name__}: {cause}; other requests go on")
        error.__cause__ = cause
        return [request for request, _ in parts if self._end(request, error, "failed")]

    def tick(self, now_ms: float) -> list[StepRequest]:
        """End the requests that wait in vain. Those in a step are answered by it, unless it hangs."""
        overdue = [one for _, _, one in self._waiting[: bisect_left(self._waiting, (now_ms,))]]
        overdue += [one for one in self._active.values() if one.due_ms < now_ms]
        if not self.hangs(now_ms):
            running = [request for request, _ in self.step.parts] if self.step else []
            overdue = [one for one in overdue if self._drop and not one.tokens and one not in running]
        for one in overdue:
            token, due_ms = len(one.tokens) + 1, one.due_ms - one.accepted_ms
            error = DeadlinePassed(f"token {token} was due after {due_ms:.0f} ms, and did not come")
            self._end(one, error, "expired")
        return overdue

    def hangs(self, now_ms: float) -> bool:
        """Return whether what runs takes too long."""
        return now_ms > self._limit_ms

    def close(self, reason: str = "", error: RequestError | None = None) -> list[StepRequest]:
        """Accept no further request, and end those under way if there is an error for them."""
        self.closed = self.closed or reason
        return [one for one in list(self.requests.values()) if error and self._end(one, error, "failed")]

    def _wait(self, request: StepRequest) -> None:
        request.left = len(request.prompt) + len(request.tokens)
        insort(self._waiting, (request.due_ms, request.number, request))

    def _end(self, request: StepRequest, outcome: Generated | RequestError, kind: str) -> bool:
        if request.outcome is not None:
            return False
        del self.requests[request.number]
        request.outcome = outcome
        self.counts[kind] += 1
        if self._active.pop(request.number, None) is None:
            del self._waiting[bisect_left(self._waiting, (request.due_ms, request.number))]
        return True
