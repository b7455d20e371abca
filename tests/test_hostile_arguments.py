"""Arguments and orders of calls that no caller should use: each is right, or refused with a typed error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.errors import (
    EngineError,
    InsertError,
    InvalidRequest,
    PolicyError,
    SpecError,
    TableError,
)
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.fair_shares import FairShares
from subnetact.serving.scheduling.request import Ask, Request
from subnetact.training import sandwich_step

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


class Scaled(nn.Module):
    """Two convolutions with a BatchNorm, whose output is multiplied by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.second, self.scale = nn.Conv2d(8, 5, 1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.relu(self.norm(self.first(x))))
        return y.mean((2, 3)) * self.scale


def supernet_of() -> subnetact.Supernet:
    torch.manual_seed(0)
    network = Scaled()
    with torch.no_grad():
        network.train()(torch.randn(4, 3, 8, 8))
    return subnetact.insert_(network.eval(), example=torch.randn(2, 3, 8, 8))


def engine_of(supernet: subnetact.Supernet | None = None, **options: Any) -> subnetact.Engine:
    supernet = supernet or supernet_of()
    given = {"example": torch.zeros(1, 3, 8, 8), "allow_uncalibrated": True, **options}
    return subnetact.Engine(supernet, [supernet.space.largest(), supernet.space.smallest()], **given)


# -- engines -----------------------------------------------------------------------------------------


def test_inputs_that_fit_in_no_common_shape_are_not_cropped() -> None:
    engine = engine_of(example=[torch.zeros(1, 3, 6, 10), torch.zeros(1, 3, 10, 6)], padding=0)
    wide, high = torch.randn(3, 6, 10), torch.randn(3, 10, 6)
    with pytest.raises(InvalidRequest, match="no common shape"):
        engine.run(0, [wide, high], 2)
    small = torch.randn(3, 6, 6)
    padded = nn.functional.pad(small, (0, 0, 0, 4))
    expected = engine(torch.stack([padded, high]), 0)
    assert torch.equal(torch.stack(list(engine.run(0, [small, high], 2))), expected)


def test_every_shape_of_an_engine_is_tried() -> None:
    with pytest.raises(InvalidRequest, match=r"\(3, 2, 2\)"):
        engine_of(example=[torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 8, 8)])


@pytest.mark.parametrize("padding", [10**400, 1e300, float("nan"), True, "0"])
def test_padding_that_the_inputs_cannot_hold_is_refused(padding: Any) -> None:
    with pytest.raises(EngineError, match="padding"):
        engine_of(example=[torch.zeros(1, 3, 6, 6), torch.zeros(1, 3, 8, 8)], padding=padding)


def test_padding_takes_numpy_numbers() -> None:
    examples = [torch.zeros(1, 3, 6, 6), torch.zeros(1, 3, 8, 8)]
    engine = engine_of(example=examples, padding=np.float32(0), check=False)
    assert engine.run(0, [torch.ones(3, 5, 5)], 1)[0].isfinite().all()


@pytest.mark.parametrize(
    "inputs",
    [[], None, 5, [None], [np.zeros((3, 8, 8))], [torch.zeros(3, 8, 8), torch.zeros(3, 7, 7)],
     [torch.zeros(3, 8, 8).to_sparse()], {0: torch.zeros(3, 8, 8)}],
)  # fmt: skip
def test_run_refuses_what_is_no_list_of_inputs(inputs: Any) -> None:
    with pytest.raises(InvalidRequest):
        engine_of().run(0, inputs, 1)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_batches_without_data_are_refused(kind: str) -> None:
    x = torch.zeros(1, 3, 8, 8)
    with pytest.raises(InvalidRequest):
        engine_of()(x.to_sparse() if kind == "sparse" else x.to("meta"), 0)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda e: e.prepare([10**12]), EngineError),
        (lambda e: e.prepare([1], ids=5), SpecError),
        (lambda e: engine_of(e.supernet, memory_budget_mb="1"), EngineError),
        (lambda e: engine_of(e.supernet, memory_budget_mb=10**400), EngineError),
    ],
)
def test_engine_arguments_are_typed(call: Callable[[Any], Any], error: type[Exception]) -> None:
    engine = engine_of()
    assert not engine.is_fused([0])  # type: ignore[arg-type]
    with pytest.raises(error):
        call(engine)


# -- supernets ---------------------------------------------------------------------------------------


def test_a_supernet_without_its_operators_is_refused_everywhere(tmp_path: Path) -> None:
    supernet = supernet_of()
    engine, largest, x = engine_of(supernet), supernet.space.largest(), torch.randn(2, 3, 8, 8)
    engine.save(tmp_path / "bundle")
    network = supernet.remove()
    calls: list[Callable[[], Any]] = [
        supernet.remove,
        supernet.state_dict,
        supernet.fingerprint,
        lambda: supernet.load_state_dict({}),
        lambda: supernet.extract(largest),
        lambda: supernet.subnet(largest),
        lambda: supernet(x),
        lambda: subnetact.calibrate(supernet, [largest], [x]),
        lambda: engine_of(supernet),
        lambda: engine(x, 0),
        lambda: engine.save(tmp_path / "bundle"),
    ]
    for call in calls:
        with pytest.raises(InsertError, match="removed"):
            call()
    kept = subnetact.Engine.load(tmp_path / "bundle", supernet=supernet_of())
    assert torch.allclose(kept(x, 0), network(x), atol=5e-5)


def test_copies_keep_the_statistics_that_the_network_came_with() -> None:
    supernet = supernet_of()
    copied = copy.deepcopy(supernet)
    assert supernet.has_original_statistics()
    assert copied.has_original_statistics()
    with torch.no_grad():
        next(copied.parameters()).mul_(2)
    assert not copied.has_original_statistics()
    assert not copy.deepcopy(copied).has_original_statistics()
    assert supernet.has_original_statistics()


def test_changed_attributes_are_followed_after_refresh() -> None:
    supernet = supernet_of()
    x, smallest = torch.randn(2, 3, 8, 8), supernet.space.smallest()
    y = supernet(x, subnet=smallest)
    supernet.network.scale = 2.0
    supernet.refresh()
    assert torch.allclose(supernet(x, subnet=smallest), 2 * y, atol=5e-5)


# -- training, sorting, calibration ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"loss": 5}, {"loss": lambda scores, _: 5.0}, {"loss": lambda scores, _: scores.sum().detach()},
     {"distillation": "x"}, {"distillation": None}, {"distillation": float("nan")},
     {"teacher": 5}, {"backward": 5}, {"x": [1]}, {"x": None}],
)  # fmt: skip
def test_training_steps_refuse_wrong_arguments(options: dict[str, Any]) -> None:
    supernet = supernet_of().train()
    x = options.pop("x", torch.randn(2, 3, 8, 8))
    with pytest.raises(SpecError):
        sandwich_step(supernet, x, torch.tensor([0, 1]), rng=random.Random(0), **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_steps_need_gradients(mode: Any) -> None:
    supernet = supernet_of().train()
    with mode(), pytest.raises(SpecError, match="gradients"):
        sandwich_step(supernet, torch.randn(2, 3, 8, 8), torch.tensor([0, 1]), rng=random.Random(0))


@pytest.mark.parametrize(
    "options",
    [{"dimensions": 5}, {"dimensions": [5]}, {"dimensions": "first.width"}, {"batches": 5}, {"batches": [5]},
     {"batches": [(1,)]}, {"importance": lambda group: torch.zeros(group.units, dtype=torch.complex64)}],
)  # fmt: skip
def test_reorder_refuses_wrong_arguments(options: dict[str, Any]) -> None:
    supernet = supernet_of()
    fingerprint = supernet.fingerprint()
    with pytest.raises(SpecError):
        subnetact.reorder_(supernet, **{"example": torch.randn(2, 3, 8, 8), **options})
    assert supernet.fingerprint() == fingerprint


@pytest.mark.parametrize("given", [(None, [torch.zeros(2, 3, 8, 8)]), ([], None), ([], 5)])
def test_calibrate_refuses_what_is_no_list(given: tuple[Any, Any]) -> None:
    with pytest.raises(SpecError, match="lists"):
        subnetact.calibrate(supernet_of(), *given)


# -- batchers ----------------------------------------------------------------------------------------

TABLE = LatencyTable(["a", "b"], [60.0, 70.0], (1, 2), np.array([[2.0, 3.0], [4.0, 6.0]]))


class Echo:
    """A runner that gives inputs back, and whose inputs have any shape that a test wants."""

    keys = TABLE.subnets
    samples = (1, 2)
    shape: Any = 0

    def check(self, x: Any) -> None:
        """Accept everything."""

    def shape_of(self, x: Any) -> Any:
        return self.shape if x == "wrong" else 0

    def run(self, subnet: int, inputs: list[Any], batch_size: int) -> list[Any]:
        return list(inputs)


@pytest.mark.parametrize(
    "options",
    [{"table": 5}, {"table": "ab"}, {"table": [5]}, {"slo_ms": 10**400}, {"slo_ms": True}, {"clock_ms": 5},
     {"clock_ms": lambda: float("nan")}, {"watchdog_ms": "x"}, {"watchdog_ms": 10**400},
     {"watchdog_ms": float("nan")}, {"shares": 5}, {"shares": {}}],
)  # fmt: skip
def test_batchers_refuse_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises((PolicyError, TableError)):
        subnetact.Batcher(Echo(), policy=subnetact.SlackFit(TABLE, slo_ms=50.0), **options)


@pytest.mark.parametrize(
    "options",
    [{"burst_ms": "x"}, {"burst_ms": 10**400}, {"burst_ms": True}, {"weights": 5}, {"weights": None},
     {"weights": {"a": "x"}}, {"weights": {5: 1.0}}, {"weights": {"a": 10**400}}, {"weights": {"a": None}},
     {"weights": {"a": 5e-324}}, {"weights": {"a": 1e308}}],
)  # fmt: skip
def test_shares_refuse_wrong_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        FairShares(**options)


@pytest.mark.parametrize("shares", [None, FairShares()])
@pytest.mark.parametrize("client", [None, 5, [], {}, b"x"])
def test_clients_without_a_name_are_refused(client: Any, shares: FairShares | None) -> None:
    policy = subnetact.SlackFit(TABLE, slo_ms=50.0)
    with subnetact.Batcher(Echo(), policy=policy, shares=shares) as batcher:
        with pytest.raises(InvalidRequest, match="client"):
            batcher.submit("x", 1000.0, client=client)
        assert batcher.submit("x", 1000.0, client="me").result(10).output == "x"
        assert batcher.stats().refused == 1


@pytest.mark.parametrize("shape", [-1, 2, 99, None, "a", 1.0])
def test_an_input_of_an_unknown_shape_harms_no_other(shape: Any) -> None:
    engine = Echo()
    engine.shape = shape
    policy = subnetact.SlackFit(TABLE, slo_ms=50.0)
    with subnetact.Batcher(engine, policy=policy, table=[TABLE, TABLE]) as batcher:
        right = [batcher.submit(i, 5000.0) for i in range(20)]
        with pytest.raises(InvalidRequest, match="shape_of"):
            batcher.submit("wrong", 5000.0)
        right += [batcher.submit(i, 5000.0) for i in range(20, 40)]
        assert [future.result(10).output for future in right] == list(range(40))


def test_a_shape_whose_single_inputs_take_longest_keeps_the_floor() -> None:
    cells = np.array([[1.0, 1.5], [9.0, 4.0], [20.0, 20.0]])
    table = LatencyTable(["a", "b", "c"], [70.0, 80.0, 90.0], (1, 2), cells)

    class Planned:
        """Answers subnet b in batches of 2, whatever waits."""

        def __init__(self) -> None:
            self.table = table

        def decide(self, context: Any) -> tuple[int, int]:
            return 1, 2

    dispatcher = Dispatcher(Planned(), [table, table], [0.0], 50.0, "drop", print)
    request = Request(Ask(100.0, 80.0), 0.0)
    request.shape = 0
    dispatcher.queue.push(100.0, request, 80.0)
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    assert batch.subnet == 1
