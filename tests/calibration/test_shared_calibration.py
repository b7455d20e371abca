"""Layers that subnets share are computed once; statistics, inputs and weights are not affected."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_statistics import reference_statistics
from torch import nn

import subnetact
from subnetact.calibration.calibration_norm import batch_statistics
from subnetact.digits import new_digits_supernet
from subnetact.operators import SubnetNorm, WeightSlice
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
BATCHES = torch.randn(19, 1, 16, 16, generator=torch.Generator().manual_seed(3)).split([6, 10, 3])
RULES = ["weighted_biased", "cumulative_unbiased"]


def assert_reference(supernet: Supernet, specs: list[SubnetSpec], batches: list[torch.Tensor], rule: str):
    for spec in specs:
        expected, found = (
            reference_statistics(supernet, spec, batches, rule),
            supernet.norms.get(spec).pairs(),
        )
        assert set(expected) <= set(found)
        for path, pair in expected.items():
            for a, b in zip(found[path], pair, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_statistics_are_those_of_one_network_at_a_time(digits: Supernet, rule: str) -> None:
    digits.double()
    specs = [digits.space.sample(seed) for seed in range(6)]
    batches = [batch.double() for batch in BATCHES]
    report = subnetact.calibrate(digits, specs, batches, False, rule)
    assert not report.one_at_a_time
    assert report.saved > 0.1
    assert_reference(digits, specs, batches, rule)


def test_a_trial_that_was_short_of_memory_is_no_reason_to_share_nothing(
    digits: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(network: Any, x: torch.Tensor) -> torch.Tensor:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("CUDA out of memory")

    specs = [digits.space.smallest(), digits.space.largest()]
    started = subnetact.calibration.run.CalibrationRun(digits, specs, None, float("inf"))
    monkeypatch.setattr(type(digits.network), "forward", short)
    with pytest.raises(torch.OutOfMemoryError):
        started.prepare(BATCHES[0])
    started.prepare(BATCHES[0])
    assert not started.one_at_a_time


def flat(supernet: Supernet, specs: list[SubnetSpec]) -> list[torch.Tensor]:
    return [supernet.norms.get(spec).flat.clone() for spec in specs]


def bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def one_by_one() -> Callable[[int], tuple[Supernet, SubnetSpec, torch.Tensor]]:
    """Return a supernet, its n-th sampled subnet, and the statistics of that subnet calibrated by itself."""
    torch.manual_seed(0)
    supernet, done = new_digits_supernet().eval(), {}

    def get(seed: int) -> tuple[Supernet, SubnetSpec, torch.Tensor]:
        spec = supernet.space.sample(seed)
        if spec not in done:
            subnetact.calibrate(supernet, [spec], BATCHES, False)
            done[spec] = supernet.norms.get(spec).flat.clone()
        return supernet, spec, done[spec]

    return get


@settings(max_examples=10)
@given(
    seeds=st.lists(st.integers(0, 15), min_size=1, max_size=8),
    memory_mb=st.sampled_from([0.0, 0.01, 0.05, 0.3, 1024.0]),
    source=st.sampled_from([list, iter, lambda batches: [(batch,) for batch in batches]]),
)
def test_any_set_in_any_order_within_any_memory_gives_the_same_bits(
    one_by_one: Any, seeds: list[int], memory_mb: float, source: Any
) -> None:
    expected = [one_by_one(seed)[2] for seed in seeds]
    supernet, specs = one_by_one(0)[0], [one_by_one(seed)[1] for seed in seeds]
    report = subnetact.calibrate(supernet, specs, source(BATCHES), False, memory_mb=memory_mb)
    assert report.kept_mb <= memory_mb
    assert bits(flat(supernet, specs), expected)


def test_the_same_data_twice_change_nothing_but_rounding(digits: Supernet) -> None:
    spec = digits.space.largest()
    for rule in RULES:
        subnetact.calibrate(digits, [spec], BATCHES, False, rule)
        once = digits.norms.get(spec).flat.clone()
        subnetact.calibrate(digits, [spec], [*BATCHES, *BATCHES], False, rule)
        torch.testing.assert_close(digits.norms.get(spec).flat, once, rtol=1e-5, atol=1e-6)


def test_less_memory_computes_more(digits: Supernet) -> None:
    specs = [digits.space.sample(seed) for seed in range(10)]
    roomy = subnetact.calibrate(digits, specs, BATCHES, False)
    expected = flat(digits, specs)
    tight = subnetact.calibrate(digits, specs, BATCHES, False, memory_mb=roomy.kept_mb / 3)
    nothing = subnetact.calibrate(digits, specs, BATCHES, False, memory_mb=0)
    assert tight.kept_mb <= roomy.kept_mb / 3
    assert nothing.kept_mb == 0
    assert roomy.layers_computed < tight.layers_computed < nothing.layers_computed <= nothing.layers_alone
    assert bits(flat(digits, specs), expected)


def test_a_row_is_no_tensor_of_inference_mode_and_running_statistics_stay(digits: Supernet) -> None:
    before = {name: t.clone() for name, t in digits.state_dict().items()}
    specs = [digits.space.sample(seed) for seed in range(3)]
    x, copy = BATCHES[0].clone(), BATCHES[0].clone()
    with torch.inference_mode():
        subnetact.calibrate(digits, specs, [x], False)
    assert torch.equal(x, copy)
    assert not any(t.is_inference() for t in flat(digits, specs))
    assert all(torch.equal(t, before[name]) for name, t in digits.state_dict().items())


# -- networks that are written in other ways ---------------------------------------------------------


class Unusual(nn.Module):
    """Two convolutions; `between` is applied to the output of the first one."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.act, self.counter = nn.ReLU(inplace=True), Counter()
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn2(self.conv2(self.between(self, self.bn1(self.conv1(x))))))


class Counter(nn.Module):
    """A layer that overwrites its input, which nothing in the graph shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.clone()


def _residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.act(self.conv2(x))
    y += x
    return self.act(y)


def _written_and_read_again(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x, inplace=True)
    return y + x


def _written_through_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.flatten(1).relu_()
    return x


UNUSUAL: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str | None]] = {
    "in place": (_residual, None),
    "in place by position": (lambda self, x: F.relu(x, True), None),
    "sizes": (lambda self, x: F.interpolate(x, size=(x.shape[-1] * 2, x.shape[-2] + 1)), None),
    "pooled": (lambda self, x: x * F.avg_pool2d(x, x.shape[-1], 1).sigmoid(), None),
    "concatenated": (lambda self, x: torch.cat([x[:, :3], x[:, 3:].neg()], dim=1), None),
    "formulas": (lambda self, x: F.gelu(x) * F.gelu(x, approximate="tanh"), None),
    "kept": (lambda self, x: x + self.act(self.conv2(x)) * x.mean((2, 3), keepdim=True), None),
    "read again": (_written_and_read_again, "writes over"),
    "through a view": (_written_through_a_view, "writes over"),
    "unannounced": (lambda self, x: self.counter(x) + x, "writes over its input"),
    "value": (lambda self, x: x if float(x.mean()) < 1e9 else -x, "cannot be traced"),
    "parameter": (lambda self, x: x * self.bn2.weight.view(1, -1, 1, 1), None),
    "twice": (lambda self, x: self.bn1(x + 1), "more than once"),
    "type": (lambda self, x: x if isinstance(x, torch.Tensor) else x + 1, "other statistics"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", UNUSUAL)
def test_networks_that_write_in_place_or_cannot_be_traced(how: str, rule: str) -> None:
    between, reason = UNUSUAL[how]
    torch.manual_seed(0)
    axes = [subnetact.Axis.uniform("c", ["it"], [3, 4, 6])]
    space = subnetact.SubnetSpace("s", axes, lambda v: {"c": v["c"][0]})
    elastic = {"conv2": WeightSlice.on(), "bn2": SubnetNorm.on()}
    supernet = subnetact.insert_(Unusual(between).eval(), space, elastic).double()
    specs = list(space.enumerate())
    batches = [batch.double() for batch in BATCHES]
    report = subnetact.calibrate(supernet, specs, batches, False, rule)
    if reason is None:
        assert not report.one_at_a_time
        # Each subnet's forward makes a new view of the parameter.
        assert report.layers_computed * 3 == report.layers_alone or how == "parameter"
        assert report.saved > 0.2
    else:
        assert set(report.one_at_a_time) == set(specs)
        assert all(reason in text for text in report.one_at_a_time.values())
    assert_reference(supernet, specs, batches, rule)


def test_norms_of_other_shapes_and_without_affine() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Conv1d(4, 6, 2), nn.BatchNorm1d(6)
    )
    network.extend([nn.Flatten(), nn.Linear(6 * 5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)])
    space = subnetact.SubnetSpace(
        "s", [subnetact.Axis.uniform("c", ["it"], [2, 4])], lambda v: {"c": v["c"][0]}
    )
    elastic = {
        "0": WeightSlice.on(out="c"),
        "1": SubnetNorm.on(channels="c"),
        "3": WeightSlice.on(in_="c"),
    }
    supernet = subnetact.insert_(network.eval(), space, elastic).double()
    batches = [torch.randn(n, 2, 8, dtype=torch.float64) for n in (5, 9)]
    specs = list(space.enumerate())
    assert not subnetact.calibrate(supernet, specs, batches, False).one_at_a_time
    assert_reference(supernet, specs, batches, "weighted_biased")


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 11), (4, 3, 9, 6), (2, 300, 40, 40), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_statistics_of_a_batch_to_the_last_digits(shape: tuple[int, ...], channels_last: bool) -> None:
    x = torch.randn(shape) * 0.1 + 7 * torch.arange(shape[1]).view(-1, *(1,) * (len(shape) - 2))
    if channels_last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    exact_var, exact_mean = torch.var_mean(x.double(), axes, correction=0)
    mean, var = batch_statistics(x)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(var.double(), exact_var, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_mb": -1}, "memory_mb: -1"),
        ({"memory_mb": float("nan")}, "memory_mb: nan"),
        ({"save_every_s": float("nan")}, "save_every_s: nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    digits: Supernet, options: dict[str, float], message: str
) -> None:
    with pytest.raises(subnetact.errors.SpecError, match=message):
        subnetact.calibrate(digits, [digits.space.smallest()], BATCHES, False, **options)


def test_the_report_reads_well(digits: Supernet) -> None:
    rng = random.Random(0)
    specs = [digits.space.sample(rng) for _ in range(4)]
    report = subnetact.calibrate(digits, specs, BATCHES, False)
    assert str(report).startswith(f"{len(set(specs))} subnets on 3 batches in ")
    assert report.seconds > 0
