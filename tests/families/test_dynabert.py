"""DynaBERT: Hugging Face names, RoBERTa, and strided depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ofa_adapters import identify, load
from subnetact.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "golden" / "dynabert"
FACTS = json.loads((GOLDEN / "cases.json").read_text())
CONFIG = FACTS["constructor"]


def state() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "state_dict.safetensors")


@pytest.mark.parametrize(("heads", "expected"), [(6, {0.25: 2, 0.75: 4}), (12, {0.25: 3, 0.75: 9})])
def test_heads_round_like_python(heads: int, expected: dict[float, int]) -> None:
    with torch.device("meta"):
        supernet = load(
            "dynabert", None, num_attention_heads=heads, hidden_size=heads * 8, num_hidden_layers=2
        )
    for width, kept in expected.items():
        spec = supernet.space.parse({"width_mult": width, "depth_mult": 1})
        assert supernet.subnet(spec).layers[0].query.out_features == kept * 8


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k.removeprefix("bert."),
        lambda k: k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ),
        lambda k: f"module.{k}",
    ],
    ids=["bare", "gamma", "module"],
)
def test_other_hugging_face_names_load(change: Any) -> None:
    renamed = {change(key): tensor for key, tensor in state().items()}
    renamed["bert.embeddings.position_ids"] = torch.arange(32)[None]
    assert identify(renamed) is None  # any BERT has these names
    other = load("dynabert", renamed, **CONFIG)
    assert other.fingerprint() == load("dynabert", state(), **CONFIG).fingerprint()


def test_what_the_tensors_lack_is_named() -> None:
    shown = r"show: num_hidden_layers=6 \(it was 7\). It has 16 missing: bert.encoder.layer.6."
    with pytest.raises(CheckpointError, match=shown):
        load("dynabert", state(), num_attention_heads=4, num_hidden_layers=7)
    pretrained = {k: v for k, v in state().items() if not k.startswith("classifier")}
    pretrained["cls.predictions.bias"] = torch.zeros(97)
    with pytest.raises(
        CheckpointError, match=r"lacks tensors.* 2 missing: classifier.weight, classifier.bias$"
    ):
        load("dynabert", pretrained, **CONFIG)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_directory_loads_with_its_configuration(file: str, tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "vocab_size_or_config_json_file"}
    saved = {**config, "vocab_size": 97, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(CheckpointError, match=r"holds none of .*model.safetensors, pytorch_model.bin"):
        load("dynabert", tmp_path)
    if file.endswith("safetensors"):
        save_file(state(), tmp_path / file)
    else:
        torch.save(state(), tmp_path / file)
    supernet = load("dynabert", tmp_path)
    assert supernet.fingerprint() == load("dynabert", state(), **CONFIG).fingerprint()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a readable configuration"):
        load("dynabert", tmp_path)


def test_live_transformers(written_back: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 40,
        "num_labels": 3,
    }
    ids = torch.randint(2, 97, (3, 12))
    mask = torch.ones_like(ids)
    ids[0, 8:], mask[0, 8:] = 1, 0
    for kind in ("Bert", "Roberta"):
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
        supernet = load("dynabert", model.state_dict(), num_attention_heads=4, layer_norm_eps=1e-12)
        with torch.no_grad():
            expected = model(ids, mask).logits
            logits = supernet(ids, mask)
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-5)
        model.load_state_dict(written_back("dynabert", model.state_dict(), num_attention_heads=4))
