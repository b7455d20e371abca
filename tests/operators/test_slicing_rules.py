"""Operators equal hand-pruned modules: smaller modules that got the first rows and columns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.errors import InsertError, SpecError
from subnetact.operators import (
    AttentionSlice,
    Elastic,
    ElasticAttribute,
    ElasticKernel,
    KernelConv2d,
    LayerNormSlice,
    PerWidthBatchNorm2d,
    PerWidthNorm,
    WeightSlice,
)


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def supernet_of(module: nn.Module, entry: Elastic | dict[str, Elastic], **choices: list[int]) -> Supernet:
    """Return a supernet whose dimensions are the given choices, of a module inside a Sequential."""
    axes = [Axis.uniform(name, ["it"], values) for name, values in choices.items()]
    space = SubnetSpace("one", axes, lambda v: {name: v[name][0] for name in choices})
    if isinstance(entry, Elastic):
        return insert_(nn.Sequential(module).eval(), space, {"0": entry})
    return insert_(module, space, entry)


def same(supernet: Supernet, x: Tensor, expected: Tensor, **sizes: int) -> nn.Module:
    """Compare a subnet, its extraction and its training forward with the expected output."""
    spec = supernet.space.spec(**sizes)
    view = supernet.subnet(spec)
    torch.testing.assert_close(view(x), expected, rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(supernet.extract(spec)(x), expected, rtol=5e-5, atol=5e-5)
    supernet.train()
    torch.testing.assert_close(supernet(x, subnet=spec), expected, rtol=5e-5, atol=5e-5)
    supernet.eval()
    storages = {p.untyped_storage().data_ptr() for p in supernet.parameters()}
    assert {p.untyped_storage().data_ptr() for p in view.parameters()} <= storages
    return view


# -- transposed weights ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "shape"),
    [(nn.ConvTranspose1d, (7,)), (nn.ConvTranspose2d, (5, 6)), (nn.ConvTranspose3d, (3, 4, 3))],
)
def test_transposed_convolutions_slice_inputs_first(cls: type[Any], shape: tuple[int, ...]) -> None:
    full = randomised(cls(6, 8, 3, stride=2, padding=1, output_padding=1))
    supernet = supernet_of(copy.deepcopy(full), WeightSlice.on(in_="i", out="o"), i=[4, 6], o=[3, 8])
    pruned = cls(4, 3, 3, stride=2, padding=1, output_padding=1).eval()
    pruned.load_state_dict({"weight": full.weight[:4, :3], "bias": full.bias[:3]})
    x = torch.randn(2, 4, *shape)
    view = same(supernet, x, pruned(x), i=4, o=3)
    assert (view[0].in_channels, view[0].out_channels) == (4, 3)


def test_grouped_transposed_convolutions_lose_whole_groups() -> None:
    full = randomised(nn.ConvTranspose2d(8, 12, 2, groups=4))
    supernet = supernet_of(copy.deepcopy(full), WeightSlice.on(in_="i"), i=[4, 8])
    pruned = nn.ConvTranspose2d(4, 6, 2, groups=2).eval()
    pruned.load_state_dict({"weight": full.weight[:4], "bias": full.bias[:6]})
    x = torch.randn(2, 4, 3, 3)
    view = same(supernet, x, pruned(x), i=4)
    assert (view[0].groups, view[0].out_channels) == (2, 6)
    with pytest.raises(SpecError, match=r"in_=3 is not legal; choose from 2 to 8 in steps of 2"):
        supernet_of(copy.deepcopy(full), WeightSlice.on(in_="i"), i=[3, 8]).subnet(
            supernet_of(copy.deepcopy(full), WeightSlice.on(in_="i"), i=[3, 8]).space.smallest()
        )


def test_conv1d_of_hugging_face_slices_the_transposed_weight() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    full = randomised(Conv1D(10, 6))
    supernet = supernet_of(copy.deepcopy(full), WeightSlice.on(in_="i", out="o"), i=[4, 6], o=[7, 10])
    x = torch.randn(2, 3, 4)
    view = same(supernet, x, F.linear(x, full.weight[:4, :7].T, full.bias[:7]), i=4, o=7)
    assert view[0].nf == 7


def test_embeddings_lose_columns() -> None:
    full = randomised(nn.Embedding(11, 8, padding_idx=0))
    supernet = supernet_of(copy.deepcopy(full), WeightSlice.on(out="o"), o=[5, 8])
    x = torch.randint(11, (2, 6))
    view = same(supernet, x, full.weight[:, :5][x], o=5)
    assert view[0].embedding_dim == 5
    with pytest.raises(InsertError, match="every row of an embedding belongs to one index"):
        supernet_of(nn.Embedding(11, 8), WeightSlice.on(in_="i"), i=[5, 8])


def test_a_weight_with_a_companion_is_refused() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 8)
            self.gain = nn.Parameter(torch.ones(8))

    with pytest.raises(InsertError, match="has no rule for gain"):
        supernet_of(Scaled(), WeightSlice.on(out="o"), o=[4, 8])


# -- norms ------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float, axis: int = -1) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return x / (x.square().mean(axis, keepdim=True) + eps).sqrt() * weight.reshape(shape)


def of_timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = pytest.importorskip("timm.layers")
        return getattr(layers, name)(8, eps=1e-6)  # type: ignore[no-any-return]

    return make


def of_transformers(model: str, name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        pytest.importorskip("transformers")
        module = __import__(f"transformers.models.{model}.modeling_{model}", fromlist=[name])
        return getattr(module, name)(8, eps=1e-6)  # type: ignore[no-any-return]

    return make


@pytest.mark.parametrize(
    ("make", "axis", "plus"),
    [
        (lambda: nn.RMSNorm(8, eps=1e-6), -1, 0),
        (of_transformers("llama", "LlamaRMSNorm"), -1, 0),
        (of_transformers("t5", "T5LayerNorm"), -1, 0),
        (of_transformers("gemma", "GemmaRMSNorm"), -1, 1),
        (of_transformers("gemma2", "Gemma2RMSNorm"), -1, 1),
        (of_timm("RmsNorm"), -1, 0),
        (of_timm("RmsNormFp32"), -1, 0),
        (of_timm("RmsNorm2d"), 1, 0),
    ],
)
def test_rms_norms_average_over_the_features_that_are_left(
    make: Callable[[], nn.Module], axis: int, plus: int
) -> None:
    full = randomised(make())
    supernet = supernet_of(copy.deepcopy(full), LayerNormSlice.on(features="w"), w=[3, 8])
    x = torch.randn(2, 3, 4, 4) if axis == 1 else torch.randn(2, 5, 3)
    same(supernet, x, rms(x, full.weight[:3] + plus, 1e-6, axis), w=3)
    x = torch.randn(2, 8, 4, 4) if axis == 1 else torch.randn(2, 5, 8)
    same(supernet, x, full(x), w=8)


class CentredRMSNorm(nn.Module):
    """It subtracts the mean, whatever its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight)


class Hungry(CentredRMSNorm):
    """Finds no memory."""

    def forward(self, x: Tensor) -> Tensor:
        raise MemoryError


def test_a_norm_that_finds_no_memory_is_not_called_another_norm() -> None:
    with pytest.raises(MemoryError):
        supernet_of(Hungry(), LayerNormSlice.on(features="n"), n=[4, 8])


class FullWidthRMSNorm(CentredRMSNorm):
    """It divides by the width of the full network."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) / 8 + 1e-6).sqrt() * self.weight


class Scale(CentredRMSNorm):
    """It has a weight as a norm has, and normalises nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("cls", [CentredRMSNorm, FullWidthRMSNorm, Scale, lambda: nn.Linear(8, 8)])
def test_what_only_looks_like_an_rms_norm_is_refused(cls: Callable[[], nn.Module]) -> None:
    with pytest.raises(InsertError, match="only GroupNorm, and LayerNorm and RMSNorm over one axis"):
        supernet_of(cls(), LayerNormSlice.on(features="w"), w=[3, 8])


def test_rms_norm_without_weight_and_over_several_axes() -> None:
    supernet = supernet_of(nn.RMSNorm(8, elementwise_affine=False), LayerNormSlice.on(features="w"), w=[3, 8])
    x = torch.randn(2, 3)
    same(supernet, x, rms(x, torch.ones(3), torch.finfo(torch.float32).eps), w=3)
    with pytest.raises(InsertError, match="over several axes"):
        supernet_of(nn.RMSNorm((4, 8)), LayerNormSlice.on(features="w"), w=[3, 8])


@pytest.mark.parametrize("groups", [4, 1])
def test_group_norm_keeps_whole_groups(groups: int) -> None:
    full = randomised(nn.GroupNorm(groups, 8))
    supernet = supernet_of(copy.deepcopy(full), LayerNormSlice.on(features="w"), w=[4, 8])
    x = torch.randn(2, 4, 3, 3)
    kept = 2 if groups == 4 else 1
    view = same(supernet, x, F.group_norm(x, kept, full.weight[:4], full.bias[:4]), w=4)
    assert (view[0].num_groups, view[0].num_channels) == (kept, 4)


def test_group_norm_refuses_part_of_a_group() -> None:
    supernet = supernet_of(nn.GroupNorm(4, 8), LayerNormSlice.on(features="w"), w=[3, 8])
    with pytest.raises(SpecError, match=r"features=3 is not legal; choose from 2 to 8 in steps of 2"):
        supernet.subnet(supernet.space.smallest())


# -- parameters and numbers of modules with submodules ----------------------------------------------------


class Scaled(nn.Module):
    """A block with scales beside its layers, as in ConvNeXt."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 1)
        self.drop = nn.Dropout(0.5)
        self.gamma = nn.Parameter(torch.ones(width))
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) * self.layer_scale
        return (x.permute(0, 2, 3, 1) * self.gamma).permute(0, 3, 1, 2)


def test_own_parameters_of_a_block_with_layers() -> None:
    full = randomised(Scaled())
    block = ElasticAttribute.on(gamma="w", **{"layer_scale.0": "w"})
    elastic = {"0": block, "0.conv": WeightSlice.on(out="w")}
    supernet = supernet_of(nn.Sequential(copy.deepcopy(full)), elastic, w=[5, 8])
    pruned = Scaled(5)
    pruned.load_state_dict({name: t[:5] for name, t in full.state_dict().items()})
    x = torch.randn(2, 3, 4, 4)
    view = same(supernet, x, pruned(x), w=5)
    assert view[0].layer_scale.shape == (5, 1, 1)
    assert list(supernet.state_dict()) == [f"0.{name}" for name in full.state_dict()]


class Tokens(nn.Module):
    """A network with parameters and a number of its own, as timm's VisionTransformer."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, width))
        self.buckets = nn.Parameter(torch.zeros(16, heads))
        self.heads = heads
        self.embed = nn.Linear(5, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.embed(x)], 1) + self.pos_embed
        heads = x.unflatten(-1, (self.heads, -1)).softmax(-1) * self.buckets.sum(0)[:, None]
        return self.head(heads.flatten(2).mean(1))


def test_own_parameters_and_numbers_of_the_network_itself() -> None:
    full = randomised(Tokens())
    elastic = {
        "": ElasticAttribute.on(cls_token="w", pos_embed="w", buckets="h", heads="h"),
        "embed": WeightSlice.on(out="w"),
        "head": WeightSlice.on(in_="w"),
    }
    supernet = supernet_of(copy.deepcopy(full), elastic, w=[4, 6, 8], h=[2, 4])
    pruned = Tokens(6, 2).eval()
    cut = {"buckets": (slice(None), slice(2)), "head.weight": (slice(None), slice(6)), "head.bias": ...}
    state = {n: t[cut.get(n, (..., slice(6)))] for n, t in full.state_dict().items() if "embed." not in n}
    state |= {f"embed.{n}": full.embed.state_dict()[n][:6] for n in ("weight", "bias")}
    pruned.load_state_dict(state)
    x = torch.randn(2, 3, 5)
    view = same(supernet, x, pruned(x), w=6, h=2)
    assert isinstance(view, Tokens)
    assert view.heads == 2
    same(supernet, x, full(x), w=8, h=4)


def test_training_reaches_dropout_of_a_module_with_elastic_numbers() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    supernet = supernet_of(Dropping(), ElasticAttribute.on(heads="h"), h=[2, 4])
    x = torch.ones(100)
    assert torch.equal(supernet(x), x)
    assert (supernet.train()(x) == 0).any()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"missing": "w"}, r"not \['missing'\]; the module has heads, cls_token, pos_embed, buckets"),
        ({"cls_token.3": "w"}, r"not \['cls_token.3'\]"),
        ({"training": "w"}, r"not \['training'\]"),
    ],
)
def test_attributes_that_are_neither_numbers_nor_parameters(parts: dict[str, str], message: str) -> None:
    with pytest.raises(InsertError, match=message):
        supernet_of(Tokens(), {"": ElasticAttribute.on(**parts)}, w=[4, 8])


# -- nn.MultiheadAttention ------------------------------------------------------------------------------


class Attending(nn.Module):
    """A network that calls attention with whatever options its test sets."""

    def __init__(self, batch_first: bool, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first)
        self.options: dict[str, Any] = {}
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, **self.options)
        if weights is not None:
            self.weights.append(weights)
        return out


def without_head(attention: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """Return the attention whose third head has no value and no way out."""
    zeroed = copy.deepcopy(attention)
    with torch.no_grad():
        zeroed.in_proj_weight[-4:] = 0
        if zeroed.in_proj_bias is not None:
            zeroed.in_proj_bias[-4:] = 0
        zeroed.out_proj.weight[:, 8:] = 0
    return zeroed


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": False, "attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True},
        {"need_weights": True, "key_padding_mask": torch.tensor([[False] * 4 + [True]] * 2)},
        {"need_weights": False, "attn_mask": torch.eye(5), "key_padding_mask": torch.arange(10.0).view(2, 5)},
    ],
)
def test_attention_keeps_its_first_heads(batch_first: bool, options: dict[str, Any]) -> None:
    full = randomised(Attending(batch_first, bias="attn_mask" not in options))
    full.options = options
    elastic = {"attention": AttentionSlice.on(out="h"), "attention.out_proj": WeightSlice.on(in_="h")}
    supernet = supernet_of(copy.deepcopy(full), elastic, h=[4, 8, 12])
    x = torch.randn(2, 5, 12) if batch_first else torch.randn(5, 2, 12)
    zeroed = without_head(full.attention)
    with torch.no_grad():
        view = same(supernet, x, zeroed(x, x, x, **options)[0], h=8)
        same(supernet, x, full(x), h=12)
    assert view.attention.num_heads == 2
    assert isinstance(view.attention, nn.MultiheadAttention)


def test_attention_weights_are_those_of_the_kept_heads() -> None:
    full = randomised(Attending(True))
    full.options = {"need_weights": True, "average_attn_weights": False}
    elastic = {"attention": AttentionSlice.on(out="h"), "attention.out_proj": WeightSlice.on(in_="h")}
    supernet = supernet_of(copy.deepcopy(full), elastic, h=[4, 8, 12])
    x = torch.randn(2, 5, 12)
    full(x)
    view = supernet.subnet(supernet.space.spec(h=8))
    view(x)
    torch.testing.assert_close(view.weights[-1], full.weights[0][:, :2])


def test_a_causal_hint_without_a_mask_is_refused_as_torch_does() -> None:
    full = randomised(Attending(True))
    elastic = {"attention": AttentionSlice.on(out="h"), "attention.out_proj": WeightSlice.on(in_="h")}
    supernet = supernet_of(copy.deepcopy(full), elastic, h=[4, 8, 12])
    for network in (full, supernet.subnet(supernet.space.spec(h=8))):
        network.options = {"need_weights": False, "is_causal": True}
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            network(torch.randn(2, 5, 12))


def test_attention_with_narrower_inputs_is_a_smaller_attention() -> None:
    full = randomised(Attending(True))
    elastic = {
        "attention": AttentionSlice.on(out="h", in_="h"),
        "attention.out_proj": WeightSlice.on(out="h", in_="h"),
    }
    supernet = supernet_of(copy.deepcopy(full), elastic, h=[4, 8, 12])
    pruned = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    rows = torch.cat([torch.arange(i, i + 8) for i in (0, 12, 24)])
    pruned.load_state_dict(
        {
            "in_proj_weight": full.attention.in_proj_weight[rows, :8],
            "in_proj_bias": full.attention.in_proj_bias[rows],
            "out_proj.weight": full.attention.out_proj.weight[:8, :8],
            "out_proj.bias": full.attention.out_proj.bias[:8],
        }
    )
    x = torch.randn(2, 5, 8)
    same(supernet, x, pruned(x, x, x)[0], h=8)
    same(supernet, x[0], pruned(x[0], x[0], x[0])[0], h=8)


def test_the_fused_kernel_of_encoder_layers_does_not_see_a_sliced_attention() -> None:
    full = randomised(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True))
    elastic = {"self_attn": AttentionSlice.on(out="h"), "self_attn.out_proj": WeightSlice.on(in_="h")}
    supernet = supernet_of(copy.deepcopy(full), elastic, h=[8, 12])
    zeroed = copy.deepcopy(full)
    zeroed.self_attn = without_head(full.self_attn)
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        torch.testing.assert_close(supernet.subnet(supernet.space.spec(h=8))(x), zeroed(x))


def test_attention_of_other_kinds_is_refused() -> None:
    with pytest.raises(InsertError, match="kdim and vdim are not supported; project to embed_dim before"):
        supernet_of(nn.MultiheadAttention(12, 3, kdim=6), AttentionSlice.on(out="h"), h=[4, 12])


@pytest.mark.parametrize("masked", ["nothing", "positions", "heads", "keys", "both", "one example"])
@pytest.mark.parametrize("options", [["bias_kv"], ["zero_attn"], ["bias_kv", "zero_attn"]])
def test_keys_that_an_attention_appends_belong_to_its_heads(options: list[str], masked: str) -> None:
    full = Attending(True)
    appends = {f"add_{option}": True for option in options}
    full.attention = randomised(nn.MultiheadAttention(12, 3, batch_first=True, **appends))
    elastic = {"attention": AttentionSlice.on(out="h"), "attention.out_proj": WeightSlice.on(in_="h")}
    supernet = supernet_of(copy.deepcopy(full), elastic, h=[4, 8, 12])
    zeroed = copy.deepcopy(full.attention)
    with torch.no_grad():
        zeroed.out_proj.weight[:, 8:] = 0
    x = torch.randn(2, 5, 12)
    positions, keys = torch.ones(5, 5).triu(1).bool(), torch.zeros(2, 5).bool()
    keys[0, 3:] = True
    heads = torch.rand(6, 5, 5) < 0.2
    masks: dict[str, dict[str, Any]] = {
        "nothing": {},
        "positions": {"attn_mask": positions},
        "heads": {"attn_mask": heads},
        "keys": {"key_padding_mask": keys},
        "both": {"attn_mask": positions, "key_padding_mask": keys},
        "one example": {"key_padding_mask": keys[0], "attn_mask": positions},
    }
    given, mask = x[0] if masked == "one example" else x, masks[masked]
    narrowed = dict(mask)
    if masked == "heads":
        narrowed["attn_mask"] = heads.unflatten(0, (2, 3))[:, :2].flatten(0, 1)
    for size, expected, own in ((12, full.attention, mask), (8, zeroed, narrowed)):
        view = supernet.subnet(supernet.space.spec(h=size)).attention
        for weights in (True, False):
            wanted = expected(given, given, given, **mask, need_weights=weights, average_attn_weights=False)
            result = view(given, given, given, **own, need_weights=weights, average_attn_weights=False)
            torch.testing.assert_close(result[0], wanted[0], rtol=5e-5, atol=5e-5)
            if weights:
                torch.testing.assert_close(result[1], wanted[1].narrow(-3, 0, size // 4))


def test_a_number_that_a_configuration_states() -> None:
    class Settings:
        def __init__(self) -> None:
            self.heads = 4
            self.name = "settings"

    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Settings()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[..., : 2 * self.config.heads].unflatten(-1, (self.config.heads, 2))

    full = randomised(Configured())
    supernet = supernet_of(copy.deepcopy(full), {"": ElasticAttribute.on(**{"config.heads": "h"})}, h=[2, 4])
    x = torch.randn(3, 8)
    view = same(supernet, x, full.linear(x)[..., :4].unflatten(-1, (2, 2)), h=2)
    assert (view.config.heads, view.config.name) == (2, "settings")
    same(supernet, x, full(x), h=4)
    with pytest.raises(InsertError, match=r"not \['config.name'\]"):
        supernet_of(Configured(), {"": ElasticAttribute.on(**{"config.name": "h"})}, h=[2, 4])


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
def test_operators_whose_subnets_have_modules_of_another_class_give_the_own_module_back() -> None:
    modules = (PerWidthBatchNorm2d(8, [4, 8]), KernelConv2d(8, [3, 5]), nn.MultiheadAttention(8, 2))
    entries = (
        PerWidthNorm.on(channels="w", position="p"),
        ElasticKernel.on(channels="w"),
        AttentionSlice.on(out="w"),
    )
    for module, entry in zip(modules, entries, strict=True):
        supernet = supernet_of(module, entry, w=[4, 8], p=[1, 2])
        assert supernet.subnet(supernet.space.largest())[0] is not module
        assert supernet.remove()[0] is module
