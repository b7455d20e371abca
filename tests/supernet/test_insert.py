"""insert_ puts operators into ordinary networks, all or none; every operator slices by its rule."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

from subnetact import (
    Axis,
    SubnetSpace,
    Supernet,
    insert_,
)
from subnetact.errors import InsertError, SpecError
from subnetact.operators import LayerSelect, SubnetNorm, WeightSlice

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def space_of(**choices: list[int]) -> SubnetSpace:
    axes = [Axis.uniform(name, ["it"], values) for name, values in choices.items()]
    return SubnetSpace("test", axes, lambda v: {name: v[name][0] for name in choices})


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Mixed(nn.Module):
    """A network with every kind of convolution and a stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 16, 1, groups=4, bias=False)
        self.over_time = nn.Conv1d(16, 12, 3)
        self.stack = nn.ModuleList([Residual() for _ in range(4)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.plain(x)))
        x = self.grouped(self.depthwise(x)).flatten(2)
        x = self.over_time(x).mean(2)
        for layer in self.stack:
            x = layer(x)
        return self.head(x)


def mixed() -> Supernet:
    torch.manual_seed(0)
    network = Mixed().eval()
    network.norm.running_mean.normal_()
    network.norm.running_var.uniform_(0.5, 2)
    space = SubnetSpace(
        "mixed",
        [Axis.uniform("c", ["it"], [4, 6, 8]), Axis.uniform("t", ["it"], [6, 12]),
         Axis.uniform("keep", ["0", "1", "2", "3"], [0, 1])],
        lambda v: {"c": v["c"][0], "2c": 2 * v["c"][0], "t": v["t"][0],
                   **{f"keep{i}": k for i, k in enumerate(v["keep"])}},
    )  # fmt: skip
    elastic = {
        "plain": WeightSlice.on(out="c"),
        "norm": SubnetNorm.on(channels="c"),
        "depthwise": WeightSlice.on(out="c", in_="c"),
        "grouped": WeightSlice.on(in_="c", out="2c"),
        "over_time": WeightSlice.on(in_="2c", out="t"),
        "stack": LayerSelect.on(**{str(i): f"keep{i}" for i in range(4)}),
        **{f"stack.{i}.linear": WeightSlice.on(in_="t", out="t") for i in range(4)},
        "head": WeightSlice.on(in_="t"),
    }
    return insert_(network, space, elastic)


def reference(supernet: Supernet, x: torch.Tensor, c: int, t: int, keep: tuple[int, ...]) -> torch.Tensor:
    """Compute the same subnet with functions of the full weights."""
    w = supernet.state_dict()
    x = F.conv2d(x, w["plain.weight"][:c], w["plain.bias"][:c], padding=1)
    mean, var, gamma, beta = (w[f"norm.{n}"][:c] for n in ("running_mean", "running_var", "weight", "bias"))
    x = F.relu(F.batch_norm(x, mean, var, gamma, beta))
    x = F.conv2d(x, w["depthwise.weight"][:c], w["depthwise.bias"][:c], padding=1, groups=c)
    x = F.conv2d(x, w["grouped.weight"][: 2 * c], groups=c // 2).flatten(2)
    x = F.conv1d(x, w["over_time.weight"][:t, : 2 * c], w["over_time.bias"][:t]).mean(2)
    for i in range(4):
        if keep[i]:
            x = x + torch.tanh(
                F.linear(x, w[f"stack.{i}.linear.weight"][:t, :t], w[f"stack.{i}.linear.bias"][:t])
            )
    return F.linear(x, w["head.weight"][:, :t], w["head.bias"])


def test_every_subnet_equals_functions_of_the_full_weights() -> None:
    supernet, x = mixed(), torch.randn(2, 3, 6, 6)
    for c, t, keep in itertools.product([4, 6, 8], [6, 12], itertools.product([0, 1], repeat=4)):
        spec = supernet.space.spec(c=c, t=t, keep=keep)
        expected = reference(supernet, x, c, t, keep)
        torch.testing.assert_close(supernet.subnet(spec)(x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(supernet.extract(spec)(x), expected, rtol=1e-5, atol=1e-6)
    view = supernet.subnet(supernet.space.spec(c=4, t=6, keep=[0, 1, 0, 1]))
    assert (view.depthwise.groups, view.grouped.groups, view.grouped.out_channels) == (4, 2, 8)
    assert (view.head.in_features, len(view.stack), view.norm.num_features) == (6, 4, 4)
    assert type(view.plain).__name__ == "Conv2d"
    assert isinstance(view.plain, nn.Conv2d)


def test_the_report_says_what_was_touched_and_what_was_not() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    supernet = insert_(
        network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c"), "1": SubnetNorm.on(channels="c")}
    )
    assert dict(supernet.report.elastic) == {"0": "WeightSlice(out=c)", "1": "SubnetNorm(channels=c)"}
    assert supernet.report.fixed == ("2",)
    assert "fixed: 2" in str(supernet.report)


def test_fixed_batchnorms_become_subnet_norms_too() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    supernet = insert_(
        network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c"), "1": WeightSlice.on(in_="c")}
    )
    assert list(supernet.norm_operators()) == ["2"]


@pytest.mark.parametrize(
    ("elastic", "message"),
    [
        ({"0": WeightSlice.on(out="d")}, "no dimension 'd'; it has c"),
        ({"0": WeightSlice.on(channels="c")}, "no part 'channels'; choose from out, in_"),
        ({"1": WeightSlice.on(out="c")}, "slices layers of the kind convolution"),
        ({"0": SubnetNorm.on(channels="c")}, "layers of the kind batch norm"),
        ({"2": WeightSlice.on(out="c")}, "the largest subnet has 8 at c, the module only 4"),
        ({"0": LayerSelect.on(x="c")}, "a stack of layers is"),
        ({"": LayerSelect.on(**{"7": "c"})}, "wrap it in a Sequential"),
        ({"3": LayerSelect.on(**{"7": "c"})}, r"no layers \['7'\]"),
        ({"0": "c"}, "'c' is no description"),
        ({"4": WeightSlice.on(out="c")}, "no module '4'"),
    ],
)
def test_a_description_that_does_not_fit_changes_nothing(elastic: dict, message: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Sequential())
    before = list(network.children())
    with pytest.raises(InsertError, match=message):
        insert_(network, space_of(c=[2, 8]), {"1": SubnetNorm.on(channels="c"), **elastic})
    assert list(network.children()) == before


def test_networks_that_would_leave_a_view_are_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1))
    network.run = network.forward
    with pytest.raises(InsertError, match="'run' holds a method bound"):
        insert_(network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c")})
    network = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1)))
    with pytest.raises(InsertError, match="fold_"):
        insert_(network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c")})
    network = nn.Sequential(nn.Conv2d(3, 8, 1))
    torch.nn.utils.prune.l1_unstructured(network[0], "weight", 0.5)
    with pytest.raises(InsertError, match="fold_"):
        insert_(network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c")})
    network = nn.Sequential(nn.Conv2d(3, 8, 1))
    insert_(network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c")})
    with pytest.raises(InsertError, match="already has operators"):
        insert_(network, space_of(c=[2, 8]), {})


def test_choices_must_ascend() -> None:
    with pytest.raises(InsertError, match="c is 8 in the smallest subnet and 2 in the largest"):
        insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), space_of(c=[8, 2]), {"0": WeightSlice.on(out="c")})


def test_groups_must_stay_whole() -> None:
    network = nn.Sequential(nn.Conv2d(8, 8, 1, groups=4))
    supernet = insert_(network, space_of(c=[3, 8]), {"0": WeightSlice.on(out="c", in_="c")})
    with pytest.raises(SpecError, match=r"out=3 is not legal; choose from 2 to 8 in steps of 2"):
        supernet.subnet(supernet.space.smallest())


def test_sizes_outside_the_module_are_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 8))
    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [1, 2])], lambda v: {"c": 0 if v["c"][0] == 1 else 8})
    supernet = insert_(network, space, {"0": WeightSlice.on(out="c")})
    with pytest.raises(SpecError, match=r"0: out=0 is not legal; choose from 1 to 8$"):
        supernet.subnet(space.smallest())


def test_one_module_used_twice_stays_one_module() -> None:
    shared = nn.Linear(4, 4)
    network = nn.Sequential(shared, nn.Tanh(), shared)
    supernet = insert_(network, space_of(c=[4]), {"0": WeightSlice.on(out="c", in_="c")})
    view = supernet.subnet(supernet.space.largest())
    assert view[0] is view[2]
    extracted = supernet.extract(supernet.space.largest())
    assert extracted[0] is extracted[2]


def test_torchvision_resnet18_is_made_elastic() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    network = resnet18().eval()
    names = [f"layer{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)]
    widths = {f"layer{s}.{b}": 64 * 2 ** (s - 1) for s in (1, 2, 3, 4) for b in (0, 1)}
    space = SubnetSpace(
        "resnet18",
        [Axis.uniform("hidden", names, [0.25, 0.5, 1.0]), Axis.uniform("keep", names[1::2], [0, 1])],
        lambda v: {
            **{n: int(widths[n] * h) for n, h in zip(names, v["hidden"], strict=True)},
            **{f"{n}.keep": k for n, k in zip(names[1::2], v["keep"], strict=True)},
        },
    )
    elastic = {f"layer{s}": LayerSelect.on(**{"1": f"layer{s}.1.keep"}) for s in (1, 2, 3, 4)}
    for name in names:
        elastic[f"{name}.conv1"] = WeightSlice.on(out=name)
        elastic[f"{name}.bn1"] = SubnetNorm.on(channels=name)
        elastic[f"{name}.conv2"] = WeightSlice.on(in_=name)
    plain = resnet18().eval()
    plain.load_state_dict(network.state_dict())
    supernet, x = insert_(network, space, elastic), torch.randn(2, 3, 64, 64)
    assert not supernet.training
    torch.testing.assert_close(supernet(x), plain(x), rtol=0, atol=0)
    spec = space.spec(hidden=0.25, keep=[1, 0, 1, 0])
    torch.testing.assert_close(supernet(x, subnet=spec), supernet.extract(spec)(x), rtol=0, atol=0)
    assert sum(p.numel() for p in supernet.extract(spec).parameters()) < 0.4 * sum(
        p.numel() for p in plain.parameters()
    )
