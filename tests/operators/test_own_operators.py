"""Operators that users write: one class and one entry of a table do for everything, files included."""

from __future__ import annotations

import copy
import inspect
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import seeded

import subnetact
from subnetact.costs import CostModel
from subnetact.errors import FileFormatError, InsertError, PrecisionError
from subnetact.insertion.description import Description
from subnetact.operators import LayerTraits, SubnetNorm, WeightSlice, base, register_layer
from subnetact.operators.base import Operator, slicer_of
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view

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


class OwnSlice(WeightSlice):
    """A derived operator."""


TRAITS = LayerTraits(
    "gated",
    axes={"weight": ("out", "in_"), "gain": ("out",)},
    sizes={"out": "out_features", "in_": "in_features"},
    reads="in_",
    mixes=True,
    finite=True,
)
register_layer(Gated, replace(TRAITS, operator=GatedSlice))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), Gated(12, 8), nn.BatchNorm1d(8), nn.ReLU(), Gated(8, 12), nn.Linear(12, 3)]
    return nn.Sequential(*layers).eval()


@pytest.fixture
def supernet() -> Supernet:
    elastic = {
        "1": GatedSlice.on(out="width"),
        "2": SubnetNorm.on(channels="width"),
        "4": GatedSlice.on(in_="width"),
    }
    return subnetact.insert_(network(), space_of(width=[4, 8]), elastic)


def test_the_rule_of_the_table_slices_the_layer(supernet: Supernet) -> None:
    space, plain = supernet.space, network()
    assert slicer_of(plain[1]) is GatedSlice
    assert supernet.check(X).compared == (space.smallest(),)
    view: Any = supernet.subnet(space.smallest())
    assert (view[1].out_features, view[4].in_features) == (4, 4)
    assert {t.untyped_storage().data_ptr() for t in view.parameters()} <= {
        t.untyped_storage().data_ptr() for t in supernet.parameters()
    }
    hidden = (F.linear(plain[0](X), plain[1].weight[:4]) * plain[1].gain[:4]) / (1 + 1e-5) ** 0.5
    expected = plain[5](F.linear(hidden.relu(), plain[4].weight[:, :4]) * plain[4].gain)
    torch.testing.assert_close(view(X), expected)
    torch.testing.assert_close(supernet.extract(space.smallest())(X), expected)


def test_it_is_described_counted_calibrated_served_and_sorted(supernet: Supernet) -> None:
    groups = subnetact.describe(network(), X).groups.values()
    members = {(m.module, m.part, m.operator) for group in groups for m in group.members}
    assert members >= {("1", "out", GatedSlice), ("4", "in_", GatedSlice)}
    specs = list(supernet.space.enumerate())
    model = CostModel(supernet, X)
    small, large = (model(spec) for spec in specs)
    assert large.macs - small.macs == 2 * 4 * 12
    assert large.parameters - small.parameters == 2 * 4 * 12 + 4 + 8
    subnetact.calibrate(supernet, specs, [X], progress=False)
    engine = subnetact.Engine(supernet, specs, example=X[:1], memory_budget_mb=16)
    for i, spec in enumerate(specs):
        torch.testing.assert_close(engine(X, i), supernet.extract(spec)(X), rtol=1e-4, atol=1e-5)
    with pytest.raises(PrecisionError, match="float32 only"):
        supernet.enable_precision("int8")
    layer, before = supernet.network.get_submodule("1"), supernet(X)
    rows = set(map(tuple, layer.weight.tolist()))
    report = subnetact.reorder_(supernet, "l1", X)
    torch.testing.assert_close(supernet(X), before)
    assert list(report.reordered.values()) == [8], report
    assert set(map(tuple, layer.weight.tolist())) == rows


def test_the_documented_operator_works() -> None:
    page = inspect.getdoc(base) or ""
    code = page[page.index("    class BilinearSlice") : page.index("`BilinearSlice.on(")]
    names: dict[str, Any] = {"Operator": Operator, "nn": nn, "LayerTraits": LayerTraits}
    names["register_layer"] = register_layer
    exec(textwrap.dedent(code), names)
    layer, space = nn.Bilinear(3, 4, 8), space_of(width=[3, 8])
    pair = seeded(lambda m, x, y: m.layer(x, y), layer=layer)
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    expected = layer(x, y)[:, :3]
    supernet = subnetact.insert_(pair, space, {"layer": names["BilinearSlice"].on(out="width")})
    view: Any = supernet.subnet(space.smallest())
    torch.testing.assert_close(view(x, y), expected)
    assert view.layer.out_features == 3
    assert view.layer.weight.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
    with pytest.raises(InsertError, match="it slices layers of the kind bilinear"):
        subnetact.insert_(nn.Sequential(nn.Linear(2, 2)), space, {"0": names["BilinearSlice"].on()})


IMAGES = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(1))


class Interleaved(Operator):
    """Takes every second output of a 1x1 convolution first: the rule gathers rows, which copies them."""

    parts = ("out",)
    made = 0

    def full(self, part: str) -> int:
        return int(self.template.out_channels)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        type(self).made += 1
        rows = [*range(0, self.full("out"), 2), *range(1, self.full("out"), 2)][: sizes[0]]
        return {"weight": self.weight[rows], "bias": self.bias[: sizes[0]]}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, int]:
        return {"out_channels": sizes[0]}


def interleaved(network: nn.Module, name: str) -> Supernet:
    torch.manual_seed(0)
    return subnetact.insert_(network, space_of(width=[3, 8]), {name: Interleaved.on(out="width")}).eval()


def one_layer() -> Supernet:
    return interleaved(nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU()), "0")


def expected(supernet: Supernet) -> Tensor:
    state = {name.split(".")[-1]: tensor for name, tensor in supernet.state_dict().items()}
    return F.conv2d(IMAGES, state["weight"][[0, 2, 4]], state["bias"][:3])


def change(supernet: Supernet) -> None:
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.mul_(1.5).add_(0.1)


def test_views_that_a_user_holds_follow_changes_in_place_and_copy_nothing_while_there_are_none() -> None:
    supernet = one_layer()
    spec = supernet.space.smallest()
    held, cached = private_view(supernet, spec)[0], supernet.subnet(spec)
    copied, before = copy.deepcopy(held), expected(supernet).relu()
    for _ in range(2):
        change(supernet)
        for run in (held, cached, supernet.extract(spec), lambda x: supernet(x, subnet=spec)):
            torch.testing.assert_close(run(IMAGES), expected(supernet).relu(), rtol=0, atol=1e-6)
    torch.testing.assert_close(copied(IMAGES), before, rtol=0, atol=1e-6)
    own: Any = held
    assert own[0].bias.untyped_storage().data_ptr() == supernet.network[0].bias.untyped_storage().data_ptr()
    made = Interleaved.made
    for _ in range(3):
        cached(IMAGES), private_view(supernet, spec)[0](IMAGES)
    assert Interleaved.made == made


def test_weights_that_another_module_reads_follow_too() -> None:
    twice = lambda m, x: m.conv(x) + F.conv2d(x, m.conv.weight, m.conv.bias)  # noqa: E731
    supernet = interleaved(seeded(twice, conv=nn.Conv2d(6, 8, 1)), "conv")
    view = supernet.subnet(supernet.space.smallest())
    change(supernet)
    torch.testing.assert_close(view(IMAGES), 2 * expected(supernet), rtol=0, atol=1e-5)


def test_training_reaches_the_full_weights_through_a_copying_rule() -> None:
    supernet = interleaved(nn.Sequential(nn.Conv2d(6, 8, 1)), "0").train()
    supernet(IMAGES, subnet=supernet.space.smallest()).sum().backward()
    grad = supernet.network[0].weight.grad
    assert [bool(row.abs().sum() > 0) for row in grad] == [True, False] * 3 + [False, False]


def description(operator: type[Operator]) -> Description:
    """Return a description of a small network with an operator for its first layer."""
    first = Gated(5, 8) if operator is GatedSlice else nn.Linear(5, 8)
    found = subnetact.describe(nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3)).eval(), X)
    name = next(iter(found.groups))
    return found.override({"0": OwnSlice.on(out=name)}) if operator is OwnSlice else found


@pytest.mark.parametrize("operator", [WeightSlice, GatedSlice, OwnSlice])
def test_descriptions_name_operators_so_that_they_are_found_again(operator: type[Operator]) -> None:
    written = description(operator)
    read = Description.from_json(written.to_json())
    assert read.elastic == written.elastic
    assert read.elastic["0"].operator is operator


def test_bundles_and_engines_with_own_operators_open_again(tmp_path: Path) -> None:
    def own() -> nn.Module:
        return seeded(lambda m, x: m.last(m.first(x).relu()), first=Gated(5, 8), last=(8, 3))

    supernet = subnetact.insert_(own(), example=X)
    spec = supernet.space.smallest()
    supernet.save_pretrained(tmp_path / "bundle")
    subnetact.Engine(supernet, [spec], example=X).save(tmp_path / "engine")
    first, last = supernet.network.first, supernet.network.last
    hidden = F.linear(X, first.weight[:4]) * first.gain[:4]
    result = F.linear(hidden.relu(), last.weight[:, :4], last.bias)
    opened: Any = subnetact.from_pretrained(tmp_path / "bundle", model=own())
    torch.testing.assert_close(opened(X, subnet=spec), result)
    engine = subnetact.Engine.load(tmp_path / "engine", supernet=own())
    torch.testing.assert_close(engine(X, 0), result)


def test_reading_imports_nothing_and_says_what_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "slices_of_mine.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = description(OwnSlice).to_json()
    for missing in ("slices_of_mine:OwnSlice", f"{__name__}:Other", f"{__name__}:Gated", f"{__name__}:X.T"):
        changed = text.replace(f"{__name__}:OwnSlice", missing)
        with pytest.raises(FileFormatError, match=missing):
            Description.from_json(changed)
    assert "slices_of_mine" not in sys.modules


def test_classes_that_no_file_could_tell_apart_are_not_written() -> None:
    class Inside(WeightSlice):
        """A class that only this function has."""

    twin = type("OwnSlice", (WeightSlice,), {"__module__": __name__, "__qualname__": "OwnSlice"})
    same_name = type("WeightSlice", (WeightSlice,), {"__module__": "nowhere"})
    for operator in (Inside, twin, same_name):
        written = description(OwnSlice).override({"0": operator.on(out="w")})
        with pytest.raises(InsertError, match="top of a module"):
            written.to_json()


def test_defining_a_class_changes_no_other_model() -> None:
    before = str(description(WeightSlice).elastic)

    class Mine(WeightSlice):
        slices = ("linear", "gated", "a kind of my own")

    assert slicer_of(nn.Linear(2, 2)) is WeightSlice
    assert slicer_of(Gated(2, 2)) is GatedSlice
    assert str(description(WeightSlice).elastic) == before
    own = type("OwnLayer", (nn.Linear,), {})
    register_layer(own, LayerTraits("a kind of my own"))
    assert slicer_of(own(2, 2)) is None
    for operator in (Mine, OwnSlice):  # as if a notebook's cell ran again
        register_layer(own, LayerTraits("linear", operator=operator))
        assert slicer_of(own(2, 2)) is operator
    assert slicer_of(nn.Linear(2, 2)) is WeightSlice
