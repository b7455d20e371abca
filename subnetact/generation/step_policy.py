"""StepPolicy: chooses the subnet of every step of generation with a policy for requests (no torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from subnetact.errors import PolicyError, TableError
from subnetact.generation.step_table import StepTable
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_margin, check_policy, check_positive
from subnetact.serving.scheduling.context import ArrivalMeter, Context, Policy
from subnetact.serving.scheduling.queue import EDFQueue

__all__ = ["StepPolicy"]

WAITING_SHARE = 0.5
"""Share of the time until a waiting request is due in which it is to get a place; its prompt has the rest."""
SLOWEST = 10.0
"""A step is never expected to take more than this multiple of the table's latency."""
MEMORY = 0.95
"""Share of the past in the estimate of how much slower than the table steps are."""


class StepPolicy:
    """Chooses one subnet for all sequences of a step.

    The most accurate subnet is taken with which the whole step, with the prompts that are computed in it,
    meets the most urgent deadline, and with which waiting requests get a place in time. If none does, the
    fastest is taken. A policy for requests may ask for less accuracy than that: to it, a step is a queue with
    one token of every active sequence, and it sees the table of the context bucket. Steps that take longer
    than the table says raise the expected latencies of the next ones.

    Args:
        table: the step latencies, with known accuracies.
        token_ms: the usual time from one token of a sequence to its next, in ms.
        policy: makes a policy from the table of a context bucket, for example
            `lambda table: SlackFit(table, 50.0)`. It limits the accuracy. If None, nothing does.
        margin: share by which steps are assumed to be longer than expected.

    Attributes:
        table: as given.
        slowdown: how long steps take, as a multiple of the table's latency.
        lifted: whether the floor made the last choice more accurate than it would have been without.

    Raises:
        PolicyError: an argument is out of range, or `policy` makes no policy of the table.
        TableError: the accuracy of a subnet is not known, or no step is as fast as `token_ms`.
    """

    def __init__(
        self,
        table: StepTable,
        token_ms: float,
        policy: Callable[[LatencyTable], Policy] | None = None,
        margin: float = 0.1,
    ) -> None:
        if not isinstance(table, StepTable):
            raise PolicyError(f"table: expected a StepTable, got {type(table).__name__}; use profile_steps")
        self.table = table
        self.token_ms = check_positive(token_ms, "token_ms")
        self.margin = check_margin(margin, "margin")
        self.slowdown = 1.0
        self.lifted = False
        self._accuracy = table.known_accuracy()
        fastest = min(table.latencies_ms(1))
        if fastest > self.token_ms:
            raise TableError(f"token_ms: no step takes less than {fastest:.3g} ms; give more time per token")
        self._policies = [policy(one) for one in table.decode.values()] if policy else []
        for one in self._policies:
            check_policy(one)
            if one.table.subnets != table.subnets:
                raise PolicyError("policy: it was made for other subnets than the step table has")
        self._arrivals = ArrivalMeter()
        self._order = sorted(range(len(self._accuracy)), key=lambda i: -self._accuracy[i])

    def choose(
        self,
        now_ms: float,
        due_ms: Sequence[float],
        *,
        sequences: int,
        context: float = 1.0,
        prompt_tokens: int = 0,
        floor: float = 0.0,
        pace_ms: float = math.inf,
    ) -> int:
        """Return the id of the subnet for the next step.

        Args:
            now_ms: the time.
            due_ms: when the next token of every sequence in the step is due, on the same clock.
            sequences: how many of them are past their prompts.
            context: the mean number of tokens of these.
            prompt_tokens: how many tokens of prompts the step computes.
            floor: the minimum accuracy in percent that a request demands; PolicyError if no subnet has it.
            pace_ms: how long steps may take so that waiting requests get a place in time; see `pace`.
        """
        allowed = [i for i in self._order if self._accuracy[i] >= floor] if floor > 0.0 else self._order
        if not allowed:
            best = max(self._accuracy)
            raise PolicyError(f"floor: {floor} percent; no subnet has more than {best:.2f} percent")
        slack = min(min(due_ms) - now_ms, pace_ms)
        wanted = self._accuracy[allowed[0]]
        if self._policies:
            wanted = self._accuracy[self._wanted(now_ms, due_ms, context, prompt_tokens)]
        tabled, longer = self.table.latencies_ms(sequences, context, prompt_tokens), 1.0 + self.margin
        times = [longer * (self.slowdown * one) for one in tabled]
        chosen = self._in_time(allowed, wanted, times, slack)
        self.lifted = floor > 0.0 and chosen != self._in_time(self._order, wanted, times, slack)
        return chosen

    def _in_time(self, allowed: Sequence[int], wanted: float, times: Sequence[float], slack_ms: float) -> int:
        """Return the first allowed subnet, the most accurate first, that is in time, or else the fastest."""
        limit = max(wanted, self._accuracy[allowed[-1]])
        for i in allowed:
            if self._accuracy[i] <= limit and times[i] <= slack_ms:
                return i
        return min(allowed, key=times.__getitem__)

    @staticmethod
    def pace(now_ms: float, left: Sequence[int], waiting_due_ms: Sequence[float]) -> float:
        """Return how long steps may take, in ms, so that waiting requests get a place in time.

        The first waiting request takes the place of the sequence that ends first, and so on.

        Args:
            now_ms: the time.
            left: how many tokens every active sequence may still get.
            waiting_due_ms: when the first tokens of waiting requests are due, the most urgent first.
        """
        found = math.inf
        for steps, due in zip(sorted(left), waiting_due_ms, strict=False):
            time_ms = (due - now_ms) / (steps + 1)
            if time_ms < found:
                found = time_ms
        return WAITING_SHARE * max(found, 0.0)

    def observe(
        self, subnet: int, sequences: int, context: float, prompt_tokens: int, measured_ms: float
    ) -> None:
        """Learn from the measured time of a step, described as for `choose`, how long steps take here."""
        planned = self.table.latency_ms(subnet, sequences, context, prompt_tokens)
        if planned > 0.0:
            ratio = min(measured_ms / planned, SLOWEST)
            self.slowdown = MEMORY * self.slowdown + (1.0 - MEMORY) * ratio

    def _wanted(self, now_ms: float, due_ms: Sequence[float], context: float, prompt_tokens: int) -> int:
        """Return the subnet that the policy of the context bucket chooses, prompts and slowness aside."""
        policy = self._policies[self.table.bucket(context)]
        extra = self.table.latency_ms(self._order[-1], 0, context, prompt_tokens) if prompt_tokens else 0.0
        queue: EDFQueue[None] = EDFQueue()
        for due in sorted(due_ms):
            queue.push(now_ms + (due - now_ms) / self.slowdown - extra, None)
        self._arrivals.extend([now_ms] * len(due_ms))
        context_ = Context(queue, self._arrivals, [now_ms], self.token_ms)
        context_.now_ms = now_ms
        context_.queued = len(queue)
        context_.slack_ms = queue.deadline() - now_ms
        decision = policy.decide(context_)
        return self._order[-1] if decision is None else decision[0]
