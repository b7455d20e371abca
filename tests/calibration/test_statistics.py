"""Statistics of subnets: adopted with a network, dropped with its weights, and exact at every precision."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import BATCHES, one_width, pretrained, supernet_of
from torch import Tensor, nn
from torch.nn import functional as F

from subnetact import Engine, Supernet, calibrate, from_pretrained
from subnetact.engine import EngineConfig
from subnetact.errors import EngineError, NotCalibrated, SpecError, StaleWeights, UncalibratedSubnetWarning
from subnetact.export import to_onnx, to_torchscript
from subnetact.files.documents import checksum
from subnetact.supernet import NormTable
from subnetact.supernet.statistics import adopt_statistics_, batch_norms, is_calibrated, statistics_of


@pytest.mark.parametrize("adopt", [None, True])
def test_the_largest_subnet_is_the_original_after_calibration(adopt: bool | None) -> None:
    original = pretrained()
    supernet = supernet_of(copy.deepcopy(original))
    space = supernet.space
    report = calibrate(supernet, [space.smallest(), space.largest()], BATCHES, progress=False, adopt=adopt)
    x = BATCHES[0]
    assert torch.equal(supernet(x, subnet=space.largest()), original(x))
    assert torch.equal(supernet.extract(space.largest())(x), original(x))
    assert report.adopted == (space.largest(),)
    assert (report.subnets, report.batches) == (1, len(BATCHES))
    assert "the largest subnet keeps the statistics that the network came with" in str(report)
    assert is_calibrated(supernet, space.largest())
    assert calibrate(supernet, [space.largest()], [], progress=False).adopted


def test_statistics_that_are_not_the_networks_own_are_calibrated() -> None:
    def adopted(supernet: Supernet, **options: bool) -> bool:
        largest = supernet.space.largest()
        report = calibrate(supernet, [largest], BATCHES, progress=False, **options)
        return report.adopted == (largest,)

    assert not adopted(supernet_of(pretrained()), adopt=False)
    fresh = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert not adopted(supernet_of(fresh.eval()))
    trained = supernet_of(pretrained())
    trained.train()
    trained(BATCHES[0], subnet=trained.space.smallest()).sum().backward()
    assert trained.generation.is_original, "a narrow subnet moves copies of them"
    trained(BATCHES[0], subnet=trained.space.largest()).sum().backward()
    assert not adopted(trained.eval())
    loaded = supernet_of(pretrained())
    loaded.load_state_dict({name: t * 1.5 for name, t in loaded.state_dict().items()})
    assert not adopted(loaded)
    of_a_family = supernet_of(pretrained())
    of_a_family.origin = {"name": "digits", "constructor": {}}
    assert not adopted(of_a_family)
    uncounted = pretrained()
    uncounted[1].num_batches_tracked = None  # so that torch counts no training
    trained = supernet_of(uncounted)
    assert trained.generation.is_original
    trained.train()
    trained(BATCHES[0])
    assert not adopted(trained.eval())
    assert adopted(supernet_of(pretrained()).to(torch.float64).to(torch.float32))


def test_adopted_statistics_are_a_row_of_their_own() -> None:
    supernet = supernet_of(pretrained())
    adopt_statistics_(supernet)
    largest = supernet.space.largest()
    before = supernet(BATCHES[0], subnet=largest)
    supernet.network.get_submodule("1").running_mean.add_(1)
    assert torch.equal(supernet(BATCHES[0], subnet=largest), before)


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
    for name in ("1.num_batches_tracked", "1.running_mean"):
        supernet.load_state_dict({**supernet.state_dict(), name: supernet.state_dict()[name] + 1})
        assert len(supernet.norms) == 1, "shared statistics and counters are no weights of a row"
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
    adopt_statistics_(supernet)
    outer = nn.ModuleDict({"net": supernet})
    outer.load_state_dict(outer.state_dict())
    assert len(supernet.norms) == 2
    with pytest.warns(UncalibratedSubnetWarning, match=r"assign those .* to supernet\.norms after the load"):
        outer.load_state_dict({f"net.{name}": tensor for name, tensor in OTHER.items()})
    assert list(supernet.norms) == [supernet.space.largest()]
    torch.testing.assert_close(supernet(X), pretrained(seed=1)(X), rtol=0, atol=5e-5)


def test_statistics_that_no_row_stands_for_are_weights() -> None:
    network = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), *pretrained())
    supernet = one_width(network, {"1": "out", "2": "norm", "4": "in"})
    calibrate(supernet, [supernet.space.smallest()], BATCHES, progress=False)
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
def test_a_bundle_without_statistics_changes_nothing(
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
    adopt_statistics_(supernet)
    engine = Engine(supernet, [small, large], example=X[:1], memory_budget_mb=8)
    engine.pin(0)
    supernet.load_state_dict(OTHER, norms=NormTable(supernet.space.id))
    adopt_statistics_(supernet)
    replica = Engine.from_config(copy.deepcopy(supernet), engine.config)
    replica.warm_up([1], 60)
    torch.testing.assert_close(replica(X, 1), engine(X, 1), rtol=1e-3, atol=1e-4)
    for refusing in (engine, replica):
        with pytest.raises(NotCalibrated):
            refusing(X, 0)
    calibrate(supernet, [small], BATCHES, progress=False)
    replica.supernet.norms = supernet.norms
    torch.testing.assert_close(replica(X, 0), engine(X, 0), rtol=1e-3, atol=1e-4)


TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float32: 5e-6, torch.float64: 5e-6}
NUMBERS = torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(3))


def network(scale: float = 1.0) -> nn.Module:
    """Return a network whose BatchNorm sees numbers of a standard deviation of about `scale`."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    made[0].weight.data.mul_(2 * scale)
    return made


def measured(scale: float = 1.0) -> Supernet:
    """Return a float32 supernet with a row for every subnet."""
    supernet = supernet_of(network(scale))
    calibrate(supernet, list(supernet.space.enumerate()), [NUMBERS], progress=False)
    return supernet


def of_a_file(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    exact.norms.save(path / "norms.safetensors")
    other.load_state_dict(other.state_dict(), norms=NormTable.load(path / "norms.safetensors"))
    return other


def of_a_bundle(exact: Supernet, other: Supernet, path: Path) -> Supernet:
    exact.to(other.network[0].weight.dtype).save_pretrained(path / "bundle")
    return from_pretrained(path / "bundle", model=other)  # type: ignore[return-value]


WAYS: dict[str, Callable[[Supernet, Supernet, Path], Any]] = {
    "of a file": of_a_file,
    "of a bundle": of_a_bundle,
    "assigned": lambda exact, other, _: setattr(other, "norms", exact.norms),
    "updated": lambda exact, other, _: other.norms.update(exact.norms.rows),
    "converted": lambda exact, other, _: exact.to(other.network[0].weight.dtype),
    "copied": lambda exact, other, _: copy.deepcopy(exact.to(other.network[0].weight.dtype)),
    "there and back": lambda exact, other, _: exact.half().bfloat16().to(other.network[0].weight.dtype),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("way", WAYS)
def test_rows_stay_exact(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    exact, other = measured(), supernet_of(network()).to(dtype)
    rows = {spec: row.flat.clone() for spec, row in exact.norms.rows.items()}
    expected = {spec: exact(NUMBERS, subnet=spec) for spec in rows}
    supernet = WAYS[way](exact, other, tmp_path) or other
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    x, weights = NUMBERS.to(dtype), torch.bfloat16 if way == "there and back" else dtype
    engine = Engine(supernet, list(rows), example=x[:1])
    for i, spec in enumerate(rows):
        flat = supernet.norms.rows[spec].flat
        assert flat.dtype is kept
        assert torch.equal(flat, rows[spec].to(kept))
        assert {t.dtype for pair in statistics_of(supernet, spec).values() for t in pair} == {dtype}
        for found in (supernet(x, subnet=spec), supernet.extract(spec)(x), engine(x, i)):
            assert found.dtype is dtype
            tolerance = max(TOLERANCES[dtype], TOLERANCES[weights])
            torch.testing.assert_close(found.float(), expected[spec], rtol=0, atol=tolerance)


USES: dict[str, Callable[[Supernet, Any, Path], Any]] = {
    "view": lambda s, spec, _: s.subnet(spec),
    "call": lambda s, spec, _: s(NUMBERS.half(), subnet=spec),
    "extract": lambda s, spec, _: s.extract(spec),
    "engine": lambda s, spec, _: Engine(s, [spec], example=NUMBERS[:1].half()),
    "bundle": lambda s, _, path: s.save_pretrained(path / "bundle"),
    "state_dict": lambda s, *_: s.state_dict(),
    "calibrate": lambda s, spec, _: calibrate(s, [spec], [NUMBERS.half()], progress=False),
}


@pytest.mark.parametrize("use", USES)
def test_statistics_that_overflow_are_refused_where_they_are_read(use: str, tmp_path: Path) -> None:
    exact = measured(500.0)
    supernet, spec = measured(500.0).half(), exact.space.smallest()
    with pytest.raises(SpecError, match=r"^1: its statistics are not finite at float16: .* norm\.float\(\)"):
        USES[use](supernet, spec, tmp_path)
    for norm in batch_norms(supernet.network).values():  # as the message says
        norm.float()
    USES[use](supernet, spec, tmp_path)
    expected = exact(NUMBERS, subnet=spec)
    torch.testing.assert_close(supernet(NUMBERS.half(), subnet=spec).float(), expected, rtol=0, atol=5e-3)
    shared = network()
    nn.init.constant_(shared[1].running_var, 1e5)
    with pytest.raises(SpecError, match="above 65504 overflows"):
        supernet_of(shared).half().subnet(spec)


def test_an_average_of_many_batches_is_one_of_float32() -> None:
    supernet = supernet_of(network()).bfloat16()
    spec = supernet.space.smallest()
    noise = torch.randn(300, 4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    batches = list((noise * torch.linspace(0.2, 3, 300).view(-1, 1, 1, 1, 1)).bfloat16())  # in order of size
    calibrate(supernet, [spec], batches, progress=False)
    weight, bias = (t[:4] for t in (supernet.network[0].weight, supernet.network[0].bias))
    seen = [F.conv2d(x, weight, bias).double() for x in batches]
    row = supernet.norms.get(spec)
    assert row is not None
    mean, var = row.pairs()["1"]
    mean_of: Callable[[list[Tensor]], Tensor] = lambda parts: torch.stack(parts).mean(0).float()  # noqa: E731
    torch.testing.assert_close(mean, mean_of([y.mean((0, 2, 3)) for y in seen]), rtol=1e-4, atol=1e-5)
    exact = mean_of([y.var((0, 2, 3), unbiased=False) for y in seen])
    torch.testing.assert_close(var, exact, rtol=1e-4, atol=0)


def test_statistics_that_training_changes_meanwhile_are_not_adopted() -> None:
    supernet = supernet_of(pretrained())
    specs = [supernet.space.smallest(), supernet.space.largest()]

    def batches() -> Iterator[torch.Tensor]:
        yield BATCHES[0]
        supernet.train()
        supernet(BATCHES[1])
        supernet.eval()
        yield BATCHES[2]

    with pytest.raises(StaleWeights, match="by training"):
        calibrate(supernet, specs, batches(), progress=False)
    assert len(supernet.norms) == 0
    assert not calibrate(supernet, specs, batches(), progress=False).adopted  # It changes no weights.


def test_a_failed_load_keeps_weights_and_rows(supernet: Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    adopt_statistics_(supernet)
    before, norms = supernet.fingerprint(), supernet.norms
    monkeypatch.setattr("subnetact.supernet.load.adopt_statistics_", full)
    with pytest.raises(MemoryError):
        supernet.load_state_dict(OTHER)
    assert supernet.fingerprint() == before
    assert supernet.norms is norms
    assert len(norms) == 2
