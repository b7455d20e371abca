"""Registry: the numbers of the subnets of an engine, which stay the same when others come or go."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from operator import index
from typing import Any, Generic, TypeVar

from subnetact.engine.config import EngineConfig
from subnetact.errors import SpecError
from subnetact.spec import SubnetSpec

Served = TypeVar("Served")


class Registry(Generic[Served]):
    """Numbers subnets: its configuration has all that were registered, and `_served` those that run now."""

    _config: EngineConfig
    _served: Mapping[int, Served]

    def __len__(self) -> int:
        """Return the number of subnets that were registered, removed ones included."""
        return len(self._config.specs)

    @property
    def specs(self) -> tuple[SubnetSpec, ...]:
        """The registered subnets in id order, removed ones included."""
        return tuple(self._config.specs)

    @property
    def keys(self) -> tuple[str, ...]:
        """The readable keys of the subnets in id order, removed ones included."""
        return tuple(spec.key for spec in self._config.specs)

    @property
    def accuracy(self) -> tuple[float | None, ...]:
        """The accuracy of the subnets in percent, or None, in id order, removed ones included."""
        return tuple(self._config.accuracy or ())

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the subnets that are served, in ascending order."""
        return tuple(sorted(self._served))

    def ready(self, subnet: int) -> Served:
        """Return the callable of a registered `subnet`. This takes well below a microsecond.

        It is a function of one batch, as in `__call__`, that stays valid until the subnet is removed.

        Raises:
            SpecError: there is no such id, or the subnet was removed.
        """
        served = self._served.get(subnet) if type(subnet) is int else self._served.get(_id(subnet))
        if served is None:
            ids = self.ids
            span = f"0..{len(self) - 1}" if len(ids) == len(self) else ", ".join(map(str, ids))
            raise SpecError(f"no subnet {subnet}; this engine has {span}")
        return served


def _id(subnet: Any) -> int:
    with suppress(TypeError):
        if not isinstance(subnet, bool):
            return index(subnet)
    raise SpecError(f"no subnet {subnet!r}, which is not an id; ids are ints, 0 for the first subnet")
