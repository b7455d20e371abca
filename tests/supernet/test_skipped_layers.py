"""A skipped layer is the identity in its place, in networks that read settings and caches by position."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from small_decoders import SIZES, small_decoder
from torch import Tensor, nn

from subnetact import Axis, SubnetSpace, SubnetSpec, Supernet, insert_
from subnetact.errors import CacheMismatch
from subnetact.insertion.key_value_cache import switch
from subnetact.operators import LayerSelect, WeightSlice

pytest.importorskip("transformers")

LAYERS = SIZES["num_hidden_layers"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
}


def language_model(kind: str) -> nn.Module:
    config, extra = KINDS[kind]
    return small_decoder(config, **extra)


def supernet_of(model: nn.Module) -> Supernet:
    """A supernet in which every layer can be skipped and the FFNs have one of two widths."""
    space = SubnetSpace(
        "layers",
        [
            Axis.uniform("keep", [str(i) for i in range(LAYERS)], [0, 1]),
            Axis.uniform("ffn", ["it"], [12, 24]),
        ],
        lambda v: {**{f"keep{i}": k for i, k in enumerate(v["keep"])}, "ffn": v["ffn"][0]},
    )
    elastic = {"model.layers": LayerSelect.on(**{str(i): f"keep{i}" for i in range(LAYERS)})}
    for i in range(LAYERS):
        path = f"model.layers.{i}.mlp"
        elastic[f"{path}.gate_proj"] = elastic[f"{path}.up_proj"] = WeightSlice.on(out="ffn")
        elastic[f"{path}.down_proj"] = WeightSlice.on(in_="ffn")
    return insert_(model, space, elastic)


def skipping(supernet: Supernet, *skipped: int, ffn: int = 24) -> SubnetSpec:
    return supernet.space.spec(keep=[int(i not in skipped) for i in range(LAYERS)], ffn=ffn)


class Identity(nn.Module):
    """What a reader of the model would write in the place of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def with_identities(model: nn.Module, *skipped: int) -> nn.Module:
    model = copy.deepcopy(model)
    for i in skipped:
        model.model.layers[i] = Identity(model.model.layers[i])
    return model


TOKENS = torch.randint(2, 50, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [(0,), (3,), (0, 1, 4), (1, 2, 3, 4, 5)])
@torch.no_grad()
def test_a_skipped_layer_is_an_identity_in_its_place(kind: str, skipped: tuple[int, ...]) -> None:
    model = language_model(kind)
    expected = with_identities(model, *skipped)(TOKENS, use_cache=False).logits
    whole = model(TOKENS, use_cache=False).logits
    supernet = supernet_of(model)
    spec = skipping(supernet, *skipped)
    for network in (supernet.subnet(spec), supernet.extract(spec)):
        torch.testing.assert_close(network(TOKENS, use_cache=False).logits, expected, rtol=5e-5, atol=5e-5)
        torch.testing.assert_close(network(TOKENS).logits, expected, rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(supernet(TOKENS, use_cache=False).logits, whole, rtol=0, atol=0)
    assert (whole - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [(2,), (0,), (0, 1, 5)])
@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without(kind: str, skipped: tuple[int, ...]) -> None:
    model = language_model(kind)
    reference = with_identities(model, *skipped)
    expected = reference.generate(TOKENS, max_new_tokens=8, do_sample=False, use_cache=False)
    supernet = supernet_of(model)
    spec = skipping(supernet, *skipped)
    for network in (supernet.subnet(spec), supernet.extract(spec)):
        answer = network.generate(TOKENS, max_new_tokens=8, do_sample=False)
        assert answer.tolist() == expected.tolist()
    step = supernet.subnet(spec)(TOKENS[:, :7])
    rest = supernet.subnet(spec)(TOKENS[:, 7:], past_key_values=step.past_key_values)
    plain = reference(TOKENS, use_cache=False).logits[:, 7:]
    torch.testing.assert_close(rest.logits, plain, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_language_models_pass_the_check(kind: str) -> None:
    supernet = supernet_of(language_model(kind))
    report = supernet.check({"input_ids": TOKENS})
    assert report.compared == report.ran[1:], report


@torch.no_grad()
def test_a_cache_of_a_subnet_with_other_layers_is_refused() -> None:
    supernet = supernet_of(language_model("llama"))
    full, short = supernet.subnet(supernet.space.largest()), supernet.subnet(skipping(supernet, 2))
    cache = full(TOKENS).past_key_values
    with pytest.raises(
        CacheMismatch, match=r"model\.layers\.2: .* kept this layer, and this subnet skips it; give"
    ):
        short(TOKENS[:, :1], past_key_values=cache)
    cache = short(TOKENS).past_key_values
    with pytest.raises(
        CacheMismatch, match=r"model\.layers\.2: .* skipped this layer, and this subnet keeps it"
    ):
        full(TOKENS[:, :1], past_key_values=copy.deepcopy(cache))
    other = switch(supernet, cache, skipping(supernet, 2, ffn=12), allow_approximate=True)
    assert other(TOKENS[:, :1], past_key_values=cache).logits.isfinite().all()
    cache.reset()
    full(TOKENS, past_key_values=cache)


@torch.no_grad()
def test_layers_may_be_called_by_name_and_give_their_settings_away() -> None:
    class Layer(nn.Module):
        kind = "dense"

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(3, 3)

        @property
        def doubled(self) -> int:
            return 2 * self.number

        def forward(self, mask: Tensor, hidden: Tensor | None = None) -> Tensor:
            return self.linear(mask) if hidden is None else hidden

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(i) for i in range(3)])
            self.read: Any = None

        def forward(self, x: Tensor) -> Tensor:
            first, layer = self.layers[0], self.layers[1]
            object.__setattr__(
                self,
                "read",
                (layer.number, layer.doubled, layer.kind, layer.linear.in_features, len(self.layers)),
            )
            return layer(hidden=None, mask=first(x)) if len(self.layers) == 3 else x

    space = SubnetSpace("s", [Axis.uniform("keep", ["1"], [0, 1])], lambda v: {"keep": v["keep"][0]})
    supernet = insert_(Stack().eval(), space, {"layers": LayerSelect.on(**{"1": "keep"})})
    x = torch.randn(2, 3)
    for network in (supernet.subnet(space.smallest()), supernet.extract(space.smallest())):
        torch.testing.assert_close(network(x), supernet.network.layers._modules["0"](x), rtol=0, atol=0)
        assert network.read == (1, 2, "dense", 3, 3)
        with pytest.raises(AttributeError, match="Layer has no attribute 'weight' here: this subnet skips"):
            _ = network.layers[1].weight
    extracted = supernet.extract(space.smallest())
    assert [name for name, _ in extracted.named_parameters()] == [
        "layers.0.linear.weight",
        "layers.0.linear.bias",
        "layers.2.linear.weight",
        "layers.2.linear.bias",
    ]
    del supernet, network
    gc.collect()
    assert copy.deepcopy(extracted)(x).shape == (2, 3)
