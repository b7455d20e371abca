"""Answers, and the way an answer gets from a worker's thread to the client that waits."""

# Annotations are not postponed here, so that tools can read the fields of the named tuples elsewhere.

import asyncio
import concurrent.futures
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from subnetact.files.fork import new_lock
from subnetact.serving.scheduling.request import Request


class Answer(NamedTuple):
    """The answer to one request.

    Attributes:
        output: the runner's output for this input.
        subnet: id of the subnet that ran.
        accuracy: profiled accuracy of that subnet, in percent.
        latency_ms: time from the submission to the answer, in ms.
        met: whether the answer came within the deadline.
        batch_size: the planned batch size (a compiled engine pads to it).
        waited_ms: time from the submission to the start of the batch that answered, in ms.
    """

    output: Any
    subnet: int
    accuracy: float
    latency_ms: float
    met: bool
    batch_size: int
    waited_ms: float = 0.0


class AnswerFuture(concurrent.futures.Future[Answer]):
    """The future that `Batcher.submit` returns. Cancelling the future withdraws the request."""

    def cancel(self) -> bool:
        """Cancel the request: it leaves the queue, or its answer is discarded if it already runs.

        Returns:
            Whether the request is cancelled; False if it already had its outcome.
        """
        if not super().cancel():
            return False
        withdraw = self.__dict__.pop("withdraw", None)  # only the first of several calls finds the callback
        if withdraw is not None:
            withdraw()
            self.set_running_or_notify_cancel()
        return True

    def on_cancel(self, withdraw: Callable[[], object]) -> None:
        """Set the function that `cancel` calls, which takes the request off the queue."""
        self.__dict__["withdraw"] = withdraw


_log = logging.getLogger(__name__)
_mailboxes_lock = new_lock()
#: a request, and either its answer or its error
Outcome = tuple[Request, Answer | None, BaseException | None]


def settle(outcomes: Iterable[Outcome]) -> None:
    """Deliver outcomes to the clients: directly to threads, and with one call to every event loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        request = outcome[0]
        request.x = None  # a client that keeps the future must not keep the input alive
        loop = request.loop
        if loop is not None:
            by_loop[loop].append(outcome)
            continue
        try:
            _resolve(outcome)
        except BaseException:  # a client's callback raised; the other clients must still get their answers
            _log.exception("a callback of a request's future raised")
    for loop, settled in by_loop.items():
        post(loop, _resolve, settled)


def post(loop: asyncio.AbstractEventLoop, deliver: Callable[[Any], object], items: list[Any]) -> bool:
    """Let an event loop deliver items, with one call for all that is on its way; return whether it lives."""
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        with _mailboxes_lock:
            mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
    return mailbox.post(deliver, items)


def _resolve(outcome: Outcome) -> None:
    """Give the future of a request its outcome; nothing happens if the client has cancelled meanwhile."""
    request, answer, error = outcome
    future, request.future = request.future, None
    try:
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)
    except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
        return


class _Mailbox:
    """What is on its way to one event loop, which is woken once for all that it has not seen yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posted: deque[tuple[Callable[[Any], object], list[Any]]] = deque()
        self._woken = False

    def post(self, deliver: Callable[[Any], object], items: list[Any]) -> bool:
        self._posted.append((deliver, items))
        loop = self._loop()
        if self._woken or loop is None:
            return loop is not None
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the loop was closed, so nobody waits for these answers any more
            self._posted.clear()
            self._woken = False
            return False
        return True

    def _empty(self) -> None:
        self._woken = False  # reset before the queue is read, so that later outcomes wake the loop again
        while self._posted:
            deliver, items = self._posted.popleft()
            for item in items:
                deliver(item)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()
