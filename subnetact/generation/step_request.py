"""StepRequest: a request for tokens, and what has come of it so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subnetact.errors import RequestError
from subnetact.generation.completion import Generated, TokenDeadlines, TokenLogprobs
from subnetact.generation.phases import Phase, PlannedPhase


@dataclass(frozen=True)
class TokenAsk:
    """What a client asks for, checked."""

    prompt: Sequence[int]
    answer: int  # the largest number of tokens
    deadlines: TokenDeadlines
    min_accuracy: float = 0.0  # percent
    stop: frozenset[int] = frozenset()
    logprobs: int | None = None
    sampling: Mapping[str, Any] | None = None  # of transformers
    phases: Sequence[Phase] = (Phase(),)
    least: int = 0  # tokens, before a token of `stop` ends it
    sheddable: bool = False  # it waits behind all others, and leaves a full queue for them


@dataclass(eq=False, slots=True)
class StepRequest:
    """An ask, and what has come of it; `owner` and `draws` are handed on to the driver."""

    ask: TokenAsk
    owner: Any = None
    draws: Any = None  # the random numbers of a request whose tokens are drawn
    number: int = -1
    accepted_ms: float = 0.0
    left: int = 0  # tokens of the prompt, and of an answer that lost its place, that are not computed
    due_ms: float = 0.0  # of the next token
    late: int = 0
    planned: list[PlannedPhase] = field(default_factory=list)  # the present phase and those after it
    among: frozenset[int] = frozenset()  # the subnets of the present phase
    turns: float = math.inf  # with how many tokens the next phase begins at the latest
    begun: int = 0  # with how many tokens the present one began
    most: int = 0  # tokens of the answer; what is not thought of a phase with `tokens` is not answered
    missed: int = 0  # steps in a row that ran subnets of other phases
    writer: int | None = None  # of its keys and values, by `CacheKinds.exact`
    approximate: bool = False
    tokens: list[int] = field(default_factory=list)
    subnets: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # never fewer than tokens, if asked for
    outcome: Generated | RequestError | None = None  # once it has ended

    @property
    def order(self) -> tuple[bool, float, int]:
        """The first of those that wait gets the next place."""
        return self.ask.sheddable, self.due_ms, self.number

    @property
    def length(self) -> int:
        """How many tokens the prompt and the answer have."""
        return len(self.ask.prompt) + len(self.tokens)

    def to_come(self, budget: float = math.inf) -> int:
        """Return how many tokens it may still get if phases that think have so many."""
        unspent = 0.0
        if self.planned[0].end is not None and self.turns < math.inf:
            unspent = max(0.0, self.turns - max(self.begun + budget, len(self.tokens)))
        return max(self.most - len(self.tokens) - int(unspent), 1)

    def generated(self, now_ms: float, finish: str, names: Sequence[str] = ()) -> Generated:
        """Return the answer if it ends now, by the names of all subnets."""
        used = tuple([names[subnet] for subnet in dict.fromkeys(self.subnets)])
        tokens = tuple(self.tokens), tuple(self.subnets), used, self.late, tuple(self.times_ms)
        cache = "approximate" if self.approximate else "exact"
        return Generated(*tokens, now_ms - self.accepted_ms, finish, tuple(self.logprobs), cache)
