"""What is made of the weights and stays is the same in whichever mode of torch it is first asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from small_families import small_constructor, small_inputs, small_supernet
from torch._subclasses.fake_tensor import FakeTensorMode

import subnetact
from ofa_adapters import load

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = small_inputs("ofa_mbv3", 2)["x"]
"""Matrices compute the small kernels of this family, so its views have packed copies."""
autocast: Callable[[], AbstractContextManager[Any]] = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
fake = partial(FakeTensorMode, allow_non_fake_inputs=True)


@pytest.mark.parametrize("mode", [autocast, fake, torch.inference_mode])
def test_a_mode_leaves_nothing_behind(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    supernet = small_supernet("ofa_mbv3")
    spec = supernet.space.smallest()
    expected, plain = copy.deepcopy(supernet)(X, subnet=spec), supernet.extract(spec)
    with mode():
        view, extracted = supernet.subnet(spec), supernet.extract(spec)
    assert supernet.packed_bytes() > 0
    assert torch.equal(view(X), expected)
    for own, other in zip(extracted.parameters(), plain.parameters(), strict=True):
        assert (type(own), own.dtype) == (type(other), other.dtype)
        assert torch.equal(own, other)
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.mul_(1.01)
    with mode():
        view(X)  # This makes the packed copies again.
    assert torch.equal(view(X), copy.deepcopy(supernet)(X, subnet=spec))


def test_a_check_and_a_calibration_under_autocast_leave_nothing_behind() -> None:
    supernet = small_supernet("ofa_mbv3")
    spec = supernet.space.smallest()
    expected = copy.deepcopy(supernet)(X, subnet=spec)
    with autocast():
        assert spec in supernet.check(X).ran
    assert torch.equal(supernet(X, subnet=spec), expected)
    twin = copy.deepcopy(supernet)
    with autocast():
        subnetact.calibrate(supernet, [spec], [X], progress=False, check=False)
    subnetact.calibrate(twin, [spec], [X], progress=False, check=False)
    row, exact = supernet.norms.get(spec), twin.norms.get(spec)
    assert row is not None
    assert exact is not None
    assert row.flat.dtype == torch.float32
    assert not torch.equal(row.flat, row.flat.bfloat16().float()), "statistics keep all digits"
    torch.testing.assert_close(row.flat, exact.flat, rtol=0.1, atol=0.1)
    assert not torch.equal(row.flat, exact.flat), "the forward passes were those of autocast"
    assert supernet(X, subnet=spec).isfinite().all()


@pytest.fixture
def two_recompiles() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


@pytest.mark.usefixtures("two_recompiles")
def test_compiled_supernets_follow_changes_in_place() -> None:
    torch._dynamo.reset()
    shallow = {**small_constructor("ofa_mbv3"), "depth_list": [1, 2]}
    supernet = load("ofa_mbv3", None, **shallow).eval()
    spec = supernet.space.smallest()
    compiled = torch.compile(supernet, backend="eager")
    with torch.no_grad():
        for _ in range(4):  # More than torch.compile compiles again before it gives up.
            found, expected = compiled(X, subnet=spec), copy.deepcopy(supernet)(X, subnet=spec)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            for name, parameter in supernet.named_parameters():
                if "depth_conv" in name:
                    parameter.mul_(1.1).add_(0.01)
        own = torch.compile(supernet.subnet(spec), backend="eager")
        own(X)
        next(p for n, p in supernet.named_parameters() if "depth_conv" in n).mul_(2)
        supernet.refresh()
        own = torch.compile(supernet.subnet(spec), backend="eager")
        torch.testing.assert_close(own(X), supernet(X, subnet=spec), rtol=1e-5, atol=1e-6)
