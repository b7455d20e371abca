"""insert_ accepts what equals the model with unused weights at zero, beside all layers and at all weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subnetact
from subnetact.errors import InsertError
from subnetact.operators import WeightSlice
from subnetact.operators.base import Operator


class Linear(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Concatenation(nn.Module):
    """The outputs of two layers, one after another, normalised together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 16), nn.Linear(6, 16), nn.LayerNorm(32)
        self.c = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(torch.cat([self.a(x), self.b(x)], -1)))


class Conv(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, self.bias)


def vectors() -> Tensor:
    return torch.randn(3, 6)


def images() -> Tensor:
    return torch.randn(2, 6, 4, 4)


@pytest.mark.parametrize(
    ("first", "layer", "example"),
    [
        (lambda: Linear(6, 16), nn.Linear, vectors),
        (lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Linear(16, 16)), nn.Linear, vectors),
        (Concatenation, nn.Linear, vectors),
        (lambda: Conv(6, 16, 1), lambda n, m: nn.Conv2d(n, m, 1), images),
    ],
)
def test_a_softmax_over_features_is_refused_beside_layers_of_all_kinds(
    first: Callable[[], nn.Module], layer: Callable[[int, int], nn.Module], example: Callable[[], Tensor]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.ReLU(), layer(16, 16), nn.Softmax(1), layer(16, 4)).eval()
    x = example()
    supernet = subnetact.insert_(model, example=x)
    assert "(Softmax)" in supernet.description.refused["2"]
    assert supernet.description.groups
    assert not supernet.check(x).not_compared


class Standardised(nn.Linear):
    """Normalises its weights over its inputs, of which a subnet has fewer."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight / weight.std(1, keepdim=True), self.bias)


class Squashing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.softmax(-1), self.weight, self.bias)


class BackwardOutputs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).flip(-1)


class BackwardInputs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flip(-1), self.weight, self.bias)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y - y.mean(-1, keepdim=True)


@pytest.mark.parametrize("part", ["in_", "out"])
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Standardised, ()),
        (Linear, ()),
        (Squashing, ("in_",)),
        (BackwardInputs, ("in_",)),
        (BackwardOutputs, ("out",)),
        (Centred, ("out",)),
    ],
)
def test_a_layer_with_a_forward_of_its_own_computes_what_it_does_with_zeros_or_normalises_its_weights(
    kind: type[nn.Linear], wrong: tuple[str, ...], part: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), kind(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    sides = {"in_": (("0", "out"), ("2", "in_")), "out": (("2", "out"), ("4", "in_"))}
    elastic = {name: WeightSlice.on(**{side: "width"}) for name, side in sides[part]}
    axis = subnetact.Axis.uniform("width", ["all"], (8, 16))
    space = subnetact.SubnetSpace("own", [axis], lambda values: {"width": values["width"][0]})
    if part in wrong:
        with pytest.raises(InsertError, match="differs from the original network"):
            subnetact.insert_(model, space, elastic, example=vectors())
    else:
        assert not subnetact.insert_(model, space, elastic).check(vectors()).not_compared


class Unknown(Operator):
    """An operator that says that its weights at zero do not stand for dropped ones."""

    parts = ("in_",)

    def zeroing_equals_dropping(self, part: str) -> bool:
        return False


def test_what_cannot_be_compared_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with pytest.raises(InsertError, match=r"0\.ffn: a subnet cannot be compared .* zeros in 2 \(Unknown\)"):
        subnetact.insert_(model, elastic={"2": Unknown.on(in_="0.ffn")}, example=vectors())
    assert type(model[2]) is nn.Linear


@pytest.mark.parametrize("bias", [3.0, 0.0, -3.0])
@pytest.mark.parametrize("extreme", [torch.amax, torch.amin])
def test_whether_the_forward_may_take_an_extreme_does_not_depend_on_the_weights(
    extreme: Callable[..., Tensor], bias: float
) -> None:
    class Extreme(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x).relu())
            return self.c(y * extreme(y, 1, keepdim=True))

    torch.manual_seed(0)
    model = Extreme().eval()
    with torch.no_grad():
        model.b.bias.add_(bias)
    description = subnetact.describe(model, vectors())
    assert list(description.groups) == ["a.ffn"]
    assert "takes the largest or the least of its outputs" in description.refused["b"]


def test_an_embedding_that_renormalises_the_shared_rows_keeps_its_width() -> None:
    torch.manual_seed(0)
    layers = nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)
    model = nn.Sequential(*layers).eval()
    description = subnetact.describe(model, torch.tensor([[0, 1]]))
    assert list(description.groups) == ["1.ffn"]
    assert "with max_norm" in description.refused["0"]


def test_a_prelu_has_the_slopes_of_the_kept_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 16, 1), nn.PReLU(16), nn.Conv2d(16, 4, 1)).eval()
    nn.init.uniform_(model[1].weight, -1, 1)
    slopes, x = model[1].weight.detach().clone(), images()
    supernet = subnetact.insert_(model, example=x)
    view = supernet.subnet(supernet.space.smallest())
    assert torch.equal(view[1].weight, slopes[:8])
    assert not supernet.check(x).not_compared
