"""Views: the views of a supernet that are kept, the least recently used of which is evicted."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

from torch import Tensor, nn

from subnetact.files.fork import new_lock
from subnetact.operators.packed_copy import frozen_parameter
from subnetact.operators.view_module import Keeping, keep_
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.stated_sizes import state_sizes_

_NOTHING = (None, None, None)


class Views:
    """Views by subnet, each with its statistics row, and the frozen tensors that they share."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self._kept: OrderedDict[SubnetSpec, tuple[nn.Module, NormRow | None, Keeping]] = OrderedDict()
        self._frozen: dict[int, tuple[Tensor, Tensor]] = {}

    def get(self, spec: SubnetSpec, row: NormRow | None) -> nn.Module | None:
        """Return the view of a subnet, unless it runs on another statistics row, or has other settings."""
        view, statistics, keeping = self._kept.get(spec, _NOTHING)
        if keeping is None or statistics is not row:
            return None
        if keeping.copies is not None and not alike(keeping.settings, keeping.copies):
            return None
        self._kept.move_to_end(spec)
        return view

    def keep(self, spec: SubnetSpec, view: nn.Module, row: NormRow | None, supernet: Any) -> nn.Module:
        """Keep a view until somebody changes it, and evict others beyond the limit; return the one kept.

        That is another one if another thread was faster. Settings of its own say the sizes of the subnet.
        """
        state_sizes = partial(state_sizes_, whole=supernet.network, space=supernet.space, spec=spec)
        with self.lock:
            if (cached := self.get(spec, row)) is not None:
                return cached
            keeping = Keeping(view, partial(_drop, weakref.ref(self), spec), state_sizes)
            self._kept[spec] = view, row, keeping
            keep_(view, keeping)
            while len(self._kept) > supernet.cached_views:
                self._kept.popitem(last=False)
        return view

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._frozen.clear()

    def frozen(self, tensor: Tensor) -> Tensor:
        """Return a frozen tensor on the storage of a parameter or buffer, one for all views."""
        if type(tensor) not in (nn.Parameter, Tensor):
            return tensor  # of a subclass, whose meaning a plain parameter would lose
        known = self._frozen.get(id(tensor))
        if known is None or known[0] is not tensor or known[1].data_ptr() != tensor.data_ptr():
            frozen = tensor.detach() if type(tensor) is Tensor else frozen_parameter(tensor)
            frozen.__dict__.update(tensor.__dict__)
            known = self._frozen[id(tensor)] = tensor, frozen
        return known[1]


def _drop(views: weakref.ref[Views], spec: SubnetSpec, keeping: Keeping) -> None:
    """Drop one view, if it is still kept."""
    if (present := views()) is not None:
        with present.lock:
            if present._kept.get(spec, _NOTHING)[2] is keeping:
                present._kept.pop(spec)


def alike(one: Any, other: Any) -> bool:
    """Tell whether values are equal in all their members; what has no members that Python compares is not."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if hasattr(one, "__dict__"):
        return alike(vars(one), vars(other))
    return isinstance(one, str | bytes | int | float | complex | set | frozenset) and one == other
