"""Faster convolutions of a view, which copy no weight outside a call, or share packed slices.

Convolutions are swapped by class in a view of the engine's own; nothing is traced, so any network
can have them. Measured on OFA-ResNet50: ATen copies a sliced weight into channels_last and again into
oneDNN's layout in every call, while a matrix product reads it where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.engine.cache import ByteCache
from subnetact.engine.packed_conv import (
    PackedConv,
    can_pack,
    plain_conv,
    version,
)

__all__ = ["SliceCache", "use_fast_convs_"]

SMALL_MAP = 128
"""Output pixels up to which unfolding the input is cheaper than packing the weight in the call."""
LARGE_MAP = 4096
"""Pixels from which packing a 1x1 weight in the call is cheaper than a product with the strided one."""


_PLAIN: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True, eq=False)
class _Slice:
    packed: PackedConv
    weight: Tensor
    version: int

    def fits(self, weight: Tensor) -> bool:
        return self.weight is weight and self.version == version(weight)


class SliceCache:
    """Packed weights, one for each distinct slice of each layer, shared by every subnet that uses it.

    Args:
        cache: where they are kept; slices that have not been used lately make room.
    """

    KIND = "slice_cache"
    STAYS = 8
    """A slice stays if it was used within the last so many look-ups per kept value: where all slices are in
    use and do not fit, the rest runs without a copy, which is faster than packing them in turn."""

    def __init__(self, cache: ByteCache) -> None:
        self._cache = cache
        self._packing = Lock()
        self.classes: dict[type[nn.Module], type[nn.Module]] = {}

    def run(self, conv: nn.Conv2d, x: Tensor) -> Tensor | None:
        """Run a view's convolution on x in channels_last, or return None where there is no room."""
        weight = conv.weight
        key = self.KIND, id(weight)
        found: _Slice | None = self._cache.get(key)
        if found is None or not found.fits(weight):
            with self._packing:  # one at a time: a weight being packed is in memory twice
                found = self._cache.get(key)
                if found is None or not found.fits(weight):
                    found = self._pack(conv, x, key)
        return None if found is None else found.packed(x)

    def _pack(self, conv: nn.Conv2d, x: Tensor, key: Any) -> _Slice | None:
        weight = conv.weight
        nbytes = weight.numel() * weight.element_size()
        evicts = {self.KIND: float(self._cache.now - self.STAYS * len(self._cache))}
        if not self._cache.make_room(nbytes, evicts):
            return None
        before = version(weight)
        packed = PackedConv(conv, lambda: weight, conv.bias, weight.dtype)
        packed.reserve = partial(self._cache.grow, key, evicts=evicts)
        packed.prepare(x.shape)
        found = _Slice(packed, weight, before)
        self._cache.put(key, found, packed.nbytes, self.KIND, evicts)
        return found


class _Quick:
    """Forward of a Conv2d whose input is in channels_last; otherwise it is the plain one's."""

    slices: SliceCache | None

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H', W')."""
        if not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        if self.slices is not None:
            y: Tensor | None = self.slices.run(self, x)
            if y is not None:
                return y
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            if self.stride == (1, 1) and x.numel() >= LARGE_MAP * x.shape[1] and can_pack(self.weight):
                return PackedConv(self, lambda: self.weight, self.bias, self.weight.dtype)(x)
            return _pointwise(self, x)
        if x.device.type == "cpu":
            height, width = (
                (x.shape[2 + i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1)
                // self.stride[i]
                + 1
                for i in range(2)
            )
            if x.shape[0] * height * width <= SMALL_MAP:
                return _unfolded(self, x, height, width)
        return super().forward(x)  # type: ignore[misc, no-any-return]


def _pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    down, right = conv.stride
    pixels = x.permute(0, 2, 3, 1)
    if (down, right) != (1, 1):
        pixels = pixels[:, ::down, ::right]
    return F.linear(pixels, conv.weight[:, :, 0, 0], conv.bias).permute(0, 3, 1, 2)


def _unfolded(conv: nn.Conv2d, x: Tensor, height: int, width: int) -> Tensor:
    # A slice's rows stay whole in memory, so flattening it is a view.
    columns = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # type: ignore[arg-type]
    y = F.linear(columns.transpose(1, 2), conv.weight.flatten(1), conv.bias)
    return y.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2)


def _quick_class(cls: type[nn.Module], slices: SliceCache | None) -> type[nn.Module]:
    known = _PLAIN if slices is None else slices.classes
    if cls not in known:
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "slices": slices}
        known[cls] = type(cls.__name__, (_Quick, cls), names)
    return known[cls]


def use_fast_convs_(view: nn.Module, slices: SliceCache | None) -> nn.Module:
    """Give a view's plain, ungrouped convolutions the faster forward, in place; return it.

    Args:
        view: a view that nobody else uses.
        slices: where packed weights are shared; None = no weight is copied outside a call.
    """
    for module in view.modules():
        if isinstance(module, nn.Conv2d) and plain_conv(module) and module.groups == 1:
            usable = slices if slices is not None and can_pack(module.weight) else None
            # The shell's dictionary is left alone: shells of a class share its keys.
            object.__setattr__(module, "__class__", _quick_class(type(module), usable))
    return view
