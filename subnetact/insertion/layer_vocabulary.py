"""Subnets in the vocabulary of transformers, whose configurations state what differs between layers:

per_layer_config = {3: {"intermediate_size": 4096}, 5: {"skip": ["attention", "mlp"]}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from subnetact.errors import IllegalChoice, SpecError
from subnetact.operators import vocabulary
from subnetact.operators.vocabulary import CONFIGURED_HEADS, NEURONS, number_of
from subnetact.space import AxisValues
from subnetact.spec import grouped, shown

SKIPPED = ("attention", "mlp")
"""What `skip` lists for a layer that is skipped as a whole."""


@dataclass(frozen=True)
class LayerVocabulary:
    """A stack of so many layers, and by axis the fields that state sizes, with their numbers in the model."""

    stack: str
    layers: int
    stated: Mapping[str, Mapping[str, int]]

    def fields(self, axis: str, size: int) -> dict[str, int]:
        """Return the fields of one layer that state a size of an axis."""
        full = self.stated.get(axis, {})
        return {field: size * number // min(full.values()) for field, number in full.items()}

    def full(self) -> dict[str, int]:
        """Return the fields with the numbers in the model."""
        return {field: number for fields in self.stated.values() for field, number in fields.items()}


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
    inside = [slot for slot in slots if slot.axis != "stream"]
    homes = (getattr(slot, "blocks", None) or [m.module for m in slot.members] for slot in inside)
    modules = set[str]().union(*homes)
    stacks = [s for s in layer_stacks(model) if all(f"{m}.".startswith(f"{s}.") for m in modules)]
    config: Any = getattr(model, "config", None)
    if len(stacks) != 1 or config.is_heterogeneous:
        return None
    config = config.get_text_config()
    sizes = grouped((slot.axis, slot.full) for slot in slots if slot.axis != "depth")
    heads = {field: number for field in CONFIGURED_HEADS if (number := number_of(config, field)) > 1}
    named = {"ffn": NEURONS, "experts": vocabulary.EXPERTS_PER_TOKEN, "pool": vocabulary.EXPERTS}
    stacked = {any("." in m.part for m in slot.members) for slot in slots if slot.axis == "ffn"}
    parts = {m.part for slot in slots for m in getattr(slot, "members", ())}
    # Experts beside other neurons of a layer, and mixers that keep a state, have fields of their own.
    if len(stacked) > 1 or parts & {"conv_dim", "key_dim"}:
        return None
    if stacked == {True}:
        named["ffn"] = (*vocabulary.EXPERT_WIDTHS, *NEURONS)
    candidates = {axis: [{field: number_of(config, field)} for field in own] for axis, own in named.items()}
    groups = {field: number for field in vocabulary.EXPERT_GROUPS if (number := number_of(config, field))}
    candidates["pool"] += [{**fields, **groups} for fields in candidates["pool"] if groups]
    candidates |= {"heads": [heads], "stream": [{"hidden_size": number_of(config, "hidden_size")}]}
    stated = {}
    for axis, full in sorted(sizes.items()):
        fitting = [each for each in candidates.get(axis, ()) if each and {min(each.values())} == {*full}]
        if not fitting:
            return None
        stated[axis] = fitting[0]
    return LayerVocabulary(stacks[0], int(config.num_hidden_layers), stated)


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Return the token embeddings of a model of transformers; None if it has none, as one for images."""
    try:
        found: Any = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


@dataclass(frozen=True)
class LayerConfigs:
    """Reads and writes axis values as `per_layer_config`. It is an object, so that spaces can be pickled."""

    vocabulary: LayerVocabulary
    slots: tuple[Any, ...]

    def write(self, values: AxisValues) -> dict[int, dict[str, Any]]:
        """Return the fields of every layer that differs from the model; `skip` is in that of skipped ones."""
        full = self.vocabulary.full() | {"skip": False}
        found: dict[int, dict[str, Any]] = {i: {} for i in range(self.vocabulary.layers)}
        choices = {axis: iter(chosen) for axis, chosen in values.items()}
        for slot in self.slots:
            for (layer, field), number in self._meanings(slot)[next(choices[slot.axis])].items():
                if number != full[field]:
                    found[layer][field] = list(SKIPPED) if field == "skip" else number
        return {layer: fields for layer, fields in found.items() if fields}

    def read(self, config: Any) -> Mapping[str, Any]:
        """Return axis values: those given, or those of a `per_layer_config` or a configuration with one."""
        axes = {slot.axis for slot in self.slots}
        full = self.vocabulary.full()
        if isinstance(config, Mapping) and not (config and set(config) <= axes):
            return self._values(config, full)
        if not hasattr(config, "per_layer_config"):
            return config  # type: ignore[no-any-return]  # The space refuses what is no mapping of axes.
        config = config.get_text_config()
        if config.num_hidden_layers != self.vocabulary.layers:
            raise SpecError(
                f"the configuration has {config.num_hidden_layers} layers, the model "
                f"{self.vocabulary.layers}; list skipped layers in per_layer_config"
            )
        facts, mapped = config.to_dict(), getattr(config, "attribute_map", {})
        default = {field: facts.get(mapped.get(field, field)) or n for field, n in full.items()}
        return self._values(facts.get("per_layer_config") or {}, default)

    def _meanings(self, slot: Any) -> dict[Any, dict[tuple[int, str], int]]:
        """Return what every choice of a slot says of the fields of layers."""
        words = self.vocabulary
        modules = getattr(slot, "blocks", None) or [slot.members[0].module]
        inside = (module.removeprefix(f"{words.stack}.").partition(".")[0] for module in modules)
        layers = range(words.layers) if slot.axis == "stream" else [*map(int, inside)]

        def meaning(size: int) -> dict[tuple[int, str], int]:
            if slot.axis == "depth":
                return {(layer, "skip"): i >= size for i, layer in enumerate(layers)}
            return {(layer, name): n for layer in layers for name, n in words.fields(slot.axis, size).items()}

        return {choice: meaning(size) for choice, size in slot.sizes.items()}

    def _values(self, layers: Mapping[Any, Any], default: Mapping[str, int]) -> Mapping[str, Any]:
        """Return the choices that say what the layers state, which otherwise have default numbers."""
        numbered = range(self.vocabulary.layers)
        expected, stated = (
            {(i, field): n for i in numbered for field, n in (*numbers.items(), ("skip", False))}
            for numbers in (self.vocabulary.full(), default)
        )
        for key, fields in layers.items():
            layer = _numbered(key, self.vocabulary.layers)
            if not isinstance(fields, Mapping):
                raise SpecError(f"layer {layer}: expected a mapping of fields, got {shown(fields)}")
            for field, number in fields.items():
                if (layer, field) not in stated:
                    known = ", ".join((*default, "skip"))
                    raise SpecError(f"layer {layer}: {shown(field)} is not elastic; choose from {known}")
                stated[layer, field] = _skips(layer, number) if field == "skip" else number
        values: dict[str, list[Any]] = {}
        for slot in self.slots:
            meanings = self._meanings(slot)
            fitting = [choice for choice, says in meanings.items() if says.items() <= stated.items()]
            if not fitting:
                said = {place: stated[place] for place in next(iter(meanings.values()))}
                where = ", ".join(map(str, sorted({layer for layer, _ in said})))
                legal = " or ".join(dict.fromkeys(map(_told, meanings.values())))
                raise IllegalChoice(f"layer {where}: {_told(said)} is not a choice; choose {legal}")
            values.setdefault(slot.axis, []).append(fitting[0])
            expected |= meanings[fitting[0]]
        for (layer, field), number in expected.items():
            asked = stated[layer, field]
            if asked != number:
                raise IllegalChoice(
                    f"layer {layer} is in every subnet and cannot be skipped"
                    if field == "skip"
                    else f"layer {layer}: {field} is {number} in every subnet, got {shown(asked)}"
                )
        return values


def _numbered(key: Any, layers: int) -> int:
    number = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 10 else key
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < layers:
        raise SpecError(f"per_layer_config: {shown(key)} is no layer; choose 0 to {layers - 1}")
    return number


def _skips(layer: int, parts: Any) -> bool:
    listed = [] if parts is None else parts
    if not isinstance(listed, list | tuple | set) or sorted(map(str, listed)) not in ([], sorted(SKIPPED)):
        raise IllegalChoice(
            f"layer {layer}: skip={shown(parts)} is not a choice; a layer is kept, or skipped as a whole "
            f"({list(SKIPPED)})"
        )
    return bool(listed)


def _told(meaning: Mapping[tuple[int, str], Any]) -> str:
    """Return in words what a choice says of the fields of layers."""
    if all(field == "skip" for _, field in meaning):
        return f"skipping {sorted(layer for (layer, _), skips in meaning.items() if skips)}"
    return ", ".join(f"{field}={shown(number)}" for (_, field), number in meaning.items())
