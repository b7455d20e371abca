"""The engine's modes: each gives the outputs of the view, follows changes, and stays within its budget."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_networks import in_threads, one_width
from small_families import small_inputs, small_supernet
from torch import Tensor, nn

import subnetact
from ofa_adapters import families
from subnetact import Engine, calibrate
from subnetact.device import MachineFacts
from subnetact.engine import EngineStats, fusion_plan, packed_linear
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.packed_conv import SlicedConv
from subnetact.errors import SpecError
from subnetact.operators.operation_traits import operation_of
from subnetact.supernet.statistics import adopt_statistics_, batch_norms
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view

EXAMPLE = torch.zeros(1, 16, 16)
X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))
SMALL = ["ofa_resnet50", "ofa_mbv3", "ofa_proxyless"]


def close(output: Tensor, expected: Tensor, folded: bool) -> None:
    rtol, atol = (1e-3, 1e-4) if folded else (5e-5, 5e-5)
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(output, expected, rtol=rtol, atol=atol * scale)


def engine_of(digits: Supernet, budget: float, count: int = 4, **options: Any) -> Engine:
    specs = digits.space.sample(3, count)
    calibrate(digits, specs, [X], progress=False)
    return Engine(digits, specs, example=EXAMPLE[None], memory_budget_mb=budget, **options)


@pytest.mark.parametrize("budget", [0, 0.01, 64])
@pytest.mark.parametrize("pinned", [False, True])
def test_every_mode_gives_the_views_outputs(digits: Supernet, budget: float, pinned: bool) -> None:
    engine = engine_of(digits, budget)
    for i, spec in enumerate(engine.specs):
        fused = bool(engine.pin(i)) if pinned else engine.is_fused(i)
        assert fused == engine.is_fused(i) == (budget > 1)
        for x in (X, X[:1], torch.randn(2, 1, 24, 20)):
            for _ in range(2):
                close(engine(x, subnet=i), digits(x, subnet=spec), folded=fused)
    stats = engine.stats()
    assert isinstance(stats, EngineStats)
    assert stats.fused_bytes + stats.graphs <= stats.budget == int(budget * 2**20)
    assert (stats.fused_bytes > 0) == (stats.fused > 0)
    assert stats.subnets == 4
    assert stats.fused == sum(map(engine.is_fused, range(4)))
    assert stats.weights > 0 < stats.norm_table


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
@pytest.mark.parametrize("family", SMALL)
def test_families_run_in_every_mode(family: str) -> None:
    assert family in families()
    torch.manual_seed(0)
    supernet, x = small_supernet(family), small_inputs(family, 3)["x"]
    specs = supernet.space.sample(3, 3)
    for norm in batch_norms(supernet.network).values():
        norm.get_buffer("running_mean").normal_(0, 0.1)
        norm.get_buffer("running_var").uniform_(0.5, 1.5)
    for budget in (0, 200):
        options = {"memory_budget_mb": budget, "allow_uncalibrated": True}
        engine = Engine(supernet, specs, example=x[:1], **options)
        for i, spec in enumerate(specs):
            expected = supernet(x, subnet=spec)
            close(engine(x, subnet=i), expected, folded=budget > 0)
            assert bool(engine.pin(i)) == (budget > 0)
            close(engine(x, subnet=i), expected, folded=True)
        with torch.no_grad():
            for parameter in supernet.parameters():
                parameter.mul_(1.01)
        expected = supernet(x, subnet=specs[2])
        close(engine(x, subnet=2), expected, folded=True)
        assert engine.is_fused(2) == (budget > 0)


def test_programs_fuse_rightly_and_have_no_batchnorm(digits: Supernet) -> None:
    calibrate(digits, [digits.space.smallest()], [X], progress=False)
    program = FusedProgram(private_view(digits, digits.space.smallest())[0])
    assert program.graph is not None
    assert not any(isinstance(value, nn.BatchNorm2d | nn.Conv2d) for value in program.values.values())
    assert F.relu not in {node.target for node in program.graph.nodes}
    assert program.nbytes > 0
    network, x = Odd().eval(), torch.randn(2, 4, 9, 9)
    network.bn.running_mean.normal_()
    with torch.inference_mode():
        expected = network(x)
        odd = FusedProgram(network)(x.contiguous(memory_format=torch.channels_last))
        close(odd, expected, folded=True)
        close(network(x), expected, folded=False)
        images = X.contiguous(memory_format=torch.channels_last)
        close(program(images), digits(X, subnet=digits.space.smallest()), folded=True)


class Odd(nn.Module):
    """Additions, activations and shared convolutions in shapes that must not be fused wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(4), nn.ReLU6(inplace=True)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.reflect = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.relu(self.bn(self.b(y))) + y  # y has two users, and the addition follows the activation
        w = self.a(z) + self.b(x)  # `a` runs twice; the second branch is computed later
        w = torch.add(w, z, alpha=2)
        return self.reflect(F.hardswish(self.grouped(F.relu(w + w)) + w))


@pytest.mark.parametrize("side", [3, 11, 40, 70])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (3, 1), (5, 1), (3, 8)])
def test_sliced_convolutions_equal_plain_ones(kernel: int, groups: int, stride: int, side: int) -> None:
    torch.manual_seed(0)
    full = nn.Conv2d(32, 48, kernel, stride, kernel // 2, groups=groups)
    conv = nn.Conv2d(8, 16, kernel, stride, kernel // 2, groups=groups)
    conv.weight = nn.Parameter(full.weight[:16, : conv.weight.shape[1]], requires_grad=False)
    norm = nn.BatchNorm2d(16).eval()
    for tensor in (norm.running_mean, norm.weight, norm.bias):
        nn.init.normal_(tensor)
    x = torch.randn(2, 8, side, side).contiguous(memory_format=torch.channels_last)
    relu = operation_of(F.relu)
    with torch.inference_mode():
        for before, after in ((None, None), (norm, None), (None, relu), (norm, relu)):
            expected = conv(x) if before is None else before(conv(x))
            sliced = SlicedConv(conv, before, after)
            other = torch.randn_like(expected)
            for added in (None, other):
                sum_ = expected if added is None else expected + added
                answer = sliced(x, None if added is None else added.clone())
                close(answer, sum_ if after is None else sum_.relu(), folded=True)
                assert answer.is_contiguous(memory_format=torch.channels_last)


def test_a_subnet_without_room_reads_its_slices_and_holds_no_weight(digits: Supernet) -> None:
    engine = engine_of(digits, 0)
    for subnet, spec in enumerate(engine.specs):
        close(engine(X, subnet=subnet), digits(X, subnet=spec), folded=True)
    assert engine.mode_of(1) == "zero-copy"
    assert engine.stats().fused_bytes == 0
    (layer, *_) = [m for m in engine._plan._programs[1].program.values.values() if isinstance(m, SlicedConv)]
    pointers = {p.untyped_storage().data_ptr() for p in digits.network.parameters()}
    assert layer._weight.untyped_storage().data_ptr() in pointers


@pytest.mark.parametrize("fused", [False, True])
def test_weights_and_statistics_that_change_are_followed(digits: Supernet, fused: bool) -> None:
    engine = engine_of(digits, 64 * fused)
    spec, x = engine.specs[1], X
    engine(x, subnet=1)
    with torch.no_grad():
        digits.network.stem.weight.mul_(1.5)
        digits.network.classifier.bias.add_(1.0)
    close(engine(x, subnet=1), digits(x, subnet=spec), folded=fused)
    calibrate(digits, [spec], [X * 3 + 1], progress=False)
    close(engine(x, subnet=1), digits(x, subnet=spec), folded=fused)
    digits.norms.get(spec).flat.mul_(1.1)
    close(engine(x, subnet=1), digits(x, subnet=spec), folded=fused)
    digits.load_state_dict({k: v * 0.5 for k, v in digits.state_dict().items()}, norms=digits.norms)
    close(engine(x, subnet=1), digits(x, subnet=spec), folded=fused)
    assert engine.is_fused(1) == fused


def test_shared_statistics_that_change_or_that_training_writes_are_followed(digits: Supernet) -> None:
    spec = digits.space.smallest()
    with pytest.warns(subnetact.errors.UncalibratedSubnetWarning):
        engine = Engine(digits, [spec], example=EXAMPLE[None], allow_uncalibrated=True)
    assert engine.pin(0)
    digits.network.bn.running_mean.add_(1.0)
    close(engine(X, subnet=0), digits(X, subnet=spec), folded=True)
    assert engine.pin(0)
    digits.train()
    with torch.no_grad():
        digits(3 * X, subnet=spec)  # No weight changes, and the means and variances count no versions.
    digits.eval()
    close(engine(X, subnet=0), digits(X, subnet=spec), folded=True)


def fused(engine: Engine) -> set[int]:
    return set(filter(engine.is_fused, engine.ids))


def budgeted(engine: Engine, nbytes: float, count: int = 4) -> Engine:
    """Return an engine of the first subnets of another one, with a budget in bytes."""
    return Engine(
        engine.supernet, engine.specs[:count], example=EXAMPLE[None], memory_budget_mb=nbytes / 2**20
    )


def sizes_of(digits: Supernet, specs: Any) -> list[int]:
    """Return the bytes of the fused program of every subnet."""
    alone = [Engine(digits, [spec], example=EXAMPLE[None], memory_budget_mb=64) for spec in specs]
    return [engine.stats().fused_bytes for engine in alone]


def test_the_plan_is_made_with_the_engine_and_use_does_not_change_it(digits: Supernet) -> None:
    engine = engine_of(digits, 64)
    assert fused(engine) == {0, 1, 2, 3}
    assert not engine.stats().unfused
    first, second, third, _ = sizes_of(digits, engine.specs)
    tight = budgeted(engine, first + second + third // 2)
    planned, held = fused(tight), tight.stats().fused_bytes
    assert {0, 1} <= planned < {0, 1, 2, 3}
    for _ in range(100):
        tight(X, subnet=2)
    tight.prepare([2])
    assert (fused(tight), tight.stats().fused_bytes) == (planned, held)
    assert set(tight.stats().unfused) == {0, 1, 2, 3} - planned
    assert all("does not fit in the budget" in why for why in tight.stats().unfused.values())
    for i, spec in enumerate(tight.specs):
        close(tight(X, subnet=i), digits(X, subnet=spec), folded=i in planned)
    adopt_statistics_(digits)
    largest = Engine(digits, [digits.space.largest()], example=EXAMPLE[None])
    assert largest.is_fused(0), "the default budget has room for the largest subnet"
    views = budgeted(engine, 0)
    assert not fused(views)
    assert "no memory budget" in views.stats().unfused[0]


def test_pinned_subnets_come_first_and_what_leaves_makes_room(digits: Supernet) -> None:
    engine = engine_of(digits, 64)
    sizes = sizes_of(digits, engine.specs)
    largest = max(engine.ids, key=sizes.__getitem__)
    other = next(i for i in engine.ids if i != largest)
    tight = budgeted(engine, sizes[largest] + 100)
    assert tight.pin(largest)
    assert (tight.pinned, fused(tight)) == ((largest,), {largest})
    refused = tight.pin(other)
    assert not refused
    assert "does not fit in the budget" in refused.reason
    assert (tight.pinned, fused(tight)) == ((largest,), {largest})
    tight.unpin(largest)
    assert other in fused(tight)
    assert tight.pin(other)
    assert not tight.pin(largest)
    for i, spec in enumerate(tight.specs):
        close(tight(X, subnet=i), digits(X, subnet=spec), folded=True)
    one = budgeted(engine, sizes[0] + 100, count=1)
    assert one.register(engine.specs[1]) == 1
    assert 0 in fused(one)
    one.remove(0)
    assert one.register(engine.specs[0]) == 0
    assert 0 in fused(one)


def test_what_is_not_expected_to_be_faster_is_fused_only_if_it_is_pinned() -> None:
    layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    supernet, cpu = one_width(layers, {"0": "out", "1": "in"}, (128, 512)), torch.device("cpu")
    largest = supernet.space.largest()
    view = supernet.subnet(largest)
    for vendor, aten, why in (
        ("Intel(R) Xeon(R)", "AVX2", ""),
        ("AMD EPYC", "AVX512", ""),
        ("AMD EPYC", "AVX2", "without convolutions"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_linear, "machine", lambda _, name=vendor: {"device_name": name})
            patch.setattr(packed_linear, "machine_facts", lambda _, aten=aten: MachineFacts(aten=aten))
            packed_linear.is_intel.cache_clear()
            assert fusion_plan.slower_because(view, cpu).startswith(why)
            assert bool(fusion_plan.slower_because(view, cpu)) == bool(why)
            engine = Engine(supernet, [largest], example=torch.zeros(1, 512), memory_budget_mb=8)
            assert engine.is_fused(0) == (not why)
            assert engine.pin(0)
            engine.unpin(0)
            assert engine.is_fused(0) == (not why)
    packed_linear.is_intel.cache_clear()


def test_registration_and_removal(digits: Supernet) -> None:
    engine = engine_of(digits, 64)
    first, held = engine.ready(0), engine.stats().fused_bytes
    engine.remove(0)
    assert engine.ids == (1, 2, 3)
    assert len(engine) == len(engine.keys) == 4
    assert 0 < engine.stats().fused_bytes < held
    for gone in (lambda: engine(X, subnet=0), lambda: first(X), lambda: engine.remove(0)):
        with pytest.raises(SpecError, match=r"no subnet 0; this engine has 1, 2, 3|was removed"):
            gone()
    assert engine.register(first.spec, accuracy=81.5) == 0
    assert engine.stats().fused_bytes == held
    close(first(X), digits(X, subnet=first.spec), folded=True)
    assert engine.accuracy == (81.5, None, None, None)
    assert engine.register(engine.specs[2]) == 2
    with pytest.raises(subnetact.errors.NotCalibrated):
        engine.register(digits.space.spec(depth=1, expand=0.5, width=0.5))


def test_threads_get_right_answers_while_subnets_come_and_go(digits: Supernet) -> None:
    specs, done, served = digits.space.sample(3, 12), threading.Event(), [0] * 4
    calibrate(digits, specs, [X], progress=False)
    with torch.inference_mode():
        expected = [digits(X, subnet=spec) for spec in specs]
    engine = Engine(digits, specs, example=EXAMPLE[None], memory_budget_mb=1.5)

    def hammer(thread: int) -> None:
        rng = random.Random(thread)
        while not done.is_set() or served[thread] < 3:
            i = min(int(rng.expovariate(0.4)), 8)
            close(engine(X, subnet=i), expected[i], folded=True)
            served[thread] += 1

    def change() -> None:
        """Ids 9 to 11 come and go, others are pinned and unpinned."""
        rng = random.Random(9)
        try:
            for _ in range(5):
                i = rng.randrange(9, 12)
                engine.remove(i)
                assert engine.register(specs[i]) == i
                close(engine(X, subnet=i), expected[i], folded=True)
                engine.pin(rng.randrange(9))
                engine.unpin(rng.randrange(9))
                assert engine.stats().fused_bytes <= engine.stats().budget
        finally:
            done.set()

    in_threads(change, *(partial(hammer, i) for i in range(4)))
