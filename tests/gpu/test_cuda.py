"""What needs a CUDA device; run by profiling/on_gpu.sh."""

from __future__ import annotations

import random

import pytest
import torch

import subnetact
from ofa_adapters import load
from subnetact.supernet import Supernet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning"),
]


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def test_views_on_cuda_equal_views_on_cpu(digits: Supernet) -> None:
    rng = random.Random(0)
    specs = [digits.space.smallest(), digits.space.largest(), *(digits.space.sample(rng) for _ in range(6))]
    x = torch.randn(4, 1, 16, 16)
    subnetact.calibrate(digits, specs, [x], progress=False)
    expected = [digits(x, subnet=spec) for spec in specs]
    digits.cuda()
    for spec, output in zip(specs, expected, strict=True):
        torch.testing.assert_close(digits(x.cuda(), subnet=spec).cpu(), output, atol=1e-3, rtol=1e-3)
        pointers = {p.untyped_storage().data_ptr() for p in digits.state_dict().values()}
        assert all(p.untyped_storage().data_ptr() in pointers for p in digits.subnet(spec).parameters())


def test_calibration_on_cuda_equals_calibration_on_cpu(digits: Supernet) -> None:
    spec, x = digits.space.smallest(), torch.randn(16, 1, 16, 16)
    subnetact.calibrate(digits, [spec], [x], progress=False)
    expected = digits.norms.get(spec).flat
    digits.cuda()
    subnetact.calibrate(digits, [spec], [x], progress=False)
    torch.testing.assert_close(digits.norms.get(spec).flat.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_a_cuda_profile_is_stamped_with_the_device() -> None:
    supernet = load("ofa_resnet50", width_mult_list=[0.1, 0.2])
    engine = subnetact.Engine(
        supernet,
        [supernet.space.smallest(), supernet.space.largest()],
        example=torch.zeros(3, 64, 64),
        device="cuda",
        allow_uncalibrated=True,
    )
    table = subnetact.profile_latency(engine, [1, 4], warmup_ms=1, min_time_ms=10, progress=False)
    assert table.stamp["device"] == "cuda"
    assert table.stamp["device_name"] == torch.cuda.get_device_name()
    assert (table.latency_ms > 0).all()
    assert (table.statistics["device_p50"] > 0).all()
    assert (table.statistics["device_p50"] <= table.statistics["p99"]).all()
    outputs = engine.run(0, list(torch.zeros(3, 3, 64, 64)), 4)
    assert len(outputs) == 3
    assert outputs[0].device.type == "cpu"
