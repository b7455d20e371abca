"""Tests that need a CUDA device; profiling/on_gpu.sh runs them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_families import small_supernet

from subnetact import Batcher, Engine, LatencyTable, calibrate, profile_latency
from subnetact.profile.modes import TimedRunner, mode_options
from subnetact.profile.sweep import Sweep, SweepSettings
from subnetact.supernet.supernet import Supernet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning"),
]


@pytest.fixture(autouse=True)
def seeded_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def test_views_on_cuda_equal_views_on_cpu(digits: Supernet) -> None:
    specs = digits.space.sample(0, 8)
    x = torch.randn(4, 1, 16, 16)
    calibrate(digits, specs, [x], progress=False)
    expected = [digits(x, subnet=spec) for spec in specs]
    digits.cuda()
    for spec, output in zip(specs, expected, strict=True):
        torch.testing.assert_close(digits(x.cuda(), subnet=spec).cpu(), output, atol=1e-3, rtol=1e-3)
        pointers = {p.untyped_storage().data_ptr() for p in digits.state_dict().values()}
        assert all(p.untyped_storage().data_ptr() in pointers for p in digits.subnet(spec).parameters())


def test_calibration_on_cuda_equals_calibration_on_cpu(digits: Supernet) -> None:
    spec, x = digits.space.smallest(), torch.randn(16, 1, 16, 16)
    calibrate(digits, [spec], [x], progress=False)
    expected = digits.norms.get(spec).flat
    digits.cuda()
    calibrate(digits, [spec], [x], progress=False)
    torch.testing.assert_close(digits.norms.get(spec).flat.cpu(), expected, atol=1e-4, rtol=1e-4)


def engine_on_cuda(count: int = 2, side: int = 64, **options: object) -> Engine:
    supernet = small_supernet("ofa_resnet50")
    specs = [supernet.space.smallest(), supernet.space.largest(), supernet.space.sample(0)][:count]
    given = {
        "example": torch.zeros(1, 3, side, side),
        "device": "cuda",
        "allow_uncalibrated": True,
        **options,
    }
    return Engine(supernet, specs, **given)


def test_a_cuda_profile_is_stamped_with_the_device() -> None:
    engine = engine_on_cuda()
    table = profile_latency(engine, [1, 4], warmup_ms=1, min_time_ms=10, progress=False)
    assert table.stamp["device"] == "cuda"
    assert table.stamp["device_name"] == torch.cuda.get_device_name()
    assert (table.latency_ms > 0).all()
    assert (table.statistics["device_p50"] > 0).all()
    assert (table.statistics["device_p50"] <= table.statistics["p99"]).all()
    outputs = engine.run(0, list(torch.zeros(3, 3, 64, 64)), 4)
    assert len(outputs) == 3
    assert outputs[0].device.type == "cpu"


@pytest.mark.parametrize("mode", ["zero-copy", "fused", "graphs"])
def test_every_mode_is_profiled_on_cuda(mode: str) -> None:
    engine = engine_on_cuda(**mode_options(mode, 512))
    runner = TimedRunner(engine, mode)
    sweep = Sweep(runner, [1, 4], SweepSettings(min_time_ms=10))
    sweep.run(progress=False)
    table = sweep.table([1.5, 2.5])
    assert (table.latency_ms > 0).all()
    assert (table.statistics["device_p50"] > 0).all()
    assert table.stamp["mode"] == mode
    assert (engine.stats().graphs > 0) == (mode in ("fused", "graphs"))


def test_memory_that_runs_out_on_cuda_is_a_missing_cell() -> None:
    engine = engine_on_cuda(1, 512)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    try:  # the input alone of 400 images is 1.2 GiB
        table = profile_latency(engine, [1, 400], warmup_ms=0, min_time_ms=1, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert table.latency_ms[0, 0] > 0
    assert table.latency_ms[0, 1] != table.latency_ms[0, 1]


@pytest.mark.parametrize("budget", [0, 512])
@pytest.mark.parametrize("pinned", [False, True])
def test_every_mode_on_cuda_equals_the_view(budget: float, pinned: bool) -> None:
    engine = engine_on_cuda(3, memory_budget_mb=budget)
    supernet, specs = engine.supernet, engine.specs
    if pinned and budget:
        assert all(engine.pin(i) for i in range(3))
    for batch in (1, 3, 8, 3, 1):
        x = torch.randn(batch, 3, 64, 64, device="cuda")
        for i, spec in enumerate(specs):
            torch.testing.assert_close(engine(x, subnet=i), supernet(x, subnet=spec), atol=1e-3, rtol=1e-3)
    stats = engine.stats()
    assert (stats.graphs > 0) == (budget > 0)
    assert stats.graphs + stats.fused_bytes <= stats.budget


def test_graphs_are_replayed_one_at_a_time_from_many_threads() -> None:
    engine = engine_on_cuda(3, memory_budget_mb=512)
    supernet, specs = engine.supernet, engine.specs
    engine.prepare([1, 2, 4])
    x = torch.randn(3, 3, 64, 64, device="cuda")
    with torch.inference_mode():
        expected = [supernet(x, subnet=spec) for spec in specs]
    torch.cuda.synchronize()

    def client(i: int) -> float:
        worst = 0.0
        for _ in range(50):
            worst = max(worst, float((engine(x, subnet=i % 3) - expected[i % 3]).abs().max()))
        return worst

    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(client, range(6))) < 1e-3 * max(1.0, float(expected[2].abs().max()))


def test_half_precision_programs_agree_roughly() -> None:
    supernet = small_supernet("ofa_resnet50").to(torch.bfloat16)
    spec = supernet.space.largest()
    example = torch.zeros(1, 3, 64, 64, dtype=torch.bfloat16)
    options = {"device": "cuda", "memory_budget_mb": 512, "allow_uncalibrated": True}
    engine = Engine(supernet, [spec], example=example, **options)
    assert engine.pin(0)
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    output, expected = engine(x, subnet=0), supernet(x, subnet=spec)
    assert float((output - expected).abs().max()) < 0.1 * max(1.0, float(expected.abs().max()))


def test_two_workers_copy_on_their_own_streams(digits: Supernet) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    images = torch.randn(400, 1, 16, 16)
    calibrate(digits, specs, [images[:40]], progress=False)
    expected = [digits(images, subnet=spec) for spec in specs]
    engine = Engine(digits, specs, device="cuda", example=images[:1], memory_budget_mb=64)
    table = LatencyTable(engine.keys, [60.0, 80.0], [1, 4, 16], [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]])
    with Batcher(engine, table=table, slo_ms=1e4, workers=2) as batcher:
        futures = [batcher.submit(x, deadline_ms=1e4) for x in images]
        for i, future in enumerate(futures):
            answer = future.result(60)
            torch.testing.assert_close(answer.output, expected[answer.subnet][i], atol=1e-3, rtol=1e-3)


def test_int8_subnets_on_cuda_compute_what_they_compute_on_the_cpu(digits: Supernet) -> None:
    space = digits.enable_precision("int8")
    specs = [space.at_precision(spec, "int8") for spec in (space.smallest(), space.largest())]
    x = torch.randn(3, 1, 16, 16)
    expected = [digits(x, subnet=spec) for spec in specs]
    digits.cuda()
    for spec, right in zip(specs, expected, strict=True):
        found = digits(x.cuda(), subnet=spec).cpu()
        assert (found - right).norm() < 1e-2 * right.norm()
