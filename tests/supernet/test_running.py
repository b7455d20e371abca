"""`supernet.network(...)` runs and trains as the user's own model: in any subnet, under any tool."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from door_models import Door, compute, equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import subnetact
from subnetact import Axis, SubnetSpace, Supernet
from subnetact.errors import InsertError, TrainingError
from subnetact.operators import ElasticAttribute, LayerSelect, WeightSlice
from subnetact.supernet.supernet import supernet_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:subnet .* runs on the supernet's shared", "ignore:`gradient_ch"
)
KINDS = ("llama", "tied", "resnet", "vit")


@pytest.fixture
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Door:
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    return Door(getattr(request, "param", "llama"), tmp_path)


def sums(network: Any, door: Door) -> Tensor:
    return compute(network, door.inputs).pow(2).sum()


def placed(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient of a subnet in the first rows and columns of zeros."""
    whole = torch.zeros_like(like)
    whole[tuple(map(slice, gradient.shape))] = gradient
    return whole


@pytest.mark.parametrize("door", KINDS, indirect=True)
@pytest.mark.parametrize("training", [False, True])
def test_every_subnet_computes_and_learns_as_an_ordinary_model(door: Door, training: bool) -> None:
    network = door.supernet.network.train(training)
    for spec in door.specs:
        ordinary = door.cut(door.original, spec).train(training)
        network.zero_grad()
        with door.supernet.running(spec):
            output = compute(network, door.inputs)
        output.pow(2).sum().backward()
        wanted = compute(ordinary, door.inputs)
        wanted.pow(2).sum().backward()
        assert equal(output, wanted), spec
        gradients = {n: placed(p.grad, network.get_parameter(n)) for n, p in ordinary.named_parameters()}
        for name, parameter in network.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            wanted = gradients.get(name, torch.zeros_like(grad))
            assert torch.allclose(grad, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max() + 1)), name


def test_the_active_subnet_runs_unless_a_thread_or_task_asks_for_another(door: Door) -> None:
    supernet, inputs = door.supernet, door.inputs
    outputs = {spec: compute(supernet.subnet(spec), inputs) for spec in door.specs}

    def runs(spec: Any) -> bool:
        return equal(compute(supernet.network, inputs), outputs[spec]) and equal(
            compute(supernet, inputs), outputs[spec]
        )

    async def work(spec: Any) -> bool:
        with supernet.running(spec):
            await asyncio.sleep(0.01)
            return runs(spec)

    async def tasks() -> list[bool]:
        return await asyncio.gather(*map(work, door.specs))

    assert runs(door.large)
    supernet.actuate(door.small)
    assert runs(door.small)
    found: list[bool] = []
    with supernet.running(door.middle):
        thread = threading.Thread(target=lambda: found.append(runs(door.small)))
        thread.start()
        thread.join()
        with supernet.running(door.large):
            assert runs(door.large)
        assert runs(door.middle)
    assert found == [True]
    assert asyncio.run(tasks()) == [True] * 3
    assert supernet.active == door.small


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", ["inside", "later", "together", "in another thread"])
def test_checkpoints_are_computed_again_for_their_subnet(door: Door, reentrant: bool, backward: str) -> None:
    supernet, network = door.supernet, door.supernet.network.train()
    wanted = []
    for spec in (door.small, door.middle):
        network.zero_grad()
        with supernet.running(spec):
            sums(network, door).backward()
        wanted.append({n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None})
    network.gradient_checkpointing_enable({"use_reentrant": reentrant})
    network.enable_input_require_grads()
    network.zero_grad()
    losses = []
    for spec in (door.small, door.middle):
        with supernet.running(spec):
            loss = sums(network, door)
            if backward == "inside":
                loss.backward()
            losses.append(loss)
    work: dict[str, Callable[[], Any]] = {
        "inside": lambda: None,
        "later": lambda: [loss.backward() for loss in losses],
        "together": lambda: torch.stack(losses).sum().backward(),
        "in another thread": lambda: losses[1].backward() or losses[0].backward(),
    }
    if backward == "in another thread":
        thread = threading.Thread(target=work[backward])
        thread.start()
        thread.join()
    else:
        work[backward]()
    for name, parameter in network.named_parameters():
        total = sum(each[name] for each in wanted if name in each)
        assert equal(torch.zeros_like(parameter) + total, parameter.grad, 1e-4), name


class Reading(nn.Module):
    """Reads weights, numbers and methods of its layers, as models do that fuse what layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.Linear(4, 8), nn.Linear(8, 4), Heads()
        self.stack = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.calls = nn.Buffer(torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = nn.functional.linear(x, self.first.weight, self.first.bias) * self.first.out_features
        x = self.second(x) * self.heads.count + self.heads.twice()
        for layer in self.stack.values():
            x = layer(x)
        return self.norm(x * len(list(self.stack)))


class Heads(nn.Module):
    count: int

    def __init__(self) -> None:
        super().__init__()
        self.count = 4

    def twice(self) -> int:
        return 2 * self.count


def reading() -> tuple[Reading, Supernet]:
    torch.manual_seed(0)
    axes = [Axis.uniform("width", ["it"], [2, 4, 8]), Axis.uniform("keep", ["b"], [0, 1])]
    space = SubnetSpace(
        "reading", axes, lambda v: {"w": v["width"][0], "h": v["width"][0] // 2, "k": v["keep"][0]}
    )
    elastic = {
        "first": WeightSlice.on(out="w"),
        "second": WeightSlice.on(in_="w"),
        "heads": ElasticAttribute.on(count="h"),
        "stack": LayerSelect.on(b="k"),
    }
    network = Reading().eval()
    return network, subnetact.insert_(network, space, elastic)


def cut_by_hand(network: Reading, width: int, keep: int) -> Reading:
    cut = copy.deepcopy(network)
    cut.first.weight, cut.first.bias = (nn.Parameter(p[:width]) for p in (cut.first.weight, cut.first.bias))
    cut.second.weight, cut.first.out_features = nn.Parameter(cut.second.weight[:, :width]), width
    cut.heads.count = width // 2
    if not keep:
        cut.stack["b"] = nn.Identity()
    return cut


def test_a_forward_sees_the_layers_of_the_subnet_and_everybody_else_the_whole_ones() -> None:
    _, supernet = reading()
    original, x = supernet.network, torch.randn(6, 4)
    ordinary = copy.deepcopy(supernet).remove()
    spec = supernet.space.spec(width=[2], keep=[0])
    wanted = cut_by_hand(ordinary, 2, 0).train()(x)
    supernet.train()
    for output in (supernet(x, subnet=spec), call_in(supernet, spec, x)):
        assert equal(output, wanted)
    supernet.actuate(spec)
    assert equal(original(x), wanted)
    with supernet.running(spec):
        assert original.first.weight.shape == (8, 4)  # No forward is under way.
        assert original.heads.count == 4
        assert original.heads.twice() == 8
        assert original.stack["b"] is original.stack._modules["b"]
        assert [type(layer).__name__ for layer in original.stack.values()] == ["Linear", "Linear"]
    seen: list[Any] = []
    original.second.register_forward_pre_hook(lambda m, x: seen.append(m.weight.shape))
    original(x)
    assert seen == [(4, 8)]  # A hook is a tool's, as that of `fully_shard`.


def call_in(supernet: Supernet, spec: Any, x: Tensor) -> Tensor:
    with supernet.running(spec):
        return supernet.network(x)


@pytest.mark.parametrize("way", ["running", "active", "supernet"])
def test_only_the_largest_subnet_writes_buffers_and_statistics(way: str) -> None:
    _, supernet = reading()
    ordinary, x = copy.deepcopy(supernet).remove(), torch.randn(6, 4)
    largest, small = supernet.space.largest(), supernet.space.smallest()
    supernet.train()
    ordinary.train()
    for spec in (small, largest, small, largest):
        if way == "supernet":
            supernet(x, subnet=spec)
        elif way == "running":
            call_in(supernet, spec, x)
        else:
            supernet.actuate(spec)
            supernet.network(x)
        if spec == largest:
            ordinary(x)
        assert equal(dict(supernet.state_dict()), dict(ordinary.state_dict()))
    assert supernet.network.calls == 2


def test_evaluation_uses_the_statistics_of_the_subnet_and_training_goes_on_from_them() -> None:
    _, supernet = reading()
    specs, x = supernet.space.sample(0, 3), torch.randn(16, 4)
    subnetact.calibrate(supernet, specs, [x], progress=False, check=False)
    for spec in specs:
        assert equal(call_in(supernet, spec, x), supernet.subnet(spec)(x))
    ordinary = copy.deepcopy(supernet).remove().train()
    supernet.network.train()
    for model in (ordinary, supernet.network, ordinary, supernet.network):
        model(x + 3)
    supernet.network.eval()
    for model in (supernet.network, supernet.subnet(supernet.space.largest()), supernet.network):
        assert equal(model(x), ordinary.eval()(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_of_the_network_runs_by_itself(copied: Callable[[Any], Any]) -> None:
    _, supernet = reading()
    x, spec = torch.randn(6, 4), supernet.space.smallest()
    subnetact.calibrate(supernet, [spec, supernet.space.largest()], [x], progress=False, check=False)
    supernet.actuate(spec)
    network = copied(supernet.network)
    assert equal(network(x), supernet(x))
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.zero_()
    assert not equal(network(x), supernet(x))
    with pytest.raises(InsertError, match="this network is a copy"):
        supernet_of(network)


def test_a_checkpoint_whose_subnet_is_forgotten_is_refused() -> None:
    _, supernet = reading()
    network, x = supernet.network, torch.randn(4, 4, requires_grad=True)
    y = checkpoint(network.second, nn.functional.linear(x, torch.ones(8, 4)), use_reentrant=False)
    for _ in range(600):
        with supernet.running(supernet.space.smallest()):
            pass
    with pytest.raises(TrainingError, match="it is not known for which subnet"):
        y.sum().backward()
