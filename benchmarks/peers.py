"""Upstream's networks: those of the package `ofa`; AutoFormer and DynaBERT as upstream computes them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["as_upstream_autoformer", "as_upstream_dynabert", "import_torchvision", "upstream_network"]


def import_torchvision() -> None:
    """Import torchvision, whose operators are missing if it was built for CUDA and torch was not."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # a torchvision built for CUDA beside a CPU-only torch lacks two operators
        for name in ("nms", "qnms"):
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(  # type: ignore[no-untyped-call]
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
            _KEPT_ALIVE.append(library)


def _import_networks() -> Any:
    import_torchvision()
    from ofa.imagenet_classification.elastic_nn import networks

    return networks


_KEPT_ALIVE: list[Any] = []


def upstream_network(family: str) -> Any:
    """Return upstream's published supernet of `ofa_resnet50` or `ofa_mbv3`, in eval mode."""
    networks = _import_networks()
    torch.manual_seed(0)
    if family == "ofa_resnet50":
        network = networks.OFAResNets(
            depth_list=[0, 1, 2],
            expand_ratio_list=[0.2, 0.25, 0.35],
            width_mult_list=[0.65, 0.8, 1.0],
            dropout_rate=0,
        )
    else:
        network = networks.OFAMobileNetV3(
            ks_list=[3, 5, 7], expand_ratio_list=[3, 4, 6], depth_list=[2, 3, 4], dropout_rate=0
        )
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.get_buffer("running_mean").normal_(0, 0.1)
            module.get_buffer("running_var").uniform_(0.5, 1.5)
    return network.eval()


class _TableAttention(nn.Module):
    """The attention of an AutoFormer block as upstream computes it.

    Every forward makes two tables of shape (T, T, features), with the embeddings for keys and for values of
    every pair of tokens, and multiplies them with the queries and with the attention weights.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.heads = block.qkv.out_features // (3 * block.head_features)
        position = block.position
        outputs, inputs = block.qkv.weight.shape
        self.qkv = nn.Linear(inputs, outputs)
        with torch.no_grad():
            # The weight interleaves queries, keys and values. Upstream sorts it once per subnet.
            self.qkv.weight.copy_(torch.cat([block.qkv.weight[i::3] for i in range(3)]))
            self.qkv.bias.copy_(block.qkv.bias)
        self.key = position.key_vertical, position.key_horizontal
        self.value = position.value_vertical, position.value_horizontal
        self.reach = len(position.key_vertical) // 2 - 1

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scale = q.shape[-1] ** -0.5
        scores = (q @ k.transpose(-2, -1)) * scale
        rows = q.permute(2, 0, 1, 3).flatten(1, 2)
        found = rows @ self._table(self.key, tokens).transpose(1, 2)
        scores = scores + found.transpose(0, 1).reshape(scores.shape) * scale
        weights = scores.softmax(-1)
        y = weights @ v
        rows = weights.permute(2, 0, 1, 3).flatten(1, 2)
        y = y + (rows @ self._table(self.value, tokens)).transpose(0, 1).reshape(y.shape)
        return y.transpose(1, 2).reshape(count, tokens, -1)  # type: ignore[no-any-return]

    def _table(self, tables: tuple[Tensor, Tensor], tokens: int) -> Tensor:
        patch = torch.arange(tokens - 1)
        side = math.isqrt(tokens - 1)
        found = []
        for table, place in zip(tables, (patch // side, patch % side), strict=True):
            distance = (place[None, :] - place[:, None]).clamp(-self.reach, self.reach) + self.reach + 1
            found.append(table[F.pad(distance, (1, 0, 1, 0))])
        return found[0] + found[1]


def as_upstream_autoformer(network: Any) -> Any:
    """Let an extracted AutoFormer compute its attention as upstream's code does.

    Args:
        network: the extracted network, which is changed.

    Returns:
        The network.
    """
    for block in network.blocks:
        if "qkv" in block._modules:  # A skipped block is an identity.
            object.__setattr__(block, "mix", _TableAttention(block))  # Modules do not hide methods.
    return network


class _SeparateOperations(nn.Module):
    """A layer of a DynaBERT as upstream computes it: scores, softmax and GELU as separate operations."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        layer = self.layer
        q, k, v = (layer._heads(linear(x)) for linear in (layer.query, layer.key, layer.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(layer.head_size)
        scores = scores if mask is None else scores + mask
        context = torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)
        x = layer.attention_norm(layer.attention_output(context) + x)
        hidden = layer.intermediate(x)
        hidden = hidden * 0.5 * (1.0 + torch.erf(hidden / math.sqrt(2.0)))
        return layer.output_norm(layer.output(hidden) + x)  # type: ignore[no-any-return]


def as_upstream_dynabert(network: Any) -> Any:
    """Let an extracted DynaBERT compute its layers as upstream's code does.

    Args:
        network: the extracted network, which is changed.

    Returns:
        The network.
    """
    network.layers = nn.ModuleList(
        _SeparateOperations(layer) if "query" in layer._modules else layer for layer in network.layers
    )
    return network
