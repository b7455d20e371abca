"""EngineSnapshot: how an engine, and every change of it, gets to other processes; one copy of the weights.

An engine is sent as its structure, with tensors as addresses in shared memory, to which its own tensors move.
Before every batch the parent compares a few counters, and sends what has changed, so that no batch runs on a
mixture of former and new weights.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
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
from subnetact.files.fork import new_lock
from subnetact.operators.tensor_version import storage_id
from subnetact.supernet.supernet import Supernet
from subnetact.workers.memory import ALIGNMENT, SharedMemory

States = tuple[Any, ...]
"""What stands for the present supernets, then for the engines: see `_Followed.state`, `Engine.changes`."""

_version = attrgetter("_version")
_TRIES = 10  # to copy weights again because they changed meanwhile
_segments: WeakValueDictionary[int, SharedMemory] = WeakValueDictionary()
"""All shared memory of weights of this process, by its address; the tensors in it keep it."""


class Package(NamedTuple):
    """Pickled objects on their way to another process; tensors in them are addresses in numbered segments."""

    data: bytes
    segments: Mapping[int, SharedMemory]


class Parts(NamedTuple):
    """A runner, and the engines and supernets in it, which follow those of the parent."""

    runner: Any
    engines: list[Engine]
    supernets: list[Supernet]


class EngineSnapshot:
    """A runner as other processes need it, and what has changed since they got it. Threads may share it."""

    def __init__(self, runner: Any) -> None:
        self._lock = new_lock(RLock)
        finder = _Packer()
        _dump(finder, runner, runner)
        self._parts = Parts(runner, finder.engines, finder.supernets)
        for engine in finder.engines:
            engine.sample  # noqa: B018 - it raises if there is none, and without one no process can warm up
        self._followed = [_Followed(supernet) for supernet in finder.supernets]
        self._packed: dict[States, tuple[Package, States]] = {}
        self.package()

    def package(self, known: States = ()) -> tuple[Package, States]:
        """Return what a process with `known` states has to `apply`, and its states afterwards.

        Without states, return the whole `Parts`, for a new process.
        """
        with self._lock:
            if known not in self._packed or not self.is_current(self._packed[known][1]):
                self._packed = {of: one for of, one in self._packed.items() if self.is_current(one[1])}
                self._packed[known] = self._pack(known)
            return self._packed[known]

    def is_current(self, states: States) -> bool:
        """Tell whether a process with these states is up to date; this takes microseconds."""
        return states == self._states()

    def _states(self) -> States:
        with self._lock:
            return (*(f.state() for f in self._followed), *(engine.changes for engine in self._parts.engines))

    def _changed(self, known: States) -> list[tuple[int, Any]]:
        """Return by part an engine's configuration, a supernet's state, or None for changes in place."""
        _, engines, supernets = self._parts
        changed: list[tuple[int, Any]] = []
        for part, (former, now) in enumerate(zip(known, self._states(), strict=True)):
            if former == now:
                continue
            if part >= len(supernets):
                changed.append((part, engines[part - len(supernets)].config))
            elif former[0] == now[0] and all(map(_segment_of, supernets[part].tensors())):
                changed.append((part, None))
            else:
                changed.append((part, supernets[part].__getstate__()))
        return changed

    def _pack(self, known: States) -> tuple[Package, States]:
        """Pickle objects of one moment, when the tensors of supernets are in shared memory."""
        supernets, moved = self._parts.supernets, False
        with ExitStack() as stack:
            for supernet in supernets:
                stack.enter_context(supernet.generation.lock)
            for _ in range(_TRIES):
                packer, states = _Packer(), self._states()
                try:
                    data = _dump(packer, self._changed(known) if known else self._parts, self._parts.runner)
                except StaleWeights:
                    continue
                placed = packer.finish()
                outside = [s for s in supernets if not placed.keys().isdisjoint(map(storage_id, s.tensors()))]
                unchanged = self._states() == states
                if not outside or (moved and unchanged):  # Some tensors may have to stay where they are.
                    return Package(data, packer.segments), states
                if unchanged:
                    for supernet in outside:
                        supernet.exchange_storage(placed)
                    moved = True
        raise StaleWeights(
            "the weights are changed in place faster than they can be copied to the memory that worker "
            "processes share; start the processes between two steps of the training"
        )


class _Followed:
    """A supernet, and how often its tensors were seen to be other ones."""

    def __init__(self, supernet: Supernet) -> None:
        self._supernet = supernet
        self._seen: tuple[Any, Any] = None, None
        self._count = 0

    def state(self) -> tuple[int, int]:
        """Return a number that grows when tensors are replaced, and one that grows as values change."""
        number, rows = self._supernet.generation.number, self._supernet.norms.rows
        if number != self._seen[0] or rows is not self._seen[1]:
            self._seen = number, rows
            self._tensors = [t for t in self._supernet.tensors() if not t.is_inference()]
            self._count += 1
        return self._count, sum(map(_version, self._tensors))


class _Packer(pickle.Pickler):
    """Pickles objects, and plans one segment for the tensors that are in none; it finds engines as well."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.engines: list[Engine] = []
        self.supernets: list[Supernet] = []
        self.segments: dict[int, SharedMemory] = {}
        self._new: dict[int, tuple[UntypedStorage, int]] = {}
        self._size = 0
        super().__init__(self.file, protocol=5)

    def persistent_id(self, value: Any) -> Any:
        """Return the address of a storage on the CPU, and None for all other objects."""
        if not isinstance(value, TypedStorage):
            return None
        storage = value._untyped_storage
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        return value.dtype, *self._address(storage), storage.nbytes()

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

    def _address(self, storage: UntypedStorage) -> tuple[int, int]:
        """Return a segment, 0 for the planned one, and the offset there."""
        number = _segment_of(storage)
        if number:
            self.segments[number] = _segments[number]
            return number, storage.data_ptr() - number
        if storage.is_shared():
            raise EngineError(
                "a tensor is in shared memory already (share_memory_()), where other processes may change "
                "it; give the engine weights of its own, for example by supernet.load_state_dict on a copy"
            )
        if storage._cdata not in self._new:
            self._new[storage._cdata] = storage, self._size
            self._size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        return 0, self._new[storage._cdata][1]

    def finish(self) -> dict[int, UntypedStorage]:
        """Copy the new tensors into a segment, and return their storage there by `storage_id`."""
        placed: dict[int, UntypedStorage] = {}
        if self._new:
            segment = self.segments[0] = SharedMemory(self._size)
            _segments[torch.frombuffer(segment, dtype=torch.uint8).data_ptr()] = segment
            for number, (storage, offset) in self._new.items():
                placed[number] = _storage(segment, offset, storage.nbytes()).copy_(storage)
        return placed


def unpack(package: Package) -> Any:
    """Return the objects of a package, in the process that it was sent to."""

    @cache  # Tensors that share a storage do so there as well.
    def storage(number: int, *place: int) -> UntypedStorage:
        return _storage(package.segments[number], *place)

    def load(address: Any) -> Any:
        dtype, *place = address
        make: Any = TypedStorage
        return make(wrap_storage=storage(*place), dtype=dtype, _internal=True)

    unpickler: Any = pickle.Unpickler(io.BytesIO(package.data))
    unpickler.persistent_load = load
    return unpickler.load()


def apply(package: Package, parts: Parts) -> None:
    """Follow changes of the parent: engines have other subnets, or supernets other tensors or values."""
    for part, change in unpack(package):
        if part >= len(parts.supernets):
            parts.engines[part - len(parts.supernets)].follow(change)
        elif change is None:
            parts.supernets[part].refresh()
        else:
            parts.supernets[part].__setstate__(change)


def _segment_of(of: Tensor | UntypedStorage) -> int:
    """Return the address of the segment that holds a tensor or a storage, or 0."""
    at = of.data_ptr()
    return next((n for n, segment in list(_segments.items()) if n <= at < n + len(segment)), 0)


def _storage(segment: SharedMemory, offset: int, size: int) -> UntypedStorage:
    return torch.frombuffer(segment, dtype=torch.uint8, count=size, offset=offset).untyped_storage()


def _dump(packer: _Packer, objects: Any, runner: Any) -> bytes:
    try:
        packer.dump(objects)
    except SubnetActError:
        raise
    except Exception as error:
        raise EngineError(
            f"engine: {type(runner).__name__} cannot be sent to a worker process: {failure_text(error)}; "
            "define its classes and functions at the top of a module (not as a lambda, nor inside a "
            "function), or run threads: process=False"
        ) from error
    return packer.file.getvalue()
