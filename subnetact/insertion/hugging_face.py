"""An extracted subnet of a Hugging Face model as a model of its own, with a configuration that describes it.

An extracted subnet has the configuration of the original model, and skipped layers as identities. What
`save_pretrained` writes of it cannot be read by `from_pretrained`, which builds a model from the
configuration. `as_pretrained` builds the smaller model from a smaller configuration, if there is one. Sizes
that differ between layers are in its `per_layer_config`. Most classes of transformers 5 cannot be built from
it; `heterogeneous` makes classes that can.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.comparison import equal
from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError
from subnetact.insertion.key_value_cache import note_skipped_
from subnetact.insertion.layer_vocabulary import NEURONS, SKIPPED, number_of
from subnetact.operators.skipped_layer import SkippedLayer, skipped
from subnetact.supernet.batches import as_batch, call_with, map_tensors

__all__ = ["as_pretrained", "heterogeneous"]

DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
HEADS = ("num_attention_heads", "num_key_value_heads")
PER_LAYER = ("layer_types", "activation_sparsity_pattern", *NEURONS)
"""Fields of configurations, under their common names; models map other names to these."""


def as_pretrained(model: nn.Module, example: Any) -> nn.Module:
    """Return an extracted subnet as an ordinary model of Hugging Face, which can be saved and loaded again.

    Args:
        model: what `supernet.extract(spec)` returned for a supernet of a Hugging Face model. It is not
            changed.
        example: an input of the model: a tensor, a tuple of arguments or a dictionary of named arguments.

    Returns:
        A model without the skipped layers, whose configuration has the sizes of the subnet, and which
        computes the same on the example. If all layers have the same sizes, it is of the class of the model,
        and `save_pretrained` and `from_pretrained` work with it. Otherwise the sizes are in the
        `per_layer_config` of the configuration, and `heterogeneous(cls).from_pretrained` reads what
        `save_pretrained` wrote; `cls.from_pretrained` does as soon as transformers builds the layers of that
        class from it.

    Raises:
        InsertError: the model has no configuration, or none describes the subnet; the message says which size
            differs between layers, or has no field.

    Example:
        >>> small = as_pretrained(supernet.extract(spec), example)
        >>> small.save_pretrained("small")
    """
    example = as_batch(example)
    old = getattr(model, "config", None)
    if old is None or not hasattr(model, "save_pretrained") or not hasattr(old, "to_dict"):
        raise InsertError(f"{type(model).__name__} is no Hugging Face model; save its state_dict instead")
    config, renamed = copy.deepcopy(old), _renamed(model)
    _shorten(config, model)
    cls: Any = type(model)
    with torch.device("meta"):
        full = _shapes(cls(copy.deepcopy(old)).state_dict(), _renamed(model))
    weights = {_new_name(name, renamed): t for name, t in model.state_dict().items()}
    _drop_inputs(weights, old, model)
    _narrow(config, full, _shapes(weights, {}), model)
    found: Any = _built(cls, config).to(next(model.parameters()).dtype).eval()
    expected = _shapes(found.state_dict(), {})
    for name, shape in expected.items():
        given = tuple(weights[name].shape) if name in weights else None
        if given != shape:
            raise InsertError(
                f"no configuration of {cls.__name__} describes this subnet: {name} has the shape {given}, "
                f"and with {_told(config)} the model has {shape}; save its state_dict instead, and load that "
                "into the same subnet"
            )
    found.load_state_dict(weights)
    found.tie_weights()
    _compare(model, found, example)
    return found  # type: ignore[no-any-return]


def heterogeneous(cls: Any) -> Any:
    """Return a class of transformers whose layers have the sizes that `config.per_layer_config` states.

    transformers 5 reads and writes configurations with a `per_layer_config`, but most of its classes refuse
    to be built from one with other sizes, and build layers that it says to skip.

    Args:
        cls: a model with one stack of layers, `transformers.LlamaForCausalLM` for example.

    Returns:
        A subclass of the same name. Layers with other sizes are built by their own class from
        `config.per_layer_config[i]`; an identity is in the place of a layer that skips attention and mlp.
        `from_pretrained` and `save_pretrained` are those of transformers.

    Raises:
        InsertError: when a model is made: its layers cannot be built one by one, or a layer skips a part.

    Example:
        >>> config.per_layer_config = supernet.space.format(spec)
        >>> model = subnetact.insertion.heterogeneous(transformers.LlamaForCausalLM)(config)
    """
    return cls if getattr(cls, "builds_each_layer", False) else _heterogeneous(cls)


@cache
def _heterogeneous(cls: Any) -> Any:
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.deepcopy(config)
        plain.per_layer_config = None
        cls.__init__(self, plain, *args, **kwargs)
        config._attn_implementation = plain._attn_implementation
        _build_layers(self, config)
        self.config = config

    namespace = {"__init__": init, "__module__": cls.__module__, "builds_each_layer": True}
    return type(cls.__name__, (cls,), namespace)


def _build_layers(model: nn.Module, config: Any) -> None:
    """Replace the layers of a model that differ from its global configuration, in place."""
    config = config.get_text_config()
    count = config.num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
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
    if not getattr(config, "is_heterogeneous", False):
        return cls(config)  # type: ignore[no-any-return]
    try:
        return heterogeneous(cls)(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise_if_out_of_memory(error)
        raise InsertError(
            f"{cls.__name__} cannot be built of layers of different sizes ({error}); choose the same size "
            "for all layers, or save the state_dict of the subnet instead"
        ) from error


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(isinstance(m, SkippedLayer) for m in module):
            yield path, module


def _renamed(model: nn.Module) -> dict[str, str]:
    """Return the prefixes of the names of kept layers, each with its prefix without the others."""
    return {
        f"{path}.{old}.": f"{path}.{new}."
        for path, stack in _stacks(model)
        for new, old in enumerate(i for i, m in enumerate(stack) if not isinstance(m, SkippedLayer))
    }


def _new_name(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _shapes(tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    return {_new_name(name, renamed): tuple(t.shape) for name, t in tensors.items()}


def _shorten(config: Any, model: nn.Module) -> None:
    """Set the number of layers, and drop the settings of skipped layers from fields with one per layer."""
    for path, stack in _stacks(model):
        kept = [i for i, m in enumerate(stack) if not isinstance(m, SkippedLayer)]
        fields = [f for f in DEPTHS if getattr(config, f, None) == len(stack)]
        fields = [f for f in fields if _side(f) and _side(f) in path] or [f for f in fields if not _side(f)]
        for field in PER_LAYER:
            values = getattr(config, field, None)
            if isinstance(values, list | tuple) and len(values) == len(stack):
                setattr(config, field, [values[i] for i in kept])
        shared = number_of(config, "num_kv_shared_layers")
        if shared:
            first = len(stack) - shared
            config.num_kv_shared_layers = sum(i >= first for i in kept)
        if fields:
            setattr(config, fields[0], len(kept))


def _drop_inputs(weights: dict[str, Tensor], config: Any, model: nn.Module) -> None:
    """Drop what the tables of per-layer embeddings hold for skipped layers, in place (Gemma 3n)."""
    width = number_of(config, "hidden_size_per_layer_input")
    for _, stack in _stacks(model) if width else ():
        kept = [i for i, m in enumerate(stack) if not isinstance(m, SkippedLayer)]
        for name, weight in weights.items():
            if name.endswith("embed_tokens_per_layer.weight"):
                weights[name] = weight.reshape(len(weight), -1, width)[:, kept].flatten(1)
            elif name.endswith("per_layer_model_projection.weight"):
                weights[name] = weight.reshape(-1, width, weight.shape[1])[kept].flatten(0, 1)


def _narrow(
    config: Any,
    full: Mapping[str, tuple[int, ...]],
    given: Mapping[str, tuple[int, ...]],
    model: nn.Module,
) -> None:
    """Set the numbers of neurons and heads that follow from the shapes of weights."""
    lists: dict[str, dict[int, int]] = {}
    found: dict[str, dict[str, set[float]]] = {}  # field or "heads" -> layer -> shares of the full size
    stack = next((f"{path}." for path, _ in _layers(model)), None)
    for name, shape in given.items():
        if stack is not None and not name.startswith(stack):
            continue
        layer = name.removeprefix(stack or "").partition(".")[0]
        for axis, (old, new) in enumerate(zip(full.get(name, shape), shape, strict=False)):
            if re.search(r"attn|attention", name, re.IGNORECASE):
                key = f"the number of heads ({re.sub(r'[0-9]+', '*', name)}, axis {axis})"
                found.setdefault(key, {}).setdefault(layer, set()).add(new / old)
            else:
                fields = (
                    f for f in NEURONS if _side(f) in name and _neurons(config, f, layer) in (old, old / 2)
                )
                field = next(fields, "")
                if field and isinstance(getattr(config, field), list):
                    lists.setdefault(field, {})[int(layer)] = round(
                        _neurons(config, field, layer) * new / old
                    )
                elif field:
                    found.setdefault(field, {}).setdefault(layer, set()).add(new / old)
    for field, numbers in lists.items():
        given_before = enumerate(getattr(config, field))
        setattr(config, field, [numbers.get(i, number) for i, number in given_before])
    differing = {what for what, layers in found.items() if len(set.union(*layers.values())) > 1}
    if differing and stack is None:
        what = min(differing)
        shares = sorted(set.union(*found[what].values()))
        raise InsertError(
            f"no configuration of {type(model).__name__} describes this subnet: {what} is one number for all "
            f"layers, whose shares of it differ here, {', '.join(f'{s:g}' for s in shares)}; choose the same "
            "size for all layers"
        )
    per_layer: dict[int, dict[str, int]] = {}
    narrowed = {
        s for what, layers in found.items() if what not in NEURONS for s in set.union(*layers.values())
    }
    heads = {f: number_of(config, f) for f in HEADS if number_of(config, f)}
    if narrowed - {1.0}:
        config.head_dim = number_of(config, "head_dim") or config.hidden_size // config.num_attention_heads
    for what, layers in found.items():
        sizes = {what: _neurons(config, what)} if what in NEURONS else heads
        if what not in differing:
            (share,) = set.union(*layers.values())
            if what in NEURONS or share < 1:
                for field, number in sizes.items():
                    setattr(config, field, max(1, round(number * share)))
            continue
        for layer, (share,) in layers.items():
            if share < 1:
                changed = {field: max(1, round(number * share)) for field, number in sizes.items()}
                per_layer.setdefault(int(layer), {}).update(changed)
    if per_layer:
        config.per_layer_config = per_layer
        _make_readable(config)


def _make_readable(config: Any) -> None:
    """Let a configuration be read again, also by classes that check its global numbers of heads."""
    try:
        type(config).from_dict(config.to_dict())
    except RuntimeError:  # A check of the class read a number that differs between layers.
        config.allow_global_per_layer_attribute_access = True


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the stack of layers of a model whose configuration states one number of layers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "per_layer_config") or config.is_encoder_decoder:
        return
    count = getattr(config, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            yield path, module


def _side(field: str) -> str:
    """Return the part of a model that a field is for, "encoder" for example, or an empty string."""
    return next((side for side in ("encoder", "decoder") if field.startswith(side)), "")


def _neurons(config: Any, field: str, layer: str = "") -> int:
    """Return the number of neurons that a field states; GPT-2 has four per feature if the field is None."""
    value = getattr(config, field, None)
    if isinstance(value, list):
        return int(value[int(layer)]) if layer.isdigit() and int(layer) < len(value) else 0
    if field == "n_inner" and getattr(config, field, 0) is None:
        return 4 * int(config.hidden_size)
    return number_of(config, field)


def _told(config: Any) -> str:
    fields = [f for f in (*DEPTHS, *NEURONS, *HEADS, "head_dim") if number_of(config, f)]
    return ", ".join(f"{field}={getattr(config, field)}" for field in fields)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield all tensors of an output; caches, which have a place per layer, are left out."""
    parts = output.values() if isinstance(output, Mapping) else output
    if isinstance(output, Tensor):
        yield output
    elif isinstance(parts, tuple | list) or parts is not output:
        for part in parts:
            yield from _tensors(part)


def _compare(model: nn.Module, found: nn.Module, example: Any) -> None:
    with torch.no_grad():
        pairs = [call_with(m, map_tensors(Tensor.clone, example)) for m in (model, found)]
    expected, output = (list(_tensors(y)) for y in pairs)
    if not equal(output, expected):
        raise InsertError(
            f"{type(model).__name__} depends on the position of its layers: without the skipped ones it "
            "computes something else; save its state_dict instead, and load that into the same subnet"
        )
