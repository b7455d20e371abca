"""Weights move to shared memory once, and no change of them is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretrained_network import BATCHES, pretrained, supernet_of

from subnetact import Engine, Supernet
from subnetact.errors import StaleWeights
from subnetact.workers import engine_snapshot
from subnetact.workers.engine_snapshot import EngineSnapshot, unpack


@pytest.fixture
def engine() -> Engine:
    supernet = supernet_of(pretrained())
    supernet.adopt_statistics()
    return Engine(supernet, [supernet.space.largest()], example=BATCHES[0][:1], memory_budget_mb=0)


def during_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any]) -> None:
    """Let another thread change the weights when a storage is about to be copied."""
    place = engine_snapshot._storage

    def placed(*args: Any) -> Any:
        change()
        return place(*args)

    monkeypatch.setattr(engine_snapshot, "_storage", placed)


def bias(supernet: Supernet) -> torch.nn.Parameter:
    return supernet.network[0].bias  # type: ignore[no-any-return, index, union-attr]


def test_blueprints_of_one_supernet_share_its_memory(engine: Engine) -> None:
    other = Engine(engine.supernet, engine.specs, example=BATCHES[0][:1], memory_budget_mb=0)
    first = EngineSnapshot(engine)
    _, states = first.package()
    moved = engine.supernet.generation.number
    second = EngineSnapshot(other)
    assert engine.supernet.generation.number == moved
    assert first.is_current(states)
    for one in (first, second):
        runner, _, (supernet,) = unpack(one.package()[0])
        with torch.no_grad():
            bias(engine.supernet).add_(1)
        assert torch.equal(bias(supernet), bias(engine.supernet))
        assert torch.equal(runner(BATCHES[0], 0), engine(BATCHES[0], 0))


def test_weights_that_cannot_move_are_sent_from_where_they_are() -> None:
    with torch.inference_mode():
        supernet = supernet_of(pretrained())
    supernet.adopt_statistics()
    engine = Engine(supernet, [supernet.space.largest()], example=BATCHES[0][:1], memory_budget_mb=0)
    EngineSnapshot(engine)  # moves the statistics
    number = supernet.generation.number
    snapshot = EngineSnapshot(engine)
    assert supernet.generation.number == number
    runner, _, _ = unpack(snapshot.package()[0])
    assert torch.equal(runner(BATCHES[0], 0), engine(BATCHES[0], 0))


def test_a_change_while_weights_are_copied_is_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, changes = bias(engine.supernet).detach() + 3, iter(range(3))

    @torch.no_grad()
    def change() -> None:
        if next(changes, None) is not None:
            bias(engine.supernet).add_(1)

    during_copies(monkeypatch, change)
    _, _, (supernet,) = unpack(EngineSnapshot(engine).package()[0])
    assert torch.equal(bias(engine.supernet), expected)
    assert torch.equal(bias(supernet), expected)


def test_weights_that_change_all_the_time_are_left_where_they_are(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = engine.supernet.generation.number

    @torch.no_grad()
    def change() -> None:
        bias(engine.supernet).add_(1)

    during_copies(monkeypatch, change)
    with pytest.raises(StaleWeights, match="between two steps of the training"):
        EngineSnapshot(engine)
    assert engine.supernet.generation.number == number
