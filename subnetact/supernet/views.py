"""Views: how the network of a subnet is bound, and which views are kept for the next call.

The least recently used view is evicted.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from subnetact.errors import UncalibratedSubnetWarning
from subnetact.files.fork import new_lock
from subnetact.operators.correction import correct_
from subnetact.operators.outside_modes import outside_modes
from subnetact.operators.packed_copy import frozen_parameter
from subnetact.operators.shards import require_whole
from subnetact.operators.view_module import Keeping, keep_
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import bind
from subnetact.supernet.forward_state import own_state_
from subnetact.supernet.load import warn_caller
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.saver import Saver
from subnetact.supernet.stated_sizes import state_sizes_
from subnetact.supernet.statistics import batch_norms, binding_of

_NOTHING = (None, None, None)


def bound_view(
    supernet: Any, spec: SubnetSpec, statistics: NormRow | None, fresh: bool = False, hooked: bool = True
) -> nn.Module:
    """Return the network of one subnet on a statistics row, or on the shared statistics.

    If it is `fresh`, its parameters carry gradients, and its buffers are those of the supernet. Unless it is
    `hooked`, it is no view yet: it has no corrections, and nothing guards its calls.
    """
    run = supernet._actuation.run_of(supernet.space, spec)
    # A fresh network may be that of a `functional_call`, through which gradients and modes pass.
    with supernet._generation.lock, nullcontext() if fresh else outside_modes():
        bind_norm, _ = binding_of(spec, run.row, statistics, fresh)
        require_whole(network := supernet._present())
        view = bind(network, run.row, bind_norm, fresh, None if fresh else supernet._views.frozen)
        for path, correction in statistics.corrections().items() if hooked and statistics is not None else ():
            correct_(view.get_submodule(path), correction)
        own_state_(view, () if fresh else supernet.state)
        object.__setattr__(view, "is_whole", True)
        if hasattr(type(view), "save_pretrained") and not run.is_largest:
            object.__setattr__(view, "save_pretrained", Saver(view))
        if hooked and supernet.proved is not None:
            view.register_forward_pre_hook(supernet.proved.look, with_kwargs=True)
        if hooked and supernet.on_bind is not None:
            supernet.on_bind(supernet, view, spec, supernet._generation.weights)
    return view


def private_view(supernet: Any, spec: SubnetSpec) -> tuple[nn.Module, NormRow | None]:
    """Return a new view of a subnet that nobody else holds, and its statistics row, or None if it has none.

    Raises:
        StaleWeights: `functional_call` ran on the supernet, whose tensors a view must not keep.
    """
    spec = supernet.space.check(spec)
    with supernet._generation.lock:
        number = None
        while number != supernet._generation.number:  # Another thread may replace a tensor meanwhile.
            number = supernet.generation.number
            with supernet._generation.own_weights():
                statistics = supernet.norms.get(spec)
                view = bound_view(supernet, spec, statistics)
    if statistics is None and not supernet._warned and batch_norms(supernet._present()):
        supernet._warned = True
        warn_caller(
            f"subnet {spec} runs on the supernet's shared BatchNorm statistics, which cost accuracy; "
            "call subnetact.calibrate(supernet, specs, batches)",
            UncalibratedSubnetWarning,
        )
    return view, statistics


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
