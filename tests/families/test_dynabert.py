"""DynaBERT: Hugging Face names, RoBERTa, and strided depth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ofa_adapters import identify, load
from ofa_adapters.networks.dynabert import kept_layers
from subnetact.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "golden" / "dynabert"
FACTS = json.loads((GOLDEN / "cases.json").read_text())
CONFIG = FACTS["constructor"]


def state() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "state_dict.safetensors")


def test_depth_is_strided() -> None:
    assert kept_layers(0.75, 12) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert kept_layers(0.5, 12) == [0, 2, 4, 6, 8, 10]
    assert kept_layers(0.75, 6) == [0, 1, 2, 4]
    for case in FACTS["cases"]:
        assert kept_layers(case["config"]["depth_mult"], 6) == case["kept_layers"]


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
    with pytest.raises(CheckpointError, match=r"holds none of model.safetensors, pytorch_model.bin"):
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


def roberta_state() -> dict[str, torch.Tensor]:
    """The golden weights under RoBERTa's names, with its classification head."""
    found = {}
    for key, tensor in state().items():
        key = re.sub(r"^bert\.pooler\.dense\.", "classifier.dense.", key)
        key = re.sub(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", key)
        found[re.sub(r"^bert\.", "roberta.", key)] = tensor
    found["roberta.embeddings.token_type_embeddings.weight"] = state()[
        "bert.embeddings.token_type_embeddings.weight"
    ][:1]
    return found


def test_roberta_counts_positions_after_its_padding_token() -> None:
    supernet = load("dynabert", roberta_state(), num_attention_heads=4)
    network = supernet.network
    assert (network.first_position, network.norm.eps) == (1, 1e-5)
    ids = torch.tensor([[5, 9, 7, 11, 1, 1], [4, 8, 15, 16, 23, 42]])
    mask = (ids != 1).long()
    s = roberta_state()
    embeddings = s["roberta.embeddings.position_embeddings.weight"]
    words = s["roberta.embeddings.word_embeddings.weight"]
    types = s["roberta.embeddings.token_type_embeddings.weight"][0]
    positions = torch.tensor([[2, 3, 4, 5, 1, 1], [2, 3, 4, 5, 6, 7]])
    embedded = F.layer_norm(
        words[ids] + embeddings[positions] + types,
        (64,),
        s["roberta.embeddings.LayerNorm.weight"],
        s["roberta.embeddings.LayerNorm.bias"],
        1e-5,
    )
    found: list[torch.Tensor] = []
    view = supernet.subnet(supernet.space.largest())
    view.layers[0].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        full = view(ids, mask)
        short = view(ids[:1, :4], mask[:1, :4])
    torch.testing.assert_close(found[0], embedded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(full[:1], short, atol=1e-5, rtol=1e-5)  # padding changes nothing


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
