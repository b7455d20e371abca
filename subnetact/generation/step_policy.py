"""StepPolicy: chooses the subnet of every step of generation by its deadlines (no torch)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from subnetact.errors import PolicyError, TableError
from subnetact.generation.step_table import StepTable
from subnetact.serving.scheduling.checks import check_margin, check_positive

WAITING_SHARE = 0.5  # of the time until a waiting request is due is until it gets a place
SLOWEST = 10.0  # times the table's latency; no step is expected to take longer
MEMORY = 0.95  # share of the past in the estimate of how much slower than the table steps are


class StepPolicy:
    """Chooses one subnet for all sequences of a step.

    The most accurate subnet is taken with which the whole step, with the prompts that are computed in it,
    meets the most urgent deadline, and with which waiting requests get a place in time. If none does, the
    fastest is taken. Steps that take longer than the table says raise the expected latencies of the next.

    Args:
        table: the step latencies, with known accuracies.
        token_ms: the usual time from one token of a sequence to its next, in ms.
        margin: share by which steps are assumed to be longer than expected.

    Attributes:
        slowdown: how long steps take, as a multiple of the table's latency.
        lifted: whether `among` made the last choice more accurate than it would have been without.
        tabled_ms: latency of the last step that was chosen, by the table.

    Raises:
        PolicyError: an argument is out of range.
        TableError: the accuracy of a subnet is not known, or no step is as fast as `token_ms`.
    """

    def __init__(self, table: StepTable, token_ms: float, margin: float = 0.1) -> None:
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

    def choose(
        self,
        slack_ms: float,
        *,
        sequences: int,
        context: float = 1.0,
        prompt_tokens: int = 0,
        among: Collection[int] | None = None,
    ) -> int:
        """Return the id of the subnet for the next step.

        Args:
            slack_ms: how long the step may take: until the most urgent token is due, or `pace`.
            sequences: how many sequences of the step are past their prompts.
            context: the mean number of tokens of these.
            prompt_tokens: how many tokens of prompts the step computes.
            among: ids of the subnets that every request of the step permits; PolicyError if there is none.
                If None, all.
        """
        tabled = self.table.latencies_ms(sequences, context, prompt_tokens)
        longer = (1.0 + self.margin) * self.slowdown
        times = [longer * ms for ms in tabled]
        chosen = free = _in_time(self._order, times, slack_ms)
        if among is not None and chosen not in among:
            allowed = [i for i in self._order if i in among]
            if not allowed:
                raise PolicyError(f"among: {list(among)} has none of the subnets 0 to {len(times) - 1}")
            chosen = _in_time(allowed, times, slack_ms)
        self.lifted = self._accuracy[chosen] > self._accuracy[free]
        self.tabled_ms = tabled[chosen]
        return chosen

    @staticmethod
    def pace(now_ms: float, left: Sequence[int], waiting_due_ms: Sequence[float]) -> float:
        """Return how long steps may take, in ms, so that waiting requests get a place in time.

        The first waiting request takes the place of the sequence that ends first, and so on.

        Args:
            now_ms: the time.
            left: how many tokens every active sequence may still get.
            waiting_due_ms: when the first tokens of waiting requests are due, the most urgent first.
        """
        pairs = zip(sorted(left), waiting_due_ms, strict=False)
        found = min(((due - now_ms) / (steps + 1) for steps, due in pairs), default=math.inf)
        return WAITING_SHARE * max(found, 0.0)

    def observe(self, tabled_ms: float, measured_ms: float) -> None:
        """Learn from the measured time of a step, and its time by the table, how long steps take here."""
        if tabled_ms > 0.0:
            ratio = min(measured_ms / tabled_ms, SLOWEST)
            self.slowdown = MEMORY * self.slowdown + (1.0 - MEMORY) * ratio


def _in_time(allowed: Sequence[int], times: Sequence[float], slack_ms: float) -> int:
    """Return the first allowed subnet, the most accurate first, that is in time, or else the fastest."""
    return next((i for i in allowed if times[i] <= slack_ms), min(allowed, key=times.__getitem__))
