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
from elastic_convolutions import Convolutions, new_supernet, plain
from small_spaces import space_of
from torch import Tensor, nn

import subnetact
from subnetact import Engine, insert_
from subnetact.errors import CheckpointError, StaleWeights
from subnetact.operators import WeightSlice
from subnetact.supernet.check import check_once
from subnetact.supernet.load import move_storage_
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.statistics import statistics_of
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def supernet() -> Supernet:
    return new_supernet(Convolutions(8))


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


@pytest.mark.parametrize(
    ("how", "assign"),
    [*((how, False) for how in ("call", "view", "engine", "fused", "int8")), ("view", True)],
)
@pytest.mark.usefixtures("switching")
def test_answers_are_of_one_checkpoint_and_its_statistics(supernet: Supernet, how: str, assign: bool) -> None:
    space = supernet.enable_precision("int8") if how == "int8" else supernet.space
    precision = "int8" if how == "int8" else "float32"
    specs = [
        space.at_precision(s, precision) if how == "int8" else s for s in (space.smallest(), space.largest())
    ]
    states, tables, expected = checkpoints(supernet), [NormTable(space.id) for _ in range(2)], []
    for k, (state, table) in enumerate(zip(states, tables, strict=True)):
        for spec in specs:
            row = {n: (m + k, v + 1 + 3 * k) for n, (m, v) in statistics_of(supernet, spec).items()}
            table.update({spec: NormRow.of(row)})
        supernet.load_state_dict(state, norms=table)
        rows = {spec: row.pairs() for spec, row in table.rows.items()}
        exact = how != "int8"
        expected.append([plain(state, rows, s, X) if exact else supernet.extract(s)(X) for s in specs])
    assert not torch.allclose(*[e[0] for e in expected], rtol=0.05)
    engine = subnetact.Engine(supernet, specs, example=X[:1], memory_budget_mb=64 * (how == "fused"))
    ways: dict[str, Callable[[int], Tensor]] = {
        "call": lambda i: supernet(X, subnet=specs[i]),
        "view": lambda i: supernet.subnet(specs[i])(X),
        "int8": lambda i: supernet(X, subnet=specs[i]),
    }
    run = ways.get(how, lambda i: torch.stack(engine.run(i, list(X), 2)))

    def exchange(which: int) -> None:
        state = copy.deepcopy(states[which]) if assign else states[which]
        supernet.load_state_dict(state, assign=assign, norms=tables[which])
        if how == "fused":
            assert all(engine.pin(i) for i in range(2))

    wrong, seen = answers_of_neither(run, expected, exchange, 4 if how == "fused" else 30)
    assert wrong == 0, (wrong, seen)


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


def test_shared_memory_is_loaded_in_place_and_a_copied_supernet_is_independent(supernet: Supernet) -> None:
    first, second = checkpoints(supernet)
    spec = supernet.space.smallest()
    supernet.load_state_dict(first)
    expected, snapshot = supernet.extract(spec)(X), supernet.state_dict()
    copied = copy.deepcopy(supernet)
    supernet.load_state_dict(second)
    torch.testing.assert_close(copied(X, subnet=spec), expected, rtol=0, atol=1e-6)
    assert copied.fingerprint() != supernet.fingerprint()
    copied.network.head = nn.Linear(8, 3)
    assert not torch.allclose(copied(X, subnet=spec), expected)
    assert all(torch.equal(tensor, first[name]) for name, tensor in snapshot.items())
    supernet.network.head.weight.share_memory_()
    place = supernet.network.head.weight.data_ptr()
    supernet.load_state_dict(first)
    assert supernet.network.head.weight.data_ptr() == place
    torch.testing.assert_close(supernet(X, subnet=spec), expected, rtol=0, atol=1e-6)
    assert type(pickle.loads(pickle.dumps(supernet.network))._parameters) is dict


def test_nothing_keeps_the_tensors_of_a_functional_call(supernet: Supernet, tmp_path: Path) -> None:
    """Who serves, fuses or saves while the call runs gets an error, and afterwards its own weights."""
    spec = supernet.space.smallest()
    engine = subnetact.Engine(supernet, [spec], example=X[:1], allow_uncalibrated=True, memory_budget_mb=64)
    given = {name: 3 * tensor.detach() for name, tensor in supernet.named_parameters()}
    for outside in (lambda: engine(X, 0), lambda: engine.save(tmp_path / "bundle"), lambda: engine.pin(0)):
        supernet.refresh()
        expected, seen = supernet.extract(spec)(X), list[bool]()

        def meanwhile(*_: Any, outside: Callable[[], object] = outside, seen: list[bool] = seen) -> None:
            with pytest.raises(StaleWeights, match="functional_call"):
                outside()
            seen.append(True)

        hook = supernet.register_forward_hook(meanwhile)
        torch.func.functional_call(supernet, given, (X,), {"subnet": spec})
        hook.remove()
        assert seen
        torch.testing.assert_close(engine(X, 0), expected, rtol=0, atol=5e-5)
    assert engine.pin(0), engine.pin(0).reason
    with pytest.raises(StaleWeights, match="functional_call"), supernet.generation.unchanged():
        torch.func.functional_call(supernet, given, (X,), {"subnet": spec})
    with supernet.generation.unchanged():
        pass


IMAGES = torch.randn(2, 3, 8, 8)


class Blocking(nn.Module):
    """A network whose forward stops in the thread `stopped`, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3)
        self.stopped: set[int] = set()
        self.inside, self.free = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() in self.stopped:
            self.inside.set()
            assert self.free.wait(60)
        return self.b(self.a(x))


def blocking() -> tuple[Supernet, Blocking]:
    network, elastic = Blocking().eval(), {"a": WeightSlice.on(out="w"), "b": WeightSlice.on(in_="w")}
    return insert_(network, space_of(w=[2, 4, 8]), elastic), network


def others(supernet: Supernet) -> list[Any]:
    """Do what must not wait."""
    spec = supernet.space.smallest()
    state = {name: t + 1 for name, t in supernet.state_dict().items()}
    return [private_view(supernet, spec), supernet.load_state_dict(state), supernet.subnet(spec)(IMAGES)]


def run_beside(act: Callable[[], Any], network: Blocking, other: Callable[[], Any]) -> None:
    """Do something while a forward of `act`, on another thread, does not end."""
    errors: list[BaseException] = []

    def stopped() -> None:
        network.stopped.add(threading.get_ident())
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stopped, daemon=True), threading.Thread(target=other, daemon=True)]
    threads[0].start()
    assert network.inside.wait(60)
    threads[1].start()
    threads[1].join(60)
    waited = threads[1].is_alive()
    network.free.set()
    for thread in threads:
        thread.join(60)
    assert not waited
    assert errors == []


@pytest.mark.parametrize("check", [Supernet.check, check_once])
def test_others_go_on_during_a_check_which_holds_for_the_weights_that_it_began_with(check: Any) -> None:
    supernet, network = blocking()
    run_beside(lambda: check(supernet, IMAGES), network, lambda: others(supernet))


def test_other_calls_run_views_while_a_program_is_made() -> None:
    supernet, network = blocking()
    engine = Engine(supernet, [*supernet.space.enumerate()], example=IMAGES, memory_budget_mb=64)
    assert all(engine.pin(subnet) for subnet in engine.ids)
    supernet.load_state_dict({name: t + 1 for name, t in supernet.state_dict().items()})
    outputs: list[Tensor] = []
    run_beside(lambda: engine(IMAGES, subnet=0), network, lambda: outputs.append(engine(IMAGES, subnet=1)))
    torch.testing.assert_close(outputs[0], supernet(IMAGES, subnet=engine.specs[1]), rtol=1e-3, atol=1e-4)
    assert engine.is_fused(1)


@pytest.mark.parametrize("door", ["load_state_dict", "move_storage_"])
def test_a_load_that_finds_no_room(supernet: Supernet, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is then loaded in place, as the documentation advises, reaches every copy."""
    spec = supernet.enable_precision("int8").at_precision(supernet.space.largest(), "int8")
    supernet(X, subnet=spec)
    name = "renew_storage_" if door == "load_state_dict" else "exchange_storage_"
    with monkeypatch.context() as patch:
        patch.setattr(f"subnetact.supernet.load.{name}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            supernet.load_state_dict(checkpoints(supernet)[0]) if door == "load_state_dict" else (
                move_storage_(supernet, {})
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
