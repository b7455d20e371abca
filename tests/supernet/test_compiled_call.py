"""torch.compile(supernet) compiles every subnet of every supernet, and says when a limit is reached."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subnetact import Axis, Supernet, insert_
from subnetact.errors import RecompileLimitWarning
from subnetact.operators import SubnetNorm, WeightSlice
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch reads .grad of slices
SUBNETS = 12


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
    """Forget what was compiled; the smallest limit that torch has ever had."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def call(supernet: Supernet, x: Tensor, subnet: SubnetSpec) -> Any:
    """Run a subnet, from code that is compiled itself."""
    return supernet(x, subnet=subnet)


def supernet_of() -> Supernet:
    """Return a supernet of twelve widths."""
    space = SubnetSpace("s", [Axis.uniform("w", ["a"], range(2, 2 + SUBNETS))], lambda v: {"w": v["w"][0]})
    network = nn.Sequential(nn.Linear(6, 1 + SUBNETS), nn.BatchNorm1d(1 + SUBNETS), nn.Linear(1 + SUBNETS, 5))
    operators = {"0": WeightSlice.on(out="w"), "2": WeightSlice.on(in_="w")}
    return insert_(network.eval(), space, {**operators, "1": SubnetNorm.on(channels="w")})


@pytest.mark.parametrize(("way", "training"), [("wrapped", True), ("in place", False), ("inside", False)])
def test_every_subnet_of_every_supernet_is_compiled(way: str, training: bool) -> None:
    for _ in range(3):
        supernet, counter = supernet_of().train(training), Counter()
        compiled: Any = supernet
        if way == "in place":
            supernet.compile(backend=counter)
        elif way == "inside":
            compiled = torch.compile(partial(call, supernet), backend=counter)
        else:
            compiled = torch.compile(supernet, backend=counter)
        specs = list(supernet.space.enumerate())
        batches = [torch.randn(size, 6) for size in (2, 3)]
        outputs = {(spec, x): compiled(x, subnet=spec) for spec in specs for x in batches}
        assert counter.runs == len(outputs) == 2 * SUBNETS
        assert counter.graphs <= 2 * SUBNETS  # the second has a dynamic batch size
        if not training:
            for (spec, x), output in outputs.items():
                assert torch.equal(output, supernet.extract(spec)(x))


def test_one_warning_tells_that_the_limit_is_reached() -> None:
    supernet, counter = supernet_of(), Counter()
    compiled = torch.compile(supernet, backend=counter, dynamic=False)
    specs = list(supernet.space.enumerate())[:2]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size, spec in itertools.product(range(1, 11), specs):
            compiled(torch.randn(size, 6), subnet=spec)
    assert counter.graphs == 2 * 8
    assert [w.category for w in told if "recompile_limit" in str(w.message)] == [RecompileLimitWarning]


def test_a_compiled_supernet_follows_training_and_new_weights() -> None:
    supernet, counter = supernet_of(), Counter()
    compiled, spec, x = torch.compile(supernet, backend=counter), supernet.space.smallest(), torch.randn(4, 6)

    def expected() -> Tensor:
        return supernet.extract(spec)(x)

    compiled(x, subnet=spec)
    with torch.no_grad():
        supernet.network[0].weight.add_(1.0)
    assert torch.equal(compiled(x, subnet=spec), expected())
    supernet.load_state_dict({name: t + 1 for name, t in supernet.state_dict().items()})
    assert torch.equal(compiled(x, subnet=spec), expected())
    assert counter.graphs == 1
