"""Programs and copies follow the weights; where version counters show nothing, after refresh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.packed_linear import SMALLEST_WIDTH
from subnetact.operators import ElasticKernel, KernelConv2d
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def make() -> Supernet:
    torch.manual_seed(0)
    network = nn.Sequential(KernelConv2d(4, [3, 5], matrices=True), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    axes = [subnetact.Axis.uniform(name, ["all"], c) for name, c in (("k", (3, 5)), ("w", (2, 4)))]
    space = subnetact.SubnetSpace("found", axes, lambda v: {"k": v["k"][0], "w": v["w"][0], "c": 4})
    elastic = {
        "0": ElasticKernel.on(channels="c", kernel="k"),
        "1": subnetact.WeightSlice.on(out="w"),
        "2": subnetact.WeightSlice.on(in_="w"),
    }
    return subnetact.insert_(network, space, elastic).eval()


def through_data(parameter: Tensor) -> None:
    parameter.data.mul_(1.2)


def through_numpy(parameter: Tensor) -> None:
    parameter.detach().numpy()[...] *= 1.2


def new_storage(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.2


def moved_by_set(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.set_(parameter.detach() * 1.2)  # type: ignore[call-overload]


@pytest.mark.parametrize("change", [through_data, through_numpy, new_storage, moved_by_set])
@pytest.mark.parametrize("budget", [0, 64])
def test_changes_without_a_trace_are_followed_after_refresh(
    change: Callable[[Tensor], None], budget: int
) -> None:
    supernet = make()
    spec = supernet.space.smallest()
    engine = subnetact.Engine(supernet, [spec], example=X[:1], memory_budget_mb=budget)
    assert bool(engine.pin(0)) == (budget > 0)
    engine(X, 0), supernet(X, subnet=spec)
    for parameter in supernet.parameters():
        change(parameter)
    supernet.refresh()
    expected = supernet.extract(spec)(X)
    for run in (lambda: engine(X, 0), lambda: supernet(X, subnet=spec)):
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def test_weights_that_were_made_in_inference_mode_are_followed_after_refresh() -> None:
    with torch.inference_mode():
        supernet = make()
    spec = supernet.space.smallest()
    engine = subnetact.Engine(supernet, [spec], example=X[:1], memory_budget_mb=64)
    assert engine.pin(0)
    with torch.inference_mode():
        for parameter in supernet.parameters():
            parameter.mul_(1.2)
    supernet.refresh()
    torch.testing.assert_close(engine(X, 0), supernet.extract(spec)(X), rtol=1e-4, atol=1e-4)


class Buffered(nn.Module):
    """Reads buffers, from which a fused program computes a constant.

    One linear layer is so wide that its weight is packed on CPUs of every maker, without AVX-512 as well.
    """

    def __init__(self) -> None:
        super().__init__()
        wide = SMALLEST_WIDTH
        self.a, self.b, self.c = nn.Linear(16, wide), nn.Linear(wide, wide), nn.Linear(wide, 8)
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("index", torch.zeros(wide, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x))) + self.table[self.index]))


def buffered() -> tuple[Supernet, subnetact.Engine]:
    torch.manual_seed(0)
    axis = subnetact.Axis.uniform("w", ["all"], (32, SMALLEST_WIDTH))
    space = subnetact.SubnetSpace("buffered", [axis], lambda v: {"w": v["w"][0]})
    elastic = {"a": subnetact.WeightSlice.on(out="w"), "b": subnetact.WeightSlice.on(in_="w")}
    supernet = subnetact.insert_(Buffered().eval(), space, elastic)
    engine = subnetact.Engine(supernet, [space.largest()], example=torch.zeros(1, 16), memory_budget_mb=64)
    return supernet, engine


def test_fused_programs_follow_buffers() -> None:
    supernet, engine = buffered()
    spec, x = engine.specs[0], torch.randn(4, 16)
    for name, value in (("table", 2.0), ("index", 3)):
        assert engine.pin(0)
        with torch.no_grad():
            supernet.network.table[3] = 5.0
            supernet.network.get_buffer(name).fill_(value)
        torch.testing.assert_close(engine(x, 0), supernet.extract(spec)(x), rtol=1e-4, atol=1e-4)
    assert engine.pin(0)
    supernet.network.table.data.add_(1.0)
    supernet.refresh()
    torch.testing.assert_close(engine(x, 0), supernet.extract(spec)(x), rtol=1e-4, atol=1e-4)


def test_a_change_while_a_program_is_kept_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet, _ = buffered()
    spec, limit, x = supernet.space.largest(), FusedProgram.limit, torch.randn(4, 16)

    def training(*args: object) -> None:
        """Stand for another thread that trains when the program is complete and not kept yet."""
        with torch.no_grad():
            for parameter in supernet.parameters():
                parameter.mul_(1.5)
        limit(*args)
        complete.append(True)

    complete: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(FusedProgram, "limit", training)
        engine = subnetact.Engine(supernet, [spec], example=torch.zeros(1, 16), memory_budget_mb=64)
        engine.pin(0)
    assert complete, "no program was made"
    expected = supernet.extract(spec)(x)
    torch.testing.assert_close(engine(x, 0), expected, rtol=1e-4, atol=1e-4)


def test_a_program_is_not_lost_if_weights_change_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet, engine = buffered()
    spec, x, forward = engine.specs[0], torch.randn(4, 16), Buffered.forward

    def training(network: Buffered, x: Tensor) -> Tensor:
        """Stand for another thread that trains whenever the network runs."""
        with torch.no_grad():
            supernet.network.table.add_(1.0)
        return forward(network, x)

    def is_made_by_the_next_call() -> None:
        assert engine.stats().fused_bytes == 0
        torch.testing.assert_close(engine(x, 0), supernet.extract(spec)(x), rtol=1e-4, atol=1e-4)
        assert engine.stats().fused_bytes > 0
        assert not engine.stats().unfused

    with monkeypatch.context() as patch:
        patch.setattr(Buffered, "forward", training)
        engine = subnetact.Engine(supernet, [spec], example=torch.zeros(1, 16), memory_budget_mb=64)
        assert engine.pin(0)
    is_made_by_the_next_call()
    with monkeypatch.context() as patch:
        patch.setattr(Buffered, "forward", training)
        supernet.subnet(spec)(x), engine(x, 0)
    is_made_by_the_next_call()
