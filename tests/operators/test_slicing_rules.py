"""Operators equal hand-pruned modules: smaller modules that got the first rows and columns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written

from subnetact import SubnetSpec, Supernet, insert_
from subnetact.operators import AttentionSlice, Elastic, ElasticAttribute, LayerNormSlice, WeightSlice


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def supernet_of(module: nn.Module, entry: Elastic | dict[str, Elastic], **choices: list[int]) -> Supernet:
    """Return a supernet whose dimensions are the given choices, of a module inside a Sequential."""
    if isinstance(entry, Elastic):
        return insert_(nn.Sequential(module).eval(), space_of(**choices), {"0": entry})
    return insert_(module, space_of(**choices), entry)


def same(supernet: Supernet, x: Tensor, expected: Tensor, spec: SubnetSpec) -> Any:
    """Compare a subnet, its extraction and its training forward with the expected output."""
    view = supernet.subnet(spec)
    torch.testing.assert_close(view(x), expected, rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(supernet.extract(spec)(x), expected, rtol=5e-5, atol=5e-5)
    supernet.train()
    torch.testing.assert_close(supernet(x, subnet=spec), expected, rtol=5e-5, atol=5e-5)
    supernet.eval()
    storages = {p.untyped_storage().data_ptr() for p in supernet.parameters()}
    assert {p.untyped_storage().data_ptr() for p in view.parameters()} <= storages
    return view


class Rule(NamedTuple):
    """A layer, what follows which dimension, and what the smallest subnet computes with the full weights."""

    layer: Callable[[], nn.Module]
    entry: Elastic
    choices: dict[str, list[int]]
    x: Tensor
    narrow: tuple[int, int] | None
    """The axis along which the input of the smallest subnet is narrow, and how narrow."""
    pruned: Callable[[Any, Tensor], Tensor]
    attributes: dict[str, int]


def transposed(dims: int) -> Rule:
    kind, function = getattr(nn, f"ConvTranspose{dims}d"), getattr(F, f"conv_transpose{dims}d")
    return Rule(
        lambda: kind(6, 8, 3, stride=2, padding=1, output_padding=1),
        WeightSlice.on(in_="i", out="o"),
        {"i": [4, 6], "o": [3, 8]},
        torch.randn(2, 6, *(3, 4, 3)[:dims]),
        (1, 4),
        lambda full, x: function(x, full.weight[:4, :3], full.bias[:3], 2, 1, 1),
        {"in_channels": 4, "out_channels": 3},
    )


def conv1d_of_transformers() -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(10, 6)  # type: ignore[no-any-return]


def rms(x: Tensor, weight: Any, eps: float, axis: int = -1) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    return x / (x.square().mean(axis, keepdim=True) + eps).sqrt() * weight.reshape(shape)


def of_library(module: str, name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(pytest.importorskip(module), name)(8, eps=1e-6)


def rms_norm(layer: Callable[[], nn.Module], plus: int = 0, axis: int = -1) -> Rule:
    return Rule(
        layer,
        LayerNormSlice.on(features="w"),
        {"w": [3, 8]},
        torch.randn(2, 8, 4, 4) if axis == 1 else torch.randn(2, 5, 8),
        (axis, 3),
        lambda full, x: rms(x, full.weight[:3] + plus, 1e-6, axis),
        {},
    )


def group_norm(groups: int) -> Rule:
    kept = max(1, groups // 2)
    return Rule(
        lambda: nn.GroupNorm(groups, 8),
        LayerNormSlice.on(features="w"),
        {"w": [4, 8]},
        torch.randn(2, 8, 3, 3),
        (1, 4),
        lambda full, x: F.group_norm(x, kept, full.weight[:4], full.bias[:4]),
        {"num_groups": kept, "num_channels": 4},
    )


TRANSFORMERS = "transformers.models.{0}.modeling_{0}"
RULES: dict[str, Rule] = {
    **{f"ConvTranspose{dims}d": transposed(dims) for dims in (1, 2, 3)},
    "ConvTranspose2d in groups": Rule(
        lambda: nn.ConvTranspose2d(8, 12, 2, groups=4),
        WeightSlice.on(in_="i"),
        {"i": [4, 8]},
        torch.randn(2, 8, 3, 3),
        (1, 4),
        lambda full, x: F.conv_transpose2d(x, full.weight[:4], full.bias[:6], groups=2),
        {"groups": 2, "out_channels": 6},
    ),
    "Conv1D": Rule(
        conv1d_of_transformers,
        WeightSlice.on(in_="i", out="o"),
        {"i": [4, 6], "o": [7, 10]},
        torch.randn(2, 3, 6),
        (-1, 4),
        lambda full, x: F.linear(x, full.weight[:4, :7].T, full.bias[:7]),
        {"nf": 7},
    ),
    "Embedding": Rule(
        lambda: nn.Embedding(11, 8, padding_idx=0),
        WeightSlice.on(out="o"),
        {"o": [5, 8]},
        torch.randint(11, (2, 6)),
        None,
        lambda full, x: full.weight[:, :5][x],
        {"embedding_dim": 5},
    ),
    "RMSNorm": rms_norm(lambda: nn.RMSNorm(8, eps=1e-6)),
    "RMSNorm without weight": rms_norm(lambda: nn.RMSNorm(8, elementwise_affine=False))._replace(
        pruned=lambda _, x: rms(x, torch.ones(3), torch.finfo(torch.float32).eps)
    ),
    "LlamaRMSNorm": rms_norm(of_library(TRANSFORMERS.format("llama"), "LlamaRMSNorm")),
    "T5LayerNorm": rms_norm(of_library(TRANSFORMERS.format("t5"), "T5LayerNorm")),
    "GemmaRMSNorm": rms_norm(of_library(TRANSFORMERS.format("gemma"), "GemmaRMSNorm"), plus=1),
    "Gemma2RMSNorm": rms_norm(of_library(TRANSFORMERS.format("gemma2"), "Gemma2RMSNorm"), plus=1),
    "RmsNorm of timm": rms_norm(of_library("timm.layers", "RmsNorm")),
    "RmsNormFp32 of timm": rms_norm(of_library("timm.layers", "RmsNormFp32")),
    "RmsNorm2d of timm": rms_norm(of_library("timm.layers", "RmsNorm2d"), axis=1),
    "GroupNorm": group_norm(4),
    "GroupNorm of one group": group_norm(1),
}


@pytest.mark.parametrize("name", RULES)
def test_a_narrow_layer_computes_what_the_first_rows_and_columns_do(name: str) -> None:
    rule = RULES[name]
    full = randomised(rule.layer())
    supernet = supernet_of(copy.deepcopy(full), rule.entry, **rule.choices)
    same(supernet, rule.x, full(rule.x), supernet.space.largest())
    x = rule.x if rule.narrow is None else rule.x.narrow(rule.narrow[0], 0, rule.narrow[1])
    view = same(supernet, x, rule.pruned(full, x), supernet.space.smallest())
    assert {name: getattr(view[0], name) for name in rule.attributes} == rule.attributes


def test_a_norm_that_finds_no_memory_is_not_called_another_norm() -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError

    with pytest.raises(MemoryError):
        supernet_of(Hungry(), LayerNormSlice.on(features="n"), n=[4, 8])


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
    view = same(supernet, x, pruned(x), supernet.space.spec(w=6, h=2))
    assert isinstance(view, Tokens)
    assert view.heads == 2
    same(supernet, x, full(x), supernet.space.largest())


def test_a_number_that_a_configuration_states() -> None:
    read = lambda m, x: m.linear(x)[..., : 2 * m.config.heads].unflatten(-1, (m.config.heads, 2))  # noqa: E731
    config = SimpleNamespace(heads=4, name="settings")
    full: Any = randomised(Written(read, linear=(8, 8), config=config))
    supernet = supernet_of(copy.deepcopy(full), {"": ElasticAttribute.on(**{"config.heads": "h"})}, h=[2, 4])
    x, space = torch.randn(3, 8), supernet.space
    view = same(supernet, x, full.linear(x)[..., :4].unflatten(-1, (2, 2)), space.smallest())
    assert (view.config.heads, view.config.name) == (2, "settings")
    same(supernet, x, full(x), space.largest())


def attending(**options: Any) -> nn.Module:
    attention = nn.MultiheadAttention(12, 3, **{"batch_first": True, **options})
    return randomised(Written(lambda m, x: m.attention(x, x, x)[0], attention=attention))


def heads_of(full: nn.Module) -> Supernet:
    elastic = {"attention": AttentionSlice.on(out="h"), "attention.out_proj": WeightSlice.on(in_="h")}
    return supernet_of(copy.deepcopy(full), elastic, h=[4, 8, 12])


KINDS: list[dict[str, bool]] = [
    *({}, {"batch_first": False}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}),
    {"add_bias_kv": True, "add_zero_attn": True},
]


@pytest.mark.parametrize(
    "masked", ["nothing", "numbers", "positions", "heads", "keys", "both", "one example"]
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_attention_keeps_its_first_heads(kind: dict[str, bool], masked: str) -> None:
    full: Any = attending(**kind)
    supernet = heads_of(full)
    zeroed = copy.deepcopy(full.attention)
    with torch.no_grad():
        zeroed.out_proj.weight[:, 8:] = 0
    x = torch.randn(2, 5, 12)
    positions, keys = torch.ones(5, 5).triu(1).bool(), torch.zeros(2, 5).bool()
    keys[0, 3:] = True
    heads = torch.rand(6, 5, 5) < 0.2
    mask: dict[str, Any] = {
        "nothing": {},
        "numbers": {"attn_mask": torch.eye(5), "key_padding_mask": torch.arange(10.0).view(2, 5)},
        "positions": {"attn_mask": positions},
        "heads": {"attn_mask": heads},
        "keys": {"key_padding_mask": keys},
        "both": {"attn_mask": positions, "key_padding_mask": keys},
        "one example": {"key_padding_mask": keys[0], "attn_mask": positions},
    }[masked]
    narrowed = dict(mask)
    if masked == "heads":
        narrowed["attn_mask"] = heads.unflatten(0, (2, 3))[:, :2].flatten(0, 1)
    if masked == "one example":
        x = x[0]
    elif not kind.get("batch_first", True):
        x = x.transpose(0, 1)
    for size, original, own in ((12, full.attention, mask), (8, zeroed, narrowed)):
        spec = supernet.space.spec(h=size)
        for network in (supernet.subnet(spec), supernet.extract(spec)):
            assert network.attention.num_heads == size // 4
            for weights in (True, False):
                options = {"need_weights": weights, "average_attn_weights": False}
                expected, result = (
                    original(x, x, x, **mask, **options),
                    network.attention(x, x, x, **own, **options),
                )
                torch.testing.assert_close(result[0], expected[0], rtol=5e-5, atol=5e-5)
                if weights:
                    torch.testing.assert_close(result[1], expected[1].narrow(-3, 0, size // 4))


def test_a_causal_hint_without_a_mask_is_refused_as_torch_does() -> None:
    full, x = attending(), torch.randn(2, 5, 12)
    supernet = heads_of(full)
    for network in (full, supernet.subnet(supernet.space.spec(h=8))):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            network.attention(x, x, x, need_weights=False, is_causal=True)


def test_attention_with_narrower_inputs_is_a_smaller_attention() -> None:
    full: Any = attending()
    both = {"out": "h", "in_": "h"}
    elastic = {"attention": AttentionSlice.on(**both), "attention.out_proj": WeightSlice.on(**both)}
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
    for x in (torch.randn(2, 5, 8), torch.randn(5, 8)):
        same(supernet, x, pruned(x, x, x)[0], supernet.space.spec(h=8))
