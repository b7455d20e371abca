"""reorder_: the full network stays, and narrow subnets keep the most important units."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from small_families import small_inputs, small_supernet
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written, seeded

import subnetact
from subnetact import LayerSelect, SubnetNorm, WeightSlice, reorder_
from subnetact.errors import InsertError, SpecError, UncalibratedSubnetWarning
from subnetact.insertion import ChannelGroup, UnitWeights
from subnetact.insertion.units import Trial, UnitGroup, unit_groups
from subnetact.operators import AttentionSlice, ElasticAttribute, LayerNormSlice, Segments
from subnetact.supernet.load import held_tensors
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
PLAIN = {"atol": 5e-5, "rtol": 1e-5}
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


def randomised(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_bias)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.2, 2)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            module.running_mean = torch.randn(module.num_features) * 0.2
            module.running_var = torch.rand(module.num_features) + 0.5
    return network.eval()


def residual() -> nn.Module:
    forward = lambda m, x: x + m.conv2(F.relu(m.bn1(m.conv1(x)), inplace=True))  # noqa: E731
    conv1, bn1 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
    return Written(forward, conv1=conv1, bn1=bn1, conv2=nn.Conv2d(8, 6, 1))


def convs(keep: bool = False) -> tuple[Any, Supernet]:
    """Return a stem, two residual blocks with hidden channels, and a classifier."""
    torch.manual_seed(0)
    forward = lambda m, x: m.head(m.blocks(m.stem(x)).mean((2, 3)))  # noqa: E731
    blocks = nn.Sequential(residual(), residual())
    network = randomised(Written(forward, stem=nn.Conv2d(3, 6, 3, padding=1), blocks=blocks, head=(6, 4)))
    original = copy.deepcopy(network)
    elastic = {"blocks": LayerSelect.on(**{"1": "keep1"})} if keep else {}
    for i in range(2):
        elastic |= {
            f"blocks.{i}.conv1": WeightSlice.on(out="width"),
            f"blocks.{i}.bn1": SubnetNorm.on(channels="width"),
            f"blocks.{i}.conv2": WeightSlice.on(in_="width"),
        }
    choices = {"width": [3, 8], **({"keep1": [0, 1]} if keep else {})}
    return original, subnetact.insert_(network, space_of("reorder", **choices), elastic)


def pre_norm(m: Any, x: Tensor) -> Tensor:
    x = m.token(m.embed(x))
    q, k, v = m.qkv(m.norm1(x)).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    x = x + m.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    gate, up = m.gate_up(m.norm2(x)).chunk(2, -1)
    return m.head((x + m.down(F.silu(gate) * up)).mean(1))  # type: ignore[no-any-return]


def fused() -> tuple[Any, Supernet]:
    """Return a transformer block with fused queries, keys and values, and a fused gate."""
    torch.manual_seed(0)
    token = Written(lambda m, x: x + m.token, token=nn.Parameter(torch.randn(16)))
    norms = {"norm1": nn.LayerNorm(16), "norm2": nn.LayerNorm(16)}
    layers = {"embed": (12, 16), "qkv": (16, 36), "proj": (12, 16), "gate_up": (16, 20), "down": (10, 16)}
    network: Any = Written(pre_norm, token=token, **norms, **layers, head=(16, 3)).eval()
    for norm in (network.norm1, network.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    original = copy.deepcopy(network)
    space = space_of(
        "reorder",
        lambda v: {"stream": 4 * v["w"] + 4, "heads": 4 * v["w"], "neurons": 3 * v["w"] + 1},
        w=[1, 3],
    )
    stream = LayerNormSlice.on(features="stream")
    elastic = {
        "token": ElasticAttribute.on(token="stream"),
        "embed": WeightSlice.on(out="stream"),
        "norm1": stream,
        "norm2": stream,
        "qkv": WeightSlice.on(in_="stream", out=Segments(*[("heads", 12)] * 3)),
        "proj": WeightSlice.on(in_="heads", out="stream"),
        "gate_up": WeightSlice.on(in_="stream", out=Segments(*[("neurons", 10)] * 2)),
        "down": WeightSlice.on(in_="neurons", out="stream"),
        "head": WeightSlice.on(in_="stream"),
    }
    return original, subnetact.insert_(network, space, elastic)


def outputs(network: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return network(x)


def test_hidden_channels_are_sorted_and_narrow_subnets_keep_the_best() -> None:
    original, supernet = convs()
    report = reorder_(supernet, "l1", IMAGES)
    assert report.reordered == {"blocks.0.conv1.out": 8, "blocks.1.conv1.out": 8}
    described = subnetact.insert_(copy.deepcopy(original), example=IMAGES)
    report = reorder_(described, "l1", IMAGES)
    assert report.reordered == {"stem.out": 6, "blocks.0.conv1.out": 8, "blocks.1.conv1.out": 8}
    assert report.kept == {}
    torch.testing.assert_close(outputs(described, IMAGES), outputs(original, IMAGES), **PLAIN)
    torch.testing.assert_close(outputs(supernet, IMAGES), outputs(original, IMAGES), **PLAIN)
    with torch.no_grad():  # The best three channels of the original alone, the others silent:
        for block in original.blocks:
            score = block.conv1.weight.abs().sum((1, 2, 3)) + block.conv2.weight.abs().sum((0, 2, 3))
            block.conv2.weight[:, score.argsort(descending=True)[3:]] = 0
    narrow = supernet.space.smallest()
    torch.testing.assert_close(outputs(supernet.subnet(narrow), IMAGES), outputs(original, IMAGES), **PLAIN)


def test_inference_mode_changes_nothing() -> None:
    batches = [(IMAGES, torch.tensor([0, 1, 2]))]
    for importance in ("l1", "taylor"):
        (_, expected), (_, supernet) = convs(), convs()
        reorder_(expected, importance, batches=batches)
        with torch.inference_mode():
            reorder_(supernet, importance, batches=batches)
        assert supernet.fingerprint() == expected.fingerprint()
        assert not any(tensor.is_inference() for tensor in held_tensors(supernet))


def test_batch_norm_scales_give_the_order() -> None:
    original, supernet = convs()
    reorder_(supernet, "batch_norm", IMAGES)
    state = supernet.state_dict()
    for i in range(2):
        scale = original.blocks[i].bn1.weight.abs()
        assert torch.equal(state[f"blocks.{i}.bn1.weight"].abs(), scale.sort(descending=True).values)
        order = scale.argsort(descending=True)
        for name in ("running_mean", "running_var", "bias"):
            assert torch.equal(state[f"blocks.{i}.bn1.{name}"], getattr(original.blocks[i].bn1, name)[order])
    assert torch.equal(state["stem.weight"], original.stem.weight)


@pytest.mark.parametrize("output", [{}, {"output": lambda scores: 3.0 * scores.flip(1)}])
def test_taylor_scores_are_weights_times_gradients(output: dict[str, Any]) -> None:
    read = output.get("output", lambda scores: scores)
    original, supernet = convs()
    batches = [(IMAGES, torch.tensor([0, 1, 2])), (IMAGES.flip(0), torch.tensor([3, 1, 0]))]
    totals = [torch.zeros(8), torch.zeros(8)]
    for x, labels in batches:
        original.zero_grad()
        F.cross_entropy(read(original(x)), labels).backward()
        for total, block in zip(totals, original.blocks, strict=True):
            total += (block.conv1.weight * block.conv1.weight.grad).sum((1, 2, 3)).abs()
            total += (block.conv2.weight * block.conv2.weight.grad).sum((0, 2, 3)).abs()
            for parameter in (block.bn1.weight, block.bn1.bias):
                total += (parameter * parameter.grad).abs()
    reorder_(supernet, "taylor", batches=batches, **output)
    for i, total in enumerate(totals):
        order = total.argsort(descending=True)
        moved = supernet.state_dict()[f"blocks.{i}.conv1.weight"]
        assert torch.equal(moved, original.blocks[i].conv1.weight[order])


def test_taylor_scores_of_what_linear_layers_read_are_inputs_times_gradients() -> None:
    original, supernet = fused()
    original.requires_grad_()
    inputs: list[torch.Tensor] = []
    for name in ("proj", "down"):
        layer = original.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, args: (args[0].retain_grad(), inputs.append(args[0]))[1])
    original(TOKENS).square().sum().backward()
    changes = [(x * x.grad).abs().flatten(0, -2).sum(0) for x in inputs]
    before = {name: original.get_submodule(name).weight.clone() for name in ("proj", "down")}
    pairs, given = [(TOKENS, torch.zeros(()))], ["heads", "neurons"]
    reorder_(supernet, "taylor", batches=pairs, loss=lambda y, _: y.square().sum(), dimensions=given)
    state = supernet.state_dict()
    heads = changes[0].view(3, 4).sum(1).argsort(descending=True)
    columns = (4 * heads[:, None] + torch.arange(4)).flatten()
    assert torch.equal(state["down.weight"], before["down"][:, changes[1].argsort(descending=True)])
    assert torch.equal(state["proj.weight"], before["proj"][:, columns])


def test_heads_move_as_a_whole_and_fused_layers_per_segment() -> None:
    original, supernet = fused()
    view = supernet.subnet(supernet.space.largest())
    report = reorder_(supernet, "l1", TOKENS)
    assert report.reordered == {"embed.out": 16, "qkv.out.0": 3, "gate_up.out.0": 10}
    torch.testing.assert_close(outputs(view, TOKENS), outputs(original, TOKENS), **PLAIN)
    own = dict(original.named_parameters())
    rows = own["qkv.weight"].abs().sum(1).view(3, 3, 4).sum((0, 2))
    score = rows + own["proj.weight"].abs().sum(0).view(3, 4).sum(1)
    heads = score.argsort(descending=True)
    columns = (
        own["embed.weight"].abs().sum(1)
        + own["proj.weight"].abs().sum(1)
        + own["down.weight"].abs().sum(1)
        + own["qkv.weight"].abs().sum(0)
        + own["gate_up.weight"].abs().sum(0)
        + own["head.weight"].abs().sum(0)
    ).argsort(descending=True)
    expected = own["qkv.weight"].view(3, 3, 4, 16)[:, heads][..., columns].flatten(0, 2)
    assert torch.equal(supernet.state_dict()["qkv.weight"], expected)
    assert torch.equal(supernet.state_dict()["token.token"], own["token.token"][columns])


def grouped_queries(m: Any, x: Tensor) -> Tensor:
    """Let four query heads of four features share two keys and values."""
    q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (m.q, m.k, m.v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    rotation = torch.linspace(1, 2, 4)  # The features of a head differ, as with rotary embeddings.
    return x + m.o(F.scaled_dot_product_attention(q * rotation, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def joined() -> nn.Module:
    """Return convolutions on both sides of the input, which are concatenated."""
    forward = lambda m, x: m.mix(m.bn(torch.cat([m.left(x), x, m.right(x)], 1)).relu())  # noqa: E731
    sides = {"left": nn.Conv2d(3, 4, 1), "right": nn.Conv2d(3, 6, 1)}
    return Written(forward, **sides, bn=nn.BatchNorm2d(13), mix=nn.Conv2d(13, 5, 1))


def encoder() -> nn.Module:
    """Return the attention of torch, and a scale of every neuron."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + m.attention(x, x, x, need_weights=False)[0]
        return x + m.down(F.relu(m.up(x)) * m.gamma)  # type: ignore[no-any-return]

    attention, gamma = nn.MultiheadAttention(12, 3, batch_first=True), nn.Parameter(torch.randn(9))
    return Written(forward, attention=attention, up=(12, 9), down=(9, 12), gamma=gamma)


def tied() -> nn.Module:
    """Return an embedding and a head of one weight."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.words(x)
        return m.head(x + m.mix(x).relu())  # type: ignore[no-any-return]

    network: Any = Written(forward, bias=False, words=nn.Embedding(20, 8), mix=(8, 8), head=(8, 20))
    network.head.weight = network.words.weight
    return network  # type: ignore[no-any-return]


def grouped_convolutions() -> nn.Module:
    first = nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.Conv2d(12, 24, 3, padding=1, groups=4), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 5, 1))


def flattened() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4))


def on(**parts: Any) -> Any:
    return WeightSlice.on(**parts)


SIDES = Segments(("left", 4), (None, 3), ("right", 6))
ORDER = [3, 2, 1, 0, 4, 5, 6, 12, 11, 10, 9, 8, 7]


class Structure(NamedTuple):
    """A network, what is elastic, sizes, an input, units per group, and where their reversal moves them."""

    make: Callable[[], nn.Module]
    elastic: dict[str, Any]
    sizes: Callable[[dict[str, int]], dict[str, int]]
    choices: list[int]
    x: Tensor
    units: list[int]
    moved: dict[str, Callable[[Tensor], Tensor]]


STRUCTURES = {
    "keys and values that query heads share": Structure(
        lambda: Written(grouped_queries, q=(12, 16), k=(12, 8), v=(12, 8), o=(16, 12)),
        {"q": on(out="queries"), "k": on(out="keys"), "v": on(out="keys"), "o": on(in_="queries")},
        lambda v: {"queries": 8 * v["w"], "keys": 4 * v["w"]},
        [1, 2],
        TOKENS,
        [2],
        {
            "q.weight": lambda t: t.view(2, 8, 12).flip(0).flatten(0, 1),
            "k.bias": lambda t: t.view(2, 4).flip(0).flatten(),
        },
    ),
    "whole groups of convolutions": Structure(
        grouped_convolutions,
        {
            **{"0": on(out="narrow"), "1": SubnetNorm.on(channels="narrow")},
            **{"2": on(in_="narrow", out="wide"), "4": on(in_="wide"), "5": on(in_="wide")},
        },
        lambda v: {"narrow": 3 * v["w"], "wide": 6 * v["w"]},
        [1, 4],
        IMAGES,
        [4],
        {"2.weight": lambda t: t.view(4, 6, 3, 3, 3).flip(0).flatten(0, 1)},
    ),
    "columns behind flattened maps": Structure(
        flattened,
        {"0": on(out="channels"), "3": on(in_="columns")},
        lambda v: {"channels": v["w"], "columns": 36 * v["w"]},
        [2, 5],
        IMAGES,
        [5],
        {"3.weight": lambda t: t.view(4, 5, 36).flip(1).flatten(1)},
    ),
    "segments behind a concatenation": Structure(
        joined,
        {
            **{"left": on(out="left"), "right": on(out="right")},
            **{"bn": SubnetNorm.on(channels=SIDES), "mix": on(in_=SIDES)},
        },
        lambda v: {"left": v["w"], "right": v["w"] + 2},
        [1, 4],
        IMAGES,
        [4, 6],
        {
            **{f"bn.{name}": lambda t: t[ORDER] for name in ("weight", "running_mean", "running_var")},
            "mix.weight": lambda t: t[:, ORDER],
        },
    ),
    "heads of torch and scales of neurons": Structure(
        lambda: nn.Sequential(encoder(), nn.Linear(12, 2)),
        {
            **{"0": ElasticAttribute.on(gamma="neurons"), "0.up": on(out="neurons")},
            **{"0.down": on(in_="neurons"), "0.attention": AttentionSlice.on(out="heads")},
            "0.attention.out_proj": on(in_="heads"),
        },
        lambda v: {"heads": 4 * v["w"], "neurons": 3 * v["w"]},
        [1, 3],
        TOKENS,
        [3, 9],
        {
            "0.gamma": lambda t: t.flip(0),
            "0.attention.in_proj_weight": lambda t: t.view(3, 3, 4, 12).flip(1).flatten(0, 2),
        },
    ),
    "tied weights": Structure(
        tied,
        {"words": on(out="w"), "mix": on(in_="w", out="w"), "head": on(in_="w")},
        dict,
        [4, 8],
        torch.arange(20)[None],
        [8],
        {"head.weight": lambda t: t.flip(1)},
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_units_move_with_all_that_reads_and_writes_them(name: str) -> None:
    structure = STRUCTURES[name]
    torch.manual_seed(0)
    network = randomised(structure.make())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = outputs(network, structure.x)
    space = space_of("reorder", structure.sizes, w=structure.choices)
    supernet = subnetact.insert_(network, space, structure.elastic)
    report = reorder_(supernet, lambda group: torch.arange(group.units).float(), structure.x)
    assert sorted(report.reordered.values()) == structure.units
    torch.testing.assert_close(outputs(supernet, structure.x), expected, **PLAIN)
    state = supernet.state_dict()
    for name, moved in structure.moved.items():
        assert torch.equal(state[name], moved(before[name])), name


def gradless(m: Any, x: Tensor) -> Tensor:
    """Run without gradients, not at all with them, or read how often the network was called."""
    if m.how == "changed in place":
        m.last.bias.mul_(1)
    with torch.set_grad_enabled(m.how == "changed in place"):
        hidden = m.first(x).relu()
        if m.how == "reads its calls":
            m.calls += 1
            hidden = hidden * (m.calls > 0)
        return m.last(m.second(hidden).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["without gradients", "changed in place", "reads its calls"])
def test_layers_that_no_graph_connects_have_one_order_per_dimension(how: str) -> None:
    network = seeded(gradless, first=(12, 8), second=(8, 8), last=(8, 3), how=how, calls=0)
    expected = outputs(copy.deepcopy(network), TOKENS)
    elastic = {"first": on(out="width"), "second": on(in_="width", out="width"), "last": on(in_="width")}
    supernet = subnetact.insert_(network, space_of(width=[4, 8]), elastic)
    connected = {} if how == "reads its calls" else {"second.out": 8}
    assert reorder_(supernet, "l1", TOKENS).reordered == {"first.out": 8, **connected}
    torch.testing.assert_close(outputs(supernet, TOKENS), expected, **PLAIN)


@pytest.mark.parametrize(
    ("family", "groups"),
    [("ofa_resnet50", 34), ("attentivenas", 39), ("dynabert", 12), ("hydravit", 5)],
)
def test_published_families_stay_the_same_networks(family: str, groups: int) -> None:
    supernet, inputs = small_supernet(family), small_inputs(family, 2)
    x = inputs if len(inputs) > 1 else inputs["x"]
    view = supernet.subnet(supernet.space.largest())
    with torch.no_grad():
        before = view(**inputs)
        narrow = supernet(**inputs, subnet=supernet.space.smallest())
        report = reorder_(supernet, "l1", x)
        after = view(**inputs)
        assert (after - before).abs().max() <= 1e-5 * before.abs().max()
        changed = supernet(**inputs, subnet=supernet.space.smallest())
    assert (changed - narrow).abs().max() > 1e-3 * narrow.abs().max()
    assert (len(report.reordered), report.kept) == (groups, {})


def test_own_scores_choose_and_leave_groups() -> None:
    original, supernet = convs()
    seen: list[ChannelGroup] = []

    def first_block(group: ChannelGroup) -> Tensor | None:
        seen.append(group)
        return torch.arange(8.0) if "blocks.0.conv1" in group.modules else None

    report = reorder_(supernet, first_block, IMAGES)
    assert report.reordered == {"blocks.0.conv1.out": 8}
    assert report.kept == {"blocks.1.conv1.out": "its importance is not known"}
    assert torch.equal(
        supernet.state_dict()["blocks.0.conv1.weight"], original.blocks[0].conv1.weight.flip(0)
    )
    assert torch.equal(supernet.state_dict()["blocks.1.conv1.weight"], original.blocks[1].conv1.weight)
    assert [(g.units, g.dimensions) for g in seen] == [(8, ("width",))] * 2
    assert all(isinstance(weight, UnitWeights) for group in seen for weight in group.weights)
    assert {(w.parameter, w.role, tuple(w.values.shape)) for w in seen[0].weights} == {
        ("weight", "writes", (8, 54)),
        ("weight", "keeps", (8, 1)),
        ("bias", "keeps", (8, 1)),
        ("weight", "reads", (8, 6)),
    }


def test_statistics_of_shallower_subnets_move_and_those_of_narrow_ones_go() -> None:
    _, supernet = convs(keep=True)
    space = supernet.space
    shallow, narrow = space.spec(width=8, keep1=0), space.spec(width=3, keep1=1)
    subnetact.calibrate(supernet, [shallow, narrow, space.largest()], [IMAGES], progress=False)
    before = {spec: outputs(supernet.subnet(spec), IMAGES) for spec in (shallow, space.largest())}
    with pytest.warns(UncalibratedSubnetWarning, match="statistics of 1 narrow subnets are gone"):
        report = reorder_(supernet, "l1", IMAGES)
    assert report.dropped == 1
    assert set(supernet.norms) == {shallow, space.largest()}
    for spec, expected in before.items():
        torch.testing.assert_close(outputs(supernet.subnet(spec), IMAGES), expected, **PLAIN)
    subnetact.calibrate(supernet, [narrow], [IMAGES], progress=False)
    with torch.no_grad():
        found = supernet.subnet(narrow)(IMAGES)
        torch.testing.assert_close(found, supernet.extract(narrow)(IMAGES), rtol=5e-5, atol=5e-5)


def test_engines_and_copies_follow() -> None:
    original, supernet = fused()
    engine = subnetact.Engine(
        supernet, [supernet.space.smallest(), supernet.space.largest()], example=TOKENS[:1]
    )
    engine(TOKENS, subnet=0)
    reorder_(supernet, "l1", TOKENS)
    torch.testing.assert_close(engine(TOKENS, subnet=1), outputs(original, TOKENS), **PLAIN)
    expected = outputs(supernet.extract(supernet.space.smallest()), TOKENS)
    torch.testing.assert_close(engine(TOKENS, subnet=0), expected, **PLAIN)
    assert supernet.check(TOKENS).ran


def positions(m: Any, x: Tensor) -> Tensor:
    """Read the order of channels, which no operator follows."""
    x = m.up(x)
    if m.how in ("numbered", "zeros"):
        x = x * torch.arange(1, 1 + x.shape[-1]).to(x)
    if m.how == "output":
        return x
    return m.down(x.relu()) + (m.side(x) if m.how == "forgotten" else 0)  # type: ignore[no-any-return]


def feeding() -> nn.Module:
    return Written(lambda m, x: x + m.down(m.up(x).relu()), up=(12, 8), down=(8, 12))


def test_an_order_that_would_change_the_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, supernet = convs()
    fingerprint, norms = supernet.fingerprint(), supernet.norms

    def found(supernet: Supernet, trial: Trial) -> list[UnitGroup]:
        groups = unit_groups(supernet, trial)
        monkeypatch.setattr(Trial, "stays", lambda *_: False)
        return groups

    monkeypatch.setattr("subnetact.insertion.reorder.unit_groups", found)
    with pytest.raises(InsertError, match=r"would change by more than rounding.* The supernet is unchanged"):
        reorder_(supernet, "l1", IMAGES)
    assert supernet.fingerprint() == fingerprint
    assert len(supernet.norms) == len(norms)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("numbered", r"the output would change, first at 0\.down \(Linear\)"),
        ("zeros", "the output would change"),
        ("output", "it reaches the output of the network"),
        ("forgotten", r"the output would change, first at 0\.side \(Linear\)"),
    ],
)
def test_what_reads_the_order_of_channels_is_left_alone(how: str, reason: str) -> None:
    torch.manual_seed(0)
    reading: Any = Written(positions, up=(12, 8), down=(8, 12), side=(8, 12), how=how)
    network, at, other = nn.Sequential(reading, feeding(), nn.Linear(12, 3)), "0", "1"
    if how == "zeros":
        nn.init.zeros_(reading.down.weight)
    if how == "output":
        network, at, other = nn.Sequential(feeding(), reading), "1", "0"
    elastic = {f"{at}.up": on(out="width"), f"{at}.down": on(in_="width")}
    elastic |= {f"{other}.up": on(out="hidden"), f"{other}.down": on(in_="hidden")}
    space = space_of("reorder", lambda v: {**v, "hidden": v["width"]}, width=[4, 8])
    supernet = subnetact.insert_(network.eval(), space, elastic)
    before, fingerprint = outputs(supernet, TOKENS), supernet.fingerprint()
    with pytest.raises(InsertError, match=rf"{at}\.up\.out \(dimension width\) cannot be sorted: {reason}"):
        reorder_(supernet, "l1", TOKENS, dimensions=["width"])
    assert supernet.fingerprint() == fingerprint
    report = reorder_(supernet, "l1", TOKENS)
    assert list(report.reordered) == [f"{other}.up.out"]
    assert reason.replace("\\", "") in str(report)
    torch.testing.assert_close(outputs(supernet, TOKENS), before, **PLAIN)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"importance": "size"}, SpecError, "no importance 'size'; choose from l1, batch_norm, taylor"),
        ({"importance": 3}, SpecError, "no importance 3; choose from .*, or give a function"),
        ({"example": None}, SpecError, "give a batch that it takes"),
        ({"importance": "taylor"}, SpecError, '"taylor" needs batches'),
        ({"dimensions": ["height"]}, SpecError, "no dimensions height; choose from width"),
        ({"example": torch.zeros(1, 5)}, InsertError, r"largest subnet does not run .*: stem \(Conv2d\): "),
        ({"importance": lambda _: torch.ones(3)}, SpecError, r"8 finite scores .*, got of shape \(3,\)"),
        ({"importance": lambda g: torch.full((g.units,), torch.nan)}, SpecError, "8 finite scores"),
        ({"importance": lambda _: 1.0}, SpecError, "got float"),
        ({"supernet": nn.Linear(3, 3)}, InsertError, "expected a Supernet"),
        (
            {"supernet": subnetact.insert_(nn.Linear(12, 3).eval(), space_of(w=[1]), {}), "example": TOKENS},
            InsertError,
            "nothing is elastic",
        ),
    ],
)
def test_bad_arguments_change_nothing(arguments: Any, error: type[Exception], message: str) -> None:
    _, supernet = convs()
    fingerprint = supernet.fingerprint()
    with pytest.raises(error, match=message):
        reorder_(**{"supernet": supernet, "importance": "l1", "example": IMAGES, **arguments})
    assert supernet.fingerprint() == fingerprint
