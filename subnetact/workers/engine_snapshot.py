"""EngineSnapshot: how an engine, and every change of it, gets to other processes; one copy of the weights.

An engine is sent as its structure, with tensors as addresses in shared memory, to which its own tensors move.
Before every batch the parent compares a few counters, and sends what has changed, so that no batch runs on a
mixture of former and new weights.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.storage import TypedStorage, UntypedStorage

from subnetact.engine.engine import Engine
from subnetact.errors import EngineError, StaleWeights, SubnetActError, failure_text
from subnetact.files.fork import new_lock
from subnetact.operators.tensor_version import changes_of, counting, storage_id
from subnetact.supernet.load import held_tensors, is_movable, move_storage_
from subnetact.supernet.supernet import Supernet
from subnetact.workers.memory import SharedMemory

States = tuple[Any, ...]
"""What stands for the present supernets, then for the engines: see `_state`."""

_ALIGNMENT = 64
_RETRIES = 9  # because weights have changed while they were copied
_segments: WeakValueDictionary[int, SharedMemory] = WeakValueDictionary()
"""All shared memory of weights of this process, by its address; the tensors in it keep it."""


class Package(NamedTuple):
    """Pickled objects on their way to another process, and where the storages of their tensors are.

    A place is the position of a segment, and the offset and the size there, in bytes.
    """

    data: bytes
    places: Mapping[int, tuple[int, int, int]]
    segments: Sequence[SharedMemory]


class Parts(NamedTuple):
    """A runner, and the engines and supernets in it, which follow those of the parent."""

    runner: Any
    engines: list[Engine]
    supernets: list[Supernet]

    def followed(self) -> list[Any]:
        """Return what changes, in the order of `States`."""
        return [*self.supernets, *self.engines]


class EngineSnapshot:
    """A runner as other processes need it, and what has changed since they got it. Threads may share it."""

    def __init__(self, runner: Any) -> None:
        self._lock = new_lock(RLock)
        finder = _Packer()
        finder.pack(runner)
        self._parts = Parts(runner, finder.engines, finder.supernets)
        self._packed: dict[States, tuple[Package, States]] = {}
        self.package()

    def package(self, known: States = ()) -> tuple[Package, States]:
        """Return what a process with `known` states has to `apply`, and its states afterwards.

        Without states, return the whole `Parts`, for a new process.
        """
        with self._lock, ExitStack() as stack:
            if known not in self._packed or not self.is_current(self._packed[known][1]):
                self._packed = {of: one for of, one in self._packed.items() if self.is_current(one[1])}
                for supernet in self._parts.supernets:
                    stack.enter_context(supernet.generation.lock)
                for _ in range(_RETRIES):
                    with suppress(StaleWeights):
                        self._packed[known] = self._pack(known)
                        break
                else:
                    self._packed[known] = self._pack(known)
            return self._packed[known]

    def is_current(self, states: States) -> bool:
        """Tell whether a process with these states is up to date; this takes microseconds."""
        return states == self._states()

    def _states(self) -> States:
        return tuple(map(_state, self._parts.followed()))

    def _pack(self, known: States) -> tuple[Package, States]:
        """Pickle objects of one moment, when the tensors of supernets are in shared memory."""
        for supernet in self._parts.supernets:
            _share(supernet)
        states = self._states()
        packer = _Packer()
        packer.pack(self._changed(known, states) if known else self._parts)
        return packer.package(), states

    def _changed(self, known: States, states: States) -> list[tuple[int, Any]]:
        """Return by part an engine's configuration, a supernet's state, or None for changes in place."""
        changed: list[tuple[int, Any]] = []
        for number, part in enumerate(self._parts.followed()):
            former, now = known[number], states[number]
            if former == now:
                continue
            if isinstance(part, Engine):
                changed.append((number, part.config))
            elif former[0] == now[0] and all(map(_segment_of, held_tensors(part))):
                changed.append((number, None))
            else:
                changed.append((number, part.__getstate__()))
        return changed


class _Packer(pickle.Pickler):
    """Pickles objects with numbers for the storages of tensors; it finds engines and supernets as well."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.supernets: list[Supernet] = []
        self._storages: dict[int, UntypedStorage] = {}
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)

    def persistent_id(self, value: Any) -> Any:
        """Return the number of a storage on the CPU, and None for all other objects."""
        if not isinstance(value, TypedStorage):
            return None
        storage = value._untyped_storage
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        if storage.is_shared() and not _segment_of(storage):
            raise EngineError(
                "a tensor is in shared memory already (share_memory_()), where other processes may change "
                "it; give the engine weights of its own, for example by supernet.load_state_dict on a copy"
            )
        self._storages[storage._cdata] = storage
        return value.dtype, storage._cdata

    def reducer_override(self, value: Any) -> Any:
        """Take engines apart, and send tensors on a GPU as handles of CUDA (not seen on hardware yet)."""
        if isinstance(value, Engine):
            self.engines.append(value)
            return Engine.from_config, (value.supernet, value.config)
        if isinstance(value, Supernet):
            self.supernets.append(value)
        if isinstance(value, Tensor) and value.is_cuda:
            return reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        return NotImplemented

    def pack(self, objects: Any) -> None:
        """Pickle objects."""
        try:
            self.dump(objects)
        except SubnetActError:
            raise
        except Exception as error:
            raise EngineError(
                f"engine: it cannot be sent to a worker process: {failure_text(error)}; define its classes "
                "and functions at the top of a module (not as a lambda, nor inside a function), or run "
                "threads: process=False"
            ) from error

    def package(self) -> Package:
        """Return what was pickled; storages that are in no segment are copied to a new one."""
        outside = {number: one for number, one in self._storages.items() if not _segment_of(one)}
        storages = self._storages | _copied(outside)
        bases = list(dict.fromkeys(map(_segment_of, storages.values())))
        places = {}
        for number, storage in storages.items():
            base = _segment_of(storage)
            places[number] = bases.index(base), storage.data_ptr() - base, storage.nbytes()
        return Package(self._file.getvalue(), places, [_segments[base] for base in bases])


def unpack(package: Package) -> Any:
    """Return the objects of a package, in the process that it was sent to."""
    storages = {
        number: _storage(package.segments[segment], offset, size)
        for number, (segment, offset, size) in package.places.items()
    }

    def load(address: Any) -> Any:
        dtype, number = address
        make: Any = TypedStorage
        return make(wrap_storage=storages[number], dtype=dtype, _internal=True)

    unpickler: Any = pickle.Unpickler(io.BytesIO(package.data))
    unpickler.persistent_load = load
    return unpickler.load()


def apply(package: Package, parts: Parts) -> None:
    """Follow changes of the parent: engines have other subnets, or supernets other tensors or values."""
    followed = parts.followed()
    for number, change in unpack(package):
        part = followed[number]
        if isinstance(part, Engine):
            part.follow(change)
        elif change is None:
            part.refresh()
        else:
            part.__setstate__(change)


def _state(part: Any) -> Any:
    """Return what differs when an engine changes; of a supernet, when tensors are replaced, and by values."""
    if isinstance(part, Engine):
        return part.changes
    generation, rows = part.generation, tuple(part.norms.rows.values())
    return (generation.number, rows), (generation.moment(), changes_of(counting(row.flat for row in rows)))


def _share(supernet: Supernet) -> None:
    """Move weights and statistics that are in no segment to a new one."""
    outside = {
        storage_id(tensor): tensor.untyped_storage()
        for tensor in held_tensors(supernet)
        if tensor.device.type == "cpu" and tensor.numel() and is_movable(tensor) and not _segment_of(tensor)
    }
    if outside:
        with supernet.generation.unchanged():
            copies = _copied(outside)
        move_storage_(supernet, copies)


def _copied(storages: Mapping[int, UntypedStorage]) -> dict[int, UntypedStorage]:
    """Copy storages, by their numbers, into one new segment."""
    segment = SharedMemory(sum(storage.nbytes() + _ALIGNMENT for storage in storages.values()))
    _segments[torch.frombuffer(segment, dtype=torch.uint8).data_ptr()] = segment
    copies, offset = {}, 0
    for number, storage in storages.items():
        copies[number] = _storage(segment, offset, storage.nbytes()).copy_(storage)
        offset += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return copies


def _segment_of(of: Tensor | UntypedStorage) -> int:
    """Return the address of the segment that holds a tensor or a storage, or 0."""
    at = of.data_ptr()
    return next((n for n, segment in list(_segments.items()) if n <= at < n + len(segment)), 0)


def _storage(segment: SharedMemory, offset: int, size: int) -> UntypedStorage:
    return torch.frombuffer(segment, dtype=torch.uint8, count=size, offset=offset).untyped_storage()
