"""PackedCopy: tensors that are computed from the weights into memory of their own, and follow them.

The module of a view asks for the present tensors whenever it reads one (`follow_`), and after a change in
place gets new ones, so that nobody reads half of a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from subnetact.files.fork import new_lock
from subnetact.operators.outside_modes import outside_modes
from subnetact.operators.tensor_version import changes_of, counting


class PackedCopy:
    """The `tensors` that `make` computes from `sources`, by name; those that are None are left out."""

    def __init__(self, sources: tuple[Tensor, ...], make: Callable[[], Mapping[str, Tensor | None]]) -> None:
        self.sources = sources
        self._make = make
        self._lock = new_lock()
        self._frozen: dict[Any, Any] = {}
        self._counting = counting(sources)
        self._changes = changes_of(self._counting)
        self.tensors = self._made()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def refresh(self) -> None:
        """Exchange the tensors for new ones if the sources have changed; others may still read the former."""
        if changes_of(self._counting) != self._changes:
            with self._lock:
                changes = changes_of(self._counting)
                if changes != self._changes:
                    self.tensors, self._frozen = self._made(), {}
                    self._changes = changes

    def finish(self) -> None:
        """Keep the tensors as they are from now on, for the views that still use them."""
        with self._lock:
            self.sources, self._counting, self._changes = (), [], 0

    def frozen(self, name: str, of: Tensor, buffer: bool = False) -> Any:
        """Return what a view holds for a slice `of` a tensor: a parameter, or a tensor for a buffer."""
        return self._at((name, of.size(), of.stride(), of.storage_offset(), buffer))

    def _at(self, place: tuple[Any, ...]) -> Any:
        tensors, known = self.tensors, self._frozen
        found: Any = known.get(place)
        if found is None:
            name, size, stride, offset, buffer = place
            with outside_modes():
                found = tensors[name].as_strided(size, stride, offset)
                found = found if buffer else frozen_parameter(found)
            found.packed, found.place = self, place
            if tensors is self.tensors:
                found = known.setdefault(place, found)
        return found

    def _made(self) -> dict[str, Tensor]:
        with outside_modes():
            return {name: t.detach() for name, t in self._make().items() if t is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # A parameter of a copied view is an ordinary one, which follows nothing.


def frozen_parameter(tensor: Tensor) -> nn.Parameter:
    """Return what many views hold for a parameter; torch swaps no tensor that has a weak reference."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    _parameters_of_views.add(parameter)
    return parameter


_parameters_of_views = weakref.WeakSet[nn.Parameter]()


def registries_of_copies(view: nn.Module) -> list[dict[str, Any]]:
    """Return the registries of a view that hold packed copies; compiled code reads them without `follow_`."""
    owns: Any = [own for module in view.modules() for own in (module._parameters, module._buffers)]
    return [own for own in owns if any(hasattr(tensor, "packed") for tensor in own.values())]


def follow_(tensors: dict[str, Any]) -> None:
    """Exchange packed copies among the parameters or buffers of a module for those that are right now."""
    fresh: Any = None
    for name, tensor in tensors.items():
        packed = getattr(tensor, "__dict__", {}).get("packed")  # A traced tensor has any attribute.
        if packed is not None:
            if packed is not fresh:  # Most tensors of a module are of one copy.
                packed.refresh()
                fresh = packed
            present = packed._at(tensor.place)
            if present is not tensor:
                tensors[name] = present
