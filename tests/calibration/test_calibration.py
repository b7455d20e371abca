"""Calibration: the rules of averaging, many subnets in one pass, all or nothing, and files of statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_networks import one_width
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_statistics import reference_statistics
from safetensors.torch import save_file
from torch import nn
from written_networks import seeded

from subnetact import calibrate
from subnetact.calibration.calibration_norm import batch_statistics
from subnetact.digits import new_digits_supernet
from subnetact.errors import FileFormatError, ForeignSpec, SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.statistics import is_calibrated, statistics_of
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
*BATCHES, X = torch.randn(23, 1, 16, 16, generator=torch.Generator().manual_seed(3)).split([6, 10, 3, 4])


def specs_of(supernet: Supernet) -> list[SubnetSpec]:
    return [supernet.space.smallest(), supernet.space.sample(1), supernet.space.sample(2)]


def test_calibrating_one_subnet_moves_no_other_by_one_bit(digits: Supernet) -> None:
    a, b, c = specs_of(digits)
    calibrate(digits, [b], BATCHES, progress=False)
    view_b, view_c = digits.subnet(b), digits.subnet(c)
    before = view_b(X), view_c(X), digits(X, subnet=b), {k: v.clone() for k, v in digits.state_dict().items()}
    digits.actuate(a)
    active = digits(X)
    calibrate(digits, [a], [10 * batch for batch in BATCHES], progress=False)
    assert torch.equal(view_b(X), before[0])
    assert torch.equal(view_c(X), before[1])
    assert torch.equal(digits(X, subnet=b), before[2])
    assert all(torch.equal(v, before[3][k]) for k, v in digits.state_dict().items())
    assert not torch.equal(digits(X), active), "it takes effect for the active one"
    assert torch.equal(digits(X), digits.extract(a)(X))


def test_foreign_files_and_rows_are_refused(digits: Supernet, tmp_path) -> None:
    small, large, path = digits.space.smallest(), digits.space.largest(), tmp_path / "norms.safetensors"
    calibrate(digits, [large], BATCHES, progress=False)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(FileFormatError, match="not a norm table"):
        NormTable.load(path)
    with pytest.raises(ForeignSpec):
        digits.norms = NormTable("other-space")
    with pytest.raises(ForeignSpec):
        digits.norms.update({SubnetSpec("other", ()): NormRow({}, torch.zeros(0))})
    digits.norms.update({small: digits.norms.get(large)})
    with pytest.raises(SpecError, match="channels, its statistics"):
        digits.subnet(small)


def test_bad_batches_subnets_and_settings_commit_nothing(digits: Supernet) -> None:
    spec, x = digits.space.smallest(), BATCHES[0]
    rows: list[tuple[dict[str, Any], str]] = [
        ({"batches": []}, "at least one batch"),
        ({"specs": [SubnetSpec("other", ())]}, "other"),
        ({"batches": [x, torch.full((2, 1, 16, 16), float("nan"))]}, "not finite, first at bn"),
        ({"batches": [x, torch.zeros(0, 1, 16, 16)]}, "a calibration batch is a tensor"),
        ({"batches": [{"image": x}]}, "unexpected keyword argument 'image'"),
        ({"batches": [{"image": "x"}]}, "got a dictionary of 'image'"),
        ({"batches": x}, r"write \[spec\] and \[batch\]"),
        *(
            ({"batches": [y]}, r"stem \(Conv2d\): expected scalar type .* give")
            for y in (x.double(), x.long())
        ),
        ({"batches": [x.repeat(1, 3, 1, 1)]}, r"stem \(Conv2d\): .*; give batches that the network"),
        ({"memory_mb": -1}, "memory_mb: -1"),
        ({"memory_mb": float("nan")}, "memory_mb: nan"),
        ({"save_every_s": float("nan")}, "save_every_s: nan"),
    ]
    for options, message in rows:
        with pytest.raises(SpecError, match=message):
            calibrate(digits, **{"specs": [spec], "batches": BATCHES, "progress": False, **options})
    assert len(digits.norms) == 0


def test_pairs_of_images_and_labels_and_inference_mode_do(digits: Supernet) -> None:
    spec = digits.space.smallest()
    calibrate(digits, [spec], BATCHES, progress=False)
    expected, pairs = digits.norms.get(spec).flat, [(b, torch.zeros(len(b))) for b in BATCHES]
    with torch.inference_mode():
        calibrate(digits, [spec], pairs, progress=False, labels=True)
    row = digits.norms.get(spec).flat
    assert torch.equal(row, expected)
    assert not row.is_inference()


class ActivatedNorm(nn.BatchNorm2d):
    """A BatchNorm that does more than normalise, as in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


def test_a_batchnorm_that_also_activates_is_calibrated_as_it_runs() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), ActivatedNorm(4), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)
    supernet, x = one_width(nn.Sequential(*layers), {"0": "out", "1": "norm", "2": "in"}, [2, 4]), BATCHES[0]
    spec = supernet.space.smallest()
    calibrate(supernet, [spec], [x], progress=False)
    subnet = supernet.extract(spec)
    hidden = nn.functional.batch_norm(subnet[0](x), None, None, training=True)
    mean = subnet[2](nn.functional.relu(hidden)).mean((0, 2, 3))
    torch.testing.assert_close(subnet[3].running_mean, mean, rtol=1e-4, atol=1e-5)
    assert supernet.subnet(spec)[1].act is not supernet.subnet(supernet.space.largest())[1].act
    plain = one_width(nn.Sequential(nn.Linear(3, 4)), {"0": "out"}, [2, 4])
    calibrate(plain, [plain.space.smallest()], [], progress=False)
    assert is_calibrated(plain, plain.space.smallest()), "a network without BatchNorm needs no calibration"


def test_rows_that_lack_a_norm(digits: Supernet) -> None:
    spec = digits.space.smallest()
    calibrate(digits, [spec], BATCHES, progress=False)
    pairs = digits.norms.get(spec).pairs()
    pairs.pop("bn")
    digits.norms.update({spec: NormRow.of(pairs)})
    with pytest.raises(SpecError, match="lack bn; calibrate it again"):
        digits.subnet(spec)


class Counting(nn.Module):
    """Counts the inputs that it has seen, in a buffer that torch takes for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


def test_a_network_whose_forward_writes_into_its_buffers_is_calibrated() -> None:
    """The forward passes of a check and of a calibration write into copies, so no weights change."""
    supernet = one_width(Counting(), {"conv": "out", "norm": "norm"}, (2, 4))
    for spec in supernet.space.enumerate():
        expected = reference_statistics(copy.deepcopy(supernet), spec, BATCHES, "weighted_biased")
        calibrate(supernet, [spec], BATCHES, progress=False)
        for own, reference in zip(statistics_of(supernet, spec)["norm"], expected["norm"], strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
    assert supernet.network.seen.tolist() == [0, 0]


SHARED = torch.randn(19, 1, 16, 16, generator=torch.Generator().manual_seed(3)).split([6, 10, 3])


RULES = ["weighted_biased", "cumulative_unbiased"]


def assert_reference(supernet: Supernet, specs: list[SubnetSpec], batches: list[torch.Tensor], rule: str):
    for spec in specs:
        expected = reference_statistics(supernet, spec, batches, rule)
        found = supernet.norms.get(spec).pairs()
        assert set(expected) <= set(found)
        for path, pair in expected.items():
            for a, b in zip(found[path], pair, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_statistics_are_those_of_one_network_at_a_time(digits: Supernet, rule: str) -> None:
    digits.double()
    specs = [digits.space.sample(seed) for seed in range(6)]
    batches = [batch.double() for batch in SHARED]
    report = calibrate(digits, specs, batches, False, rule)
    assert report.saved > 0.1
    assert str(report).startswith(f"{len(set(specs))} subnets on 3 batches in ")
    assert report.seconds > 0
    assert_reference(digits, specs, batches, rule)


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
            calibrate(supernet, [spec], SHARED, False)
            done[spec] = supernet.norms.get(spec).flat.clone()
        return supernet, spec, done[spec]

    return get


@settings(max_examples=10)
@given(
    seeds=st.lists(st.integers(0, 15), min_size=1, max_size=8),
    memory_mb=st.sampled_from([0.0, 0.01, 0.05, 0.3, 1024.0]),
    source=st.sampled_from([list, iter, lambda batches: [(batch,) for batch in batches]]),
)
def test_any_order_and_memory_give_the_same_bits(
    one_by_one: Any, seeds: list[int], memory_mb: float, source: Any
) -> None:
    expected = [one_by_one(seed)[2] for seed in seeds]
    supernet, specs = one_by_one(0)[0], [one_by_one(seed)[1] for seed in seeds]
    report = calibrate(supernet, specs, source(SHARED), False, memory_mb=memory_mb)
    assert report.kept_mb <= memory_mb
    assert bits(flat(supernet, specs), expected)


def test_less_memory_computes_more(digits: Supernet) -> None:
    specs = [digits.space.sample(seed) for seed in range(10)]
    roomy = calibrate(digits, specs, SHARED, False)
    expected = flat(digits, specs)
    tight = calibrate(digits, specs, SHARED, False, memory_mb=roomy.kept_mb / 3)
    nothing = calibrate(digits, specs, SHARED, False, memory_mb=0)
    assert tight.kept_mb <= roomy.kept_mb / 3
    assert nothing.kept_mb == 0
    assert roomy.layers_computed < tight.layers_computed < nothing.layers_computed <= nothing.layers_alone
    assert bits(flat(digits, specs), expected)


def unusual(between: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return three convolutions; `between` is applied to the output of the first one."""
    layers = {"conv1": nn.Conv2d(1, 6, 3, padding=1), "conv2": nn.Conv2d(6, 6, 3, padding=1)}
    norms = {"bn1": nn.BatchNorm2d(6), "bn2": nn.BatchNorm2d(6), "act": nn.ReLU(inplace=True)}
    last = {"counter": Counter(), "leaving": Leaving(), "conv3": nn.Conv2d(6, 6, 1), "bn3": nn.BatchNorm2d(6)}
    begin = lambda m, x: m.act(m.bn2(m.conv2(between(m, m.bn1(m.conv1(x))))))  # noqa: E731
    return seeded(lambda m, x: m.act(m.bn3(m.conv3(begin(m, x)))), **layers, **norms, **last)


class Counter(nn.Module):
    """A layer that overwrites its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.clone()


class Leaving(nn.Module):
    """A layer that leaves a number in an attribute, which the network reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = float(x.mean())
        return x * 2


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


UNUSUAL: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "in place": _residual,
    "in place by position": lambda self, x: F.relu(x, True),
    "sizes": lambda self, x: F.interpolate(x, size=(x.shape[-1] * 2, x.shape[-2] + 1)),
    "pooled": lambda self, x: x * F.avg_pool2d(x, x.shape[-1], 1).sigmoid(),
    "concatenated": lambda self, x: torch.cat([x[:, :3], x[:, 3:].neg()], dim=1),
    "formulas": lambda self, x: F.gelu(x) * F.gelu(x, approximate="tanh"),
    "kept": lambda self, x: x + self.act(self.conv2(x)) * x.mean((2, 3), keepdim=True),
    "read again": _written_and_read_again,
    "through a view": _written_through_a_view,
    "unannounced": lambda self, x: self.counter(x) + x,
    "value": lambda self, x: x if float(x.mean()) < 1e9 else -x,
    "parameter": lambda self, x: x * self.bn2.weight.view(1, -1, 1, 1),
    "twice": lambda self, x: self.bn1(x + 1),
    "type": lambda self, x: x if isinstance(x, torch.Tensor) else x + 1,
    "attribute": lambda self, x: self.leaving(x) + self.leaving.mean,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", UNUSUAL)
def test_networks_that_write_in_place_or_branch_on_values(how: str, rule: str) -> None:
    supernet = one_width(unusual(UNUSUAL[how]), {"conv3": "out", "bn3": "norm"}, [3, 4, 6]).double()
    specs = list(supernet.space.enumerate())
    batches = [batch.double() for batch in SHARED]
    report = calibrate(supernet, specs, batches, False, rule)
    assert report.saved > 0.15
    assert_reference(supernet, specs, batches, rule)


def test_subnets_that_differ_on_some_batches_only_share_no_averages() -> None:
    compute = lambda m, x: m.norm(m.conv(x + m.b(m.a(x)) if float(x.mean()) > 0 else x))  # noqa: E731
    layers: dict[str, Any] = {"conv": nn.Conv2d(1, 3, 3), "norm": nn.BatchNorm2d(3)}
    network = seeded(compute, **layers, a=nn.Conv2d(1, 4, 1), b=nn.Conv2d(4, 1, 1))
    supernet = one_width(network, {"a": "out", "b": "in"}, [2, 4]).double()
    batches = [SHARED[0].double() + 1, SHARED[1].double() - 1]
    specs = list(supernet.space.enumerate())
    calibrate(supernet, specs, batches, False)
    assert_reference(supernet, specs, batches, "weighted_biased")


def test_norms_of_other_shapes_and_without_affine() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Conv1d(4, 6, 2), nn.BatchNorm1d(6)
    )
    network.extend([nn.Flatten(), nn.Linear(6 * 5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)])
    supernet = one_width(network, {"0": "out", "1": "norm", "3": "in"}, [2, 4]).double()
    batches = [torch.randn(n, 2, 8, dtype=torch.float64) for n in (5, 9)]
    specs = list(supernet.space.enumerate())
    calibrate(supernet, specs, batches, False)
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
