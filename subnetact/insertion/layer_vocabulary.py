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

__all__ = ["NEURONS", "SKIPPED", "LayerVocabulary", "number_of", "vocabulary_of"]

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

    def layer_of(self, module: str) -> int | None:
        """Return the number of the layer that a module is in, or None if it is in none."""
        inside = module.removeprefix(f"{self.stack}.") if module.startswith(f"{self.stack}.") else ""
        number = inside.partition(".")[0]
        return int(number) if number.isdigit() else None


def vocabulary_of(model: nn.Module, slots: Sequence[Any]) -> LayerVocabulary | None:
    """Return the vocabulary of a language model of Hugging Face, or None for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "per_layer_config") or config.is_encoder_decoder or config.is_heterogeneous:
        return None
    config = config.get_text_config()
    modules = {
        m for slot in slots for m in (getattr(slot, "blocks", None) or [x.module for x in slot.members])
    }
    stacks = {
        path
        for path, stack in model.named_modules()
        if isinstance(stack, nn.ModuleList)
        and len(stack) == getattr(config, "num_hidden_layers", None)
        and all(f"{module}.".startswith(f"{path}.") for module in modules)
    }
    if len(stacks) != 1:
        return None
    ffn = {slot.full for slot in slots if slot.axis == "ffn"}
    heads = {slot.full for slot in slots if slot.axis == "heads"}
    queries, pairs = (number_of(config, f) for f in ("num_attention_heads", "num_key_value_heads"))
    field = next((f for f in NEURONS if {number_of(config, f)} == ffn), None)
    grouped = pairs if pairs > 1 else queries
    wrong = (ffn and field is None) or (heads and heads != {grouped})
    if wrong or any(slot.axis not in ("depth", "ffn", "heads") for slot in slots):
        return None
    return LayerVocabulary(
        stacks.pop(),
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
        found: dict[int, dict[str, Any]] = {i: {} for i in range(self.vocabulary.layers)}
        full = self.vocabulary.full()
        for slot, choice in _chosen(self.slots, values):
            size = slot.sizes[choice]
            if slot.axis == "depth":
                for block in slot.blocks[size:]:
                    found[_layer(self.vocabulary, block)]["skip"] = list(SKIPPED)
            else:
                fields = self.vocabulary.fields(slot.axis, size)
                changed = {field: number for field, number in fields.items() if number != full[field]}
                found[_layer(self.vocabulary, slot.members[0].module)].update(changed)
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
        layers = facts.get("per_layer_config") or {}
        mapped = getattr(config, "attribute_map", {})
        stated = {field: facts.get(mapped.get(field, field)) for field in self.vocabulary.full()}
        return self._values(layers, {**self.vocabulary.full(), **{f: n for f, n in stated.items() if n}})

    def _values(self, layers: Mapping[Any, Any], default: Mapping[str, int]) -> Mapping[str, Any]:
        given = {_numbered(key, self.vocabulary.layers): value for key, value in layers.items()}
        known = self.vocabulary.full()
        for layer, fields in given.items():
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
        skipped = {layer for layer, fields in given.items() if fields.get("skip")}
        values: dict[str, list[Any]] = {}
        for slot in self.slots:
            values.setdefault(slot.axis, []).append(
                self._depth(slot, skipped) if slot.axis == "depth" else self._size(slot, given, default)
            )
        elastic = {_layer(self.vocabulary, b) for s in self.slots if s.axis == "depth" for b in s.blocks}
        if skipped - elastic:
            raise IllegalChoice(f"layer {min(skipped - elastic)} is in every subnet and cannot be skipped")
        self._check_fixed(given, default)
        return values

    def _depth(self, slot: Any, skipped: set[int]) -> Any:
        numbers = [_layer(self.vocabulary, block) for block in slot.blocks]
        for choice, size in slot.sizes.items():
            if {layer for layer in numbers if layer in skipped} == set(numbers[size:]):
                return choice
        legal = " or ".join(str(sorted(numbers[size:])) for size in dict.fromkeys(slot.sizes.values()))
        raise IllegalChoice(
            f"{slot.name}: no subnet skips exactly {sorted(skipped & set(numbers))} of these layers; choose "
            f"{legal}"
        )

    def _size(self, slot: Any, given: Mapping[int, Mapping[str, Any]], default: Mapping[str, int]) -> Any:
        layer = _layer(self.vocabulary, slot.members[0].module)
        stated = {**default, **given.get(layer, {})}
        for choice, size in slot.sizes.items():
            fields = self.vocabulary.fields(slot.axis, size)
            if all(stated[field] == number for field, number in fields.items()):
                return choice
        asked = {field: stated[field] for field in self.vocabulary.fields(slot.axis, slot.full)}
        legal = (self.vocabulary.fields(slot.axis, size) for size in dict.fromkeys(slot.sizes.values()))
        raise IllegalChoice(
            f"layer {layer}: {_told(asked)} is not a choice; choose {' or '.join(map(_told, legal))}"
        )

    def _check_fixed(self, given: Mapping[int, Mapping[str, Any]], default: Mapping[str, int]) -> None:
        """Refuse other numbers for layers whose sizes are the same in every subnet."""
        elastic = {
            (_layer(self.vocabulary, slot.members[0].module), field)
            for slot in self.slots
            if slot.axis != "depth"
            for field in self.vocabulary.fields(slot.axis, slot.full)
        }
        for layer in range(self.vocabulary.layers):
            for field, number in self.vocabulary.full().items():
                asked = given.get(layer, {}).get(field, default[field])
                if (layer, field) not in elastic and asked != number:
                    raise IllegalChoice(
                        f"layer {layer}: {field} is {number} in every subnet, got {shown(asked)}"
                    )


def _chosen(slots: Sequence[Any], values: AxisValues) -> list[tuple[Any, Any]]:
    """Return pairs of a slot and its choice."""
    position: dict[str, int] = {}
    found = []
    for slot in slots:
        at = position.get(slot.axis, 0)
        position[slot.axis] = at + 1
        found.append((slot, values[slot.axis][at]))
    return found


def _layer(vocabulary: LayerVocabulary, module: str) -> int:
    number = vocabulary.layer_of(module)
    if number is None:
        raise SpecError(f"{module} is in no layer of {vocabulary.stack}")
    return number


def _numbered(key: Any, layers: int) -> int:
    number = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 10 else key
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < layers:
        raise SpecError(f"per_layer_config: {shown(key)} is no layer; choose 0 to {layers - 1}")
    return number


def _told(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={shown(number)}" for field, number in fields.items())
