"""The features that upstream's accuracy predictors read, one function per encoding."""

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
    """Encode image size, kernels and expansions one-hot, as OFA's `MobileNetArchEncoder` does.

    Source: mit-han-lab/once-for-all, ofa/nas/accuracy_predictor/arch_encoder.py.
    """
    size = _image_size(image_size, ARCH_ENCODER_SIZES)
    return _features(size, *_axis(space, spec, "kernel"), *_axis(space, spec, "expand"))


def tutorial_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Encode kernels, expansions and image size one-hot, as `spec2feats` does.

    Source: mit-han-lab/once-for-all, ofa/tutorial.
    """
    size = _image_size(image_size, TUTORIAL_SIZES)
    return _features(*_axis(space, spec, "kernel"), *_axis(space, spec, "expand"), size)


def resnet_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Encode image size, whether the stem's middle layer is kept, widths and expansions one-hot.

    Source: mit-han-lab/once-for-all, ofa/nas/accuracy_predictor/arch_encoder.py, `ResNetArchEncoder`.
    """
    size = _image_size(image_size, ARCH_ENCODER_SIZES)
    (stem, *_), (ends, *_) = spec["depth"], space.axes[0].slots
    kept = _one_hot((False, True), stem == ends.choices[-1])
    return _features(size, kept, *_axis(space, spec, "width"), *_axis(space, spec, "expand"))


def raw_features(space: SubnetSpace, spec: SubnetSpec, image_size: int | None) -> Features:
    """Return the values of the configuration as numbers, axis by axis, with the resolution first.

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


def _image_size(image_size: int | None, known: Sequence[int]) -> list[float]:
    if image_size is None or image_size not in known:
        raise IllegalChoice(
            f"image_size: {image_size!r} is not a choice of this encoding; "
            f"choose from {', '.join(map(str, known))}"
        )
    return _one_hot(known, image_size)


def _one_hot(choices: Sequence[Value], value: Value | None) -> list[float]:
    return [float(choice == value) for choice in choices]


def _features(*groups: list[float]) -> Features:
    return np.array([value for group in groups for value in group], dtype=np.float32)
