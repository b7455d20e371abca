"""Elastic models at home in timm and transformers: one table, each row against the library's own result."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact import from_pretrained, insert_, reorder_
from subnetact.insertion import as_pretrained
from subnetact.insertion.experts import expert_saliency
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(3, 19).view(2, 8)
SMALL_SWIN = {"img_size": 64, "window_size": 4, "depths": (1, 1, 2), "embed_dim": 24, "num_heads": (2, 2, 4)}
TIMM: dict[str, dict[str, Any]] = {
    "test_resnet": {},
    "test_convnext": {},
    "test_vit": {"img_size": 64},
    "swin_tiny_patch4_window7_224": SMALL_SWIN,
    "test_efficientnet": {},
    "regnetx_002": {},
}
VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 64, "patch_size": 8}
STAGES = {"hidden_sizes": [16, 32, 32, 64], "depths": [2, 2, 2, 2], "out_features": ["stage2", "stage4"]}
BACKBONES: dict[str, dict[str, Any]] = {
    "ResNetConfig": {"embedding_size": 16, "layer_type": "basic", **STAGES},
    "ConvNextConfig": STAGES,
    "Dinov2Config": {**VIT, "mlp_ratio": 2, "out_features": ["stage2", "stage4"]},
    "BeitConfig": {**VIT, "intermediate_size": 64, "out_features": ["stage2", "stage4"]},
    "DINOv3ViTConfig": {**VIT, "hidden_size": 64, "intermediate_size": 64, "out_indices": [1, -1]},
    "SwinConfig": {
        **{"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]},
        **{"window_size": 4, "out_features": ["stage1", "stage2"]},
    },
}
TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}


def of_timm(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = timm.create_model(name, **options, **TIMM[name]).eval()
    return network


def backbone(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**BACKBONES[name])
    network: nn.Module = transformers.AutoBackbone.from_config(config).eval()
    return network


def decoder(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **settings})).eval()


def elastic(network: nn.Module, example: Any = IMAGES, **options: Any) -> tuple[Supernet, list[SubnetSpec]]:
    """Return a supernet, and its smallest, its largest and another subnet."""
    supernet = insert_(network, example=example, **options)
    return supernet, supernet.space.sample(0, 3)


def chosen(supernet: Supernet, **choices: Any) -> SubnetSpec:
    """Return the largest subnet with other choices for some axes."""
    values = {axis.name: [slot.choices[-1] for slot in axis.slots] for axis in supernet.space.axes}
    return supernet.space.spec(**{**values, **choices})


def require_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def with_identities(network: nn.Module, *skipped: str) -> nn.Module:
    """Return a copy of a model in which blocks of its library return what they are given."""
    network = copy.deepcopy(network)
    for path in skipped:
        network.get_submodule(path).forward = lambda x, *_, **__: x
    return network


def require_maps(network: nn.Module, maps: Callable[[Any], Any]) -> tuple[Supernet, list[SubnetSpec]]:
    """Require the maps of views to be those of extracts, and those of the largest to be the original's."""
    original = copy.deepcopy(network)
    supernet, specs = elastic(network)
    shapes = [t.shape[:1] + t.shape[2:] for t in maps(original)]
    for spec in specs:
        found = maps(supernet.subnet(spec))
        assert [t.shape[:1] + t.shape[2:] for t in found] == shapes
        require_equal(found, maps(supernet.extract(spec)))
    require_equal(maps(supernet.subnet(supernet.space.largest())), maps(original))
    require_equal(maps(supernet.network), maps(original))
    return supernet, specs


@torch.no_grad()
def features_only(name: str) -> None:
    network = of_timm(name, features_only=True)
    channels = network.feature_info.channels()
    supernet, specs = require_maps(network, lambda network: network(IMAGES))
    for spec in specs:
        for subnet in (supernet.subnet(spec), supernet.extract(spec)):
            maps = [
                t if t.shape[1] == c else t.movedim(-1, 1)
                for t, c in zip(subnet(IMAGES), channels, strict=True)
            ]
            assert subnet.feature_info.channels() == [t.shape[1] for t in maps] == channels


@torch.no_grad()
def intermediates(name: str) -> None:
    def maps(network: Any) -> Any:
        _, found = network.forward_intermediates(IMAGES, output_fmt="NCHW")
        return [*found, *network.forward_intermediates(IMAGES, indices=1, intermediates_only=True)]

    require_maps(of_timm(name, num_classes=5), maps)


@torch.no_grad()
def features_and_head(name: str) -> None:
    def maps(network: Any) -> Any:
        features = network.forward_features(IMAGES)
        assert torch.equal(network.forward_head(features), network(IMAGES))
        return [features, network.forward_head(features, pre_logits=True)]

    original = of_timm(name, num_classes=5)
    supernet, specs = elastic(copy.deepcopy(original))
    for spec in specs:
        require_equal(maps(supernet.subnet(spec)), maps(supernet.extract(spec)))
    require_equal(maps(supernet.subnet(supernet.space.largest())), maps(original))


@torch.no_grad()
def new_head(name: str) -> None:
    """A view, its copy and an extract get heads of their own size; that of the network is elastic."""

    def pooled(network: Any) -> Tensor:
        return network.forward_head(network.forward_features(IMAGES), pre_logits=True)  # type: ignore[no-any-return]

    supernet, specs = elastic(of_timm(name, num_classes=5))
    small, before = specs[0], supernet(IMAGES, subnet=specs[0])
    width = pooled(supernet.extract(small)).shape[1]
    subjects = copy.deepcopy(supernet.subnet(small)), supernet.subnet(small), supernet.extract(small)
    for subject in subjects:
        subject.reset_classifier(3)
        assert subject.get_classifier().in_features == width
        require_equal([subject(IMAGES)], [subject.get_classifier()(pooled(subject))])
    require_equal([supernet(IMAGES, subnet=small)], [before])
    supernet.network.reset_classifier(3)
    head = supernet.network.get_classifier()
    for spec in specs:
        features = pooled(supernet.extract(spec))
        expected = nn.functional.linear(features, head.weight[:, : features.shape[1]], head.bias)
        require_equal([supernet(IMAGES, subnet=spec)], [expected])


@torch.no_grad()
def feature_maps(name: str) -> None:
    supernet, specs = require_maps(backbone(name), lambda network: network(IMAGES).feature_maps)
    for spec in specs:
        require_equal(supernet(IMAGES, subnet=spec).feature_maps, supernet.extract(spec)(IMAGES).feature_maps)


@torch.no_grad()
def maps_in_place(name: str) -> None:
    """A skipped block is an identity in its place, so that every map is that of its stage."""
    original = backbone(name)
    supernet, _ = elastic(copy.deepcopy(original), axes=("depth",), each_block=True, choices=[0, 1])
    blocks = [slot.name.removesuffix(".depth") for slot in supernet.space.axes[0].slots]
    spec = chosen(supernet, depth=[0, *[1] * (len(blocks) - 2), 0])
    expected = with_identities(original, blocks[0], blocks[-1])(IMAGES).feature_maps
    for subnet in (supernet.subnet(spec), supernet.extract(spec)):
        require_equal(subnet(IMAGES).feature_maps, expected)
    require_equal(supernet(IMAGES, subnet=spec).feature_maps, expected)


@torch.no_grad()
def saved_backbone(name: str, tmp_path: Path) -> None:
    """A backbone without some layers is saved with the maps of the same features, or refused."""
    supernet, _ = elastic(backbone(name), axes=("depth",), each_block=True, choices=[0, 1])
    spec = chosen(supernet, depth=[0, 1, 1, 0][: len(supernet.space.axes[0].slots)])
    plain: Any = as_pretrained(supernet.extract(spec), IMAGES)
    plain.save_pretrained(tmp_path)
    opened = type(plain).from_pretrained(tmp_path).eval()
    assert opened.config.out_indices == [1, 2]
    require_equal(opened(IMAGES).feature_maps, supernet.subnet(spec)(IMAGES).feature_maps)
    middle = chosen(supernet, depth=[1, 1, 0, 0][: len(supernet.space.axes[0].slots)])
    with pytest.raises(subnetact.errors.InsertError, match="same features in this subnet"):
        as_pretrained(supernet.extract(middle), IMAGES)


@torch.no_grad()
def hidden_states(_: str) -> None:
    """Hidden states are those of all layers, whether the library's hooks were there before or come later."""
    for hooked in (False, True):
        original = decoder()
        if hooked:
            original(TOKENS, output_hidden_states=True)
        supernet, _specs = elastic(
            copy.deepcopy(original), TOKENS, axes=("depth",), each_block=True, choices=[0, 1]
        )
        spec = chosen(supernet, depth=[1, 0, 0])
        skipped = [slot.name.removesuffix(".depth") for slot in supernet.space.axes[0].slots[1:]]
        expected = with_identities(original, *skipped)(TOKENS, output_hidden_states=True).hidden_states
        for run in (supernet, supernet.subnet(spec), supernet.extract(spec), supernet):
            options = {"subnet": spec} if run is supernet else {}
            require_equal(run(TOKENS, output_hidden_states=True, **options).hidden_states, expected)


IN_A_NEW_PROCESS = """
import sys
for name in sys.argv[2].split():
    __import__(name)
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
x, y = load_file(sys.argv[1] + "/expected.st").values()
with torch.no_grad():
    torch.testing.assert_close(model(x).logits, y, rtol=1e-5, atol=1e-5)
print(type(model).__name__)
"""


def auto_class(order: str, tmp_path: Path) -> None:
    """A named subnet whose layers differ in size opens by its Auto class, whichever is imported first."""
    from safetensors.torch import save_file

    supernet, _ = elastic(decoder(), TOKENS)
    spec = chosen(supernet, depth=[0.75], ffn=[0.5, 0.75, 1.0, 0.5], heads=[1.0, 0.5, 1.0, 0.5])
    supernet.save_pretrained(tmp_path / "all", subnets={"mixed": spec})
    bundle: Any = from_pretrained(tmp_path / "all")
    bundle.save_pretrained(tmp_path / "mixed", only="mixed", example=TOKENS)
    assert "heterogeneous(LlamaForCausalLM)" in (tmp_path / "mixed" / "README.md").read_text()
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["model_type"] == "subnetact"
    with torch.no_grad():
        expected = {"x": TOKENS, "y": supernet.subnet(spec)(TOKENS).logits}
    save_file(expected, tmp_path / "mixed" / "expected.st")
    command = [sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS, str(tmp_path / "mixed"), order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["LlamaForCausalLM"], done.stderr[-2000:]


def mixture(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**TEXT, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 16, **settings}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).eval()


@torch.no_grad()
def experts_by_saliency(_: str) -> None:
    """Experts come in the order of weight times output, the mean over the tokens that visit them (REAP)."""
    original = mixture(num_experts_per_tok=2)
    supernet, _specs = elastic(copy.deepcopy(original), TOKENS, axes=("pool",), choices=[0.5, 1.0])
    block, seen = original.model.layers[0].mlp, list[Tensor]()
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    original(TOKENS)
    (x,), (_logits, weights, index) = seen, block.gate(seen[0])
    expected = torch.zeros(8)
    for expert in range(8):
        tokens, places = torch.where(index == expert)
        gate, up = (x[tokens] @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
        outputs = (nn.functional.silu(gate) * up) @ block.experts.down_proj[expert].T
        if len(tokens):
            expected[expert] = (weights[tokens, places, None] * outputs).norm(dim=1).mean()
    pool = next(group for group in supernet.description.groups.values() if "layers.0" in group.name)
    row = supernet.space.resolve(supernet.space.largest())
    require_equal([expert_saliency(supernet.network, row, pool, TOKENS)], [expected])
    reorder_(supernet, example=TOKENS)
    down = supernet.network.model.layers[0].mlp.experts.down_proj
    require_equal(down, block.experts.down_proj[expected.argsort(descending=True, stable=True)])


@torch.no_grad()
def speech_to_text(_: str) -> None:
    """Whisper's view writes what its extract writes, and the largest what the original writes."""
    sides = {"layers": 3, "attention_heads": 4, "ffn_dim": 64}
    more = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in sides.items()}
    sizes = {"d_model": 32, "vocab_size": 60, "num_mel_bins": 20, "max_source_positions": 20}
    ends = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**sizes, **more, **ends, max_target_positions=32)
    original = transformers.WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(2, 20, 40)
    x = {"input_features": sound, "decoder_input_ids": TOKENS[:, :6]}
    supernet, specs = elastic(copy.deepcopy(original), x)
    assert {"depth", "ffn", "heads"} <= {axis.name for axis in supernet.space.axes}

    def written(network: Any) -> Tensor:
        tokens: Tensor = network.generate(sound, max_new_tokens=6, do_sample=False)
        return tokens

    for spec in specs:
        require_equal(supernet.subnet(spec)(**x)[:1], supernet.extract(spec)(**x)[:1])
        assert torch.equal(written(supernet.subnet(spec)), written(supernet.extract(spec)))
    assert torch.equal(written(supernet.subnet(supernet.space.largest())), written(original))


TABLE: list[tuple[Callable[..., None], list[str]]] = [
    # what users do, and to which models
    (features_only, list(TIMM)),
    (intermediates, ["test_resnet", "test_vit"]),
    (features_and_head, ["test_convnext", "swin_tiny_patch4_window7_224"]),
    (new_head, ["test_efficientnet", "test_vit", "regnetx_002"]),
    (feature_maps, list(BACKBONES)),
    (maps_in_place, [name for name in BACKBONES if name != "SwinConfig"]),  # whose blocks return tuples
    (saved_backbone, ["BeitConfig"]),
    (hidden_states, ["llama"]),
    (auto_class, ["subnetact transformers", "transformers.models.auto.modeling_auto subnetact"]),
    (experts_by_saliency, ["qwen3_moe"]),
    (speech_to_text, ["whisper"]),
]
HEAVY = {auto_class: [pytest.mark.heavy]}
ROWS = [
    pytest.param(act, name, id=f"{act.__name__}-{name}", marks=HEAVY.get(act, []))
    for act, names in TABLE
    for name in names
]


@pytest.mark.parametrize(("act", "name"), ROWS)
def test_an_elastic_model_does_as_its_library(act: Callable[..., None], name: str, tmp_path: Path) -> None:
    act(*((name, tmp_path) if "tmp_path" in act.__annotations__ else (name,)))
