"""`Family`: the description of one published supernet family, which the registry reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeAlias

from torch import Tensor, nn

from ofa_adapters.features import Encoding
from subnetact.operators import CALIBRATION_RULES, Elastic
from subnetact.space import SubnetSpace

__all__ = ["Built", "Family", "Keys", "Renamings"]

Built: TypeAlias = tuple[nn.Module, SubnetSpace, Mapping[str, Elastic]]
"""The plain network at full size, its search space, and the elastic description that `insert_` takes."""

Renamings: TypeAlias = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
"""Regular expressions in upstream's names and what replaces them, applied one after another."""

WEIGHTED_BIASED, CUMULATIVE_UNBIASED = CALIBRATION_RULES


class Keys(tuple[str, ...]):
    """The names in a state_dict, taken out of any wrapper and without `module.` prefixes."""

    __slots__ = ()

    def have(self, *patterns: str) -> bool:
        """Return whether each of the regular expressions matches somewhere in at least one of the names."""
        return all(any(re.search(pattern, key) for key in self) for pattern in patterns)


@dataclass(frozen=True)
class Family:
    """One published family.

    Attributes:
        build: takes constructor arguments under upstream's names.
        names: what turns the names in an upstream state_dict into the plain network's names.
        source: the repository that publishes the architecture.
        licence: the licence of that repository's code. This package copies none of that code.
        recognises: tells from the names in a state_dict whether it may belong to this family.
        ordinary: what has the same names without belonging to the family, such as "a vision transformer of
            timm". If None, no other model has these names.
        checkpoints: names under which upstream publishes weights.
        unused: regular expression for upstream keys that the network does not use. If None, it uses all keys.
        infer: takes the tensors and the constructor arguments that were given; returns the arguments
            completed with what the tensors reveal. If None, nothing is inferred.
        convert: takes the tensors of a checkpoint; returns them as the network has them, if several tensors
            there are one here.
        settings: takes a directory that transformers saved; returns the constructor arguments that its
            `config.json` states. If None, its entries of the same names are taken.
        calibration: how upstream averages BatchNorm statistics, one of `CALIBRATION_RULES`.
        packs: whether views have packed copies of slices in several runs, as `Supernet.packs` says. It is
            False where these would take much memory.
        listed_statistics: whether a checkpoint holds own BatchNorm statistics per subnet (Slimmable).
        input_shape: shape of one usual input, without the batch dimension.
        input_dtype: dtype of that input, as an attribute name of torch.
        encodings: the encodings of upstream's accuracy predictors.
    """

    build: Callable[..., Built]
    names: Renamings
    source: str
    licence: str
    recognises: Callable[[Keys], bool]
    ordinary: str | None = None
    checkpoints: tuple[str, ...] = ()
    unused: str | None = None
    infer: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Any]] | None = None
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    settings: Callable[[str | PathLike[str]], dict[str, Any]] | None = None
    calibration: str = WEIGHTED_BIASED
    packs: bool = True
    listed_statistics: bool = False
    input_shape: tuple[int, ...] = (3, 224, 224)
    input_dtype: str = "float32"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    def rename(self, key: str) -> str:
        """Return the plain network's name for a name in upstream's state_dict."""
        for pattern, new in self.names:
            key = re.sub(pattern, new, key)
        return key
