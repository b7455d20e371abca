"""`Family`: the description of one published supernet family, which the registry reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeAlias

from torch import Tensor, nn

from ofa_adapters.features import Features
from subnetact.operators import CALIBRATION_RULES, Elastic
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

__all__ = ["Built", "Family", "Keys"]

Built: TypeAlias = tuple[nn.Module, SubnetSpace, Mapping[str, Elastic]]
"""The plain network at full size, its search space, and the elastic description that `insert_` takes."""

WEIGHTED_BIASED, CUMULATIVE_UNBIASED = CALIBRATION_RULES


class Keys(tuple[str, ...]):
    """The names in a state_dict, taken out of any wrapper and without `module.` prefixes."""

    __slots__ = ()

    def some(self, pattern: str) -> bool:
        """Return whether a regular expression matches somewhere in at least one of the names."""
        return any(re.search(pattern, key) for key in self)


@dataclass(frozen=True)
class Family:
    """One published family.

    Attributes:
        build: takes constructor arguments under upstream's names; returns the plain network, the space and
            the elastic description.
        rename: maps a key of an upstream state_dict to the plain network's key.
        source: the repository that publishes the architecture.
        licence: the licence of that repository's code. This package copies none of that code.
        recognises: tells from the names in a state_dict whether it may belong to this family.
        ordinary: what has the same names without belonging to the family, such as "a vision transformer of
            timm". If None, no other model has these names.
        checkpoints: names under which upstream publishes weights.
        unused: regular expression for upstream keys that the network does not use. If None, it uses all keys.
        infer: takes the tensors and the constructor arguments that were given; returns the arguments
            completed with what the tensors reveal. If None, nothing is inferred.
        settings: takes a directory that transformers saved; returns the constructor arguments that its
            `config.json` states. If None, its entries of the same names are taken.
        complete: takes the tensors of a checkpoint; returns them with those that upstream leaves out. If
            None, nothing is left out.
        calibration: how upstream averages BatchNorm statistics, one of `CALIBRATION_RULES`.
        listed_statistics: whether a checkpoint holds own BatchNorm statistics per subnet (Slimmable).
        image_sizes: the input sizes in pixels that upstream serves, if the size is not an axis of the space.
        input_shape: shape of one usual input, without the batch dimension.
        input_dtype: dtype of that input, as an attribute name of torch.
        encodings: for every encoding of upstream's accuracy predictors, a function of the space, the spec and
            the image size that returns the features.
    """

    build: Callable[..., Built]
    rename: Callable[[str], str]
    source: str
    licence: str
    recognises: Callable[[Keys], bool]
    ordinary: str | None = None
    checkpoints: tuple[str, ...] = ()
    unused: str | None = None
    infer: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Any]] | None = None
    settings: Callable[[str | PathLike[str]], dict[str, Any]] | None = None
    complete: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    calibration: str = WEIGHTED_BIASED
    listed_statistics: bool = False
    image_sizes: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = (3, 224, 224)
    input_dtype: str = "float32"
    encodings: Mapping[str, Callable[[SubnetSpace, SubnetSpec, int | None], Features]] = field(
        default_factory=dict
    )
