"""The heads of mixers that keep a state, in transformers' layouts: a subnet keeps the first of every group.

In Mamba-2, heads lie in `n_groups` groups of equal size, whose heads share B and C, and the gated norm works
in these groups. So every group keeps equally many heads, and B and C stay whole. The segments, in this order:

    in_proj      z | x | B | C | dt    z, x: one segment of heads per group, `head_dim` rows a head
    conv1d       x | B | C             depthwise
    dt_bias, A_log, D                  one entry a head
    norm, out_proj's inputs            `head_dim` a head
    mup_vector                         as in_proj (Falcon-H1)

Gated delta nets (Qwen3-Next, Qwen3.5, Kimi Linear) have heads of keys, and for each equally many of values.
What has the rows of all queries, keys and values holds these one after another; all else lies head by head.
The channels of Mamba-1 (Jamba) are independent, but for what x_proj makes of them: their axis is "width".

Source: Mamba-2 (Dao and Gu, ICML 2024), transformers/models/mamba2 and its relatives. Nemotron-Elastic slices
in this way (NVIDIA/Megatron-LM, megatron/elastification), and MatMamba with one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from subnetact.insertion.description import Group, Member
from subnetact.operators import ElasticAttribute, LayerNormSlice, WeightSlice
from subnetact.operators.layer_traits import norm_features, traits_of
from subnetact.operators.vocabulary import LATENT, own_numbers

_OWN = ("dt_bias", "A_log", "D")
_SIZES = ("num_heads", "head_dim", "n_groups", "intermediate_size", "conv_dim")
_DELTA_NUMBERS = ("num_k_heads", "num_v_heads", "num_heads", "key_dim", "value_dim", "qkv_dim", "conv_dim")
_CHANNELS = {"conv1d": "out", "x_proj": "in_", "dt_proj": "out", "out_proj": "in_"}


def state_group(path: str, module: nn.Module) -> tuple[list[Group], str] | None:
    """Return the group of a mixer with a state, or why it has none; None for all other modules."""
    own = {name: number for name, number in vars(module).items() if type(number) is int}
    inner = {*module._modules} | {name for name, tensor in module._parameters.items() if tensor is not None}
    if {*_SIZES, "ssm_state_size"} <= own.keys() and {*_OWN, "in_proj", "conv1d", "out_proj"} <= inner:
        return state_space_group(path, module)
    if {"A_log", "D", "in_proj", *_CHANNELS} <= inner and (n := own.get("intermediate_size")):
        members = [Member(f"{path}.in_proj", "out", WeightSlice, 1, start, 2 * n) for start in (0, n)]
        members += [Member(f"{path}.{name}", part, WeightSlice) for name, part in _CHANNELS.items()]
        members += [Member(path, part, ElasticAttribute) for part in ("A_log.0", "D", "intermediate_size")]
        return [Group(f"{path}.width", "width", n, tuple(members))], ""
    heads, key = own.get("num_k_heads", own.get("num_heads")), own.get("key_dim", own.get("qkv_dim"))
    decays = (name.endswith("A_log") for name, _ in module.named_parameters())
    if heads and key and inner & {"out_proj", "o_proj"} and any(decays):
        members = [*_delta_members(path, module, heads, key // heads)]
        groups = [Group(f"{path}.heads", "heads", heads, tuple(members))] if heads > 1 else []
        return groups, "it has one head of keys only"
    return None


def _delta_members(path: str, mixer: nn.Module, heads: int, key: int) -> Iterator[Member]:
    """Yield everything in a gated delta net that follows the number of heads of keys."""
    value = vars(mixer).get("value_dim", heads * key) // heads
    together = heads * (2 * key + value)
    for inner, module in mixer.named_modules(prefix=path):
        sizes, name = traits_of(module).sizes, inner.rpartition(".")[2]
        outputs = getattr(module, sizes["out"]) if "out" in sizes else 0
        if name in ("out_proj", "o_proj"):
            yield Member(inner, "in_", WeightSlice, value)
        elif outputs == together:
            for rows, start in ((key, 0), (key, heads * key), (value, 2 * heads * key)):
                yield Member(inner, "out", WeightSlice, rows, start, together)
        elif outputs and not LATENT.search(name):
            yield Member(inner, "out", WeightSlice, outputs // heads)
        elif not sizes and not norm_features(module):
            own = own_numbers(module, _DELTA_NUMBERS)
            for n, tensor in module.named_parameters(recurse=False):
                own |= {f"{n}.{axis}": size for axis, size in enumerate(tensor.shape) if size > 1}
            yield from (Member(inner, part, ElasticAttribute, n // heads) for part, n in own.items())


def state_space_group(path: str, mixer: nn.Module) -> tuple[list[Group], str]:
    """Return the group of the heads of a Mamba-2 mixer, or why there is none."""
    heads, width, groups, channels, _ = (vars(mixer)[name] for name in _SIZES)
    if heads % groups or channels != heads * width:
        return [], f"{heads} heads are no whole groups of {groups}, or no {channels} channels"
    if heads == groups:
        return [], "every group has one head only"
    return [Group(f"{path}.heads", "heads", heads // groups, tuple(_head_members(path, mixer)))], ""


def _head_members(path: str, mixer: nn.Module) -> Iterator[Member]:
    """Yield everything in a mixer that follows the number of heads per group."""
    heads, width, groups, inner, conv = (vars(mixer)[name] for name in _SIZES)

    def segments(name: str, part: str, operator: Any, rows: int, start: int, total: int) -> Iterator[Member]:
        module = f"{path}.{name}".rstrip(".")
        for group in range(groups):
            yield Member(module, part, operator, rows, start + group * (heads // groups) * rows, total)

    total = inner + conv + heads
    for rows, start in ((width, 0), (width, inner), (1, inner + conv)):  # z, x, dt
        yield from segments("in_proj", "out", WeightSlice, rows, start, total)
        if "mup_vector" in mixer._buffers:
            yield from segments("", "mup_vector", ElasticAttribute, rows, start, total)
    yield from segments("conv1d", "out", WeightSlice, width, 0, conv)
    for name in _OWN:
        yield from segments("", name, ElasticAttribute, 1, 0, heads)
    if getattr(mixer._modules.get("norm"), "weight", None) is not None:
        yield from segments("norm", "features", LayerNormSlice, width, 0, inner)
    yield from segments("out_proj", "in_", WeightSlice, width, 0, inner)
    yield Member(path, "num_heads", ElasticAttribute, groups)
    yield Member(path, "intermediate_size", ElasticAttribute, groups * width)
    yield Member(path, "conv_dim", ElasticAttribute, groups * width, 0, conv)
