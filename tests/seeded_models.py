"""Small models with random weights in which faults are seeded, and what a subnet of them has to compute.

The reference slices nothing and asks no operator: it is the ordinary model, in which the weights that a
description says are not used are zero, norms see the features that are left, and skipped blocks are
identities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subnetact
from subnetact.insertion.description import AXES, Description, Group
from subnetact.spec import SubnetSpec

__all__ = ["MODELS", "described", "reference", "seeded_model"]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorms, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def residual() -> nn.Module:
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), ResidualBlock(8), *end)


def stack() -> nn.Module:
    blocks = nn.Sequential(*(ResidualBlock(8) for _ in range(3)), nn.Conv2d(8, 12, 1))
    return nn.Sequential(nn.Conv2d(3, 8, 3), blocks, nn.Conv2d(12, 4, 1))


class Attending(nn.Module):
    """An attention with a shortcut around it, between a norm and a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm, self.head = attention, nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(self.norm(x)))


class FusedAttention(nn.Module):
    """Four heads, whose queries, keys and values one layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class GroupedQueries(nn.Module):
    """Eight heads of queries, of which every two share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 8, 4
        self.q, self.o = nn.Linear(16, 32), nn.Linear(32, 16)
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        k, v = (t.repeat_interleave(self.num_heads // self.num_key_value_heads, 1) for t in (k, v))
        out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A feed-forward network, whose gate and value one layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def grouped() -> nn.Module:
    depthwise, groups = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 16, 3, padding=1, groups=4)
    first = (nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*first, depthwise, nn.ReLU(), groups, nn.ReLU(), nn.Conv2d(16, 4, 1))


class Normalised(nn.Module):
    """A residual stream with a LayerNorm and an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm1, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm2 = nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(F.gelu(self.up(self.norm1(x))))
        return self.head(self.norm2(x))


def group_normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 1))


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x))


class Concatenation(nn.Module):
    """The outputs of two convolutions beside the input, which is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.bn, self.last = nn.BatchNorm2d(19), nn.Conv2d(19, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.bn(torch.cat([self.left(x), x, self.right(x)], 1))))


class Encoder(nn.Module):
    """A token that attends to a sequence, by the attention of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x[:, 0])


class Sequence(nn.Module):
    """Causal convolutions with a gate, and a scale of every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 3), nn.Conv1d(16, 32, 3)
        self.scale, self.last = nn.Parameter(torch.ones(16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(F.pad(x, (2, 0))))
        value, gate = self.second(F.pad(x, (2, 0))).transpose(1, 2).chunk(2, -1)
        return self.last(value * gate.sigmoid() * self.scale)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (5, 8)),
    "residual": (residual, (2, 3, 8, 8)),
    "stack": (stack, (2, 3, 8, 8)),
    "fused attention": (lambda: Attending(FusedAttention()), (2, 5, 16)),
    "grouped queries": (lambda: Attending(GroupedQueries()), (2, 5, 16)),
    "gated": (Gated, (5, 8)),
    "grouped": (grouped, (2, 3, 8, 8)),
    "normalised": (Normalised, (5, 6)),
    "group normed": (group_normed, (2, 3, 8, 8)),
    "tied": (Tied, (2, 5)),
    "concatenation": (Concatenation, (2, 3, 6, 6)),
    "encoder": (Encoder, (2, 5, 6)),
    "sequence": (Sequence, (2, 4, 9)),
}
"""Name -> a function that makes the model, and the shape of its input."""


def seeded_model(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model in evaluation mode, no two of whose channels are alike, and an input for it."""
    make, shape = MODELS[name]
    model = make().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if not tensor.is_floating_point():
                continue
            if tensor.dim() < 2:
                tensor.copy_(torch.rand(tensor.shape, generator=draw) + 0.5)
            else:
                spread = (len(tensor) / tensor.numel()) ** 0.5
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * spread)
    if name == "tied":
        return model, torch.randint(0, 20, shape, generator=draw)
    return model, torch.randn(shape, generator=draw)


@cache
def described(name: str) -> Description:
    """Return the right description of a model, which `describe` finds."""
    model, x = seeded_model(name)
    found = subnetact.describe(model, x, axes=AXES, proof=False)
    if name == "normalised":
        return found.with_choices("stem.stream", [1, 8, 12, 16])  # One feature may be broadcast.
    return found


# -- the reference ----------------------------------------------------------------------------------


def reference(model: nn.Module, description: Description, spec: SubnetSpec) -> nn.Module:
    """Return a copy of the model that computes what the subnet of a spec has to compute."""
    plain, dropped = copy.deepcopy(model), dict[tuple[str, str], Tensor]()
    for axis in description.space.axes:
        for slot, choice in zip(axis.slots, spec[axis.name], strict=True):
            found: Any = description.slots[slot.name]
            size = found.sizes[choice]
            if not isinstance(found, Group):
                for block in found.blocks[size:]:
                    plain.set_submodule(block, nn.Identity())
                continue
            for member in found.members:
                start = (member.start or 0) + size * member.multiple
                end = (member.start or 0) + found.full * member.multiple
                before = dropped.get((member.module, member.part), torch.empty(0, dtype=torch.long))
                dropped[member.module, member.part] = torch.cat([before, torch.arange(start, end)])
    inside = dict(plain.named_modules())
    with torch.no_grad():
        for (path, part), indices in dropped.items():
            if path in inside:  # Others are in a skipped block.
                _drop_(inside[path], part, indices)
    return plain


def _drop_(module: Any, part: str, indices: Tensor) -> None:
    """Make a module that no longer uses some entries of a part."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        kept = torch.ones(module.weight.shape, dtype=torch.bool)
        kept[indices] = False
        module.register_forward_hook(_OfKept(kept))
    elif isinstance(module, nn.MultiheadAttention):
        thirds = (module.in_proj_weight.view(3, 16, 16), module.in_proj_bias.view(3, 16))
        for tensor in thirds if part == "out" else ():
            tensor[:, indices] = 0
        if part == "in_":
            thirds[0][:, :, indices] = 0
    elif part == "in_" or isinstance(module, nn.Embedding):
        module.weight[:, indices] = 0
    elif part in ("out", "channels", "features"):
        for tensor in (module.weight, module.bias):
            if tensor is not None:
                tensor[indices] = 0
    elif isinstance(tensor := getattr(module, part.partition(".")[0]), nn.Parameter):
        tensor.index_fill_(int(part.partition(".")[2]), indices, 0)  # A number of heads stays: they are zero.


class _OfKept:
    """A forward hook of a norm: it sees the kept features only; the others are zero."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def __call__(self, norm: Any, args: tuple[Tensor], _: Tensor) -> Tensor:
        (x,), kept = args, self.kept
        features = x[..., kept]
        if isinstance(norm, nn.LayerNorm):
            found = F.layer_norm(features, (int(kept.sum()),), norm.weight[kept], norm.bias[kept], norm.eps)
        else:
            found = F.rms_norm(features, (int(kept.sum()),), norm.weight[kept], norm.eps)
        output = torch.zeros_like(x)
        output[..., kept] = found
        return output
