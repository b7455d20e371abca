"""Statistics of former weights are dropped with them, and nothing computes with the shared ones unasked."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_network import BATCHES, first_choice, pretrained, supernet_of
from torch import Tensor, nn

from subnetact import Axis, Engine, SubnetSpace, Supernet, calibrate, insert_
from subnetact.engine import EngineConfig
from subnetact.errors import (
    EngineError,
    InsertError,
    NotCalibrated,
    UncalibratedSubnetWarning,
)
from subnetact.export import to_onnx, to_torchscript
from subnetact.files.documents import checksum
from subnetact.operators import SubnetNorm, WeightSlice
from subnetact.supernet import NormTable

X = BATCHES[0]
OTHER = pretrained(seed=1).state_dict()


@pytest.fixture
def supernet() -> Supernet:
    made = supernet_of(pretrained())
    calibrate(made, [made.space.smallest()], BATCHES, progress=False)
    return made


@pytest.fixture
def engine(supernet: Supernet) -> Engine:
    return Engine(supernet, [supernet.space.smallest()], example=X[:1])


def drop(supernet: nn.Module, state: dict[str, Tensor] = OTHER) -> None:
    with pytest.warns(UncalibratedSubnetWarning, match=r"1 subnet\(s\) belonged to the former weights"):
        supernet.load_state_dict(state)


def test_statistics_of_former_weights_are_not_kept_unasked(supernet: Supernet, engine: Engine) -> None:
    former, rows = copy.deepcopy(supernet.state_dict()), supernet.norms
    supernet.network.register_buffer("sparse", torch.eye(3).to_sparse())
    with torch.no_grad():
        supernet.network[0].weight[0] = math.nan
    supernet.load_state_dict(supernet.state_dict())
    assert len(supernet.norms) == 1, "a state that a supernet has already changes nothing"
    del supernet.network.sparse
    drop(supernet)
    assert not supernet.norms
    with pytest.raises(NotCalibrated):
        engine(X, 0)
    calibrate(supernet, engine.specs, BATCHES, progress=False)
    torch.testing.assert_close(engine(X, 0), supernet.extract(engine.specs[0])(X), rtol=0, atol=5e-5)
    supernet.load_state_dict(former, norms=rows)

    class Late(dict[str, torch.Tensor]):
        """Its tensors are looked at while another thread loads these weights with their statistics."""

        def items(self) -> Any:
            supernet.load_state_dict(OTHER, norms=supernet.norms)
            return super().items()

    drop(supernet, Late(former))
    assert not supernet.norms
    supernet.load_state_dict(former, norms=rows)
    supernet.load_state_dict(OTHER, norms=supernet.norms)
    assert len(supernet.norms) == 1
    supernet.load_state_dict(former, norms=NormTable(supernet.space.id))
    assert not len(supernet.norms)


def test_a_load_into_a_module_around_the_supernet_drops_them_as_well(supernet: Supernet) -> None:
    supernet.adopt_statistics()
    outer = nn.ModuleDict({"net": supernet})
    outer.load_state_dict(outer.state_dict())
    assert len(supernet.norms) == 2
    with pytest.warns(UncalibratedSubnetWarning, match=r"assign those .* to supernet\.norms after the load"):
        outer.load_state_dict({f"net.{name}": tensor for name, tensor in OTHER.items()})
    assert list(supernet.norms) == [supernet.space.largest()]
    torch.testing.assert_close(supernet(X), pretrained(seed=1)(X), rtol=0, atol=5e-5)


def test_statistics_that_no_row_stands_for_are_weights() -> None:
    network = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), *pretrained())
    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [4, 8])], first_choice)
    elastic = {"1": WeightSlice.on(out="c"), "2": SubnetNorm.on(channels="c"), "4": WeightSlice.on(in_="c")}
    supernet = insert_(network.eval(), space, elastic)
    calibrate(supernet, [space.smallest()], BATCHES, progress=False)
    drop(supernet, {**supernet.state_dict(), "0.running_mean": torch.ones(3)})
    assert not supernet.norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_given_with_weights_of_another_dtype_or_without_memory(dtype: torch.dtype) -> None:
    source, meta = supernet_of(pretrained()), supernet_of(pretrained().to("meta"))
    calibrate(source, [source.space.smallest()], BATCHES, progress=False)
    source.to(dtype)
    expected = source(X.to(dtype), subnet=source.space.smallest())
    for supernet in (supernet_of(pretrained(1)), meta):
        supernet.load_state_dict(source.state_dict(), assign=True, norms=source.norms)
        y = supernet(X.to(dtype), subnet=supernet.space.smallest())
        torch.testing.assert_close(y, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["1.num_batches_tracked", "1.running_mean"])
def test_shared_statistics_and_counters_are_no_weights_of_a_row(supernet: Supernet, name: str) -> None:
    supernet.load_state_dict({**supernet.state_dict(), name: supernet.state_dict()[name] + 1})
    assert len(supernet.norms) == 1


def test_a_load_that_fails_keeps_weights_and_rows(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    supernet.adopt_statistics()
    before, norms = supernet.fingerprint(), supernet.norms
    monkeypatch.setattr(supernet, "adopt_statistics", full)
    with pytest.raises(MemoryError):
        supernet.load_state_dict(OTHER)
    assert supernet.fingerprint() == before
    assert supernet.norms is norms
    assert len(norms) == 2


def at_the_binding(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch, number: int, before: Callable[[], Any], after: Any
) -> None:
    """Let another thread come just before and just after the view with a number is bound."""
    bind, calls = supernet.private_view, iter(range(100))

    def bound(*args: Any) -> Any:
        this = next(calls) == number
        if this:
            before()
        result = bind(*args)
        if this:
            after()
        return result

    monkeypatch.setattr(supernet, "private_view", bound)


@pytest.mark.filterwarnings("ignore:subnet .* shared BatchNorm statistics")
def test_blocks_are_not_bound_to_the_shared_statistics(
    supernet: Supernet, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    supernet.load_state_dict(pretrained(seed=2).state_dict(), norms=supernet.norms)
    at_the_binding(supernet, monkeypatch, 1, lambda: drop(supernet), lambda: None)
    with pytest.raises(NotCalibrated):
        engine.start(0, list(X), len(X))


@pytest.mark.filterwarnings("ignore:subnet .* shared BatchNorm statistics")
def test_a_view_of_the_moment_between_a_load_and_its_calibration_is_bound_again(
    supernet: Supernet, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    supernet.load_state_dict(pretrained(seed=2).state_dict(), norms=supernet.norms)
    again = lambda: calibrate(supernet, engine.specs, BATCHES, progress=False)  # noqa: E731
    at_the_binding(supernet, monkeypatch, 0, lambda: drop(supernet), again)
    torch.testing.assert_close(engine(X, 0), supernet.extract(engine.specs[0])(X), rtol=0, atol=5e-5)


def test_what_an_engine_refuses_is_neither_saved_nor_exported(engine: Engine, tmp_path: Path) -> None:
    engine.save(tmp_path / "bundle")
    former = engine.fingerprint
    drop(engine.supernet)
    writers: list[Callable[..., Any]] = [to_onnx, to_torchscript]
    for write in (Engine.save, *writers):
        with pytest.raises(NotCalibrated, match="1 of 1 subnets"):
            write(engine, tmp_path / ("bundle" if write is Engine.save else write.__name__))
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert Engine.load(tmp_path / "bundle", supernet=supernet_of(pretrained(5))).fingerprint == former


@pytest.mark.filterwarnings("ignore:subnet .* shared BatchNorm statistics")
def test_a_bundle_without_its_statistics_leaves_the_given_supernet_as_it_was(
    supernet: Supernet, engine: Engine, tmp_path: Path
) -> None:
    open_ = Engine(supernet, [supernet.space.largest()], example=X[:1], allow_uncalibrated=True)
    open_.save(tmp_path)
    index = tmp_path / "elastic.json"
    document = json.loads(index.read_text())
    document["engine"]["allow_uncalibrated"] = False
    del document["checksum"]
    index.write_text(json.dumps({**document, "checksum": checksum(document)}))
    drop(supernet)
    before = supernet.fingerprint()
    with pytest.raises(NotCalibrated, match="has no BatchNorm statistics"):
        Engine.load(tmp_path, supernet=supernet)
    assert supernet.fingerprint() == before
    assert Engine.load(tmp_path, supernet=supernet, allow_uncalibrated=True).ids == (0,)
    assert Engine.load(tmp_path, supernet=supernet, removed=[0]).stats().subnets == 0


def test_a_removed_subnet_needs_no_statistics(supernet: Supernet, tmp_path: Path) -> None:
    space = supernet.space
    config = EngineConfig([space.smallest(), space.largest()], removed=(1,), sample=X[0])
    engine = Engine.from_config(supernet, config)
    engine.save(tmp_path)
    loaded = Engine.load(tmp_path, supernet=supernet_of(pretrained(5)))
    replica = Engine.from_config(copy.deepcopy(supernet), engine.config)
    for same in (engine, loaded, replica):
        assert (same.ids, len(same)) == ((0,), 2)
        torch.testing.assert_close(same(X, 0), supernet(X, subnet=space.smallest()), rtol=0, atol=5e-5)
        with pytest.raises(NotCalibrated):
            same.register(space.largest())
        assert same.ids == (0,)
    for strange in (2, -1, "0", True):
        with pytest.raises(EngineError, match="no position of the 2 subnets"):
            Engine.from_config(supernet, replace(config, removed=(strange,)))  # type: ignore[arg-type]


def test_a_replica_refuses_no_more_than_the_engine(supernet: Supernet) -> None:
    small, large = supernet.space.smallest(), supernet.space.largest()
    supernet.adopt_statistics()
    engine = Engine(supernet, [small, large], example=X[:1], memory_budget_mb=8)
    engine.pin(0)
    supernet.load_state_dict(OTHER, norms=NormTable(supernet.space.id))
    supernet.adopt_statistics()
    replica = Engine.from_config(copy.deepcopy(supernet), engine.config)
    replica.warm_up([1], 60)
    torch.testing.assert_close(replica(X, 1), engine(X, 1), rtol=1e-3, atol=1e-4)
    for refusing in (engine, replica):
        with pytest.raises(NotCalibrated):
            refusing(X, 0)
    calibrate(supernet, [small], BATCHES, progress=False)
    replica.supernet.norms = supernet.norms
    torch.testing.assert_close(replica(X, 0), engine(X, 0), rtol=1e-3, atol=1e-4)


def test_weights_that_are_loaded_during_a_check_are_checked_next(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"norms": supernet.norms}
    loading = threading.Thread(target=supernet.load_state_dict, args=(OTHER,), kwargs=options)
    before, checks = supernet.fingerprint(), []

    def check(_: Any, thorough: bool) -> None:
        checks.append(supernet.fingerprint())
        if len(checks) == 1:
            loading.start()
            loading.join()

    monkeypatch.setattr(supernet, "check", check)
    for _ in range(3):
        supernet.check_once(X[:, :, :2])
    assert checks[0] == before != checks[1]
    assert len(checks) == 2, "once for each of the weights"


def test_a_network_that_changes_its_own_buffer_is_told_what_to_describe() -> None:
    class Averaging(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.mean())
            return super().forward(x)

    network = Averaging(*pretrained())
    network.register_buffer("seen", torch.zeros(()))
    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [4, 8])], first_choice)
    elastic = {"0": WeightSlice.on(out="c"), "1": SubnetNorm.on(channels="c")}
    supernet = insert_(network.eval(), space, elastic)
    with pytest.raises(InsertError, match='describe this module: "3"'):
        supernet.check_once(X)


def test_a_buffer_that_another_thread_replaces_is_no_functional_call(
    supernet: Supernet, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind, replaced = supernet._bind, list[int]()

    def replacing(*args: Any, **options: Any) -> nn.Module:
        view = bind(*args, **options)
        if not replaced:
            supernet.network[1].running_mean = torch.full((8,), 5.0)
            replaced.append(1)
        return view

    supernet.refresh()
    monkeypatch.setattr(supernet, "_bind", replacing)
    y = engine(X, 0)
    assert replaced
    torch.testing.assert_close(y, supernet.extract(engine.specs[0])(X), rtol=0, atol=5e-5)


def test_fused_programs_follow_pairs_of_a_row(supernet: Supernet) -> None:
    small = supernet.space.smallest()
    engine = Engine(supernet, [small], example=X[:1], memory_budget_mb=8)
    assert engine.pin(0)
    before = engine(X, 0)
    supernet.statistics(small)["1"][0].add_(3)
    supernet.norms.rows[small].pairs()["1"][1].mul_(2)
    y = engine(X, 0)
    assert not torch.allclose(y, before, atol=0.1)
    torch.testing.assert_close(y, supernet.extract(small)(X), rtol=1e-3, atol=1e-4)
