"""DynaBERT: Hugging Face names, RoBERTa, strided depth, and rewiring by importance."""

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
from subnetact.insertion.reorder import reorder_
from subnetact.supernet.supernet import Supernet

GOLDEN = Path(__file__).parent.parent / "golden" / "dynabert"
FACTS = json.loads((GOLDEN / "cases.json").read_text())
IO = load_file(GOLDEN / "io.safetensors")
INPUTS = {name: IO[name] for name in FACTS["inputs"]}
CONFIG = FACTS["constructor"]


def state() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "state_dict.safetensors")


def vanilla(seed: int = 0) -> Supernet:
    """Make a BERT whose important heads and neurons are at random positions."""
    supernet = load("dynabert", state(), **CONFIG)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in supernet.network.named_parameters():
            if re.search(r"(attention_output|output)\.weight$", name):
                parameter.mul_(torch.rand(parameter.shape[1], generator=generator) * 3)
    return supernet


def batches(n: int = 3) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            {
                "input_ids": torch.randint(1, 97, (4, 10), generator=generator),
                "attention_mask": torch.ones(4, 10, dtype=torch.long),
            },
            torch.randint(0, 3, (4,), generator=generator),
        )
        for _ in range(n)
    ]


def test_depth_is_strided() -> None:
    assert kept_layers(0.75, 12) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert kept_layers(0.5, 12) == [0, 2, 4, 6, 8, 10]
    assert kept_layers(0.75, 6) == [0, 1, 2, 4]
    for case in FACTS["cases"]:
        assert kept_layers(case["config"]["depth_mult"], 6) == case["kept_layers"]


@pytest.mark.parametrize("case", FACTS["cases"], ids=lambda c: c["name"])
def test_sizes_and_layers_equal_upstream(case: dict[str, Any]) -> None:
    supernet = load("dynabert", state(), **CONFIG)
    view = supernet.subnet(supernet.space.parse(case["config"]))
    kept = [i for i, layer in enumerate(view.layers) if list(layer.parameters())]
    assert kept == case["kept_layers"]
    for layer, i in ((view.layers[i], i) for i in kept):
        full = supernet.network.get_submodule(f"layers.{i}")
        assert layer.query.weight.shape == (case["qkv_dim"], 64)
        assert layer.output.weight.shape == (64, case["ffn_dim"])
        assert layer.query.weight.data_ptr() == full.query.weight.data_ptr()
        assert layer.query.out_features // layer.head_size == case["heads"]


@pytest.mark.parametrize(("heads", "expected"), [(6, {0.25: 2, 0.75: 4}), (12, {0.25: 3, 0.75: 9})])
def test_heads_round_like_python(heads: int, expected: dict[float, int]) -> None:
    with torch.device("meta"):
        supernet = load(
            "dynabert", None, num_attention_heads=heads, hidden_size=heads * 8, num_hidden_layers=2
        )
    for width, kept in expected.items():
        spec = supernet.space.parse({"width_mult": width, "depth_mult": 1})
        assert supernet.subnet(spec).layers[0].query.out_features == kept * 8


# -- names -------------------------------------------------------------------------------------------


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


def test_sizes_are_read_from_the_tensors() -> None:
    supernet = load("dynabert", state(), num_attention_heads=4)
    spec = supernet.space.parse(FACTS["cases"][1]["config"])
    with torch.no_grad():
        logits = supernet(**INPUTS, subnet=spec)
    torch.testing.assert_close(logits, IO["smallest.dynamic"], atol=5e-5, rtol=1e-5)
    with pytest.raises(
        CheckpointError,
        match=r"show: num_hidden_layers=6 \(it was 7\). It has 16 missing: bert.encoder.layer.6.",
    ):
        load("dynabert", state(), num_attention_heads=4, num_hidden_layers=7)


def test_a_model_without_classifier_is_refused() -> None:
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


# -- the most important heads and neurons first --------------------------------------------------------


def test_a_bert_that_was_only_fine_tuned_is_sorted_by_importance() -> None:
    """Every layer gets an order of its own, and heads move as a whole."""
    supernet = vanilla()
    largest, smallest = supernet.space.largest(), supernet.space.smallest()
    view = supernet.subnet(largest)
    before, narrow = view(**INPUTS), supernet.subnet(smallest)(**INPUTS)
    former = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    report = reorder_(supernet, "taylor", batches=batches())
    assert sorted(report.reordered.values()) == [4] * 6 + [128] * 6
    torch.testing.assert_close(view(**INPUTS), before, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(supernet.subnet(smallest)(**INPUTS), narrow, atol=1e-3)
    once = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    for i in range(6):
        name = f"layers.{i}.query.weight"
        moved = [part.tobytes() for part in once[name].numpy().reshape(4, -1)]
        assert sorted(moved) == sorted(part.tobytes() for part in former[name].numpy().reshape(4, -1))
    reorder_(supernet, "taylor", batches=batches())
    assert all(torch.equal(once[name], tensor) for name, tensor in supernet.state_dict().items())
