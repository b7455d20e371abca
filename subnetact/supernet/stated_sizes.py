"""What a view or an extract says of its sizes, in attributes and a configuration that no forward reads.

Numbers that a forward reads are elastic attributes, or equal in all subnets; they are left as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from subnetact.operators.base import template_of
from subnetact.operators.vocabulary import CONFIGURED_HEADS, FEATURES, number_of
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec


def state_sizes_(network: nn.Module, whole: nn.Module, space: SubnetSpace, spec: SubnetSpec) -> None:
    """Let a subnet of the `whole` network state its sizes, in place."""
    templates = whole.named_modules(remove_duplicate=False)
    _state_features_(network, {path: template_of(module) for path, module in templates})
    _state_configuration_(network, space.format(spec))


def _state_features_(network: Any, originals: Mapping[str, nn.Module]) -> None:
    """Let a subnet of a model of timm, whose head can be replaced, state its numbers of features.

    A number means the last tensor up to the end of its module that had an axis of this size.
    """
    if not callable(getattr(network, "reset_classifier", None)):
        return
    heads = network.get_classifier()
    head = {id(m) for part in (heads if isinstance(heads, tuple) else (heads,)) for m in part.modules()}
    infos = getattr(network, "feature_info", None)
    infos = [info for info in infos if "module" in info] if isinstance(infos, list) else []
    sizes: dict[int, int] = {}  # full size -> the size in the subnet, of the last tensor with that axis

    def walk(path: str, module: nn.Module) -> None:
        original = originals.get(path)
        for name, tensor in module._parameters.items():
            full = None if original is None else original._parameters.get(name)
            if tensor is not None and full is not None and tensor.dim() == full.dim():
                axes = list(zip(full.shape, tensor.shape, strict=True))
                sizes.update(axes[:0:-1] if id(module) in head else axes[::-1])
        for name, child in module.named_children():
            walk(f"{path}.{name}".lstrip("."), child)
        for name in () if original is None else set(FEATURES) - _names_of(type(module)):  # type: ignore[arg-type]
            stated = number_of(original, name)
            if name in vars(module) and number_of(module, name) == stated:
                vars(module)[name] = sizes.get(stated, stated)
        for info in infos:
            if info["module"] == path:
                info["num_chs"] = sizes.get(info["num_chs"], info["num_chs"])

    walk("", network)


def _state_configuration_(network: nn.Module, layers: Any) -> None:
    """Let the configuration of a subnet state the sizes of its layers, which a space has written.

    What the layers have alike is one number; what differs is in `per_layer_config`, if there is one.
    """
    config: Any = vars(network).get("config")
    words = isinstance(layers, Mapping) and any(isinstance(layer, int) for layer in layers)
    if config is None or not words:  # The model of PEFT has none of its own.
        return
    text = config.get_text_config()
    kept = [f for i in range(text.num_hidden_layers) if "skip" not in (f := layers.get(i, {}))]
    every = [_names_of(type(module)) for module in network.modules()]  # type: ignore[arg-type]
    read = {name for names in every if "config" in names for name in names}
    if isinstance(inspect.getattr_static(type(text), "head_dim", None), property):
        read |= {"hidden_size", *CONFIGURED_HEADS}  # It would give another width.
    sizes: dict[str, Any] = {}
    differing = dict[str, str]()  # field that layers have not alike -> its name in this configuration
    for field in {field for fields in kept for field in fields}:
        numbers = {fields.get(field, number_of(text, field)) for fields in kept}
        name = text.attribute_map.get(field, field)
        if {field, name} & read:
            continue
        if len(numbers) > 1:
            differing[field] = name
        else:
            sizes[field] = numbers.pop()
    full: dict[str, Any] = {field: number_of(text, field) for field in sizes}
    if not number_of(text, "head_dim") and (heads := number_of(text, CONFIGURED_HEADS[0])):
        full["head_dim"], sizes["head_dim"] = None, text.hidden_size // heads  # else it follows from others
    if differing and hasattr(text, "per_layer_config"):
        full["per_layer_config"] = None  # with which transformers refuses to read one number for all layers
        sizes["per_layer_config"] = {
            i: {differing[field]: n for field, n in fields.items() if field in differing}
            for i, fields in layers.items()
        }
    for field, size in sizes.items():
        setattr(text, field, size)
    vars(network)["full_sizes"] = full


@cache
def _names_of(cls: Any) -> frozenset[str]:
    """Return the names in the forward of a class of modules and in all methods of it that this calls."""
    names, codes = set[str](), [getattr(inspect.unwrap(cls.forward), "__code__", None)]
    while codes:
        code = codes.pop()
        for name in set(getattr(code, "co_names", ())) - names:
            names.add(name)
            method: Any = inspect.getattr_static(cls, name, None)
            codes.append(getattr(inspect.unwrap(getattr(method, "fget", method)), "__code__", None))
        codes += [constant for constant in getattr(code, "co_consts", ()) if inspect.iscode(constant)]
    return frozenset(names)
