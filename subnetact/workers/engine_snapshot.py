"""EngineSnapshot: how an engine, and every change of it, gets to other processes; one copy of the weights.

An engine is sent as its structure: tensors stand in it as addresses in shared memory. The tensors of the
engine itself move to the same memory, so that there is one copy for all processes together.

Before every batch the parent compares a few counters. If they have changed, the process gets what is new
before the batch, so that no batch runs on a mixture of former and new weights.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.storage import TypedStorage, UntypedStorage

from subnetact.engine.engine import Engine
from subnetact.errors import EngineError, StaleWeights, SubnetActError, failure_text
from subnetact.operators.tensor_version import storage_id
from subnetact.supernet.supernet import Supernet
from subnetact.workers.memory import SharedMemory

__all__ = ["Change", "EngineSnapshot", "Package", "Parts", "States", "apply", "unpack"]

ALIGNMENT = 64
States = tuple[int, ...]
"""One number per supernet for its structure, one for its values, and one per engine for its subnets."""

_version = attrgetter("_version")
_segment_numbers = itertools.count()
_TRIES = 10
"""How often weights are copied again because they changed meanwhile."""


class Package(NamedTuple):
    """Pickled objects on their way to another process; tensors in them are addresses in numbered segments."""

    data: bytes
    segments: Mapping[int, SharedMemory]


class Change(NamedTuple):
    """What a process does to follow its parent.

    A `supernet` has another state, `values` were changed in place, or an engine has other `subnets`. The
    number says which supernet or engine, and the package holds the new state if it needs one.
    """

    kind: str
    number: int
    package: Package


class Parts(NamedTuple):
    """A runner, and the engines and supernets in it, which follow those of the parent."""

    runner: Any
    engines: list[Engine]
    supernets: list[Supernet]


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a storage is in shared memory."""

    number: int
    segment: SharedMemory
    offset: int


_places: WeakValueDictionary[int, _Place] = WeakValueDictionary()
"""All storages that snapshots of this process have moved, by their address. Snapshots share them."""


class EngineSnapshot:
    """A runner as other processes need it, and what has changed since they got it. Threads may share it."""

    def __init__(self, runner: Any) -> None:
        self._lock = RLock()
        self._shared: dict[int, _Place] = {}
        found = _Finder()
        _dump(found, runner, runner)
        self._parts = Parts(runner, found.engines, found.supernets)
        for engine in found.engines:
            engine.sample  # noqa: B018 - it raises if there is none, and without one no process can warm up
        self._followed = [_Followed(supernet) for supernet in found.supernets]
        self._registered = [engine.changes for engine in found.engines]
        self._states = [0] * (2 * len(found.supernets) + len(found.engines))
        self._whole: Package | None = None
        self._packed: dict[int, Package] = {}
        self.whole()

    def whole(self) -> tuple[Package, States]:
        """Return the whole runner as it is now, for a new process, and the states of its parts."""
        with self._lock:
            self._look()
            if self._whole is None:
                self._whole = self._pack(tuple(self._parts), self._parts.supernets)
            return self._whole, tuple(self._states)

    def is_current(self, states: States) -> bool:
        """Tell whether a process with these states is up to date; this takes microseconds."""
        return states == tuple(self._states) and not self._changed()

    def changes(self, states: States) -> tuple[list[Change], States]:
        """Return what a process with these states has to do to be up to date, and its states afterwards."""
        with self._lock:
            self._look()
            found, supernets = [], len(self._followed)
            for place, (known, now) in enumerate(zip(states, self._states, strict=True)):
                if known == now:
                    continue
                if place < supernets:
                    if place not in self._packed:
                        supernet = self._parts.supernets[place]
                        self._packed[place] = self._pack(supernet.__getstate__, [supernet])
                    found.append(Change("supernet", place, self._packed[place]))
                elif place < 2 * supernets:
                    if states[place - supernets] == self._states[place - supernets]:
                        found.append(Change("values", place - supernets, Package(b"", {})))
                else:
                    number = place - 2 * supernets
                    package = Package(pickle.dumps(self._parts.engines[number].config), {})
                    found.append(Change("subnets", number, package))
            return found, tuple(self._states)

    def _changed(self) -> bool:
        if any(followed.moved() or followed.touched() for followed in self._followed):
            return True
        return [engine.changes for engine in self._parts.engines] != self._registered

    def _look(self) -> None:
        """Count what has changed, and forget what was packed before."""
        for place, followed in enumerate(self._followed):
            if followed.moved():
                self._count(place)
                self._packed.pop(place, None)
                followed.note()
            elif followed.touched():
                visible = followed.storages() <= self._shared.keys()
                if not visible:
                    self._packed.pop(place, None)
                self._count(place + len(self._followed) if visible else place)
                followed.note()
        for number, engine in enumerate(self._parts.engines):
            now = engine.changes
            if now != self._registered[number]:
                self._registered[number] = now
                self._count(number + 2 * len(self._followed))

    def _count(self, place: int) -> None:
        self._states[place] += 1
        self._whole = None

    def _pack(self, what: Any, supernets: Sequence[Supernet]) -> Package:
        """Pickle objects, and move the tensors of supernets to the shared memory that the objects need."""
        with ExitStack() as stack:
            for supernet in supernets:
                stack.enter_context(supernet.generation.lock)
            packer = _Packer()
            objects = what() if callable(what) else what
            data = _dump(packer, objects, self._parts.runner)
            for _ in range(_TRIES):
                before = [supernet.generation.moment() for supernet in supernets]
                placed = packer.finish()
                if before == [supernet.generation.moment() for supernet in supernets]:
                    break
            else:
                raise StaleWeights(
                    "the weights are changed in place faster than they can be copied to the memory that "
                    "worker processes share; start the processes between two steps of the training"
                )
            for supernet in supernets:
                if not placed.keys().isdisjoint(map(storage_id, supernet.tensors())):
                    supernet.exchange_storage(placed)
            _places.update(packer.addresses)
            used = {storage for followed in self._followed for storage in followed.storages()}
            places = ((address, _places.get(address)) for address in used)
            self._shared = {address: place for address, place in places if place is not None}
            for followed in self._followed:
                if followed.supernet in supernets:
                    followed.note()
        return Package(data, packer.segments)


class _Followed:
    """A supernet, and what it was when it was packed."""

    def __init__(self, supernet: Supernet) -> None:
        self.supernet = supernet
        self.note()

    def note(self) -> None:
        """Remember what the supernet is now."""
        self._generation = self.supernet.generation.number
        self._rows = self.supernet.norms.rows
        self._tensors = [t for t in self.supernet.tensors() if not t.is_inference()]
        self._versions = sum(map(_version, self._tensors))

    def moved(self) -> bool:
        """Tell whether weights or statistics were replaced."""
        supernet = self.supernet
        return self._generation != supernet.generation.number or self._rows is not supernet.norms.rows

    def touched(self) -> bool:
        """Tell whether values were changed in place."""
        return bool(sum(map(_version, self._tensors)) != self._versions)

    def storages(self) -> set[int]:
        """Return the addresses of all weights and statistics."""
        return {t.untyped_storage().data_ptr() for t in self.supernet.tensors()}


class _Finder(pickle.Pickler):
    """Finds the engines and supernets that an object holds."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.supernets: list[Supernet] = []
        super().__init__(io.BytesIO(), protocol=5)

    def persistent_id(self, value: Any) -> Any:
        """Note engines and supernets, and pass over them and all tensors."""
        if isinstance(value, Engine):
            if value not in self.engines:
                self.engines.append(value)
            self.persistent_id(value.supernet)
        elif isinstance(value, Supernet):
            if not any(value is known for known in self.supernets):
                self.supernets.append(value)
        elif not isinstance(value, Tensor | TypedStorage | UntypedStorage):
            return None
        return 0


class _Packer(pickle.Pickler):
    """Pickles objects and plans one segment of shared memory for the tensors that are in none yet."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.segments: dict[int, SharedMemory] = {}
        self.addresses: dict[int, _Place] = {}
        self._number = next(_segment_numbers)
        self._new: dict[int, tuple[UntypedStorage, int]] = {}
        self._size = 0
        super().__init__(self.file, protocol=5)

    def persistent_id(self, value: Any) -> Any:
        """Return the address of a storage on the CPU, and None for all other objects."""
        if isinstance(value, TypedStorage):
            storage, dtype = value._untyped_storage, value.dtype
        elif isinstance(value, UntypedStorage):
            storage, dtype = value, None
        else:
            return None
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        return dtype, *self._address(storage), storage.nbytes()

    def reducer_override(self, value: Any) -> Any:
        """Take engines apart, and send tensors on a GPU as handles of CUDA (not seen on hardware yet)."""
        if isinstance(value, Engine):
            return Engine.from_config, (value.supernet, value.config)
        if isinstance(value, Tensor) and value.is_cuda:
            return reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        return NotImplemented

    def _address(self, storage: UntypedStorage) -> tuple[int, int]:
        known = _places.get(storage.data_ptr())
        if known is not None:
            self.segments[known.number] = known.segment
            return known.number, known.offset
        if storage.is_shared():
            raise EngineError(
                "a tensor is in shared memory already (share_memory_()), where other processes may change "
                "it; give the engine weights of its own, for example by supernet.load_state_dict on a copy"
            )
        place = self._new.get(storage._cdata)
        if place is None:
            place = self._new[storage._cdata] = storage, self._size
            self._size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        return self._number, place[1]

    def finish(self) -> dict[int, UntypedStorage]:
        """Copy the new tensors into a segment, and return their storage there by `storage_id`."""
        placed: dict[int, UntypedStorage] = {}
        if self._new:
            segment = self.segments.get(self._number) or SharedMemory(self._size)
            self.segments[self._number] = segment
            for number, (storage, offset) in self._new.items():
                copy = _storage(segment, offset, storage.nbytes())
                copy.copy_(storage)
                placed[number] = copy
                self.addresses[copy.data_ptr()] = _Place(self._number, segment, offset)
        return placed


class _Unpacker(pickle.Unpickler):
    """Opens what `_Packer` has pickled."""

    def __init__(self, package: Package) -> None:
        self._segments = package.segments
        self._storages: dict[tuple[int, int], UntypedStorage] = {}
        super().__init__(io.BytesIO(package.data))

    def persistent_load(self, address: Any) -> Any:
        """Return the storage at an address."""
        dtype, number, offset, size = address
        storage = self._storages.get((number, offset))
        if storage is None:
            storage = self._storages[number, offset] = _storage(self._segments[number], offset, size)
        if dtype is None:
            return storage
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def unpack(package: Package) -> Any:
    """Return the objects of a package, in the process that it was sent to."""
    return _Unpacker(package).load()


def apply(change: Change, parts: Parts) -> None:
    """Follow a change of the parent."""
    if change.kind == "supernet":
        parts.supernets[change.number].__setstate__(unpack(change.package))
    elif change.kind == "values":
        parts.supernets[change.number].refresh()
    else:
        parts.engines[change.number].follow(pickle.loads(change.package.data))


def _storage(segment: SharedMemory, offset: int, size: int) -> UntypedStorage:
    return torch.frombuffer(segment.map, dtype=torch.uint8, count=size, offset=offset).untyped_storage()


def _dump(pickler: Any, objects: Any, runner: Any) -> bytes:
    try:
        pickler.dump(objects)
    except SubnetActError:
        raise
    except Exception as error:
        raise EngineError(
            f"engine: {type(runner).__name__} cannot be sent to a worker process: {failure_text(error)}; "
            "define its classes and functions at the top of a module (not as a lambda, nor inside a "
            "function), or run threads: process=False"
        ) from error
    return bytes(pickler.file.getvalue()) if isinstance(pickler, _Packer) else b""
