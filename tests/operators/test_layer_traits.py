"""The one table of layers: derived classes, optional packages, what an entry says, and new entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from subnetact.operators import AttentionSlice, LayerNormSlice, SubnetNorm, WeightSlice
from subnetact.operators.base import slicer_of
from subnetact.operators.layer_traits import is_layer, runs_as, traits_of


class Wider(nn.Conv2d):
    """A layer that is derived from one of the table."""


class Other(nn.Conv2d):
    """A layer with a convolution of its own."""

    def _conv_forward(self, *_: Tensor | None) -> Tensor:
        return torch.zeros(1)


def test_a_derived_class_has_the_traits_of_its_base_and_may_have_another_forward() -> None:
    assert traits_of(Wider) == traits_of(nn.Conv2d(1, 1, 1))
    assert traits_of(Other) == traits_of(Wider)
    assert [runs_as(cls(1, 1, 1)) for cls in (nn.Conv2d, Wider, Other)] == [True, True, False]
    assert runs_as(nn.BatchNorm1d(2), nn.BatchNorm2d)
    assert not runs_as(nn.SyncBatchNorm(2), nn.BatchNorm2d)
    assert [is_layer(m) for m in (Wider(1, 1, 1), nn.LSTM(1, 1), nn.Sequential())] == [True, True, False]
    assert not is_layer(Wider(1, 1, 1), derived=False)
    assert traits_of(nn.Module).kind == traits_of(nn.Sequential()).kind == "container"
    assert traits_of(type("Own", (nn.Module,), {})).kind == "unknown"


@pytest.mark.parametrize(
    ("layer", "operator", "weight"),
    [
        (nn.Linear(3, 2), WeightSlice, ("out", "in_")),
        (nn.ConvTranspose2d(3, 2, 1), WeightSlice, ("in_", "out")),
        (nn.Embedding(3, 2), WeightSlice, ("in_", "out")),
        (nn.MultiheadAttention(4, 2), AttentionSlice, ()),
        (nn.BatchNorm2d(3), SubnetNorm, ("channels",)),
        (nn.GroupNorm(1, 3), LayerNormSlice, ("features",)),
    ],
)
def test_the_table_says_which_operator_slices_a_layer_and_along_which_axes(
    layer: nn.Module, operator: type, weight: tuple[str, ...]
) -> None:
    traits = traits_of(layer)
    assert slicer_of(layer) is operator
    assert traits.axes.get("weight", ()) == weight
    assert traits.reads in operator.parts
    for part, attribute in traits.sizes.items():
        index = weight.index(part)
        assert getattr(layer, attribute) == layer.weight.shape[index]


def test_the_conv1d_of_transformers_is_known_by_its_name() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    layer = pytorch_utils.Conv1D(5, 3)
    assert slicer_of(layer) is WeightSlice
    assert traits_of(layer).axes["weight"] == ("in_", "out")
    assert [getattr(layer, name) for name in traits_of(layer).sizes.values()] == [5, 3]
