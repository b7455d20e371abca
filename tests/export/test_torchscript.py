"""TorchScript: one file equals the supernet bit for bit, decides like the policy, and refuses misuse."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_networks import in_threads, one_width, plain_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from short_windows import SHORT
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ofa_adapters import families
from subnetact import (
    Axis,
    Batcher,
    Engine,
    LatencyTable,
    LayerSelect,
    SlackFit,
    SubnetSpace,
    WeightSlice,
    insert_,
    profile_latency,
)
from subnetact.errors import (
    ExportError,
    InvalidRequest,
    NotCalibrated,
    PolicyError,
    ProfileMismatch,
    SpecError,
    TableError,
    UncalibratedSubnetWarning,
)
from subnetact.export import to_torchscript
from subnetact.export.scripted_subnets import ScriptedSubnets, decide_by
from subnetact.serving.scheduling.floors import Floors
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.statistics import batch_norms, statistics_of
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
DIGIT = torch.zeros(1, 1, 16, 16)


COUNTS = dict.fromkeys(("ofa_resnet50", "ofa_mbv3", "autoformer", "dynabert"), 6)


COUNTS |= dict.fromkeys(("attentivenas", "slimmable_resnet50", "us_mobilenet_v2", "hydravit"), 4)


def calibrated(supernet: Supernet, specs: list[Any]) -> Supernet:
    """Give some subnets random BatchNorm statistics of their own."""
    generator = torch.Generator().manual_seed(1)
    rows = {}
    for spec in specs:
        shapes = {name: mean.shape for name, (mean, _) in statistics_of(supernet, spec).items()}
        draw: Any = lambda make, shape: make(shape, generator=generator)  # noqa: E731
        own = {name: (draw(torch.randn, s) / 9, draw(torch.rand, s) + 0.5) for name, s in shapes.items()}
        rows[spec] = NormRow.of(own)
    supernet.norms.update(rows)
    return supernet


def agreeing(
    supernet: Supernet, path: Path, inputs: Any, specs: list[Any] | None = None, **options: Any
) -> Any:
    """Export subnets, and assert that the module and its file equal the supernet twice; return both."""
    specs = specs or list(supernet.space.enumerate())
    engine = plain_engine(supernet, specs, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        scripted = to_torchscript(engine, path, **options)
    modules: list[Any] = [scripted, torch.jit.load(path)]
    named = isinstance(inputs, dict)
    values = inputs.values() if named else inputs
    with torch.no_grad():
        for i, spec in enumerate(specs):
            expected = supernet.subnet(spec)(**inputs) if named else supernet.subnet(spec)(*inputs)
            for module in (*modules, *modules):
                torch.testing.assert_close(module(*values, torch.tensor([i])), expected, rtol=0, atol=0)
    return modules


def tells_apart(supernet: Supernet, specs: list[Any], inputs: dict[str, Tensor]) -> bool:
    """Return whether outputs depend on the subnet and on the input; otherwise equality would mean nothing."""
    other = {name: x.flip(-1) for name, x in inputs.items()}
    with torch.no_grad():
        small, large = (supernet.subnet(spec)(**inputs) for spec in specs[:2])
        turned = supernet.subnet(specs[1])(**other)
    scale = large.abs().max()
    return bool((small - large).abs().max() > 0.01 * scale and (turned - large).abs().max() > 1e-3 * scale)


def held_bytes(supernet: Supernet, specs: list[Any]) -> int:
    """Return the bytes of the weights and of the statistics rows of these subnets."""
    rows = [row.flat for spec in specs if (row := supernet.norms.get(spec)) is not None]
    return sum(t.numel() * t.element_size() for t in [*supernet.state_dict().values(), *rows])


@pytest.mark.parametrize("name", sorted(set(families()) - {"ofa_proxyless", "compofa_mbv3"}))  # as ofa_mbv3
def test_scripted_equals_eager_bit_for_bit(name: str, family: Any, inputs_of: Any, tmp_path: Path) -> None:
    supernet, inputs = family(name), inputs_of(name)
    specs = supernet.space.sample(0, COUNTS[name])
    if batch_norms(supernet.network):
        calibrated(supernet, specs)
    assert len(specs) >= min(COUNTS[name], supernet.space.size())
    assert tells_apart(supernet, specs, inputs)
    supernet.actuate(specs[0])  # The file does not depend on it.
    _, loaded = agreeing(supernet, tmp_path / "m.pt", inputs, specs)
    supernet.actuate(supernet.space.largest())
    assert [loaded.describe(i) for i in range(loaded.num_subnets())] == [spec.key for spec in specs]
    last = torch.full((2, 1), len(specs) - 1)
    assert torch.equal(loaded(*inputs.values(), last), loaded(*inputs.values(), last[0]))


def keeping(network: nn.Module, count: int = 2, layers: str = "layers", **elastic: Any) -> Supernet:
    """Make a supernet whose `layers` are skippable one by one, and whose `hidden` width is 2 or 4."""
    names = [str(i) for i in range(count)]
    axes = [Axis.uniform("keep", names, [0, 1]), Axis.uniform("hidden", ["all"], [2, 4])]
    keeps: Any = lambda v: {f"keep{i}": k for i, k in enumerate(v["keep"])}  # noqa: E731
    space = SubnetSpace("keeping", axes, lambda v: {**keeps(v), "hidden": v["hidden"][0]})
    elastic[layers] = LayerSelect.on(**{i: f"keep{i}" for i in names})
    return insert_(network.eval(), space, elastic)


class Shift(nn.Module):
    """A layer whose code equals that of its neighbours, with a name that could collide."""

    def __init__(self) -> None:
        super().__init__()
        self.number_0, self.shift = nn.Parameter(torch.randn(21)), nn.Parameter(torch.randn(20))
        self.widen, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.widen(x)) + (self.number_0[:20] * self.shift).sum()


class Gathering(nn.Module):
    """Writes into a slice of a buffer, and into a tensor that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 4))
        self.constant_1 = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x > 0).long().sum(1)
        taken = self.table[rows]
        taken.mul_(x)
        made = torch.ones(4)
        made.add_(x.sum(0))
        return taken + self.table[rows] + made * self.constant_1 + torch.arange(4.0)


class Named(nn.Module):
    """Tensors with the names of modules, of attributes of the graph, and of Python keywords."""

    names = ("module_0", "layer_0", "graph", "code", "torch", "in", "lambda", "number_0", "statistics")

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.randn(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for name in self.names:
            x = x + self._parameters[name] * x
        return x


@pytest.mark.parametrize("make", [Shift, Gathering, Named])
def test_layers_that_look_alike_follow_their_own_gates(make: Any, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Sequential(*(make() for _ in range(3))))
    elastic = {}
    if make is Shift:
        elastic = {f"0.{i}.widen": WeightSlice.on(out="hidden") for i in range(3)}
        elastic |= {f"0.{i}.narrow": WeightSlice.on(in_="hidden") for i in range(3)}
    agreeing(keeping(network, 3, "0", **elastic), tmp_path / "m.pt", (torch.randn(3, 4),))


def test_many_subnets_and_inserted_models(digits: Supernet, tmp_path: Path) -> None:
    import timm
    from torchvision.models import resnet18

    path = tmp_path / "m.pt"
    many = list(digits.space.enumerate())[::20]
    agreeing(digits, path, (torch.randn(2, 1, 16, 16),), many, progress=False)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3)
    for network, size, axes in ((resnet18(), 64, ("width", "depth")), (vit, 32, ("ffn", "depth"))):
        x = torch.randn(2, 3, size, size)
        supernet = insert_(network.eval(), example=x, axes=axes)
        specs = [supernet.space.smallest(), supernet.space.sample(1), supernet.space.largest()]
        agreeing(calibrated(supernet, specs), path, (x,), specs)


# -- decisions ---------------------------------------------------------------------------------------


def decision_of(policy_of: Any, table: Any, call: tuple[float, int, float, float], slo_ms: float) -> Any:
    """Return what SlackFit decides, or None if the policy cannot be made or no subnet is accurate enough."""
    slack, queued, min_accuracy, own_slo_ms = call
    context: Any = type("Context", (), {"slack_ms": slack, "queued": queued})()
    try:
        context.floor = Floors(table)(min_accuracy)
        return policy_of(own_slo_ms or slo_ms).decide(context)
    except PolicyError:
        return None


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.one_of(st.floats(0.1, 40), st.none()), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    st.integers(0, 10**9),
)
def test_the_file_decides_like_the_policy(cells: Any, seed: int) -> None:
    cells[0][0] = 1.0
    ms = [[math.nan if cell is None else cell for cell in row] for row in cells]
    accuracy = [50.0 + (7 * i) % 10 for i in range(len(ms))]
    table = LatencyTable([str(i) for i in range(len(ms))], accuracy, [1, 3, 8], ms)
    module = ScriptedSubnets(nn.Identity(), torch.empty(0), torch.empty(0), {})
    decide_by(module, table, 30.0)
    policy_of = cache(partial(SlackFit, table))
    edges = sorted(cell for row in ms for cell in row if cell == cell)
    draw = random.Random(seed)
    for _ in range(100):
        slack = draw.choice([draw.uniform(-5, 60), draw.choice(edges), math.inf, -math.inf])
        floor = draw.choice([0.0, draw.uniform(40, 62), draw.choice(accuracy)])
        call = slack, draw.choice([1, 2, 3, 4, 8, 99]), floor, draw.choice([0.0, 4.0, draw.uniform(0.1, 50)])
        expected = decision_of(policy_of, table, call, 30.0)
        if expected is None:
            with pytest.raises(ValueError, match=r"above the best|finite and at least"):
                module.choose(*call)
        else:
            assert module.choose(*call) == expected


def test_a_file_measures_itself_and_knows_what_it_is(digits: Supernet, tmp_path: Path) -> None:
    specs, path = [digits.space.smallest(), digits.space.sample(3), digits.space.largest()], tmp_path / "m.pt"
    engine = Engine(calibrated(digits, specs), specs, example=DIGIT, accuracy=[60, 70, 80])
    to_torchscript(engine, path, slo_ms=50, batch_sizes=[1, 4])
    loaded = torch.jit.load(path)
    table = LatencyTable(loaded.keys, loaded.accuracy, loaded.batch_sizes, loaded.latency_ms)
    assert (table.subnets, table.accuracy, table.batch_sizes) == (engine.keys, (60, 70, 80), (1, 4))
    assert loaded.choose(20.0, 3) == decision_of(partial(SlackFit, table), table, (20.0, 3, 0.0, 0.0), 50.0)
    for call, message in (
        ((1.0, 1, 90.0), "90. % is above the best, 80."),
        ((1.0, 1, 0.0, 1e-9), "at least"),
        ((math.nan, 1), "slack_ms is not a number"),
    ):
        with pytest.raises(Exception, match=message):
            loaded.choose(*call)
    assert loaded.inputs == ["x: float32 batch:1:1073741824 1 16 16"]
    facts = digits.fingerprint(), torch.__version__, str(torch.get_num_threads())
    assert tuple(loaded.facts[name] for name in ("fingerprint", "torch", "threads")) == facts
    again = profile_latency(loaded, [1, 4], **SHORT)
    assert (again.subnets, again.accuracy) == (engine.keys, (60, 70, 80))
    assert (again.stamp["program"], again.stamp["supernet"]) == ("torchscript", digits.fingerprint())
    to_torchscript(engine, path, table=again, slo_ms=50)
    assert torch.jit.load(path).latency_ms == again.latency_ms.tolist()
    of_engine = profile_latency(engine, [1], **SHORT)
    with pytest.raises(ProfileMismatch, match=r"program 'engine', and 'torchscript' runs.*leave table= out"):
        to_torchscript(engine, path, table=of_engine, slo_ms=50)
    with pytest.raises(ProfileMismatch, match=r"program 'torchscript', and 'engine' runs.*profile_latency"):
        Batcher(engine, table=again, slo_ms=50)
    with pytest.raises(TableError, match="a file that to_torchscript wrote"):
        profile_latency(torch.jit.script(nn.Linear(2, 2)))
    engine.remove(1)
    short = LatencyTable([specs[0].key, specs[2].key], [60.0, 80.0], [1], [[1], [3]])
    scripted: Any = to_torchscript(engine, path, table=short, slo_ms=36)
    assert [scripted.describe(i) for i in range(scripted.num_subnets())] == [specs[0].key, specs[2].key]
    assert scripted.choose(1e9, 1) == (1, 1)
    scripted = to_torchscript(engine, path)
    with pytest.raises(Exception, match=r"without latencies; give to_torchscript slo_ms="):
        scripted.choose(5.0, 1)


# -- what is refused ---------------------------------------------------------------------------------


def test_wrong_calls_raise(digits: Supernet, tmp_path: Path) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    engine = Engine(calibrated(digits, specs), specs, example=torch.zeros(1, 1, 16, 16))
    to_torchscript(engine, tmp_path / "m.pt")
    loaded = torch.jit.load(tmp_path / "m.pt")
    x = torch.zeros(2, 1, 16, 16)
    for arguments, message in (
        ((x, torch.tensor([2])), r"no subnet 2; this file has 0\.\.1"),
        ((x, torch.tensor([-1])), "no subnet -1"),
        ((x, torch.tensor([[0], [1]])), "different subnets; batch per subnet"),
        ((x, torch.tensor([0, 0])), r"subnet has shape \[2\]; give \[1\], or \[2, 1\]"),
        ((x, torch.tensor([[0], [0], [0]])), r"subnet has shape \[3, 1\]"),
        ((x, torch.tensor([0], dtype=torch.int32)), "subnet must be an int64 tensor, or bool"),
        ((x[0], torch.tensor([0])), r"takes x: float32 batch\S+ 1 16 16, not .* shape \[1, 16, 16\]"),
        ((x[:0], torch.zeros(0, 1, dtype=torch.long)), r"not .* \[0, 1, 16, 16\]"),
        ((x[:0], torch.tensor([0])), r"not .* \[0, 1, 16, 16\]"),
        ((x[..., :15], torch.tensor([0])), r"not .* \[2, 1, 16, 15\]"),
        ((x.repeat(1, 3, 1, 1), torch.tensor([0])), r"not .* \[2, 3, 16, 16\]"),
        ((x.double(), torch.tensor([0])), r"not .* \[2, 1, 16, 16\] and another dtype"),
    ):
        with pytest.raises(Exception, match=message):
            loaded(*arguments)
    with pytest.raises(Exception, match="no subnet 9"):
        loaded.describe(9)


def test_what_cannot_be_exported(digits: Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, path = [digits.space.smallest(), digits.space.largest()], tmp_path / "m.pt"
    engine, keys = plain_engine(digits, specs, DIGIT), [spec.key for spec in specs]
    strict = Engine(calibrated(digits, specs), specs, example=DIGIT)
    unknown = Engine(digits, specs, example=DIGIT, accuracy=[None, 80], allow_uncalibrated=True)
    digits.norms = NormTable(digits.space.id)
    table = LatencyTable(keys, [60.0, 70.0], [1], [[1.0], [2.0]])
    foreign, short = replace(table, stamp={"supernet": "other"}), table.select([0])
    halves: Any = ({"table": table}, {"batch_sizes": [1]}, {"table": table, "batch_sizes": [1], "slo_ms": 9})
    refusals: list[tuple[Any, Any, Any, str]] = [
        (engine, {"subnets": []}, SpecError, "distinct subnets, at least one"),
        (plain_engine(digits, specs, None), {}, InvalidRequest, "give it example="),
        (strict, {}, NotCalibrated, r"2 of 2 subnets .* allow_uncalibrated=True"),
        (engine, {"table": short, "slo_ms": 5}, ProfileMismatch, "1 subnets, but the engine has 2"),
        (engine, {"table": foreign, "slo_ms": 5}, ProfileMismatch, "measured on supernet other"),
        (unknown, {"slo_ms": 50}, ExportError, r"that of .* is not known.*accuracy="),
        *((engine, h, ExportError, r"give slo_ms=, and batch_sizes= .*, or table=") for h in halves),
    ]
    for refused_engine, options, error, words in refusals:
        with pytest.raises(error, match=words):
            to_torchscript(refused_engine, path, **options)
    norm = next(iter(batch_norms(digits.network).values()))
    norm.running_mean, norm.running_var = norm.running_mean.double(), norm.running_var.double()
    with pytest.raises(ExportError, match=r"scalar type Float but found Double.*nothing was written"):
        to_torchscript(engine, path)
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    with pytest.raises(ExportError, match=r"Python 3\.14: TorchScript .*to_pt2"):
        to_torchscript(engine, path)
    assert not path.exists()


# -- threads, size, memory ---------------------------------------------------------------------------


def test_four_threads_on_different_subnets_agree(family: Any, inputs_of: Any, tmp_path: Path) -> None:
    supernet, (x,) = family("ofa_resnet50"), inputs_of("ofa_resnet50").values()
    specs = supernet.space.sample(0, 4)
    scripted: Any = to_torchscript(plain_engine(calibrated(supernet, specs), specs, x), tmp_path / "m.pt")
    with torch.no_grad():
        expected = [supernet.subnet(spec)(x) for spec in specs]

    def same(thread: int) -> bool:
        torch.set_num_threads(1)
        subnets = [(i + thread) % 4 for i in range(12)]
        with torch.no_grad():
            return all(torch.equal(scripted(x, torch.tensor([i])), expected[i]) for i in subnets)

    assert all(in_threads(*(partial(same, i) for i in range(4))))


LOAD = """
import gc, sys, torch
from pathlib import Path
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
torch.set_num_threads(1)
torch.jit.load(sys.argv[1])
gc.collect()
before = resident()
module = torch.jit.load(sys.argv[2])
gc.collect()
print(resident() - before)
"""


def test_a_large_file_holds_the_weights_once(tmp_path: Path, digits: Supernet) -> None:
    """They are 64 MiB, of which every subnet uses a part."""
    network = nn.Sequential(nn.Linear(1024, 8192), nn.BatchNorm1d(8192), nn.Linear(8192, 1024))
    supernet = one_width(network, {"0": "out", "1": "norm", "2": "in"}, (2048, 4096, 8192))
    specs = list(supernet.space.enumerate())
    calibrated(supernet, specs)
    agreeing(supernet, tmp_path / "m.pt", (torch.randn(2, 1024),), specs)
    size = (tmp_path / "m.pt").stat().st_size
    assert size <= 1.05 * held_bytes(supernet, specs)
    warm = [digits.space.smallest()]
    to_torchscript(plain_engine(digits, warm, DIGIT), tmp_path / "warm.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "warm.pt"), str(tmp_path / "m.pt")]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken <= 1.1 * size


class Loop(nn.Module):
    """Layers in a loop, whose body each test gives."""

    def __init__(self, body: Any, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))
        self.act = nn.ReLU(inplace=True)
        self.count = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def looped(step: Any) -> Any:
    """Return a body whose loop maps the network, a layer, its input and its number to the next input."""

    def body(network: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(network.layers):
            x = step(network, layer, x, i)
        return x

    return body


def collected(network: Any, x: Tensor) -> Tensor:
    found = [x]
    for layer in network.layers:
        found.append(layer(found[-1]))
    return sum(found)  # type: ignore[return-value]


def first_only(network: Any, x: Tensor) -> Tensor:
    for layer in network.layers[:1]:
        x = layer(x)
    return x


def written(network: Any, x: Tensor) -> Tensor:
    total = x * 1
    for layer in network.layers:
        total.add_(layer(x))
    return total


def overwritten(network: Any, layer: Any, x: Tensor, i: int) -> Tensor:
    x = layer(x)
    network.act(x)
    return x


BODIES = {
    "plain": looped(lambda network, layer, x, i: layer(x)),
    "residual": looped(lambda network, layer, x, i: x + layer(x)),
    "counted": looped(lambda network, layer, x, i: layer(x) * (i + 1)),
    "aside": looped(lambda network, layer, x, i: (network.count(x), layer(x))[1]),
    "overwritten": looped(overwritten),
    "collected": collected,
    "first only": first_only,
    "written": written,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_loops_do_what_they_do_around_the_identities_of_skipped_layers(body: Any, tmp_path: Path) -> None:
    agreeing(keeping(Loop(body)), tmp_path / "m.pt", (torch.randn(3, 4),))


class Two(nn.Module):
    """Two layers, for a forward of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Typed(Two):
    """Branches on the type of a value, which tracing cannot see."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x * 2 if isinstance(x, Tensor) else x


class Several(Two):
    """Optional inputs, and a dictionary for an output."""

    def forward(
        self, x: Tensor, skipped: Tensor | None = None, scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.layers(x)
        if skipped is not None:
            x = x - skipped
        return {"y": x if scale is None else x * scale}


class ManyInputs(Two):
    def forward(self, row: Tensor, means: Tensor, str: Tensor) -> Tensor:
        return self.layers(row) + means * str


class Reserved(Two):
    def forward(self, subnet: Tensor) -> Tensor:
        return self.layers(subnet)


class Tied(Two):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers(self.embedding(x)), self.embedding.weight)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_tied_weights_and_names_of_inputs(tmp_path: Path) -> None:
    path, pair = tmp_path / "m.pt", (torch.randn(2, 4), torch.randn(2, 4))
    scripted, _ = agreeing(keeping(Tied()), path, (torch.tensor([[1, 2, 6]]),))
    assert "clone" not in scripted.network.code, "a tied weight is not copied in every call"
    agreeing(keeping(ManyInputs()), path, tuple(torch.randn(3, 2, 4)))
    agreeing(keeping(Several()), path, {"scale": pair[0], "x": pair[1]})
    scripted, _ = agreeing(keeping(Several()), path, pair)
    assert [argument.name for argument in scripted.forward.schema.arguments][1:3] == ["x", "skipped"]


def test_what_torchscript_does_not_run_or_would_not_equal_is_refused(tmp_path: Path) -> None:
    x, deciding, normed = torch.randn(2, 4), Loop(BODIES["plain"]), Loop(BODIES["plain"])
    hooked = Loop(BODIES["aside"])
    deciding.layers[1] = Branching()
    weight_norm(normed.layers[1][0])
    hooked.count.register_forward_hook(lambda module, inputs, output: output)
    reaching = Loop(looped(lambda network, layer, x, i: layer[0](x)))
    typed = r"subnet 0 .*differs from the supernet's.* branch on the type"
    refusals: list[tuple[nn.Module, Any, str]] = [
        (deciding, x, r"^layers\.1: its forward cannot be traced"),
        (hooked, x, r"^count \(Linear\): TorchScript cannot compile it"),
        (reaching, x, "object is not subscriptable"),
        (normed, x, "Parametrization is not working with scripting"),
        (Reserved(), x, r"none may be called subnet"),
        *((Typed(), example, typed) for example in (x, (x[:1],), {"x": x})),
    ]
    for network, example, words in refusals:
        supernet = keeping(network)
        specs = list(supernet.space.enumerate())
        engine = plain_engine(supernet, specs[-1:], example)
        with pytest.raises(ExportError, match=words):
            to_torchscript(engine, tmp_path / "m.pt", subnets=specs)
    assert not list(tmp_path.iterdir())


class Holding(nn.Module):
    """A tied weight, buffers of a library module, recurrent weights, and a dropout in an elastic layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.layers = nn.Sequential(nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.hidden = Dropping(4, 4)
        self.embedding = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.recurrent(self.layers(self.norm(x)))[0]
        return F.linear(self.hidden(x), self.embedding.weight[:, :2].sum(1, keepdim=True))


class Dropping(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x)).sum(-1, keepdim=True)


def test_the_source_keeps_its_tensors_and_the_file_has_its_own(tmp_path: Path) -> None:
    supernet, x = keeping(Holding(), 1, hidden=WeightSlice.on(out="hidden")), torch.randn(2, 3, 4)
    supernet.train()  # views are in evaluation mode even if the supernet is in training mode
    places = {name: tensor.data_ptr() for name, tensor in supernet.network.state_dict().items()}
    scripted, _ = agreeing(supernet, tmp_path / "m.pt", (x,))
    assert {name: tensor.data_ptr() for name, tensor in supernet.network.state_dict().items()} == places
    kept = scripted(x, torch.tensor([1]))
    with torch.no_grad():
        for tensor in (*supernet.network.parameters(), supernet.network.norm.running_mean):
            tensor.mul_(2)
    assert torch.equal(scripted(x, torch.tensor([1])), kept)
    network = nn.Sequential()
    network.add_module("layers", nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)))
    supernet = keeping(network.to(memory_format=torch.channels_last), 1)
    scripted, _ = agreeing(supernet, tmp_path / "m.pt", (torch.randn(2, 4, 8, 8),))
    weight = next(p for p in scripted.parameters() if p.shape == (4, 4, 3, 3))
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.data_ptr() not in {p.data_ptr() for p in supernet.parameters()}
