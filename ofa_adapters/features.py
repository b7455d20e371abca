"""The features that upstream's accuracy predictors read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from subnetact.errors import IllegalChoice
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec, Value

__all__ = ["Features", "mobile_features", "raw_features", "resnet_features", "tutorial_features"]

Features: TypeAlias = npt.NDArray[np.float32]
"""Features of one subnet, float32, of shape (n_features,)."""

ARCH_ENCODER_SIZES = (128, 144, 160, 176, 192, 224, 240, 256)
"""Image sizes in pixels that upstream's `MobileNetArchEncoder` and `ResNetArchEncoder` know."""
TUTORIAL_SIZES = (112, 128, 144, 160, 176, 192, 208, 224)
"""Image sizes in pixels that the predictor in upstream's tutorial knows."""


def mobile_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Return the features of OFA's `MobileNetArchEncoder`.

    They are one-hot: the image size, then the kernel size of every block, then the expansion of every block.

    Args:
        space: a space with the axes `kernel` and `expand`.
        spec: a subnet of that space.
        image_size: height and width of the input in pixels, one of `ARCH_ENCODER_SIZES`.

    Returns:
        The features, of shape (n_features,).

    Raises:
        IllegalChoice: the image size is not one of the encoding's sizes.

    Source: mit-han-lab/once-for-all, ofa/nas/accuracy_predictor/arch_encoder.py.
    """
    size = _one_hot(ARCH_ENCODER_SIZES, _known(image_size, ARCH_ENCODER_SIZES))
    return _features(size, *_axis(space, spec, "kernel"), *_axis(space, spec, "expand"))


def tutorial_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Return the features of `spec2feats` in OFA's tutorial.

    They are one-hot: the kernel size of every block, then the expansion of every block, then the image size.

    Args:
        space: a space with the axes `kernel` and `expand`.
        spec: a subnet of that space.
        image_size: height and width of the input in pixels, one of `TUTORIAL_SIZES`.

    Returns:
        The features, of shape (n_features,).

    Raises:
        IllegalChoice: the image size is not one of the encoding's sizes.

    Source: mit-han-lab/once-for-all, ofa/tutorial.
    """
    size = _one_hot(TUTORIAL_SIZES, _known(image_size, TUTORIAL_SIZES))
    return _features(*_axis(space, spec, "kernel"), *_axis(space, spec, "expand"), size)


def resnet_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Return the features of OFA's `ResNetArchEncoder`.

    They are one-hot: the image size, whether the stem's middle layer is kept, the width multiplier of every
    stage, then the expansion of every block.

    Args:
        space: a space with the axes `depth`, `width` and `expand`, `depth` first.
        spec: a subnet of that space.
        image_size: height and width of the input in pixels, one of `ARCH_ENCODER_SIZES`.

    Returns:
        The features, of shape (n_features,).

    Raises:
        IllegalChoice: the image size is not one of the encoding's sizes.

    Source: mit-han-lab/once-for-all, ofa/nas/accuracy_predictor/arch_encoder.py.
    """
    size = _one_hot(ARCH_ENCODER_SIZES, _known(image_size, ARCH_ENCODER_SIZES))
    (stem, *_), (ends, *_) = spec["depth"], space.axes[0].slots
    kept = _one_hot((False, True), stem == ends.choices[-1])
    return _features(size, kept, *_axis(space, spec, "width"), *_axis(space, spec, "expand"))


def raw_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Return the features of AttentiveNAS' accuracy predictor.

    They are the values of the configuration as numbers, axis by axis, with the resolution first.

    Args:
        space: a space with the axis `resolution`.
        spec: a subnet of that space.
        image_size: None, or the subnet's own resolution in pixels.

    Returns:
        The features, of shape (n_features,).

    Raises:
        IllegalChoice: the image size is not the subnet's resolution.

    Source: facebookresearch/AttentiveNAS.
    """
    (resolution,) = spec["resolution"]
    if image_size is not None and image_size != resolution:
        raise IllegalChoice(
            f"image_size: {image_size!r} is not the subnet's resolution; choose from {resolution}"
        )
    return _features(*([float(v or 0) for v in spec[axis.name]] for axis in space.axes))


def _axis(space: SubnetSpace, spec: SubnetSpec, name: str) -> list[list[float]]:
    (axis,) = (axis for axis in space.axes if axis.name == name)
    return [_one_hot(slot.choices, value) for slot, value in zip(axis.slots, spec[name], strict=True)]


def _one_hot(choices: Sequence[Value], value: Value | None) -> list[float]:
    return [float(choice == value) for choice in choices]


def _known(image_size: int | None, sizes: Sequence[int]) -> int:
    if image_size is None or image_size not in sizes:
        raise IllegalChoice(
            f"image_size: {image_size!r} is not a choice of this encoding; "
            f"choose from {', '.join(map(str, sizes))}"
        )
    return image_size


def _features(*groups: list[float]) -> Features:
    return np.array([value for group in groups for value in group], dtype=np.float32)
