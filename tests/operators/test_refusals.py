"""Descriptions that no operator can follow are refused, and the network stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_spaces import space_of
from torch import Tensor, nn

from subnetact import LayerSelect, SubnetNorm, WeightSlice, insert_
from subnetact.errors import InsertError, SpecError
from subnetact.operators import (
    AttentionSlice,
    ElasticAttribute,
    ElasticKernel,
    KernelConv2d,
    LayerNormSlice,
    ModuleSwitch,
    PerWidthNorm,
    Segments,
    SwitchableModule,
)


class Companion(nn.Linear):
    """A linear layer with a gain, of which no rule knows."""

    def __init__(self) -> None:
        super().__init__(4, 8)
        self.gain = nn.Parameter(torch.ones(8))


class CentredRMSNorm(nn.Module):
    """It subtracts the mean, whatever its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight)


class FullWidthRMSNorm(CentredRMSNorm):
    """It divides by the width of the full network."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) / 8 + 1e-6).sqrt() * self.weight


class Scale(CentredRMSNorm):
    """It has a weight as a norm has, and normalises nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Token(nn.Module):
    """A parameter, a number, and a configuration with a text."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.heads, self.linear = nn.Parameter(torch.zeros(1, 1, 8)), 8, nn.Linear(8, 8)
        self.config = type("Settings", (), {})()
        self.config.name = "settings"


FEATURES, OUT, CHANNELS = (
    LayerNormSlice.on(features="w"),
    WeightSlice.on(out="w"),
    SubnetNorm.on(channels="w"),
)
NO_NORM = "only GroupNorm, and LayerNorm and RMSNorm over one axis"
REFUSED: list[tuple[nn.Module, Any, str]] = [
    (Companion(), OUT, "has no rule for gain"),
    (nn.Conv2d(3, 8, 1), "w", "'w' is no description"),
    (nn.Conv2d(3, 8, 1), WeightSlice.on(out="d"), "no dimension 'd'; it has w"),
    (nn.Conv2d(3, 8, 1), WeightSlice.on(channels="w"), "no part 'channels'; choose from out, in_"),
    (nn.Conv2d(3, 8, 1), CHANNELS, "layers of the kind batch norm"),
    (nn.Conv2d(8, 4, 1), OUT, "the largest subnet has 8 at w, the module only 4"),
    (nn.BatchNorm2d(8), OUT, "slices layers of the kind convolution"),
    (nn.Embedding(11, 8), WeightSlice.on(in_="w"), "every row of an embedding belongs to one index"),
    (CentredRMSNorm(), FEATURES, NO_NORM),
    (FullWidthRMSNorm(), FEATURES, NO_NORM),
    (Scale(), FEATURES, NO_NORM),
    (nn.Linear(8, 8), FEATURES, NO_NORM),
    (nn.RMSNorm((4, 8)), FEATURES, "over several axes"),
    (nn.LayerNorm((2, 8)), FEATURES, "over several axes"),
    (nn.LayerNorm(4), FEATURES, "the largest subnet has 8 at w, the module only 4"),
    (
        nn.MultiheadAttention(8, 2, kdim=6),
        AttentionSlice.on(out="w"),
        "kdim and vdim are not supported; project to embed_dim before",
    ),
    (Token(), ElasticAttribute.on(missing="w"), r"not \['missing'\]; the module has heads, token"),
    (Token(), ElasticAttribute.on(**{"token.3": "w"}), r"not \['token.3'\]"),
    (Token(), ElasticAttribute.on(training="w"), r"not \['training'\]"),
    (Token(), ElasticAttribute.on(**{"config.name": "w"}), r"not \['config.name'\]"),
    (nn.ReLU(), ElasticAttribute.on(heads="w"), r"it sets whole numbers and .* not \['heads'\]"),
    (nn.Sequential(nn.Linear(8, 8)), ElasticAttribute.on(weight="w"), "parameters of the module itself"),
    (nn.Conv2d(3, 8, 1), LayerSelect.on(x="w"), "a stack of layers is"),
    (nn.Sequential(), LayerSelect.on(**{"7": "w"}), r"no layers \['7'\]"),
    (nn.Conv2d(8, 8, 3), ElasticKernel.on(channels="w"), "only KernelConv2d stands for several kernel sizes"),
    (KernelConv2d(8, [3, 5]), ElasticKernel.on(out="w"), "no part 'out'; choose from channels, kernel"),
    (nn.Conv2d(1, 1, 1), ModuleSwitch.on(choice="w"), "only SwitchableModule"),
    (nn.Conv2d(1, 1, 1), PerWidthNorm.on(channels="w", position="w"), "only PerWidthBatchNorm2d"),
    (
        SwitchableModule(nn.BatchNorm2d(2), default=0),
        ModuleSwitch.on(choice="w"),
        "the largest subnet has 8 at w, the module only 1",
    ),
    (nn.Linear(4, 20), WeightSlice.on(out=Segments(("w", 8), ("w", 8))), "are 16 long together, .* is 20"),
    (nn.Linear(4, 16), WeightSlice.on(out=Segments(("w", 4), ("w", 12))), "largest subnet has 8 at w, .* 4"),
    (nn.Linear(4, 16), WeightSlice.on(out=Segments(("h", 8), ("w", 8))), "has no dimension 'h'"),
    (nn.Linear(4, 16), ElasticKernel.on(channels=Segments(("w", 8), ("w", 8))), "is one segment, got"),
    (
        nn.Conv1d(16, 16, 1, groups=4),
        WeightSlice.on(out=Segments(("w", 8), (None, 2), (None, 6))),
        "not whole groups of 4",
    ),
]
"""A module, what is wrong about its description, and words of the refusal."""


@pytest.mark.parametrize(("module", "entry", "message"), REFUSED)
def test_a_description_that_does_not_fit_changes_nothing(module: nn.Module, entry: Any, message: str) -> None:
    network = nn.Sequential(module, nn.BatchNorm2d(8))
    before = list(network.children())
    with pytest.raises(InsertError, match=message):
        insert_(network, space_of(w=[3, 8]), {"1": CHANNELS, "0": entry})
    assert list(network.children()) == before


@pytest.mark.parametrize(
    ("path", "message"), [("", "wrap it in a Sequential"), ("4", "the network has no module '4'")]
)
def test_a_path_that_no_operator_can_stand_at_is_refused(path: str, message: str) -> None:
    with pytest.raises(InsertError, match=message):
        insert_(nn.Sequential(nn.ReLU()), space_of(w=[3, 8]), {path: LayerSelect.on(**{"7": "w"})})


SLICE_BOTH = WeightSlice.on(out="w", in_="w")
ILLEGAL: list[tuple[nn.Module, Any, list[int], str]] = [
    (nn.Linear(4, 8), OUT, [0, 8], r"out=0 is not legal; choose from 1 to 8$"),
    (nn.Conv2d(8, 8, 1, groups=4), SLICE_BOTH, [3, 8], r"out=3 .*; choose from 2 to 8 in steps of 2"),
    (
        nn.ConvTranspose2d(8, 12, 2, groups=4),
        WeightSlice.on(in_="w"),
        [3, 8],
        r"in_=3 is not legal; choose from 2 to 8 in steps of 2",
    ),
    (nn.GroupNorm(4, 8), FEATURES, [3, 8], r"features=3 is not legal; choose from 2 to 8 in steps of 2"),
    (
        nn.Conv1d(16, 16, 1, groups=4),
        WeightSlice.on(out=Segments(("w", 8), (None, 8))),
        [3, 8],
        r"out\.0=3 is not legal; choose from 4 to 8 in steps of 4",
    ),
    (
        KernelConv2d(3, [3, 5, 7]),
        ElasticKernel.on(kernel="w"),
        [1, 3, 7],
        "kernel=1 is not legal; choose from 3, 5, 7",
    ),
]
"""A module, its description, the choices, the least of which is no size, and words of the refusal."""


@pytest.mark.parametrize(("module", "entry", "choices", "message"), ILLEGAL)
def test_an_illegal_size_is_refused(module: nn.Module, entry: Any, choices: list[int], message: str) -> None:
    supernet = insert_(nn.Sequential(module).eval(), space_of(w=choices), {"0": entry})
    with pytest.raises(SpecError, match=f"0: {message}"):
        supernet.subnet(supernet.space.smallest())


def test_choices_that_do_not_ascend_and_even_kernels_are_refused() -> None:
    with pytest.raises(InsertError, match="w is 8 in the smallest subnet and 2 in the largest"):
        insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), space_of(w=[8, 2]), {"0": OUT})
    with pytest.raises(ValueError, match=r"odd and at least one, got \[3, 4\]"):
        KernelConv2d(8, [3, 4])


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
