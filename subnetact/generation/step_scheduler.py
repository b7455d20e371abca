"""StepScheduler: who is in the next step of generation, and when a request ends.

A state machine without lock, thread or clock: it is told what happens and when, and returns the requests that
got a token or an outcome by that.
`Generator` is threads around it, `simulate_generation` a loop around it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from operator import attrgetter

from subnetact.errors import BatcherClosed, BatchFailed, DeadlinePassed, QueueFull, RequestError
from subnetact.generation.completion import Generated
from subnetact.generation.phases import CacheKinds, planned_phases, rows_of
from subnetact.generation.step_policy import Crowd, StepPolicy
from subnetact.generation.step_request import StepRequest
from subnetact.serving.scheduling.checks import check_count, check_positive, expired_rule
from subnetact.serving.scheduling.worker_states import patience_ms

LEAST_PATIENCE_MS = 1e4  # before a step is taken to hang
ORDER = attrgetter("order")
MOST_MISSED = 8  # steps of other subnets, before a request comes first however early others are due


@dataclass(slots=True)
class Step:
    """One step: candidates in their order, those of them that are `take`n, and what the step computes then.

    Its size are sequences, their mean context and tokens of prompts.
    """

    candidates: Sequence[StepRequest]
    joining: Set[StepRequest] = frozenset()  # those of them without a place
    budget: float = math.inf  # tokens that it may still compute
    among: frozenset[int] = frozenset()  # the subnets that all who were taken permit
    began_ms: float = 0.0
    parts: list[tuple[StepRequest, int]] = field(default_factory=list)  # taken, and how many tokens of each
    answered: list[StepRequest] = field(default_factory=list)  # those that get a token, in the same order
    size: tuple[int, float, int] = (0, 1.0, 0)
    ended: dict[StepRequest, int] = field(default_factory=dict)  # whose phase ends: the token that says so
    subnet: int = 0
    tabled_ms: float = 0.0  # how long it takes by the table

    def wanted(self) -> Iterator[tuple[StepRequest, int]]:
        """Yield who may be in the step, with how many tokens; whoever has room is to be taken at once."""
        full = False
        for request in self.candidates:
            joins, tokens = request in self.joining, int(min(request.left or 1, self.budget))
            if tokens and self.among & request.among and not (joins and full):
                yield request, tokens
            was_taken = bool(self.parts) and self.parts[-1][0] is request
            full |= joins and not was_taken  # nobody overtakes who waits

    def take(self, request: StepRequest, tokens: int) -> None:
        """Put so many tokens of a request into the step."""
        self.parts.append((request, tokens))
        self.budget -= tokens
        self.among &= request.among

    def take_all(self) -> None:
        """Take whoever is wanted, where there is room for all."""
        for request, tokens in self.wanted():
            self.take(request, tokens)

    def measure(self) -> None:
        """Note who gets a token, and the size."""
        self.answered = [one for one, tokens in self.parts if one.left <= tokens]
        held = [one.length for one, _ in self.parts if not one.left]
        prompts = sum([tokens for one, tokens in self.parts if one.left])
        self.size = len(held), sum(held) / len(held) if held else 1.0, prompts


@dataclass(eq=False)
class StepScheduler:
    """Decides what steps compute, one after the other. Times are in ms, of any clock.

    Sequences with a place go on, those past their prompts first; free places go to the requests whose next
    tokens are due first. A request whose first token cannot come in time any more is dropped if `expired` is
    `drop`. While a step hangs, every request ends whose next token is overdue. If phases have no subnet in
    common, the step belongs to the most urgent request, and others wait for theirs, for `MOST_MISSED` steps
    at most before it is their turn. The arguments are those of `Generator`, where `places` is called
    `max_sequences`.
    """

    policy: StepPolicy
    _: KW_ONLY
    places: int
    step_tokens: int
    expired: str = "drop"
    max_queue: float = math.inf
    watchdog_ms: float | None = None
    kinds: CacheKinds | None = None

    def __post_init__(self) -> None:
        self._accuracy = self.policy.table.known_accuracy()
        rows = range(len(self._accuracy))
        self._kinds = self.kinds or CacheKinds([0] * len(rows), [0] * len(rows))
        best = self._kinds.shared[max(rows, key=self._accuracy.__getitem__)]
        self._usual = frozenset(row for row in rows if self._kinds.shared[row] == best)
        check_count(self.places, "max_sequences")
        check_count(self.step_tokens, "step_tokens")
        self._drop = expired_rule(self.expired, ("drop", "serve")) == "drop"
        if self.watchdog_ms is not None:
            self.watchdog_ms = check_positive(self.watchdog_ms, "watchdog_ms")
        self.requests: dict[int, StepRequest] = {}  # those that have not ended
        self._active: dict[int, StepRequest] = {}  # those with a place, in the order in which they got it
        self._waiting: list[StepRequest] = []  # the others, by their `order`
        self.step: Step | None = None
        self.closed: str | None = None  # why no request is accepted any more
        self.counts: Counter[str] = Counter()  # fields of `GeneratorStats`
        self.steps = [0] * len(rows)  # how many each subnet ran
        self._numbers = count()
        self._limit_ms = math.inf  # when what runs is taken to hang

    def submit(self, request: StepRequest, now_ms: float) -> list[StepRequest]:
        """Accept a request, or raise InvalidRequest, BatcherClosed, DeadlinePassed or QueueFull.

        Return those that had to leave a full queue for it.
        """
        accurate = rows_of(self._accuracy, request.ask.min_accuracy)
        names, phases = self.policy.table.subnets, request.ask.phases
        request.planned = planned_phases(phases, names, self._kinds, self._usual, accurate)
        request.among, request.turns = request.planned[0].among, request.planned[0].tokens
        request.most = request.ask.answer
        if self.closed is not None:
            raise BatcherClosed(f"the generator is closed{self.closed}")
        if self._drop:
            self._refuse_hopeless(request)
        shed: list[StepRequest] = []
        if len(self.requests) >= self.max_queue:
            full = QueueFull(f"{len(self.requests)} requests are under way; try again later")
            shed = [one for one in self._waiting[-1:] if one.ask.sheddable and not request.ask.sheddable]
            if not shed:
                raise full
            self._end(shed[0], full, "shed")
        request.number, request.accepted_ms = next(self._numbers), now_ms
        request.due_ms = request.ask.deadlines.due_ms(now_ms, 0)
        self.requests[request.number] = request
        self.counts["requests"] += 1
        self.policy.arrived(request.ask, now_ms)
        self._wait(request)
        return shed

    def places_now(self) -> dict[str, int]:
        """Return how many requests have a place, and how many wait for one."""
        return {"running": len(self._active), "waiting": len(self._waiting)}

    def _refuse_hopeless(self, request: StepRequest) -> None:
        """Raise DeadlinePassed if a request has less time than the fastest subnets need for it alone."""
        ask, known = request.ask, 1
        limit_ms, name = ask.deadlines.first_ms, "first_ms"
        if ask.deadlines.total_ms is not None:
            known = max(ask.least, 1) if ask.stop else ask.answer
            limit_ms, name = ask.deadlines.total_ms, "deadline_ms"
        steps, rest = divmod(len(ask.prompt), self.step_tokens)
        sizes = (steps, (0, 1.0, self.step_tokens)), (1, (0, 1.0, rest)), (known - 1, (1, len(ask.prompt)))
        among = frozenset().union(*[phase.among for phase in request.planned])
        known_ms = [(number, self.policy.table.latencies_ms(*size)) for number, size in sizes]
        least_ms = sum([number * min([times_ms[i] for i in among]) for number, times_ms in known_ms])
        if limit_ms < least_ms * min(self.policy.slowdown, 1.0):
            self.counts["requests"] += 1
            self.counts["expired"] += 1
            raise DeadlinePassed(
                f"{name}: {limit_ms:g} ms were given, and the fastest subnet alone needs at least "
                f"{least_ms:.3g} ms for its prompt and token {known}; allow more, or send a shorter prompt"
            )

    def cancel(self, request: StepRequest, now_ms: float) -> list[StepRequest]:
        """End a request with the tokens that it has."""
        return [request] if self._finish(request, now_ms, "cancelled", "cancelled") else []

    def push_out(self, request: StepRequest) -> None:
        """Take the place of a request, whose tokens are computed again when it gets another one."""
        if self._active.pop(request.number, None) is not None:
            self._wait(request)

    def prepare(self, now_ms: float) -> None:
        """Take what runs from now on to hang after a while, although no step has begun; inf: never."""
        self._limit_ms = now_ms + patience_ms(self.watchdog_ms)

    def candidates(self, now_ms: float) -> Step:
        """Return the next step, of whose candidates the caller takes those with room.

        Their order: who decodes, whose prompts are computed, who waits. Prompts of which no subnet could
        compute more without making those late who decode are continued in later steps.
        """
        ready = sorted(self._active.values(), key=lambda one: one.left > 0)
        ready += self._waiting[: self.places - len(self._active)]
        if ready and not frozenset.intersection(*[one.among for one in ready]):
            first = min(ready, key=lambda one: (one.missed < MOST_MISSED, one.due_ms, -one.missed))
            ready.remove(first)
            ready.insert(0, first)
        joining = {one for one in ready if one.number not in self._active}
        every = frozenset(range(len(self.steps)))
        self.step = Step(ready, joining, self.step_tokens, every)
        if held := [one for one in ready if not one.left]:
            count, slack_ms = len(held), min([one.due_ms for one in held]) - now_ms
            room = self.policy.prompt_room(count, sum([one.length for one in held]) / count, slack_ms)
            self.step.budget = min(self.step_tokens, count + room)
        return self.step

    def begin(self, now_ms: float) -> Step | None:
        """Begin the step of those who were taken, with a subnet that all permit; None if there is nobody.

        If the policy raises, the step has begun nevertheless, and `failed` ends its requests.
        """
        step = self.step
        if step is None or not step.parts:
            self.step = None
            return None
        for request, _ in step.parts:
            request.missed = 0
            if request in step.joining and request.outcome is None:
                self._leave_queue(request)
                self._active[request.number] = request
        others = [one for one in step.candidates if not step.among & one.among]
        for request in others:
            request.missed += 1
        step.began_ms = now_ms
        step.measure()
        policy = self.policy
        slack_ms = min([request.due_ms for request in [*others, *(one for one, _ in step.parts)]]) - now_ms
        crowd = Crowd(now_ms, self._active.values(), self._waiting, self.places)
        step.subnet = policy.choose(slack_ms, *step.size, among=step.among, crowd=crowd)
        for one in step.answered:
            end = one.planned[0].end
            if end is not None and len(one.tokens) + 1 - one.begun >= policy.budget:
                step.ended[one] = end
        step.tabled_ms = policy.tabled_ms
        self.counts["lifted"] += policy.lifted and len({request.among for request, _ in step.parts}) > 1
        expected_ms, known = policy.slowdown * step.tabled_ms, self.steps[step.subnet] > 0
        self._limit_ms = now_ms + patience_ms(self.watchdog_ms, expected_ms, known, LEAST_PATIENCE_MS)
        self.steps[step.subnet] += 1
        return step

    def step_done(self, tokens: Sequence[int], now_ms: float) -> list[StepRequest]:
        """Take the tokens of the requests that the step answers."""
        step, self.step = self.step, None
        assert step is not None
        pairs = zip(step.answered, tokens, strict=False)
        answered = [(request, token) for request, token in pairs if request.outcome is None]  # still
        self.prepare(now_ms)
        self.policy.observe(step.tabled_ms, now_ms - step.began_ms)
        writer = self._kinds.exact[step.subnet]
        for request, computed in step.parts:
            request.left = max(request.left - computed, 0)
            request.approximate |= request.writer not in (None, writer)
            request.writer = writer
        for request, token in answered:
            token = step.ended.get(request, token)
            request.tokens.append(token)
            request.subnets.append(step.subnet)
            request.times_ms.append(now_ms - request.accepted_ms)
            ask, length = request.ask, len(request.tokens)
            late = now_ms > ask.deadlines.latest_ms(request.accepted_ms, length - 1)
            request.late += late
            self.counts["tokens"] += 1
            self.counts["late"] += late
            request.due_ms = ask.deadlines.due_ms(request.accepted_ms, length)
            stops = token in ask.stop and length >= ask.least
            if stops or length >= request.most:
                self._finish(request, now_ms, "stop" if stops else "length", "finished")
            elif token == request.planned[0].end or length >= request.turns:
                if request in step.ended and request.turns < math.inf:
                    request.most -= int(request.turns - length)
                self._next_phase(request)
        return [request for request, _ in answered]

    def failed(self, cause: Exception, now_ms: float) -> list[StepRequest]:
        """End the requests of the step that runs, because it raised."""
        parts, self.step = self.step.parts if self.step else [], None
        self.prepare(now_ms)
        error = BatchFailed(f"a step raised {type(cause).__name__}: {cause}; other requests go on")
        error.__cause__ = cause
        return [request for request, _ in parts if self._end(request, error, "failed")]

    def tick(self, now_ms: float) -> list[StepRequest]:
        """End the requests that wait in vain. Those in a step are answered by it, unless it hangs."""
        overdue = [one for one in self._active.values() if one.due_ms < now_ms]
        for sheddable in (False, True):
            ends = [bisect_left(self._waiting, end, key=ORDER) for end in ((sheddable,), (sheddable, now_ms))]
            overdue += self._waiting[slice(*ends)]
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

    def _next_phase(self, request: StepRequest) -> None:
        """Begin the next phase of a request, which waits for a place again if it needs another cache."""
        del request.planned[0]
        phase = request.planned[0]
        request.begun = len(request.tokens)
        request.among, request.turns = phase.among, request.begun + phase.tokens
        if phase.recomputes:
            self.counts["recomputed"] += 1
            self.push_out(request)

    def _wait(self, request: StepRequest) -> None:
        request.left, request.writer = request.length, None
        insort(self._waiting, request, key=ORDER)

    def _finish(self, request: StepRequest, now_ms: float, finish: str, kind: str) -> bool:
        """End a request with the tokens that it has."""
        return self._end(request, request.generated(now_ms, finish, self.policy.table.subnets), kind)

    def _end(self, request: StepRequest, outcome: Generated | RequestError, kind: str) -> bool:
        if request.outcome is not None:
            return False
        del self.requests[request.number]
        request.outcome = outcome
        self.counts[kind] += 1
        if self._active.pop(request.number, None) is None:
            self._leave_queue(request)
        return True

    def _leave_queue(self, request: StepRequest) -> None:
        del self._waiting[bisect_left(self._waiting, request.order, key=ORDER)]
