"""Generator: serves requests for tokens under deadlines, with a subnet chosen for every step."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    CacheMismatch,
    DeadlinePassed,
    InvalidRequest,
    PolicyError,
    ProfileMismatch,
    QueueFull,
    RequestError,
)
from subnetact.generation.completion import Completion, Generated, TokenDeadlines, check_prompt
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_table import StepTable
from subnetact.insertion.key_value_cache import cache_relation
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.interpreter_exit import computing
from subnetact.serving.scheduling.checks import check_count, check_positive, expired_rule, unreachable
from subnetact.serving.scheduling.context import Policy
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

if TYPE_CHECKING:
    from subnetact.generation.step_loop import Step

__all__ = ["Generator", "GeneratorStats"]

logger = logging.getLogger("subnetact.generation")
COLDEST = 1e-6
"""At lower temperatures the most likely token is taken; logits divided by them could be infinite."""
IDLE_S = 0.05
"""How long the loop waits for a request before it looks for expired ones."""
TICK_S = 0.02
"""How often the watchdog looks for expired requests and for a step that hangs."""
PATIENCE, LEAST_PATIENCE_MS, FIRST_PATIENCE_MS = 20.0, 1e4, 3e4
"""A step hangs after this multiple of its expected time, but not before these; the last is of first steps."""


@dataclass(frozen=True)
class GeneratorStats:
    """Counts since the generator was made.

    Attributes:
        requests: accepted requests.
        finished: requests that ended by a stop token or by their largest number of tokens.
        expired: requests that ended with `DeadlinePassed`.
        cancelled: requests that their clients cancelled.
        failed: requests whose step raised.
        tokens: generated tokens.
        late: tokens that came after they were due.
        lifted: steps of sequences with different minimum accuracies that ran a more accurate subnet than the
            deadlines alone chose, because one of the sequences demands it.
        steps: id of a subnet -> how many steps it ran.
        active: requests under way.
        slowdown: how long steps take, as a multiple of the table's latency.
        choosing_us: mean time of choosing a subnet, per step, in microseconds.
        up: whether steps are computed: the generator's thread lives, and no step hangs.
    """

    requests: int
    finished: int
    expired: int
    cancelled: int
    failed: int
    tokens: int
    late: int
    lifted: int
    steps: dict[int, int]
    active: int
    slowdown: float
    choosing_us: float
    up: bool


class _Running:
    """One accepted request."""

    __slots__ = (
        "accepted_ms",
        "completion",
        "deadlines",
        "due_ms",
        "first_ms",
        "floor",
        "late",
        "length",
        "place",
        "stop",
        "subnets",
    )

    def __init__(
        self, completion: Completion, accepted_ms: float, deadlines: TokenDeadlines, floor: float
    ) -> None:
        self.completion, self.accepted_ms, self.deadlines, self.floor = (
            completion,
            accepted_ms,
            deadlines,
            floor,
        )
        self.subnets: list[int] = []
        self.late = self.length = 0
        self.first_ms = 0.0
        self.due_ms = deadlines.due_ms(accepted_ms, 0)  # of the next token
        self.place = (self.due_ms, "")
        self.stop: frozenset[int] = frozenset()


class Generator:
    """Generates tokens for many requests at a time; the deadlines choose the subnet of every step.

    All active sequences share a step, and a step runs one subnet. The next step may run another one: the keys
    and values that earlier subnets wrote stay in use. The subnet of a step satisfies the most demanding of
    its sequences: a step of its own for each minimum accuracy would read the weights once more for all.
    `GeneratorStats.lifted` counts these steps. Batching, paging and sampling are those of the continuous
    batching of transformers. Every accepted request ends exactly once: with a `Generated`, or with
    a typed error. While a step hangs, requests end with `DeadlinePassed` when their next tokens are overdue.
    Use a generator as a context manager.

    Args:
        supernet: a supernet of a language model of transformers, in evaluation mode.
        subnets: the subnets to choose from, in the order of the table. Every two of them must be able to
            continue on each other's key-value cache (`cache_relation`).
        table: the latencies of steps, measured with `profile_steps`, with the accuracy of every subnet.
        token_ms: the usual time from one token to the next, in ms.
        policy: makes a policy from the table of a context bucket, which may ask for less accuracy than the
            deadlines permit; see `StepPolicy`. If None, the most accurate subnet in time is taken.
        allow_approximate: whether a subnet may continue on keys and values that another one wrote and that
            differ from its own. Without this, the subnets must agree exactly.
        max_sequences: the largest number of active sequences.
        max_queue: number of requests under way at which further ones are refused with `QueueFull`.
        cache_tokens: how many tokens the keys and values of all sequences may have. A request that is pushed
            out of a full cache is computed again later.
        step_tokens: the largest number of tokens that one step computes; longer prompts take several steps.
        max_length: the largest number of tokens of a prompt and its answer. If None, the model's.
        expired: what becomes of a request whose first token cannot come in time any more: `drop` (it ends
            with `DeadlinePassed`) or `serve`.
        seed: seed of the sampling. If None, a random one.
        watchdog_ms: time after which a step is taken to hang, in ms; inf turns the watchdog off. If None, 20
            times the expected latency, but at least 10 s, and at least 30 s if a subnet runs for the first
            time.
        clock_ms: returns the time in ms. If None, the monotonic clock of the process.

    Attributes:
        table: as given.
        subnets: as given.

    Raises:
        CacheMismatch: two subnets cannot continue on each other's caches.
        ProfileMismatch: the table is of other subnets.
        PolicyError: an argument is out of range.
        InsertError: the network is no language model of transformers.
        MissingExtra: transformers is not installed.

    Example:
        >>> table = profile_steps(supernet, subnets).with_accuracy([41.0, 47.5])
        >>> with Generator(supernet, subnets, table, token_ms=50, allow_approximate=True) as generator:
        ...     for token in generator.submit(prompt, max_new_tokens=32, first_ms=500):
        ...         print(tokenizer.decode([token]), end="")
    """

    def __init__(
        self,
        supernet: Supernet,
        subnets: Sequence[SubnetSpec],
        table: StepTable,
        *,
        token_ms: float,
        policy: Callable[[LatencyTable], Policy] | None = None,
        allow_approximate: bool = False,
        max_sequences: int = 16,
        max_queue: int = 1000,
        cache_tokens: int = 16_384,
        step_tokens: int = 512,
        max_length: int | None = None,
        expired: str = "drop",
        seed: int | None = None,
        watchdog_ms: float | None = None,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        from subnetact.generation.step_loop import ElasticDecoder, StepLoop

        self.subnets = supernet.distinct(subnets, "a generator")
        decoder = ElasticDecoder(supernet, self.subnets, allow_approximate)
        self.table = table
        self._policy = StepPolicy(table, token_ms, policy)
        if tuple(map(str, self.subnets)) != table.subnets:
            raise ProfileMismatch("table: it is of other subnets; measure one of these with profile_steps")
        _check_caches(supernet, self.subnets, allow_approximate)
        self._places = check_count(max_sequences, "max_sequences")
        check_count(step_tokens, "step_tokens")
        self._max_queue = check_count(max_queue, "max_queue")
        self._drop = expired_rule(expired) == "drop"
        if expired == "defer":
            raise PolicyError("expired: 'defer' is not a rule for generation; choose from drop, serve")
        self._token_ms = self._policy.token_ms
        self._watchdog_ms = None if watchdog_ms is None else check_positive(watchdog_ms, "watchdog_ms")
        if clock_ms is not None and not callable(clock_ms):
            raise PolicyError(f"clock_ms: {clock_ms!r} is no function; give one that returns the time in ms")
        self._now_ms = clock_ms or _now_ms
        text = decoder.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self._loop = StepLoop(
            decoder,
            choose=self._choose,
            observe=self._observe,
            deliver=self._deliver,
            due=self._due,
            clock_ms=self._now_ms,
            sequences=self._places,
            cache_tokens=check_count(cache_tokens, "cache_tokens"),
            step_tokens=step_tokens,
            seed=seed,
        )
        capacity = self._loop.set_up()
        if capacity < 2:
            self._loop.tear_down()
            raise PolicyError(
                f"cache_tokens: {cache_tokens} tokens are too few, because every kind of attention takes "
                "whole pages of the cache; give it more"
            )
        longest = int(getattr(text, "max_position_embeddings", capacity) or capacity)
        wanted = longest if max_length is None else check_count(max_length, "max_length")
        self.max_length = min(capacity, longest, wanted)
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._waiting: list[tuple[float, str]] = []  # requests without a token, the most urgent first
        self._cancelled: deque[str] = deque()
        self._names = itertools.count()
        self._counts = dict.fromkeys(
            ("requests", "finished", "expired", "cancelled", "failed", "tokens", "late", "lifted"), 0
        )
        self._steps = dict.fromkeys(range(len(self.subnets)), 0)
        self._choosing_s = 0.0
        self._subnet = 0
        self._closing: str | None = None
        self._step_limit_ms: float | None = None  # when the step that runs is taken to hang
        self._in_step: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="subnetact-generator", daemon=True)
        self._watchdog = threading.Thread(
            target=self._watch, name="subnetact-generator-watchdog", daemon=True
        )
        self._thread.start()
        self._watchdog.start()

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 64,
        first_ms: float | None = None,
        token_ms: float | None = None,
        deadline_ms: float | None = None,
        stop: Iterable[int] = (),
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_accuracy: float = 0.0,
    ) -> Completion:
        """Queue a request.

        Args:
            prompt: token ids, as a list, or a tensor of one dimension.
            max_new_tokens: the largest number of tokens to generate.
            first_ms: time to the first token, in ms. If None, ten times `token_ms`.
            token_ms: time from one token to the next, in ms. If None, the generator's.
            deadline_ms: time to the last token, in ms; instead of `first_ms` and `token_ms`.
            stop: tokens that end the answer.
            temperature: divides the logits before a token is drawn. If it is less than 1e-6, or if it is
                None and `top_k` and `top_p` are None, the most likely token is taken. If only the temperature
                is None, it is 1.0.
            top_k: a token is drawn from this number of most likely ones. If None, from all.
            top_p: a token is drawn from the most likely ones that together have this probability.
            min_accuracy: minimum accuracy of the subnets that generate this answer, in percent.

        Returns:
            The completion: iterate over it, or wait for its result.

        Raises:
            InvalidRequest: the prompt is empty, too long, or has unknown tokens, a time is not finite or not
                above 0, or another argument is out of its range.
            QueueFull: too many requests are under way.
            BatcherClosed: the generator is closed.
        """
        tokens = check_prompt(prompt, self._vocabulary)
        count = _whole(max_new_tokens, "max_new_tokens", 1)
        if len(tokens) + count > self.max_length:
            raise InvalidRequest(
                f"prompt: {len(tokens)} tokens and an answer of {count} are more than {self.max_length}, "
                "what the model and the cache hold; shorten the prompt or lower max_new_tokens"
            )
        deadlines = self._deadlines(first_ms, token_ms, deadline_ms, count)
        floor = _number(min_accuracy, "min_accuracy", 0.0, 100.0)
        best = max(self.table.accuracy)
        if floor > best:
            raise InvalidRequest(str(unreachable(floor, best)))
        if not isinstance(stop, Iterable):
            raise InvalidRequest(f"stop: {stop!r} is no list of tokens; give [] for none")
        ends = frozenset(_whole(token, "stop", 0) for token in stop)
        sampling = _sampling(temperature, top_k, top_p, self._vocabulary)
        name = f"request {next(self._names)}"
        completion = Completion(lambda: self._cancel(name))
        running = _Running(completion, self._now_ms(), deadlines, floor)
        running.stop, running.length, running.place = ends, count, (running.due_ms, name)
        with self._lock:
            if self._closing is not None:
                raise BatcherClosed(f"the generator is closed{self._closing}")
            if len(self._running) >= self._max_queue:
                raise QueueFull(f"{len(self._running)} requests are under way; try again later")
            self._running[name] = running
            insort(self._waiting, running.place)
            self._counts["requests"] += 1
            try:
                self._loop.add(name, tokens, count, set(ends), sampling)  # before `close` can cancel it
            except BaseException:
                del self._running[name]
                self._waiting.remove(running.place)
                self._counts["requests"] -= 1
                raise
        return completion

    def stats(self) -> GeneratorStats:
        """Return the counts so far."""
        with self._lock:
            steps = sum(self._steps.values())
            return GeneratorStats(
                **self._counts,
                steps={i: count for i, count in self._steps.items() if count},
                active=len(self._running),
                slowdown=self._policy.slowdown,
                choosing_us=1e6 * self._choosing_s / max(steps, 1),
                up=self._thread.is_alive() and not self._closing and not self._hangs(),
            )

    def close(self, wait: bool = True) -> None:
        """Refuse further requests, and end. A step that hangs is not waited for; its thread ends with it.

        Args:
            wait: whether to finish the requests under way. If False, or if a step hangs, they end with
                `BatcherClosed`.
        """
        with self._lock:
            if self._closing is None:
                self._closing = ""
        unfinished = BatcherClosed("the generator was closed before the answer was complete")
        if not wait:
            self._end_all(unfinished)
        self._loop.wake()
        if threading.current_thread() in (self._thread, self._watchdog):
            return
        while self._thread.is_alive():
            if self._hangs():
                self._end_all(unfinished)
                return
            self._thread.join(TICK_S)

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loop, on its own thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with computing():
                    self._drop_cancelled()
                    if self._drop:
                        self._drop_expired()
                    self._begin_step(set(), FIRST_PATIENCE_MS)
                    worked = self._loop.step()
                self._step_limit_ms = None
                if not worked:
                    with self._lock:
                        if self._closing is not None and not self._running:
                            return
                    self._loop.wait(IDLE_S)
        except BaseException as error:
            logger.exception("the generator ends")
            with self._lock:
                self._closing = f": its loop raised {type(error).__name__}: {error}"
            self._end_all(BatchFailed(f"the generator's loop raised {type(error).__name__}: {error}"))
        finally:
            self._step_limit_ms = None
            self._loop.tear_down()

    def _begin_step(self, names: set[str], patience_ms: float) -> None:
        """Note what the next step computes, and how long it may take before it is taken to hang."""
        self._in_step = names
        wanted = patience_ms if self._watchdog_ms is None else self._watchdog_ms
        self._step_limit_ms = self._now_ms() + wanted

    def _hangs(self) -> bool:
        limit_ms = self._step_limit_ms
        return limit_ms is not None and self._now_ms() > limit_ms

    def _watch(self) -> None:
        """Run the watchdog's thread as long as the generator's."""
        while self._thread.is_alive():
            try:
                self._tick()
            except Exception:
                logger.exception("the generator's watchdog goes on after an error")
            self._thread.join(TICK_S)

    def _tick(self) -> None:
        """End requests that wait in vain; the step that runs answers those in it, unless it hangs."""
        if self._hangs():
            self._drop_cancelled()
            now = self._now_ms()
            self._expire([name for name, one in list(self._running.items()) if one.due_ms < now])
        elif self._drop:
            self._drop_expired(self._in_step)

    def _choose(self, step: Step) -> None:
        begun = time.perf_counter()
        names = {*step.decoding, *step.prompts}
        found = [one for one in map(self._running.get, names) if one is not None]
        if found:
            floors = [one.floor for one in found]
            self._subnet = self._policy.choose(
                self._now_ms(),
                [one.due_ms for one in found],
                sequences=len(step.decoding),
                context=step.context,
                prompt_tokens=step.prompt_tokens,
                floor=max(floors),
                pace_ms=self._pace(names, found),
            )
            if self._policy.lifted and min(floors) < max(floors):
                with self._lock:
                    self._counts["lifted"] += 1
        step.subnet = self._subnet
        self._begin_step(names, self._patience_ms(step))
        with self._lock:
            self._steps[step.subnet] += 1
            self._choosing_s += time.perf_counter() - begun

    def _patience_ms(self, step: Step) -> float:
        """Return how long a step may take before it is taken to hang."""
        tabled = self.table.latency_ms(step.subnet, len(step.decoding), step.context, step.prompt_tokens)
        least = LEAST_PATIENCE_MS if self._steps[step.subnet] else FIRST_PATIENCE_MS
        return max(least, PATIENCE * self._policy.slowdown * tabled)

    def _pace(self, names: set[str], active: Sequence[_Running]) -> float:
        """Return how long steps may take so that waiting requests get a place in time."""
        if len(active) < self._places or not self._waiting:
            return math.inf
        with self._lock:
            urgent = self._waiting[: self._places]
        due = [due for due, name in urgent if name not in names]
        left = [one.length - len(one.subnets) for one in active]
        return self._policy.pace(self._now_ms(), left, due)

    def _observe(self, step: Step, measured_ms: float) -> None:
        self._policy.observe(step.subnet, len(step.decoding), step.context, step.prompt_tokens, measured_ms)

    def _due(self, name: str) -> float:
        running = self._running.get(name)
        return math.inf if running is None else running.due_ms

    def _deliver(self, output: Any) -> None:
        running = self._running.get(output.request_id)
        if running is None:
            if output.error is None and not output.is_finished():
                self._loop.cancel_request(output.request_id)  # the request ended while it was queued
            return
        if output.error is not None:
            cause = output.error
            error = BatchFailed(f"a step raised {type(cause).__name__}: {cause}; other requests go on")
            error.__cause__ = cause if isinstance(cause, Exception) else None
            self._end(output.request_id, error, "failed")
            return
        now = self._now_ms()
        for token in output.generated_tokens[len(running.subnets) :]:
            late = now > running.due_ms
            with self._lock:
                if not running.subnets:
                    running.first_ms = now - running.accepted_ms
                    self._stop_waiting(running)
                running.subnets.append(self._subnet)
                running.due_ms = running.deadlines.due_ms(running.accepted_ms, len(running.subnets))
                running.late += late
                self._counts["tokens"] += 1
                self._counts["late"] += late
            running.completion._add(int(token))
        if output.is_finished():
            last = running.completion.tokens(len(running.subnets) - 1)
            finish = "stop" if last and last[0] in running.stop else "length"
            self._end(output.request_id, self._generated(running, finish), "finished")

    # -- ends ------------------------------------------------------------------------------------

    def _generated(self, running: _Running, finish: str) -> Generated:
        tokens = running.completion.tokens()
        total = self._now_ms() - running.accepted_ms
        return Generated(
            tuple(tokens),
            tuple(running.subnets[: len(tokens)]),
            running.late,
            running.first_ms,
            total,
            finish,
        )

    def _end(self, name: str, outcome: Generated | RequestError, kind: str) -> None:
        with self._lock:
            running = self._running.pop(name, None)
            if running is None:
                return
            self._stop_waiting(running)
            self._counts[kind] += 1
        running.completion._end(outcome)

    def _stop_waiting(self, running: _Running) -> None:
        """Take a request off the waiting ones if it is among them; the caller holds the lock."""
        position = bisect_left(self._waiting, running.place)
        if position < len(self._waiting) and self._waiting[position] == running.place:
            del self._waiting[position]

    def _cancel(self, name: str) -> None:
        self._cancelled.append(name)
        self._loop.wake()

    def _drop_cancelled(self) -> None:
        for _ in range(len(self._cancelled)):
            try:
                name = self._cancelled.popleft()
            except IndexError:  # the watchdog was quicker
                return
            running = self._running.get(name)
            if running is not None:
                self._loop.cancel_request(name)
                self._end(name, self._generated(running, "cancelled"), "cancelled")

    def _drop_expired(self, besides: Collection[str] = ()) -> None:
        """End the requests whose first tokens are overdue, apart from some."""
        now = self._now_ms()
        with self._lock:
            expired = self._waiting[: bisect_left(self._waiting, (now, ""))]
        self._expire([name for _, name in expired if name not in besides])

    def _expire(self, names: Sequence[str]) -> None:
        for name in names:
            running = self._running.get(name)
            if running is not None:
                self._loop.cancel_request(name)
                due_ms, tokens = running.due_ms - running.accepted_ms, len(running.subnets)
                error = DeadlinePassed(f"token {tokens + 1} was due after {due_ms:.0f} ms, and did not come")
                self._end(name, error, "expired")

    def _end_all(self, error: RequestError) -> None:
        for name in list(self._running):
            self._loop.cancel_request(name)
            self._end(name, error, "failed")

    def _deadlines(
        self, first_ms: float | None, token_ms: float | None, deadline_ms: float | None, tokens: int
    ) -> TokenDeadlines:
        for name, value in (("first_ms", first_ms), ("token_ms", token_ms), ("deadline_ms", deadline_ms)):
            if value is not None and not 0.0 < _number(value, name, -math.inf, math.inf) < math.inf:
                raise InvalidRequest(f"{name}: {value} must be finite and > 0, in milliseconds from now")
        if deadline_ms is not None:
            if first_ms is not None or token_ms is not None:
                raise InvalidRequest("deadline_ms: give it alone, or first_ms and token_ms")
            return TokenDeadlines.total(deadline_ms, tokens)
        each = self._token_ms if token_ms is None else token_ms
        return TokenDeadlines(10.0 * each if first_ms is None else first_ms, each)


def _check_caches(supernet: Supernet, subnets: Sequence[SubnetSpec], allow_approximate: bool) -> None:
    first = subnets[0]
    for other in subnets[1:]:
        relation = cache_relation(supernet, first, other)
        if relation == "incompatible" or (relation == "approximate" and not allow_approximate):
            way = (
                "generate with subnets that keep the same layers and heads"
                if relation == "incompatible"
                else "accept this with allow_approximate=True"
            )
            raise CacheMismatch(
                f"the key-value caches of {first} and {other} are {relation}, so the subnet cannot change "
                f"between two tokens; {way}"
            )


def _now_ms() -> float:
    return time.perf_counter_ns() / 1e6


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(f"{name}: {value!r} must be a whole number of at least {least}")
    return value


def _number(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{name}: {value!r} must be a number from {low:g} to {high:g}")
    return float(value)


def _sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, vocabulary: int
) -> dict[str, Any] | None:
    if temperature is None and top_k is None and top_p is None:
        return None
    if temperature is not None and _number(temperature, "temperature", 0.0, 100.0) < COLDEST:
        return None
    return {
        "temperature": 1.0 if temperature is None else float(temperature),
        "top_k": vocabulary if top_k is None else min(_whole(top_k, "top_k", 1), vocabulary),
        "top_p": 1.0 if top_p is None else max(_number(top_p, "top_p", 0.0, 1.0), 1e-6),
    }
