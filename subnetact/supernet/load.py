"""Load: other weights for a supernet, all at once, and the statistics rows that then stay."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subnetact.errors import UncalibratedSubnetWarning
from subnetact.supernet.checkpoint import has_values
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.storage import renew_storage_

__all__ = ["after_outer_load", "before_outer_load", "callers_level", "load_"]

_OWN_PACKAGES = ("subnetact", "ofa_adapters", "torch")
"""Packages whose lines a warning does not point to."""


def load_(
    supernet: Any, state_dict: Mapping[str, Any], strict: bool, assign: bool, norms: NormTable | None
) -> Any:
    """Load what fits, as `Supernet.load_state_dict` says; a failure leaves everything as it was."""
    network, generation = supernet.network, supernet.generation
    with generation.lock:
        rows = _RowsToKeep(supernet, state_dict, assign) if norms is None else None
        modules: Any = network.modules() if assign else ()
        held = [(kept, dict(kept)) for m in modules for kept in (m._parameters, m._buffers)]
        moved: list[tuple[Tensor, Tensor]] = []
        dropped, loaded = 0, False
        try:
            generation.begin_exchange()
            moved = [] if assign else renew_storage_(network)
            result = network.load_state_dict(state_dict, strict, assign)
            loaded = True
            if rows is not None:
                dropped = rows.keep()
            elif norms is not None:
                supernet.norms = norms  # In the dtype that `assign` may have given the weights.
        except BaseException:
            for tensor, former in moved:
                tensor.data = former
            for kept, entries in held:
                kept.update(entries)
            raise
        finally:
            in_place = not assign and len(moved) < len({*network.parameters(), *network.buffers()})
            generation.move(same=not (loaded or in_place), in_place=in_place)
    _warn_of_dropped(dropped, "give norms= those of the new weights, or supernet.norms to keep them")
    return result


class _RowsToKeep:
    """The statistics rows of a supernet that is about to be loaded: which of them are right afterwards."""

    def __init__(self, supernet: Any, state_dict: Mapping[str, Any], assign: bool) -> None:
        rows = len(supernet.norms)
        self._supernet = supernet
        self._state_dict = state_dict
        self._adopted = bool(rows) and supernet.has_adopted_statistics()
        self._same = rows > self._adopted and has_values(supernet.network, state_dict, exact=assign)

    def keep(self) -> int:
        """Drop the rows if the load changed weights; an adopted row follows. Return how many were dropped."""
        supernet, largest = self._supernet, self._supernet.space.largest()
        same = self._same and has_values(supernet.network, self._state_dict, exact=False)
        dropped = 0 if same else len(supernet.norms) - self._adopted
        if self._adopted:
            supernet.adopt_statistics()
        if dropped:
            table, kept = NormTable(supernet.space.id), supernet.norms.get(largest)
            if self._adopted and kept is not None:
                table.update({largest: kept})
            supernet.norms = table
        return dropped


def before_outer_load(
    supernet: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Add the prefix `network.` to names that a module around the supernet saved without the prefix."""
    inner = f"{prefix}network."
    for name in [n for n in state_dict if n.startswith(prefix) and not n.startswith(inner)]:
        state_dict[inner + name.removeprefix(prefix)] = state_dict.pop(name)
    supernet.refresh()
    given = {n.removeprefix(inner): t for n, t in state_dict.items() if n.startswith(inner)}
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    supernet.__dict__["rows_to_keep"] = _RowsToKeep(supernet, given, assign)


def after_outer_load(supernet: Any, _: Any) -> None:
    """Drop the statistics rows of former weights after a module around the supernet was loaded."""
    rows = supernet.__dict__.pop("rows_to_keep").keep()
    _warn_of_dropped(rows, "assign those of the new weights to supernet.norms after the load")


def _warn_of_dropped(rows: int, instead: str) -> None:
    if rows:
        warnings.warn(
            f"load_state_dict: the BatchNorm statistics of {rows} subnet(s) belonged to the former weights "
            f"and are dropped; {instead}, or call subnetact.calibrate(supernet, specs, batches)",
            UncalibratedSubnetWarning,
            stacklevel=callers_level(),
        )


def callers_level() -> int:
    """Return the `stacklevel` with which a warning points to the first caller outside this library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN_PACKAGES:
        level, frame = level + 1, frame.f_back
    return level
