"""Family: all that a file of this package says about one published family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from ofa_adapters.features import Features
from subnetact.operators import CALIBRATION_RULES, Elastic
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

__all__ = ["Built", "Family", "Keys"]

Built: TypeAlias = tuple[nn.Module, SubnetSpace, Mapping[str, Elastic]]

WEIGHTED_BIASED, CUMULATIVE_UNBIASED = CALIBRATION_RULES


class Keys(tuple[str, ...]):
    """The names of a state_dict, outside wrappers and without `module.` prefixes."""

    __slots__ = ()

    def some(self, pattern: str) -> bool:
        """Tell whether a regular expression is found in any name."""
        return any(re.search(pattern, key) for key in self)


@dataclass(frozen=True)
class Family:
    """One published family.

    Attributes:
        build: constructor arguments, by upstream's names -> (plain network, space, elastic description).
        rename: an upstream state_dict key -> the plain network's key.
        source: the repository where the architecture is published.
        licence: of that repository's code; it says nothing about this package's, which copies none.
        looks: tells from the names of a state_dict whether it is of this family.
        checkpoints: names under which upstream publishes weights.
        unused: a regular expression of upstream keys that the network has no use for.
        infer: tensors and constructor arguments given -> the arguments with what the tensors tell.
        calibration: how its upstream averages BatchNorm statistics (`CALIBRATION_RULES`).
        listed_statistics: whether a checkpoint holds the statistics of every subnet.
        image_sizes: the input sizes upstream serves, where they are no axis of the space.
        input_shape: of one input, without a batch dimension, as it is usually served.
        input_dtype: of that input, a name in torch.
        encodings: name -> features for upstream's accuracy predictor, of (space, spec, image_size).
    """

    build: Callable[..., Built]
    rename: Callable[[str], str]
    source: str
    licence: str
    looks: Callable[[Keys], bool]
    checkpoints: tuple[str, ...] = ()
    unused: str | None = None
    infer: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Any]] | None = None
    calibration: str = WEIGHTED_BIASED
    listed_statistics: bool = False
    image_sizes: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = (3, 224, 224)
    input_dtype: str = "float32"
    encodings: Mapping[str, Callable[[SubnetSpace, SubnetSpec, int | None], Features]] = field(
        default_factory=dict
    )
