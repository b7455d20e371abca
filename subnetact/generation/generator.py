"""Generator: serves requests for tokens under deadlines, with a subnet chosen for every step."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from subnetact.errors import BatcherClosed, BatchFailed, InvalidRequest, PolicyError, ProfileMismatch
from subnetact.files.fork import hear_of_forks, new_lock
from subnetact.generation.completion import Completion, TokenDeadlines, tell
from subnetact.generation.phases import Phase, checked_phases
from subnetact.generation.stats import GeneratorStats
from subnetact.generation.step_policy import StepPolicy
from subnetact.generation.step_request import StepRequest, TokenAsk
from subnetact.generation.step_scheduler import StepScheduler
from subnetact.generation.step_table import StepTable
from subnetact.serving.live.batcher import monotonic_ms
from subnetact.serving.live.context_manager import ClosedOnExit
from subnetact.serving.live.interpreter_exit import computing
from subnetact.serving.scheduling.checks import check_count, check_deadline, check_within
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

logger = logging.getLogger("subnetact.generation")
COLDEST = 1e-6  # at lower temperatures the most likely token is taken; quotients could be infinite
MOST_LOGPROBS = 20  # that are told of the most likely tokens
TICK_S = 0.02  # how often expired requests and a step that hangs are looked for
IDLE_S = 0.5  # how often a generator without requests looks for new weights, before a request needs them


class Generator(ClosedOnExit):
    """Generates tokens for many requests at a time; the deadlines choose the subnet of every step.

    All active sequences share a step, and a step runs one subnet. The next step may run another one: the keys
    and values that earlier subnets wrote stay in use. The subnet of a step satisfies the most demanding of
    its sequences; `GeneratorStats.lifted` counts when this costs the others time. Batching, paging and
    sampling are transformers' own. Every accepted request ends exactly once: with a `Generated`, or with a
    typed error. While a step hangs, requests end with `DeadlinePassed` when their next tokens are overdue.
    Use a generator as a context manager, with `with` or `async with`.

    Args:
        supernet: a supernet of a language model of transformers, in evaluation mode.
        subnets: the subnets to choose from, in the order of the table. Every two of them must be able to
            continue on each other's key-value cache (`cache_relation`), but for `allow_recompute`.
        table: the latencies of steps, measured with `profile_steps`, with the accuracy of every subnet.
        token_ms: the usual time from one token to the next, in ms.
        allow_approximate: whether a subnet may continue on keys and values that another one wrote and that
            differ from its own. Without this, the subnets must agree exactly. Each answer says in its
            `cache` whether this was so.
        allow_recompute: whether subnets may be given that cannot continue on each other's caches. A phase of
            a request that follows on one of other subnets then computes the cache again. Requests without
            phases run those that can continue on the cache of the most accurate subnet.
        max_sequences: the largest number of active sequences.
        max_queue: number of requests under way at which further ones are refused with `QueueFull`.
        cache_tokens: how many tokens the keys and values of all sequences may have. A request that is pushed
            out of a full cache is computed again later.
        step_tokens: the largest number of tokens that one step computes; longer prompts take several steps.
        expired: what becomes of a request whose first token cannot come in time any more: `drop` (it ends
            with `DeadlinePassed`) or `serve`.
        thinking: budgets of thinking tokens, each with the share of the accuracy that an answer has behind
            it. If given, the load chooses how long phases with an end token are, which then ends them.
        seed: seed of the requests that have none of their own. If None, a random one.
        watchdog_ms: time after which a step is taken to hang, in ms; inf: never. If None, 20 times the
            expected latency, but at least 10 s, and at least 30 s if a subnet runs for the first time.
        clock_ms: returns the time in ms. If None, the monotonic clock of the process.

    Attributes:
        table, subnets: as given.
        end_tokens: the tokens that end every answer, as the model's `generation_config` says.
        max_length: the largest number of tokens of a prompt and its answer.

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
        allow_approximate: bool = False,
        allow_recompute: bool = False,
        max_sequences: int = 16,
        max_queue: int = 1000,
        cache_tokens: int = 16_384,
        step_tokens: int = 512,
        expired: str = "drop",
        thinking: Mapping[int, float] | None = None,
        seed: int | None = None,
        watchdog_ms: float | None = None,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        from subnetact.generation.step_loop import ElasticDecoder, StepLoop

        self.subnets = supernet.space.distinct(subnets, "a generator")
        decoder = ElasticDecoder(supernet, self.subnets, allow_approximate, allow_recompute)
        self.table = table
        policy = StepPolicy(table, token_ms, thinking=thinking)
        if tuple(spec.key for spec in self.subnets) != table.subnets:
            raise ProfileMismatch("table: it is of other subnets; measure one of these with profile_steps")
        self._scheduler = StepScheduler(
            policy,
            places=max_sequences,
            step_tokens=step_tokens,
            expired=expired,
            max_queue=check_count(max_queue, "max_queue"),
            watchdog_ms=watchdog_ms,
            kinds=decoder.kinds,
        )
        if clock_ms is not None and not callable(clock_ms):
            raise PolicyError(f"clock_ms: {clock_ms!r} is no function; give one that returns the time in ms")
        self._now_ms = clock_ms or monotonic_ms
        self._vocabulary, self.end_tokens = decoder.vocabulary, decoder.end_tokens
        self._loop = StepLoop(
            decoder,
            pushed_out=self._push_out,
            sequences=max_sequences,
            cache_tokens=check_count(cache_tokens, "cache_tokens"),
            step_tokens=step_tokens,
        )
        self._seeds = random.Random(seed)
        if self._loop.longest < 2:
            self._loop.tear_down()
            raise PolicyError(
                f"cache_tokens: {cache_tokens} tokens are too few, because every kind of attention takes "
                "whole pages of the cache; give it more"
            )
        self.max_length = self._loop.longest
        self._lock = new_lock()  # of the scheduler
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subnetact-generator", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="subnetact-watchdog", daemon=True)
        hear_of_forks(self)
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
        ignore_eos: bool = False,
        min_tokens: int = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        min_accuracy: float = 0.0,
        priority: int = 0,
        logprobs: int | None = None,
        phases: Sequence[Phase | tuple[Any, ...]] = (Phase(),),
    ) -> Completion:
        """Queue a request.

        Args:
            prompt: token ids, as a list, or a tensor of one dimension.
            max_new_tokens: the largest number of tokens to generate.
            first_ms: time to the first token, in ms. If None, ten times `token_ms`.
            token_ms: time from one token to the next, in ms. If None, the generator's.
            deadline_ms: time to the last token, in ms; instead of `first_ms` and `token_ms`.
            stop: tokens that end the answer, besides `end_tokens`.
            ignore_eos: whether only `stop` and `max_new_tokens` end the answer, and `end_tokens` do not.
            min_tokens: the answer has at least this many tokens: tokens do not end it before.
            temperature: divides the logits before a token is drawn. If it is less than 1e-6, or if it,
                `top_k` and `top_p` are None, the most likely token is taken. Otherwise, None is 1.0.
            top_k: a token is drawn from this number of most likely ones. If None, from all.
            top_p: a token is drawn from the most likely ones that together have this probability.
            seed: whole number of 64 bits. The same seed, prompt and subnets give the same drawn tokens,
                whatever else is in the steps. If None, one that follows from the generator's `seed`.
            min_accuracy: minimum accuracy of the subnets that generate this answer, in percent.
            priority: below 0, the request gets a place only if no other one waits, no subnet is chosen for
                its sake while it waits, and it ends with `QueueFull` if another needs its place in the queue.
            logprobs: tell the log-probability of every generated token, and of this number of the most likely
                ones, from 0 to 20. If None, none are told.
            phases: which subnets generate which part of the answer, as `Phase`s or tuples of their fields.

        Returns:
            The completion: iterate over it, or wait for its result.

        Raises:
            InvalidRequest: the prompt is empty, too long, or has unknown tokens, or an argument is out of
                range.
            DeadlinePassed: with `expired="drop"`, by the table even the fastest subnets would need more time
                than `first_ms` for the prompt alone, or than `deadline_ms` for the prompt and the tokens that
                the answer has at least.
            QueueFull: too many requests are under way.
            BatcherClosed: the generator is closed.
        """
        tokens = _prompt(prompt, self._vocabulary)
        count = check_within(max_new_tokens, "max_new_tokens", 1)
        if len(tokens) + count > self.max_length:
            raise InvalidRequest(
                f"prompt: {len(tokens)} tokens and an answer of {count} are more than {self.max_length}, "
                "what the model and the cache hold; shorten the prompt or lower max_new_tokens"
            )
        if not isinstance(stop, Iterable):
            raise InvalidRequest(f"stop: {stop!r} is no list of tokens; give [] for none")
        if not isinstance(ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos: {ignore_eos!r:.40} is not True or False")
        parts = checked_phases(phases, self._vocabulary)
        ends = self.end_tokens.difference(phase.end for phase in parts if phase.end is not None)
        ask = TokenAsk(
            tokens,
            count,
            _deadlines(first_ms, token_ms, deadline_ms, count, self._scheduler.policy.token_ms),
            check_within(min_accuracy, "min_accuracy", 0.0, 100.0, whole=False),
            frozenset(check_within(token, "stop", 0) for token in stop) | (ends if not ignore_eos else set()),
            None if logprobs is None else check_within(logprobs, "logprobs", 0, MOST_LOGPROBS),
            _sampling(temperature, top_k, top_p, self._vocabulary),
            parts,
            least=check_within(min_tokens, "min_tokens", 0, count),
            sheddable=check_within(priority, "priority", -(2**31)) < 0,
        )
        if seed is None:
            seed = self._seeds.getrandbits(63)
        check_within(seed, "seed", -(2**63), 2**63 - 1)
        request = StepRequest(ask, draws=ask.sampling and self._loop.random_numbers(seed))
        cancel = partial(self._scheduler.cancel, request)
        completion = request.owner = Completion(request, lambda: self._do(cancel))
        self._do(partial(self._scheduler.submit, request))
        self._news.set()
        return completion

    def stats(self) -> GeneratorStats:
        """Return the counts so far."""
        scheduler, now_ms = self._scheduler, self._now_ms()
        with self._lock:
            return GeneratorStats(
                **scheduler.counts,
                steps={i: count for i, count in enumerate(scheduler.steps) if count},
                active=len(scheduler.requests),
                **scheduler.places_now(),
                cache_used=self._loop.cache_used(),
                slowdown=scheduler.policy.slowdown,
                up=self._thread.is_alive() and scheduler.closed is None and not scheduler.hangs(now_ms),
            )

    def close(self, drain: bool = True) -> None:
        """Refuse further requests, and end; requests under way are finished if `drain`, or else not.

        Those that are not end with `BatcherClosed`, and so do all if a step hangs; its thread ends with it.
        """
        error = BatcherClosed("the generator was closed before the answer was complete")
        self._do(lambda _: self._scheduler.close("", None if drain else error))
        self._news.set()
        while self._watchdog.is_alive() and self._thread is not threading.current_thread():
            if self._scheduler.hangs(self._now_ms()):
                self._do(lambda _: self._scheduler.close("", error))
                return
            self._watchdog.join(TICK_S)  # which ends behind the other thread

    def note_fork(self) -> None:
        """Refuse requests in a forked process, and end those under way: nobody answers them there."""
        why = ": its threads stayed in the process that this one was forked from; make another one here"
        self._scheduler.closed, error = why, BatcherClosed(f"the generator is closed{why}")
        for request in self._scheduler.requests.values():
            request.outcome = request.outcome or error

    # -- the loop, on its own thread ---------------------------------------------------------------

    def _run(self) -> None:
        scheduler = self._scheduler
        try:
            while True:
                scheduler.prepare(self._now_ms())
                self._do(scheduler.tick)
                try:
                    tokens = self._compute()
                except Exception as error:
                    if scheduler.step is None or not scheduler.step.parts:
                        raise
                    logger.warning("a step failed, and with it its requests: %s", error)
                    self._do(partial(scheduler.failed, error))
                    continue
                if tokens is not None:
                    self._do(partial(scheduler.step_done, tokens))
                    continue
                with self._lock:
                    scheduler.prepare(math.inf)
                    if scheduler.closed is not None and not scheduler.requests:
                        return
                self._news.wait(TICK_S if scheduler.requests else IDLE_S)
                self._news.clear()
        except BaseException as error:
            logger.exception("the generator ends")
            cause = f"its loop raised {type(error).__name__}: {error}"
            failed = BatchFailed(f"the generator ends, because {cause}")
            self._do(lambda _: scheduler.close(f": {cause}", failed))
        finally:
            self._loop.tear_down()

    def _compute(self) -> list[int] | None:
        """Compute the next step, and return the tokens of its answered requests; None if nobody is in it."""
        loop, scheduler = self._loop, self._scheduler
        with computing():
            loop.refresh()
            with self._lock:
                step = scheduler.candidates(self._now_ms())
            loop.reserve(step)
            with self._lock:
                begun = scheduler.begin(self._now_ms())
            return None if begun is None else loop.compute(begun)

    def _watch(self) -> None:
        """Look for a step that hangs, on a thread that computes nothing."""
        while self._thread.is_alive():
            self._do(self._scheduler.tick)
            self._thread.join(TICK_S)

    def _push_out(self, request: StepRequest) -> None:
        with self._lock:
            self._scheduler.push_out(request)

    def _do(self, act: Callable[[float], list[StepRequest]]) -> None:
        """Let the scheduler act now, and tell the clients of the requests that it changed."""
        with self._lock:
            changed = act(self._now_ms())
        tell([request.owner for request in changed])


def _prompt(given: Any, vocabulary: int) -> list[int]:
    """Return the tokens of a prompt, or raise InvalidRequest if the model cannot know one."""
    tokens = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise InvalidRequest(
            f"prompt: expected a list of token ids, got {type(given).__name__}; encode text with a tokenizer"
        )
    if not tokens:
        raise InvalidRequest("prompt: it is empty; give at least one token, such as one that begins texts")
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise InvalidRequest(
                f"prompt: token {position} is {token!r}; the model knows the tokens 0 to {vocabulary - 1}"
            )
    return list(tokens)


def _sampling(temperature: Any, top_k: Any, top_p: Any, vocabulary: int) -> dict[str, Any] | None:
    """Return how tokens are drawn, or None if the most likely ones are taken."""
    if temperature is None and top_k is None and top_p is None:
        return None
    heat = 1.0 if temperature is None else check_within(temperature, "temperature", 0.0, 100.0, whole=False)
    if heat < COLDEST:
        return None
    nucleus = 1.0 if top_p is None else check_within(top_p, "top_p", 0.0, 1.0, whole=False)
    likely = vocabulary if top_k is None else min(check_within(top_k, "top_k", 1), vocabulary)
    return {"temperature": heat, "top_k": likely, "top_p": max(nucleus, 1e-6)}


def _deadlines(first_ms: Any, token_ms: Any, total_ms: Any, tokens: int, usual_ms: float) -> TokenDeadlines:
    """Return when the tokens of a request are due."""
    if total_ms is not None:
        if first_ms is not None or token_ms is not None:
            raise InvalidRequest("deadline_ms: give it alone, or first_ms and token_ms")
        return TokenDeadlines.total(check_deadline(total_ms), tokens, usual_ms)
    each = usual_ms if token_ms is None else check_deadline(token_ms, "token_ms")
    return TokenDeadlines(10.0 * each if first_ms is None else check_deadline(first_ms, "first_ms"), each)
