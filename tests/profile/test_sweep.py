"""The sweep: when and how often every cell is measured, how one call is timed, and when a median is known."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from subnetact import Engine, calibrate, profile_latency
from subnetact.device import find_device, machine, ran_out_of_memory
from subnetact.digits import new_digits_supernet
from subnetact.engine.runtime_program import RUNTIMES
from subnetact.errors import DeviceError, ResumeMismatch, TableError
from subnetact.files.journal import Journal
from subnetact.profile.modes import MODES, TimedRunner, check_mode, mode_options
from subnetact.profile.stability import is_stable, median_interval, statistics_of
from subnetact.profile.sweep import Sweep, SweepSettings
from subnetact.profile.window import FEWEST_RUNS, _waited_s, measure
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)


CPU_OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"


_digits = cache(new_digits_supernet)  # nobody runs or changes it


class FakeRunner:
    """A runner whose cells have made-up times: `times(subnet, batch size, visit)` in ms."""

    facts: ClassVar[dict[str, Any]] = {}

    def __init__(self, times: Any, subnets: int = 2) -> None:
        self.engine = SimpleNamespace(
            ready=lambda subnet: SimpleNamespace(bound=None, spec=f"subnet {subnet}"),
            ids=tuple(range(subnets)),
            keys=tuple(f"s{i}" for i in range(subnets)),
            supernet=_digits(),
            device=torch.device("cpu"),
            fingerprint="made up",
        )
        self.sample = EXAMPLE
        self.times = times
        self.visits: list[tuple[int, int]] = []

    @contextmanager
    def prepared(self, subnet: int, batch_size: int) -> Iterator[Callable[[], float]]:
        visit = self.visits.count((subnet, batch_size))
        self.visits.append((subnet, batch_size))
        yield lambda: self.times(subnet, batch_size, visit)


def made_up(call: Any, device: Any, **_: Any) -> dict[str, np.ndarray]:
    return {"host_ms": np.full(4, float(call()))}


def sweep(
    runner: Any, batch_sizes: list[int], settings: SweepSettings, journal: Journal | None = None
) -> Sweep:
    made = Sweep(runner, batch_sizes, settings, journal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subnetact.profile.sweep.measure", made_up)
        made.run(progress=False)
    return made


def test_unstable_cells_are_visited_again_up_to_a_bound() -> None:
    def times(subnet: int, batch_size: int, visit: int) -> float:
        if (subnet, batch_size) == (0, 1):  # known at the eighth visit, whose interval leaves out two
            return [1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0][visit]
        return 2.0**visit if subnet == 1 and batch_size == 4 else 3.0  # never

    plain = FakeRunner(lambda subnet, batch_size, visit: 1.0 + subnet + batch_size)
    sweep(plain, [1, 4], SweepSettings())
    assert plain.visits == 5 * [(0, 1), (0, 4), (1, 1), (1, 4)]
    runner = FakeRunner(times)
    settings = SweepSettings(max_windows=9)
    measured = sweep(runner, [1, 4], settings)
    counts = {cell: runner.visits.count(cell) for cell in runner.visits}
    assert counts == {(0, 1): 8, (0, 4): 5, (1, 1): 5, (1, 4): 9}
    table = measured.table([math.nan] * 2)
    assert table.latency_ms.tolist() == [[1.0, 3.0], [3.0, 16.0]]
    assert table.statistics["stable"].tolist() == [[1, 1], [1, 0]]
    assert table.statistics["windows"].tolist() == [[8, 5], [5, 9]]
    assert table.statistics["runs"].tolist() == [[32, 20], [20, 36]]
    assert table.statistics["p99"][0, 0] > 5.0


def test_a_sweep_that_was_interrupted_anywhere_ends_the_same(tmp_path: Path) -> None:
    def times(subnet: int, batch_size: int, visit: int) -> float:
        return 1.0 + subnet + batch_size + (0.5 * visit if (subnet, batch_size) == (0, 4) else 0)

    settings = SweepSettings(max_windows=7)
    whole = FakeRunner(times)
    expected = sweep(whole, [1, 4], settings).table([70.0, 80.0])
    for after in range(len(whole.visits)):
        path = tmp_path / f"{after}.jsonl"

        left = iter(range(after))

        def interrupted(*cell: int, left: Iterator[int] = left) -> float:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return times(*cell)

        first = FakeRunner(interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(first, [1, 4], settings, Journal(path, {}))
        before = path.read_bytes()
        done = Counter(tuple(line["cell"]) for line in Journal(path, {}).of("window"))
        second = FakeRunner(lambda i, b, visit, done=done: times(i, b, done["", i, b] + visit))
        sweep(second, [1, 4], settings, Journal(path, {}))
        assert path.read_bytes().startswith(before)
        assert len(second.visits) == len(whole.visits) - after
        table = Sweep(second, [1, 4], settings, Journal(path, {})).table([70.0, 80.0])
        np.testing.assert_equal(table.latency_ms, expected.latency_ms)
        np.testing.assert_equal(dict(table.statistics), dict(expected.statistics))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError(CPU_OUT_OF_MEMORY), MemoryError()]
)
def test_cells_without_memory_are_recorded_larger_ones_skipped(error: Exception, tmp_path: Path) -> None:
    def times(subnet: int, batch_size: int, visit: int) -> float:
        if subnet == 1 and batch_size >= 4:
            raise error
        return 1.0

    runner, settings = FakeRunner(times), SweepSettings()
    sweep(runner, [1, 4, 8], settings, Journal(tmp_path / "j", {}))
    assert runner.visits.count((1, 4)) == 1
    assert (1, 8) not in runner.visits
    table = Sweep(runner, [1, 4, 8], settings, Journal(tmp_path / "j", {})).table([70.0, 80.0])
    assert np.isnan(table.latency_ms).tolist() == [[False] * 3, [False, True, True]]
    assert table.statistics["runs"][1].tolist() == [20, 0, 0]
    assert np.isnan(table.monotone().latency_ms).tolist() == np.isnan(table.latency_ms).tolist()
    nothing = FakeRunner(lambda *_: times(1, 4, 0))
    with pytest.raises(TableError, match="memory ran out in all"):
        sweep(nothing, [1], settings).table([1.5, 1.5])


def test_other_errors_are_not_taken_for_missing_memory() -> None:
    def times(*_: int) -> float:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(TableError, match=r"does not run at batch size 1: mat1 and mat2 shapes"):
        sweep(FakeRunner(times), [1], SweepSettings())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"statistic": "p42"}, "p42.*mean, p50"),
        ({"quantiles": (0, 50)}, "between 0 and 100"),
        ({"windows": 6, "max_windows": 5}, "at most max_windows"),
        ({"windows": 0}, "at least 1"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"warmup_ms": -1.0}, "warmup_ms"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TableError, match=words):
        SweepSettings(**changes)


@pytest.fixture
def engine(digits: Supernet) -> Engine:
    specs = [digits.space.smallest(), digits.space.largest()]
    calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    return Engine(digits, specs, example=EXAMPLE[None])


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.heavy] * (mode in RUNTIMES))
        for mode in MODES
        if mode not in ("graphs", "compile")
    ],
)
def test_every_mode_runs_the_subnet_it_times(engine: Engine, mode: str) -> None:
    supernet, specs = engine.supernet, engine.specs
    engine = Engine(supernet, specs, example=EXAMPLE[None], **mode_options(mode, 64))
    runner = TimedRunner(engine, mode)
    assert runner.facts == {"program": "engine", "mode": mode}
    for batch_size in (1, 3):
        x = torch.randn((batch_size, 1, 16, 16), generator=torch.Generator().manual_seed(0))
        for i, spec in enumerate(specs):
            with runner.prepared(i, batch_size) as call:
                output = call()
                assert engine.is_fused(i) == (mode in ("fused", "openvino", "onnxruntime"))
            torch.testing.assert_close(output, supernet(x, subnet=spec), rtol=1e-3, atol=1e-4)


def test_modes_and_devices_that_cannot_be_are_refused_and_a_lack_of_memory_is_known() -> None:
    with pytest.raises(DeviceError, match="graphs"):
        check_mode("graphs", torch.device("cpu"))
    for device in ("meta", "mps", "nonsense", "cuda:99"):
        with pytest.raises(DeviceError, match=f"device '{device}' cannot be") as raised:
            find_device(device)
        assert len(str(raised.value)) < 400
    for said in (CPU_OUT_OF_MEMORY, "CUDA error: out of memory", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"):
        assert ran_out_of_memory(RuntimeError(said))
    assert not ran_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_profile_is_resumed_only_in_its_own_environment(engine: Engine, tmp_path: Path) -> None:
    path, quick = tmp_path / "j.jsonl", {"warmup_ms": 0, "min_time_ms": 1, "progress": False}
    first = profile_latency(engine, [1, 2], resume=path, **quick)
    recorded = path.read_bytes()
    again = profile_latency(engine, [1, 2], resume=path, **quick)
    assert path.read_bytes() == recorded
    assert again.latency_ms.tolist() == first.latency_ms.tolist()
    with pytest.raises(ResumeMismatch, match="min_time_ms was 1, is 2"):
        profile_latency(engine, [1, 2], resume=path, **{**quick, "min_time_ms": 2})
    views = Engine(engine.supernet, engine.specs, example=EXAMPLE[None], backend="views")
    with pytest.raises(ResumeMismatch, match="mode was 'fused', is 'zero-copy'"):
        profile_latency(views, [1, 2], resume=path, **quick)
    with torch.no_grad():
        next(engine.supernet.parameters()).mul_(2.0)
    changed = Engine(engine.supernet, engine.specs, example=EXAMPLE[None])
    with pytest.raises(ResumeMismatch, match="supernet"):
        profile_latency(changed, [1, 2], resume=path, **quick)


def windows(*medians: float) -> list[dict[str, np.ndarray]]:
    return [{"host_ms": median * np.linspace(0.9, 1.1, 5)} for median in medians]


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for count in (5, 6, 8, 11, 15):
        draws = rng.exponential(1.0, (4000, count))  # skewed, as latencies are
        held = [low <= np.log(2) <= high for low, high in map(median_interval, draws)]
        assert 0.89 <= np.mean(held) <= 0.98, count


DISTURBED = (1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.01, 9.0)
SLOW_MINUTES = [1.2 if 10 <= i % 30 < 20 else 1.0 for i in range(60)]


@pytest.mark.parametrize(
    ("medians", "busy", "tolerance", "stable"),
    [
        ((1.0, 1.02, 0.98, 1.0, 1.01), (), 3, True),
        ((1.0, 1.02, 0.98, 1.0, 1.08), (), 3, False),
        ((1.0, 1.0, 1.0, 1.0), (), 3, False),  # too few to say
        (DISTURBED, (), 3, True),  # a minority of outliers
        (SLOW_MINUTES, (), 5, False),  # windows of slow minutes are no independent samples
        ([1.2 if i % 3 == 0 else 1.0 for i in range(60)], (), 5, True),  # the same ones in another order
        *(([1.0, 1.0, 3.0, *[1.0] * (n - 5), 3.0, 1.0], (), 3, True) for n in (11, 15, 16, 23, 24, 31, 60)),
        ([1.0] * 5, (0.0, 0.01, 0.0, 0.02, 0.0), 5, True),
        ([1.0] * 5, (0.0, 0.6, 0.0, 0.6, 0.0), 5, True),  # beside other work in a minority of windows
        ([1.0] * 5, (0.3, 0.35, 0.0, 0.35, 0.4), 5, False),
    ],
)
def test_a_cell_is_stable_when_its_median_is_known(
    medians: Sequence[float], busy: Sequence[float], tolerance: float, stable: bool
) -> None:
    taken = [{"host_ms": median * np.linspace(0.9, 1.1, 5)} for median in medians]
    for window, share in zip(taken, busy, strict=False):
        window["busy"] = np.array([share])
    assert is_stable(taken, tolerance) == stable
    found = statistics_of(taken, tolerance, [50])
    assert found["p50"] == pytest.approx(np.median(medians), rel=0.1)
    assert found.get("busy") == (np.median(busy) if busy else None)


def test_statistics_are_of_all_runs_by_clock() -> None:
    one = {"host_ms": np.array([2.0, 3.0]), "device_ms": np.array([1.0, 1.5])}
    found = statistics_of([one] * 5, 5, [50, 99.9])
    assert found["device_p50"] == 1.25
    assert found["p99.9"] > found["p50"] == found["mean"] == 2.5
    assert (found["min"], found["std"], found["device_min"]) == (2.0, 0.5, 1.0)
    assert (found["runs"], found["windows"], found["stable"]) == (10, 5, 1)


def test_a_window_has_a_few_runs_however_long_they_take() -> None:
    calls = []
    taken = measure(lambda: calls.append(1), torch.device("cpu"), warmup_ms=0, min_time_ms=0)
    assert list(taken) == ["host_ms", "busy"]
    assert taken["host_ms"].shape == (FEWEST_RUNS,)
    assert len(calls) == 1 + FEWEST_RUNS
    assert (taken["host_ms"] >= 0).all()
    longer = measure(lambda: calls.append(1), torch.device("cpu"), warmup_ms=1, min_time_ms=5)
    assert longer["host_ms"].sum() <= 5 + longer["host_ms"].max()
    assert len(longer["host_ms"]) > FEWEST_RUNS
    assert machine(torch.device("cpu"))["torch"] == torch.__version__


def test_cuda_is_timed_by_events_around_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, other: object) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    taken = measure(lambda: order.append("call"), torch.device("cuda"), 0, 0)
    assert order == ["call", "wait"] + FEWEST_RUNS * ["event", "call", "event", "wait"]
    assert taken["device_ms"].tolist() == [1.5] * FEWEST_RUNS
    assert taken["host_ms"].shape == (FEWEST_RUNS,)


def test_work_on_the_cpu_is_seen_and_waiting_for_a_device_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sleeps has no CPU, as one whose CPU does other work."""
    cpu = torch.device("cpu")
    assert measure(lambda: time.sleep(0.005), cpu, 0, 0)["busy"][0] > 0.5
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # a system without /proc
    assert measure(lambda: time.sleep(0.005), cpu, 0, 0)["busy"][0] > 0.5
    assert _waited_s(torch.device("cuda")).tolist() == [0.0, 0.0]
