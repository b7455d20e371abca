"""`Layout`: what the choices of a family mean in sizes, and how upstream writes a subnet down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor, nn

from ofa_adapters.family import Built
from subnetact.errors import SpecError
from subnetact.operators import Elastic, SubnetNorm, WeightSlice
from subnetact.space import Axis, AxisValues, Slot, SubnetSpace, UsedWhen, make_divisible

Activation: TypeAlias = Callable[[Tensor], Tensor]
LARGEST_CHOICE = 8192
"""The largest number in a list of choices, and the most numbers in it."""


class Layout:
    """What the choices of a family mean in sizes, and upstream's notation; it is pickled with the space.

    Attributes:
        family: the name of the search space.
        keys: the axis of every key of an upstream configuration.
        single: the keys that hold one value instead of a list.
        optional: the keys that a configuration may leave out.
        ignored: the keys of upstream's search results that do not describe the network.
    """

    family: ClassVar[str]
    keys: ClassVar[Mapping[str, str]]
    single: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()

    def axes(self) -> list[Axis]:
        """Return the axes of the search space."""
        raise NotImplementedError

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
        raise NotImplementedError

    def elastic(self) -> dict[str, Elastic]:
        """Return the elastic description; it may name parts that are None in some blocks of the network."""
        raise NotImplementedError

    def built(self, network: nn.Module) -> Built:
        """Return what a family's `build` returns; entries of modules that are None in the network go."""
        space = SubnetSpace(self.family, self.axes(), self.sizes, self.parse, self.format)
        elastic, modules = self.elastic(), dict(network.named_modules())
        for path in elastic.keys() - modules.keys():
            parent, _, name = path.rpartition(".")
            if parent in modules and getattr(modules[parent], name, self) is None:
                del elastic[path]  # Other paths without a module are wrong; `put_operators_` refuses them.
        return network, space, elastic

    def largest(self) -> dict[str, int]:
        """Return the sizes of the full network."""
        return self.sizes({axis.name: tuple(slot.choices[-1] for slot in axis.slots) for axis in self.axes()})

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes for an upstream configuration; a scalar counts for every slot."""
        return {self.keys[key]: value for key, value in self.entries(config).items()}

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the values of the axes as an upstream configuration."""
        axes = self.keys.items()
        return {key: values[axis][0] if key in self.single else list(values[axis]) for key, axis in axes}

    def entries(self, config: Any) -> dict[str, Any]:
        """Return the entries of an upstream configuration that describe the network, as plain values."""
        if len(self.keys) == 1 and not isinstance(config, Mapping):
            config = dict.fromkeys(self.keys, config)
        names = ", ".join(self.keys)
        if not isinstance(config, Mapping):
            raise SpecError(f"{self.family}: a configuration is a dictionary of {names}, got {config!r}")
        # OFA's search results also have the entry `wid`, which is None unless the whole network has a width.
        given = {k: v for k, v in config.items() if k not in self.ignored and (k != "wid" or v is not None)}
        if not {*self.keys} - {*self.optional} <= set(given) <= set(self.keys):
            got = sorted(map(str, config))
            raise SpecError(f"{self.family}: a configuration has exactly the keys {names}; got {got}")
        return {key: plain(given[key]) for key in self.keys if key in given}


def conv_norm(conv: str, norm: str, in_: str | None, out: str | None) -> dict[str, Elastic]:
    """Return the entries of a convolution and of the BatchNorm behind it."""
    return {conv: WeightSlice.on(in_=in_, out=out), norm: SubnetNorm.on(channels=out)}


def block_axis(name: str, legal: Sequence[Any], depth: Axis, blocks: Iterable[tuple[int, int]]) -> Axis:
    """Return an axis with a slot per block, given the block's stage and the smallest depth that keeps it."""
    slots = []
    for i, (stage, needed) in enumerate(blocks):
        depths = depth.slots[stage].choices
        keeping = tuple(d for d in depths if d >= needed)  # type: ignore[operator]
        when = None if keeping == depths else UsedWhen(depth.name, stage, keeping)
        slots.append(Slot(f"block{i}", tuple(legal), when))
    return Axis(name, tuple(slots))


def multiplier(size: int, base: int, width: Callable[[float], int] = make_divisible) -> float:
    """Return the multiplier that makes a `width` of `base` channels one of `size`: exact, or the shortest."""
    exact = size / base
    rounded = [round(exact, digits) for digits in range(1, 5) if exact != round(exact, 3)]
    return next((number for number in rounded if width(base * number) == size), exact)


def plain(value: Any) -> Any:
    """Return arrays, ranges and tuples as lists and NumPy's scalars as numbers, also inside lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [plain(item) for item in value] if is_list else value


def choices(values: Any) -> tuple[Any, ...]:
    """Return the distinct choices, ascending, in a list, array or single number of upstream's constructor."""
    values = plain(values)
    listed = values if isinstance(values, list) else [values]
    numbers = all(type(v) in (int, float) and 0 <= v <= LARGEST_CHOICE for v in listed)
    if not numbers or not 1 <= len(listed) <= LARGEST_CHOICE:
        raise SpecError(
            f"a constructor's list is 1 to {LARGEST_CHOICE} numbers from 0 to {LARGEST_CHOICE}, "
            f"got {values!r:.60}"
        )
    return tuple(sorted(set(listed)))
