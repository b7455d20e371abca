"""torch.compile(supernet) compiles every subnet of every supernet, and says when a limit is reached."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from small_families import small_constructor, small_inputs, small_supernet
from small_spaces import space_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import subnetact
from ofa_adapters import load
from subnetact import Supernet, insert_
from subnetact.operators import SubnetNorm, WeightSlice
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import packed_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch reads .grad of slices
SUBNETS = 5


class Counter:
    """A backend that counts graphs, and the calls that run one."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Callable[..., Any], _: Any) -> Callable[..., Any]:
        """Return a graph as it is, but counted."""
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Forget what was compiled; torch compiles one function again for a few times only."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3):
        yield
    torch._dynamo.reset()


def call(supernet: Supernet, x: Tensor, subnet: SubnetSpec) -> Any:
    """Run a subnet, from code that is compiled itself."""
    return supernet(x, subnet=subnet)


def supernet_of() -> Supernet:
    """Return a supernet of more widths than torch compiles again before it gives up."""
    network = nn.Sequential(nn.Linear(6, 1 + SUBNETS), nn.BatchNorm1d(1 + SUBNETS), nn.Linear(1 + SUBNETS, 5))
    operators = {"0": WeightSlice.on(out="w"), "2": WeightSlice.on(in_="w")}
    operators["1"] = SubnetNorm.on(channels="w")
    return insert_(network.eval(), space_of(w=range(2, 2 + SUBNETS)), operators)


@pytest.mark.parametrize(("way", "training"), [("wrapped", True), ("in place", False), ("inside", False)])
def test_every_subnet_of_every_supernet_is_compiled(way: str, training: bool) -> None:
    for _ in range(2):
        supernet, counter = supernet_of().train(training), Counter()
        twin = copy.deepcopy(supernet)
        compiled: Any = supernet
        if way == "in place":
            supernet.compile(backend=counter)
        elif way == "inside":
            compiled = torch.compile(partial(call, supernet), backend=counter)
        else:
            compiled = torch.compile(supernet, backend=counter)
        specs = list(supernet.space.enumerate())
        batches = [torch.randn(size, 6) for size in (2, 3)]
        for spec, x in itertools.product(specs, batches):
            output, expected = compiled(x, subnet=spec), twin(x, subnet=spec)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
            if training:
                output.sum().backward(), expected.sum().backward()
        assert counter.runs == 2 * SUBNETS
        assert counter.graphs <= 2 * SUBNETS  # the second has a dynamic batch size
        for parameter, other in zip(supernet.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_supernet_follows_training_and_new_weights(packed: bool) -> None:
    shallow = {**small_constructor("ofa_mbv3"), "depth_list": [1, 2]}
    supernet = load("ofa_mbv3", None, **shallow).eval() if packed else supernet_of()
    counter, spec, x = Counter(), supernet.space.smallest(), X if packed else torch.randn(4, 6)
    compiled = torch.compile(supernet, backend=counter)

    def require_equal() -> None:
        torch.testing.assert_close(compiled(x, subnet=spec), supernet.extract(spec)(x), rtol=1e-5, atol=1e-5)

    require_equal()
    for _ in range(5 if packed else 1):  # More than torch.compile compiles again before it gives up.
        for parameter in supernet.parameters():
            parameter.mul_(1.01).add_(0.01)
        require_equal()
    supernet.load_state_dict({name: 1.01 * t for name, t in supernet.state_dict().items()})
    require_equal()
    assert packed or counter.graphs == 1


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
    assert packed_bytes(supernet.network) > 0
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
