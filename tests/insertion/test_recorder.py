"""What a model computes on an example is recorded while it runs, so that its forward may look at shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from subnetact import describe, insert_
from subnetact.errors import InsertError

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


class Looking(nn.Module):
    """A network that looks at shapes, uses a function between its layers and has one for large images."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 6, 3)
        self.large = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            x = nn.functional.pad(x, (0, 1, 0, 1))
        batch, channels = (y := self.between(self.first(x))).shape[:2]
        y = self.large(y) if x.shape[-1] > 20 else self.second(y.view(batch, channels, *y.shape[2:]))
        return self.head(y.relu().flatten(2).mean(2))


def assigned(t: Tensor) -> Tensor:
    found = torch.zeros_like(t)
    found[:, :, 1:] = t[:, :, :-1]
    return found


@pytest.mark.parametrize(
    "between",
    [
        lambda t: torch.roll(t, 1, 2),
        lambda t: t.flip(-1),
        lambda t: t / (1 + t.var(3, keepdim=True)),
        assigned,
    ],
)
def test_subnets_of_a_forward_that_looks_at_shapes_equal_a_network_made_with_fewer_channels(
    between: Callable[[Tensor], Tensor],
) -> None:
    model = Looking(between).eval()
    small = Looking(between).eval()
    small.first, small.second, small.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3), nn.Linear(3, 4)
    supernet = insert_(model, example=X, choices=[0.5, 1.0])
    weights = supernet.state_dict()
    small.load_state_dict(
        {
            name: weights[name][tuple(slice(n) for n in t.shape)] if "large" not in name else t
            for name, t in small.state_dict().items()
        }
    )
    with torch.no_grad():
        found = supernet.subnet(supernet.space.smallest())(X)
        torch.testing.assert_close(found, small(X), rtol=0, atol=5e-5)
    assert "does not run on the example, so it stays whole" in supernet.description.refused["large"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("roll", "shifts"),
        ("flip", "reverses the order of"),
        ("cumsum", "moves or mixes"),
        ("var", "takes the variance over"),
        ("linspace", "spreads numbers over"),
    ],
)
def test_functions_that_mix_channels_are_named_in_the_reason(name: str, what: str) -> None:
    between = {
        "roll": lambda t: torch.roll(t, 1, 1),
        "flip": lambda t: t.flip(1),
        "cumsum": lambda t: t.cumsum(1),
        "var": lambda t: t / t.var(1, keepdim=True),
        "linspace": lambda t: t * torch.linspace(0, 1, t.shape[1]).view(1, -1, 1, 1),
    }[name]
    description = describe(nn.Sequential(Looking(between)).eval(), X, proof=False)
    assert description.refused["0.first"] == (
        f"the forward {what} its outputs, with {name} in 0 (Looking): the first ones alone would give "
        "something else; it stays whole, unless the forward treats each output by itself"
    )
    assert list(description.groups) == ["0.second.width"]


class Routed(nn.Module):
    """A network that chooses one of its branches by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.branches = nn.ModuleList(nn.Conv2d(8, 6, 3) for _ in range(2))
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.branches[x.shape[-1] % 2](self.stem(x))).mean((2, 3))


def test_a_layer_stays_if_layers_beside_those_it_feeds_do_not_run() -> None:
    with pytest.raises(InsertError, match=r"branches\.0 may read the same, and does not run on the example"):
        insert_(Routed().eval(), example=X)


class Listening(nn.Module):
    """Convolutions before a recurrent layer, which is called as a module or as a function."""

    def __init__(self, kind: type[nn.RNNBase], by_function: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.recurrent: nn.Module = kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, 4)
        self.by_function = by_function

    def forward(self, x: Tensor) -> Tensor:
        rows = self.second(self.first(x).relu()).relu().mean(2).transpose(1, 2)
        if not self.by_function:
            return self.head(self.recurrent(rows)[0][:, -1])
        state, weights = rows.new_zeros(1, len(rows), 5), list(self.recurrent.parameters())
        return self.head(torch.gru(rows, state, weights, True, 1, 0.0, False, False, True)[0][:, -1])


@pytest.mark.parametrize(("kind", "by_function"), [(nn.LSTM, False), (nn.GRU, False), (nn.GRU, True)])
def test_channels_that_a_recurrent_layer_reads_stay_whole(kind: type[nn.RNNBase], by_function: bool) -> None:
    network = Listening(kind, by_function)
    expected = network.eval()(X)
    supernet = insert_(network, example=X)
    torch.testing.assert_close(supernet(X, subnet=supernet.space.largest()), expected, rtol=5e-5, atol=5e-5)
    half = supernet.extract(supernet.space.smallest())
    assert half.first.out_channels < 8
    assert half.second.out_channels == 6
    assert any("second" in name for name in supernet.description.refused)
    full = Listening(kind, by_function).eval()
    kept = half.first.out_channels
    with torch.no_grad():
        full.second.weight[:, kept:] = 0.0  # as if the dropped channels were not there
    torch.testing.assert_close(half(X), full(X), rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("between", [torch.relu, assigned])
def test_a_model_runs_three_times_at_the_most_before_anything_is_proved(
    between: Callable[[Tensor], Tensor],
) -> None:
    runs: list[int] = []

    class Counted(Looking):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(x)

    describe(Counted(between).eval(), X, proof=False)
    assert len(runs) <= 3
