"""The stream of decoders: subnets equal their classes, made with fewer channels and the sliced weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_decoders import small_decoder
from torch import Tensor, nn

from subnetact.insertion.hugging_face import as_pretrained
from subnetact.insertion.insert import describe, insert_

pytest.importorskip("transformers")

TOKENS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
DECODERS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"tie_word_embeddings": True},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "GemmaConfig": {"tie_word_embeddings": True},
    "Gemma2Config": {"query_pre_attn_scalar": 4},
    "MixtralConfig": {"num_local_experts": 4, **MOE},
    "Qwen3MoeConfig": {"num_experts": 16, **MOE, "moe_intermediate_size": 16},  # as many as channels
}
PROVED_ONLY = ("GPTNeoXConfig", "GPT2Config", "PhiConfig")
"""Their heads are narrower in a configuration with fewer channels, so there is no such class to compare."""


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS, use_cache=False).logits
    return found


def narrowed(config: str, full: nn.Module, channels: int, **settings: Any) -> nn.Module:
    """Return the class of a configuration with fewer channels, filled with the first entries of each axis."""
    model: Any = small_decoder(config, **settings, hidden_size=channels)
    weights = full.state_dict()
    own = model.state_dict()
    model.load_state_dict({n: weights[n][tuple(map(slice, t.shape))] for n, t in own.items()})
    for mine, other in zip(model.modules(), full.modules(), strict=True):
        if "embed_scale" in mine._buffers:  # that of the full model
            mine.embed_scale = other.embed_scale
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("config", DECODERS)
def test_subnet_equals_the_class_with_fewer_channels(config: str) -> None:
    settings = DECODERS[config]
    model = small_decoder(config, **settings)
    full = logits(model)
    wanted = {n: narrowed(config, model, n, **settings) for n in (8, 12)}
    supernet = insert_(model, example=TOKENS, axes=("stream",), choices=(8, 12, 16))
    torch.testing.assert_close(logits(supernet.subnet(supernet.space.largest())), full)
    for channels, other in wanted.items():
        spec = supernet.space.spec(stream=channels)
        for found in (supernet.subnet(spec), supernet.extract(spec)):
            torch.testing.assert_close(logits(found), logits(other), rtol=0, atol=5e-5)


@pytest.mark.parametrize("config", PROVED_ONLY)
def test_stream_of_other_decoders_is_proved(config: str) -> None:
    description = describe(small_decoder(config), TOKENS, axes=("stream",))
    assert "stream" in description.groups, description.refused


def test_the_smallest_in_all_axes_is_a_model_of_its_own_in_the_vocabulary_of_transformers() -> None:
    axes = ("stream", "heads", "ffn", "depth")
    supernet = insert_(small_decoder("Qwen3Config"), example=TOKENS, axes=axes, choices=(0.5, 1.0))
    spec = supernet.space.smallest()
    stated = supernet.space.format(spec)
    assert all(fields["hidden_size"] == 8 for fields in stated.values())
    assert supernet.space.parse(stated) == spec
    extracted = supernet.extract(spec)
    alone: Any = as_pretrained(extracted, TOKENS)
    fields = ("hidden_size", "num_key_value_heads", "intermediate_size")
    assert [getattr(alone.config, field) for field in fields] == [8, 1, 12]
    torch.testing.assert_close(logits(alone), logits(extracted))


@pytest.mark.parametrize("head_dim", [4, 8])
@pytest.mark.parametrize("neurons", [8, 16, 43])
def test_the_stream_is_found_whatever_the_ratio_of_widths(neurons: int, head_dim: int) -> None:
    settings = {"intermediate_size": neurons, "head_dim": head_dim, "num_hidden_layers": 2}
    model = small_decoder("LlamaConfig", **settings)
    wanted = narrowed("LlamaConfig", model, 8, **settings)
    supernet = insert_(model, example=TOKENS, axes=("ffn", "stream"), choices=(0.5, 1.0))
    assert {group.axis: group.full for group in supernet.description.groups.values()} == {
        "ffn": neurons,
        "stream": 16,
    }
    spec = supernet.space.spec(stream=0.5, ffn=1.0)
    torch.testing.assert_close(logits(supernet.subnet(spec)), logits(wanted), rtol=0, atol=5e-5)


def test_language_models_have_a_stream_only_if_it_is_asked_for() -> None:
    description = describe(small_decoder("LlamaConfig"), TOKENS, proof=False)
    assert "stream" not in description.groups
    assert "tried if axes names it" in description.refused["model.layers.0.mlp.down_proj"]
    returned: Any = small_decoder("LlamaConfig").model
    assert "outputs of the model" in describe(returned, TOKENS, proof=False).refused["layers.0.mlp.down_proj"]


@pytest.mark.parametrize(
    ("config", "reason"), [("OlmoConfig", "OlmoLayerNorm"), ("CohereConfig", "CohereLayerNorm")]
)
def test_what_no_rule_knows_is_refused(config: str, reason: str) -> None:
    description = describe(small_decoder(config), TOKENS, axes=("stream", "ffn"))
    assert "stream" not in description.groups
    assert reason in description.refused["stream"]
