"""Nobody waits for what takes long: views, loads and calls go on while a forward of a check is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subnetact import Axis, Engine, Supernet, insert_
from subnetact.operators import WeightSlice
from subnetact.space import SubnetSpace
from subnetact.supernet import supernet as supernet_module

X = torch.randn(2, 3, 8, 8)


class Blocking(nn.Module):
    """A network whose forward stops in the thread `stopped`, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3)
        self.stopped: set[int] = set()
        self.inside, self.free = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() in self.stopped:
            self.inside.set()
            assert self.free.wait(60)
        return self.b(self.a(x))


def blocking() -> tuple[Supernet, Blocking]:
    space = SubnetSpace("s", [Axis.uniform("w", ["a"], [2, 4, 8])], lambda v: {"w": v["w"][0]})
    network = Blocking().eval()
    return insert_(network, space, {"a": WeightSlice.on(out="w"), "b": WeightSlice.on(in_="w")}), network


def others(supernet: Supernet) -> list[Any]:
    """Do what must not wait."""
    spec = supernet.space.smallest()
    state = {name: t + 1 for name, t in supernet.state_dict().items()}
    return [supernet.private_view(spec), supernet.load_state_dict(state), supernet.subnet(spec)(X)]


def run_beside(act: Callable[[], Any], network: Blocking, other: Callable[[], Any]) -> None:
    """Do something while a forward of `act`, on another thread, does not end."""
    errors: list[BaseException] = []

    def stopped() -> None:
        network.stopped.add(threading.get_ident())
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stopped, daemon=True), threading.Thread(target=other, daemon=True)]
    threads[0].start()
    assert network.inside.wait(60)
    threads[1].start()
    threads[1].join(60)
    waited = threads[1].is_alive()
    network.free.set()
    for thread in threads:
        thread.join(60)
    assert not waited
    assert errors == []


@pytest.mark.parametrize("name", ["check", "check_once"])
def test_others_go_on_during_a_check_which_holds_for_the_weights_that_it_began_with(name: str) -> None:
    supernet, network = blocking()
    run_beside(lambda: getattr(supernet, name)(X), network, lambda: others(supernet))


def test_others_go_on_during_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet, network = blocking()
    engine, original = Engine(supernet, [supernet.space.smallest()], example=X), supernet.fingerprint()
    usual, view = supernet_module.fingerprint_of, supernet.subnet(supernet.space.largest())

    def slow(space: str, state: Any) -> str:
        view(X)
        return usual(space, state)

    monkeypatch.setattr(supernet_module, "fingerprint_of", slow)
    run_beside(lambda: engine.fingerprint, network, lambda: others(supernet))
    assert engine.fingerprint == supernet.fingerprint() != original


def test_other_calls_run_views_while_a_program_is_made() -> None:
    supernet, network = blocking()
    engine = Engine(supernet, [*supernet.space.enumerate()], example=X, memory_budget_mb=64)
    assert all(engine.pin(subnet) for subnet in engine.ids)
    supernet.load_state_dict({name: t + 1 for name, t in supernet.state_dict().items()})
    outputs: list[Tensor] = []
    run_beside(lambda: engine(X, subnet=0), network, lambda: outputs.append(engine(X, subnet=1)))
    torch.testing.assert_close(outputs[0], supernet(X, subnet=engine.specs[1]), rtol=1e-3, atol=1e-4)
    assert engine.is_fused(1)
