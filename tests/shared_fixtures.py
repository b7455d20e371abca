"""Fixtures that all tests share."""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torchvision_operators import define_missing

from subnetact import device
from subnetact.operators import kernel_table
from subnetact.operators.kernel_table import kernel_for
from subnetact.supernet.check import check_once
from subnetact.supernet.statistics import batch_norms
from subnetact.supernet.supernet import Supernet

torch.set_num_threads(1)
# Some virtual machines announce matrix units that they do not let a process use: oneDNN's bfloat16 kernels
# then die of an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
define_missing()

# An example may take as long as it takes: the machine may be busy.
settings.register_profile("subnetact", deadline=None)
settings.load_profile("subnetact")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Leave what other files have imported and made out of garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def int8_on_every_machine() -> Iterator[None]:
    """Where int8 is refused, tests of what it means run on exact products in float64."""
    real = device.machine_facts
    exact = device.MachineFacts(reference=True)

    def facts(kind: str) -> device.MachineFacts:
        found = real(kind)
        return found if kernel_for("int8", found).name or kind != "cpu" else exact

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_table, "machine_facts", facts)
        yield


@pytest.fixture(scope="session")
def read_once() -> Iterator[None]:
    """Let onnxscript read its own sources once, and not for every export, a third of whose time it is."""
    functions = pytest.importorskip("onnxscript._framework_apis.torch_2_5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "get_torchlib_ops", functools.cache(functions.get_torchlib_ops))
        yield


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def _wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., None]:
    """Waits until a condition holds, and fails the test after 20 s or `timeout_s`."""
    return _wait_for


@pytest.fixture(scope="session")
def checked_digits() -> tuple[Supernet, torch.Tensor]:
    """The supernet of `digits`, which `Supernet.check` has passed, and torch's random state after it."""
    from subnetact.digits import new_digits_supernet

    torch.manual_seed(0)
    supernet = new_digits_supernet().eval()
    for norm in batch_norms(supernet.network).values():
        norm.get_buffer("running_mean").normal_(0, 0.2)
        norm.get_buffer("running_var").uniform_(0.5, 1.5)
        norm.get_parameter("weight").data.uniform_(0.5, 1.5)
        norm.get_parameter("bias").data.normal_(0, 0.2)
    state = torch.get_rng_state()
    check_once(supernet, torch.zeros(1, 1, 16, 16))
    return supernet, state


@pytest.fixture
def digits(checked_digits: tuple[Supernet, torch.Tensor]) -> Supernet:
    """The embedded network with random weights and random BatchNorm statistics."""
    supernet, state = checked_digits
    torch.set_rng_state(state)
    return copy.deepcopy(supernet)
