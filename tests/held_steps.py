"""A clock that tests move, and a model that computes a step when a test lets it: generation without luck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from subnetact.generation import Generator, StepPolicy


class Clock:
    """A clock that a test moves, in ms."""

    def __init__(self) -> None:
        self.now_ms = 1000.0

    def __call__(self) -> float:
        return self.now_ms


class Gate:
    """Stops a generator in front of every step until a test lets it go on."""

    def __init__(self, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward, self.entered, self.free = generator._loop._decoder.forward, 0, threading.Semaphore(0)
        self.changed = threading.Condition()
        monkeypatch.setattr(generator._loop._decoder, "forward", self)

    def __call__(self, **arguments: Any) -> Any:
        with self.changed:
            self.entered += 1
            self.changed.notify_all()
        assert self.free.acquire(timeout=60)
        return self.forward(**arguments)

    def wait(self, steps: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.entered >= steps, 60)


def steer(policy: StepPolicy, choose: Callable[[], int]) -> None:
    """Let a function choose the subnet of every step."""

    def chosen(*size: float, **facts: Any) -> int:
        policy.lifted, policy.tabled_ms = False, 1.0
        return choose()

    policy.choose = chosen  # type: ignore[method-assign, assignment]
