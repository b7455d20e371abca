"""Weights are exchanged as a whole: whoever runs subnets meanwhile gets the answer of one checkpoint."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.engine import fusion_plan
from subnetact.errors import CheckpointError, ForeignSpec, StaleWeights
from subnetact.operators import ElasticKernel, KernelConv2d
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(1))
LAYERS = 8


class Deep(nn.Module):
    """Elastic and fixed layers, computed kernels, BatchNorms and buffers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.ModuleList(KernelConv2d(8, [1, 3], matrices=True) for _ in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(LAYERS))
        self.norm = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(LAYERS))
        self.fixed = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(LAYERS))
        for i in range(LAYERS):
            self.register_buffer(f"shift{i}", torch.zeros(8, 1, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(LAYERS):
            y = self.wide[i](self.narrow[i](self.kernel[i](x)).relu())
            x = self.norm[i](x + self.fixed[i](y)) + self.get_buffer(f"shift{i}")
        return self.head(x.mean((2, 3)))


@pytest.fixture
def supernet() -> Supernet:
    axes = [subnetact.Axis.uniform(name, ["all"], c) for name, c in (("w", (5, 8)), ("k", (1, 3)))]
    space = subnetact.SubnetSpace("deep", axes, lambda v: {"w": v["w"][0], "k": v["k"][0], "c": 8})
    elastic = {f"kernel.{i}": ElasticKernel.on(channels="c", kernel="k") for i in range(LAYERS)}
    elastic |= {f"narrow.{i}": subnetact.WeightSlice.on(out="w") for i in range(LAYERS)}
    elastic |= {f"wide.{i}": subnetact.WeightSlice.on(in_="w") for i in range(LAYERS)}
    return subnetact.insert_(Deep(), space, elastic).eval()


def checkpoints(supernet: Supernet) -> list[dict[str, Tensor]]:
    def values(name: str, tensor: Tensor, draw: torch.Generator) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        values = torch.rand(tensor.shape, generator=draw)
        return values + 0.5 if "var" in name else values - 0.5

    draws = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    return [{n: values(n, t, draw) for n, t in supernet.state_dict().items()} for draw in draws]


@pytest.fixture
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def answers_of_neither(
    run: Callable[[int], Tensor], expected: list[list[Tensor]], exchange: Callable[[int], None], count: int
) -> tuple[int, int]:
    """Run subnets in two threads while a third exchanges weights; count wrong answers, and all answers."""
    wrong, seen, done, answered = [0], [0], threading.Event(), threading.Semaphore(0)
    failed: list[BaseException] = []

    def read(subnet: int) -> None:
        try:
            while not done.is_set():
                answer = run(subnet)
                seen[0] += 1
                wrong[0] += not any(torch.allclose(answer, e[subnet], rtol=1e-3, atol=1e-4) for e in expected)
                answered.release()
        except BaseException as error:
            failed.append(error)
            answered.release()

    readers = [threading.Thread(target=read, args=(i % len(expected[0]),)) for i in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(count):
            exchange(turn % 2)
            assert answered.acquire(timeout=60)
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not failed, failed
    return wrong[0], seen[0]


@pytest.mark.parametrize("how", ["call", "view", "engine", "fused"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.usefixtures("switching")
def test_every_answer_is_of_one_checkpoint(supernet: Supernet, how: str, assign: bool) -> None:
    specs = [supernet.space.smallest(), supernet.space.largest()]
    states, expected = checkpoints(supernet), []
    for state in states:
        supernet.load_state_dict(state)
        expected.append([supernet.extract(spec)(X) for spec in specs])
    assert not torch.allclose(*[e[0] for e in expected], rtol=0.05)
    engine = subnetact.Engine(
        supernet, specs, example=X[:1], allow_uncalibrated=True, memory_budget_mb=64 * (how == "fused")
    )
    ways: dict[str, Callable[[int], Tensor]] = {
        "call": lambda i: supernet(X, subnet=specs[i]),
        "view": lambda i: supernet.subnet(specs[i])(X),
        "engine": lambda i: torch.stack(engine.run(i, list(X), 2)),
    }
    run = ways.get(how, ways["engine"])

    def exchange(which: int) -> None:
        supernet.load_state_dict(copy.deepcopy(states[which]) if assign else states[which], assign=assign)
        if how == "fused":
            assert all(engine.pin(i) for i in range(2))

    wrong, seen = answers_of_neither(run, expected, exchange, 4 if how == "fused" else 30)
    assert wrong == 0, (wrong, seen)


@pytest.mark.usefixtures("switching")
def test_statistics_change_at_the_same_moment_as_the_weights(supernet: Supernet) -> None:
    specs = [supernet.space.smallest(), supernet.space.largest()]
    states, tables, expected = checkpoints(supernet), [], []
    for k, state in enumerate(states):
        table = NormTable(supernet.space.id)
        shared = [supernet.statistics(spec) for spec in specs]
        rows = [{n: (m + k, v + 1 + 3 * k) for n, (m, v) in each.items()} for each in shared]
        table.update({spec: NormRow.of(row) for spec, row in zip(specs, rows, strict=True)})
        tables.append(table)
        supernet.load_state_dict(state, norms=table)
        expected.append([supernet.extract(spec)(X) for spec in specs])
    engine = subnetact.Engine(supernet, specs, example=X[:1])

    def exchange(which: int) -> None:
        supernet.load_state_dict(states[which], norms=tables[which])

    wrong, seen = answers_of_neither(lambda i: engine(X, i), expected, exchange, 60)
    assert wrong == 0, (wrong, seen)


def test_a_table_that_does_not_fit_loads_nothing(supernet: Supernet) -> None:
    state, before = checkpoints(supernet)[0], supernet.fingerprint()
    with pytest.raises(ForeignSpec):
        supernet.load_state_dict(state, norms=NormTable("another"))
    del state["head.bias"]
    with pytest.raises(CheckpointError):
        supernet.load_state_dict(state)
    assert supernet.fingerprint() == before


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("failing", ["a shape", "a hook"])
def test_a_load_that_fails_half_way_changes_nothing(supernet: Supernet, assign: bool, failing: str) -> None:
    """Also with strict=False, where torch itself keeps the tensors that it loaded before the failure."""
    before, tensors = supernet.fingerprint(), dict(supernet.named_parameters())
    other = {**checkpoints(supernet)[0]}
    if failing == "a shape":
        other["head.weight"] = torch.ones(3, 9)
        error: type[Exception] = CheckpointError
    else:
        error = ZeroDivisionError
        supernet.network.head.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(error, match=None if failing == "a hook" else r"head\.weight"):
        supernet.load_state_dict(other, strict=False, assign=assign)
    assert supernet.fingerprint() == before
    assert all(parameter is tensors[name] for name, parameter in supernet.named_parameters())


@pytest.mark.parametrize("door", ["load_state_dict", "exchange_storage"])
def test_a_load_that_finds_no_room_leaves_nothing_behind(
    supernet: Supernet, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is then loaded in place, as the documentation advises, reaches every copy."""
    spec = supernet.enable_precision("int8").at_precision(supernet.space.largest(), "int8")
    supernet(X, subnet=spec)
    name = "load.renew_storage_" if door == "load_state_dict" else "supernet.exchange_storage_"
    with monkeypatch.context() as patch:
        patch.setattr(f"subnetact.supernet.{name}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            supernet.load_state_dict(checkpoints(supernet)[0]) if door == "load_state_dict" else (
                supernet.exchange_storage({})
            )
    before = supernet.generation.moment()
    supernet.network.load_state_dict(checkpoints(supernet)[0])
    assert not supernet.generation.moment().same_weights(before)
    torch.testing.assert_close(supernet(X, subnet=spec), supernet.extract(spec)(X), rtol=0, atol=5e-5)


def test_a_load_in_place_that_fails_moves_the_generation(supernet: Supernet) -> None:
    """Tensors in shared memory are loaded where they are, so a failure behind them leaves other weights."""
    supernet.network.narrow[0].weight.share_memory_()
    supernet.network.head.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    before = supernet.generation.moment()
    with pytest.raises(ZeroDivisionError):
        supernet.load_state_dict(checkpoints(supernet)[0])
    assert not supernet.generation.moment().same_weights(before)


def test_optimizers_and_ties_survive_an_exchange(supernet: Supernet) -> None:
    network = supernet.network
    network.narrow[0].weight.data = network.wide[0].weight.data[:, :]  # two parameters on one storage
    optimizer = torch.optim.SGD(supernet.parameters(), lr=0.1)
    parameters = dict(supernet.named_parameters())
    supernet.load_state_dict(checkpoints(supernet)[0])
    assert all(parameter is parameters[name] for name, parameter in supernet.named_parameters())
    pointers = [m.weight.data_ptr() for m in (network.narrow[0], network.wide[0])]
    assert pointers[0] == pointers[1]
    spec = supernet.space.smallest()
    before = supernet(X, subnet=spec)
    supernet.train()
    supernet(X, subnet=spec).sum().backward()
    optimizer.step()
    supernet.eval()
    assert not torch.equal(supernet(X, subnet=spec), before)
    torch.testing.assert_close(supernet(X, subnet=spec), supernet.extract(spec)(X), rtol=0, atol=1e-5)


def test_a_held_view_keeps_its_weights_and_shared_memory_is_loaded_in_place(supernet: Supernet) -> None:
    first, second = checkpoints(supernet)
    supernet.load_state_dict(first)
    spec = supernet.space.smallest()
    view, expected = supernet.subnet(spec), supernet.extract(spec)(X)
    supernet.load_state_dict(second)
    torch.testing.assert_close(view(X), expected, rtol=0, atol=1e-6)
    assert supernet.subnet(spec) is not view
    supernet.network.head.weight.share_memory_()
    place = supernet.network.head.weight.data_ptr()
    supernet.load_state_dict(first)
    assert supernet.network.head.weight.data_ptr() == place
    torch.testing.assert_close(supernet(X, subnet=spec), expected, rtol=0, atol=1e-6)


def test_a_snapshot_of_the_state_is_not_touched_by_a_later_load(supernet: Supernet) -> None:
    first, second = checkpoints(supernet)
    supernet.load_state_dict(first)
    snapshot = supernet.state_dict()
    supernet.load_state_dict(second)
    assert all(torch.equal(tensor, first[name]) for name, tensor in snapshot.items())


def test_replaced_modules_and_parameters_are_noticed_at_the_next_call(supernet: Supernet) -> None:
    spec = supernet.space.smallest()
    engine = subnetact.Engine(supernet, [spec], allow_uncalibrated=True)
    before = engine(X, 0), supernet(X, subnet=spec)
    supernet.network.head = nn.Linear(8, 3)
    replaced = supernet(X, subnet=spec)
    torch.testing.assert_close(replaced, supernet.extract(spec)(X), rtol=0, atol=1e-6)
    assert not torch.allclose(replaced, before[1])
    torch.testing.assert_close(engine(X, 0), replaced, rtol=0, atol=1e-5)
    supernet.network.narrow[0].weight = nn.Parameter(torch.ones(8, 8, 1, 1))
    for run in (lambda: supernet(X, subnet=spec), lambda: engine(X, 0)):
        torch.testing.assert_close(run(), supernet.extract(spec)(X), rtol=0, atol=1e-5)
    supernet.network.fixed[1] = nn.Identity()
    torch.testing.assert_close(engine(X, 0), supernet.extract(spec)(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [lambda t: t.detach() * 1.5, lambda t: nn.Parameter(t.detach() * 1.5)])
def test_functional_call_uses_the_given_weights_and_leaves_no_trace(
    supernet: Supernet, kind: Callable[[Tensor], Tensor]
) -> None:
    specs = [supernet.space.smallest(), supernet.space.largest()]
    engine = subnetact.Engine(supernet, specs, allow_uncalibrated=True)
    before = [supernet(X, subnet=specs[0]), engine(X, 1)]
    given = {name: kind(p) for name, p in supernet.named_parameters()}
    other = copy.deepcopy(supernet)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    for spec in specs:  # The first is cached, the second is not.
        output = torch.func.functional_call(supernet, given, (X,), {"subnet": spec})
        torch.testing.assert_close(output, other(X, subnet=spec), rtol=0, atol=1e-5)
    assert torch.equal(supernet(X, subnet=specs[0]), before[0])
    assert torch.equal(engine(X, 1), before[1])
    for spec in specs:
        torch.testing.assert_close(supernet(X, subnet=spec), supernet.extract(spec)(X), rtol=0, atol=1e-6)


def test_nothing_keeps_the_tensors_of_a_functional_call(supernet: Supernet, tmp_path: Path) -> None:
    """Who serves or saves while the call runs gets an error, and afterwards the weights of the supernet."""
    spec = supernet.space.smallest()
    engine = subnetact.Engine(supernet, [spec], example=X[:1], allow_uncalibrated=True)
    given = {name: 3 * tensor.detach() for name, tensor in supernet.named_parameters()}
    for outside in (lambda: engine(X, 0), lambda: engine.save(tmp_path / "bundle")):
        supernet.refresh()
        expected, seen = supernet.extract(spec)(X), list[bool]()

        def meanwhile(*_: Any, outside: Callable[[], object] = outside, seen: list[bool] = seen) -> None:
            with pytest.raises(StaleWeights, match="functional_call runs"):
                outside()
            seen.append(True)

        hook = supernet.network.head.register_forward_hook(meanwhile)
        supernet.refresh()
        torch.func.functional_call(supernet, given, (X,), {"subnet": spec})
        hook.remove()
        assert seen
        torch.testing.assert_close(engine(X, 0), expected, rtol=0, atol=5e-5)


def test_a_functional_call_that_has_ended_is_no_reason_against_fusing(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion_plan, "slower_because", lambda *_: "only pinned subnets are fused")
    spec, seen = supernet.space.smallest(), list[bool]()
    engine = subnetact.Engine(supernet, [spec], example=X[:1], allow_uncalibrated=True, memory_budget_mb=64)
    given = {name: 3 * tensor.detach() for name, tensor in supernet.named_parameters()}

    def meanwhile(*_: Any) -> None:
        with pytest.raises(StaleWeights, match="functional_call"):
            engine.pin(0)
        seen.append(True)

    hook = supernet.register_forward_hook(meanwhile)
    torch.func.functional_call(supernet, given, (X,), {"subnet": spec})
    hook.remove()
    assert seen
    assert not engine.pinned
    assert engine.pin(0), engine.pin(0).reason


def test_nothing_is_copied_while_a_functional_call_comes_and_goes(supernet: Supernet) -> None:
    given = {name: 3 * tensor.detach() for name, tensor in supernet.named_parameters()}
    with pytest.raises(StaleWeights, match="functional_call"), supernet.generation.unchanged():
        torch.func.functional_call(supernet, given, (X,), {"subnet": supernet.space.smallest()})
    with supernet.generation.unchanged():
        pass


def test_a_fused_step_counts_the_parameters_that_it_changes() -> None:
    trained, kept = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([trained, kept], fused=True)
    trained.grad = torch.ones(3)
    before, y = trained._version, (kept * kept).sum()
    optimizer.step()
    assert trained._version > before
    y.backward()  # It needs `kept` as it was.


def test_functional_call_carries_gradients(supernet: Supernet) -> None:
    given = {name: p.detach() for name, p in supernet.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        call = torch.func.functional_call(supernet, parameters, (X,), {"subnet": supernet.space.smallest()})
        return call.square().sum()

    gradients = torch.func.grad(loss)(given)
    used = [n for n, g in gradients.items() if g.abs().sum() > 0]
    assert "head.weight" in used
    assert gradients["narrow.0.weight"][5:].abs().sum() == 0
    generation = supernet.generation.number
    torch.func.grad(loss)(given)
    assert supernet.generation.number == generation


def test_copies_are_watched_too(supernet: Supernet) -> None:
    spec = supernet.space.smallest()
    for copied in (copy.deepcopy(supernet), pickle.loads(pickle.dumps(supernet.network))):
        if not isinstance(copied, Supernet):
            assert type(copied._parameters) is dict
            continue
        before = copied(X, subnet=spec)
        copied.network.head = nn.Linear(8, 3)
        assert not torch.allclose(copied(X, subnet=spec), before)
        assert not torch.equal(supernet.network.head.weight, copied.network.head.weight)


def test_the_state_of_a_norm_of_another_precision_than_its_row_is_its_own() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    supernet = subnetact.insert_(network, example=x)
    largest = supernet.space.largest()
    subnetact.calibrate(supernet, [largest], [x])
    supernet.network[1].double()
    row = supernet.norms.get(largest)
    assert row is not None
    mean, _ = row.pairs()["1"]
    state = supernet.state_dict()
    assert torch.equal(state["1.running_mean"], mean.double())
    supernet.load_state_dict(state)
