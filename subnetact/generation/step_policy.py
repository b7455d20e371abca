"""StepPolicy: chooses the subnet of every step, and how long models think, by deadlines and load (no torch).

1. **Slack.** The step must meet the most urgent deadline, with a reserve for a prompt that may join the next.
2. **Claims.** With the same subnet in all further steps, every request that waits must get its first token in
   half of its time, in the order of their deadlines, and every one that has a place its last token in time.
   A request that even the fastest subnet would fail makes no claim.
3. **Load.** The arrivals and those who wait say how much time there is per request. On the upper concave hull
   of (time per request, accuracy), subnets that are beyond that time are not taken, and the first of them in
   turns with the one below it, so that no later request pays for the accuracy of this one.

The most accurate subnet runs that passes all three, or the fastest if none does. What a subnet is does not
matter: a width, a number of experts per token and a precision are rows of one table. A budget of thinking
tokens is the second half of a point of the hull.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Any, NamedTuple

from subnetact.errors import PolicyError, TableError
from subnetact.generation.step_request import StepRequest, TokenAsk
from subnetact.generation.step_table import StepTable
from subnetact.serving.scheduling.checks import check_margin, check_positive, check_within
from subnetact.serving.scheduling.context import ArrivalMeter
from subnetact.serving.scheduling.frontier import upper_hull

WAITING_SHARE = 0.5  # of the time until a waiting request is due is until it gets a place
SLOWEST = 10.0  # times the table's latency; no step is expected to take longer
MEMORY = 0.95  # share of the past in the estimate of how much slower than the table steps are
RATE_SHARE, RATE_WINDOW = 0.8, 20.0  # of the arrival rate that is load; its window, times to the first token
SETTLING = 3.0  # in so many times to the first token, those who wait are to be served beside the arrivals
USUAL = 0.9  # share of the past in the estimate of usual requests
LONGEST = 1e4  # times to the first token, in times per token, that count as the usual ones
LEAST_PROMPT = 16  # tokens of prompts in a step, however urgent others are
MOST_CLAIMS = 128  # of those who wait are looked at, the most urgent first
PROBE = 64  # tokens of a prompt, off which the table's time per such token is read


class Crowd(NamedTuple):
    """Who has a place and who waits for one, in the order of their deadlines; `places` is for how many."""

    now_ms: float
    active: Collection[StepRequest]
    waiting: Sequence[StepRequest]
    places: int


class Claim(NamedTuple):
    """What has to be computed, and within what time: steps, and tokens of prompts in them."""

    steps: float
    prompt_tokens: int
    left_ms: float


class StepPolicy:
    """Chooses one subnet for all sequences of a step.

    The header of `subnetact.generation.step_policy` says how. Steps that take longer than the table says
    raise the expected latencies of the next.

    Args:
        table: the step latencies, with known accuracies.
        token_ms: the usual time from one token of a sequence to its next, in ms.
        margin: share by which steps are assumed to be longer than expected.
        thinking: budgets of thinking tokens, each with the share of the accuracy that an answer has behind
            it, from 0 to 1. If given, thinking ends early under load.

    Attributes:
        slowdown: how long steps take, as a multiple of the table's latency.
        lifted: whether `among` made the last choice more accurate than it would have been without.
        tabled_ms: latency of the last step that was chosen, by the table.
        budget: with how many tokens a phase ends that has an end token.

    Raises:
        PolicyError: an argument is out of range.
        TableError: the accuracy of a subnet is not known, or no step is as fast as `token_ms`.
    """

    def __init__(
        self,
        table: StepTable,
        token_ms: float,
        margin: float = 0.1,
        thinking: Mapping[int, float] | None = None,
    ) -> None:
        if not isinstance(table, StepTable):
            raise PolicyError(f"table: expected a StepTable, got {type(table).__name__}; use profile_steps")
        self.table, self.token_ms = table, check_positive(token_ms, "token_ms")
        self.margin = check_margin(margin, "margin")
        self.slowdown, self.lifted, self.tabled_ms = 1.0, False, 0.0
        self._accuracy = table.known_accuracy()
        fastest = min(table.latencies_ms(1))
        if fastest > self.token_ms:
            raise TableError(f"token_ms: no step takes less than {fastest:.3g} ms; give more time per token")
        self._order = sorted(range(len(self._accuracy)), key=lambda i: -self._accuracy[i])
        for budget, share in (thinking or {}).items():
            check_within(budget, "thinking", 1)
            check_within(share, f"thinking[{budget}]", 0.0, 1.0, whole=False)
        budgets: Mapping[Any, float] = thinking or {math.inf: 1.0}
        self._budgets = {float(budget): budgets[budget] for budget in sorted(budgets, reverse=True)}
        self.budget = max(self._budgets)
        self._arrivals, self._credit = ArrivalMeter(), 0.0
        self._usual = [0.0] * 4  # tokens to think, to answer and of the prompt, and time to the first one, ms

    def arrived(self, ask: TokenAsk, now_ms: float) -> None:
        """Learn from a request what usual ones are."""
        thinks, answer = 0.0, float(ask.answer)
        if ask.phases[0].end is not None:
            thinks = min(ask.phases[0].tokens or answer, answer)
        first_ms = min(ask.deadlines.due_ms(0.0, 0), LONGEST * self.token_ms)
        seen = thinks, answer - thinks, float(len(ask.prompt)), first_ms
        share = USUAL if self._arrivals.total else 0.0
        pairs = zip(self._usual, seen, strict=True)
        self._usual = [share * old + (1.0 - share) * new for old, new in pairs]
        self._arrivals.extend([now_ms])

    def choose(
        self,
        slack_ms: float,
        sequences: int,
        context: float = 1.0,
        prompt_tokens: int = 0,
        *,
        among: Collection[int] | None = None,
        crowd: Crowd | None = None,
    ) -> int:
        """Return the id of the subnet for the next step.

        Args:
            slack_ms: how long the step may take: until the most urgent token is due.
            sequences: how many sequences of the step are past their prompts.
            context: the mean number of tokens of these.
            prompt_tokens: how many tokens of prompts the step computes.
            among: ids of the subnets that every request of the step permits; PolicyError if there is none.
                If None, all.
            crowd: who else is to be served in time. If None, only the slack counts.
        """
        tabled = self.table.latencies_ms(sequences, context, prompt_tokens)
        times = [self._longer * ms for ms in tabled]
        late = {i for i in self._order if times[i] > slack_ms}
        if crowd is not None:
            late |= self._refused(crowd, context, sequences, slack_ms, times)
        chosen = free = self._best(self._order, late, times)
        if among is not None and chosen not in among:
            allowed = [i for i in self._order if i in among]
            if not allowed:
                raise PolicyError(f"among: {list(among)} has none of the subnets 0 to {len(times) - 1}")
            chosen = self._best(allowed, late, times)
        self.lifted = self._accuracy[chosen] > self._accuracy[free]
        self.tabled_ms = tabled[chosen]
        return chosen

    @property
    def _longer(self) -> float:
        return (1.0 + self.margin) * self.slowdown

    @staticmethod
    def _best(allowed: Sequence[int], late: Collection[int], times: Sequence[float]) -> int:
        """Return the first allowed subnet, the most accurate first, that is not late, or else the fastest."""
        return next((i for i in allowed if i not in late), min(allowed, key=times.__getitem__))

    def prompt_room(self, sequences: int, context: float, slack_ms: float) -> float:
        """Return how many tokens of prompts a step may compute so that its sequences are in time."""
        step_ms, prompt_ms = self._speeds(sequences, context)
        fastest = min(range(len(step_ms)), key=step_ms.__getitem__)
        spare_ms = slack_ms / self._longer - step_ms[fastest]
        return max(spare_ms / max(prompt_ms[fastest], 1e-9), LEAST_PROMPT)

    def _speeds(self, sequences: int, context: float) -> tuple[list[float], list[float]]:
        """Return the times of a step and of every token of a prompt in it, per subnet, by the table."""
        steps, more = (self.table.latencies_ms(sequences, context, tokens) for tokens in (0, PROBE))
        return steps, [(both - alone) / PROBE for both, alone in zip(more, steps, strict=True)]

    def _refused(
        self, crowd: Crowd, context: float, sequences: int, slack_ms: float, times: Sequence[float]
    ) -> set[int]:
        """Return the subnets with which others would be late, now or later; `budget` falls as needed."""
        full = len(crowd.active) if not crowd.waiting else crowd.places
        step_ms, prompt_ms = self._speeds(max(full, 1), context)
        longer, rows = self._longer, list(zip(step_ms, prompt_ms, strict=True))
        reserve_ms = longer * min(prompt_ms) * self._usual[2] if sequences else 0.0
        refused = self._beyond_load(crowd, context)
        refused |= {i for i in self._order if times[i] + reserve_ms > slack_ms}
        waiting = [one for one in crowd.waiting[:MOST_CLAIMS] if not one.ask.sheddable]
        for budget in [self.budget, *(one for one in self._budgets if one < self.budget)]:
            self.budget = budget
            claims = self.claims(crowd, step_ms, prompt_ms)
            late = {
                i
                for i, (step, prompt) in enumerate(rows)
                if any(longer * (n * step + tokens * prompt) > left for n, tokens, left in claims)
            }
            if len(late) < len(rows) and len(claims) == len(waiting) + len(crowd.active):
                break
        return refused | late

    def claims(self, crowd: Crowd, step_ms: Sequence[float], prompt_ms: Sequence[float]) -> list[Claim]:
        """Return what requests need, of whom none is late with the fastest subnet.

        The first of those who wait takes the place of the sequence that ends first, and so on.

        Args:
            crowd: the requests.
            step_ms: time of a step with every subnet.
            prompt_ms: time that each token of a prompt adds to it.
        """
        now, budget, longer = crowd.now_ms, self.budget, self._longer
        fastest = min(range(len(step_ms)), key=step_ms.__getitem__)
        ends, found = [one.to_come(budget) for one in crowd.active], []
        prompts = sum([one.left for one in crowd.active])
        for steps, one in zip(ends, crowd.active, strict=True):
            last_ms = one.ask.deadlines.latest_ms(one.accepted_ms, len(one.tokens) + max(steps, 1) - 1)
            found.append(Claim(steps, prompts, last_ms - now))
        free = crowd.places - len(ends)
        heapify(ends)
        for one in crowd.waiting[:MOST_CLAIMS]:
            begin, tokens = 0 if free > 0 else ends[0], prompts + one.left
            claim = Claim(begin + 1, tokens, WAITING_SHARE * (one.due_ms - now))
            least_ms = longer * (claim.steps * step_ms[fastest] + tokens * prompt_ms[fastest])
            if least_ms > one.due_ms - now:
                continue
            if free > 0:
                free -= 1
            else:
                heappop(ends)
            heappush(ends, begin + one.to_come(budget))
            prompts = tokens
            if not one.ask.sheddable:
                found.append(claim)
        return found

    def _beyond_load(self, crowd: Crowd, context: float) -> set[int]:
        """Return the subnets that take more time per request than there is, and set the budget."""
        thinks, answer, prompt, first_ms = self._usual
        if self._arrivals.start_ms is None or not crowd.places:
            return set()
        age_ms = crowd.now_ms - self._arrivals.start_ms
        rate = self._arrivals.rate_per_ms(crowd.now_ms, RATE_WINDOW * first_ms)
        load = RATE_SHARE * rate * min(1.0, age_ms / first_ms) + len(crowd.waiting) / (SETTLING * first_ms)
        step_ms, prompt_ms = self._speeds(crowd.places, context)

        def cost(i: int, budget: float) -> float:
            steps = answer + min(thinks, budget)
            return self.slowdown * (steps * step_ms[i] / crowd.places + prompt * prompt_ms[i])

        points = [
            (cost(i, budget), self._accuracy[i] * share, i, budget)
            for i in self._order
            for budget, share in self._budgets.items()
        ]
        hull, tau = upper_hull(points), 1.0 / load if load > 0.0 else math.inf
        at = bisect_right(hull, tau, key=itemgetter(0))
        least, _, subnet, budget = hull[max(at - 1, 0)]
        most, _, other, longer = hull[min(at, len(hull) - 1)]
        share = max(0.0, (tau - least) / (most - least)) if most > least else 0.0
        self.budget = budget if budget == longer else budget + share * (longer - budget)
        if other != subnet:
            self._credit += share
            if self._credit >= 1.0:
                self._credit -= 1.0
                subnet = other
        return {i for i in self._order if self._accuracy[i] > self._accuracy[subnet]}

    def observe(self, tabled_ms: float, measured_ms: float) -> None:
        """Learn from the measured time of a step, and its time by the table, how long steps take here."""
        if tabled_ms > 0.0:
            ratio = min(measured_ms / tabled_ms, SLOWEST)
            self.slowdown = MEMORY * self.slowdown + (1.0 - MEMORY) * ratio
