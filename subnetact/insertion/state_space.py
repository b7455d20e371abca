"""The heads of a Mamba-2 mixer, in transformers' layout: a subnet keeps the first heads of every group.

Heads lie in `n_groups` groups of equal size, whose heads share B and C, and the gated norm works in these
groups. So every group keeps equally many heads, and B and C stay whole. The segments, in this order:

    in_proj      z | x | B | C | dt    z, x: one segment of heads per group, `head_dim` rows a head
    conv1d       x | B | C             depthwise
    dt_bias, A_log, D                  one entry a head
    norm, out_proj's inputs            `head_dim` a head

Source: Mamba-2 (Dao and Gu, ICML 2024), transformers/models/mamba2 and its relatives. Nemotron-Elastic slices
in this way (NVIDIA/Megatron-LM, megatron/elastification), and MatMamba with one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from subnetact.insertion.description import Group, Member
from subnetact.operators import ElasticAttribute, LayerNormSlice, WeightSlice

__all__ = ["head_members", "is_state_space", "state_space_group"]

_OWN = ("dt_bias", "A_log", "D")
_NUMBERS = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim")


def is_state_space(module: nn.Module) -> bool:
    """Tell whether a module is a Mamba-2 mixer in transformers' layout."""
    own = vars(module)
    return (
        all(module._parameters.get(name) is not None for name in _OWN)
        and all(type(own.get(name)) is int for name in _NUMBERS)
        and {"in_proj", "conv1d", "out_proj"} <= module._modules.keys()
    )


def state_space_group(path: str, mixer: nn.Module) -> tuple[list[Group], str]:
    """Return the group of the heads of a mixer, if there is one, or why there is none."""
    numbers: dict[str, int] = {name: vars(mixer)[name] for name in _NUMBERS}
    heads, groups = numbers["num_heads"], numbers["n_groups"]
    if heads % groups or numbers["intermediate_size"] != heads * numbers["head_dim"]:
        channels = numbers["intermediate_size"]
        return [], f"{heads} heads are no whole groups of {groups}, or no {channels} channels"
    if heads == groups:
        return [], "every group has one head only"
    if "mup_vector" in mixer._buffers:
        return [], "its multipliers are a buffer with an entry per row of in_proj, which no operator slices"
    return [Group(f"{path}.heads", "heads", heads // groups, tuple(head_members(path, mixer)))], ""


def head_members(path: str, mixer: nn.Module) -> Iterator[Member]:
    """Yield everything in a mixer that follows the number of heads per group."""
    own: Any = vars(mixer)
    heads, width, groups = own["num_heads"], own["head_dim"], own["n_groups"]
    inner, conv, each = own["intermediate_size"], own["conv_dim"], heads // groups

    def segments(name: str, part: str, operator: Any, rows: int, start: int, total: int) -> Iterator[Member]:
        module = f"{path}.{name}".rstrip(".")
        for group in range(groups):
            yield Member(module, part, operator, rows, start + group * each * rows, total)

    total = inner + conv + heads
    for rows, start in ((width, 0), (width, inner), (1, inner + conv)):  # z, x, dt
        yield from segments("in_proj", "out", WeightSlice, rows, start, total)
    yield from segments("conv1d", "out", WeightSlice, width, 0, conv)
    for name in _OWN:
        yield from segments("", name, ElasticAttribute, 1, 0, heads)
    norm: Any = mixer._modules.get("norm")
    if getattr(norm, "weight", None) is not None:
        yield from segments("norm", "features", LayerNormSlice, width, 0, inner)
    yield from segments("out_proj", "in_", WeightSlice, width, 0, inner)
    yield Member(path, "num_heads", ElasticAttribute, groups)
    yield Member(path, "intermediate_size", ElasticAttribute, groups * width)
    yield Member(path, "conv_dim", ElasticAttribute, groups * width, 0, conv)
