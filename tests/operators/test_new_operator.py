"""A new operator: its class and one line in the table of layer traits make a layer elastic everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subnetact
from subnetact.costs.model import CostModel
from subnetact.operators import LayerTraits, SubnetNorm, register_layer
from subnetact.operators.base import Operator, slicer_of
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


class Gated(nn.Module):
    """A linear layer with a gain per output: (N, in) to (N, out)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.gain = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.gain


class GatedSlice(Operator):
    """What the file of a new operator says."""

    slices = ("gated",)
    parts = ("out", "in_")


register_layer(
    Gated,
    LayerTraits(
        "gated",
        axes={"weight": ("out", "in_"), "gain": ("out",)},
        sizes={"out": "out_features", "in_": "in_features"},
        reads="in_",
        mixes=True,
        fresh=True,
        finite=True,
        operator=GatedSlice,
    ),
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), Gated(12, 8), nn.BatchNorm1d(8), nn.ReLU(), Gated(8, 12), nn.Linear(12, 3)]
    return nn.Sequential(*layers).eval()


@pytest.fixture
def supernet() -> Supernet:
    axis = subnetact.Axis.uniform("width", ["all"], [4, 8])
    space = subnetact.SubnetSpace("gated", [axis], lambda values: {"width": values["width"][0]})
    elastic = {
        "1": GatedSlice.on(out="width"),
        "2": SubnetNorm.on(channels="width"),
        "4": GatedSlice.on(in_="width"),
    }
    return subnetact.insert_(network(), space, elastic)


def test_the_rule_of_the_table_slices_the_layer(supernet: Supernet) -> None:
    space, plain = supernet.space, network()
    assert slicer_of(plain[1]) is GatedSlice
    assert supernet.check(X).compared == (space.smallest(),)
    view = supernet.subnet(space.smallest())
    assert (view[1].out_features, view[4].in_features) == (4, 4)
    assert {t.untyped_storage().data_ptr() for t in view.parameters()} <= {
        t.untyped_storage().data_ptr() for t in supernet.parameters()
    }
    hidden = (F.linear(plain[0](X), plain[1].weight[:4]) * plain[1].gain[:4]) / (1 + 1e-5) ** 0.5
    expected = plain[5](F.linear(hidden.relu(), plain[4].weight[:, :4]) * plain[4].gain)
    torch.testing.assert_close(view(X), expected)
    torch.testing.assert_close(supernet.extract(space.smallest())(X), expected)


def test_costs_calibration_and_engines_take_it(supernet: Supernet) -> None:
    specs = list(supernet.space.enumerate())
    model = CostModel(supernet, X)
    small, large = (model(spec) for spec in specs)
    assert large.macs - small.macs == 2 * 4 * 12
    assert large.parameters - small.parameters == 2 * 4 * 12 + 4 + 8
    subnetact.calibrate(supernet, specs, [X], progress=False)
    engine = subnetact.Engine(supernet, specs, example=X[:1], memory_budget_mb=16)
    for i, spec in enumerate(specs):
        torch.testing.assert_close(engine(X, i), supernet.extract(spec)(X), rtol=1e-4, atol=1e-5)


def test_it_stays_at_float32_where_the_operator_names_no_forward(supernet: Supernet) -> None:
    with pytest.raises(subnetact.errors.PrecisionError, match="float32 only"):
        supernet.enable_precision("int8")


def test_its_channels_can_be_sorted(supernet: Supernet) -> None:
    largest, layer = supernet.space.largest(), supernet.network[1]
    before, rows = supernet(X, subnet=largest), set(map(tuple, layer.weight.tolist()))
    report = subnetact.reorder_(supernet, "l1", X)
    torch.testing.assert_close(supernet(X, subnet=largest), before)
    assert list(report.reordered.values()) == [8], report
    assert set(map(tuple, layer.weight.tolist())) == rows


def test_it_is_found_in_a_model() -> None:
    found = subnetact.describe(network(), X)
    assert {(m.module, m.part, m.operator) for group in found.groups.values() for m in group.members} >= {
        ("1", "out", GatedSlice),
        ("4", "in_", GatedSlice),
    }
