"""Layer blocks: equal to the whole subnet bit for bit, as views, fused programs and graphs."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest
import torch
from small_families import small_inputs, small_supernet
from torch import Tensor, nn

import subnetact
from subnetact import Engine
from subnetact.digits import new_digits_supernet
from subnetact.engine.cuda_graphs import Captured
from subnetact.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def digits_engine(count: int = 6, **options: Any) -> Engine:
    supernet = new_digits_supernet()
    rng = Random(0)
    specs = [supernet.space.largest(), supernet.space.smallest()]
    while len(specs) < count:
        spec = supernet.space.sample(rng)
        specs += [spec] if spec not in specs else []
    options = {"allow_uncalibrated": True, "example": torch.zeros(1, 1, 16, 16)} | options
    return Engine(supernet, specs, **options)


def through(engine: Engine, subnet: int, x: Tensor) -> Tensor:
    """Return what a batch gives block by block."""
    run = engine.start(subnet, list(x), len(x))
    while not run.step():
        pass
    return torch.stack(list(run.outputs()))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("budget", [0.0, 256.0])
def test_blocks_equal_the_whole_subnet_bit_for_bit(x: Tensor, budget: float) -> None:
    engine = digits_engine(memory_budget_mb=budget)
    for subnet in engine.ids:
        if budget:
            assert engine.pin(subnet)
        assert torch.equal(through(engine, subnet, x), engine(x, subnet))
        run = engine.start(subnet, list(x), 8)
        depth = sum(engine.specs[subnet]["depth"])
        assert run.blocks == 1 + depth  # the stem, and one block per layer that is kept
        assert not run.step()
        while not run.step(2):
            pass
        assert torch.equal(torch.stack(list(run.outputs())), engine(x, subnet))


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3", "autoformer"])
def test_blocks_of_families(family: str) -> None:
    supernet = small_supernet(family)
    (x,) = small_inputs(family, 3).values()
    engine = Engine(
        supernet,
        [supernet.space.largest(), supernet.space.smallest()],
        allow_uncalibrated=True,
        example=x[:1],
    )
    for subnet in engine.ids:
        assert engine.start(subnet, list(x), 3).blocks > 1
        assert torch.equal(through(engine, subnet, x), torch.stack(list(engine.run(subnet, list(x), 3))))


def test_a_network_that_cannot_be_cut_is_one_block(x: Tensor) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if float(x.sum()) > -1e9 else x

    space = subnetact.SubnetSpace(
        "odd", [subnetact.Axis.uniform("w", ["a"], (4, 8))], lambda values: {"w": values["w"][0]}
    )
    slice_on = subnetact.WeightSlice.on
    supernet = subnetact.insert_(Odd(), space, {"a": slice_on(out="w"), "b": slice_on(in_="w")})
    engine = Engine(supernet, [supernet.space.largest()], example=torch.zeros(1, 4))
    x = torch.randn(3, 4)
    assert engine.start(0, list(x), 3).blocks == 1
    assert torch.equal(through(engine, 0, x), engine(x, 0))


def test_the_first_batch_of_an_engine_without_example_is_one_block_and_its_example(x: Tensor) -> None:
    engine = digits_engine(2, example=None)
    assert engine.start(0, list(x), 5).blocks == 1
    with pytest.raises(InvalidRequest, match="no input yet"):
        engine.sample  # noqa: B018 - nothing has run
    first = through(engine, 0, x)
    assert torch.equal(engine.sample, x[0])
    assert engine.start(0, list(x), 5).blocks > 1
    assert torch.equal(through(engine, 0, x), first)


def test_blocks_follow_new_weights(x: Tensor) -> None:
    engine = digits_engine(2)
    before = through(engine, 0, x)
    other = new_digits_supernet()
    engine.supernet.load_state_dict(other.state_dict())
    after = through(engine, 0, x)
    assert not torch.equal(after, before)
    assert torch.equal(after, engine(x, 0))


def test_blocks_run_in_threads_beside_each_other(x: Tensor) -> None:
    engine = digits_engine(4)
    expected = {i: engine(x, i) for i in engine.ids}
    wrong: list[int] = []

    def work(subnet: int) -> None:
        for _ in range(5):
            if not torch.equal(through(engine, subnet, x), expected[subnet]):
                wrong.append(subnet)

    threads = [threading.Thread(target=work, args=(i,)) for i in engine.ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class EagerGraphs:
    """Stands in for CUDA graphs: a replay runs the call again."""

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, call: Any, x: Tensor) -> Captured:
        self.captured += 1
        output = call(x).clone()

        def replay() -> None:
            output.copy_(call(x))

        return Captured(replay, output, output.nbytes)

    def run(self, work: Any) -> Tensor:
        return work()


def test_graphs_are_captured_per_block(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EagerGraphs()
    monkeypatch.setattr("subnetact.engine.engine.graph_backend", lambda _: backend)
    engine = digits_engine(2, memory_budget_mb=256.0, backend="views")
    for _ in range(2):
        assert torch.allclose(through(engine, 0, x), engine(x, 0), rtol=0, atol=5e-5)
    assert backend.captured == engine.start(0, list(x), 5).blocks + 1  # and the whole subnet once
    engine.remove(0)


@pytest.mark.parametrize("budget", [0.0, 256.0])
def test_a_run_never_joins_two_checkpoints(x: Tensor, budget: float) -> None:
    engine = digits_engine(1, memory_budget_mb=budget)
    expected = engine(x, 0)
    run = engine.start(0, list(x), 5)
    run.step(7)
    engine.supernet.load_state_dict({n: 2 * t for n, t in engine.supernet.state_dict().items()})
    engine.start(0, list(x), 5).step(99)
    run.step(99)
    assert torch.equal(torch.stack(list(run.outputs())), expected)
