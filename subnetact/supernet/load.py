"""Load: other weights for a supernet, all at once, and whether its statistics rows belong to them.

The memory behind the tensors of a network is exchanged as a whole.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from subnetact.errors import CheckpointError, UncalibratedSubnetWarning
from subnetact.operators.tensor_version import storage_id, tensor_place
from subnetact.supernet.batches import hash_of
from subnetact.supernet.norm_table import NormTable, required_table
from subnetact.supernet.statistics import adopt_statistics_, batch_norms, statistics_of_largest

_PREFIXES = ("module.", "network.", "_orig_mod.")
"""The prefixes of DataParallel and DistributedDataParallel, of wrappers, and of `torch.compile`."""
_OWN_PACKAGES = ("subnetact", "ofa_adapters", "torch")
"""Packages whose lines a warning does not point to."""


def fitting(state_dict: Any, own: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """Return a state_dict under the names of a network's own one, or refuse it with a CheckpointError."""
    if not isinstance(state_dict, Mapping):
        kind = type(state_dict).__name__
        raise CheckpointError(f"state_dict: expected tensors by name, got {kind}; torch.load(path) reads one")
    named = _without_prefix(state_dict, own)
    named = with_tied_names(named, own) if strict else named
    wrong = [
        f"{n} is no tensor"
        if not isinstance(t, Tensor)
        else f"{n} {tuple(t.shape)} should be {tuple(own[n].shape)}"
        for n, t in named.items()
        if n in own and not (isinstance(t, Tensor) and t.shape == own[n].shape)
    ]
    if strict:
        missing = [f"{n} is missing" for n in own if n not in named]
        wrong = [*missing, *(f"{n} is extra" for n in named if n not in own), *wrong]
    if wrong:
        raise CheckpointError(f"state_dict: {'; '.join(wrong[:10])} ({len(wrong)} in all)")
    return named


def with_tied_names(named: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors also under names that they lack of tied tensors of a network's state_dict, `own`."""
    places = {name: tensor_place(tensor) for name, tensor in own.items() if isinstance(tensor, Tensor)}
    tied = {places[name]: tensor for name, tensor in named.items() if name in places}
    absent = {n: tied[place] for n, place in places.items() if n not in named and place in tied}
    if not absent:
        return named
    completed = OrderedDict({**named, **absent})
    completed._metadata = getattr(named, "_metadata", None)  # type: ignore[attr-defined]
    return completed


def _without_prefix(state_dict: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """Drop a prefix that all names have, if the prefix is none of the network."""
    found = state_dict
    while found and not any(name in own for name in found):
        prefix = next((p for p in _PREFIXES if all(str(name).startswith(p) for name in found)), None)
        if prefix is None:
            return state_dict
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def load_(
    supernet: Any, state_dict: Mapping[str, Any], strict: bool, assign: bool, norms: NormTable | None
) -> Any:
    """Load what fits, as `Supernet.load_state_dict` says; a failure leaves everything as it was."""
    if norms is not None:
        required_table(norms, supernet.space.id)
    network, generation = supernet._present(), supernet.generation
    state_dict = fitting(state_dict, network.state_dict(), strict)
    with generation.lock:
        table, keep_rows = supernet.norms, None if norms is not None else _rows_before(supernet)
        modules: Any = network.modules() if assign else ()
        held = [(kept, dict(kept)) for m in modules for kept in (m._parameters, m._buffers)]
        moved: list[tuple[Tensor, Tensor]] = []
        dropped, loaded = 0, False
        try:
            generation.begin_exchange()
            moved = [] if assign else renew_storage_(network)
            result = network.load_state_dict(state_dict, strict, assign)
            loaded = True
            if keep_rows is not None:
                dropped = keep_rows()
            elif norms is not None:
                supernet.norms = norms  # In the dtype that `assign` may have given the weights.
        except BaseException:
            for tensor, former in moved:
                tensor.data = former
            for kept, entries in held:
                kept.update(entries)
            supernet._actuation.norms = table
            raise
        finally:
            in_place = not assign and len(moved) < len({*network.parameters(), *network.buffers()})
            generation.move(same=not (loaded or in_place), in_place=in_place)
    warn_of_dropped(dropped, "give norms= those of the new weights, or supernet.norms to keep them")
    return result


def renew_storage_(network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Move the tensors of a network to copies of their storage, as `exchange_storage_` does."""
    tensors = [t for t in (*network.parameters(), *network.buffers()) if is_movable(t)]
    storages = {storage_id(t): t.untyped_storage() for t in tensors}
    copies = {number: storage.clone() for number, storage in storages.items()}  # type: ignore[no-untyped-call]
    return exchange_storage_(tensors, copies)


def exchange_storage_(
    tensors: Iterable[Tensor], storages: Mapping[int, UntypedStorage]
) -> list[tuple[Tensor, Tensor]]:
    """Move tensors, by the `storage_id` of their storage; return each with one on its former storage."""
    with torch.inference_mode(False), torch.no_grad():
        moved = []
        for tensor in {id(t): t for t in tensors if is_movable(t) and storage_id(t) in storages}.values():
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            moved.append((tensor, tensor.data, empty.set_(storages[storage_id(tensor)], *place)))
        for tensor, _, new in moved:
            tensor.data = new
    return [(tensor, former) for tensor, former, _ in moved]


def held_tensors(supernet: Any) -> list[Tensor]:
    """Return all parameters, buffers and statistics rows of a supernet."""
    rows = (row.flat for row in supernet.norms.rows.values())
    return [*supernet.parameters(), *supernet.buffers(), *rows]


def move_storage_(supernet: Any, storages: Mapping[int, UntypedStorage]) -> None:
    """Move weights and statistics to other storages, by the `storage_id` of the former ones."""
    with supernet._generation.lock:
        try:
            supernet.generation.begin_exchange()
            exchange_storage_(held_tensors(supernet), storages)
        finally:
            supernet._generation.move(same=True)


def is_movable(tensor: Tensor) -> bool:
    """Tell whether a tensor can be given other storage."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    shared = tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()
    return not (shared or tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())


def before_outer_load(supernet: Any, *_: Any) -> None:
    """Note the statistics rows before a module around the supernet is loaded."""
    supernet.refresh()
    supernet.__dict__["rows_before_load"] = _rows_before(supernet)


def after_outer_load(supernet: Any, _: Any) -> None:
    """Drop the statistics rows of former weights after a module around the supernet was loaded."""
    rows = supernet.__dict__.pop("rows_before_load")()
    warn_of_dropped(rows, "assign those of the new weights to supernet.norms after the load")


def _rows_before(supernet: Any) -> Callable[[], int]:
    """Return a function that keeps the statistics rows of a supernet after a load.

    It drops them if the load changed weights, lets an adopted row follow, and returns how many were dropped.
    """
    largest, before = supernet.norms.get(supernet.space.largest()), _weights_hash(supernet)
    adopted = largest is not None and not statistics_of_largest(supernet)

    def keep() -> int:
        dropped = 0 if _weights_hash(supernet) == before else len(supernet.norms) - adopted
        if dropped:
            supernet.norms = NormTable(supernet.space.id)
        if adopted:
            adopt_statistics_(supernet)
        return dropped

    return keep


def _weights_hash(supernet: Any) -> str:
    """Return a hash of the weights, without the shared statistics and their counters, if there are rows."""
    if not len(supernet.norms):
        return ""
    network = supernet.network
    shared = {id(b) for norm in batch_norms(network).values() for b in norm._buffers.values()}
    state = network.state_dict(keep_vars=True).values()
    weights = (t for t in state if isinstance(t, Tensor) and not (t.is_meta or id(t) in shared))
    return hash_of(t if t.layout == torch.strided else t.detach().to_dense() for t in weights)


def warn_of_dropped(rows: int, instead: str) -> None:
    """Say that the statistics rows of some subnets, if any, are gone, and what keeps them."""
    if rows:
        warn_caller(
            f"the BatchNorm statistics of {rows} subnet(s) belonged to the former weights "
            f"and are dropped; {instead}, or call subnetact.calibrate(supernet, specs, batches)",
            UncalibratedSubnetWarning,
        )


def warn_caller(text: str, kind: type[Warning]) -> None:
    """Give a warning that points to the first caller outside this library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)
