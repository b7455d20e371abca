"""Head attention: attention whose products oneDNN computes, one head after another.

torch multiplies queries, keys and values by MKL, which reaches about half of oneDNN's rate on CPUs that are
not Intel's. A call per head costs about 20 us more than a batch of products, and the scores of a head must
stay in the cache, so short and very long inputs stay with torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from subnetact.engine.packed_linear import ONEDNN, is_intel, packing_pays

LEAST_PRODUCT, LARGEST_PRODUCT = 2**21, 2**26
"""Between so many multiplications per head, oneDNN takes 0.6 to 0.9 times as long as torch's attention."""


def attention_by_heads(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return what `F.scaled_dot_product_attention` does: a tensor of shape (N, heads, T, features)."""
    product = query.shape[-2] * key.shape[-2] * query.shape[-1]
    plain = not args and not any(v for name, v in kwargs.items() if name not in ("scale", "attn_mask"))
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] and key.shape == value.shape
    fits = query.dtype == torch.float32 and LEAST_PRODUCT <= product <= LARGEST_PRODUCT
    if not (plain and alike and fits and kwargs.get("attn_mask") is None):
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    scale = kwargs.get("scale")
    multiply = torch.ops.mkldnn._linear_pointwise
    scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    heads = [part.contiguous().flatten(0, 1) for part in (scaled, key, value)]  # Strides would be slow.
    answer = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    places = [place for sample in answer.unbind() for place in sample.unbind(1)]
    for q, k, v, place in zip(*heads, places, strict=True):
        scores = multiply(q, k, None, "none", [], "")
        place.copy_(multiply(scores.softmax(-1), v.transpose(0, 1), None, "none", [], ""))
    return answer.transpose(1, 2)  # In memory as torch's own, so that a view may join its heads.


def heads_pay() -> bool:
    """Tell whether oneDNN multiplies faster on this CPU than torch's attention does."""
    return ONEDNN and not is_intel() and packing_pays()


def attend_by_heads(graph: fx.Graph) -> None:
    """Let a graph call `attention_by_heads` in the place of torch's attention, if it pays."""
    for node in graph.nodes:
        if node.target is F.scaled_dot_product_attention and heads_pay():
            node.target = attention_by_heads
