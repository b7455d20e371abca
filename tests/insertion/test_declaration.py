"""What transformers declare: groups and blocks that are found in them, and subnets that are right by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from written_networks import Written, seeded

from subnetact.insertion.declaration import declared
from subnetact.insertion.description import Description
from subnetact.insertion.insert import describe, insert_
from subnetact.supernet.supernet import Supernet

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}
TEXT = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAIRS = {"num_key_value_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 8}


def model_of(name: str, config: str, **settings: Any) -> nn.Module:
    """Return a random model whose biases and scales are random, too."""
    torch.manual_seed(0)
    return shaken(getattr(transformers, name)(getattr(transformers, config)(**settings)).eval())


def shaken(model: Any) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model  # type: ignore[no-any-return]


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def vision_transformer() -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4, "num_classes": 5}
    return shaken(timm.models.VisionTransformer(**sizes).eval())


def text(name: str, config: str, **more: Any) -> Any:
    return lambda: model_of(name, config, **SIZES, **TEXT, **more), tokens


MODELS: Mapping[str, Any] = {
    # name -> (model, example), block, the layer that reads all heads, the layer that reads all neurons
    "bert": (
        *text("BertForSequenceClassification", "BertConfig"),
        "bert.encoder.layer.{}", "attention.output.dense", "output.dense",
    ),
    "vit": (
        lambda: model_of("ViTForImageClassification", "ViTConfig", **SIZES, **IMAGES),
        images, "vit.layers.{}", "attention.o_proj", "mlp.fc2",
    ),
    "gpt2": (
        lambda: model_of(
            "GPT2LMHeadModel", "GPT2Config", n_embd=48, n_layer=4, n_head=4, n_inner=80, n_positions=64,
            vocab_size=64, bos_token_id=1, eos_token_id=2,
        ),
        tokens, "transformer.h.{}", "attn.c_proj", "mlp.c_proj",
    ),
    "opt": (
        lambda: model_of(
            "OPTForCausalLM", "OPTConfig", hidden_size=48, num_hidden_layers=4, num_attention_heads=4,
            ffn_dim=80, word_embed_proj_dim=48, **TEXT,
        ),
        tokens, "model.decoder.layers.{}", "self_attn.out_proj", "fc2",
    ),
    "phi3": (
        *text("Phi3ForCausalLM", "Phi3Config", **PAIRS),
        "model.layers.{}", "self_attn.o_proj", "mlp.down_proj",
    ),
    "timm": (
        vision_transformer,
        lambda: images()["pixel_values"], "blocks.{}", "attn.proj", "mlp.fc2",
    ),
}  # fmt: skip


class Skipped(nn.Module):
    """The identity in the place of a block, with the block's attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_idx"):
            if hasattr(block, name):
                setattr(self, name, getattr(block, name))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def call(model: nn.Module, example: Any) -> Tensor:
    with torch.no_grad():
        output = model(**example) if isinstance(example, dict) else model(example)
    return output if isinstance(output, Tensor) else output[0]


def by_hand(model: nn.Module, names: tuple[str, str, str], sizes: Mapping[str, int]) -> nn.Module:
    """Return the model without what a subnet does not use.

    Unused heads and neurons are zero where they are read, skipped blocks are identities.
    """
    path, out, down = names
    pruned = copy.deepcopy(model)
    for i in range(4):
        block = path.format(i)
        for layer, kind in ((out, "heads"), (down, "ffn")):
            name = next((n for n in sizes if n.startswith(f"{block}.") and n.endswith(kind)), None)
            if name is None:
                continue
            weight = pruned.get_submodule(f"{block}.{layer}").weight
            transposed = type(pruned.get_submodule(f"{block}.{layer}")).__name__ == "Conv1D"
            columns = weight.data if transposed else weight.data.T
            full = sizes[f"{name} in full"]
            columns[len(columns) // full * sizes[name] :] = 0
        if sizes.get(f"{block}.keep") == 0:
            stack, _, number = block.rpartition(".")
            pruned.get_submodule(stack)[int(number)] = Skipped(pruned.get_submodule(block))
    return pruned


def sizes_of(description: Description, supernet: Supernet, spec: Any) -> dict[str, int]:
    space = supernet.space
    sizes = dict(zip(space.dimensions, space.resolve(spec), strict=True))
    return sizes | {f"{name} in full": group.full for name, group in description.groups.items()}


@pytest.mark.parametrize("name", MODELS)
def test_subnets_of_a_transformer_equal_the_model_pruned_by_hand(name: str) -> None:
    make, example, *names = MODELS[name]
    model, x = make(), example()
    original, expected = copy.deepcopy(model), call(model, x)
    axes = ("depth", "ffn", "heads")
    choices = (0.25, 0.5, 0.75, 1.0)
    description = describe(model, x, axes=axes, choices=choices, each_block=True, proof=False)
    assert {group.axis for group in description.groups.values()} == {"ffn", "heads"}
    assert len(description.groups) == 8
    assert len(description.stages) in (3, 4)
    torch.testing.assert_close(call(model, x), expected, rtol=0, atol=0)

    supernet = insert_(model, description, example=x)
    space = supernet.space
    torch.testing.assert_close(call(supernet.subnet(space.largest()), x), expected, rtol=1e-5, atol=1e-5)
    rng = random.Random(0)
    for spec in (space.smallest(), *(space.sample(rng) for _ in range(9))):
        found = call(supernet.subnet(spec), x)
        torch.testing.assert_close(found, call(supernet.extract(spec), x), rtol=5e-5, atol=5e-5)
        pruned = by_hand(original, tuple(names), sizes_of(description, supernet, spec))
        torch.testing.assert_close(found, call(pruned, x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, expected, atol=1e-4)
    count = sum(p.numel() for p in supernet.extract(space.smallest()).parameters())
    assert count <= 0.7 * sum(p.numel() for p in original.parameters())


class Attention(nn.Module):
    """An attention whose code takes the width of a head from the width of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, x.shape[-1] // 4)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        return self.proj((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(*x.shape))


def test_an_attention_that_cannot_lose_heads_is_refused_with_the_reason() -> None:
    blocks = (Written(lambda m, x: x + m.attention(x), attention=Attention()) for _ in range(2))
    model = nn.Sequential(*blocks).eval()
    groups, _, refused, _ = declared(model, torch.randn(2, 3, 16))
    assert not groups
    assert "attention (Attention): shape '[2, 3, 16]' is invalid" in refused["0.attention.heads"]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("gated", [False, True])
def test_heads_go_though_a_layer_or_a_block_has_one_number_per_head(gated: bool) -> None:
    def attention(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (m.query, m.key, m.value))
        shares = (q @ k.mT).softmax(-1)
        heads = (shares @ v).transpose(1, 2) * (m.gate(x).sigmoid().unsqueeze(-1) if gated else 1)
        return m.out(heads.flatten(2)), shares

    def block(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, shares = m.attention(x)
        return x + y, shares

    layers: Any = dict.fromkeys(("query", "key", "value", "out"), (16, 16))
    attentions = [Written(attention, **layers, gate=(16, 4)) for _ in range(2)]
    for one in attentions:
        one.num_heads = 4  # type: ignore[assignment]
    blocks = nn.Sequential(*(Written(block, attention=one) for one in attentions))
    model = shaken(Written(lambda m, x: m.blocks[1](m.blocks[0](x)[0])[0], blocks=blocks).eval())
    pruned, x = copy.deepcopy(model), torch.randn(2, 3, 16)
    for name in ("blocks.0.attention", "blocks.1.attention"):
        pruned.get_submodule(f"{name}.out").weight.data[:, 8:] = 0  # type: ignore[operator]
    supernet = insert_(model, example=x, axes=("heads",))
    slots = [slot.name for axis in supernet.space.axes for slot in axis.slots]
    assert slots == ["blocks.0.attention.heads", "blocks.1.attention.heads"]
    found = call(supernet.subnet(supernet.space.smallest()), x)
    torch.testing.assert_close(found, call(pruned, x), rtol=1e-5, atol=1e-6)


def test_attentions_that_share_their_heads_all_state_how_many_are_left() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4, "vocab_size": 64}
    model = model_of("T5EncoderModel", "T5Config", **sizes)
    supernet = insert_(model, example=tokens(), axes=("heads",))
    blocks: Any = supernet.extract(supernet.space.smallest()).get_submodule("encoder.block")
    attentions = [block.layer[0].SelfAttention for block in blocks]
    assert [(a.n_heads, a.inner_dim, a.q.out_features) for a in attentions] == [(2, 8, 8)] * 3


@pytest.mark.parametrize("residual", [True, False])
def test_only_residual_blocks_can_be_skipped(residual: bool) -> None:
    def feed(m: Any, x: Tensor) -> Tensor:
        return m.last(m.first(x).relu()) + (x if residual else 0)  # type: ignore[no-any-return]

    stack = nn.Sequential(*(seeded(feed, first=(16, 40), last=(40, 16)) for _ in range(2)))
    x, model = torch.randn(2, 3, 16), nn.Sequential(stack, nn.Linear(16, 2)).eval()
    groups, blocks, refused, _ = declared(model, x)
    assert len(groups) == 2
    assert list(blocks) == (["0.0", "0.1"] if residual else [])
    assert residual or "Written is not residual" in refused["0.depth"]


def test_blocks_in_double_precision_can_be_skipped_and_the_output_of_a_tokenizer_is_an_example() -> None:
    make, example = MODELS["vit"][:2]
    x = {name: value.double() for name, value in example().items()}
    assert set(declared(make().double(), x)[1]) == {f"vit.layers.{i}" for i in range(4)}
    supernet = insert_(MODELS["bert"][0](), example=transformers.BatchEncoding(tokens()))
    assert {axis.name for axis in supernet.space.axes} == {"depth", "ffn", "heads"}


def test_check_compares_all_corners_of_a_model_that_averages_weights_over_its_heads() -> None:
    model, x = model_of("SiglipVisionModel", "SiglipVisionConfig", **SIZES, **IMAGES), images()
    report = insert_(model, example=x).check(x)
    assert report.compared
    assert not report.not_compared
