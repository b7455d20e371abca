"""Own operators in files: found by module and class, never imported, and no class changes other models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subnetact
from subnetact.errors import FileFormatError, InsertError
from subnetact.insertion.description import Description
from subnetact.operators import LayerTraits, Operator, WeightSlice, register_layer
from subnetact.operators.base import slicer_of

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
TRAITS = LayerTraits(
    "doubled",
    {"weight": ("out", "in_"), "bias": ("out",)},
    sizes={"out": "out_features", "in_": "in_features"},
    reads="in_",
    mixes=True,
    fresh=True,
    finite=True,
)


class Doubled(nn.Module):
    """A linear layer times two."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


class DoubledSlice(Operator):
    """An operator of the documented kind."""

    parts = ("out", "in_")
    slices = ("doubled",)


class OwnSlice(WeightSlice):
    """A derived operator."""


register_layer(Doubled, replace(TRAITS, operator=DoubledSlice))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Doubled(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def description(operator: type[Operator]) -> Description:
    """Return a description of a small network with an operator for its first layer."""
    first = Doubled(6, 8) if operator is DoubledSlice else nn.Linear(6, 8)
    found = subnetact.describe(nn.Sequential(first, nn.ReLU(), nn.Linear(8, 5)).eval(), X)
    name = next(iter(found.groups))
    return found.override({"0": OwnSlice.on(out=name)}) if operator is OwnSlice else found


@pytest.mark.parametrize("operator", [WeightSlice, DoubledSlice, OwnSlice])
def test_descriptions_name_operators_so_that_they_are_found_again(operator: type[Operator]) -> None:
    written = description(operator)
    read = Description.from_json(written.to_json())
    assert read.elastic == written.elastic
    assert read.elastic["0"].operator is operator


def test_bundles_and_engines_with_own_operators_open_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    supernet = subnetact.insert_(Network().eval(), example=X)
    spec = supernet.space.smallest()
    supernet.save_pretrained(tmp_path / "bundle")
    subnetact.Engine(supernet, [spec], example=X).save(tmp_path / "engine")
    first, last = supernet.network.first, supernet.network.last
    expected = F.linear(
        (2 * F.linear(X, first.weight[:4], first.bias[:4])).relu(), last.weight[:, :4], last.bias
    )
    opened = subnetact.from_pretrained(tmp_path / "bundle", model=Network().eval())
    torch.testing.assert_close(opened(X, subnet=spec), expected)
    engine = subnetact.Engine.load(tmp_path / "engine", supernet=Network().eval())
    torch.testing.assert_close(engine(X, 0), expected)


def test_reading_imports_nothing_and_says_what_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "slices_of_mine.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = description(OwnSlice).to_json()
    for missing in ("slices_of_mine:OwnSlice", f"{__name__}:Other", f"{__name__}:Network", f"{__name__}:X.T"):
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
        slices = ("linear", "doubled", "a kind of my own")

    assert slicer_of(nn.Linear(2, 2)) is WeightSlice
    assert slicer_of(Doubled(2, 2)) is DoubledSlice
    assert str(description(WeightSlice).elastic) == before
    own = type("OwnLayer", (nn.Linear,), {})
    register_layer(own, LayerTraits("a kind of my own"))
    assert slicer_of(own(2, 2)) is None
    for operator in (Mine, OwnSlice):  # as if a notebook's cell ran again
        register_layer(own, LayerTraits("linear", operator=operator))
        assert slicer_of(own(2, 2)) is operator
    assert slicer_of(nn.Linear(2, 2)) is WeightSlice
