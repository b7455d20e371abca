"""An extracted subnet of a Hugging Face model as a model of its own, with a configuration that describes it.

An extracted subnet has the configuration of the original model, and skipped layers as identities. What
`save_pretrained` writes of it cannot be read by `from_pretrained`, which builds a model from the
configuration. `as_pretrained` builds the smaller model from a smaller configuration, if there is one: if all
layers have the same sizes and the configuration has a field for each of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import InsertError
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.supernet.batches import as_batch, call_with, map_tensors

__all__ = ["as_pretrained"]

DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
NEURONS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "hidden_dim",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
HEADS = ("num_attention_heads", "num_key_value_heads")
PER_LAYER = ("layer_types",)
"""Fields of configurations, under their common names; models map other names to these."""


def as_pretrained(model: nn.Module, example: Any) -> nn.Module:
    """Return an extracted subnet as an ordinary model of Hugging Face, which can be saved and loaded again.

    Args:
        model: what `supernet.extract(spec)` returned for a supernet of a Hugging Face model. It is not
            changed.
        example: an input of the model: a tensor, a tuple of arguments or a dictionary of named arguments.

    Returns:
        A model of the same class without the skipped layers, whose configuration has the sizes of the subnet,
        and which computes the same on the example. `save_pretrained` and `from_pretrained` work with it.

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
    with torch.device("meta"):
        full = _shapes(type(model)(copy.deepcopy(old)).state_dict(), _renamed(model))
    weights = {_new_name(name, renamed): t for name, t in model.state_dict().items()}
    _narrow(config, full, _shapes(weights, {}), type(model).__name__)
    found: Any = type(model)(config).to(next(model.parameters()).dtype).eval()
    expected = _shapes(found.state_dict(), {})
    for name, shape in expected.items():
        given = tuple(weights[name].shape) if name in weights else None
        if given != shape:
            raise InsertError(
                f"no configuration of {type(model).__name__} describes this subnet: {name} has the shape "
                f"{given}, and with {_told(config)} the model has {shape}; save its state_dict instead, and "
                "load that into the same subnet"
            )
    found.load_state_dict(weights)
    found.tie_weights()
    _compare(model, found, example)
    return found  # type: ignore[no-any-return]


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
            if isinstance(values, list) and len(values) == len(stack):
                setattr(config, field, [values[i] for i in kept])
        if fields:
            setattr(config, fields[0], len(kept))


def _narrow(
    config: Any, full: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], model: str
) -> None:
    """Set the numbers of neurons and heads that follow from the shapes of weights."""
    found: dict[str, set[float]] = {}
    for name, shape in given.items():
        for axis, (old, new) in enumerate(zip(full.get(name, shape), shape, strict=False)):
            if re.search(r"attn|attention", name, re.IGNORECASE):
                key = f"the number of heads ({re.sub(r'[0-9]+', '*', name)}, axis {axis})"
                found.setdefault(key, set()).add(new / old)
            else:
                fields = (f for f in NEURONS if _side(f) in name and _neurons(config, f) in (old, old / 2))
                field = next(fields, "")
                if field:
                    found.setdefault(field, set()).add(new / old)
    for what, shares in found.items():
        if len(shares) > 1:
            raise InsertError(
                f"no configuration of {model} describes this subnet: {what} is one number for all layers, "
                f"whose shares of it differ here, {', '.join(f'{s:g}' for s in sorted(shares))}; choose the "
                "same size for all layers"
            )
    for field in NEURONS:
        if field in found:
            setattr(config, field, round(_neurons(config, field) * next(iter(found[field]))))
    for share in {s for what, shares in found.items() if what not in NEURONS for s in shares if s < 1}:
        config.head_dim = _number(config, "head_dim") or config.hidden_size // config.num_attention_heads
        for field in HEADS:
            if _number(config, field):
                setattr(config, field, round(_number(config, field) * share))


def _side(field: str) -> str:
    """Return the part of a model that a field is for, "encoder" for example, or an empty string."""
    return next((side for side in ("encoder", "decoder") if field.startswith(side)), "")


def _neurons(config: Any, field: str) -> int:
    """Return the number of neurons that a field states; GPT-2 has four per feature if the field is None."""
    if field == "n_inner" and getattr(config, field, 0) is None:
        return 4 * int(config.hidden_size)
    return _number(config, field)


def _number(config: Any, field: str) -> int:
    value = getattr(config, field, None)
    return value if type(value) is int else 0


def _told(config: Any) -> str:
    fields = [f for f in (*DEPTHS, *NEURONS, *HEADS, "head_dim") if _number(config, f)]
    return ", ".join(f"{field}={getattr(config, field)}" for field in fields)


def _compare(model: nn.Module, found: nn.Module, example: Any) -> None:
    with torch.no_grad():
        pairs = [call_with(m, map_tensors(Tensor.clone, example)) for m in (model, found)]
    a, b = (y if isinstance(y, Tensor) else next(iter(y.values())) for y in pairs)
    if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())):
        raise InsertError(
            f"{type(model).__name__} depends on the position of its layers: without the skipped ones it "
            "computes something else; save its state_dict instead, and load that into the same subnet"
        )
