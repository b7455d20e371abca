"""Subnets in the vocabulary of transformers: `per_layer_config`, the sizes of layers that differ.

A configuration of transformers states the sizes of layers that differ from its global ones:

    per_layer_config = {3: {"intermediate_size": 4096}, 5: {"skip": ["attention", "mlp"]}}

`LayerVocabulary` says which of these fields mean which groups of a description, so that the space of a
language model reads and writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from subnetact.errors import IllegalChoice, SpecError
from subnetact.space import AxisValues
from subnetact.spec import shown

__all__ = ["NEURONS", "SKIPPED", "LayerVocabulary", "layer_stacks", "number_of", "vocabulary_of"]

NEURONS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "hidden_dim",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
"""Fields of configurations that state a number of neurons."""

SKIPPED = ("attention", "mlp")
"""What `skip` lists for a layer that is skipped as a whole."""


@dataclass(frozen=True)
class LayerVocabulary:
    """Which fields of `per_layer_config` state the sizes of the layers of a language model.

    Attributes:
        stack: the name of the stack of layers in the model.
        layers: the number of layers.
        neurons: the field with the number of neurons of a layer, and the number in the model.
        queries: the field with the number of query heads of a layer, and the number in the model.
        pairs: the field with the number of key and value heads of a layer, and the number in the model. If
            all queries share one, they have no field.
    """

    stack: str
    layers: int
    neurons: tuple[str, int] | None
    queries: tuple[str, int] | None
    pairs: tuple[str, int] | None

    def fields(self, axis: str, size: int) -> dict[str, int]:
        """Return the fields of one layer that state a size of an axis, `"ffn"` or `"heads"`."""
        if axis == "ffn":
            return {} if self.neurons is None else {self.neurons[0]: size}
        if self.queries is None:
            return {}
        if self.pairs is None:
            return {self.queries[0]: size}
        return {self.queries[0]: size * self.queries[1] // self.pairs[1], self.pairs[0]: size}

    def full(self) -> dict[str, int]:
        """Return the fields with the numbers in the model."""
        return dict(pair for pair in (self.neurons, self.queries, self.pairs) if pair is not None)

    def layer_of(self, module: str) -> int:
        """Return the number of the layer that a module is in."""
        inside = module.removeprefix(f"{self.stack}.") if module.startswith(f"{self.stack}.") else ""
        number = inside.partition(".")[0]
        if not number.isdigit():
            raise SpecError(f"{module} is in no layer of {self.stack}")
        return int(number)


def layer_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of as many layers as a configuration states that has a `per_layer_config`."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "per_layer_config") or config.is_encoder_decoder:
        return {}
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = ((path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList))
    return {path: layers for path, layers in lists if len(layers) == count}


def vocabulary_of(model: nn.Module, slots: Sequence[Any]) -> LayerVocabulary | None:
    """Return the vocabulary of a language model of Hugging Face, or None for other models."""
    modules = {
        m for slot in slots for m in (getattr(slot, "blocks", None) or [x.module for x in slot.members])
    }
    stacks = [s for s in layer_stacks(model) if all(f"{m}.".startswith(f"{s}.") for m in modules)]
    config: Any = getattr(model, "config", None)
    if len(stacks) != 1 or config.is_heterogeneous:
        return None
    config = config.get_text_config()
    ffn = {slot.full for slot in slots if slot.axis == "ffn"}
    heads = {slot.full for slot in slots if slot.axis == "heads"}
    queries, pairs = (number_of(config, f) for f in ("num_attention_heads", "num_key_value_heads"))
    field = next((f for f in NEURONS if {number_of(config, f)} == ffn), None)
    grouped = pairs if pairs > 1 else queries
    wrong = (ffn and field is None) or (heads and heads != {grouped})
    if wrong or any(slot.axis not in ("depth", "ffn", "heads") for slot in slots):
        return None
    return LayerVocabulary(
        stacks[0],
        int(config.num_hidden_layers),
        (field, ffn.pop()) if field else None,
        ("num_attention_heads", queries) if heads else None,
        ("num_key_value_heads", pairs) if heads and pairs > 1 else None,
    )


def number_of(config: Any, field: str) -> int:
    """Return the whole number that a field of a configuration states; if it states none, 0."""
    value = getattr(config, field, None)
    return value if type(value) is int else 0


@dataclass(frozen=True)
class LayerConfigWriter:
    """Writes axis values as `per_layer_config`. It is an object, so that spaces can be pickled."""

    vocabulary: LayerVocabulary
    slots: tuple[Any, ...]

    def __call__(self, values: AxisValues) -> dict[int, dict[str, Any]]:
        """Return the fields of every layer that differs from the model; `skip` is in that of skipped ones."""
        words, full = self.vocabulary, self.vocabulary.full()
        found: dict[int, dict[str, Any]] = {i: {} for i in range(words.layers)}
        choices = {axis: iter(chosen) for axis, chosen in values.items()}
        for slot in self.slots:
            size = slot.sizes[next(choices[slot.axis])]
            if slot.axis == "depth":
                for block in slot.blocks[size:]:
                    found[words.layer_of(block)]["skip"] = list(SKIPPED)
            else:
                fields = words.fields(slot.axis, size).items()
                layer = words.layer_of(slot.members[0].module)
                found[layer].update((field, number) for field, number in fields if number != full[field])
        return {layer: fields for layer, fields in found.items() if fields}


@dataclass(frozen=True)
class LayerConfigReader:
    """Reads axis values, a `per_layer_config`, or a configuration of transformers that has one."""

    vocabulary: LayerVocabulary
    slots: tuple[Any, ...]

    def __call__(self, config: Any) -> Mapping[str, Any]:
        """Return axis values."""
        axes = {slot.axis for slot in self.slots}
        if isinstance(config, Mapping) and not (config and set(config) <= axes):
            return self._values(config, self.vocabulary.full())
        if hasattr(config, "per_layer_config"):
            return self._stated(config)
        return config  # type: ignore[no-any-return]  # The space refuses what is no mapping of axes.

    def _stated(self, config: Any) -> Mapping[str, Any]:
        """Return the axis values of a configuration, which states other global numbers, too."""
        config = config.get_text_config()
        if config.num_hidden_layers != self.vocabulary.layers:
            raise SpecError(
                f"the configuration has {config.num_hidden_layers} layers, the model "
                f"{self.vocabulary.layers}; list skipped layers in per_layer_config"
            )
        facts = config.to_dict()
        mapped = getattr(config, "attribute_map", {})
        default = {f: facts.get(mapped.get(f, f)) or n for f, n in self.vocabulary.full().items()}
        return self._values(facts.get("per_layer_config") or {}, default)

    def _values(self, layers: Mapping[Any, Any], default: Mapping[str, int]) -> Mapping[str, Any]:
        words, known = self.vocabulary, self.vocabulary.full()
        stated, skipped = {i: dict(default) for i in range(words.layers)}, set()
        for key, fields in layers.items():
            layer = _numbered(key, words.layers)
            if not isinstance(fields, Mapping):
                raise SpecError(f"layer {layer}: expected a mapping of fields, got {shown(fields)}")
            unknown = [field for field in fields if field not in known and field != "skip"]
            if unknown:
                raise SpecError(
                    f"layer {layer}: {shown(unknown[0])} is not elastic; choose from {', '.join(known)}, skip"
                )
            skip = fields.get("skip") or []
            if isinstance(skip, str) or sorted(map(str, skip)) not in ([], sorted(SKIPPED)):
                raise IllegalChoice(
                    f"layer {layer}: skip={shown(skip)} is not a choice; a layer is kept, or skipped as a "
                    f"whole ({list(SKIPPED)})"
                )
            skipped |= {layer} if skip else set()
            stated[layer].update({field: n for field, n in fields.items() if field != "skip"})
        values: dict[str, list[Any]] = {}
        expected, never = {layer: dict(known) for layer in stated}, set(skipped)
        for slot in self.slots:
            if slot.axis == "depth":
                choice = self._depth(slot, skipped)
                never -= set(map(words.layer_of, slot.blocks))
            else:
                layer = words.layer_of(slot.members[0].module)
                choice = self._size(slot, layer, stated[layer])
                expected[layer].update(words.fields(slot.axis, slot.sizes[choice]))
            values.setdefault(slot.axis, []).append(choice)
        if never:
            raise IllegalChoice(f"layer {min(never)} is in every subnet and cannot be skipped")
        for layer, fields in expected.items():
            for field, number in fields.items():
                if stated[layer][field] != number:
                    asked = shown(stated[layer][field])
                    raise IllegalChoice(f"layer {layer}: {field} is {number} in every subnet, got {asked}")
        return values

    def _depth(self, slot: Any, skipped: set[int]) -> Any:
        numbers = list(map(self.vocabulary.layer_of, slot.blocks))
        for choice, size in slot.sizes.items():
            if skipped & set(numbers) == set(numbers[size:]):
                return choice
        legal = " or ".join(str(sorted(numbers[size:])) for size in dict.fromkeys(slot.sizes.values()))
        raise IllegalChoice(
            f"{slot.name}: no subnet skips exactly {sorted(skipped & set(numbers))} of these layers; choose "
            f"{legal}"
        )

    def _size(self, slot: Any, layer: int, stated: Mapping[str, int]) -> Any:
        legal = {choice: self.vocabulary.fields(slot.axis, size) for choice, size in slot.sizes.items()}
        for choice, fields in legal.items():
            if all(stated[field] == number for field, number in fields.items()):
                return choice
        asked = {field: stated[field] for field in next(iter(legal.values()))}
        told = " or ".join(dict.fromkeys(map(_told, legal.values())))
        raise IllegalChoice(f"layer {layer}: {_told(asked)} is not a choice; choose {told}")


def _numbered(key: Any, layers: int) -> int:
    number = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 10 else key
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < layers:
        raise SpecError(f"per_layer_config: {shown(key)} is no layer; choose 0 to {layers - 1}")
    return number


def _told(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={shown(number)}" for field, number in fields.items())
