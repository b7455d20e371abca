"""Segments: fused layers and modules behind a concatenation, against networks that are cut by hand."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from elastic_networks import plain_engine
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written

import subnetact
import subnetact.costs
from subnetact import SubnetNorm, SubnetSpec, WeightSlice
from subnetact.operators import ElasticAttribute, LayerNormSlice, Segments
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
PLAIN = {"atol": 5e-5, "rtol": 1e-5}


def heads(m: Any, x: Tensor) -> Tensor:
    """Attend with fused queries, keys and values, as in timm: 4 heads of 8 features."""
    q, k, v = m.qkv(m.norm(x)).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OfOne(Written):
    """A network of one input that has a name, which exports need."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


def attending(beside: bool) -> Any:
    """Return the attention, with or without the input beside its heads in front of the last layer."""
    join = lambda m, x: torch.cat([heads(m, x), x], -1) if beside else heads(m, x)  # noqa: E731
    proj = (56 if beside else 32, 24)
    torch.manual_seed(0)
    return OfOne(lambda m, x: x + m.proj(join(m, x)), norm=nn.LayerNorm(24), qkv=(24, 96), proj=proj).eval()


def behind_a_concatenation(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.left(x), m.whole(x), m.right(x)], 1)
    return m.head(F.relu(m.mix(F.relu(m.bn2(m.depthwise(F.relu(m.bn(x))))))).mean((2, 3)))  # type: ignore[no-any-return]


HEADS = space_of("attention", lambda v: {"features": 8 * v["heads"]}, heads=[1, 2, 3, 4])
QKV = WeightSlice.on(out=Segments(*[("features", 32)] * 3))


def attention() -> tuple[Any, Supernet]:
    network = attending(False)
    elastic = {"qkv": QKV, "proj": WeightSlice.on(in_="features")}
    return copy.deepcopy(network), subnetact.insert_(network, HEADS, elastic)


def joined() -> tuple[Any, Supernet]:
    """Return a supernet of which no weight of a linear layer is copied."""
    network = attending(True)
    original = copy.deepcopy(network)
    elastic = {"qkv": QKV, "proj": WeightSlice.on(in_=Segments(("features", 32), (None, 24)))}
    supernet = subnetact.insert_(network, HEADS, elastic)
    supernet.packs = False
    return original, supernet


def dense() -> tuple[Any, Supernet]:
    """Return three convolutions, of which two are elastic, and what comes behind their concatenation."""
    torch.manual_seed(0)
    sides = zip(("left", "whole", "right"), (8, 4, 6), strict=True)
    layers: dict[str, Any] = {name: nn.Conv2d(3, n, 3, padding=1) for name, n in sides}
    layers |= {"bn": nn.BatchNorm2d(18), "depthwise": nn.Conv2d(18, 36, 3, padding=1, groups=18)}
    layers |= {"bn2": nn.BatchNorm2d(36), "mix": nn.Conv2d(36, 10, 1), "head": (10, 5)}
    network = OfOne(behind_a_concatenation, **layers).eval()
    for name, tensor in network.state_dict().items():
        if name.startswith("bn") and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    original = copy.deepcopy(network)
    space = space_of(
        "dense",
        lambda v: {**v, **{f"{side}2": 2 * width for side, width in v.items()}},
        **{"left": [2, 5, 8], "right": [1, 6]},
    )
    once = Segments(("left", 8), (None, 4), ("right", 6))
    double = Segments(("left2", 16), (None, 8), ("right2", 12))
    elastic = {
        "left": WeightSlice.on(out="left"),
        "right": WeightSlice.on(out="right"),
        "bn": SubnetNorm.on(channels=once),
        "depthwise": WeightSlice.on(in_=once),
        "bn2": SubnetNorm.on(channels=double),
        "mix": WeightSlice.on(in_=double),
    }
    return original, subnetact.insert_(network, space, elastic)


def channels(left: int, right: int, each: int = 1) -> list[int]:
    """Return the channels behind the concatenation that a subnet keeps."""
    return [*range(left * each), *range(8 * each, 12 * each), *range(12 * each, (12 + right) * each)]


def pruned_dense(net: Any, spec: SubnetSpec, x: Tensor) -> Tensor:
    left, right = (int(spec[side][0] or 0) for side in ("left", "right"))

    def norm(bn: Any, kept: list[int], y: Tensor) -> Tensor:
        tensors = (tensor[kept] for tensor in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
        return F.batch_norm(y, *tensors, eps=bn.eps)

    kept, double = channels(left, right), channels(left, right, 2)
    y = torch.cat([net.left(x)[:, :left], net.whole(x), net.right(x)[:, :right]], 1)
    y = F.relu(norm(net.bn, kept, y))
    weight, bias = (parameter[double] for parameter in (net.depthwise.weight, net.depthwise.bias))
    y = F.relu(norm(net.bn2, double, F.conv2d(y, weight, bias, padding=1, groups=len(kept))))
    y = F.conv2d(y, net.mix.weight[:, double], net.mix.bias)
    return net.head(F.relu(y).mean((2, 3)))


def zeroed_attention(net: Any, spec: SubnetSpec, x: Tensor) -> Tensor:
    """Return the output of the full network in which the values of the unused heads are zero."""
    net, heads = copy.deepcopy(net), int(spec["heads"][0] or 0)
    with torch.no_grad():
        net.qkv.weight[64 + 8 * heads :] = 0
        net.qkv.bias[64 + 8 * heads :] = 0
        return net(x)


class Case(NamedTuple):
    """A supernet, an input, what a subnet computes, and parts of tensors that the smallest one reads."""

    make: Callable[[], tuple[Any, Supernet]]
    x: Tensor
    cut: Callable[[Any, SubnetSpec, Tensor], Tensor]
    used: dict[str, tuple[int, list[int]]]


ROWS = [*range(8), *range(32, 40), *range(64, 72)]
TOKENS = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))
FUSED = {"qkv.weight": (0, ROWS), "qkv.bias": (0, ROWS)}
CASES = {
    "attention": Case(attention, TOKENS, zeroed_attention, {**FUSED, "proj.weight": (1, [*range(8)])}),
    "joined": Case(
        joined, TOKENS, zeroed_attention, {**FUSED, "proj.weight": (1, [*range(8), *range(32, 56)])}
    ),
    "dense": Case(
        dense,
        IMAGES,
        pruned_dense,
        {
            **{"left.weight": (0, [0, 1]), "left.bias": (0, [0, 1])},
            **{"right.weight": (0, [0]), "right.bias": (0, [0])},
            **{f"bn.{name}": (0, channels(2, 1)) for name in ("weight", "bias")},
            **{f"{name}": (0, channels(2, 1, 2)) for name in ("depthwise.weight", "bn2.weight", "bn2.bias")},
            "mix.weight": (1, channels(2, 1, 2)),
        },
    ),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EVERY
def test_subnets_equal_the_network_that_is_cut_by_hand(case: Case) -> None:
    original, supernet = case.make()
    costs, outputs = subnetact.costs.CostModel(supernet, case.x), []
    for spec in supernet.space.enumerate():
        expected = case.cut(original, spec, case.x)
        view, extracted = supernet.subnet(spec), supernet.extract(spec)
        with torch.no_grad():
            torch.testing.assert_close(view(case.x), expected, **PLAIN)
            torch.testing.assert_close(extracted(case.x), expected, **PLAIN)
        assert {n: t.shape for n, t in view.state_dict().items()} == {
            n: t.shape for n, t in extracted.state_dict().items()
        }
        assert {type(m) for m in extracted.modules()} == {type(m) for m in original.modules()}
        assert costs(spec).parameters == sum(p.numel() for p in extracted.parameters())
        plain = subnetact.insert_(extracted, space_of(only=[1]), {})
        assert costs(spec).macs == subnetact.costs.CostModel(plain, case.x)(plain.space.largest()).macs
        outputs.append(expected)
    assert torch.equal(supernet(case.x), original(case.x))
    assert min((a - b).abs().max() for a, b in itertools.combinations(outputs, 2)) > 1e-3
    quick, thorough = (supernet.check(case.x, thorough=thorough) for thorough in (False, True))
    assert not quick.not_compared
    assert quick.compared
    assert set(quick.compared) < set(thorough.compared)


@EVERY
def test_a_subnet_reads_and_trains_its_own_rows_only(case: Case) -> None:
    supernet = case.make()[1]
    spec, state = supernet.space.smallest(), supernet.state_dict()
    with torch.no_grad():
        expected = supernet(case.x, subnet=spec)
    supernet.train()
    supernet(case.x, subnet=spec).square().sum().backward()
    supernet.eval()
    for name, (axis, kept) in case.used.items():
        gradient: Any = supernet.network.get_parameter(name).grad
        if name.endswith("weight"):
            rows = gradient.abs().movedim(axis, 0).reshape(len(state[name].movedim(axis, 0)), -1)
            assert rows.sum(1).nonzero().flatten().tolist() == kept
        unused = [i for i in range(state[name].shape[axis]) if i not in kept]
        with torch.no_grad():
            state[name].index_fill_(axis, torch.tensor(unused), torch.nan)
    with torch.no_grad():
        assert torch.equal(supernet(case.x, subnet=spec), expected)
        assert supernet(case.x).isnan().any()


def test_training_the_largest_subnet_updates_the_shared_statistics() -> None:
    original, supernet = dense()
    supernet.train()(IMAGES, subnet=supernet.space.largest())
    y = torch.cat([original.left(IMAGES), original.whole(IMAGES), original.right(IMAGES)], 1)
    expected = 0.9 * original.bn.running_mean + 0.1 * y.mean((0, 2, 3))
    torch.testing.assert_close(supernet.state_dict()["bn.running_mean"], expected.detach(), **PLAIN)


def sliced(segments: Segments, sizes: dict[str, int], part: str, module: nn.Module) -> Any:
    choices = {name: sorted({size, longest(segments, name)}) for name, size in sizes.items()}
    operator = {
        nn.Linear: WeightSlice,
        nn.Conv1d: WeightSlice,
        nn.BatchNorm1d: SubnetNorm,
        nn.LayerNorm: LayerNormSlice,
    }
    elastic = {"0": operator.get(type(module), ElasticAttribute).on(**{part: segments})}
    supernet = subnetact.insert_(nn.Sequential(module).eval(), space_of("rule", **choices), elastic)
    return supernet.subnet(supernet.space.parse({name: [size] for name, size in sizes.items()}))[0]


def longest(segments: Segments, name: str) -> int:
    return min(length for dimension, length in segments.segments if dimension == name)


def entries(segments: Segments, sizes: dict[str, int]) -> list[int]:
    found, start = list[int](), 0
    for name, length in segments.segments:
        found += range(start, start + (length if name is None else sizes[name]))
        start += length
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_operator_keeps_the_beginning_of_every_segment(seed: int) -> None:
    rng = random.Random(seed)
    given = [(rng.choice(["a", "b", None]), rng.randint(1, 6)) for _ in range(rng.randint(1, 5))]
    segments = Segments(("a", rng.randint(1, 6)), *given)
    sizes = {n: rng.randint(1, longest(segments, n)) for n, _ in segments.segments if n is not None}
    total, kept = sum(segments.lengths), entries(segments, sizes)
    one_run = kept == list(range(len(kept)))
    own = Written(lambda m, x: x + m.token, token=nn.Parameter(torch.randn(2, total)))
    modules: dict[str, tuple[str, Any, int, Tensor]] = {
        "linear out": ("out", nn.Linear(3, total), 0, torch.randn(2, 3)),
        "linear in": ("in_", nn.Linear(total, 3), 1, torch.randn(2, len(kept))),
        "convolution in": ("in_", nn.Conv1d(total, 3, 2), 1, torch.randn(2, len(kept), 4)),
        "depthwise": ("out", nn.Conv1d(total, total, 2, groups=total), 0, torch.randn(2, len(kept), 4)),
        "batch norm": ("channels", nn.BatchNorm1d(total), 0, torch.randn(2, len(kept), 4)),
        "layer norm": ("features", nn.LayerNorm(total), 0, torch.randn(2, len(kept))),
        "parameter": ("token", own, 1, torch.randn(2, len(kept))),
    }
    for what, (part, module, axis, x) in modules.items():
        name = "token" if what == "parameter" else "weight"
        full = module.get_parameter(name)
        nn.init.normal_(full)
        found = sliced(segments, sizes, part, module)
        tensor = found.get_parameter(name)
        assert torch.equal(tensor, full.index_select(axis, torch.tensor(kept))), what
        shares = tensor.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert shares == one_run, (what, segments)
        assert found(x).isfinite().all()


@EVERY
@pytest.mark.parametrize("budget", [0, 64])
def test_views_engines_and_programs_follow_the_weights(case: Case, budget: int) -> None:
    _, supernet = case.make()
    specs = list(supernet.space.enumerate())
    fused = budget > 0 and case.make is dense
    engine = subnetact.Engine(
        supernet, specs, example=case.x[:1], memory_budget_mb=budget, allow_uncalibrated=True
    )
    engine.prepare([len(case.x)])
    held = supernet.subnet(specs[0])
    for turn in range(3):
        with torch.no_grad():
            for i, spec in enumerate(specs):
                assert bool(engine.pin(i)) == fused
                expected = supernet.extract(spec)(case.x)
                torch.testing.assert_close(supernet.subnet(spec)(case.x), expected, **PLAIN)
                torch.testing.assert_close(engine(case.x, subnet=i), expected, **PLAIN)
                if i == 0 and turn < 2:
                    torch.testing.assert_close(held(case.x), expected, **PLAIN)
            assert engine.stats().fused == (len(specs) if fused else 0)
            for parameter in supernet.parameters():
                parameter.mul_(0.9)
        if turn == 1:
            supernet.load_state_dict({n: t * 1.1 for n, t in supernet.state_dict().items()})


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("name", ["joined", "dense"])
def test_exported_files_equal_the_views(name: str, tmp_path: Path) -> None:
    from subnetact.export import load_exported, to_onnx, to_torchscript

    pytest.importorskip("onnxruntime")
    case = CASES[name]
    _, supernet = case.make()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    engine = plain_engine(supernet, specs, case.x)
    to_torchscript(engine, tmp_path / "m.pt")
    scripted = torch.jit.load(tmp_path / "m.pt")
    exported = load_exported(to_onnx(engine, tmp_path / "onnx", progress=False), trusted=True)
    with torch.no_grad():
        for i, spec in enumerate(specs):
            expected = supernet.subnet(spec)(case.x)
            torch.testing.assert_close(scripted(case.x, torch.tensor([i])), expected, **PLAIN)
            torch.testing.assert_close(exported(case.x, subnet=i), expected, **PLAIN)
