"""An extracted subnet of a Hugging Face model as a model of its own, with a configuration that describes it.

Sizes that differ between layers go into its `per_layer_config`, from which `heterogeneous` makes models.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from subnetact.comparison import equal
from subnetact.device import raise_if_explained
from subnetact.errors import InsertError
from subnetact.insertion.experts import ROUTING
from subnetact.insertion.key_value_cache import note_skipped_
from subnetact.insertion.layer_vocabulary import SKIPPED, embedding_of, layer_stacks
from subnetact.operators import vocabulary
from subnetact.operators.skipped_layer import SkippedLayer, skipped
from subnetact.operators.view_module import module_class
from subnetact.operators.vocabulary import CONFIGURED_HEADS, DEPTHS, NEURONS, ROUTED, number_of
from subnetact.supernet.adapters import require_no_adapters
from subnetact.supernet.batches import as_batch
from subnetact.supernet.module_outputs import outputs_of

Tensors: TypeAlias = Mapping[str, Tensor]
Place: TypeAlias = tuple[str, int]  # a tensor and an axis
Places: TypeAlias = Mapping[Place, int]
LAYERED = "subnetact"
"""The model type of models whose layers differ in size; `LAYERS_OF` says which one it is of the library."""
LAYERS_OF = "layers_of"


def as_pretrained(model: nn.Module, example: Any) -> nn.Module:
    """Return an extracted subnet as an ordinary model of Hugging Face, which can be saved and loaded again.

    Args:
        model: what `supernet.extract(spec)` returned for a supernet of a Hugging Face model. It is not
            changed.
        example: a batch for the model: a tensor, a tuple of arguments or a dictionary of named arguments.

    Returns:
        A model without the skipped layers, whose configuration has the sizes of the subnet, and which
        computes the same on the example. What its `save_pretrained` writes is read by `from_pretrained` of
        its class or, if layers differ in size, of `heterogeneous(cls)` and of the Auto classes.

    Raises:
        InsertError: the model has no configuration, or none describes the subnet; the message says which size
            differs between layers, or has no field; or layers have adapters.

    Example:
        >>> small = as_pretrained(supernet.extract(spec), example)
        >>> small.save_pretrained("small")
    """
    example = as_batch(example)
    require_no_adapters(model, "as_pretrained")
    old = getattr(model, "config", None)
    if old is None or not hasattr(model, "save_pretrained") or not hasattr(old, "to_dict"):
        raise InsertError(f"{type(model).__name__} is no Hugging Face model; save its state_dict instead")
    old = copy.deepcopy(old)
    for field, number in vars(model).get("full_sizes", {}).items():
        setattr(old.get_text_config(), field, number)
        if number is None and field in vars(old.get_text_config()):
            delattr(old.get_text_config(), field)
    cls: Any = module_class(model)
    config, moved = copy.deepcopy(old), renumbered(model)
    kept = {path: list(map(int, names)) for path, names in moved.items()}
    for path, layers in kept.items():
        _shorten(config, path, len(list(model.get_submodule(path).children())), layers)
    with torch.device("meta"):
        channels = _fewer_channels(model, cls(copy.deepcopy(old)))
    weights = renamed(model.state_dict(), moved)
    _drop_inputs(weights, old, kept)
    text = old.get_text_config()
    if number_of(text, "num_attention_heads") and not number_of(text, "head_dim"):
        text.head_dim = text.hidden_size // text.num_attention_heads
    for each in (text, config.get_text_config()) if channels else ():
        _keep_head_width(each, text)
        each.hidden_size = channels
    stack = next((f"{path}." for path in layer_stacks(model)), "")
    small = _places(weights | renamed(_numbers(model), moved))
    _narrow(config, old, small, cls, moved, stack)
    found: Any = _built(cls, config).to(next(model.parameters())).eval()
    try:
        found.load_state_dict(weights)
    except RuntimeError as error:
        config.allow_global_per_layer_attribute_access = True  # transformers refuses it where layers differ
        fields = [f for f in (*DEPTHS, *NEURONS, *CONFIGURED_HEADS, "head_dim") if number_of(config, f)]
        told = ", ".join(f"{field}={getattr(config, field)}" for field in fields)
        why = str(error).splitlines()[1].strip(" \t.")
        raise InsertError(
            f"no configuration of {cls.__name__} describes this subnet: with {told}, {why}; save its "
            "state_dict instead, and load that into the same subnet"
        ) from error
    found.tie_weights()
    if hasattr(model, "generation_config"):
        found.generation_config = copy.deepcopy(model.generation_config)
    if not equal(outputs_of(found, example), outputs_of(model, example)):
        raise InsertError(
            f"{cls.__name__} depends on the position of its layers, or on a number that its configuration "
            "does not state: made anew, it computes something else; save its state_dict instead, and load "
            "that into the same subnet"
        )
    return found  # type: ignore[no-any-return]


@cache
def heterogeneous(cls: Any) -> Any:
    """Return a class of transformers whose layers have the sizes that `config.per_layer_config` states.

    transformers 5 reads and writes configurations with a `per_layer_config`, but most of its classes refuse
    to be built from one with other sizes, and build layers that it says to skip.

    Args:
        cls: a model with one stack of layers, `transformers.LlamaForCausalLM` for example.

    Returns:
        A subclass of the same name. Layers with other sizes are built by their own class from
        `config.per_layer_config[i]`; an identity is in the place of a layer that skips attention and mlp.

    Raises:
        InsertError: when a model is made: its layers cannot be built one by one, or a layer skips a part.

    Example:
        >>> config.per_layer_config = supernet.space.format(spec)
        >>> model = subnetact.insertion.heterogeneous(transformers.LlamaForCausalLM)(config)
    """
    if getattr(cls, "builds_each_layer", False):
        return cls
    kind: Any = cls.config_class

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.deepcopy(config)
        plain.per_layer_config = None
        cls.__init__(self, plain, *args, **kwargs)
        config._attn_implementation = plain._attn_implementation
        _build_layers(self, config)
        self.config = config
        if config.is_heterogeneous and config.__class__ == kind:
            config.__class__ = layered(kind)

    namespace = {"__init__": init, "__module__": cls.__module__, "builds_each_layer": True}
    namespace["config_class"] = layered(kind)
    return type(cls.__name__, (cls,), namespace)


@cache
def layered(kind: Any) -> Any:
    """Return a class of configurations whose files say that layers differ in size.

    The Auto classes of transformers then take `heterogeneous` models (`elastic/auto_classes.py`), and without
    this package they refuse the folder by its model type.
    """

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        stated, rest = super(found, cls).get_config_dict(*args, **kwargs)
        return {**stated, "model_type": stated.pop(LAYERS_OF, kind.model_type)}, rest

    def save_pretrained(self: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        super(found, self).save_pretrained(folder, *args, **kwargs)
        path = Path(folder) / "config.json"
        stated = json.loads(path.read_text(encoding="utf-8"))
        stated |= {"model_type": LAYERED, LAYERS_OF: kind.model_type}
        path.write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    methods = {"get_config_dict": classmethod(get_config_dict), "save_pretrained": save_pretrained}
    found: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
    return found


def _build_layers(model: nn.Module, config: Any) -> None:
    """Replace the layers of a model that differ from its global configuration, in place."""
    stacks, config = list(layer_stacks(model).values()), config.get_text_config()
    if len(stacks) != 1:
        count = config.num_hidden_layers
        raise InsertError(f"{type(model).__name__} has {len(stacks)} stacks of {count} layers; one is needed")
    (stack,) = stacks
    for i, layer in enumerate(stack):
        stated = config.per_layer_config[i]
        skip = sorted(getattr(stated, "skip", None) or [])
        if skip == sorted(SKIPPED):
            stack[i] = note_skipped_(layer, skipped(layer))
        elif skip:
            raise InsertError(
                f"layer {i} skips {skip}; a layer is kept, or skipped as a whole ({list(SKIPPED)})"
            )
        elif config.is_heterogeneous:
            named = inspect.signature(type(layer).__init__).parameters
            position = {"layer_idx": i} if "layer_idx" in named else {}
            stack[i] = type(layer)(stated, **position)


def _built(cls: Any, config: Any) -> nn.Module:
    """Build a model of a class of transformers from a configuration, layer by layer if that is needed."""
    mixed = getattr(config, "is_heterogeneous", False)
    try:
        return (heterogeneous(cls) if mixed else cls)(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise_if_explained(error)
        sizes = "of layers of different sizes" if mixed else "with the sizes of this subnet"
        advice = "choose the same size for all layers, or save" if mixed else "save"
        raise InsertError(
            f"{cls.__name__} cannot be built {sizes} ({error}); {advice} the state_dict of the subnet instead"
        ) from error


def _fewer_channels(model: Any, full: Any) -> int:
    """Return the channels of the embeddings of a decoder if they are fewer than in the full model, or 0."""
    if not number_of(getattr(model, "config", None), "num_attention_heads"):
        return 0
    tables = map(embedding_of, (model, full))
    now, was = (getattr(getattr(table, "weight", None), "shape", (0,))[-1] for table in tables)
    return int(now) if now < was else 0


def renumbered(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return, for stacks with skipped layers, the name of each other layer -> its name without those."""
    found: dict[str, dict[str, str]] = {}
    for path, stack in model.named_modules():
        if isinstance(stack, nn.ModuleList | nn.Sequential):
            kept = [n for n, layer in stack.named_children() if not isinstance(layer, SkippedLayer)]
            if len(kept) < len(stack):
                found[path] = dict(zip(kept, stack._modules, strict=False))
    return found


def renamed(tensors: Tensors, moved: Mapping[str, Mapping[str, str]]) -> dict[str, Tensor]:
    """Return tensors under the names that they have when skipped layers are not counted."""
    prefixes = [(f"{p}.{old}.", f"{p}.{new}.") for p, names in moved.items() for old, new in names.items()]
    found = {}
    for name, tensor in tensors.items():
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        found[new + name.removeprefix(old)] = tensor
    return found


def _shorten(config: Any, path: str, count: int, kept: list[int]) -> None:
    """Set the number of layers of a stack, and drop what fields with one value per layer say of others."""
    fields = [f for f in DEPTHS if getattr(config, f, None) == count]
    fields = [f for f in fields if _side(f) and _side(f) in path] or [f for f in fields if not _side(f)]
    for field in vocabulary.PER_LAYER:
        values = getattr(config, field, None)
        if isinstance(values, list | tuple) and len(values) == count:
            setattr(config, field, [values[i] for i in kept])
    stages = getattr(config, "stage_names", None) or ()
    if len(stages) == count + 1:  # The maps of a backbone are those behind so many layers.
        behind = [sum(layer < i % len(stages) for layer in kept) for i in config.out_indices]
        if len({*behind}) < len(behind):
            raise InsertError(
                f"{config.out_features} are the same features in this subnet, which skips all layers between "
                "two of them; no configuration describes that: keep one, or save its state_dict instead"
            )
        config.stage_names = stages[: len(kept) + 1]
        config.set_output_features_output_indices(None, behind)
    shared = number_of(config, "num_kv_shared_layers")
    if shared:
        config.num_kv_shared_layers = sum(i >= count - shared for i in kept)
    if fields:
        setattr(config, fields[0], len(kept))


def _drop_inputs(weights: dict[str, Tensor], config: Any, kept: Mapping[str, list[int]]) -> None:
    """Drop what the tables of per-layer embeddings hold for skipped layers, in place (Gemma 3n)."""
    width = number_of(config, "hidden_size_per_layer_input")
    for layers in kept.values() if width else ():
        for name, weight in weights.items():
            if name.endswith("embed_tokens_per_layer.weight"):
                weights[name] = weight.reshape(len(weight), -1, width)[:, layers].flatten(1)
            elif name.endswith("per_layer_model_projection.weight"):
                weights[name] = weight.reshape(-1, width, weight.shape[1])[layers].flatten(0, 1)


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    """Return the numbers of experts that modules and the configurations of routers hold, as long tensors."""
    found = {}
    for path, module in model.named_modules():
        for name in ROUTED if path else ():
            holders = module, vars(module).get("config") if ROUTING.search(type(module).__name__) else None
            stated = [number for holder in holders if (number := number_of(holder, name))]
            if stated:
                found[f"{path}.{name}"] = torch.empty(min(stated), device="meta")
    return found


def _narrow(config: Any, old: Any, small: Places, cls: Any, moved: Any, stack: str) -> None:
    """State the sizes of a subnet in the fields of a configuration that decide them."""
    text, full, per_layer = config.get_text_config(), _places_of(cls, old, moved), dict[int, dict[str, int]]()
    decided = _decided(old.get_text_config(), full, small, partial(_places_of, cls, old, moved))
    if CONFIGURED_HEADS[0] in decided:
        _keep_head_width(text, old.get_text_config())
        if _stated(text, CONFIGURED_HEADS[1]):  # It decides no shape where there is one head, or latents.
            decided.setdefault(CONFIGURED_HEADS[1], decided[CONFIGURED_HEADS[0]])
    for field, places in decided.items():
        shares: dict[str, float] = {}  # layer -> the smallest share of a full size
        for name, axis in places & small.keys():
            inside = re.match(r".*?(\d+)\.", name.removeprefix(stack))
            if inside is not None and name.startswith(stack):
                layer, share = inside[bool(stack)], small[name, axis] / full[name, axis]
                shares[layer] = min(shares.get(layer, 1.0), share)
        different = sorted(set(shares.values()))
        stated = _stated(text, field)
        if isinstance(stated, list):
            setattr(text, field, [round(n * shares.get(str(i), 1.0)) for i, n in enumerate(stated)])
            continue
        if len(different) > 1 and not stack:
            raise InsertError(
                f"no configuration of {cls.__name__} describes this subnet: {field} is one number "
                f"for all layers, whose shares of it differ here, {', '.join(f'{s:g}' for s in different)}; "
                "choose the same size for all layers"
            )
        for layer, share in shares.items():
            number = max(1, round(stated * share))
            if len(different) == 1:
                setattr(text, field, number)
            elif share < 1:
                per_layer.setdefault(int(layer), {})[field] = number
    if per_layer:
        config.per_layer_config = per_layer
        try:
            type(config).from_dict(config.to_dict())
        except RuntimeError:  # A check of the class read a number that differs between layers.
            config.allow_global_per_layer_attribute_access = True


def _decided(text: Any, full: Places, small: Places, built: Callable[..., Places]) -> dict[str, set[Place]]:
    """Return the fields that decide axes that are smaller in a subnet, and all axes that they decide.

    Fields may state the same number. What changes in a model with another number tells them apart.
    """
    decided: dict[str, set[Place]] = {}
    smaller = {place for place, size in small.items() if full[place] != size}
    common = {text.attribute_map.get(field, field): field for field in reversed(vocabulary.SIZES)}.values()
    for field in common if smaller else ():
        if stated := _stated(text, field):
            other = [n // 2 or 2 for n in stated] if isinstance(stated, list) else stated // 2 or 2
            with suppress(Exception):  # The class refuses the number.
                changed = built(**{field: other})
                places = {place for place, size in full.items() if changed.get(place, size) != size}
                if places & smaller:
                    decided[field] = places
    return decided


def _places_of(cls: Any, config: Any, moved: Any, **stated: Any) -> Places:
    """Return the sizes of all axes, and the numbers, of the model of a configuration with other numbers."""
    config = copy.deepcopy(config)
    for field, number in stated.items():
        setattr(config.get_text_config(), field, number)
    with torch.device("meta"):
        built = cls(config)
    return _places(renamed(built.state_dict() | _numbers(built), moved))


def _places(tensors: Tensors) -> Places:
    return {(name, axis): size for name, t in tensors.items() for axis, size in enumerate(t.shape)}


def _keep_head_width(text: Any, full: Any) -> None:
    """State the width of heads, which else follows from other sizes, unless a configuration computes it."""
    with suppress(AttributeError):
        text.head_dim = full.head_dim


def _side(field: str) -> str:
    """Return the part of a model that a field is for, "encoder" for example, or an empty string."""
    return next((side for side in ("encoder", "decoder") if side in field), "")


def _stated(config: Any, field: str) -> Any:
    """Return the number that a field states, or one per layer; GPT-2 has four per feature if it is None."""
    value = getattr(config, field, None)
    if field == "n_inner" and getattr(config, field, 0) is None:
        return 4 * int(config.hidden_size)
    return value if isinstance(value, list) else number_of(config, field)
