"""Segments: fused layers and modules behind a concatenation, against networks that are cut by hand."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_engines import plain_engine
from torch import Tensor, nn

import subnetact
import subnetact.costs
from subnetact import Axis, SubnetNorm, SubnetSpace, WeightSlice
from subnetact.errors import InsertError, SpecError
from subnetact.operators import ElasticAttribute, ElasticKernel, LayerNormSlice, Operator, Segments
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
PLAIN = {"atol": 5e-5, "rtol": 1e-5}


class Attention(nn.Module):
    """Attention with fused queries, keys and values, as in timm: 4 heads of 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.qkv = nn.Linear(24, 96)
        self.proj = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """Three convolutions, of which two are elastic, and what comes behind their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.whole, self.right = (nn.Conv2d(3, n, 3, padding=1) for n in (8, 4, 6))
        self.bn = nn.BatchNorm2d(18)
        self.depthwise = nn.Conv2d(18, 36, 3, padding=1, groups=18)
        self.bn2 = nn.BatchNorm2d(36)
        self.mix = nn.Conv2d(36, 10, 1)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x), self.whole(x), self.right(x)], 1)
        x = F.relu(self.bn2(self.depthwise(F.relu(self.bn(x)))))
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


def attention() -> tuple[Attention, Supernet]:
    torch.manual_seed(0)
    network = Attention().eval()
    original = copy.deepcopy(network)
    space = SubnetSpace(
        "attention", [Axis.uniform("heads", ["all"], [1, 2, 3, 4])], lambda v: {"features": 8 * v["heads"][0]}
    )
    elastic = {
        "qkv": WeightSlice.on(out=Segments(*[("features", 32)] * 3)),
        "proj": WeightSlice.on(in_="features"),
    }
    return original, subnetact.insert_(network, space, elastic)


class Joined(Attention):
    """The attention, with the input beside its heads in front of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(56, 24)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.proj(torch.cat([heads, x], -1))


def joined() -> tuple[Joined, Supernet]:
    """Return a supernet of which no weight of a linear layer is copied."""
    torch.manual_seed(0)
    network = Joined().eval()
    original = copy.deepcopy(network)
    elastic = {
        "qkv": WeightSlice.on(out=Segments(*[("features", 32)] * 3)),
        "proj": WeightSlice.on(in_=Segments(("features", 32), (None, 24))),
    }
    supernet = subnetact.insert_(network, attention()[1].space, elastic)
    supernet.packs = False
    return original, supernet


CONCATENATION = (("left", 8), (None, 4), ("right", 6))
DOUBLE = tuple((name, 2 * length) for name, length in (("left2", 8), (None, 4), ("right2", 6)))


def dense() -> tuple[Dense, Supernet]:
    torch.manual_seed(0)
    network = Dense().eval()
    for norm in (network.bn, network.bn2):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
        norm.running_mean = torch.randn(norm.num_features)
        norm.running_var = torch.rand(norm.num_features) + 0.5
    original = copy.deepcopy(network)
    space = SubnetSpace(
        "dense",
        [Axis.uniform("left", ["all"], [2, 5, 8]), Axis.uniform("right", ["all"], [1, 6])],
        lambda v: {
            **{side: v[side][0] for side in ("left", "right")},
            **{f"{side}2": 2 * v[side][0] for side in ("left", "right")},
        },
    )
    elastic = {
        "left": WeightSlice.on(out="left"),
        "right": WeightSlice.on(out="right"),
        "bn": SubnetNorm.on(channels=Segments(*CONCATENATION)),
        "depthwise": WeightSlice.on(in_=Segments(*CONCATENATION)),
        "bn2": SubnetNorm.on(channels=Segments(*DOUBLE)),
        "mix": WeightSlice.on(in_=Segments(*DOUBLE)),
    }
    return original, subnetact.insert_(network, space, elastic)


TOKENS = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))
CASES = [
    pytest.param(attention, TOKENS, id="attention"),
    pytest.param(dense, IMAGES, id="dense"),
    pytest.param(joined, TOKENS, id="joined"),
]


def channels(left: int, right: int, each: int = 1) -> list[int]:
    """Return the channels behind the concatenation that a subnet keeps."""
    return [*range(left * each), *range(8 * each, 12 * each), *range(12 * each, (12 + right) * each)]


def pruned_dense(net: Dense, left: int, right: int, x: Tensor) -> Tensor:
    def norm(bn: nn.BatchNorm2d, kept: list[int], y: Tensor) -> Tensor:
        return F.batch_norm(
            y, bn.running_mean[kept], bn.running_var[kept], bn.weight[kept], bn.bias[kept], eps=bn.eps
        )

    kept, double = channels(left, right), channels(left, right, 2)
    y = torch.cat([net.left(x)[:, :left], net.whole(x), net.right(x)[:, :right]], 1)
    y = F.relu(norm(net.bn, kept, y))
    y = F.conv2d(y, net.depthwise.weight[double], net.depthwise.bias[double], padding=1, groups=len(kept))
    y = F.relu(norm(net.bn2, double, y))
    y = F.conv2d(y, net.mix.weight[:, double], net.mix.bias)
    return net.head(F.relu(y).mean((2, 3)))


def zeroed_attention(net: Attention, heads: int, x: Tensor) -> Tensor:
    """Return the output of the full network in which the values of the unused heads are zero."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        net.qkv.weight[64 + 8 * heads :] = 0
        net.qkv.bias[64 + 8 * heads :] = 0
    return net(x)


def zeroed_dense(net: Dense, left: int, right: int, x: Tensor) -> Tensor:
    """Return the output of the full network in which nobody reads the unused channels."""
    net = copy.deepcopy(net)
    unused = sorted(set(range(36)) - set(channels(left, right, 2)))
    with torch.no_grad():
        net.mix.weight[:, unused] = 0
    return net(x)


def test_fused_attention_equals_the_original_with_zeroed_heads() -> None:
    original, supernet = attention()
    outputs = []
    for spec in supernet.space.enumerate():
        (heads,) = spec["heads"]
        expected = zeroed_attention(original, heads, TOKENS)
        with torch.no_grad():
            torch.testing.assert_close(supernet(TOKENS, subnet=spec), expected, **PLAIN)
            torch.testing.assert_close(supernet.extract(spec)(TOKENS), expected, **PLAIN)
        view = supernet.subnet(spec)
        assert (view.qkv.out_features, view.qkv.weight.shape) == (24 * heads, (24 * heads, 24))
        outputs.append(expected)
    assert torch.equal(supernet(TOKENS), original(TOKENS))
    assert min((a - b).abs().max() for a, b in itertools.pairwise(outputs)) > 1e-2


def test_modules_behind_a_concatenation_equal_the_network_cut_by_hand() -> None:
    original, supernet = dense()
    for spec in supernet.space.enumerate():
        left, right = spec["left"][0], spec["right"][0]
        expected = pruned_dense(original, left, right, IMAGES)
        with torch.no_grad():
            torch.testing.assert_close(expected, zeroed_dense(original, left, right, IMAGES), **PLAIN)
            torch.testing.assert_close(supernet(IMAGES, subnet=spec), expected, **PLAIN)
            torch.testing.assert_close(supernet.extract(spec)(IMAGES), expected, **PLAIN)
        view = supernet.subnet(spec)
        assert view.depthwise.groups == view.bn.num_features == 4 + left + right
    assert torch.equal(supernet(IMAGES), original(IMAGES))


@pytest.mark.parametrize(("make", "x"), CASES)
def test_unused_rows_reach_no_output(make: Any, x: Tensor) -> None:
    _, supernet = make()
    spec = supernet.space.smallest()
    with torch.no_grad():
        expected = supernet(x, subnet=spec)
        used = {
            name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in supernet.state_dict().items()
        }
        row = supernet.space.resolve(spec)
        for operator in (m for m in supernet.network.modules() if isinstance(m, Operator)):
            marks = operator.__class__.__new__(type(operator))
            marks.__dict__.update(operator.__dict__)
            marks._parameters = {
                n: torch.arange(p.numel()).view(p.shape) for n, p in operator._parameters.items()
            }
            for name, kept in marks.tensors(operator.sizes(row)).items():
                used[f"{operator.path}.{name}"].view(-1)[kept.flatten()] = True
        described = {m.path for m in supernet.network.modules() if isinstance(m, Operator) and m.dims}
        for name, tensor in supernet.state_dict().items():
            if name.rpartition(".")[0] in described and name.endswith(("weight", "bias")):
                tensor[~used[name]] = float("nan")
        assert any(tensor.isnan().any() for tensor in supernet.state_dict().values())
        assert torch.equal(supernet(x, subnet=spec), expected)
        assert supernet(x).isnan().any()


# -- the slicing rule --------------------------------------------------------------------------------


def sliced(segments: Segments, sizes: dict[str, int], part: str, module: nn.Module) -> nn.Module:
    """Return the module of the subnet with the given sizes."""
    names = list(sizes)
    space = SubnetSpace(
        "rule",
        [Axis.uniform(name, ["all"], sorted({sizes[name], longest(segments, name)})) for name in names],
        lambda v: {name: v[name][0] for name in names},
    )
    operator = {
        nn.Linear: WeightSlice,
        nn.Conv1d: WeightSlice,
        nn.BatchNorm1d: SubnetNorm,
        nn.LayerNorm: LayerNormSlice,
    }
    elastic = {"0": operator.get(type(module), ElasticAttribute).on(**{part: segments})}
    supernet = subnetact.insert_(nn.Sequential(module).eval(), space, elastic)
    return supernet.subnet(supernet.space.parse({name: [size] for name, size in sizes.items()}))[0]


def longest(segments: Segments, name: str) -> int:
    return min(length for dimension, length in segments.segments if dimension == name)


def entries(segments: Segments, sizes: dict[str, int]) -> list[int]:
    found, start = [], 0
    for name, length in segments.segments:
        found += range(start, start + (length if name is None else sizes[name]))
        start += length
    return found


class Own(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(2, features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.token


@pytest.mark.parametrize("seed", range(20))
def test_every_operator_keeps_the_beginning_of_every_segment(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", None]
    given = [(rng.choice(names), rng.randint(1, 6)) for _ in range(rng.randint(1, 5))]
    segments = Segments(("a", rng.randint(1, 6)), *given)
    sizes = {n: rng.randint(1, longest(segments, n)) for n, _ in segments.segments if n is not None}
    total, kept = sum(segments.lengths), entries(segments, sizes)
    one_run = kept == list(range(len(kept)))
    modules: dict[str, tuple[str, nn.Module, int]] = {
        "linear out": ("out", nn.Linear(3, total), 0),
        "linear in": ("in_", nn.Linear(total, 3), 1),
        "convolution in": ("in_", nn.Conv1d(total, 3, 2), 1),
        "depthwise": ("out", nn.Conv1d(total, total, 2, groups=total), 0),
        "batch norm": ("channels", nn.BatchNorm1d(total), 0),
        "layer norm": ("features", nn.LayerNorm(total), 0),
        "parameter": ("token", Own(total), 1),
    }
    for what, (part, module, axis) in modules.items():
        full = dict(module.named_parameters()).get("weight")
        full = module.token if full is None else full
        nn.init.normal_(full)
        found = sliced(segments, sizes, part, module)
        tensor = found.token if what == "parameter" else found.weight
        assert torch.equal(tensor, full.index_select(axis, torch.tensor(kept))), what
        shares = tensor.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert shares == one_run, (what, segments)
        x = torch.randn(2, len(kept)) if part == "features" else None
        x = torch.randn(2, len(kept), 4) if what in ("batch norm", "depthwise", "convolution in") else x
        x = torch.randn(2, 3) if what == "linear out" else torch.randn(2, len(kept)) if x is None else x
        assert found(x).isfinite().all()


def test_the_input_projection_of_a_mamba_block() -> None:
    inner, state, heads = 8, 3, 4
    projection = Segments(("inner", inner), ("inner", inner), (None, 2 * state), ("heads", heads))
    convolved = Segments(("inner", inner), (None, 2 * state))
    space = SubnetSpace(
        "mamba",
        [Axis.uniform("heads", ["all"], [2, 4])],
        lambda v: {"inner": 2 * v["heads"][0], "heads": v["heads"][0]},
    )
    network = nn.Sequential(
        nn.Linear(5, sum(projection.lengths)), nn.Conv1d(14, 14, 2, groups=14), nn.Linear(inner, 5)
    )
    elastic = {
        "0": WeightSlice.on(out=projection),
        "1": WeightSlice.on(out=convolved),
        "2": WeightSlice.on(in_="inner"),
    }
    supernet = subnetact.insert_(network.eval(), space, elastic)
    original = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    view = supernet.subnet(space.smallest())
    rows = [*range(4), *range(8, 12), *range(16, 22), *range(22, 24)]
    assert torch.equal(view[0].weight, original["0.weight"][rows])
    assert torch.equal(view[0].bias, original["0.bias"][rows])
    assert torch.equal(view[1].weight, original["1.weight"][[*range(4), *range(8, 14)]])
    assert (view[1].groups, view[1].in_channels) == (10, 10)
    assert torch.equal(view[2].weight, original["2.weight"][:, :4])


def test_segments_are_data() -> None:
    segments = Segments(("heads", 768), (None, 64))
    assert segments == Segments(*segments.segments) == copy.deepcopy(segments)
    assert hash(Segments(*segments.segments)) == hash(segments)
    assert str(WeightSlice.on(out=segments)) == "WeightSlice(out=heads[768] + whole[64])"
    assert segments.lengths == (768, 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "there is no segment"),
        (("width",), r"'width' is not a segment"),
        ((("width", 0),), r"\('width', 0\) is not a segment"),
        ((("width", 1.5),), "is not a segment"),
        (((3, 3),), "is not a segment"),
        ((("width", True),), "is not a segment"),
    ],
)
def test_wrong_segments_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InsertError, match=message):
        Segments(*given)


def test_descriptions_that_do_not_fit_are_refused_and_change_nothing() -> None:
    space = SubnetSpace("s", [Axis.uniform("w", ["all"], [3, 8])], lambda v: {"w": v["w"][0]})
    cases = [
        (
            nn.Linear(4, 20),
            WeightSlice.on(out=Segments(("w", 8), ("w", 8))),
            "are 16 long together, .* is 20",
        ),
        (
            nn.Linear(4, 16),
            WeightSlice.on(out=Segments(("w", 4), ("w", 12))),
            "largest subnet has 8 at w, .* 4",
        ),
        (nn.Linear(4, 16), WeightSlice.on(out=Segments(("h", 8), ("w", 8))), "has no dimension 'h'"),
        (nn.Linear(4, 16), ElasticKernel.on(channels=Segments(("w", 8), ("w", 8))), "is one segment, got"),
        (
            nn.Conv1d(16, 16, 1, groups=4),
            WeightSlice.on(out=Segments(("w", 8), (None, 2), (None, 6))),
            "not whole groups of 4",
        ),
    ]
    for module, entry, message in cases:
        network = nn.Sequential(module)
        with pytest.raises(InsertError, match=message):
            subnetact.insert_(network, space, {"0": entry})
        assert network[0] is module


def test_a_size_that_splits_a_group_is_refused() -> None:
    space = SubnetSpace("s", [Axis.uniform("w", ["all"], [3, 8])], lambda v: {"w": v["w"][0]})
    entry = WeightSlice.on(out=Segments(("w", 8), (None, 8)))
    network = nn.Sequential(nn.Conv1d(16, 16, 1, groups=4))
    supernet = subnetact.insert_(network, space, {"0": entry})
    with pytest.raises(SpecError, match=r"0: out\.0=3 is not legal; choose from 4 to 8 in steps of 4"):
        supernet.subnet(space.smallest())


# -- copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "x"), CASES)
def test_copies_follow_the_weights(make: Any, x: Tensor) -> None:
    _, supernet = make()
    spec = supernet.space.smallest()
    view = supernet.subnet(spec)
    with torch.no_grad():
        view(x)
        for tensor in supernet.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(0.9)
        torch.testing.assert_close(view(x), supernet.extract(spec)(x), rtol=5e-5, atol=5e-5)
        supernet.load_state_dict({n: t * 2 for n, t in supernet.state_dict().items()})
        found = supernet.subnet(spec)(x)
        torch.testing.assert_close(found, supernet.extract(spec)(x), rtol=5e-5, atol=5e-5)
        own = {p.untyped_storage().data_ptr() for p in supernet.parameters()}
        extracted = supernet.extract(spec)
        assert not own & {p.untyped_storage().data_ptr() for p in extracted.parameters()}
        assert not any(hasattr(p, "packed") for p in copy.deepcopy(view).parameters())


def test_copies_are_made_once_per_layer_and_slice() -> None:
    _, supernet = dense()
    assert supernet.packed_bytes() == 0
    supernet.subnet(supernet.space.largest())
    assert supernet.packed_bytes() == 0  # All segments are whole.
    supernet.subnet(supernet.space.parse({"left": [8], "right": [1]}))
    assert supernet.packed_bytes() == 0  # Only the last segment is narrowed.
    for _ in range(2):
        supernet.refresh()
        for spec in supernet.space.enumerate():
            supernet.private_view(spec)
        copied = [(left, right) for left in (2, 5) for right in (1, 6)]
        # Per channel: 4 of bn, 2 * (9 + 1) of depthwise, 2 * 4 of bn2, 2 * 10 of mix.
        floats = sum((4 + left + right) * (4 + 20 + 8 + 20) for left, right in copied)
        assert supernet.packed_bytes() == 4 * floats
    engine = subnetact.Engine(supernet, [supernet.space.smallest()], allow_uncalibrated=True)
    assert engine.stats().packed_bytes == supernet.packed_bytes()


def test_linear_layers_multiply_without_copies() -> None:
    original, supernet = joined()
    assert torch.equal(supernet(TOKENS), original(TOKENS))
    for spec in supernet.space.enumerate():
        view, extracted = supernet.subnet(spec), supernet.extract(spec)
        torch.testing.assert_close(view(TOKENS), extracted(TOKENS), **PLAIN)
        assert {type(m) for m in extracted.modules()} == {Joined, nn.Linear, nn.LayerNorm}
        shapes = ({n: t.shape for n, t in net.state_dict().items()} for net in (view, extracted))
        assert next(shapes) == next(shapes)
        assert sum(p.numel() for p in view.parameters()) == sum(p.numel() for p in extracted.parameters())
    assert supernet.packed_bytes() == 4 * 3 * (8 + 16 + 24)  # the biases of queries, keys and values
    supernet.packs = True
    assert supernet.packed_bytes() == 0
    packed = supernet.subnet(supernet.space.smallest())
    assert type(packed.qkv).forward is nn.Linear.forward
    supernet.packs = False
    engine = subnetact.Engine(supernet, list(supernet.space.enumerate()), example=TOKENS, memory_budget_mb=64)
    engine.prepare([len(TOKENS)])
    for i, spec in enumerate(supernet.space.enumerate()):
        torch.testing.assert_close(engine(TOKENS, subnet=i), supernet.extract(spec)(TOKENS), **PLAIN)


# -- training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "x"), CASES)
def test_gradients_reach_the_used_rows_only(make: Any, x: Tensor) -> None:
    _, supernet = make()
    spec = supernet.space.smallest()
    supernet.train()
    supernet(x, subnet=spec).square().sum().backward()
    gradients = {name: p.grad for name, p in supernet.network.named_parameters()}
    if make is not dense:
        rows = gradients["qkv.weight"].abs().sum(1).nonzero().flatten().tolist()
        assert rows == [*range(8), *range(32, 40), *range(64, 72)]
    else:
        assert gradients["bn.weight"].nonzero().flatten().tolist() == channels(2, 1)
        assert gradients["mix.weight"].abs().sum((0, 2, 3)).nonzero().flatten().tolist() == channels(2, 1, 2)
        assert gradients["depthwise.weight"].flatten(1).abs().sum(1).nonzero().flatten().tolist() == channels(
            2, 1, 2
        )


def test_training_the_largest_subnet_updates_the_shared_statistics() -> None:
    original, supernet = dense()
    supernet.train()
    supernet(IMAGES, subnet=supernet.space.smallest())
    state = supernet.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in original.state_dict().items())
    supernet(IMAGES, subnet=supernet.space.largest())
    y = torch.cat([original.left(IMAGES), original.whole(IMAGES), original.right(IMAGES)], 1)
    expected = 0.9 * original.bn.running_mean + 0.1 * y.mean((0, 2, 3))
    torch.testing.assert_close(supernet.state_dict()["bn.running_mean"], expected.detach(), **PLAIN)


# -- everything behind -------------------------------------------------------------------------------


def test_calibrated_statistics_are_those_of_the_extracted_network() -> None:
    _, supernet = dense()
    specs = list(supernet.space.enumerate())
    subnetact.calibrate(supernet, specs, [IMAGES], progress=False, adopt=False)
    for spec in specs:
        extracted = supernet.extract(spec)
        network = copy.deepcopy(extracted).train()
        for norm in (network.bn, network.bn2):
            norm.momentum = 1.0
        network(IMAGES)
        n = IMAGES[:, 0].numel()
        for name in ("bn", "bn2"):
            ours, theirs = getattr(extracted, name), getattr(network, name)
            torch.testing.assert_close(ours.running_mean, theirs.running_mean, **PLAIN)
            torch.testing.assert_close(ours.running_var, theirs.running_var * (n - 1) / n, **PLAIN)
        with torch.no_grad():
            torch.testing.assert_close(supernet.subnet(spec)(IMAGES), extracted(IMAGES), rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(("make", "x"), CASES)
def test_costs_are_those_of_the_extracted_network(make: Any, x: Tensor) -> None:
    _, supernet = make()
    model = subnetact.costs.CostModel(supernet, x)
    for spec in supernet.space.enumerate():
        assert model(spec).parameters == sum(p.numel() for p in supernet.extract(spec).parameters())
        plain = subnetact.insert_(supernet.extract(spec), one_subnet(), {})
        assert model(spec).macs == subnetact.costs.CostModel(plain, x)(plain.space.largest()).macs


def one_subnet() -> SubnetSpace:
    return SubnetSpace("one", [Axis.uniform("only", ["all"], [1])], lambda _: {"only": 1})


@pytest.mark.parametrize(("make", "x"), CASES)
def test_torchscript_equals_the_views(make: Any, x: Tensor, tmp_path: Path) -> None:
    from subnetact.export import to_torchscript

    _, supernet = make()
    specs = list(supernet.space.enumerate())
    to_torchscript(plain_engine(supernet, specs, x), tmp_path / "m.pt")
    loaded = torch.jit.load(tmp_path / "m.pt")
    with torch.no_grad():
        for i, spec in enumerate(specs):
            torch.testing.assert_close(loaded(x, torch.tensor([i])), supernet.subnet(spec)(x), **PLAIN)


@pytest.mark.parametrize(("make", "x"), CASES)
def test_onnx_files_equal_the_views(make: Any, x: Tensor, tmp_path: Path) -> None:
    from subnetact.export import load_exported, to_onnx

    pytest.importorskip("onnxruntime")
    _, supernet = make()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    engine = subnetact.Engine(supernet, specs, example=x[:1], allow_uncalibrated=True)
    exported = load_exported(to_onnx(engine, tmp_path / "onnx", progress=False), trusted=True)
    for i, spec in enumerate(specs):
        with torch.no_grad():
            expected = supernet.subnet(spec)(x)
        torch.testing.assert_close(exported(x, subnet=i), expected, **PLAIN)


def test_fused_programs_follow_segments() -> None:
    _, supernet = dense()
    specs = list(supernet.space.enumerate())
    subnetact.calibrate(supernet, specs, [IMAGES], progress=False)
    engine = subnetact.Engine(supernet, specs, example=IMAGES[:1], memory_budget_mb=64)
    for _ in range(2):
        for i, spec in enumerate(specs):
            assert engine.pin(i)
            with torch.no_grad():
                expected = supernet.extract(spec)(IMAGES)
            torch.testing.assert_close(engine(IMAGES, subnet=i), expected, **PLAIN)
        assert engine.stats().fused == len(specs)
        with torch.no_grad():
            supernet.state_dict()["mix.weight"].mul_(2)
            supernet.state_dict()["bn.weight"].mul_(1.5)


def test_the_engine_follows_weights_without_fused_programs() -> None:
    _, supernet = dense()
    specs = list(supernet.space.enumerate())
    engine = subnetact.Engine(supernet, specs, example=IMAGES[:1], allow_uncalibrated=True)
    engine.prepare([4])
    with torch.no_grad():
        for tensor in supernet.parameters():
            tensor.mul_(1.1)
        for i, spec in enumerate(specs):
            expected = supernet.extract(spec)(IMAGES)
            torch.testing.assert_close(engine(IMAGES, subnet=i), expected, **PLAIN)


@pytest.mark.parametrize(("make", "x"), CASES)
def test_the_check_compares_segments_with_the_original(make: Any, x: Tensor) -> None:
    report = make()[1].check(x, thorough=False)
    assert len(report.compared) == (3 if make is dense else 1)
    assert not report.not_compared
    assert set(report.compared) < set(make()[1].check(x).compared)


def test_the_check_refuses_a_fused_layer_without_segments() -> None:
    network, space = Attention().eval(), attention()[1].space
    three = SubnetSpace(
        "wrong",
        space.axes,
        lambda v: {"features": 8 * v["heads"][0], "three": 24 * v["heads"][0]},
    )
    elastic = {"qkv": WeightSlice.on(out="three"), "proj": WeightSlice.on(in_="features")}
    with pytest.raises(InsertError, match="a slice there takes the wrong rows"):
        subnetact.insert_(network, three, elastic).check(TOKENS)
