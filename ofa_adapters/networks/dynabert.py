"""DynaBERT: a BERT or RoBERTa classifier of elastic width (heads and neurons) and depth.

Published checkpoints have their most important heads and neurons first. A BERT that was only fine-tuned needs
`subnetact.reorder_(supernet, "taylor", batches=...)` before narrow subnets are useful.

Source: DynaBERT (Hou et al., NeurIPS 2020); huawei-noah/Pretrained-Language-Model, DynaBERT/transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Built, Family, Shapes
from ofa_adapters.layout import Activation, Layout, choices
from subnetact.errors import SpecError
from subnetact.operators import Elastic, LayerSelect, WeightSlice
from subnetact.space import Axis, AxisValues

ACTIVATIONS: Mapping[str, Activation] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
HEAD_FEATURES = 64
"""Features of a head if neither constructor arguments nor a configuration tell the number of heads."""


class BertLayer(nn.Module):
    """One post-norm layer, in which the number of heads follows from the number of query features."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = arguments["hidden_size"], arguments["layer_norm_eps"]
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.intermediate = nn.Linear(width, arguments["intermediate_size"])
        self.output = nn.Linear(arguments["intermediate_size"], width)
        self.output_norm = nn.LayerNorm(width, eps)
        self.head_size = width // arguments["num_attention_heads"]
        self.activation = ACTIVATIONS[arguments["hidden_act"]]
        self.drop = arguments["hidden_dropout_prob"]
        self.attn_drop = arguments["attention_probs_dropout_prob"]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (N, T, width) to (N, T, width); a mask (N, 1, 1, T) is added to the attention scores."""
        q, k, v = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        dropped = self.attn_drop if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, mask, dropped).transpose(1, 2).flatten(2)
        attended = F.dropout(self.attention_output(context), self.drop, self.training)
        x = self.attention_norm(x + attended)
        fed = self.output(self.activation(self.intermediate(x)))
        return self.output_norm(x + F.dropout(fed, self.drop, self.training))  # type: ignore[no-any-return]


class BertClassifier(nn.Module):
    """The full network; positions of a RoBERTa start after `first_position`, its padding token."""

    def __init__(self, arguments: Mapping[str, Any], vocabulary: int, first_position: int | None) -> None:
        super().__init__()
        width = arguments["hidden_size"]
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(arguments["max_position_embeddings"], width)
        self.types = nn.Embedding(arguments["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, arguments["layer_norm_eps"])
        self.layers = nn.ModuleList(BertLayer(arguments) for _ in range(arguments["num_hidden_layers"]))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, arguments["num_labels"])
        self.drop = arguments["hidden_dropout_prob"]
        self.first_position = first_position
        self.masked = -10000.0

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Map tokens, a mask with zeros for padding and types, all (N, T), to logits (N, labels)."""
        if self.first_position is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            real = (input_ids != self.first_position).long()
            positions = real.cumsum(1) * real + self.first_position
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.norm(self.words(input_ids) + self.positions(positions) + self.types(types))
        x = F.dropout(x, self.drop, self.training)
        mask = attention_mask
        if mask is not None:
            mask = (1 - mask[:, None, None, :].to(x.dtype)) * self.masked
        for layer in self.layers:
            x = layer(x, mask)
        pooled = F.dropout(torch.tanh(self.pooler(x[:, 0])), self.drop, self.training)
        return self.classifier(pooled)  # type: ignore[no-any-return]


def build(
    vocab_size: int = 30522,
    hidden_size: int = 768,
    num_hidden_layers: int = 12,
    num_attention_heads: int = 12,
    intermediate_size: int = 3072,
    hidden_act: str = "gelu",
    hidden_dropout_prob: float = 0.1,
    attention_probs_dropout_prob: float = 0.1,
    max_position_embeddings: int = 512,
    type_vocab_size: int = 2,
    layer_norm_eps: float = 1e-12,
    pad_token_id: int | None = None,
    num_labels: int = 2,
    model_type: str = "bert",
    vocab_size_or_config_json_file: int | None = None,
    width_mult_list: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    depth_mult_list: Sequence[float] = (0.5, 0.75, 1.0),
) -> Built:
    """Build the family with the arguments of transformers' `BertConfig`, `num_labels`, and DynaBERT's lists.

    If a checkpoint is loaded, sizes that are not given are read from its tensors.

    Args:
        num_attention_heads: number of heads per layer. If a checkpoint is loaded and this is not given, heads
            have 64 features.
        hidden_act: "gelu", "relu" or "silu".
        pad_token_id: the padding token, which matters for RoBERTa only. If None, 1.
        model_type: "bert" or "roberta".
        vocab_size_or_config_json_file: the former name of `vocab_size`; if given, it takes precedence.
        width_mult_list: the trained multipliers of heads and neurons.
        depth_mult_list: the trained multipliers of layers.
    """
    arguments = dict(locals())
    if model_type not in ("bert", "roberta") or hidden_act not in ACTIVATIONS:
        raise SpecError(
            f"dynabert: model_type is bert or roberta and hidden_act one of {', '.join(ACTIVATIONS)}, got "
            f"{model_type!r} and {hidden_act!r}"
        )
    if hidden_size % num_attention_heads:
        raise SpecError(f"dynabert: hidden_size {hidden_size} is no multiple of {num_attention_heads} heads")
    widths, depths = choices(width_mult_list), choices(depth_mult_list)
    headless = [w for w in widths if not 1 <= round(num_attention_heads * w) <= num_attention_heads]
    if headless or not all(0 < d <= 1 and round(d * num_hidden_layers) for d in depths):
        raise SpecError(
            f"dynabert: multipliers must leave 1..{num_attention_heads} heads and 1..{num_hidden_layers} "
            f"layers, got widths {widths} and depths {depths}"
        )
    full = hidden_size, num_attention_heads, intermediate_size, num_hidden_layers
    layout = DynaBertLayout(*full, widths, depths)
    padding = 1 if pad_token_id is None else pad_token_id
    first_position = padding if model_type == "roberta" else None
    vocabulary = vocab_size_or_config_json_file or vocab_size
    return layout.built(BertClassifier(arguments, vocabulary, first_position))


def kept_layers(depth_mult: float, layers: int) -> list[int]:
    """Return the positions of the layers that a depth keeps, spread as in upstream's `BertEncoder`."""
    return [math.floor(i / depth_mult) for i in range(round(depth_mult * layers))]


@dataclass(frozen=True)
class DynaBertLayout(Layout):
    """The full network's hidden size, heads and neurons per layer, and layers; the multipliers to choose."""

    width: int
    heads: int
    neurons: int
    layers: int
    widths: tuple[float, ...]
    depths: tuple[float, ...]

    family = "dynabert"
    keys: ClassVar = {"width_mult": "width", "depth_mult": "depth"}
    single = ("width_mult", "depth_mult")

    def axes(self) -> list[Axis]:
        width = Axis.uniform("width", ["heads and neurons"], self.widths)
        return [width, Axis.uniform("depth", ["layers"], self.depths)]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        (width,), (depth,) = values["width"], values["depth"]
        fraction = round(self.heads * width) / self.heads
        kept = kept_layers(depth, self.layers)
        return {
            "attention": max(1, int(fraction * self.width)),
            "neurons": max(1, int(fraction * self.neurons)),
            **{f"layer{i}.keep": int(i in kept) for i in range(self.layers)},
        }

    def elastic(self) -> dict[str, Elastic]:
        elastic = {"layers": LayerSelect.on(**{str(i): f"layer{i}.keep" for i in range(self.layers)})}
        for i in range(self.layers):
            for name in ("query", "key", "value"):
                elastic[f"layers.{i}.{name}"] = WeightSlice.on(out="attention")
            elastic[f"layers.{i}.attention_output"] = WeightSlice.on(in_="attention")
            elastic[f"layers.{i}.intermediate"] = WeightSlice.on(out="neurons")
            elastic[f"layers.{i}.output"] = WeightSlice.on(in_="neurons")
        return elastic


def _is_roberta(shapes: Shapes) -> bool:
    return any(re.match(r"roberta\.|classifier\.out_proj\.", key) for key in shapes)


def _usual_heads(shapes: Shapes, given: Mapping[str, Any]) -> Any:
    width = given.get("hidden_size") or shapes.size("words.weight", 1)
    return given.get("num_attention_heads", None if width % HEAD_FEATURES else width // HEAD_FEATURES)


BERT = (
    ("bert.embeddings.word_embeddings", "words"),
    ("bert.embeddings.position_embeddings", "positions"),
    ("bert.embeddings.token_type_embeddings", "types"),
    ("bert.embeddings.LayerNorm", "norm"),
    ("bert.encoder.layer.#.attention.self", "layers.#"),
    ("bert.encoder.layer.#.attention.output.dense", "layers.#.attention_output"),
    ("bert.encoder.layer.#.attention.output.LayerNorm", "layers.#.attention_norm"),
    ("bert.encoder.layer.#.intermediate.dense", "layers.#.intermediate"),
    ("bert.encoder.layer.#.output.dense", "layers.#.output"),
    ("bert.encoder.layer.#.output.LayerNorm", "layers.#.output_norm"),
    ("bert.pooler.dense", "pooler"),
    ("classifier", "classifier"),
)
ROBERTA = (
    ("classifier.dense", "pooler"),
    ("classifier.out_proj", "classifier"),
    *((theirs.replace("bert.", "roberta.", 1), own) for theirs, own in BERT[:-2]),
)

FAMILY = Family(
    build,
    names=(*BERT, *ROBERTA),
    spellings=(
        (r"^bert\.|^roberta\.(?!pooler\.)", ""),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    ),
    dialect=lambda constructor: ROBERTA if constructor.get("model_type") == "roberta" else BERT,
    source="huawei-noah/Pretrained-Language-Model, DynaBERT",
    licence="Apache-2.0",
    recognises=lambda keys: keys.have(r"encoder\.layer\.\d+\.attention\.self\.query\."),
    ordinary="a BERT or RoBERTa",
    checkpoints=("a directory of pytorch_model.bin or model.safetensors, and config.json",),
    unused=r"position_ids$|^cls\.|^lm_head\.|^roberta\.pooler\.",
    shown={
        "vocab_size": lambda shapes, _: shapes.size("words.weight"),
        "hidden_size": lambda shapes, _: shapes.size("words.weight", 1),
        "max_position_embeddings": lambda shapes, _: shapes.size("positions.weight"),
        "type_vocab_size": lambda shapes, _: shapes.size("types.weight"),
        "intermediate_size": lambda shapes, _: shapes.size("layers.0.intermediate.weight"),
        "num_labels": lambda shapes, _: shapes.size("classifier.weight"),
        "num_hidden_layers": lambda shapes, _: shapes.layers("layers"),
        "num_attention_heads": _usual_heads,
        "model_type": lambda shapes, _: "roberta" if _is_roberta(shapes) else None,
        "layer_norm_eps": lambda s, given: given.get("layer_norm_eps", 1e-5 if _is_roberta(s) else None),
    },
    input_shape=(128,),
    input_dtype="int64",
)
