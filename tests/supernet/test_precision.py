"""Subnets at int8 and bfloat16: one copy of the weights, the same slices, and what they compute."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from small_decoders import small_decoder
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written, seeded

import subnetact
import subnetact.costs
from subnetact.device import MachineFacts
from subnetact.digits import load_digits_supernet
from subnetact.errors import (
    ForeignSpec,
    IllegalChoice,
    InsertError,
    InvalidRequest,
    PrecisionError,
    SpecError,
)
from subnetact.operators import AttentionSlice, Segments, WeightSlice, kernel_table, lowered_weight
from subnetact.operators.lowered_weight import Low, LowConv, LoweredWeight
from subnetact.operators.tensor_version import storage_id
from subnetact.operators.view_module import mix_in_
from subnetact.supernet.bind import packed_bytes
from subnetact.supernet.statistics import is_calibrated
from subnetact.supernet.supernet import Supernet
from tests.small_families import small_inputs, small_supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    """Quantise the full weight per output channel and x per row, multiply in float64, and scale back."""
    full = weight.double()
    scale = full.abs().amax(1) / 127
    short = (full / scale[:, None]).round()[:rows, :columns]
    x = x.double()
    row_scale = x.abs().amax(-1, keepdim=True) / 127
    y = (x / row_scale).round() @ short.t() * row_scale * scale[:rows]
    return y if bias is None else y + bias[:rows]


def convolved(conv: Any, full: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Quantise the full weight per output channel and x per sample, convolve in float64, and scale back.

    Numbers are rounded in float32, in which a half may be less or more than it is in float64.
    """
    sample = x.abs().amax((1, 2, 3), keepdim=True) * (1 / lowered_weight.LARGEST_INT8)
    rounded = (x * sample.reciprocal()).round().double()
    scale = full.abs().amax((1, 2, 3), keepdim=True) / lowered_weight.LARGEST_INT8
    kept = (full / scale).round().double()[: conv.out_channels, : conv.in_channels]
    y = nn.functional.conv2d(rounded, kept, None, conv.stride, conv.padding, conv.dilation)
    y = y * sample * scale[: conv.out_channels].view(-1, 1, 1)
    return y if bias is None else y + bias.view(-1, 1, 1)


@pytest.fixture
def onednn_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused programs with oneDNN's int8 kernels, on every machine that has them.

    Without VNNI, sums of two products saturate in 16 bits. With numbers up to 63 none do.
    """
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
        pytest.skip("this build of torch has no int8 convolutions")
    if not kernel_table.machine_facts("cpu").uses("vnni"):
        for module in (kernel_table, lowered_weight):
            monkeypatch.setattr(module, "LARGEST_INT8", 63)
        monkeypatch.setattr(
            kernel_table, "machine_facts", lambda device: MachineFacts(device, units=frozenset({"vnni"}))
        )


@pytest.fixture
def digits() -> Supernet:
    supernet = load_digits_supernet()
    supernet.enable_precision("int8")
    return supernet


def attend(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    q, k, v = m.qkv(x).chunk(3, -1)
    x = x + m.proj((q @ k.mT).softmax(-1) @ v)
    return m.last(x + m.attention(x, x, x)[0])  # type: ignore[no-any-return]


def fused() -> Supernet:
    """Return a fused qkv with one elastic width, an attention module and a classifier."""
    layers = {"first": (12, 16), "qkv": (16, 48), "proj": (16, 16), "last": (16, 5)}
    network = seeded(attend, **layers, attention=nn.MultiheadAttention(16, 4, batch_first=True))
    elastic = {
        "qkv": WeightSlice.on(out=Segments(*[("attention", 16)] * 3)),
        "proj": WeightSlice.on(in_="attention"),
        "attention": AttentionSlice.on(out="attention"),
        "attention.out_proj": WeightSlice.on(in_="attention"),
    }
    space = space_of("fused", lambda v: {"attention": 4 * v["heads"]}, heads=[1, 2, 4])
    return subnetact.insert_(network, space, elastic)


def test_a_slice_computes_with_its_own_quantisation() -> None:
    supernet = fused()
    space = supernet.enable_precision("int8")
    spec = space.spec(heads=2, precision="int8")
    view = supernet.subnet(spec)
    x = torch.randn(3, 7, 8)
    proj = supernet.network.proj
    torch.testing.assert_close(
        view.proj(x).double(), reference(x, proj.weight, proj.bias, 16, 8), rtol=1e-5, atol=1e-5
    )
    x = torch.randn(3, 7, 16)
    qkv = supernet.network.qkv
    kept = [i for start in (0, 16, 32) for i in range(start, start + 8)]
    expected = reference(x, qkv.weight, qkv.bias, 48, 16)[..., kept]
    torch.testing.assert_close(view.qkv(x).double(), expected, rtol=1e-5, atol=1e-5)
    exact = supernet(torch.ones(2, 3, 12), subnet=space.spec(heads=2, precision="float32"))
    low = supernet(torch.ones(2, 3, 12), subnet=spec)
    assert 0 < (low - exact).abs().max() < 0.05 * exact.abs().max()


def test_all_subnets_read_one_int8_copy_in_place(digits: Supernet) -> None:
    space = digits.space
    assert packed_bytes(digits.network, "lowered") == 0, "the copy is made on request"
    seen = set()
    for spec in (space.smallest(), space.at_precision(space.largest(), "int8")):
        conv = digits.subnet(spec).get_submodule("stages.1.0.conv3")
        assert conv.weight.dtype == torch.int8
        seen.add(tuple(map(storage_id, conv.lowered)))
    assert len(seen) == 1
    lowered = packed_bytes(digits.network, "lowered")
    full = sum(m.weight.numel() + 4 * len(m.weight) for n, m in low_modules(digits))
    assert lowered == full
    assert packed_bytes(digits.network) == lowered
    low = dict(low_modules(digits))
    assert {"stages.0.0.conv1", "stages.0.0.conv2", "stages.2.0.downsample.conv"} <= set(low)
    assert not {"stem", "classifier", "bn"} & set(low), "the first and the last layers stay at float32"


def low_modules(supernet: Supernet) -> Iterator[tuple[str, nn.Module]]:
    view = supernet.subnet(supernet.space.at_precision(supernet.space.largest(), "int8"))
    return ((n, m) for n, m in view.named_modules() if isinstance(m, Low))


def test_sliced_convolutions_follow_the_full_weights(digits: Supernet) -> None:
    spec = digits.space.spec(depth=1, expand=0.5, width=0.5, precision="int8")
    for name, channels in (("downsample.conv", 24), ("conv2", 24)):
        conv = digits.subnet(spec).get_submodule(f"stages.1.0.{name}")
        x = torch.randn(2, conv.in_channels, 6, 6).contiguous(memory_format=torch.channels_last)
        assert conv.in_channels == channels
        expected = convolved(conv, digits.network.get_submodule(f"stages.1.0.{name}").weight, x)
        torch.testing.assert_close(conv(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(1, 1, 0, 1), (1, 2, 0, 1), (3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), ((3, 1), (1, 2), (0, 1), 1)],
)
def test_convolutions_of_any_settings(kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    conv: Any = nn.Conv2d(12, 20, kernel, stride, padding, dilation)
    full, x = conv.weight.detach(), torch.randn(3, 12, 11, 9)
    low_(conv)
    with torch.inference_mode():
        y = conv(x)
    expected = convolved(conv, full, x, conv.bias)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)


def low_(conv: Any) -> None:
    """Give an ordinary convolution an int8 weight, and the forward for it."""
    short, scale = LoweredWeight.made(conv.weight, 8)
    assert scale is not None
    conv.weight = nn.Parameter(short, requires_grad=False)
    conv.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))
    mix_in_(conv, LowConv)


@pytest.mark.parametrize("rows", [0, 1, 5, 4000])
def test_products_of_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 96), torch.randn(40, 96), torch.randn(40)
    got = LoweredWeight.made(weight, 8).product(x, bias)
    assert got.shape == (rows, 40)
    off = (got.double() - reference(x, weight, bias, 40, 96)).abs()
    assert (off > 1e-4).double().mean().nan_to_num() < 1e-3, "but for halves that round the other way"
    assert (off < 0.1).all()


def test_a_row_is_computed_as_it_is_among_others_also_beside_zeros_and_what_is_no_number() -> None:
    weight = torch.randn(48, 128)
    weight[1] = 0
    short, scale = LoweredWeight.made(weight, 8)
    assert scale is not None
    low, bias, x = LoweredWeight(short[:33, :96], scale[:33]), torch.randn(33), torch.randn(40, 96)
    x[6] = 0
    many = low.product(x, bias)
    assert torch.equal(many[6], bias)
    assert torch.equal(many[:, 1], bias[1].expand(40))
    for rows in (1, 2, 4, 5):
        few = low.product(x[:rows].view(1, rows, 96), bias)
        assert torch.equal(few[0], many[:rows])
        assert few.is_contiguous()
    x[2, 3], x[4, 1] = float("nan"), float("inf")
    finite = low.product(x[:6], None).isfinite().all(1)
    assert finite.tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize("family", ["dynabert", "ofa_resnet50", "ofa_mbv3", "hydravit"])
def test_families_run_at_int8(family: str) -> None:
    supernet = small_supernet(family)
    space = supernet.enable_precision("int8")
    inputs = small_inputs(family)
    for spec in (space.smallest(), space.largest()):
        low, exact = (supernet.subnet(space.at_precision(spec, p))(**inputs) for p in ("int8", "float32"))
        off = (low - exact).norm() / exact.norm()
        assert 0 < off < 0.2, f"{family}: {off}"
    if family == "ofa_mbv3":
        model = subnetact.costs.CostModel(supernet, inputs["x"])
        one, other = (model(space.at_precision(spec, p)) for p in ("float32", "int8"))
        assert (one.parameters, one.macs) == (other.parameters, other.macs)
        assert other.weight_bytes < one.weight_bytes
    assert space.parse(space.format(space.smallest())) == space.smallest()


def test_changed_weights_reach_the_copy_and_training_the_full_weights(digits: Supernet) -> None:
    spec, x = digits.space.smallest(), torch.randn(2, 1, 16, 16)
    view, extracted = digits.subnet(spec), digits.extract(spec)
    before, weight = view(x), digits.network.get_submodule("stages.0.0.conv1").weight
    torch.testing.assert_close(pickle.loads(pickle.dumps(extracted))(x), before)
    digits.train()
    digits(x, subnet=spec).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    digits.eval()
    with torch.no_grad():
        weight.mul_(2)
    changed = view(x)
    assert not torch.allclose(before, changed)
    torch.testing.assert_close(digits.subnet(spec)(x), changed)
    torch.testing.assert_close(extracted(x), before)
    digits.load_state_dict(load_digits_supernet().state_dict())
    torch.testing.assert_close(digits(x, subnet=spec), before)
    torch.testing.assert_close(view(x), changed)  # A view that is in use keeps the former weights.


def test_specifications_stay_the_same_when_precisions_are_enabled() -> None:
    supernet = load_digits_supernet()
    before = supernet.space
    old, fingerprint = before.sample(0, 5), supernet.fingerprint()
    space = supernet.enable_precision("int8")
    assert supernet.fingerprint() == fingerprint, "the weights are the same"
    assert space.id == before.id
    assert space.size() == 2 * before.size() == 2 * len({spec.base for spec in space.enumerate()})
    for spec in old:
        low = space.at_precision(spec, "int8")
        assert space.check(spec) == spec == space.at_precision(low, "float32") == low.base
        assert space.spec(**dict(spec.values), precision="float32") == spec
        assert space.values(spec)["precision"] == ("float32",)
        assert (low.precision, spec.precision) == ("int8", "float32")
        assert "precision=int8" in low.key
        assert space.parse(low.key) == space.parse(space.format(low)) == low != spec
        assert subnetact.SubnetSpec.from_json(low.to_json()) == low
        assert space.resolve(spec) == (*before.resolve(spec), 32)
        assert space.resolve(low) == (*before.resolve(spec), 8)
        with pytest.raises(ForeignSpec, match=r"is at int8, .*enable_precision"):
            before.check(low)
    assert len(set(space.enumerate())) == space.size()


def test_statistics_are_those_of_the_float_subnet(digits: Supernet) -> None:
    space = digits.space
    low = space.at_precision(space.sample(1), "int8")
    exact = space.at_precision(low, "float32")
    report = subnetact.calibrate(digits, [low, exact], [torch.randn(8, 1, 16, 16)], progress=False)
    assert report.subnets == 1
    assert digits.norms.get(low) is digits.norms.get(exact) is not None
    assert is_calibrated(digits, low)


@pytest.mark.parametrize("last", [False, True])
def test_engines_serve_both_precisions_and_bundles_keep_them(tmp_path, last: bool) -> None:
    digits = load_digits_supernet()
    space = digits.enable_precision("int8", last=last)
    assert ("classifier" in dict(low_modules(digits))) == last
    exact, x = space.largest(), torch.randn(3, 1, 16, 16)
    specs = [exact, space.at_precision(exact, "int8")]
    engine = subnetact.Engine(
        digits, specs, example=x[:1], allow_uncalibrated=True, memory_budget_mb=256, check=False
    )
    torch.testing.assert_close(engine(x, 1), digits(x, subnet=specs[1]), rtol=1e-4, atol=1e-4)
    before = engine(x, 1)
    assert engine.pin(0)
    assert engine.pin(1)
    assert engine.stats().lowered_bytes == packed_bytes(digits.network, "lowered") > 0
    engine.save(tmp_path / "bundle")
    loaded = subnetact.Engine.load(tmp_path / "bundle")
    assert loaded.specs == engine.specs
    assert loaded.supernet.precision == digits.precision
    torch.testing.assert_close(loaded(x, 1), before)
    with pytest.raises(InvalidRequest, match=r"bfloat16 and torch\.float32 in one batch"):
        engine.run(1, [x[0], x[1].bfloat16()], 2)


def test_the_last_layer_of_a_language_model_follows_although_it_shares_the_embedding() -> None:
    pytest.importorskip("transformers")
    model, tokens = small_decoder("LlamaConfig", tie_word_embeddings=True), torch.randint(50, (2, 5))
    supernet = subnetact.insert_(model, example={"input_ids": tokens}, axes=("ffn",))
    space = supernet.enable_precision("int8", last=True)
    exact, low = (supernet.subnet(space.at_precision(space.largest(), p)) for p in ("float32", "int8"))
    assert low.lm_head.weight.dtype == torch.int8
    assert low.model.embed_tokens.weight.data_ptr() == exact.lm_head.weight.data_ptr()
    hidden = torch.randn(1, 1, 16)
    expected = reference(hidden, exact.lm_head.weight, None, 50, 16)
    torch.testing.assert_close(low.lm_head(hidden).double(), expected, rtol=1e-5, atol=1e-5)
    off = (low(tokens).logits - exact(tokens).logits).norm() / exact(tokens).logits.norm()
    assert 0 < off < 0.1


def test_precisions_that_are_not_there_are_refused() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    elastic = {"0": WeightSlice.on(out="w"), "2": WeightSlice.on(in_="w")}
    without = subnetact.insert_(layers, space_of(w=[4, 8]), elastic)
    with pytest.raises(PrecisionError, match="float32 only"):  # There are no matrix products inside.
        without.enable_precision("int8")
    supernet = load_digits_supernet()
    for wrong in ([], ["float32"], ["int4"]):
        with pytest.raises(SpecError):
            supernet.enable_precision(*wrong)
    with pytest.raises(PrecisionError, match="no module 'head'"):
        supernet.enable_precision("int8", keep=["head"])
    with pytest.raises(SpecError, match="enable_precision"):
        supernet.space.at_precision(supernet.space.largest(), "int8")
    assert supernet.precision is None
    supernet.enable_precision("int8", keep=["stages.0"])
    assert not any(name.startswith("stages.0") for name, _ in low_modules(supernet))
    with pytest.raises(SpecError, match="already"):
        supernet.enable_precision("int8")
    low, half = supernet.space.smallest(), load_digits_supernet().space.with_precision("bfloat16")
    with pytest.raises(IllegalChoice, match="'int8' is not a choice; choose from bfloat16, float32"):
        half.check(low)
    with torch.no_grad():
        supernet.network.get_submodule("stages.1.0.conv1").weight[0, 0] = float("inf")
    with pytest.raises(PrecisionError, match=r"stages\.1\.0\.conv1.*not all finite"):
        supernet.subnet(supernet.space.smallest())


def set_machine(monkeypatch: pytest.MonkeyPatch, facts: MachineFacts) -> None:
    monkeypatch.setattr(kernel_table, "machine_facts", lambda device: facts)


def test_a_build_without_int8_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet = load_digits_supernet()
    set_machine(monkeypatch, MachineFacts(units=frozenset({"vnni"})))
    kernel_table._wrong.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-(2**15), 2**15 - 1))
    try:
        with pytest.raises(PrecisionError, match="int8 products are wrong"):
            supernet.enable_precision("int8")
    finally:
        kernel_table._wrong.cache_clear()
    assert supernet.precision is None


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_the_machine_refuses_a_precision(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supernet = load_digits_supernet()
    space = supernet.enable_precision(precision)
    specs = [space.at_precision(space.largest(), precision)]
    engine = subnetact.Engine(supernet, specs, example=torch.zeros(1, 1, 16, 16), allow_uncalibrated=True)
    engine.save(tmp_path / "bundle")
    subnetact.Engine.load(tmp_path / "bundle")
    set_machine(monkeypatch, MachineFacts(aten="AVX2"))
    needs = rf"precision {precision}: .*AVX2, no vnni.*it needs a CPU with AVX-512.*runs float32; enable"
    with pytest.raises(PrecisionError, match=needs):
        subnetact.Engine.load(tmp_path / "bundle")
    other = load_digits_supernet()
    with pytest.raises(PrecisionError, match=needs):
        other.enable_precision(precision)
    assert other.precision is None
    if precision == "int8":
        with pytest.raises(PrecisionError, match="run the subnet at float32"):
            supernet.subnet(specs[0])(torch.zeros(1, 1, 16, 16))


def test_bfloat16_is_near_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet = load_digits_supernet()
    set_machine(monkeypatch, MachineFacts(reference=True))
    space = supernet.enable_precision("bfloat16", "int8")
    x = torch.randn(2, 1, 16, 16)
    exact = supernet(x, subnet=space.largest())
    for precision, most in (("bfloat16", 0.05), ("int8", 0.1)):
        low = supernet(x, subnet=space.at_precision(space.largest(), precision))
        assert 0 < (low - exact).norm() < most * exact.norm()


def test_an_int8_copy_that_is_ruined_fails_the_check() -> None:
    supernet = load_digits_supernet()
    space = supernet.enable_precision("int8")
    x = torch.randn(1, 1, 16, 16)
    assert all(spec.precision == "float32" for spec in supernet.check(x).compared)
    operator = supernet.network.get_submodule("stages.0.0.conv1")
    operator.lowered(8).tensors["scale"].mul_(-50)
    with pytest.raises(InsertError, match=r"precision=int8.*farthest off are stages\.0\.0\.conv1"):
        supernet.check(x)
    assert space.smallest().precision == "int8"


@pytest.mark.parametrize(("batch", "size"), [(1, 16), (3, 16), (2, 40)])
@pytest.mark.usefixtures("onednn_convolutions")
def test_fused_int8_programs_compute_what_views_compute(digits: Supernet, batch: int, size: int) -> None:
    space, x = digits.space, torch.randn(batch, 1, size, size)
    low = space.at_precision(space.largest(), "int8")
    engine = subnetact.Engine(
        digits, [low], example=torch.zeros(1, 1, 16, 16), allow_uncalibrated=True, memory_budget_mb=256
    )
    view, before = digits.subnet(low)(x), engine(x, 0)
    assert engine.pin(0), engine.pin(0).reason
    exact = digits(x, subnet=space.largest())
    assert 0 < (view - exact).norm() < 0.05 * exact.norm()
    # One number that rounds the other way changes an output by about 1e-4 of it.
    for other in (before, engine(x, 0), digits.extract(low)(x)):
        assert (other - view).norm() < 1e-3 * view.norm() < 0.2 * (view - exact).norm()
    program = engine._plan.program(engine.ready(0), engine.ready(0).bound).program
    kinds = [type(conv).__name__ for conv in program._convs]
    assert kinds[0] == "PackedConv", "the first layer stays at float32"
    assert set(kinds[1:]) == {"Int8Conv"}
    x[0, 0, 0, 0] = float("nan")
    assert engine(x, 0)[0].isnan().all()
    torch.testing.assert_close(engine(x, 0)[1:], view[1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.usefixtures("onednn_convolutions")
def test_an_answer_does_not_depend_on_strange_mates(digits: Supernet, blocks: bool) -> None:
    space, x = digits.space, torch.randn(5, 1, 16, 16)
    low = space.at_precision(space.largest(), "int8")
    engine = subnetact.Engine(
        digits, [low], example=torch.zeros(1, 1, 16, 16), allow_uncalibrated=True, memory_budget_mb=256
    )
    assert engine.pin(0), engine.pin(0).reason

    def answers(x: Tensor) -> Tensor:
        run = engine.start(0, list(x), len(x))
        while blocks and not run.step():
            pass
        return torch.stack(list(run.outputs() if blocks else engine.run(0, list(x), len(x))))

    ordinary = answers(x)
    assert not torch.equal(ordinary, engine.ready(0).bound.view(x))
    x[1, 0, 3, 3], x[2], x[4, 0, 0, 0] = float("nan"), 1e9, float("inf")
    found = answers(x)
    assert torch.equal(found[[0, 3]], ordinary[[0, 3]])
    alone = torch.cat([answers(one[None]) for one in x])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[1].isnan().all()
    x[[1, 2, 4]] = x[0].clone()
    x[[1, 2, 4]] *= 7e7 / x[0].norm()  # Each of them is not huge, but the batch is.
    assert torch.equal(answers(x)[[0, 3]], ordinary[[0, 3]])


def test_subnets_of_several_inputs_become_programs_at_int8() -> None:
    class Pair(Written):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y)

    # Layers of this width are packed on every CPU.
    layers = dict.fromkeys(("first", "inner", "last"), (512, 512))
    pair = Pair(lambda m, x, y: m.last(m.inner((m.first(x) + y).relu())), **layers)
    supernet = one_width(pair, {"first": "out", "inner": "in"}, [256, 512])
    low = supernet.enable_precision("int8").at_precision(supernet.space.largest(), "int8")
    example = {"x": torch.randn(1, 512), "y": torch.randn(1, 1)}
    engine = subnetact.Engine(supernet, [low], example=example, memory_budget_mb=64)
    assert engine.pin(0), engine.pin(0).reason
    batch = {"x": torch.randn(3, 512), "y": torch.randn(3, 1)}
    calls: list[int] = []
    program = engine._plan.program(engine.ready(0), engine.ready(0).bound).program
    program.forward.get_submodule("last").register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        expected = supernet.subnet(low)(**batch)
    torch.testing.assert_close(engine(batch, 0), expected, rtol=1e-4, atol=1e-5)
    assert calls == [1]


def test_int8_accuracy_of_digits_is_that_of_float32() -> None:
    from subnetact.digits import distort, undistorted_digits

    supernet = load_digits_supernet()
    train, test = undistorted_digits()
    generator = torch.Generator().manual_seed(0)
    x, inputs = distort(test.images, generator), distort(train.images[:400], generator)
    exact = supernet.space.sample(2, 4)
    space = supernet.enable_precision("int8")
    subnetact.calibrate(supernet, exact, inputs.split(100), progress=False)
    low = [space.at_precision(spec, "int8") for spec in exact]
    percent = subnetact.evaluate(supernet, [*exact, *low], [(x, test.labels)], progress=False)
    assert abs(sum(percent[:4]) - sum(percent[4:])) / 4 < 0.5
    assert percent[:4] != percent[4:]


@pytest.mark.usefixtures("onednn_convolutions")
def test_an_empty_batch_gets_what_its_view_answers(digits: Supernet) -> None:
    space = digits.space
    specs = [space.largest(), space.at_precision(space.largest(), "int8")]
    engine = subnetact.Engine(
        digits, specs, example=torch.zeros(1, 1, 16, 16), allow_uncalibrated=True, memory_budget_mb=256
    )
    for pinned in (False, True):
        for subnet in range(2):
            assert engine.pin(subnet) if pinned else True
            view = digits.subnet(specs[subnet])
            try:
                with torch.inference_mode():
                    expected = view(torch.zeros(0, 1, 16, 16))
            except RuntimeError:
                with pytest.raises(InvalidRequest, match="N >= 1"):
                    engine(torch.zeros(0, 1, 16, 16), subnet)
            else:
                assert engine(torch.zeros(0, 1, 16, 16), subnet).shape == expected.shape
