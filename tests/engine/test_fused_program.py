"""Fused programs and layer blocks equal the view, with NaN and infinite values, and follow changes."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elastic_networks import in_threads, one_width
from small_families import small_inputs, small_supernet
from torch import Tensor, nn

from subnetact import Engine
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.packed_linear import SMALLEST_WIDTH
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
INF = float("inf")


STRANGE = (float("nan"), INF, -INF)


def engine_of(network: nn.Module, sample: Tensor, parts: dict | None = None) -> Engine:
    for norm in network.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(norm.running_mean, 0, 0.2), nn.init.uniform_(norm.running_var, 0.5, 1.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias, 0, 0.2)
    supernet = one_width(network, parts or {})
    specs = [supernet.space.smallest(), supernet.space.largest()][: 2 if parts else 1]
    options = {"memory_budget_mb": 256, "allow_uncalibrated": True}
    return Engine(supernet, specs, example=sample[None], **options)


def agree(engine: Engine, x: Tensor, subnet: int = 0) -> Tensor:
    """Check that a subnet gives the view's output, NaN and infinite values included; return the output."""
    with torch.inference_mode():
        expected = engine.supernet.subnet(engine.specs[subnet])(x)
    output = engine(x, subnet)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    return output


class Activations(nn.Module):
    """Every operation that a program merges: activations, additions, pools, depthwise convolutions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.last = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.pool = nn.MaxPool2d(2) if "max" in kind else nn.AvgPool2d(2)
        acts = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hardswish": nn.Hardswish, "silu": nn.SiLU}
        self.act = acts[kind.split()[0]]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        z = self.act(self.deep(y))
        if "added" in self.kind:
            z = self.act(self.last(z) + y)
        return self.pool(z)


@pytest.mark.parametrize("act", ["relu", "relu6", "hardswish", "silu"])
@pytest.mark.parametrize("rest", ["max", "mean added"])
def test_strange_values_stay_where_the_view_has_them(act: str, rest: str) -> None:
    example = torch.randn(3, 8, 8)
    parts = {"first": "out", "norm": "norm", "deep": "out", "last": "both"}
    engine, rng = engine_of(Activations(f"{act} {rest}"), example, parts), random.Random(0)
    assert all(engine.pin(i) for i in range(2))
    agree(engine, torch.randn(2, 3, 8, 8))
    for value, channel, subnet in itertools.product(STRANGE, range(3), range(2)):
        x = torch.randn(2, 3, 8, 8)
        x[1, channel, rng.randrange(8), rng.randrange(8)] = value
        output = agree(engine, x, subnet)
        assert output[0].isfinite().all()
        if value != value:
            assert output[1].isnan().any()
            assert not output[1].isnan().all()
    assert all(engine.is_fused(i) for i in range(2))


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) if x.sum() > -1e9 else x


def test_what_cannot_be_fused_is_said_in_one_line_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    plain, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), torch.randn(4, 3, 2, 2)
    for network, why in ((plain, "nothing to fuse"), (Deciding(), "control flow")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "subnetact"):
            engine = engine_of(network, x[0])
            assert not engine.pin(0)
            pinned = engine.pin(0)
        assert not pinned
        assert why in pinned.reason
        assert "\n" not in pinned.reason
        assert engine.stats().unfused == {0: pinned.reason}
        assert len([r for r in caplog.records if "runs as a view" in r.message]) == 1
        agree(engine, x)
    for options, words in (
        ({"memory_budget_mb": 0}, "memory_budget_mb"),
        ({"memory_budget_mb": 64, "backend": "views"}, "backend='views'"),
    ):
        assert words in Engine(engine.supernet, engine.specs, **options).pin(0).reason
    assert capfd.readouterr().err == ""


class Standardised(nn.Conv2d):
    """A convolution with a forward of its own, which standardises the weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("budget", [0, 64])
def test_the_forward_of_a_derived_convolution_is_kept(kernel: int, budget: int) -> None:
    network = nn.Sequential(Standardised(3, 8, kernel), nn.ReLU(), nn.Conv2d(8, 8, 1))
    supernet = one_width(network, {})
    spec, x = supernet.space.smallest(), torch.randn(2, 3, 8, 8)
    engine = Engine(supernet, [spec], example=x[:1], memory_budget_mb=budget)
    assert bool(engine.pin(0)) == (budget > 0)
    torch.testing.assert_close(engine(x, 0), supernet(x, subnet=spec), rtol=1e-4, atol=1e-5)


class Functional(nn.Module):
    """A network whose forward reads a weight of its own and those of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.inner, self.read = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(F.conv2d(x, self.weight).relu()).relu()
        return F.conv2d(x, self.read.weight, self.read.bias).mean((2, 3))


def test_weights_of_layers_that_are_read_and_not_called() -> None:
    x = torch.randn(2, 3, 12, 12)
    engine = engine_of(Functional(), x[0], {"inner": "out", "read": "in"})
    for i in engine.ids:
        pinned = engine.pin(i)
        assert pinned, pinned.reason
        agree(engine, x, i)


TIMM = ("resnetv2_50", "mobilenetv3_small_050", "convnext_atto")


@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm_are_fused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Their norms are derived, and activate; convnext has parameters of its own."""
    timm = pytest.importorskip("timm")
    network = timm.create_model(name, pretrained=False, num_classes=8)
    engine = engine_of(network, torch.randn(3, 64, 64))
    pinned = engine.pin(0)
    assert pinned, pinned.reason
    program = FusedProgram(private_view(engine.supernet, engine.specs[0])[0])
    norms_remain = name == "resnetv2_50"  # They stand before their convolutions.
    assert ("batch_norm" in str(program.graph)) == norms_remain
    x = torch.randn(2, 3, 64, 64)
    for _ in range(2):
        agree(engine, x)
        with torch.no_grad():
            for parameter in engine.supernet.parameters():
                parameter.mul_(1.01)
    x[1, 0, 30, 30] = float("nan")
    agree(engine, x)
    assert capfd.readouterr().err == ""


def test_a_reason_against_fusing_ends_with_memory_or_the_weights_that_it_was_found_with(monkeypatch) -> None:
    def engine_while(error: Exception) -> Engine:
        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("subnetact.engine.fusion_plan.FusedProgram", fail)
            return engine_of(Activations("relu max"), torch.randn(3, 8, 8))

    short = engine_while(torch.OutOfMemoryError("no room"))
    assert "memory was short" in short.stats().unfused[0]
    short.prepare([1])  # It tries again.
    assert short.is_fused(0)
    strange = engine_while(ValueError("strange"))
    assert strange.pin(0).reason == "strange"
    strange.supernet.load_state_dict(strange.supernet.state_dict())
    assert strange.pin(0)


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


def buffered() -> tuple[Supernet, Engine]:
    torch.manual_seed(0)
    supernet = one_width(Buffered(), {"a": "out", "b": "in"}, (32, SMALLEST_WIDTH))
    return supernet, new_engine(supernet)


def new_engine(supernet: Supernet) -> Engine:
    largest = [supernet.space.largest()]
    return Engine(supernet, largest, example=torch.zeros(1, 16), memory_budget_mb=64)


def new_storage(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "through data": lambda parameter: parameter.data.mul_(1.2),
    "through numpy": lambda parameter: np.multiply(parameter.detach(), 1.2, out=parameter.detach().numpy()),
    "new storage": new_storage,
    "moved by set_": lambda parameter: torch.no_grad()(parameter.set_)(parameter.detach() * 1.2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_programs_follow_buffers_and_after_refresh_traceless_changes(change: str) -> None:
    supernet, engine = buffered()
    spec, x = engine.specs[0], torch.randn(4, 16)

    def follows() -> None:
        expected = supernet.extract(spec)(x)
        torch.testing.assert_close(engine(x, 0), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(supernet(x, subnet=spec), expected, rtol=1e-4, atol=1e-4)
        assert engine.pin(0)

    follows()
    for name, value in (("table", 2.0), ("index", 3)):
        with torch.no_grad():
            supernet.network.table[3] = 5.0
            supernet.network.get_buffer(name).fill_(value)
        follows()
    for tensor in (*supernet.parameters(), supernet.network.table):
        CHANGES[change](tensor)
    supernet.refresh()
    follows()


def test_weights_that_were_made_in_inference_mode_are_followed_after_refresh() -> None:
    with torch.inference_mode():
        supernet, engine = buffered()
        assert engine.pin(0)
        for parameter in supernet.parameters():
            parameter.mul_(1.2)
    supernet.refresh()
    x = torch.randn(4, 16)
    torch.testing.assert_close(engine(x, 0), supernet.extract(engine.specs[0])(x), rtol=1e-4, atol=1e-4)


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
        engine = new_engine(supernet)
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
        engine = new_engine(supernet)
        assert engine.pin(0)
    is_made_by_the_next_call()
    with monkeypatch.context() as patch:
        patch.setattr(Buffered, "forward", training)
        supernet.subnet(spec)(x), engine(x, 0)
    is_made_by_the_next_call()


def whole(engine: Engine, subnet: int, x: Tensor, before: int = 0) -> Tensor:
    """Return what a batch gives block by block, after some blocks at once."""
    run = engine.start(subnet, list(x), len(x) + before)
    if before:
        run.step(before)
    while not run.step():
        pass
    return torch.stack(list(run.outputs()))


def digits_engine(digits: Supernet, budget: float) -> Engine:
    specs = list(dict.fromkeys([digits.space.largest(), *digits.space.sample(0, 4)]))
    options: Any = {"allow_uncalibrated": True, "memory_budget_mb": budget}
    return Engine(digits, specs, example=torch.zeros(1, 1, 16, 16), **options)


@pytest.mark.parametrize("budget", [0.0, 256.0])
def test_blocks_equal_the_whole_subnet_and_no_run_joins_two_checkpoints(
    digits: Supernet, budget: float
) -> None:
    engine, x = digits_engine(digits, budget), torch.randn(5, 1, 16, 16)
    expected = {i: engine(x, i) for i in engine.ids}
    for subnet in engine.ids:
        assert engine.is_fused(subnet) == bool(budget)
        assert torch.equal(whole(engine, subnet, x), expected[subnet])
        assert torch.equal(whole(engine, subnet, x, 2), expected[subnet])
        depth = sum(engine.specs[subnet]["depth"])
        assert (
            engine.start(subnet, list(x), 8).blocks == 1 + depth
        )  # the stem, and one per layer that is kept

    def same(subnet: int) -> bool:
        return all(torch.equal(whole(engine, subnet, x), expected[subnet]) for _ in range(5))

    assert all(in_threads(*(partial(same, subnet) for subnet in engine.ids)))
    run = engine.start(0, list(x), 5)
    run.step(7)
    digits.load_state_dict({n: 2 * t for n, t in digits.state_dict().items()})
    engine.start(0, list(x), 5).step(99)
    run.step(99)
    assert torch.equal(torch.stack(list(run.outputs())), expected[0])
    assert torch.equal(whole(engine, 0, x), engine(x, 0)), "the next run follows the new weights"
    assert not torch.equal(engine(x, 0), expected[0])


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3", "autoformer", "one block"])
def test_blocks_of_families_and_of_a_network_that_cannot_be_cut(family: str) -> None:
    if family == "one block":
        supernet, x = one_width(Deciding(), {"head": "out"}, (4, 8)), torch.randn(3, 3, 2, 2)
    else:
        supernet, (x,) = small_supernet(family), small_inputs(family, 3).values()
    specs = [supernet.space.largest(), supernet.space.smallest()]
    engine = Engine(supernet, specs, allow_uncalibrated=True, example=x[:1])
    for subnet in engine.ids:
        assert (engine.start(subnet, list(x), 3).blocks == 1) == (family == "one block")
        assert torch.equal(whole(engine, subnet, x), torch.stack(list(engine.run(subnet, list(x), 3))))
