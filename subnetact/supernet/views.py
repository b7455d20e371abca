"""Views: the views of a supernet that are kept, the least recently used of which is evicted."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from subnetact.files.fork import new_lock
from subnetact.operators.view_module import Keeping, keep_
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.untraced_changes import NamedView

__all__ = ["Views"]


class Views:
    """Views by subnet, each with its statistics row, and the frozen tensors that they share."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self._kept: OrderedDict[SubnetSpec, tuple[nn.Module, NormRow | None]] = OrderedDict()
        self._frozen: dict[int, tuple[Tensor, Tensor]] = {}

    def get(self, spec: SubnetSpec, row: NormRow | None) -> nn.Module | None:
        """Return the view of a subnet, unless it runs on another statistics row."""
        view, statistics = self._kept.get(spec, (None, None))
        if view is None or statistics is not row:
            return None
        self._kept.move_to_end(spec)
        return view

    def keep(self, spec: SubnetSpec, view: nn.Module, row: NormRow | None, limit: int) -> None:
        """Keep a view until somebody changes it, and evict others beyond the limit."""
        self._kept[spec] = view, row
        keep_(view, Keeping(partial(_drop, weakref.ref(self), spec, weakref.ref(view))))
        while len(self._kept) > limit:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._frozen.clear()

    def listed(self) -> list[NamedView]:
        """Return the name and the view of every subnet."""
        with self.lock:
            return [(str(spec), view) for spec, (view, _) in self._kept.items()]

    def frozen(self, tensor: Tensor) -> Tensor:
        """Return a frozen tensor on the storage of a parameter or buffer, one for all views."""
        if type(tensor) not in (nn.Parameter, Tensor):
            return tensor  # of a subclass, whose meaning a plain parameter would lose
        known = self._frozen.get(id(tensor))
        if known is None or known[0] is not tensor or known[1].data_ptr() != tensor.data_ptr():
            plain = type(tensor) is Tensor
            frozen = tensor.detach() if plain else nn.Parameter(tensor, requires_grad=False)
            frozen.__dict__.update(tensor.__dict__)
            known = self._frozen[id(tensor)] = tensor, frozen
        return known[1]


def _drop(views: weakref.ref[Views], spec: SubnetSpec, view: weakref.ref[nn.Module]) -> None:
    """Drop one view, if it is still kept."""
    present = views()
    if present is not None:
        with present.lock:
            if present._kept.get(spec, (None,))[0] is view():
                present._kept.pop(spec, None)
