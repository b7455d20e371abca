"""Fused programs keep NaN and infinite values where views keep them, and take networks of other libraries."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subnetact
from subnetact.engine.fused_program import FusedProgram
from subnetact.operators import WeightSlice
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
INF = float("inf")
STRANGE = (float("nan"), INF, -INF)


def widths(choices: tuple[int, ...]) -> subnetact.SubnetSpace:
    axis = subnetact.Axis.uniform("width", ["all"], choices)
    return subnetact.SubnetSpace("strange", [axis], lambda v: {"width": v["width"][0]})


def engine_of(network: nn.Module, sample: Tensor, elastic: dict | None = None) -> subnetact.Engine:
    space = widths((4, 8))
    for norm in network.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(norm.running_mean, 0, 0.2), nn.init.uniform_(norm.running_var, 0.5, 1.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias, 0, 0.2)
    supernet = subnetact.insert_(network, space, elastic or {}).eval()
    specs = [space.smallest(), space.largest()]
    return subnetact.Engine(
        supernet,
        specs[: 2 if elastic else 1],
        example=sample[None],
        memory_budget_mb=256,
        allow_uncalibrated=True,
    )


def agree(engine: subnetact.Engine, x: Tensor, subnet: int = 0) -> Tensor:
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


KINDS = [
    " ".join(k) for k in itertools.product(("relu", "relu6", "hardswish", "silu"), ("max", "mean added"))
]


@pytest.mark.parametrize("kind", KINDS)
def test_strange_values_stay_where_the_view_has_them(kind: str) -> None:
    example = torch.randn(3, 8, 8)
    elastic = {
        "first": subnetact.WeightSlice.on(out="width"),
        "norm": subnetact.SubnetNorm.on(channels="width"),
        "deep": subnetact.WeightSlice.on(out="width"),
        "last": subnetact.WeightSlice.on(out="width", in_="width"),
    }
    engine, rng = engine_of(Activations(kind), example, elastic), random.Random(0)
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


class Halves(nn.Module):
    """Two outputs of a convolution, a BatchNorm and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.relu(self.norm(self.conv(x))).chunk(2, 1)


def test_a_sample_with_nan_changes_no_answer_of_its_batch_if_there_are_several_outputs() -> None:
    engine = engine_of(Halves(), torch.randn(3, 8, 8))
    assert engine.pin(0)
    x = torch.randn(3, 3, 8, 8)
    before = engine(x, 0)
    x[1, 0, 4, 4] = float("nan")
    agree(engine, x)
    for answer, former in zip(engine(x, 0), before, strict=True):
        assert answer[1].isnan().any()
        assert torch.equal(answer[[0, 2]], former[[0, 2]])


def test_the_demos_network_does_not_swallow_a_pixel(digits: Supernet) -> None:
    spec, example = digits.space.largest(), torch.zeros(1, 1, 16, 16)
    engine = subnetact.Engine(digits, [spec], example=example, allow_uncalibrated=True, memory_budget_mb=64)
    assert engine.pin(0)
    for value in STRANGE:
        x = torch.rand(3, 1, 16, 16)
        x[1, 0, 5, 5] = value
        output = agree(engine, x)
        assert output[[0, 2]].isfinite().all()
        assert not output[1].isfinite().all()


class Making(nn.Module):
    """Makes NaN of finite numbers in the middle, in front of a convolution with ReLU."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.make = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), make

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.make(F.relu(self.first(x)))))


MAKES = (torch.log, lambda y: y / y, lambda y: (y - 0.5) ** 0.5, lambda y: y * 1e30 * 1e30)


@pytest.mark.parametrize("make", MAKES)
def test_nan_that_the_network_makes_itself_is_kept(make: Callable[[Tensor], Tensor]) -> None:
    engine = engine_of(Making(make), torch.randn(3, 8, 8))
    pinned = engine.pin(0)
    assert pinned, pinned.reason
    with torch.inference_mode():
        assert not agree(engine, torch.randn(2, 3, 8, 8)).isfinite().all()


def test_weights_that_are_not_finite_are_kept_too() -> None:
    network = Activations("relu mean")
    network.first.weight.data[2, 1] = float("nan")
    engine = engine_of(network, torch.randn(3, 8, 8))
    engine.pin(0)
    assert agree(engine, torch.randn(2, 3, 8, 8))[:, 2].isnan().all()


class NormAct(nn.BatchNorm2d):
    """A BatchNorm with an activation of its own, as timm's."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4 axes, got {x.ndim}")
        training = self.training or (self.running_mean is None and self.running_var is None)
        statistics = self.running_mean, self.running_var
        return self.act(
            self.drop(F.batch_norm(x, *statistics, self.weight, self.bias, training, eps=self.eps))
        )


class ChannelNorm(nn.LayerNorm):
    """A LayerNorm over the channels of a map, as ConvNeXt's."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class Foreign(nn.Module):
    """What other libraries write: derived layers, own parameters and buffers, a token that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), NormAct(8, nn.ReLU())
        self.deep, self.channels = nn.Conv2d(8, 8, 7, padding=3, groups=8), ChannelNorm(8)
        self.gamma = nn.Parameter(torch.rand(8))
        self.token = nn.Parameter(torch.rand(1, 1, 8))
        self.register_buffer("shift", torch.rand(8, 1, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y = y + self.channels(self.deep(y)) * self.gamma.reshape(1, -1, 1, 1) + self.shift
        tokens = torch.cat([self.token.expand(y.shape[0], -1, -1), y.flatten(2).transpose(1, 2)], dim=1)
        return self.head(tokens.mean(1))


def test_derived_layers_and_own_parameters_are_traced(capfd: pytest.CaptureFixture[str]) -> None:
    elastic = {"norm": subnetact.SubnetNorm.on()}
    engine = engine_of(Foreign(), torch.randn(3, 8, 8), elastic)
    pinned = engine.pin(0)
    assert pinned, pinned.reason
    for count in (1, 3):
        agree(engine, torch.randn(count, 3, 8, 8))
    program = FusedProgram(engine.supernet.private_view(engine.specs[0])[0])
    assert program.graph is not None
    called = {str(n.target) for n in program.graph.nodes}
    assert not any("batch_norm" in name or "norm.act" in name for name in called), called
    with torch.no_grad():
        engine.supernet.network.shift.add_(1)
        engine.supernet.network.gamma.mul_(2)
    agree(engine, torch.randn(2, 3, 8, 8))
    assert capfd.readouterr().err == ""


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) if x.sum() > 0 else x


def test_what_cannot_be_fused_is_said_in_one_line_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 8))
    for network, why in ((plain, "nothing to fuse"), (Deciding(), "control flow")):
        engine = engine_of(network, torch.randn(3, 2, 2))
        pinned = engine.pin(0)
        assert not pinned
        assert why in pinned.reason
        assert "\n" not in pinned.reason
        assert engine.stats().unfused == {0: pinned.reason}
    views = subnetact.Engine(engine.supernet, engine.specs, memory_budget_mb=0)
    assert "memory_budget_mb" in views.pin(0).reason
    assert (
        "backend='views'"
        in subnetact.Engine(engine.supernet, engine.specs, memory_budget_mb=64, backend="views").pin(0).reason
    )
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
    supernet = subnetact.insert_(network, widths((4, 8)), {}).eval()
    spec, x = supernet.space.smallest(), torch.randn(2, 3, 8, 8)
    engine = subnetact.Engine(supernet, [spec], example=x[:1], memory_budget_mb=budget)
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
    elastic = {"inner": WeightSlice.on(out="width"), "read": WeightSlice.on(in_="width")}
    supernet = subnetact.insert_(Functional(), widths((4, 8)), elastic).eval()
    specs, x = [supernet.space.smallest(), supernet.space.largest()], torch.randn(2, 3, 12, 12)
    engine = subnetact.Engine(supernet, specs, example=x[:1], memory_budget_mb=64)
    for i, spec in enumerate(specs):
        pinned = engine.pin(i)
        assert pinned, pinned.reason
        torch.testing.assert_close(engine(x, i), supernet(x, subnet=spec), rtol=1e-4, atol=1e-5)


TIMM = ("resnetv2_50", "mobilenetv3_small_050", "efficientnet_b0", "convnext_atto", "regnetx_002")


@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm_are_fused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model(name, pretrained=False, num_classes=8)
    engine = engine_of(network, torch.randn(3, 64, 64))
    pinned = engine.pin(0)
    assert pinned, pinned.reason
    x = torch.randn(2, 3, 64, 64)
    agree(engine, x)
    x[1, 0, 30, 30] = float("nan")
    agree(engine, x)
    assert capfd.readouterr().err == ""


def test_memory_that_was_short_once_does_not_refuse_a_subnet_for_good(monkeypatch) -> None:
    with monkeypatch.context() as short:
        short.setattr("subnetact.engine.fusion_plan.FusedProgram", raising(torch.OutOfMemoryError("no room")))
        engine = engine_of(Activations("relu max"), torch.randn(3, 8, 8))
    assert "memory was short" in engine.stats().unfused[0]
    engine.prepare([1])  # It tries again.
    assert engine.is_fused(0)


def test_a_reason_against_fusing_ends_with_the_weights_that_it_was_found_with(monkeypatch) -> None:
    with monkeypatch.context() as strange:
        strange.setattr("subnetact.engine.fusion_plan.FusedProgram", raising(ValueError("strange")))
        engine = engine_of(Activations("relu max"), torch.randn(3, 8, 8))
    assert engine.pin(0).reason == "strange"
    engine.supernet.load_state_dict(engine.supernet.state_dict())
    assert engine.pin(0)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail
