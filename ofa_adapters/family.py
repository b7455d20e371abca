"""`Family`: the description of one published supernet family, which the registry reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from torch import Size, Tensor, nn

from ofa_adapters.features import Encoding
from subnetact.files.documents import StrPath
from subnetact.operators import CALIBRATION_RULES, Elastic
from subnetact.space import SubnetSpace

Built: TypeAlias = tuple[nn.Module, SubnetSpace, Mapping[str, Elastic]]
"""The plain network at full size, its search space, and the elastic description that `insert_` takes."""

Names: TypeAlias = Sequence[tuple[str, str]]
"""The beginnings of upstream's names, and those of the plain network's names in their place.

Beginnings consist of whole words between dots; what starts with a dot may be anywhere in a name. `#` is a
number, and `#+1` is larger by one. If several rows fit, the longest does, or the first of the same length.
"""

NUMBER = re.compile(r"#(\+1)?")

WEIGHTED_BIASED, CUMULATIVE_UNBIASED = CALIBRATION_RULES


class Keys(tuple[str, ...]):
    """The names in a state_dict, taken out of any wrapper and without `module.` prefixes."""

    __slots__ = ()

    def have(self, *patterns: str) -> bool:
        """Return whether each of the regular expressions matches somewhere in at least one of the names."""
        return all(any(re.search(pattern, key) for key in self) for pattern in patterns)


class Shapes(dict[str, Size]):
    """The shapes in a checkpoint, under upstream's names and under those of the plain network."""

    __slots__ = ()

    def size(self, pattern: str, axis: int = 0) -> int:
        """Return the largest size of an axis of tensors with such names; ValueError if there are none."""
        fits = [shape for key, shape in self.items() if len(shape) > axis and re.fullmatch(pattern, key)]
        return max(shape[axis] for shape in fits if shape[axis])

    def layers(self, path: str) -> int:
        """Return the number of layers of a stack; ValueError if there are none."""
        return 1 + max(int(at[1]) for key in self if (at := re.match(rf"{path}\.(\d+)\.", key)))


@dataclass(frozen=True)
class Family:
    """One published family.

    Attributes:
        build: takes constructor arguments under upstream's names.
        source: the repository that publishes the architecture.
        licence: the licence of that repository's code. This package copies none of that code.
        recognises: tells from the names in a state_dict whether it may belong to this family.
        names: the names in an upstream state_dict, and those of the plain network. Checkpoints are loaded by
            the table from left to right, and written from right to left. By default, they are the same.
        ordinary: what has the same names without belonging to the family, such as "a vision transformer of
            timm". If None, no other model has these names.
        checkpoints: names under which upstream publishes weights.
        spellings: regular expressions for other spellings of upstream's names, older ones and those of
            extracted networks, and what replaces them in both the names and the table before it is read.
        dialect: takes the constructor arguments; returns the rows of `names` that are right for them where
            several names of upstream are one of the plain network. By default, there are no such names.
        completed: takes a state_dict with upstream's names; returns it with the tensors that upstream's code
            wants and the network does not have. By default, there are none.
        unused: regular expression for upstream keys that the network does not use. If None, it uses all keys.
        shown: the constructor arguments that tensors show, by their names, each with a function of the shapes
            (see `Shapes`) and of the arguments that were given; None if these shapes do not show it. For a
            list of choices, a number is the largest choice; it completes nothing, but errors name it.
        convert: takes the tensors of a checkpoint; returns them as the network has them, if several tensors
            there are one here. By default, they stay as they are.
        settings: takes a directory that transformers saved; returns the constructor arguments that its
            `config.json` states. If None, its entries of the same names are taken.
        named: takes the constructor arguments; returns the subnets that the checkpoint has names for, as
            `space.parse` takes them. By default, there are none.
        calibration: how upstream averages BatchNorm statistics, one of `CALIBRATION_RULES`.
        packs: whether views have packed copies of slices in several runs, as `Supernet.packs` says. It is
            False where these would take much memory.
        listed_statistics: whether a checkpoint holds own BatchNorm statistics per subnet (Slimmable).
        input_shape: shape of one usual input, without the batch dimension.
        input_dtype: dtype of that input, as an attribute name of torch.
        encodings: the encodings of upstream's accuracy predictors.
    """

    build: Callable[..., Built]
    source: str
    licence: str
    recognises: Callable[[Keys], bool]
    names: Names = ()
    ordinary: str | None = None
    checkpoints: tuple[str, ...] = ()
    spellings: Sequence[tuple[str, str]] = ()
    dialect: Callable[[Mapping[str, Any]], Names] = lambda _: ()
    completed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    unused: str | None = None
    shown: Mapping[str, Callable[[Shapes, Mapping[str, Any]], Any]] = field(default_factory=dict)
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    settings: Callable[[StrPath], dict[str, Any]] | None = None
    named: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    calibration: str = WEIGHTED_BIASED
    packs: bool = True
    listed_statistics: bool = False
    input_shape: tuple[int, ...] = (3, 224, 224)
    input_dtype: str = "float32"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    def rename(self, key: str) -> str:
        """Return the plain network's name for a name in upstream's state_dict."""
        return self._inward(self._spelled(key))

    def upstream(self, constructor: Mapping[str, Any]) -> Callable[[str], str]:
        """Return what turns a name of the plain network into upstream's name."""
        return _renaming([(own, theirs) for theirs, own in (*self.dialect(constructor), *self.names)])

    @cached_property
    def _inward(self) -> Callable[[str], str]:
        return _renaming([(self._spelled(theirs), own) for theirs, own in self.names])

    def _spelled(self, name: str) -> str:
        for pattern, usual in self.spellings:
            name = re.sub(pattern, usual, name)
        return name


def _renaming(rows: Names) -> Callable[[str], str]:
    """Return what replaces the left sides of a table in a name by its right sides."""
    ordered = sorted(rows, key=lambda row: -len(NUMBER.sub("#", row[0])))
    pattern, filled, groups = [], dict[int, tuple[str, str]](), 0
    for old, new in ordered:
        words = r"(\d{1,6})".join(map(re.escape, NUMBER.sub("#", old).split("#")))
        pattern.append(f"({'' if old.startswith('.') else '^'}{words}(?=[.]|$))")
        filled[groups + 1] = old, new
        groups += 1 + len(NUMBER.findall(old))
    every = re.compile("|".join(pattern) or "(?!)")

    def replaced(found: re.Match[str]) -> str:
        first = found.lastindex or 0
        old, new = filled[first]
        shifts = map(bool, NUMBER.findall(old))
        numbers = [int(found[first + 1 + i]) - shift for i, shift in enumerate(shifts)]
        return NUMBER.sub(lambda place: str(numbers.pop(0) + bool(place[1])), new)

    return lambda name: every.sub(replaced, name)
