"""supernet.check runs the corners of a space and finds slices that do not fit, on a private copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_families import WITHOUT_GOLDEN, small_inputs, small_supernet
from torch import Tensor, nn

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.errors import InsertError, SpecError
from subnetact.operators import LayerNormSlice, LayerSelect, SubnetNorm, WeightSlice
from subnetact.supernet.check import corners
from subnetact.supernet.unused_weights import fill_unused_, masked_reference, private_copy, shared_view

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def space_of(name: str = "s", **choices: list[int]) -> SubnetSpace:
    axes = [Axis.uniform(axis, ["it"], values) for axis, values in choices.items()]
    return SubnetSpace(name, axes, lambda v: {axis: v[axis][0] for axis in choices})


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
    elastic = {
        "0": WeightSlice.on(out="c"),
        "1": LayerSelect.on(**{"2": "keep"}),
        "2": WeightSlice.on(in_="c"),
    }
    for block in described:
        elastic[f"1.{block}.conv"] = WeightSlice.on(in_="c", out="c")
        elastic[f"1.{block}.norm"] = SubnetNorm.on(channels="c")
    return insert_(network.eval(), space_of(c=[4, 8], keep=[0, 1]), elastic)


IMAGES = torch.zeros(1, 3, 6, 6)


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


def test_a_forgotten_module_in_a_block_that_the_smallest_subnet_skips_is_named() -> None:
    supernet = stack_of_blocks("0", "1")
    supernet.subnet(supernet.space.smallest())(IMAGES)
    with pytest.raises(InsertError, match=r"c=4 keep=1 does not run .*1\.2\.conv.*: WeightSlice\.on\(in_"):
        supernet.check(IMAGES)


def test_a_batch_that_the_network_does_not_take_is_no_fault_of_the_description() -> None:
    with pytest.raises(SpecError, match=r"check: c=8 keep=1 does not run .*0 \(Conv2d\).*\(N, C, H, W\)"):
        stack_of_blocks("0", "1", "2").check(torch.zeros(1, 5, 6, 6))


class Concatenating(nn.Module):
    def __init__(self, narrowed_last: bool) -> None:
        super().__init__()
        self.a, self.b, self.narrowed_last = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), narrowed_last
        self.c = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.relu(self.b(x)), F.relu(self.a(x))]
        return self.c(torch.cat(parts if self.narrowed_last else parts[::-1], 1))


@pytest.mark.parametrize("narrowed_last", [True, False])
def test_columns_behind_a_concatenation_are_right_only_if_the_narrowed_part_is_last(
    narrowed_last: bool,
) -> None:
    space = SubnetSpace(
        "s", [Axis.uniform("w", ["it"], [4, 8])], lambda v: {"w": v["w"][0], "both": v["w"][0] + 8}
    )
    elastic = {"a": WeightSlice.on(out="w"), "c": WeightSlice.on(in_="both")}
    supernet = insert_(Concatenating(narrowed_last), space, elastic)
    supernet.subnet(space.smallest())(IMAGES)
    if narrowed_last:
        assert len(supernet.check(IMAGES).compared) == 1
        return
    with pytest.raises(InsertError, match=r"first at c \(Conv2d\), which runs after .*; a slice there takes"):
        supernet.check(IMAGES)
    assert "because compare=False" in str(supernet.check(IMAGES, compare=False))


class Attention(nn.Module):
    """Attention with query, key and value in one matrix, as in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, -1, 4).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, -1))


def test_heads_of_a_fused_matrix_are_refused() -> None:
    heads = Axis.uniform("heads", ["it"], [2, 3])
    space = SubnetSpace("s", [heads], lambda v: {"w": v["heads"][0] * 4, "3w": v["heads"][0] * 12})
    elastic = {"0.qkv": WeightSlice.on(out="3w"), "0.proj": WeightSlice.on(in_="w")}
    supernet = insert_(nn.Sequential(Attention()), space, elastic)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(
        supernet.extract(space.smallest())(x), supernet.subnet(space.smallest())(x), rtol=0, atol=0
    )
    with pytest.raises(
        InsertError, match=r"0\.proj \(Linear\), which runs after 0\.qkv \(Linear\).*fused qkv"
    ):
        supernet.check(x)


class Remembering(nn.Module):
    """A network that keeps a weight in a plain list as well, where no view replaces the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.kept = [self.first.bias]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + self.kept[0].sum()


def test_weights_that_a_forward_reads_past_the_view_are_found() -> None:
    elastic = {"first": WeightSlice.on(out="c"), "last": WeightSlice.on(in_="c")}
    supernet = insert_(Remembering(), space_of(c=[2, 8]), elastic)
    for compare in (True, False):
        with pytest.raises(InsertError, match=r"c=2 depends on weights .* become NaN, first at the n"):
            supernet.check(torch.randn(2, 4), compare)


def test_a_narrowed_layer_norm_is_compared_with_one_of_the_kept_features() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    elastic = {
        "0": WeightSlice.on(out="c"),
        "1": LayerNormSlice.on(features="c"),
        "2": WeightSlice.on(in_="c"),
    }
    report = insert_(network, space_of(c=[2, 8]), elastic).check(torch.zeros(1, 4))
    assert report.compared == report.ran[1:]


class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.table(x.long()))


def test_zeros_are_kept_if_the_network_takes_no_other_numbers() -> None:
    supernet = insert_(Indexing().eval(), space_of(c=[4, 8]), {"layers.0": WeightSlice.on(out="c")})
    with pytest.raises(InsertError, match=r'layers\.1": WeightSlice\.on\(in_'):
        supernet.check(torch.zeros(1, 3))


class Loop(nn.Module):
    """Layers that the network calls one after another, in a way that each test gives."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.layers, self.body = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), body

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.body(layer, x)
        return x


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, y) if self.bias is not None else y


def skippable(network: nn.Module) -> Supernet:
    elastic = {"layers": LayerSelect.on(**{"1": "keep"})}
    return insert_(network.eval(), space_of(keep=[0, 1]), elastic)


def test_a_network_that_changes_the_outputs_of_its_layers_is_refused() -> None:
    x = torch.randn(2, 4)
    assert len(skippable(Loop(lambda layer, x: layer(x))).check(x).ran) == 2
    assert len(skippable(Loop(lambda layer, x: layer(input=x))).check(x).ran) == 2
    for body in (lambda layer, x: x + layer(x), lambda layer, x: torch.tanh(layer(x))):
        supernet = skippable(Loop(body))
        with pytest.raises(InsertError, match=r"changes the output of layers\.0 before layer 1 gets it"):
            supernet.check(x)
        supernet.check(x, compare=False)


def test_a_skippable_layer_that_turns_out_to_return_a_tuple_is_refused() -> None:
    network = Loop(lambda layer, x: layer(x)[0])
    network.layers = nn.ModuleList([Twice(4, 4) for _ in range(3)])
    with pytest.raises(InsertError, match=r"layers\.1 returns a tuple, and the identity"):
        skippable(network).check(torch.randn(2, 4))


class Rounding(nn.Sequential):
    """A network whose float32 sums are off by more than any tolerance, the more the wider it is."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        return self[1](h + 0.01 * h.shape[1] if h.dtype == torch.float32 else h)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_only_float32_tells_apart_is_equal(wrong: bool) -> None:
    network = Rounding(nn.Linear(3, 8), nn.Linear(8, 2)).eval()
    network.fault = 0.1 if wrong else 0.0
    network[1].register_forward_hook(lambda m, x, y: y + network.fault * x[0].shape[1])
    elastic = {"0": WeightSlice.on(out="w"), "1": WeightSlice.on(in_="w")}
    supernet = insert_(network, space_of(w=[4, 8]), elastic)
    if wrong:
        with pytest.raises(InsertError, match="w=4 differs from the original network"):
            supernet.check(torch.ones(1, 3))
    else:
        assert len(supernet.check(torch.ones(1, 3)).compared) == 1


def test_the_copy_of_a_network_shares_what_its_hooks_belong_to() -> None:
    class Meter:
        def __init__(self) -> None:
            self.lock, self.calls = threading.Lock(), 0

        def note(self, *_: Any) -> None:
            with self.lock:
                self.calls += 1

    supernet, meter = stack_of_blocks("0", "1", "2"), Meter()
    block = supernet.network[1][0]
    block.meters = [meter]
    block.register_forward_hook(meter.note)
    assert len(supernet.check(IMAGES).compared) == 3
    assert meter.calls


def test_readers_are_not_disturbed_by_a_check() -> None:
    supernet = stack_of_blocks("0", "1", "2")
    x = torch.randn(2, 3, 6, 6)
    specs = list(supernet.space.enumerate())
    expected = [supernet(x, subnet=spec) for spec in specs]
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            wrong.extend(
                i for i, spec in enumerate(specs) if not torch.equal(supernet(x, subnet=spec), expected[i])
            )

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(5):
        supernet.check(IMAGES)
    done.set()
    reader.join()
    assert not wrong


class Standardised(nn.Conv2d):
    """A convolution that normalises its weights over the input channels."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


def test_a_layer_that_normalises_its_weights_over_the_kept_inputs_is_compared() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), Standardised(8, 3, 1))
    supernet = insert_(
        network, space_of(c=[2, 8]), {"0": WeightSlice.on(out="c"), "1": WeightSlice.on(in_="c")}
    )
    assert supernet.check(IMAGES).compared == (supernet.space.smallest(),)


@pytest.mark.parametrize(
    "family", ["autoformer", "dynabert", "ofa_mbv3", "ofa_resnet50", *WITHOUT_GOLDEN, "digits"]
)
def test_the_families_pass(family: str) -> None:
    from subnetact.digits import load_digits_supernet

    supernet = load_digits_supernet() if family == "digits" else small_supernet(family)
    x: Any = {"x": torch.zeros(1, 1, 16, 16)} if family == "digits" else small_inputs(family, 1)
    report = supernet.check(x)
    assert len(report.compared) >= (0 if family in ("slimmable_resnet50", "hydravit") else 1), report


def test_the_copy_has_the_value_everywhere_but_in_the_weights_of_the_subnet() -> None:
    supernet = stack_of_blocks("0", "1", "2")
    space = supernet.space
    copy, row = private_copy(supernet.network), space.resolve(space.smallest())
    fill_unused_(copy, supernet.network, row, float("nan"))
    filled = copy.state_dict()
    assert filled.keys() == supernet.state_dict().keys()
    assert filled["0.weight"][:4].isfinite().all()
    assert filled["0.weight"][4:].isnan().all()
    assert filled["1.0.conv.weight"].isfinite().sum() == 4 * 4 * 9
    assert filled["1.0.norm.running_var"].isnan().tolist() == [False] * 4 + [True] * 4
    assert filled["1.2.conv.weight"].isnan().all()
    x = torch.randn(2, 3, 6, 6)
    expected = supernet.subnet(space.smallest())(x)
    torch.testing.assert_close(shared_view(copy, row)(x), expected, rtol=0, atol=0)
    fill_unused_(copy, supernet.network, row, 0.0)
    reference = masked_reference(copy, supernet.network, row, space.resolve(space.largest()))
    assert reference.get_submodule("0").out_channels == 8
    torch.testing.assert_close(reference(x), expected, rtol=5e-5, atol=5e-5)


def test_corners_are_distinct() -> None:
    space = space_of(a=[1, 2], b=[3])
    assert [spec.key for spec in corners(space)] == ["a=2 b=3", "a=1 b=3"]


def test_kernel_matrices_that_are_the_identity_are_used_weights() -> None:
    from subnetact.operators import ElasticKernel, KernelConv2d

    axis = Axis.uniform("k", ["all"], (3, 5))
    space = SubnetSpace("identity", [axis], lambda v: {"k": v["k"][0], "c": 4})
    network = nn.Sequential(KernelConv2d(4, [3, 5, 7], matrices=True))  # its matrices begin as the identity
    elastic = {"0": ElasticKernel.on(channels="c", kernel="k")}
    insert_(network, space, elastic).eval().check(torch.randn(1, 4, 9, 9))


class LastRows(WeightSlice):
    """A wrong rule: it takes the last rows instead of the first."""

    def sliced(self, sizes: tuple[int, ...], given: Any) -> dict[str, Tensor | None]:
        return {name: None if t is None else t[t.shape[0] - sizes[0] :] for name, t in given.items()}


class FusedGate(nn.Module):
    """Returns features; gate and value are the halves of one layer, of which a prefix is no subnet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.layer(x).chunk(2, -1)
        return gate.sigmoid() * value


@pytest.mark.parametrize(
    ("network", "elastic"),
    [
        (FusedGate(), {"layer": WeightSlice.on(out="w")}),
        (nn.Sequential(nn.Linear(6, 16), nn.ReLU()), {"0": LastRows.on(out="w")}),
    ],
)
def test_a_subnet_whose_outputs_have_other_shapes_does_not_count_as_compared(
    network: nn.Module, elastic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    supernet = insert_(network.eval(), space_of(w=[8, 16]), elastic, example=torch.randn(3, 6))
    assert "not compared with the original" in caplog.text
    report = supernet.check(torch.randn(3, 6))
    assert report.compared == ()
    assert "other shapes" in report.not_compared[supernet.space.smallest()]
