"""TorchScript: one file equals the supernet bit for bit, decides like the policy, and refuses misuse."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_networks import in_threads, one_width
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_engines import plain_engine
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
)
from subnetact.export import to_torchscript
from subnetact.export.scripted_subnets import ScriptedSubnets, decide_by
from subnetact.operators import ElasticAttribute, ElasticKernel, KernelConv2d, LayerNormSlice, Segments
from subnetact.serving.scheduling.floors import Floors
from subnetact.supernet.norm_table import NormRow, NormTable
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
        shapes = {name: mean.shape for name, (mean, _) in supernet.statistics(spec).items()}
        draw: Any = lambda make, shape: make(shape, generator=generator)  # noqa: E731
        own = {name: (draw(torch.randn, s) / 9, draw(torch.rand, s) + 0.5) for name, s in shapes.items()}
        rows[spec] = NormRow.of(own)
    supernet.norms.update(rows)
    return supernet


def differing(module: Any, supernet: Supernet, specs: list[Any], inputs: dict[str, Tensor]) -> list[int]:
    """Return the subnets whose output differs from the supernet's in the first or second call."""
    found = []
    with torch.no_grad():
        for i, spec in enumerate(specs):
            expected = supernet.subnet(spec)(**inputs)
            got = [module(*inputs.values(), torch.tensor([i])) for _ in range(2)]
            if not all(torch.equal(expected, y) for y in got):
                found.append(i)
    return found


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
    if supernet.norm_operators():
        calibrated(supernet, specs)
    assert len(specs) >= min(COUNTS[name], supernet.space.size())
    assert tells_apart(supernet, specs, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripted = to_torchscript(plain_engine(supernet, specs, inputs), tmp_path / "m.pt")
    assert differing(scripted, supernet, specs, inputs) == []
    loaded = torch.jit.load(tmp_path / "m.pt")
    assert differing(loaded, supernet, specs, inputs) == []
    assert loaded.num_subnets() == len(specs)
    assert [loaded.describe(i) for i in range(len(specs))] == [spec.key for spec in specs]
    last = torch.full((2, 1), len(specs) - 1)
    assert torch.equal(loaded(*inputs.values(), last), loaded(*inputs.values(), last[0]))


class Elastic(nn.Module):
    """A stack that is called in a loop, a depthwise kernel, and a function that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.depth = KernelConv2d(8, (3, 5, 7))
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depth(self.stem(x))
        for layer in self.layers:
            x = torch.relu(layer(x)) if False else layer(x)
        return self.head(x.mean((2, 3)))


class Stack(nn.Module):
    """Layers of equal code, whose tensors have names that could collide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Shift(20) for i in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Shift(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.number_0 = nn.Parameter(torch.randn(width + 1))
        self.shift = nn.Parameter(torch.randn(width))
        self.widen = nn.Linear(9, 8)
        self.narrow = nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.widen(x)) + (self.number_0[: self.width] * self.shift).sum()


def test_layers_of_equal_code_follow_their_own_gates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = [str(i) for i in range(4)]
    axes = [Axis.uniform("keep", names, [0, 1]), Axis.uniform("width", names, [3, 8])]
    space = SubnetSpace("stack", axes, lambda v: {f"{n}{i}": own for n in v for i, own in enumerate(v[n])})
    elastic = {"layers": LayerSelect.on(**{i: f"keep{i}" for i in names})}
    for i in names:
        elastic[f"layers.{i}.widen"] = WeightSlice.on(out=f"width{i}")
        elastic[f"layers.{i}.narrow"] = WeightSlice.on(in_=f"width{i}")
    supernet = insert_(Stack().eval(), space, elastic)
    specs, x = list(dict.fromkeys(space.sample(seed) for seed in range(40))), torch.randn(2, 9)
    gates = {tuple(spec["keep"][i] for spec in specs) for i in range(4)}
    assert len(gates) == 4  # so a layer that followed another's gate would change an output
    to_torchscript(plain_engine(supernet, specs, x), tmp_path / "m.pt")
    assert differing(torch.jit.load(tmp_path / "m.pt"), supernet, specs, {"x": x}) == []


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


@pytest.mark.parametrize("make", [Gathering, Named])
def test_layers_that_only_look_alike(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Sequential(make(), make())).eval()
    keep = Axis.uniform("keep", ["0", "1"], [0, 1])
    space = SubnetSpace("two", [keep], lambda v: {f"keep{i}": kept for i, kept in enumerate(v["keep"])})
    supernet = insert_(network, space, {"0": LayerSelect.on(**{"0": "keep0", "1": "keep1"})})
    specs, x = list(space.enumerate()), torch.randn(3, 4)
    scripted = to_torchscript(plain_engine(supernet, specs, x), tmp_path / "m.pt")
    assert differing(scripted, supernet, specs, {"input": x}) == []
    assert differing(torch.jit.load(tmp_path / "m.pt"), supernet, specs, {"input": x}) == []


def own_supernet(network: nn.Module) -> Supernet:
    axes = [Axis.uniform("kernel", ["all"], [3, 5, 7]), Axis.uniform("keep", ["0", "1", "2"], [0, 1])]
    space = SubnetSpace("own", axes, lambda v: {f"{n}{i}": own for n in v for i, own in enumerate(v[n])})
    layers = LayerSelect.on(**{str(i): f"keep{i}" for i in range(3)})
    return insert_(network.eval(), space, {"depth": ElasticKernel.on(kernel="kernel0"), "layers": layers})


def test_all_subnets_of_an_own_network_and_a_hundred_of_the_digits(digits: Supernet, tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = own_supernet(Elastic())
    many = list(digits.space.enumerate())[::8]
    assert len(many) > 100
    for supernet, specs, x in (
        (own, list(own.space.enumerate()), torch.randn(2, 1, 9, 9)),
        (digits, many, torch.randn(2, 1, 16, 16)),
    ):
        to_torchscript(plain_engine(supernet, specs, x), tmp_path / "m.pt", progress=False)
        loaded = torch.jit.load(tmp_path / "m.pt")
        assert loaded.num_subnets() == len(specs)
        assert differing(loaded, supernet, specs, {"x": x}) == []


def test_inserted_torchvision_and_timm_models(tmp_path: Path) -> None:
    import timm
    from torchvision.models import resnet18

    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3)
    for network, size, axes in ((resnet18(), 64, ("width", "depth")), (vit, 32, ("ffn", "depth"))):
        x = torch.randn(2, 3, size, size)
        supernet = insert_(network.eval(), example=x, axes=axes)
        specs = [supernet.space.smallest(), supernet.space.sample(1), supernet.space.largest()]
        scripted = to_torchscript(plain_engine(calibrated(supernet, specs), specs, x), tmp_path / "m.pt")
        assert differing(scripted, supernet, specs, {"x": x}) == []


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
    specs = [digits.space.smallest(), digits.space.sample(3), digits.space.largest()]
    engine = Engine(calibrated(digits, specs), specs, example=DIGIT, accuracy=[60, 70, 80])
    scripted: Any = to_torchscript(engine, tmp_path / "m.pt", slo_ms=50, batch_sizes=[1, 4])
    loaded = torch.jit.load(tmp_path / "m.pt")
    table = LatencyTable(loaded.keys, loaded.accuracy, loaded.batch_sizes, loaded.latency_ms)
    assert (table.subnets, table.accuracy, table.batch_sizes) == (engine.keys, (60, 70, 80), (1, 4))
    policy_of = cache(partial(SlackFit, table))
    draw = random.Random(0)
    for _ in range(3000):
        slack, queued = draw.uniform(-1, 3 * table.latency_ms.max()), draw.randint(1, 9)
        call = slack, queued, draw.choice([0.0, 65.0]), draw.choice([0.0, 60.0])
        assert loaded.choose(*call) == decision_of(policy_of, table, call, 50.0)
    assert loaded.choose(20.0, 3) == scripted.choose(20.0, 3, 0.0, 0.0)
    for call, message in (
        ((1.0, 1, 90.0), "90. % is above the best, 80."),
        ((1.0, 1, 0.0, 1e-9), "at least"),
    ):
        with pytest.raises(Exception, match=message):
            loaded.choose(*call)

    assert loaded.inputs == ["x: float32 batch:1:1073741824 1 16 16"]
    assert loaded.facts["fingerprint"] == digits.fingerprint()
    assert loaded.facts["torch"] == torch.__version__
    assert loaded.facts["threads"] == str(torch.get_num_threads())

    again = profile_latency(loaded, [1, 4], min_time_ms=5)
    assert (again.subnets, again.accuracy) == (engine.keys, (60, 70, 80))
    assert (again.stamp["program"], again.stamp["supernet"]) == ("torchscript", digits.fingerprint())
    to_torchscript(engine, tmp_path / "other.pt", table=again, slo_ms=50)
    assert torch.jit.load(tmp_path / "other.pt").latency_ms == again.latency_ms.tolist()
    of_engine = profile_latency(engine, [1], min_time_ms=5)
    with pytest.raises(ProfileMismatch, match=r"program 'engine', and 'torchscript' runs.*leave table= out"):
        to_torchscript(engine, tmp_path / "m.pt", table=of_engine, slo_ms=50)
    with pytest.raises(ProfileMismatch, match=r"program 'torchscript', and 'engine' runs.*profile_latency"):
        Batcher(engine, table=again, slo_ms=50)
    with pytest.raises(TableError, match="a file that to_torchscript wrote"):
        profile_latency(torch.jit.script(nn.Linear(2, 2)))
    unknown = Engine(digits, specs, example=DIGIT, accuracy=[60, None, 80])
    with pytest.raises(ExportError, match=r"accuracies, and that of .* is not known.*accuracy="):
        to_torchscript(unknown, tmp_path / "m.pt", slo_ms=50)


def test_an_engine_brings_its_served_subnets(digits: Supernet, tmp_path: Path) -> None:
    specs = [digits.space.smallest(), digits.space.sample(3), digits.space.largest()]
    engine = Engine(
        calibrated(digits, specs), specs, example=torch.zeros(1, 1, 16, 16), accuracy=[60, None, 80]
    )
    scripted: Any = to_torchscript(engine, tmp_path / "m.pt")
    with pytest.raises(Exception, match=r"without latencies; give to_torchscript slo_ms="):
        scripted.choose(5.0, 1)
    engine.remove(1)
    table = LatencyTable([specs[0].key, specs[2].key], [60.0, 80.0], [1], [[1], [3]])
    for half in ({"table": table}, {"batch_sizes": [1]}, {"table": table, "batch_sizes": [1], "slo_ms": 9}):
        with pytest.raises(ExportError, match=r"give slo_ms=, and batch_sizes= .*, or table="):
            to_torchscript(engine, tmp_path / "m.pt", **half)
    scripted = to_torchscript(engine, tmp_path / "m.pt", table=table, slo_ms=36)
    assert [scripted.describe(i) for i in range(scripted.num_subnets())] == [specs[0].key, specs[2].key]
    assert scripted.choose(1e9, 1) == (1, 1)
    with pytest.raises(Exception, match="slack_ms is not a number"):
        scripted.choose(math.nan, 1)
    named = Engine(digits, specs, example={"x": torch.zeros(1, 1, 16, 16)})
    assert to_torchscript(named, tmp_path / "m.pt").num_subnets() == 3


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
    specs = [digits.space.smallest(), digits.space.largest()]
    path = tmp_path / "m.pt"
    engine = plain_engine(digits, specs, DIGIT)
    with pytest.raises(SpecError, match="distinct subnets, at least one"):
        to_torchscript(engine, path, subnets=[])
    with pytest.raises(InvalidRequest, match="give it example="):
        to_torchscript(plain_engine(digits, specs, None), path)
    strict = Engine(calibrated(digits, specs), specs, example=DIGIT)
    digits.norms = NormTable(digits.space.id)
    with pytest.raises(NotCalibrated, match=r"2 of 2 subnets .* allow_uncalibrated=True"):
        to_torchscript(strict, path)
    table = LatencyTable([specs[0].key], [60.0], [1], [[1.0]])
    with pytest.raises(ProfileMismatch, match="1 subnets, but the engine has 2"):
        to_torchscript(engine, path, table=table, slo_ms=5)
    foreign = LatencyTable(
        [spec.key for spec in specs], [60.0, 70.0], [1], [[1.0], [2.0]], stamp={"supernet": "other"}
    )
    with pytest.raises(ProfileMismatch, match="measured on supernet other"):
        to_torchscript(engine, path, table=foreign, slo_ms=5)
    norm = next(iter(digits.norm_operators().values()))
    norm.running_mean, norm.running_var = norm.running_mean.double(), norm.running_var.double()
    words = r"expected scalar type Float but found Double.*nothing was written"
    with pytest.raises(ExportError, match=words):
        to_torchscript(engine, path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
        with pytest.raises(ExportError, match=r"Python 3\.14: TorchScript .*to_pt2"):
            to_torchscript(engine, path)
    assert not path.exists()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_module_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    branching = Elastic()
    branching.layers[1] = Branching()
    supernet = own_supernet(branching)
    with pytest.raises(ExportError, match=r"^layers\.1: its forward cannot be traced"):
        to_torchscript(plain_engine(supernet, [supernet.space.largest()], torch.randn(2, 1, 9, 9)), path)

    hooked = Elastic()
    hooked.head.register_forward_hook(lambda module, inputs, output: output)
    supernet = own_supernet(hooked)
    with pytest.raises(ExportError, match=r"^head \(Linear\): TorchScript cannot compile it"):
        to_torchscript(plain_engine(supernet, [supernet.space.largest()], torch.randn(2, 1, 9, 9)), path)

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
    x = torch.randn(2, 1024)
    scripted = to_torchscript(plain_engine(supernet, specs, x), tmp_path / "m.pt")
    assert differing(scripted, supernet, specs, {"input": x}) == []
    size = (tmp_path / "m.pt").stat().st_size
    assert size <= 1.05 * held_bytes(supernet, specs)
    warm = [digits.space.smallest()]
    to_torchscript(plain_engine(digits, warm, DIGIT), tmp_path / "warm.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "warm.pt"), str(tmp_path / "m.pt")]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken <= 1.1 * size


def keeping(network: nn.Module, count: int = 2, **elastic: Any) -> Supernet:
    """Make a supernet whose `layers` are skippable one by one, and whose `hidden` width is 2 or 4."""
    names = [str(i) for i in range(count)]
    axes = [Axis.uniform("keep", names, [0, 1]), Axis.uniform("hidden", ["all"], [2, 4])]
    keeps: Any = lambda v: {f"keep{i}": k for i, k in enumerate(v["keep"])}  # noqa: E731
    space = SubnetSpace("keeping", axes, lambda v: {**keeps(v), "hidden": v["hidden"][0]})
    layers = LayerSelect.on(**{i: f"keep{i}" for i in names})
    return insert_(network.eval(), space, {"layers": layers, **elastic})


def refused(supernet: Supernet, words: str, path: Path, example: Any, count: int | None = None) -> None:
    """Assert that an export of the largest subnets is refused, and that nothing is written."""
    specs = list(supernet.space.enumerate())
    engine = plain_engine(supernet, specs[-1:] if count else specs, example)
    with pytest.raises(ExportError, match=words):
        to_torchscript(engine, path, subnets=specs)
    assert not path.exists()


def agreeing(supernet: Supernet, path: Path, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """Export every subnet, and assert that the file equals the supernet bit for bit."""
    specs = list(supernet.space.enumerate())
    scripted = to_torchscript(plain_engine(supernet, specs, inputs), path, **options)
    loaded = torch.jit.load(path)
    with torch.no_grad():
        for i, spec in enumerate(specs):
            expected = supernet.subnet(spec)(*inputs)
            for module in (scripted, loaded):
                assert torch.equal(module(*inputs, torch.tensor([i])), expected), spec
    return scripted


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


def aside(network: Any, layer: Any, x: Tensor, i: int) -> Tensor:
    network.count(x)
    return layer(x)


def overwritten(network: Any, layer: Any, x: Tensor, i: int) -> Tensor:
    x = layer(x)
    network.act(x)
    return x


BODIES = {
    "plain": looped(lambda network, layer, x, i: layer(x)),
    "residual": looped(lambda network, layer, x, i: x + layer(x)),
    "counted": looped(lambda network, layer, x, i: layer(x) * (i + 1)),
    **{"aside": looped(aside), "overwritten": looped(overwritten)},
    **{"collected": collected, "first only": first_only, "written": written},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_loops_do_what_they_do_around_the_identities_of_skipped_layers(body: Any, tmp_path: Path) -> None:
    agreeing(keeping(Loop(body)), tmp_path / "m.pt", (torch.randn(3, 4),))


def test_what_torchscript_does_not_run_or_would_not_equal_is_refused(tmp_path: Path) -> None:
    path, normed = tmp_path / "m.pt", Loop(BODIES["plain"])
    reaching = looped(lambda network, layer, x, i: layer[0](x))
    refused(keeping(Loop(reaching)), "object is not subscriptable", path, torch.randn(3, 4), count=1)
    weight_norm(normed.layers[1][0])
    words = "Parametrization is not working with scripting"
    refused(keeping(normed), words, path, torch.zeros(2, 4))
    refused(keeping(Reserved(), 1), r"none may be called subnet", path, torch.zeros(2, 4))
    words = r"subnet 0 .*differs from the supernet's.* branch on the type"
    for example in (torch.randn(2, 4), torch.zeros(2, 4), (torch.zeros(1, 4),), {"x": torch.ones(2, 4)}):
        refused(keeping(Typed()), words, path, example)


class Typed(nn.Module):
    """Branches on the type of a value, which tracing cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x * 2 if isinstance(x, Tensor) else x


class Several(nn.Module):
    """Optional inputs, and a dictionary for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(
        self, x: Tensor, skipped: Tensor | None = None, scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.layers(x)
        if skipped is not None:
            x = x - skipped
        return {"y": x if scale is None else x * scale}


def test_inputs_are_those_of_the_example_by_name(tmp_path: Path) -> None:
    supernet = keeping(Several())
    specs, x, scale = list(supernet.space.enumerate()), torch.randn(2, 4), torch.randn(2, 4)
    scripted = to_torchscript(plain_engine(supernet, specs, {"scale": scale, "x": x}), tmp_path / "m.pt")
    for i, spec in enumerate(specs):
        expected = supernet.subnet(spec)(x, scale=scale)["y"]
        assert torch.equal(scripted(scale, x, torch.tensor([i]))["y"], expected)
    pair = to_torchscript(plain_engine(supernet, specs, (x, scale)), tmp_path / "m.pt")
    assert [argument.name for argument in pair.forward.schema.arguments][1:3] == ["x", "skipped"]


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


def held(supernet: Supernet) -> dict[str, tuple[int, Tensor]]:
    named = {**dict(supernet.network.named_parameters()), **dict(supernet.network.named_buffers())}
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in named.items()}


def test_the_source_keeps_its_tensors_and_the_file_has_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    supernet, x = keeping(Holding(), 1, hidden=WeightSlice.on(out="hidden")), torch.randn(2, 3, 4)
    supernet.train()  # views are in evaluation mode even if the supernet is in training mode
    before = held(supernet)
    scripted = agreeing(supernet, tmp_path / "m.pt", (x,))
    after = held(supernet)
    assert all(after[name][0] == place for name, (place, _) in before.items())
    kept = scripted(x, torch.tensor([1]))
    with torch.no_grad():
        for tensor in (*supernet.network.parameters(), supernet.network.norm.running_mean):
            tensor.mul_(2)
    assert torch.equal(scripted(x, torch.tensor([1])), kept)
    network = nn.Sequential()
    network.add_module("stem", nn.Conv2d(3, 4, 3))
    network.add_module("layers", nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)))
    supernet = keeping(network.to(memory_format=torch.channels_last), 1)
    scripted = agreeing(supernet, tmp_path / "m.pt", (torch.randn(2, 3, 8, 8),))
    weight = next(p for p in scripted.parameters() if p.shape == (4, 3, 3, 3))
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.data_ptr() != supernet.network.stem.weight.data_ptr()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers(self.embedding(x)), self.embedding.weight)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adding()])
        self.tables = [torch.zeros(2000), torch.cat([torch.zeros(1000), torch.ones(1), torch.zeros(999)])]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(layer(x, self.tables[0]), self.tables[1])
        return x


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) + table.sum()


class OwnNorm(nn.Module):
    """An RMSNorm that only its numbers show."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class OwnToken(nn.Module):
    """A token behind a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) + self.token[0]


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def forward(self, row: Tensor, means: Tensor, str: Tensor) -> Tensor:
        return self.layers(row) + means * str


class Reserved(ManyInputs):
    def forward(self, subnet: Tensor) -> Tensor:
        return self.layers(subnet)


def test_tied_weights_constants_own_norms_and_names_of_inputs(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    scripted = agreeing(keeping(Tied(), 1), path, (torch.tensor([[1, 2, 6]]),))
    assert "clone" not in scripted.network.code, "a tied weight is not copied in every call"
    agreeing(keeping(Constants(), 1), path, (torch.randn(2, 4),))
    agreeing(keeping(ManyInputs(), 1), path, tuple(torch.randn(3, 2, 4)))
    token = ElasticAttribute.on(token=Segments(("w", 8), ("w", 8)))
    elastic = {"0": "out", "1": LayerNormSlice.on(features="w"), "2": token}
    network = nn.Sequential(nn.Linear(4, 8), OwnNorm(), OwnToken())
    agreeing(one_width(network, elastic, [2, 4, 8]), path, (torch.randn(3, 4),))
