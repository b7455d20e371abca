"""supernet.check runs the corners of a space and finds slices that do not fit, on a private copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeded_models import FusedAttention
from small_families import small_inputs, small_supernet
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.errors import InsertError, SpecError
from subnetact.operators import (
    ElasticAttribute,
    ElasticKernel,
    KernelConv2d,
    LayerNormSlice,
    LayerSelect,
    SubnetNorm,
    WeightSlice,
)
from subnetact.space import Slot, UsedWhen
from subnetact.supernet.check import corners

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
IMAGES, VECTORS = torch.zeros(1, 3, 6, 6), torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
OUT, IN, BOTH = WeightSlice.on(out="c"), WeightSlice.on(in_="c"), WeightSlice.on(in_="c", out="c")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def stack_of_blocks(*described: str) -> Supernet:
    """A network of three blocks, of which the last can be skipped, with one width."""
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(Block(), Block(), Block()), nn.Conv2d(8, 4, 1))
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    elastic = {"0": OUT, "1": LayerSelect.on(**{"2": "keep"}), "2": IN}
    for block in described:
        elastic |= {f"1.{block}.conv": BOTH, f"1.{block}.norm": SubnetNorm.on(channels="c")}
    return insert_(network.eval(), space_of(c=[4, 8], keep=[0, 1]), elastic)


def test_all_corners_run_and_equal_the_masked_original() -> None:
    supernet = stack_of_blocks("0", "1", "2")
    before = {name: (t.clone(), t.data_ptr()) for name, t in supernet.state_dict().items()}
    report = supernet.check(IMAGES)
    assert [spec.key for spec in report.ran] == ["c=8 keep=1", "c=4 keep=0", "c=4 keep=1", "c=8 keep=0"]
    assert report.compared == report.ran[1:]
    assert not report.not_compared
    assert "4 subnets ran, 3 were compared" in str(report)
    for name, tensor in supernet.state_dict().items():
        assert tensor.data_ptr() == before[name][1], name
        torch.testing.assert_close(tensor, before[name][0], rtol=0, atol=0)
    assert supernet.norms.get(supernet.space.smallest()) is None
    assert [spec.key for spec in corners(space_of(a=[1, 2], b=[3]))] == ["a=2 b=3", "a=1 b=3"]


def test_a_choice_that_only_narrow_subnets_have_is_checked() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)).eval()
    gate, widths = Slot("it", (0, 1)), Slot("it", (2, 4, 8), UsedWhen("gate", 0, (0,)))
    sizes = lambda v: {"w": v["w"][0] or 8, "z": 4 + 4 * v["gate"][0]}  # noqa: E731
    space = SubnetSpace("s", [Axis("gate", (gate,)), Axis("w", (widths,))], sizes)
    elastic = {
        "0": WeightSlice.on(out="w"),
        "1": WeightSlice.on(in_="w", out="z"),
        "2": WeightSlice.on(in_="z"),
    }
    report = insert_(network, space, elastic).check(torch.randn(3, 4))
    assert {spec.key for spec in report.compared} == {f"gate=0 w={w}" for w in (2, 4, 8)}


def concatenating(narrowed_last: bool) -> Supernet:
    order = ("b", "a") if narrowed_last else ("a", "b")
    join = lambda m, x: m.c(torch.cat([getattr(m, name)(x).relu() for name in order], 1))  # noqa: E731
    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(3, 8, 1), "c": nn.Conv2d(16, 4, 1)}
    space = space_of("s", lambda v: {**v, "both": v["c"] + 8}, c=[4, 8])
    return insert_(Written(join, **layers), space, {"a": OUT, "c": WeightSlice.on(in_="both")})


def fused() -> Supernet:
    space = space_of(
        "s", lambda v: {"h": v["heads"], "w": v["heads"] * 4, "3w": v["heads"] * 12}, heads=[2, 4]
    )
    elastic = {"0.qkv": WeightSlice.on(out="3w"), "0.proj": WeightSlice.on(in_="w")}
    elastic["0"] = ElasticAttribute.on(num_heads="h")
    return insert_(nn.Sequential(FusedAttention()), space, elastic)


def remembering() -> Supernet:
    """Return a network that keeps a weight in a plain list as well, where no view replaces the weight."""
    first = nn.Linear(4, 8)
    read = lambda m, x: m.last(m.first(x)) + m.kept[0].sum()  # noqa: E731
    network = Written(read, first=first, last=(8, 3), kept=[first.bias])
    return insert_(network, space_of(c=[2, 8]), {"first": OUT, "last": IN})


def indexing() -> Supernet:
    """Return a network that takes no other numbers than indices."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    network = Written(lambda m, x: m.layers(m.table(x.long())), table=nn.Embedding(4, 8), layers=layers)
    return insert_(network.eval(), space_of(c=[4, 8]), {"layers.0": OUT})


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, y) if self.bias is not None else y


def skippable(body: Any, layer: type[nn.Module] = nn.Linear) -> Supernet:
    """Return layers that the network calls one after another, in some way."""
    layers = nn.ModuleList([layer(4, 4) for _ in range(3)])
    network = Written(lambda m, x: reduce(lambda y, one: body(one, y), m.layers, x), layers=layers).eval()
    return insert_(network, space_of(keep=[0, 1]), {"layers": LayerSelect.on(**{"1": "keep"})})


class Rounding(nn.Sequential):
    """A network whose float32 sums are off by more than any tolerance, the more the wider it is."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        return self[1](h + 0.01 * h.shape[1] if h.dtype == torch.float32 else h)


def rounding(fault: float) -> Supernet:
    network = Rounding(nn.Linear(4, 8), nn.Linear(8, 2)).eval()
    network[1].register_forward_hook(lambda m, x, y: y + fault * x[0].shape[1])
    return insert_(network, space_of(c=[4, 8]), {"0": OUT, "1": IN})


class Standardised(nn.Conv2d):
    """A convolution that normalises its weights over the input channels."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


def of_layers(*layers: nn.Module, **elastic: Any) -> Supernet:
    described = {name.removeprefix("at"): entry for name, entry in elastic.items()}
    return insert_(nn.Sequential(*layers).eval(), space_of(c=[2, 8]), described)


REFUSED: dict[str, tuple[Callable[[], Supernet], Tensor, str]] = {
    "a forgotten module in a block that the smallest subnet skips": (
        lambda: stack_of_blocks("0", "1"),
        IMAGES,
        r"c=4 keep=1 does not run .*1\.2\.conv.*: WeightSlice\.on\(in_",
    ),
    "columns behind a narrowed part": (
        lambda: concatenating(False),
        IMAGES,
        r"first at c \(Conv2d\), which runs after .*; a slice there takes",
    ),
    "heads of a fused matrix": (
        fused,
        torch.randn(2, 5, 16),
        r"0\.proj \(Linear\), which runs after 0\.qkv \(Linear\).*fused qkv",
    ),
    "weights that are read past the view": (
        remembering,
        VECTORS,
        "c=2 depends on weights .* become NaN, first at the n",
    ),
    "a forgotten module behind indices": (indexing, torch.zeros(1, 3), r'layers\.1": WeightSlice\.on\(in_'),
    "an output that is added to": (
        lambda: skippable(lambda layer, x: x + layer(x)),
        VECTORS,
        r"changes the output of layers\.0 before layer 1 gets it",
    ),
    "an output that is changed": (
        lambda: skippable(lambda layer, x: torch.tanh(layer(x))),
        VECTORS,
        r"changes the output of layers\.0 before layer 1 gets it",
    ),
    "a skippable layer that returns a tuple": (
        lambda: skippable(lambda layer, x: layer(x)[0], Twice),
        VECTORS,
        r"layers\.1 returns a tuple, and the identity",
    ),
    "a fault beside rounding": (lambda: rounding(0.1), VECTORS, "c=4 differs from the original network"),
}
COMPARED: dict[str, tuple[Callable[[], Supernet], Tensor]] = {
    "a narrowed part that is last": (lambda: concatenating(True), IMAGES),
    "layers that are called by position": (lambda: skippable(lambda layer, x: layer(x)), VECTORS),
    "layers that are called by name": (lambda: skippable(lambda layer, x: layer(input=x)), VECTORS),
    "a norm of the kept features": (
        lambda: of_layers(
            *(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
            **{"at0": OUT, "at1": LayerNormSlice.on(features="c"), "at2": IN},
        ),
        torch.zeros(1, 4),
    ),
    "weights that are normalised": (
        lambda: of_layers(nn.Conv2d(3, 8, 1), Standardised(8, 3, 1), at0=OUT, at1=IN),
        IMAGES,
    ),
    "what only float32 tells apart": (lambda: rounding(0.0), VECTORS),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_smallest_subnet_does_not_show_is_refused(case: str) -> None:
    make, x, message = REFUSED[case]
    with pytest.raises(InsertError, match=message):
        make().check(x)


@pytest.mark.parametrize("case", COMPARED)
def test_what_is_right_is_compared(case: str) -> None:
    make, x = COMPARED[case]
    report = make().check(x)
    assert report.compared == report.ran[1:]
    assert not report.not_compared


def test_matrices_that_are_the_identity_are_used_weights() -> None:
    space, elastic = space_of(k=[3, 5], c=[4]), {"0": ElasticKernel.on(channels="c", kernel="k")}
    network = nn.Sequential(KernelConv2d(4, [3, 5, 7], matrices=True))
    insert_(network, space, elastic).eval().check(torch.randn(1, 4, 9, 9))


def test_runs_alone_find_what_is_read_past_the_view_and_no_wrong_slices() -> None:
    make, x, message = REFUSED["weights that are read past the view"]
    with pytest.raises(InsertError, match=message):
        make().check(x, compare=False)
    assert "because compare=False" in str(concatenating(False).check(IMAGES, compare=False))
    with pytest.raises(SpecError, match=r"check: c=8 keep=1 does not run .*0 \(Conv2d\).*\(N, C, H, W\)"):
        stack_of_blocks("0", "1", "2").check(torch.zeros(1, 5, 6, 6))


def test_the_copy_of_a_network_shares_what_its_hooks_belong_to_and_disturbs_no_reader() -> None:
    class Meter:
        def __init__(self) -> None:
            self.lock, self.calls = threading.Lock(), 0

        def note(self, *_: Any) -> None:
            with self.lock:
                self.calls += 1

    supernet, meter, x = stack_of_blocks("0", "1", "2"), Meter(), torch.randn(2, 3, 6, 6)
    block = supernet.network[1][0]
    block.meters = [meter]
    block.register_forward_hook(meter.note)
    specs = list(supernet.space.enumerate())
    expected = [supernet(x, subnet=spec) for spec in specs]
    wrong, done, before = list[int](), threading.Event(), meter.calls

    def read() -> None:
        while not done.is_set():
            pairs = enumerate(zip(specs, expected, strict=True))
            wrong.extend(i for i, (spec, y) in pairs if not torch.equal(supernet(x, subnet=spec), y))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(5):
        assert len(supernet.check(IMAGES).compared) == 3
    done.set()
    reader.join()
    assert not wrong
    assert meter.calls > before


@pytest.mark.parametrize("family", ["autoformer", "dynabert", "ofa_mbv3", "us_mobilenet_v2"])
def test_the_families_pass(family: str) -> None:
    assert small_supernet(family).check(small_inputs(family, 1)).compared


class LastRows(WeightSlice):
    """A wrong rule: it takes the last rows instead of the first."""

    def sliced(self, sizes: tuple[int, ...], given: Any) -> dict[str, Tensor | None]:
        return {name: None if t is None else t[t.shape[0] - sizes[0] :] for name, t in given.items()}


def fused_gate(m: Any, x: Tensor) -> Tensor:
    """Return features; gate and value are the halves of one layer, of which a prefix is no subnet."""
    gate, value = m.layer(x).chunk(2, -1)
    return gate.sigmoid() * value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("network", "elastic"),
    [
        (Written(fused_gate, layer=(4, 16)), {"layer": OUT}),
        (nn.Sequential(nn.Linear(4, 16), nn.ReLU()), {"0": LastRows.on(out="c")}),
    ],
)
def test_a_subnet_whose_outputs_have_other_shapes_does_not_count_as_compared(
    network: nn.Module, elastic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    supernet = insert_(network.eval(), space_of(c=[8, 16]), elastic, example=VECTORS)
    assert "not compared with the original" in caplog.text
    report = supernet.check(VECTORS)
    assert report.compared == ()
    assert "other shapes" in report.not_compared[supernet.space.smallest()]
