"""Completion: the answer to one request for tokens, as it is generated."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from subnetact.errors import RequestError
from subnetact.files.fork import new_lock
from subnetact.serving.live.answers import post
from subnetact.serving.scheduling.checks import check_positive


@dataclass(frozen=True)
class TokenDeadlines:
    """When the tokens of a request are due: the first after one time, every further one after another.

    Args:
        first_ms: time from the submission to the first token, in ms.
        token_ms: time from one token to the next, in ms.
        total_ms: time from the submission to the last token, in ms, if only this was promised.

    Raises:
        PolicyError: a time is not above 0. It may be infinite.
    """

    first_ms: float
    token_ms: float
    total_ms: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_ms", check_positive(self.first_ms, "first_ms"))
        object.__setattr__(self, "token_ms", check_positive(self.token_ms, "token_ms"))

    @classmethod
    def total(cls, total_ms: float, tokens: int, usual_ms: float = math.inf) -> TokenDeadlines:
        """Return the latest times of so many tokens, of which only the last one is promised, all in ms.

        From one to the next is `usual_ms`, or an even share of the time if that is less: whoever can still
        answer in time may wait for its first token.
        """
        each = min(check_positive(total_ms, "total_ms") / max(tokens, 1), usual_ms)
        return cls(total_ms - (max(tokens, 1) - 1) * each, each, total_ms)

    def due_ms(self, accepted_ms: float, position: int) -> float:
        """Return when a token is due, by the time of the submission and its position from 0."""
        return accepted_ms + self.first_ms + position * self.token_ms

    def latest_ms(self, accepted_ms: float, position: int) -> float:
        """Return after when a token is late: behind its due time, or behind `total_ms` if this is given."""
        return self.due_ms(accepted_ms, position) if self.total_ms is None else accepted_ms + self.total_ms


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position of an answer, before temperature, `top_k` and `top_p` change them.

    Attributes:
        own: of the generated token.
        likely: the most likely tokens with theirs, the likeliest first.
    """

    own: float
    likely: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generated:
    """A finished answer.

    Attributes:
        tokens: the generated tokens, with the stop token if there was one.
        subnets: id of the subnet that generated each token.
        subnets_used: the names of these subnets, as in the table, in the order of their first tokens.
        late: how many tokens came after they were due, or after `deadline_ms` if the request gave this.
        times_ms: time from the submission to each token, in ms.
        total_ms: time from the submission to the end, in ms.
        finish: "stop" (by a stop token), "length" (by the largest number of tokens) or "cancelled".
        logprobs: log-probabilities of each token, if the request asked for them.
        cache: "exact" if every subnet read the keys and values that it would have written itself, or
            "approximate" if some were another subnet's, and other numbers.
    """

    tokens: tuple[int, ...]
    subnets: tuple[int, ...]
    subnets_used: tuple[str, ...]
    late: int
    times_ms: tuple[float, ...]
    total_ms: float
    finish: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    cache: str = "exact"

    @property
    def first_ms(self) -> float:
        """Time from the submission to the first token, in ms; 0 if there is none."""
        return self.times_ms[0] if self.times_ms else 0.0

    @property
    def met(self) -> bool:
        """Whether every token came in time and the answer was not cancelled."""
        return not self.late and self.finish != "cancelled"


class Completion:
    """A request under way. Iterate over it for the tokens as they come, or wait for `result()`.

    On an event loop, `async for` gives the tokens and `await` the result; all requests together wake a loop
    once a step. Every completion ends exactly once: with a `Generated`, or with a typed error.
    """

    def __init__(self, request: Any, cancel: Callable[[], Any]) -> None:
        self._request, self._cancel = request, cancel  # whose tokens grow until it has an outcome
        self._changed = threading.Condition(new_lock(threading.RLock))
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they come; a request that fails raises its RequestError behind them."""
        position, made = 0, self._request.tokens
        while True:
            with self._changed:
                self._changed.wait_for(lambda: position < len(made) or self.done)  # noqa: B023
            done, tokens = self.done, made[position:]
            yield from tokens
            position += len(tokens)
            if done:
                self.result()
                return

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield the tokens as they come, on an event loop."""
        position, news = 0, asyncio.Event()
        self.watch(news)
        while True:
            news.clear()
            done, tokens = self.done, self._request.tokens[position:]
            position += len(tokens)
            for token in tokens:
                yield token
            if done:
                self.result()
                return
            await news.wait()

    def __await__(self) -> Generator[Any, None, Generated]:
        """Wait on an event loop for the end, and return the answer; the errors are those of `result`."""

        async def end() -> Generated:
            async for _ in self:
                pass
            return self.result()

        return end().__await__()

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._request.outcome is not None

    def tokens(self, first: int = 0) -> Sequence[int]:
        """Return the tokens so far, from a position on."""
        return tuple(self._request.tokens[first:])

    def logprobs(self, first: int = 0) -> Sequence[TokenLogprobs]:
        """Return the log-probabilities of the tokens so far, from a position on, if they were asked for."""
        return tuple(self._request.logprobs[first:])

    def result(self, timeout_s: float | None = None) -> Generated:
        """Wait for the end of the request, for so many seconds or without limit, and return the answer.

        Raises:
            RequestError: the request failed: `DeadlinePassed`, `BatchFailed`, `BatcherClosed`.
            TimeoutError: the request has not ended yet.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(f"no end after {timeout_s} s; wait longer, or cancel the request")
        outcome: Generated | RequestError = self._request.outcome
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """Stop the request. Its result has the tokens so far; nothing happens if it has ended."""
        self._cancel()

    def watch(self, news: asyncio.Event) -> None:
        """Set an event of the running event loop with every new token and at the end, and if there are some.

        If the loop is closed before the end, its client is gone, and the request is cancelled.
        """
        with self._changed:
            self._watchers = [*self._watchers, (asyncio.get_running_loop(), news)]
        if self._request.tokens or self.done:
            news.set()


def tell(completions: Iterable[Completion]) -> None:
    """Tell clients what has happened; their code does not run here."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, dict[asyncio.Event, Completion]] = defaultdict(dict)
    for completion in completions:
        with completion._changed:
            completion._changed.notify_all()
        for loop, news in completion._watchers:
            by_loop[loop][news] = completion
    for loop, waiting in by_loop.items():
        if not post(loop, asyncio.Event.set, list(waiting)) or loop.is_closed():
            for completion in waiting.values():
                completion.cancel()
