"""Training leaves an ordinary network: it moves, freezes and ignores what training without subnets does."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

from subnetact import calibrate, insert_
from subnetact.errors import InsertError, TrainingError
from subnetact.operators import SubnetNorm
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet
from subnetact.training import distill_, sandwich_step

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * 3 + 1
LABELS = torch.arange(12) % 5
QUIET: dict[str, Any] = {"progress": False, "steps": 2, "calibration": 1, "importance": None}
HELD_OUT = [(X + 0.1, LABELS)]


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), norm(16)
        self.wide, self.norm2 = nn.Conv2d(16, 8, 1), norm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.norm2(self.wide(x))).mean((2, 3)))  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Keeps a running mean and counts its calls in buffers, as codebooks and observers do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(), 0.1)
            self.calls.add_(1)
        return x * self.scale - self.mean


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch norm": nn.BatchNorm2d,
    "cumulative": lambda n: nn.BatchNorm2d(n, momentum=None),
    "without affine": lambda n: nn.BatchNorm2d(n, affine=False),
    "instance norm": lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True),
    "other buffers": Counting,
}


def plain_and_elastic(network: nn.Module) -> tuple[nn.Module, Supernet]:
    torch.manual_seed(0)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if tensor.dim() == 1 else tensor.data.normal_(0, 0.3)
    plain = copy.deepcopy(network.eval())
    return plain, insert_(network, example=X[:2], axes=("width",))


def same(found: nn.Module, wanted: nn.Module) -> None:
    state = found.state_dict()
    assert list(state) == list(wanted.state_dict())
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def sandwich(supernet: Supernet, steps: int = 3) -> None:
    for i in range(steps):
        sandwich_step(supernet, X, LABELS, rng=random.Random(i))


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_steps_move_what_plain_steps_move(norm: Callable[[int], nn.Module], calibrated: bool) -> None:
    plain, supernet = plain_and_elastic(Net(norm))
    largest = supernet.space.largest()
    if calibrated:
        calibrate(supernet, [largest, supernet.space.smallest()], [X * 2], progress=False, adopt=False)
        plain.load_state_dict(supernet.state_dict())
    supernet.train()
    plain.train()
    sandwich(supernet)
    for _ in range(3):
        plain(X)
    for mid in (copy.deepcopy(supernet), pickle.loads(pickle.dumps(supernet))):
        same(mid.remove(), plain)
    narrow = copy.deepcopy(supernet)
    narrow(X, subnet=narrow.space.smallest()).sum().backward()
    same(narrow.remove(), plain)  # A narrow subnet alone moves nothing.
    supernet.eval()
    torch.testing.assert_close(supernet(X, subnet=largest), plain.eval()(X))
    torch.testing.assert_close(supernet.extract(largest)(X), plain(X))
    same(supernet.remove(), plain)


def calibrated(supernet: Supernet) -> None:
    calibrate(supernet, [supernet.space.largest()], [X + 1], progress=False, adopt=False)


def trained(supernet: Supernet, calibrating: bool = False) -> None:
    sandwich(supernet.train())
    if calibrating:
        calibrated(supernet)
    supernet.eval()


def given_statistics(supernet: Supernet) -> None:
    calibrated(supernet)
    table = NormTable(supernet.space.id)
    table.update({s: row.map(lambda t: t + 0.5) for s, row in supernet.norms.rows.items()})
    supernet.load_state_dict(supernet.state_dict(), norms=table)


CHANGES: dict[str, Callable[[Supernet], Any]] = {
    "nothing": lambda s: None,
    "distilled": lambda s: distill_(s, [(X, LABELS)], held_out=HELD_OUT, **QUIET),
    "calibrated": calibrated,
    "trained": trained,
    "calibrated while it trains": lambda s: trained(s, calibrating=True),
    "given statistics": given_statistics,
}


@pytest.mark.parametrize("change", CHANGES)
def test_its_state_is_the_largest_subnet(change: str) -> None:
    plain, supernet = plain_and_elastic(Net())
    fresh, outer = copy.deepcopy(plain), nn.ModuleList([supernet])
    CHANGES[change](supernet)
    with torch.no_grad():
        wanted = supernet(X, subnet=supernet.space.largest())
        small = supernet(X, subnet=supernet.space.smallest())
        before = supernet.fingerprint()
        state = supernet.state_dict()
        plain.load_state_dict(state)
        torch.testing.assert_close(plain(X), wanted)
        assert supernet.fingerprint() == before
        assert torch.equal(supernet(X, subnet=supernet.space.smallest()), small), "asking changes nothing"
        assert all(p.data_ptr() == state[n].data_ptr() for n, p in supernet.network.named_parameters())
        fresh.load_state_dict({n.removeprefix("0."): t for n, t in outer.state_dict().items()})
        torch.testing.assert_close(fresh(X), wanted)
        supernet.load_state_dict(state)
        torch.testing.assert_close(supernet(X, subnet=supernet.space.largest()), wanted)
        torch.testing.assert_close(supernet.remove()(X), wanted)


class Steady(nn.BatchNorm2d):
    """A BatchNorm that never trains."""

    def train(self, mode: bool = True) -> Steady:
        super().train(False)
        return self


class Freezing(Net):
    """A network whose `train` freezes some modules, after it did something."""

    def __init__(
        self, frozen: Frozen, first: Callable[[Any, bool], Any] = lambda network, mode: None
    ) -> None:
        super().__init__()
        self.frozen, self.first = frozen, first

    def train(self, mode: bool = True) -> Freezing:
        if self.first is not None:
            self.first(self, mode)
        super().train(mode)
        freeze(self, self.frozen)
        return self


Frozen = Callable[[str, nn.Module], bool]
RECIPES: dict[str, Frozen] = {
    "by isinstance": lambda _, module: isinstance(module, nn.BatchNorm2d),
    "by class name": lambda _, module: "BatchNorm" in module.__class__.__name__,
    "one part": lambda name, _: name.endswith("norm2"),
}


def freeze(network: nn.Module, frozen: Frozen) -> None:
    for name, module in network.named_modules():
        if frozen(name, module):
            module.eval()


def without_momentum(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    **{f"train, {name}": (partial(Freezing, frozen), nn.Module.modules) for name, frozen in RECIPES.items()},
    **{f"loop, {name}": (Net, partial(freeze, frozen=frozen)) for name, frozen in RECIPES.items()},
    "a norm itself": (partial(Net, Steady), nn.Module.modules),
    "a momentum of zero": (Net, without_momentum),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_freezes_norms_freezes_those_of_a_supernet(way: str) -> None:
    make, change = WAYS[way]
    plain, supernet = plain_and_elastic(make())
    for network in (plain.train(), supernet.train()):
        change(network)
    torch.testing.assert_close(supernet(X, subnet=supernet.space.largest()), plain(X))
    sandwich(supernet)
    for _ in range(3):
        plain(X)
    supernet.eval()
    same(supernet.remove(), plain)


def raising(network: nn.Module, mode: bool) -> None:
    if mode:
        raise RuntimeError("this network is for inference")


def merging(network: Any, mode: bool) -> None:
    """Change weights in `train`, as merged adapters do."""
    if mode:
        network.conv.weight.data.sub_(1)
        network.requires_grad_(False)


def test_a_train_of_ones_own_is_tried_and_refused_where_it_does_not_know_operators() -> None:
    for first in (raising, merging):
        network = Freezing(lambda *_: False, first).eval()
        before = copy.deepcopy(network.state_dict())
        supernet = insert_(network, example=X[:2])
        assert all(torch.equal(tensor, before[name]) for name, tensor in supernet.state_dict().items())
        assert all(parameter.requires_grad for parameter in supernet.parameters())
    network = Freezing(lambda _, module: type(module) is nn.BatchNorm2d).eval()
    modules = dict(network.named_modules())
    with pytest.raises(InsertError, match=r"Freezing.norm stays in evaluation mode in model.train\(\)"):
        insert_(network, example=X[:2])
    assert dict(network.named_modules()) == modules


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_an_operator_of_a_norm_is_a_norm_and_an_operator(copied: Callable[[Any], Any]) -> None:
    norm = copied(plain_and_elastic(Net(Steady))[1]).network.norm
    assert all(isinstance(norm, kind) for kind in (nn.BatchNorm2d, Steady, SubnetNorm))
    assert type(norm) is SubnetNorm
    assert repr(norm).startswith("SubnetNorm(Steady(16")
    assert not norm.train().training


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Dropout(0.5), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.part(x))


@pytest.mark.parametrize("frozen", [("norm",), ("norm", "norm2"), ("part",), ("part.0", "norm2"), ()])
@pytest.mark.parametrize("error", [False, True])
def test_distillation_gives_parts_back_in_their_modes(frozen: tuple[str, ...], error: bool) -> None:
    _, supernet = plain_and_elastic(Dropping())
    supernet.train()
    for name in frozen:
        supernet.network.get_submodule(name).eval()
    modes = {name: module.training for name, module in supernet.named_modules()}
    seen: list[dict[str, bool]] = []

    class Seeing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append({name: module.training for name, module in supernet.named_modules()})
            return super().step(closure)

    statistics = {n: t.clone() for n, t in supernet.network.named_buffers()}
    given = {
        "optimizer": Seeing(supernet.parameters(), 0.01),
        "metric": (lambda o, y: "no number") if error else None,
    }
    try:
        distill_(supernet, [(X, LABELS)], held_out=HELD_OUT, **QUIET, **given)
    except TrainingError:
        assert error
    else:
        assert seen[-1] == modes
    assert {name: module.training for name, module in supernet.named_modules()} == modes
    for name, tensor in supernet.network.named_buffers():
        if name.rpartition(".")[0] in frozen:
            assert torch.equal(tensor, statistics[name])


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "update_bn": (lambda s: update_bn([X], s), "call subnetact.calibrate"),
    "update_bn of an average": (lambda s: update_bn([X], AveragedModel(s)), "call subnetact.calibrate"),
    "torch's SyncBatchNorm": (nn.SyncBatchNorm.convert_sync_batchnorm, "convert BatchNorms before insert_"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_would_replace_or_measure_norms_is_refused(other: str) -> None:
    function, message = OTHERS[other]
    supernet = plain_and_elastic(Net())[1]
    before, modules = supernet.state_dict(), list(supernet.modules())
    with pytest.raises(InsertError, match=message):
        function(supernet)
    after = supernet.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert list(supernet.modules()) == modules
    assert not supernet.training


@pytest.mark.parametrize(
    "averaged", [AveragedModel, lambda s: AveragedModel(nn.ModuleList([s]), use_buffers=True)]
)
def test_an_average_of_the_weights_is_calibrated(averaged: Callable[[Any], AveragedModel]) -> None:
    supernet = plain_and_elastic(Net())[1]
    average, spec = averaged(supernet), supernet.space.smallest()
    average.update_parameters(supernet)
    inner: Any = next(module for module in average.modules() if isinstance(module, Supernet))
    calibrate(inner, [spec], [X], progress=False)
    calibrate(supernet, [spec], [X], progress=False)
    assert torch.equal(inner(X, subnet=spec), supernet(X, subnet=spec))


def test_a_teacher_keeps_its_frozen_parts() -> None:
    teacher, supernet = plain_and_elastic(Dropping())
    teacher.train()
    teacher.norm.eval()
    modes, before = [module.training for module in teacher.modules()], copy.deepcopy(teacher.state_dict())
    distill_(supernet, [(X, LABELS)], teacher, held_out=HELD_OUT, **QUIET)
    assert [module.training for module in teacher.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


LEARNING: dict[str, tuple[dict[str, Any], int]] = {
    "the usual": ({}, -100),
    "a share of labels": ({"distillation": 0.5}, -100),
    "a frozen teacher": ({"teacher": "frozen"}, -100),
    "an own divergence": ({"divergence": F.mse_loss}, -100),
    "an ignore_index": ({"loss": nn.CrossEntropyLoss(ignore_index=0)}, 0),
    "an own loss": ({"loss": partial(F.cross_entropy, ignore_index=255)}, 255),
}
SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pixels": (lambda: nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1)), (4, 4)),
    "a sequence": (lambda: nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.Conv1d(16, 4, 1)), (6,)),
    "rows": (lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4)), ()),
}
"""Scores per position, each of them from its own input alone."""


def dense_data(places: tuple[int, ...], ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, others that differ where the labels do not count only, and the labels."""
    torch.manual_seed(3)
    x, y = torch.randn(6, 3, *places), torch.randint(1, 4, (6, *places))
    counts = torch.rand(y.shape) < 0.5
    other = torch.where(counts.unsqueeze(1), x, x + 5)
    assert not counts.all()
    return x, other, y.where(counts, torch.tensor(ignored))


def learnt(make: Callable[[], nn.Module], x: Tensor, y: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    supernet = insert_(make().eval(), example=x)
    optimizer = torch.optim.SGD(supernet.parameters(), 0.1)
    given: dict[str, Any] = {**QUIET, "optimizer": optimizer, **options}
    distill_(supernet, [(x, y)], held_out=[(x.clone(), y)], metric=lambda *_: 0.0, **given)
    return torch.cat([p.detach().flatten() for p in supernet.parameters()])


@pytest.mark.parametrize("learning", LEARNING)
@pytest.mark.parametrize("shape", SHAPES)
def test_labels_that_do_not_count_teach_nothing(shape: str, learning: str) -> None:
    (make, places), (options, ignored) = SHAPES[shape], LEARNING[learning]
    x, other, y = dense_data(places, ignored)
    weights = learnt(make, x, y, **options)
    torch.testing.assert_close(weights, learnt(make, other, y, **options))
    assert not torch.allclose(weights, learnt(make, x + 0.5, y, **options)), "what counts does teach"
    if ignored == -100 and learning != "a frozen teacher":  # not even by the weight of its batch
        torch.manual_seed(0)
        before = torch.cat([p.detach().flatten() for p in insert_(make().eval(), example=x).parameters()])
        assert torch.equal(learnt(make, x, torch.full_like(y, -100), **options), before)
