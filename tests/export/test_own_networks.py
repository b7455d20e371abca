"""TorchScript files of networks that are no family: refused, or equal to their supernets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_engines import plain_engine
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import subnetact
from subnetact import (
    Axis,
    LayerSelect,
    SubnetNorm,
    SubnetSpace,
    WeightSlice,
)
from subnetact.errors import ExportError
from subnetact.export import to_torchscript
from subnetact.operators import ElasticAttribute, LayerNormSlice, Segments
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def keeping(network: nn.Module, count: int = 2, **elastic: Any) -> Supernet:
    """Make a supernet whose `layers` are skippable one by one, and whose `hidden` width is 2 or 4."""
    space = SubnetSpace(
        "keeping",
        [
            Axis.uniform("keep", [str(i) for i in range(count)], [0, 1]),
            Axis.uniform("hidden", ["all"], [2, 4]),
        ],
        lambda v: {**{f"keep{i}": k for i, k in enumerate(v["keep"])}, "hidden": v["hidden"][0]},
    )
    layers = LayerSelect.on(**{str(i): f"keep{i}" for i in range(count)})
    return subnetact.insert_(network.eval(), space, {"layers": layers, **elastic})


def agreeing(supernet: Supernet, path: Path, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """Export every subnet, and assert that the file equals the supernet bit for bit."""
    specs = list(supernet.space.enumerate())
    scripted = to_torchscript(plain_engine(supernet, specs, inputs), path, **options)
    loaded = torch.jit.load(path)
    with torch.no_grad():
        for i, spec in enumerate(specs):
            expected = supernet.subnet(spec)(*inputs)
            for module in (scripted, loaded):
                assert torch.equal(module(*inputs, torch.tensor([i])), expected), spec
    return scripted


class Loop(nn.Module):
    """Layers in a loop, whose body each test gives."""

    def __init__(self, body: Any, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Sequential(nn.Dropout(0.5), nn.Identity())
        self.count = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def plain(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = layer(x)
    return x


def unused_between(network: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(network.layers):
        _ = x * i
        x = layer(x)
    return x


def nothing_after(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = network.drop(layer(x))
    return x


def counted_aside(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        network.count(x)
        x = layer(x)
    return x


def residual(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = x + layer(x)
    return x


def activated(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = torch.tanh(layer(x))
    return x


def collected(network: Any, x: Tensor) -> Tensor:
    found = [x]
    for layer in network.layers:
        found.append(layer(found[-1]))
    return sum(found)  # type: ignore[return-value]


def counted(network: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(network.layers):
        x = layer(x) * (i + 1)
    return x


def averaged(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = layer(x) / len(network.layers)
    return x


def first_only(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers[:1]:
        x = layer(x)
    return x


def inside(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = layer[0](x)
    return x


def written(network: Any, x: Tensor) -> Tensor:
    total = x * 1
    for layer in network.layers:
        total.add_(layer(x))
    return total


def overwritten(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers:
        x = layer(x)
        network.act(x)
    return x


@pytest.mark.parametrize("body", [plain, unused_between, nothing_after, counted_aside])
def test_loops_that_hand_on_are_exported(body: Any, tmp_path: Path) -> None:
    agreeing(keeping(Loop(body)), tmp_path / "m.pt", (torch.randn(3, 4),))


@pytest.mark.parametrize(
    "body", [residual, activated, collected, counted, averaged, first_only, written, overwritten]
)
def test_loops_that_do_more_do_it_around_the_identities_of_skipped_layers(body: Any, tmp_path: Path) -> None:
    agreeing(keeping(Loop(body)), tmp_path / "m.pt", (torch.randn(3, 4),))


def test_loops_that_reach_into_a_skipped_layer_are_refused(tmp_path: Path) -> None:
    supernet = keeping(Loop(inside))
    specs = list(supernet.space.enumerate())
    with pytest.raises(ExportError, match="object is not subscriptable"):
        to_torchscript(
            plain_engine(supernet, specs[-1:], torch.randn(3, 4)), tmp_path / "m.pt", subnets=specs
        )
    assert not (tmp_path / "m.pt").exists()


class Typed(nn.Module):
    """Branches on the type of a value, which tracing cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x * 2 if isinstance(x, Tensor) else x


def test_the_comparison_covers_every_subnet_on_inputs_that_tell(tmp_path: Path) -> None:
    supernet = keeping(Typed())
    specs = list(supernet.space.enumerate())
    for example in (torch.randn(2, 4), torch.zeros(2, 4), (torch.zeros(1, 4),), {"x": torch.ones(2, 4)}):
        with pytest.raises(ExportError, match=r"subnet 0 .*differs from the supernet's.* branch on the type"):
            to_torchscript(plain_engine(supernet, specs, example), tmp_path / "m.pt")


class OneAtATime(nn.Module):
    """Runs only on batches of one whose floating-point elements are whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embedding(x.long()).view(1, -1, 4))


def test_an_example_is_run_as_it_is(tmp_path: Path) -> None:
    supernet = keeping(OneAtATime(), 1)
    specs = list(supernet.space.enumerate())
    for example in (torch.zeros(1, 3), torch.tensor([[3.0, 5.0, 7.0]])):
        to_torchscript(plain_engine(supernet, specs, example), tmp_path / "m.pt")


class Several(nn.Module):
    """Optional inputs, and a dictionary for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(
        self, x: Tensor, skipped: Tensor | None = None, scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.layers(x)
        if skipped is not None:
            x = x - skipped
        return {"y": x if scale is None else x * scale}


def test_inputs_are_those_of_the_example_by_name(tmp_path: Path) -> None:
    supernet = keeping(Several())
    specs, x, scale = list(supernet.space.enumerate()), torch.randn(2, 4), torch.randn(2, 4)
    scripted = to_torchscript(plain_engine(supernet, specs, {"scale": scale, "x": x}), tmp_path / "m.pt")
    for i, spec in enumerate(specs):
        expected = supernet.subnet(spec)(x, scale=scale)["y"]
        assert torch.equal(scripted(scale, x, torch.tensor([i]))["y"], expected)
    pair = plain_engine(supernet, specs, (x, scale))
    assert [a.name for a in to_torchscript(pair, tmp_path / "m.pt").forward.schema.arguments][1:3] == [
        "x",
        "skipped",
    ]


class Holding(nn.Module):
    """A tied weight, buffers of a library module, recurrent weights, and a dropout in an elastic layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.layers = nn.Sequential(nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.hidden = Dropping(4, 4)
        self.embedding = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.recurrent(self.layers(self.norm(x)))[0]
        return F.linear(self.hidden(x), self.embedding.weight[:, :2].sum(1, keepdim=True))


class Dropping(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x)).sum(-1, keepdim=True)


def held(supernet: Supernet) -> dict[str, tuple[int, Tensor]]:
    named = {**dict(supernet.network.named_parameters()), **dict(supernet.network.named_buffers())}
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in named.items()}


def test_the_source_keeps_its_tensors_and_the_file_has_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    supernet, x = keeping(Holding(), 1, hidden=WeightSlice.on(out="hidden")), torch.randn(2, 3, 4)
    supernet.train()  # views are in evaluation mode even if the supernet is in training mode
    before = held(supernet)
    scripted = agreeing(supernet, tmp_path / "m.pt", (x,))
    after = held(supernet)
    assert all(after[name][0] == place for name, (place, _) in before.items())
    kept = scripted(x, torch.tensor([1]))
    with torch.no_grad():
        for tensor in (*supernet.network.parameters(), supernet.network.norm.running_mean):
            tensor.mul_(2)
    assert torch.equal(scripted(x, torch.tensor([1])), kept)


def test_weights_in_another_layout_are_copied_too(tmp_path: Path) -> None:
    network = nn.Sequential()
    network.add_module("stem", nn.Conv2d(3, 4, 3))
    network.add_module("layers", nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)))
    supernet = keeping(network.to(memory_format=torch.channels_last), 1)
    x = torch.randn(2, 3, 8, 8)
    scripted = agreeing(supernet, tmp_path / "m.pt", (x,))
    weight = next(p for p in scripted.parameters() if p.shape == (4, 3, 3, 3))
    assert weight.is_contiguous(memory_format=torch.channels_last)
    kept = scripted(x, torch.tensor([1]))
    with torch.no_grad():
        supernet.network.stem.weight.mul_(2)
    assert torch.equal(scripted(x, torch.tensor([1])), kept)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers(self.embedding(x)), self.embedding.weight)


def test_a_tied_weight_is_not_copied_in_every_call(tmp_path: Path) -> None:
    scripted = agreeing(keeping(Tied(), 1), tmp_path / "m.pt", (torch.tensor([[1, 2, 6]]),))
    assert "clone" not in scripted.network.code


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adding()])
        self.tables = [torch.zeros(2000), torch.cat([torch.zeros(1000), torch.ones(1), torch.zeros(999)])]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(layer(x, self.tables[0]), self.tables[1])
        return x


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) + table.sum()


def test_constants_that_print_alike_are_kept_apart(tmp_path: Path) -> None:
    agreeing(keeping(Constants(), 1), tmp_path / "m.pt", (torch.randn(2, 4),))


class OwnNorm(nn.Module):
    """An RMSNorm that only its numbers show."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class OwnToken(nn.Module):
    """A token behind a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) + self.token[0]


def test_norms_and_parameters_of_ones_own_are_sliced(tmp_path: Path) -> None:
    space = SubnetSpace("own", [Axis.uniform("width", ["all"], [2, 4, 8])], lambda v: {"w": v["width"][0]})
    elastic = {
        "0": WeightSlice.on(out="w"),
        "1": LayerNormSlice.on(features="w"),
        "2": ElasticAttribute.on(token=Segments(("w", 8), ("w", 8))),
    }
    network = nn.Sequential(nn.Linear(4, 8), OwnNorm(), OwnToken()).eval()
    agreeing(subnetact.insert_(network, space, elastic), tmp_path / "m.pt", (torch.randn(3, 4),))


class AnyRank(nn.BatchNorm2d):
    def _check_input_dim(self, x: Tensor) -> None:
        """Take everything."""


def test_norms_with_a_check_of_their_own_keep_it(tmp_path: Path) -> None:
    network = nn.Sequential()
    network.add_module("stem", AnyRank(4))
    network.add_module("layers", nn.Sequential(nn.Conv1d(4, 4, 1)))
    supernet = keeping(network, 1, stem=SubnetNorm.on())
    agreeing(supernet, tmp_path / "m.pt", (torch.randn(2, 4, 6),))


def test_what_torchscript_does_not_run_is_named(tmp_path: Path) -> None:
    network = Typed()
    weight_norm(network.layers[1])
    supernet = keeping(network)
    specs = [supernet.space.largest()]
    with pytest.raises(ExportError, match="Parametrization is not working with scripting"):
        to_torchscript(plain_engine(supernet, specs, torch.zeros(2, 4)), tmp_path / "m.pt")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def forward(self, row: Tensor, means: Tensor, str: Tensor) -> Tensor:
        return self.layers(row) + means * str


class Reserved(Named):
    def forward(self, subnet: Tensor) -> Tensor:
        return self.layers(subnet)


def test_inputs_may_have_names_that_the_file_uses_apart_from_subnet(tmp_path: Path) -> None:
    agreeing(keeping(Named(), 1), tmp_path / "m.pt", tuple(torch.randn(3, 2, 4)))
    supernet = keeping(Reserved(), 1)
    specs = list(supernet.space.enumerate())
    with pytest.raises(ExportError, match=r"none may be called subnet"):
        to_torchscript(plain_engine(supernet, specs, torch.zeros(2, 4)), tmp_path / "m.pt")
