"""AttentionSlice: the first heads of `nn.MultiheadAttention`.

It stores the projections of queries, keys and values as three blocks of rows of one matrix, of which a subnet
keeps the first rows each. As a tensor of shape (3, rows, columns) they are a zero-copy slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.operators.base import Operator
from subnetact.operators.lowered_weight import Low, LoweredWeight
from subnetact.operators.view_module import view_module


class SlicedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with fewer heads; `in_proj_weight` is (3, heads * head width, inputs)."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint that the mask, which is applied anyway, is causal
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what `nn.MultiheadAttention` does, with the heads of the subnet, also in masks of heads."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch does
        if query.is_nested:  # `nn.TransformerEncoder` leaves out what is padded.
            x, lengths = query.to_padded_tensor(0.0), [len(row) for row in query.unbind()]
            kept = torch.arange(x.shape[1], device=x.device) < torch.tensor(lengths, device=x.device)[:, None]
            out, weights = self.forward(x, x, x, ~kept, need_weights)
            return torch._nested_tensor_from_mask(out, kept), weights
        swap = not self.batch_first and query.dim() == 3
        given = (t.transpose(0, 1) for t in (query, key, value)) if swap else (query, key, value)
        q, *pair = (self.project(t, i) for i, t in enumerate(given))
        if self.bias_k is not None:
            rows = zip(pair, (self.bias_k[0], self.bias_v[0]), strict=True)
            pair = [torch.cat((t, row.expand_as(t[..., :1, :])), -2) for t, row in rows]
        if self.add_zero_attn:
            pair = [F.pad(t, (0, 0, 0, 1)) for t in pair]
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for t in (q, *pair))
        mask = None if attn_mask is None else _added(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(-1, self.num_heads, *mask.shape[1:]) if q.dim() == 4 else mask
        if key_padding_mask is not None:
            padded = _added(key_padding_mask, q)[..., None, None, :]
            mask = padded if mask is None else mask + padded
        if mask is not None and mask.shape[-1] < k.shape[-2]:  # appended keys are never masked
            mask = F.pad(mask, (0, k.shape[-2] - mask.shape[-1]))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            out = weights @ v
            weights = weights.mean(-3) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(out.transpose(-3, -2).flatten(-2))
        return (out.transpose(0, 1) if swap else out), weights

    def project(self: Any, x: Tensor, i: int) -> Tensor:
        """Map (..., input width) to the queries, keys or values (i is 0, 1 or 2), of shape (..., width)."""
        bias = self.in_proj_bias
        return F.linear(x, self.in_proj_weight[i], None if bias is None else bias[i])


class _LowAttention(Low):
    """The projections of a `SlicedMultiheadAttention` at a lower precision."""

    reads = ("in_proj_weight", "in_proj_bias")

    def project(self: Any, x: Tensor, i: int) -> Tensor:
        weight, scale = self.lowered
        bias = self.in_proj_bias
        low = LoweredWeight(weight[i], None if scale is None else scale[i])
        return low.product(x, None if bias is None else bias[i])


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add to scores."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)


class AttentionSlice(Operator):
    """Keeps the first heads, and the first inputs, of an `nn.MultiheadAttention`.

    Parts:
        out: the width of all heads together, a multiple of the width of one head.
        in_: the width of queries, keys and values.

    The module `out_proj` inside it is described on its own, with the dimension that `out` follows.

    Example:
        >>> elastic = {
        ...     "attention": AttentionSlice.on(out="heads"),
        ...     "attention.out_proj": WeightSlice.on(in_="heads"),
        ... }
    """

    slices = ("attention",)
    parts = ("out", "in_")

    def check(self) -> None:
        """Refuse other templates, and keys or values of another width."""
        super().check()
        if self.template.in_proj_weight is None:
            raise self.refuse("kdim and vdim are not supported; project to embed_dim before the attention")

    @cached_property
    def shell(self) -> nn.Module:
        """An attention with the settings of the template, whose forward takes fewer heads."""
        sliced = view_module(self.template)
        object.__setattr__(sliced, "__class__", SlicedMultiheadAttention)
        return sliced

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the width of the full network, which is that of the inputs and of all heads together."""
        return int(self.template.embed_dim)

    def group_size(self, part: str) -> int:
        """Return the width of one head, or 1 for the inputs."""
        return int(self.template.head_dim) if part == "out" else 1

    def sliced(self, sizes: tuple[int, ...], given: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """Return the first rows and columns of the three projections, of shape (3, out, in_)."""
        out, in_ = sizes
        found: dict[str, Any] = dict(given)
        found["in_proj_weight"] = found["in_proj_weight"].unflatten(0, (3, -1))[:, :out, :in_]
        if found["in_proj_bias"] is not None:
            found["in_proj_bias"] = found["in_proj_bias"].unflatten(0, (3, -1))[:, :out]
        found |= {n: found[n][..., :out] for n in ("bias_k", "bias_v") if found.get(n) is not None}
        return found

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the widths and the number of heads of the subnet's module."""
        out, in_ = sizes
        widths = dict.fromkeys(("embed_dim", "kdim", "vdim"), in_)
        fused = {"_qkv_same_embed_dim": False}  # Encoders read it, and keep off their fused kernels.
        return {"num_heads": out // self.template.head_dim, **widths, **fused}

    def low_mixin(self) -> type[Low]:
        """Return the projections at a lower precision."""
        return _LowAttention
