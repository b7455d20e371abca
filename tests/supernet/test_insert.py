"""insert_ puts operators into ordinary networks, all or none; every operator slices by its rule."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written, seeded

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.operators import LayerSelect, SubnetNorm, WeightSlice
from subnetact.supernet.statistics import batch_norms

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


class Mixed(nn.Module):
    """A network with every kind of convolution and a stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 16, 1, groups=4, bias=False)
        self.over_time = nn.Conv1d(16, 12, 3)
        self.stack = nn.ModuleList(
            Written(lambda m, x: x + torch.tanh(m.linear(x)), linear=(12, 12)) for _ in range(4)
        )
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
    assert isinstance(view.plain, nn.Conv2d)


def test_the_report_says_what_was_touched_and_what_was_not() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    supernet = insert_(
        network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c"), "1": SubnetNorm.on(channels="c")}
    )
    assert dict(supernet.report.elastic) == {"0": "WeightSlice(out=c)", "1": "SubnetNorm(channels=c)"}
    assert supernet.report.fixed == ("2",)
    assert "fixed: 2" in str(supernet.report)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    elastic = {"0": WeightSlice.on(out="c"), "1": WeightSlice.on(in_="c")}
    supernet = insert_(convolutions, space_of(c=[2, 8]), elastic)
    assert list(batch_norms(supernet.network)) == ["2"], "statistics of fixed BatchNorms are of a subnet, too"


def test_one_module_used_twice_stays_one_module() -> None:
    shared = nn.Linear(4, 4)
    network = nn.Sequential(shared, nn.Tanh(), shared)
    supernet = insert_(network, space_of(c=[4]), {"0": WeightSlice.on(out="c", in_="c")})
    view = supernet.subnet(supernet.space.largest())
    assert view[0] is view[2]
    extracted = supernet.extract(supernet.space.largest())
    assert extracted[0] is extracted[2]


@torch.no_grad()
def test_layers_may_be_called_by_name_and_give_their_settings_away() -> None:
    class Layer(nn.Module):
        kind = "dense"

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(3, 3)

        @property
        def doubled(self) -> int:
            return 2 * self.number

        def forward(self, mask: Tensor, hidden: Tensor | None = None) -> Tensor:
            return self.linear(mask) if hidden is None else hidden

    def run(m: Any, x: Tensor) -> Tensor:
        first, layer = m.layers[0], m.layers[1]
        read = (layer.number, layer.doubled, layer.kind, layer.linear.in_features, len(m.layers))
        object.__setattr__(m, "read", read)
        return layer(hidden=None, mask=first(x)) if len(m.layers) == 3 else x  # type: ignore[no-any-return]

    space = space_of(keep=[0, 1])
    stack = seeded(run, layers=nn.ModuleList([Layer(i) for i in range(3)]))
    supernet = insert_(stack, space, {"layers": LayerSelect.on(**{"1": "keep"})})
    x = torch.randn(2, 3)
    for network in (supernet.subnet(space.smallest()), supernet.extract(space.smallest())):
        torch.testing.assert_close(network(x), supernet.network.layers._modules["0"](x), rtol=0, atol=0)
        assert network.read == (1, 2, "dense", 3, 3)
        with pytest.raises(AttributeError, match="Layer has no attribute 'weight' here: this subnet skips"):
            _ = network.layers[1].weight
    extracted = supernet.extract(space.smallest())
    names = [name for name, _ in extracted.named_parameters()]
    assert names == [f"layers.{i}.linear.{name}" for i in (0, 2) for name in ("weight", "bias")]
    del supernet, network
    gc.collect()
    assert copy.deepcopy(extracted)(x).shape == (2, 3)
