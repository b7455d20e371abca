"""The delivery of outcomes to clients that wait on an event loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from subnetact.serving.live.answers import Answer, settle
from subnetact.serving.scheduling.request import Ask, Request


class Loop:
    """A stand-in for an event loop that runs its callbacks when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.closed = False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(call)

    def look(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def outcome(loop: Any, error: Exception | None = None) -> tuple[Any, Future[Any]]:
    future: Future[Any] = Future()
    request = Request(Ask(1.0), 0.0, "x")
    request.future, request.loop = future, loop
    return (request, None if error else Answer("y", 0, 70.0, 1.0, True, 1), error), future


def test_a_loop_is_woken_once_until_it_looks() -> None:
    loop = Loop()
    first, a = outcome(loop)
    second, b = outcome(loop, ValueError("no"))
    settle([first])
    settle([second])
    assert len(loop.calls) == 1
    assert not a.done()
    loop.look()
    assert a.result(0).output == "y"
    assert isinstance(b.exception(0), ValueError)
    third, c = outcome(loop)
    left, d = outcome(loop)
    assert d.cancel(), "who no longer waits is left alone"
    settle([left, third])
    assert len(loop.calls) == 1
    loop.look()
    assert c.done()


def test_what_is_posted_while_the_loop_looks_wakes_it_again() -> None:
    loop = Loop()
    first, a = outcome(loop)
    second, b = outcome(loop)
    a.add_done_callback(lambda _: settle([second]))
    settle([first])
    loop.look()
    assert b.done() or len(loop.calls) == 1
    loop.look()
    assert b.done()


def test_each_loop_gets_its_own_and_one_that_is_closed_keeps_nothing() -> None:
    open_loop, closed = Loop(), Loop()
    closed.closed = True
    mine, a = outcome(open_loop)
    for _ in range(3):
        lost, b = outcome(closed)
        seen = weakref.ref(b)
        settle([lost, mine] if mine[0].future else [lost])
        assert not b.done()
        del lost, b
        assert seen() is None
        open_loop.look()
    assert a.done()
    gone = weakref.ref(closed)
    del closed
    assert gone() is None
