"""Adapters of PEFT on elastic layers: every subnet uses its slice, and plain peft saves and loads them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_decoders import small_decoder
from torch import Tensor, nn
from written_networks import seeded

import subnetact
from subnetact.errors import InsertError
from subnetact.insertion import as_pretrained
from subnetact.supernet.supernet import Supernet

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")

TOKENS = {"input_ids": torch.arange(3, 15).reshape(2, 6), "use_cache": False}
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LINEAR = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
close = functools.partial(torch.testing.assert_close, rtol=5e-5, atol=5e-5)
llama = functools.partial(small_decoder, "LlamaConfig", num_hidden_layers=2)


def convolutions() -> nn.Module:
    compute = lambda m, x: m.head(m.second(m.first(x).relu()).relu().mean((2, 3)))  # noqa: E731
    return seeded(compute, first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 8, 3), head=(8, 4))


def lora(targets: list[str], **settings: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **settings)


KINDS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...] | None, Any]] = {
    "linear": (llama, TOKENS, ("ffn", "heads", "depth"), lora(LINEAR)),
    "embedding": (llama, TOKENS, ("stream",), lora(["embed_tokens", "lm_head", "v_proj"])),
    "Conv1D in segments": (
        functools.partial(small_decoder, "GPT2Config", num_hidden_layers=2),
        TOKENS,
        ("heads", "ffn"),
        lora(["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    ),
    "bias": (lambda: convolutions(), IMAGES, None, lora(["head"], lora_bias=True)),
}
# peft makes the class of a convolution anew, which operators refuse
ALL_KINDS = {**KINDS, "convolution": (lambda: convolutions(), IMAGES, None, lora(["first", "second"]))}


def logits(model: nn.Module, x: Any, **options: Any) -> Tensor:
    found = model(x, **options) if isinstance(x, Tensor) else model(**x, **options)
    return getattr(found, "logits", found)


def specs_of(supernet: Supernet) -> list[Any]:
    return [supernet.space.smallest(), supernet.space.largest(), *supernet.space.sample(0, 3)]


def agree(supernet: Supernet, reference: Supernet, x: Any) -> None:
    """Subnets by views, in training mode and extracted equal those of a supernet without adapters."""
    for spec, same in zip(specs_of(supernet), specs_of(reference), strict=True):
        assert str(spec) == str(same)
        expected = logits(reference, x, subnet=same)
        close(logits(supernet, x, subnet=spec), expected)
        close(logits(supernet.extract(spec), x), expected)


def merged(model: nn.Module, config: Any, state: dict[str, Tensor]) -> nn.Module:
    """The ordinary model with adapters of a `state`, which plain peft has merged."""
    adapted = peft.get_peft_model(model, copy.deepcopy(config))
    adapted.load_state_dict(state)
    return adapted.merge_and_unload().eval()


@pytest.mark.parametrize(
    ("kind", "packs"), [*((kind, True) for kind in KINDS), ("linear", False), ("Conv1D in segments", False)]
)
def test_subnets_equal_those_of_the_merged_model(kind: str, packs: bool) -> None:
    factory, x, axes, config = KINDS[kind]
    original = factory()
    supernet = subnetact.insert_(copy.deepcopy(original), example=x, axes=axes)
    supernet.packs = packs
    logits(supernet, x, subnet=supernet.space.smallest())  # of which a view is kept
    model = peft.get_peft_model(supernet.network, copy.deepcopy(config)).eval()
    reference = subnetact.insert_(merged(original, config, model.state_dict()), example=x, axes=axes)
    with torch.no_grad():
        agree(supernet, reference, x)
        assert supernet.check(x).compared
        assert model.merge_and_unload() is supernet.network
        agree(supernet, reference, x)


@pytest.mark.parametrize(("kind", "root"), [*((kind, "inside") for kind in ALL_KINDS), ("linear", "around")])
def test_a_model_with_adapters_keeps_the_meaning_of_its_axes(kind: str, root: str) -> None:
    factory, x, axes, config = ALL_KINDS[kind]
    original = factory()
    adapted = peft.get_peft_model(copy.deepcopy(original), copy.deepcopy(config)).eval()
    state = adapted.state_dict()
    model = adapted.base_model.model if root == "inside" else adapted
    expected = logits(model, x)
    plain = subnetact.insert_(merged(original, config, state), example=x, axes=axes)
    supernet = subnetact.insert_(model, example=x, axes=axes)
    with torch.no_grad():
        close(logits(supernet, x), expected)
        agree(supernet, plain, x)
        assert supernet.check(x).compared
    assert supernet.remove() is model
    assert torch.equal(logits(model, x), expected)


def test_adapters_are_switched_under_cached_views() -> None:
    supernet = subnetact.insert_(llama(), example=TOKENS, axes=("ffn", "heads"))
    spec = supernet.space.smallest()

    def output() -> Tensor:
        found = logits(supernet, TOKENS, subnet=spec)
        close(logits(supernet.extract(spec), TOKENS), found)
        return found

    with torch.no_grad():
        bare = output()
        model = peft.get_peft_model(supernet.network, lora(LINEAR)).eval()
        first = output()
        model.add_adapter("other", lora(["up_proj", "v_proj"]))
        assert torch.equal(output(), first)
        model.set_adapter("other")
        other = output()
        with model.disable_adapter():
            close(output(), bare)
        assert torch.equal(output(), other)
        model.merge_adapter()
        close(output(), other)
        with model.disable_adapter(), pytest.raises(InsertError, match="unmerge_adapter"):
            output()
        model.unmerge_adapter()
        model.set_adapter("default")
        model.delete_adapter("other")
        close(output(), first)
        model.base_model.model.model.layers[0].mlp.up_proj.set_scale("default", 3.0)
        assert not torch.allclose(output(), first)
    assert not torch.allclose(first, bare)
    assert not torch.allclose(first, other)


def test_gradients_reach_the_slice_of_the_adapter_alone() -> None:
    supernet = subnetact.insert_(llama(), example=TOKENS, axes=("ffn",))
    model = peft.get_peft_model(supernet.network, lora(["up_proj", "down_proj"]))
    spec = supernet.space.smallest()
    extracted = supernet.extract(spec)
    logits(extracted, TOKENS).pow(2).mean().backward()  # type: ignore[no-untyped-call]
    model.train()
    with supernet.running(spec):
        logits(model, TOKENS).pow(2).mean().backward()  # type: ignore[no-untyped-call]
    small = dict(extracted.named_parameters())
    for name, parameter in supernet.named_parameters():
        assert ("lora" in name) == parameter.requires_grad == (parameter.grad is not None), name
        if parameter.grad is not None:
            expected = torch.zeros_like(parameter)
            gradient: Any = small[name].grad
            expected[tuple(map(slice, gradient.shape))] = gradient
            close(parameter.grad, expected)


def test_plain_peft_saves_and_loads_the_adapters(tmp_path: Path) -> None:
    original = llama()
    supernet = subnetact.insert_(copy.deepcopy(original), example=TOKENS, axes=("ffn", "heads"))
    model = peft.get_peft_model(supernet.network, lora(LINEAR, modules_to_save=["lm_head"])).eval()
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(original, tmp_path).eval()
        close(logits(loaded, TOKENS), logits(supernet, TOKENS))
        again = subnetact.insert_(llama(), example=TOKENS, axes=("ffn", "heads"))
        peft.PeftModel.from_pretrained(again.network, tmp_path)
        agree(again, supernet, TOKENS)
        agree(copy.deepcopy(supernet), supernet, TOKENS)


REFUSED = {
    "vectors": lambda: peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[]),
    "variant": lambda: lora(["up_proj"], use_dora=True),
    "singular values": lambda: peft.AdaLoraConfig(target_modules=["up_proj"], total_step=10),
    "Hadamard product": lambda: peft.LoHaConfig(target_modules=["up_proj"]),
    "rotation": lambda: peft.OFTConfig(target_modules=["up_proj"], oft_block_size=4),
    "parameter": lambda: peft.LoraConfig(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_without_slices_are_refused_before_a_subnet_runs(name: str) -> None:
    supernet = subnetact.insert_(llama(), example=TOKENS, axes=("ffn",))
    with pytest.raises(
        InsertError, match=r"model\.layers\.0\.mlp\.up_proj: Linear is elastic.*LoRA.*extract"
    ):
        peft.get_peft_model(supernet.network, REFUSED[name]())


def test_what_needs_a_model_without_adapters_or_their_variants_says_so() -> None:
    supernet = subnetact.insert_(llama(), example=TOKENS, axes=("ffn",))
    model = peft.get_peft_model(supernet.network, lora(["up_proj"]))
    with pytest.raises(InsertError, match=r"reorder_: model.*up_proj has adapters.*before get_peft_model"):
        subnetact.reorder_(supernet, example=TOKENS)
    with pytest.raises(InsertError, match=r"as_pretrained: model.*up_proj has adapters"):
        as_pretrained(supernet.extract(supernet.space.smallest()), TOKENS)
    model.add_adapter("other", lora(["up_proj"], use_dora=True))
    for _ in range(2):
        with pytest.raises(InsertError, match=r"up_proj: Linear is elastic, and no subnet has a slice"):
            supernet.subnet(supernet.space.smallest())
    model.delete_adapter("other")
    logits(supernet, TOKENS, subnet=supernet.space.smallest())


@pytest.mark.parametrize("name", ["vectors", "variant"])
def test_a_refused_model_with_adapters_is_unchanged(name: str) -> None:
    model = peft.inject_adapter_in_model(REFUSED[name](), llama()).eval()
    modules, expected = list(model.named_modules()), logits(model, TOKENS)
    with pytest.raises(InsertError, match=r"no subnet has a slice|of PEFT: merge"):
        subnetact.insert_(model, example=TOKENS, axes=("ffn",))
    assert modules == list(model.named_modules())
    assert torch.equal(logits(model, TOKENS), expected)
