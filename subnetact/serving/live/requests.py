"""What goes into the batcher and what comes out: requests, answers, and how they reach who waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol

__all__ = ["Answer", "AnswerFuture", "Decided", "Outcome", "Request", "Runner", "settle"]


class Runner(Protocol):
    """What the batcher needs from an engine. Called from worker threads.

    Optional further members, honoured where present: `fingerprint` (compared with the table's stamp),
    `enter_worker(threads)` (called once in every worker thread; needed for `threads_per_worker`).
    """

    @property
    def keys(self) -> Sequence[str]:
        """Subnet keys in id order."""
        ...

    def check(self, x: Any) -> None:
        """Refuse one input at the door by raising `InvalidRequest`.

        With `check_finite` it is called as `check(x, finite=True)`.
        """
        ...

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        """One output per input; `batch_size` >= len(inputs) is the size to pad to."""
        ...


class Answer(NamedTuple):
    """The result of one request.

    Attributes:
        output: what the runner returned for this input.
        subnet: id of the subnet that ran.
        accuracy: profiled accuracy of that subnet, percent.
        latency_ms: from submission to answer.
        met: whether that was within the deadline.
        batch_size: the size the batch was padded to.
    """

    output: Any
    subnet: int
    accuracy: float
    latency_ms: float
    met: bool
    batch_size: int


class Decided(NamedTuple):
    """One decision, for `on_decision`: k requests of `queued` run on `subnet`, padded to `batch_size`."""

    t_ms: float
    queued: int
    slack_ms: float
    subnet: int
    batch_size: int
    k: int


class Request:
    """One accepted input and who waits for it: an event loop, or (loop None) threads.

    Attributes:
        open: whether it has no outcome yet; set to False exactly once, under the batcher's lock.
        retried: whether a worker hung or died over it before.
    """

    __slots__ = (
        "accepted_ms",
        "deadline_ms",
        "floor",
        "future",
        "loop",
        "open",
        "priority",
        "retried",
        "x",
    )

    def __init__(
        self,
        x: Any,
        accepted_ms: float,
        deadline_ms: float,
        floor: float,
        priority: int,
        future: Any,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.x = x
        self.accepted_ms = accepted_ms
        self.deadline_ms = deadline_ms
        self.floor = floor
        self.priority = priority
        self.future = future
        self.loop = loop
        self.open = True
        self.retried = False


class AnswerFuture(concurrent.futures.Future[Answer]):
    """The future of `submit`: cancelling it also takes the request off the queue."""

    def cancel(self) -> bool:
        """Cancel; an answer that is being computed is discarded. False when it is answered already."""
        if not super().cancel():
            return False
        withdraw = self.__dict__.pop("withdraw", None)  # by the first of several who cancel
        if withdraw is not None:
            withdraw()
            self.set_running_or_notify_cancel()
        return True

    def on_cancel(self, withdraw: Callable[[], object]) -> None:
        """Call `withdraw` when this is cancelled."""
        self.__dict__["withdraw"] = withdraw


_log = logging.getLogger(__name__)
_making = Lock()
Outcome = tuple[Request, Answer | None, BaseException | None]


def settle(outcomes: Iterable[Outcome]) -> None:
    """Hand outcomes to their waiters: threads directly, each event loop in one call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        request, answer, error = outcome
        request.x = None  # who keeps the future need not keep the input
        loop = request.loop
        if loop is not None:
            waiting = by_loop.get(loop)
            if waiting is None:
                by_loop[loop] = [outcome]
            else:
                waiting.append(outcome)
            continue
        future, request.future = request.future, None
        try:
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            continue  # cancelled meanwhile
        except BaseException:  # a callback of the client; the others shall get their answers
            _log.exception("a callback of a request's future raised")
    for loop, settled in by_loop.items():
        _mailbox_of(loop).post(settled)


class _Mailbox:
    """Outcomes on their way to one event loop; it is woken once for all that arrive until it looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posted: deque[list[Outcome]] = deque()
        self._woken = False

    def post(self, outcomes: list[Outcome]) -> None:
        self._posted.append(outcomes)
        loop = self._loop()
        if self._woken or loop is None:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the loop was closed, and its waiters with it
            self._posted.clear()
            self._woken = False

    def _empty(self) -> None:
        self._woken = False  # before looking: what is posted from now on wakes the loop again
        while self._posted:
            for request, answer, error in self._posted.popleft():
                future, request.future = request.future, None
                if future.done():
                    continue
                if error is None:
                    future.set_result(answer)
                else:
                    future.set_exception(error)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()


def _mailbox_of(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        with _making:
            mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
    return mailbox
