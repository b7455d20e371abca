"""Gemma 3n, a MatFormer: the first neurons of a feed-forward network are a smaller one; layers are skipped.

transformers builds the network, of the language model alone. Only the feed-forward widths are sliced. The
activation sparsity of the first layers takes mean and deviation over the width of the subnet.

A skipped layer is the identity in its place, for all AltUp inputs. The last layers own no keys and values.
They read those of the last layer of their type in front of them, and these layers cannot be skipped.

`space.parse` takes a row of the published slices, as `csv.DictReader` reads it from their CSV file, and
`space.format` returns the two columns that identify a subnet.

Source: Gemma 3n (google/gemma-3n-E4B, transformers/models/gemma3n), the MatFormer Lab of
google-gemini/gemma-cookbook, and google/gemma3n-slicing-configs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from ofa_adapters.checkpoint import parsed_config
from ofa_adapters.family import Built, Family
from ofa_adapters.layout import Layout, plain
from subnetact.errors import CheckpointError, SpecError, extra_needed
from subnetact.files.documents import StrPath
from subnetact.files.tensors import named_dtype
from subnetact.operators import Elastic, LayerSelect, WeightSlice
from subnetact.space import Axis, AxisValues, Slot, UsedWhen
from subnetact.spec import shown

DIMS, SKIPPED = "FFN Hidden Dims", "Layers Skipped"
"""The columns of the published slices that identify a subnet."""


@dataclass(frozen=True)
class Gemma3nLayout(Layout):
    """The widths to choose from per layer, ascending, and the layers whose keys and values others read."""

    widths: tuple[tuple[int, ...], ...]
    storing: tuple[int, ...]

    family = "gemma3n"

    def axes(self) -> list[Axis]:
        keep, ffn = [], []
        for i, widths in enumerate(self.widths):
            fixed = i in self.storing
            name = f"layer {i}, whose keys and values later layers read" if fixed else f"layer {i}"
            keep.append(Slot(name, (1,) if fixed else (0, 1)))
            ffn.append(Slot(f"layer {i}", widths, UsedWhen("keep", i, (1,))))
        return [Axis("ffn", tuple(ffn)), Axis("keep", tuple(keep))]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        kept = {f"layers.{i}.keep": keep for i, keep in enumerate(values["keep"])}
        return kept | {f"layers.{i}.ffn": w or self.widths[i][0] for i, w in enumerate(values["ffn"])}

    def elastic(self) -> dict[str, Elastic]:
        elastic: dict[str, Elastic] = {}
        for i in range(len(self.widths)):
            mlp, width = f"model.layers.{i}.mlp", f"layers.{i}.ffn"
            elastic[f"{mlp}.gate_proj"] = elastic[f"{mlp}.up_proj"] = WeightSlice.on(out=width)
            elastic[f"{mlp}.down_proj"] = WeightSlice.on(in_=width)
        skippable = {str(i): f"layers.{i}.keep" for i in range(len(self.widths)) if i not in self.storing}
        elastic["model.layers"] = LayerSelect.on(**skippable)
        return elastic

    def format(self, values: AxisValues) -> dict[str, list[int]]:
        kept = [i for i, keep in enumerate(values["keep"]) if keep]
        skipped = [i for i, keep in enumerate(values["keep"]) if not keep]
        return {DIMS: [values["ffn"][i] for i in kept], SKIPPED: skipped}

    def parse(self, config: Any) -> Any:
        """Return the values of the axes for a published slice, or what is no slice as it is."""
        if not isinstance(config, Mapping) or DIMS not in config:
            return config
        count = len(self.widths)
        skipped, widths = _numbers(SKIPPED, config.get(SKIPPED)), _numbers(DIMS, config[DIMS])
        kept = [i for i in range(count) if i not in skipped]
        if sorted([*skipped, *kept]) != [*range(count)] or len(widths) != len(kept):
            raise SpecError(
                f"gemma3n: {DIMS} has {len(widths)} numbers and {SKIPPED} {shown(skipped)}; give one number "
                f"for each of the layers 0 to {count - 1} that are not skipped, and every layer once"
            )
        given = dict(zip(kept, widths, strict=True))
        return {
            "ffn": [given.get(i, self.widths[i][0]) for i in range(count)],
            "keep": [int(i in given) for i in range(count)],
        }


def _numbers(column: str, value: Any) -> list[int]:
    """Read a list of whole numbers, which may be a text of products: "[2_048 * 4, 2_048 * 8]"."""
    numbers = plain(value)
    text = "null" if value is None else value.strip() if isinstance(value, str) else "other"
    if re.fullmatch(r"(null|none|\[\s*\])?", text, re.IGNORECASE):
        return []
    if re.fullmatch(r"\[[\d_*,\s]*\]", text, re.ASCII):
        products = text[1:-1].split(",")
        with suppress(ValueError):  # A factor is no number.
            numbers = [math.prod(map(int, product.split("*"))) for product in products]
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise SpecError(f"gemma3n: {column}: expected a list of whole numbers, got {shown(value)}")
    return numbers


def build(
    config: Mapping[str, Any] | None = None,
    widths: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dtype: str = "float32",
) -> Built:
    """Build the family with transformers.

    Args:
        config: the arguments of transformers' `Gemma3nTextConfig`, or its `to_dict()`. If None, the defaults,
            which are those of E4B. Loading a checkpoint from a directory reads them from its `config.json`.
        widths: the feed-forward widths to choose from, in every layer or one list per layer. If None, half of
            the full width of a layer and all of it, as Gemma 3n was trained.
        dtype: the dtype of the weights, an attribute name of torch.
    """
    with extra_needed("Gemma 3n is built by transformers: pip install 'subnetact[hf]'"):
        from transformers import Gemma3nForCausalLM, Gemma3nTextConfig
    try:
        settings: Any = Gemma3nTextConfig(**dict(config or {}))
        modes = settings.kv_sharing_modes
    except Exception as error:  # The checks of transformers raise errors of their own classes.
        raise SpecError(f"gemma3n: config is no configuration of Gemma 3n: {error}") from error
    kind = named_dtype(dtype, "gemma3n: dtype", of_weights=True)
    full = list(settings.intermediate_size)
    layout = Gemma3nLayout(_widths(full, widths), tuple(i for i, mode in enumerate(modes) if mode == "store"))
    network: nn.Module = Gemma3nForCausalLM(settings)
    return layout.built(network.to(kind).eval())


def _widths(full: list[int], given: Any) -> tuple[tuple[int, ...], ...]:
    if given is None:
        return tuple(tuple(sorted({max(1, n // 2), n})) for n in full)
    given = plain(given)
    each = isinstance(given, list) and all(isinstance(own, list) for own in given)
    if not isinstance(given, list) or not given or (each and len(given) != len(full)):
        raise SpecError(f"gemma3n: widths are a list of numbers, or one list per layer, got {shown(given)}")
    found = []
    for i, n in enumerate(full):
        own = given[i] if each else given
        if not own or any(type(w) is not int or not 1 <= w <= n for w in own):
            raise SpecError(f"gemma3n: widths of layer {i} are whole numbers from 1 to {n}, got {shown(own)}")
        found.append(tuple(sorted({*own, n})))
    return tuple(found)


def settings(directory: StrPath) -> dict[str, Any]:
    """Return the configuration in a directory that transformers saved, of the language or the whole model."""
    content = parsed_config(directory)
    text = content.get("text_config", content)
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if kind != "gemma3n_text":
        raise CheckpointError(f"{directory}: config.json is of {shown(kind)}, not of gemma3n_text")
    return {"config": dict(text)}


FAMILY = Family(
    build,
    spellings=(
        (r"^(model\.language_model|language_model\.model)\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
    source="huggingface/transformers, google-gemini/gemma-cookbook",
    licence="Apache-2.0",
    recognises=lambda keys: keys.have(r"\.altup\.prediction_coefs\.", r"embed_tokens_per_layer\.weight$"),
    checkpoints=("google/gemma-3n-E4B", "google/gemma-3n-E4B-it"),
    unused=r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\.|\.self_attn\.(k|v)_(proj|norm)\.",
    settings=settings,
    input_shape=(8,),
    input_dtype="int64",
)
