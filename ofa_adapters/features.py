"""The features that upstream's accuracy predictors read, one function per encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from subnetact.errors import IllegalChoice
from subnetact.space import SubnetSpace
from subnetact.spec import PRECISION, SubnetSpec

Features: TypeAlias = npt.NDArray[np.float32]
"""Features of one subnet, float32, of shape (n_features,)."""
Encoding: TypeAlias = Callable[[SubnetSpace, SubnetSpec, int | None], Features]
"""Returns the features of a subnet of a space whose inputs have a height and width in pixels."""

ARCH_ENCODER_SIZES = (128, 144, 160, 176, 192, 224, 240, 256)
"""Image sizes in pixels that upstream's `MobileNetArchEncoder` and `ResNetArchEncoder` know."""
TUTORIAL_SIZES = (112, 128, 144, 160, 176, 192, 208, 224)
"""Image sizes in pixels that the predictor in upstream's tutorial knows."""


def mobile_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Encode image size, kernels and expansions one-hot, as OFA's `MobileNetArchEncoder` does."""
    size = _image_size(image_size, ARCH_ENCODER_SIZES)
    return np.concatenate([size, _axis(space, spec, "kernel"), _axis(space, spec, "expand")])


def tutorial_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Encode kernels, expansions and image size one-hot, as `spec2feats` in OFA's tutorial does."""
    size = _image_size(image_size, TUTORIAL_SIZES)
    return np.concatenate([_axis(space, spec, "kernel"), _axis(space, spec, "expand"), size])


def resnet_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Encode image size, the middle layer of the stem, widths and expansions as OFA's `ResNetArchEncoder`."""
    size = _image_size(image_size, ARCH_ENCODER_SIZES)
    kept = spec["depth"][0] == space.axes[0].slots[0].choices[-1]
    stem = np.array([not kept, kept], np.float32)
    return np.concatenate([size, stem, _axis(space, spec, "width"), _axis(space, spec, "expand")])


def raw_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Return the values of upstream's axes as numbers, the resolution first, as its AttentiveNAS does."""
    (resolution,) = spec["resolution"]
    if image_size is not None:
        _image_size(image_size, (resolution,))
    names = [axis.name for axis in space.axes if axis.name != PRECISION]
    return np.array([value or 0 for name in names for value in spec[name]], np.float32)


def _axis(space: SubnetSpace, spec: SubnetSpec, name: str) -> Features:
    (axis,) = (axis for axis in space.axes if axis.name == name)
    pairs = zip(axis.slots, spec[name], strict=True)
    return np.array([choice == value for slot, value in pairs for choice in slot.choices], np.float32)


def _image_size(image_size: int | None, known: Sequence[object]) -> Features:
    if image_size not in known:
        raise IllegalChoice(
            f"image_size: {image_size!r} is not a choice of this encoding; "
            f"choose from {', '.join(map(str, known))}"
        )
    return np.array([size == image_size for size in known], np.float32)
