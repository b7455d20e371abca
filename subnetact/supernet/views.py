"""Views: the views of a supernet that are kept, the least recently used of which is evicted."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from subnetact.files.fork import new_lock
from subnetact.operators.packed_copy import frozen_parameter
from subnetact.operators.view_module import Keeping, keep_, own_settings_
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.untraced_changes import NamedView

__all__ = ["Views"]

_NOTHING = (None, None, None)


class Views:
    """Views by subnet, and the frozen tensors that they share.

    Each has its statistics row, and settings beside their copies when it was given settings of its own.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self._kept: OrderedDict[SubnetSpec, tuple[nn.Module, NormRow | None, Any]] = OrderedDict()
        self._frozen: dict[int, tuple[Tensor, Tensor]] = {}

    def get(self, spec: SubnetSpec, row: NormRow | None) -> nn.Module | None:
        """Return the view of a subnet, unless it runs on another statistics row, or has other settings."""
        view, statistics, settings = self._kept.get(spec, _NOTHING)
        if view is None or statistics is not row or (settings is not None and not _alike(*settings)):
            return None
        self._kept.move_to_end(spec)
        return view

    def keep(
        self,
        spec: SubnetSpec,
        view: nn.Module,
        row: NormRow | None,
        limit: int,
        state_sizes: Callable[[nn.Module], None],
    ) -> nn.Module:
        """Keep a view until somebody changes it, and evict others beyond the limit; return the one kept.

        That is another one if another thread was faster. Settings of its own say the sizes of the subnet:
        `state_sizes` puts them there.
        """
        with self.lock:
            if (cached := self.get(spec, row)) is not None:
                return cached
            self._kept[spec] = view, row, None
            keep_(view, _keeping(self, spec, view, state_sizes))
            while len(self._kept) > limit:
                self._kept.popitem(last=False)
        return view

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._frozen.clear()

    def listed(self) -> list[NamedView]:
        """Return the name and the view of every subnet."""
        with self.lock:
            return [(str(spec), view) for spec, (view, *_) in self._kept.items()]

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


def _keeping(views: Views, spec: SubnetSpec, view: nn.Module, state_sizes: Callable[..., None]) -> Keeping:
    """Return what happens to a view that is changed, or whose settings are read; it holds nothing alive."""
    views_then, view_then = weakref.ref(views), weakref.ref(view)

    def leave() -> None:
        """Drop the view, if it is still kept."""
        if (present := views_then()) is not None:
            with present.lock:
                if present._kept.get(spec, _NOTHING)[0] is view_then():
                    present._kept.pop(spec, None)

    def settle() -> None:
        """Give the view its own settings; it stays kept until they, or the supernet's, are changed."""
        if (whole := view_then()) is not None:
            settings = own_settings_(whole)
            state_sizes(whole)
            if (present := views_then()) is not None:
                with present.lock:
                    kept, row, _ = present._kept.get(spec, _NOTHING)
                    if kept is whole:
                        present._kept[spec] = whole, row, (settings, deepcopy(settings))

    return Keeping(leave, settle)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether settings are equal in all their members; of what has none but identity they are not."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if hasattr(one, "__dict__"):
        return _alike(vars(one), vars(other))
    return isinstance(one, str | bytes | int | float | complex | set | frozenset) and one == other
