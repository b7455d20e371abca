"""The costs of subnets, against what hooks, torch's own counter and upstream count."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from small_families import small_inputs, small_supernet
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from written_networks import Written

import subnetact
import subnetact.costs
from ofa_adapters import families, load
from subnetact import Axis, SubnetSpace, insert_
from subnetact.errors import ForeignSpec, SpecError
from subnetact.operators import ElasticAttribute, WeightSlice
from subnetact.supernet.supernet import Supernet

GOLDEN = Path(__file__).parent.parent / "golden"


def hooked(network: nn.Module, *inputs: Tensor) -> tuple[int, int, int]:
    """(parameters, MACs of convolutions and linear layers, bytes that modules with parameters write)."""
    macs = written = 0

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        nonlocal macs, written
        outputs = output if isinstance(output, tuple) else (output,)
        written += sum(t.numel() * t.element_size() for t in outputs)
        if isinstance(module, nn.Conv2d):
            macs += output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            macs += output.numel() * module.in_features

    for module in network.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(hook)
    with torch.no_grad():
        network(*inputs)
    return sum(p.numel() for p in network.parameters()), macs, written


@pytest.mark.parametrize("family", families())
def test_costs_are_what_hooks_count(family: str) -> None:
    supernet, x = small_supernet(family), next(iter(small_inputs(family, 1).values()))
    model = subnetact.costs.CostModel(supernet, x)
    for spec in supernet.space.sample(7, 5):
        parameters, macs, written = hooked(supernet.extract(spec), x)
        cost = model(spec)
        layers = cost.macs - cost.product_macs
        assert (cost.parameters, layers, cost.activation_bytes) == (parameters, macs, written)
        assert cost.weight_bytes == 4 * parameters
        assert (cost.product_macs > 0) == (family in ("autoformer", "dynabert", "hydravit"))


@pytest.mark.parametrize("family", ["ofa_resnet50", "ofa_mbv3", "ofa_proxyless"])
def test_costs_are_upstreams_counts_at_published_sizes(family: str) -> None:
    counts = json.loads((GOLDEN / family / "full_size_counts.json").read_text())
    with torch.device("meta"):
        supernet = load(family, None, **counts["constructor"])
    models: dict[int, subnetact.costs.CostModel] = {}
    for case in counts["cases"]:
        side = case["image_size"]
        if side not in models:
            models[side] = subnetact.costs.CostModel(supernet, torch.empty(1, 3, side, side))
        cost = models[side](supernet.space.parse(case["config"]))
        assert (cost.parameters, cost.macs) == (case["params"], case["conv_linear_macs"])


def test_parameters_are_autoformers_own_count_and_products_follow_from_the_heads() -> None:
    counts = json.loads((GOLDEN / "autoformer" / "full_size_counts.json").read_text())
    cases = [case for case in counts["cases"] if case["model"] == "AutoFormer-T"]
    supernet = load("autoformer", None, **cases[0]["constructor"])
    model = subnetact.costs.CostModel(supernet, torch.empty(1, 3, 224, 224))
    assert cases
    for case in cases:
        spec = supernet.space.parse(case["config"])
        assert model(spec).parameters == case["sampled_params_numel"]
        # Per head: scores and weighted sum over 64 features and the 30 lines that patches lie on, and the
        # products with the two tables of 60 relative positions; 197 tokens.
        heads = sum(case["config"]["num_heads"][: case["config"]["layer_num"]])
        assert model(spec).product_macs == heads * 2 * (197 * 197 * (64 + 30) + 197 * 64 * 60)


def test_cost_scales_with_the_batch_and_refuses_what_it_cannot_count(digits: Supernet) -> None:
    spec = digits.space.sample(3)
    model = subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))
    one, four = model(spec), model(spec, batch_size=4)
    assert (four.macs, four.activation_bytes) == (4 * one.macs, 4 * one.activation_bytes)
    bert = small_supernet("dynabert")
    of_text = subnetact.costs.CostModel(bert, torch.empty(1, 11, dtype=torch.long))
    one_text, four_texts = (of_text(bert.space.largest(), n) for n in (1, 4))
    assert four_texts.product_macs == 4 * one_text.product_macs > 0
    assert (four.parameters, four.weight_bytes) == (one.parameters, one.weight_bytes)
    with pytest.raises(SpecError, match="batch_size"):
        model(spec, 0)
    with pytest.raises(ForeignSpec):
        model(small_supernet("ofa_mbv3").space.smallest())
    with pytest.raises(SpecError, match="does not run without data"):
        subnetact.costs.CostModel(digits, torch.empty(1, 3, 16, 16))


def tied() -> nn.Module:
    """Return one weight in three layers, and one vector twice in one module."""
    forward = lambda m, x: m.last(m.first(x) + m.inner(x)) * m.scale + m.shift  # noqa: E731
    vector = nn.Parameter(torch.ones(8))
    layers = {"first": (8, 8), "inner": nn.Sequential(nn.Linear(8, 8)), "last": (8, 8)}
    network: Any = Written(forward, **layers, scale=vector, shift=vector)
    network.inner[0].weight = network.last.weight = network.first.weight
    return network  # type: ignore[no-any-return]


@pytest.mark.parametrize("elastic", [True, False])
def test_a_tied_parameter_counts_once_for_each_way_in_which_it_is_sliced(elastic: bool) -> None:
    parts = {"first": "out", "inner.0": "out", "last": "in"} if elastic else {}
    supernet, x = one_width(tied(), parts), torch.randn(1, 8)
    model = subnetact.costs.CostModel(supernet, x)
    for spec in supernet.space.enumerate():
        parameters, macs, _ = hooked(supernet.extract(spec), x)
        cost = model(spec)
        assert (cost.parameters, cost.weight_bytes, cost.macs) == (parameters, 4 * parameters, macs)


def test_counting_leaves_the_supernet_as_it_was(digits: Supernet) -> None:
    before, hooks = digits.fingerprint(), [list(m._forward_hooks) for m in digits.network.modules()]
    x = torch.randn(2, 1, 16, 16)
    spec = digits.space.sample(1)
    with pytest.warns(subnetact.errors.UncalibratedSubnetWarning):
        y = digits(x, subnet=spec)
    subnetact.costs.CostModel(digits, torch.empty(1, 1, 16, 16))(spec)
    assert digits.fingerprint() == before
    assert torch.equal(digits(x, subnet=spec), y)
    assert [list(m._forward_hooks) for m in digits.network.modules()] == hooks


def test_products_of_attention_are_what_torch_counts_in_any_order_of_subnets() -> None:
    supernet, (x,) = small_supernet("autoformer"), small_inputs("autoformer", 1).values()
    rng = random.Random(3)
    model = subnetact.costs.CostModel(supernet, x)
    first = {}
    for spec in (supernet.space.sample(rng) for _ in range(10)):
        first[spec] = model(spec), model.vector(spec).tolist()
        # torch does not count the fused kernel of attention on the CPU.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            supernet.extract(spec)(x)
        assert model(spec).macs == counter.get_total_flops() // 2
        assert any("softmax" in name for name in model(spec).not_counted)
    again = subnetact.costs.CostModel(supernet, x)
    assert {spec: (again(spec), again.vector(spec).tolist()) for spec in reversed(first)} == first


class Crop(nn.Module):
    """Crops to a side that is an argument."""

    def forward(self, x: Tensor, side: int) -> Tensor:
        return x[..., :side, :side]


def repeated(m: Any, x: Tensor) -> Tensor:
    """Call one convolution twice, change the shape of its output in place, and give a keyword."""
    y, z = m.convolution(x), m.convolution(x)
    y.squeeze_(0)
    return m.crop(y, side=4) + m.crop(z, side=4).squeeze(0)  # type: ignore[no-any-return]


def test_a_module_that_is_called_twice_is_counted_twice_and_held_once() -> None:
    network = Written(repeated, convolution=nn.Conv2d(4, 4, 3, padding=1), crop=Crop())
    supernet = one_width(network, {"convolution": "out"}, (2, 4))
    model = subnetact.costs.CostModel(supernet, torch.empty(1, 4, 8, 8))
    for spec, width in ((supernet.space.largest(), 4), (supernet.space.smallest(), 2)):
        cost = model(spec)
        assert cost.macs == 2 * 8 * 8 * 9 * 4 * width
        assert cost.parameters == 9 * 4 * width + width
        assert cost.activation_bytes == 4 * 2 * 8 * 8 * width


def test_what_depends_on_a_setting_is_found_in_an_own_network() -> None:
    """The second convolution is on a map whose size is a setting."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.second(m.scale(m.first(x)))
        return y @ y.mT

    scale = Written(lambda m, x: x[..., : m.side, : m.side], side=32)
    network = Written(forward, first=nn.Conv2d(3, 8, 1), scale=scale, second=nn.Conv2d(8, 8, 3, padding=1))
    sides, widths = (8, 16, 24, 32), (2, 4, 8)
    axes = [Axis.uniform("side", ["all"], sides), Axis.uniform("width", ["all"], widths)]
    space = SubnetSpace("own", axes, lambda v: {"side": int(v["side"][0]), "width": int(v["width"][0])})
    described = {
        "first": WeightSlice.on(out="width"),
        "scale": ElasticAttribute.on(side="side"),
        "second": WeightSlice.on(in_="width"),
    }
    supernet = insert_(network.eval(), space, described)
    model = subnetact.costs.CostModel(supernet, torch.empty(1, 3, 32, 32))
    for spec in space.enumerate():
        (side,), (width,) = spec["side"], spec["width"]
        assert isinstance(side, int)
        assert isinstance(width, int)
        convolutions = 32 * 32 * 3 * width + side * side * 9 * width * 8
        assert model(spec).macs == convolutions + 8 * side**3


def test_a_forward_that_reads_values_is_refused_with_what_to_leave_out() -> None:
    class Masked(Written):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is not None and not mask.all():
                x = x * mask
            return self.outer(self.inner(x))  # type: ignore[no-any-return]

    supernet = one_width(Masked(print, inner=(4, 8), outer=(8, 4)), {"inner": "out", "outer": "in"})
    x, mask = torch.zeros(3, 4), torch.ones(3, 1)
    with pytest.raises(SpecError, match="leave out inputs whose values a forward reads"):
        subnetact.costs.CostModel(supernet, {"x": x, "mask": mask})
    cost = subnetact.costs.CostModel(supernet, {"x": x[None]})(supernet.space.smallest())
    assert cost.macs == 3 * (4 * 4 + 4 * 4)
    for nonsense in ({"x": 3}, "image", None, (3, "wide")):
        with pytest.raises(SpecError, match="example: "):
            subnetact.costs.CostModel(supernet, nonsense)


def test_a_transposed_convolution_is_a_layer_and_no_product_outside_layers() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 5, 2, stride=2))
    supernet = one_width(network, {"0": "out", "1": "in"}, [2, 4])
    cost = subnetact.costs.CostModel(supernet, torch.empty(1, 3, 8, 8))(supernet.space.smallest())
    assert cost.macs == 8 * 8 * 3 * 2 + 8 * 8 * 2 * 5 * 4
    assert cost.product_macs == 0


@pytest.mark.parametrize("moe", [False, True])
def test_a_decoder_counts_the_experts_that_a_token_chooses(moe: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **experts) if moe else transformers.Qwen3Config(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    example = {"input_ids": torch.arange(12).view(2, 6)}
    supernet = insert_(model, example=example, axes=("depth", "heads"), each_block=True)
    before = supernet.network.config.to_dict()
    space, tokens = supernet.space, 6
    model_cost = subnetact.costs.CostModel(supernet, example)
    for spec in (space.largest(), *(space.sample(seed) for seed in range(4))):
        layers = space.format(spec)
        macs = tokens * 24 * 32
        for i in range(3):
            own = layers.get(i, {})
            if "skip" in own:
                continue
            heads, pairs = own.get("num_attention_heads", 4), own.get("num_key_value_heads", 2)
            ffn = 3 * 24 * 40 * (2 if moe else 1) + (24 * 4 if moe else 0)
            attention = 2 * 24 * 6 * heads + 2 * 24 * 6 * pairs
            macs += tokens * (ffn + attention) + 2 * tokens**2 * 6 * heads
        found = model_cost(spec)
        assert found.macs == macs, str(spec)
        assert found.parameters == sum(p.numel() for p in supernet.extract(spec).parameters())
    assert supernet.network.config.to_dict() == before
