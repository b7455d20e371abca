"""PackedConv: a convolution whose weight is packed once, in the layout of the device's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PackedConv", "can_pack", "plain_conv"]

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_convolution_pointwise"
)
SHAPES = 64
"""Number of input shapes for which a convolution remembers the layout of its weight."""


def plain_conv(module: nn.Module) -> bool:
    """Tell whether a module computes nothing but a zero-padded Conv2d."""
    return (
        isinstance(module, nn.Conv2d)
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and type(module).forward is nn.Conv2d.forward
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def can_pack(weight: Tensor) -> bool:
    """Tell whether oneDNN's fused convolution supports a weight: float32, on the CPU."""
    return _ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32


class PackedConv:
    """A convolution with its weight packed for oneDNN (float32 on the CPU) or in channels_last (otherwise).

    It can add a second input and apply an activation in the same pass: `none`, `relu`, `hardswish`, or
    `hardtanh` between two `scalars`. oneDNN's ReLU and hardtanh turn NaN into a number, so without `merge`
    the activation runs by itself. oneDNN's layout depends on the shape of the input, and a weight in the
    layout for another shape can be a hundred times slower. So the weight that `source` makes is packed when
    an input shape is first seen, once per layout.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        source: Callable[[], Tensor],
        bias: Tensor | None,
        dtype: torch.dtype,
        activation: str = "none",
        scalars: Sequence[float] = (),
        merge: bool = True,
    ) -> None:
        padding, stride, dilation = (
            [int(n) for n in numbers] for numbers in (conv.padding, conv.stride, conv.dilation)
        )
        self._settings = padding, stride, dilation, conv.groups
        self._source = source
        self._bias = bias
        self._reserve: Callable[[int], bool] = lambda _: True
        self._activation = activation
        self._scalars = tuple(scalars)
        self._onednn = _ONEDNN and conv.weight.device.type == "cpu" and dtype == torch.float32
        self._merged = (activation, self._scalars) if merge else ("none", ())
        self._packing = Lock()
        self._by_layout: dict[bytes, Tensor] = {}
        self._by_shape: dict[torch.Size, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and the bias."""
        held = sum(map(self._nbytes, list(self._by_layout.values())))
        return held + (0 if self._bias is None else self._bias.numel() * self._bias.element_size())

    def __call__(self, x: Tensor, other: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """Map x to (N, out, H', W') in channels_last; add `other`, which may be overwritten."""
        weight = self._by_shape.get(x.shape)
        if weight is None:
            weight = self.prepare(x.shape)
        if not self._onednn:
            return self._elsewhere(x, weight, other)
        convolve = torch.ops.mkldnn._convolution_pointwise
        name, scalars = self._merged
        if other is None:
            y = convolve(x, weight, self._bias, *self._settings, name, scalars, "")
        else:
            unary = None if name == "none" else name
            add = weight, self._bias, *self._settings, "add", None, unary, scalars, ""
            if overwrite:
                y = torch.ops.mkldnn._convolution_pointwise_.binary(other, x, *add)
            else:
                y = convolve.binary(x, other, *add)
        return y if name == self._activation else self._activate(y)

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Ask `reserve` for the bytes of every further layout; if it refuses, each call packs the weight."""
        self._reserve = reserve

    @property
    def swallows_nan(self) -> bool:
        """Whether the result can be a number although the convolution gives NaN."""
        return self._onednn and self._merged[0] in ("relu", "hardtanh")

    def prepare(self, shape: torch.Size) -> Tensor:
        """Pack the weight for inputs of a shape (N, in, H, W), if necessary, and return the packed weight."""
        with self._packing:  # Other convolutions are packed meanwhile.
            known = self._by_shape.get(shape)
            return self._pack(shape) if known is None else known

    def _pack(self, shape: torch.Size) -> Tensor:
        if self._onednn:
            packed = self._reorder(shape)
            layout = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())
        else:
            packed, layout = self._source().contiguous(memory_format=torch.channels_last), b""
        found = self._by_layout.get(layout)
        if found is None:
            if not self._reserve(self._nbytes(packed)):
                return packed
            found = self._by_layout.setdefault(layout, packed)
        if len(self._by_shape) >= SHAPES:
            self._by_shape = {}
        self._by_shape[shape] = found
        return found

    def _reorder(self, shape: torch.Size) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(self._source(), *self._settings, shape)
        return packed

    def _nbytes(self, weight: Tensor) -> int:
        if self._onednn:
            return int(torch.ops.mkldnn._nbytes(weight))
        return weight.numel() * weight.element_size()

    def _elsewhere(self, x: Tensor, weight: Tensor, other: Tensor | None) -> Tensor:
        padding, stride, dilation, groups = self._settings
        y = F.conv2d(x, weight, self._bias, stride, padding, dilation, groups)
        if other is not None:
            y = y.add_(other)
        return self._activate(y)

    def _activate(self, y: Tensor) -> Tensor:
        if self._activation == "relu":
            return y.relu_()
        if self._activation == "hardswish":
            return F.hardswish(y, inplace=True)
        if self._activation == "hardtanh":
            return y.clamp_(*self._scalars)
        return y
