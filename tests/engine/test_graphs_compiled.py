"""CUDA graphs with a backend that stands in for CUDA, and compilation that never falls back to eager mode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from elastic_networks import in_threads, one_width
from torch import Tensor, nn

from subnetact import Axis, Engine, SubnetSpace, calibrate, insert_
from subnetact.engine.cuda_graphs import Captured
from subnetact.errors import RecompileRefused
from subnetact.operators.elastic_kernel import ElasticKernel, KernelConv2d
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)
NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing")
X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


class Recorder:
    """A graph backend that replays by calling again, and counts overlapping replays, which CUDA forbids."""

    def __init__(self, nbytes: int = 1000, fails: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.replays = self.busy = self.overlaps = 0
        self.nbytes, self.fails = nbytes, fails

    def capture(self, call: Callable[[Tensor], Any], x: Tensor) -> Captured:
        if self.fails is not None:
            raise self.fails
        self.sizes.append(x.shape[0])
        output = call(x).clone()

        def replay() -> None:
            self.busy += 1
            self.overlaps += self.busy > 1
            time.sleep(0.001)
            output.copy_(call(x))
            self.replays += 1
            self.busy -= 1

        return Captured(replay, output, self.nbytes)

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        return work()


@contextmanager
def captured_by(backend: Recorder | None) -> Iterator[None]:
    """Let engines that are made in the context capture graphs on any device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subnetact.engine.engine.graph_backend", lambda _: backend)
        yield


def engine_of(digits: Supernet, recorder: Recorder | None = None, **options: Any) -> Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    calibrate(digits, specs, [X], progress=False)
    with captured_by(recorder):
        return Engine(digits, specs, example=EXAMPLE[None], **options)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.last(self.first(x))


def close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


def test_batches_are_padded_to_the_next_graph_and_outputs_are_copies(digits: Supernet) -> None:
    recorder = Recorder()
    engine = engine_of(digits, memory_budget_mb=16, recorder=recorder)
    expected = digits(X, subnet=engine.specs[1])
    first = engine(X[:3], subnet=1)
    second = engine(-X, subnet=1)
    close(first, expected[:3])
    close(second, digits(-X, subnet=engine.specs[1]))
    close(engine(X[:4], subnet=1), expected[:4])
    assert recorder.sizes == [4, 8]
    assert recorder.replays == 3
    engine.prepare([1, 8], ids=[1])
    assert recorder.sizes == [4, 8, 1]
    assert engine.stats().graphs == 3000
    big = torch.randn(65, 1, 16, 16)
    close(engine(big, subnet=1), digits(big, subnet=engine.specs[1]))
    assert recorder.sizes == [4, 8, 1]
    engine.remove(1)
    assert engine.stats().graphs == 0


def test_a_network_that_changes_its_own_buffers_is_captured_once_and_runs_eagerly() -> None:
    supernet, x = one_width(Counting(), {"first": "out", "last": "in"}), X[:1, 0, 0, :4]
    spec, recorder = supernet.space.smallest(), Recorder()
    with captured_by(recorder):
        engine = Engine(supernet, [spec], example=torch.zeros(1, 4), memory_budget_mb=16)
    for _ in range(3):
        close(engine(x, 0), supernet(x, subnet=spec))
    assert recorder.sizes == [1]


def test_graphs_are_used_without_programs_and_captured_per_block(digits: Supernet) -> None:
    recorder = Recorder()
    engine = engine_of(digits, memory_budget_mb=256, recorder=recorder, backend="views")
    for _ in range(2):
        close(engine(X[:3], subnet=1), digits(X[:3], subnet=engine.specs[1]))
    assert (recorder.sizes, recorder.replays) == ([4], 2)
    for _ in range(2):
        run = engine.start(0, list(X), 5)
        assert run.step(run.blocks)
        close(torch.stack(list(run.outputs())), digits(X, subnet=engine.specs[0]))
    assert len(recorder.sizes) == 1 + run.blocks


def test_graphs_stay_within_the_budget_and_follow_weights_and_statistics(digits: Supernet) -> None:
    engine = engine_of(digits, memory_budget_mb=1, recorder=Recorder(nbytes=400_000))
    for size in (1, 2, 3, 5):
        for i, spec in enumerate(engine.specs):
            close(engine(X[:size], subnet=i), digits(X[:size], subnet=spec))
            assert engine.stats().graphs + engine.stats().fused_bytes <= 2**20
    recorder = Recorder()
    engine = engine_of(digits, memory_budget_mb=16, recorder=recorder)
    engine(X, subnet=1)
    calibrate(digits, [engine.specs[1]], [X * 2 + 1], progress=False)
    close(engine(X, subnet=1), digits(X, subnet=engine.specs[1]))
    with torch.no_grad():
        digits.network.stem.weight.mul_(1.5)
    close(engine(X, subnet=1), digits(X, subnet=engine.specs[1]))
    assert recorder.sizes == [8, 8, 8]


@pytest.mark.parametrize(("error", "captures"), [(NOT_PERMITTED, 0), (torch.OutOfMemoryError("CUDA"), 1)])
def test_a_capture_that_fails_is_eager_logged_once_and_tried_again_if_memory_was_short(
    digits: Supernet, caplog: pytest.LogCaptureFixture, error: Exception, captures: int
) -> None:
    recorder = Recorder(fails=error)
    engine = engine_of(digits, memory_budget_mb=16, recorder=recorder)
    with caplog.at_level(logging.WARNING, "subnetact"):
        for i, spec in enumerate(engine.specs):
            for _ in range(2):
                close(engine(X, subnet=i), digits(X, subnet=spec))
    assert len([r for r in caplog.records if "runs eagerly" in r.message]) == 1 or captures
    recorder.fails = None
    close(engine(X, subnet=0), digits(X, subnet=engine.specs[0]))
    assert len(recorder.sizes) == captures


def test_replays_never_overlap(digits: Supernet) -> None:
    recorder = Recorder()
    engine = engine_of(digits, memory_budget_mb=16, recorder=recorder)
    expected = [digits(X, subnet=spec) for spec in engine.specs]

    def client(i: int) -> None:
        for _ in range(30):
            close(engine(X, subnet=i), expected[i])

    in_threads(*(partial(client, i % 3) for i in range(6)))
    assert recorder.replays >= 180
    assert recorder.overlaps == 0


@torch._dynamo.config.patch(recompile_limit=2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_more_subnets_than_the_recompile_limit_are_compiled_and_none_falls_back() -> None:
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    supernet = one_width(network, {"0": "out", "1": "norm", "3": "in"}, (2, 4, 8))
    built: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        built.append(1)
        return graph.forward

    torch._dynamo.register_backend(counting, name="subnetact_counting")
    specs = list(supernet.space.enumerate())
    calibrate(supernet, specs, [X], progress=False)
    engine = Engine(supernet, specs, example=EXAMPLE[None], backend="subnetact_counting")
    assert len(specs) > torch._dynamo.config.recompile_limit
    engine.prepare([2, 1])
    assert len(built) == 2 * len(specs)
    for i, spec in enumerate(specs):
        close(engine(X[:2], subnet=i), supernet(X[:2], subnet=spec))
        close(engine(X[:1], subnet=i), supernet(X[:1], subnet=spec))
    assert len(built) == 2 * len(specs)
    with pytest.raises(RecompileRefused, match=r"\(5, 1, 16, 16\).*prepare"):
        engine(X, subnet=0)
    engine.prepare([5], ids=[0])
    close(engine(X, subnet=0), supernet(X, subnet=specs[0]))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RecompileRefused, match="compile a prepared shape again"):
            engine(X, subnet=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert engine.stats().compiled == len(specs)
    engine.remove(0)
    assert engine.stats().compiled == len(specs) - 1
    calibrate(supernet, [specs[1]], [X * 2], progress=False)
    with pytest.raises(RecompileRefused, match=r"were replaced; call engine\.prepare"):
        engine(X[:1], subnet=1)


class Mapped(torch.nn.Module):
    """One depthwise convolution whose smaller kernel is made by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = KernelConv2d(4, [3, 5], matrices=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_kept_follows_computed_kernels_and_is_captured_once() -> None:
    torch.manual_seed(0)
    axis = Axis.uniform("kernel", ["all"], (3, 5))
    space = SubnetSpace("mapped", [axis], lambda v: {"kernel": v["kernel"][0], "width": 4})
    elastic = {"conv": ElasticKernel.on(channels="width", kernel="kernel")}
    supernet = insert_(Mapped(), space, elastic)
    spec, x, recorder = space.smallest(), torch.randn(2, 4, 9, 9), Recorder()
    with captured_by(recorder):
        engine = Engine(supernet.eval(), [spec], example=x[:1], backend="eager", memory_budget_mb=1)
    engine.prepare([2])
    for _ in range(3):
        close(engine(x, subnet=0), supernet(x, subnet=spec))
    assert recorder.sizes == [2]
    bare = Engine(supernet, [spec], example=x[:1], backend="eager")
    bare.prepare([2])
    with torch.no_grad():
        supernet.network.conv.weight.mul_(3.0)
    for each in (bare, engine):
        close(each(x, subnet=0), supernet(x, subnet=spec))
