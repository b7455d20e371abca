"""Engine: the registered subnets of a supernet, ready to run on one device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from operator import index
from os import PathLike
from statistics import median
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from subnetact.device import find_device
from subnetact.engine.bundle import Bundle, load_bundle, save_bundle
from subnetact.engine.cache import ByteCache
from subnetact.engine.compiler import Compiler
from subnetact.engine.cuda_graphs import GraphBackend, Graphs, cuda_graphs
from subnetact.engine.inputs import (
    Stager,
    call_with,
    check_batch,
    check_input,
    detach_example,
    try_example,
)
from subnetact.engine.outputs import unstack
from subnetact.engine.promotion import Promoter
from subnetact.engine.ready_subnet import Bound, ReadySubnet
from subnetact.engine.stats import EngineStats, weight_bytes
from subnetact.errors import (
    EngineError,
    InvalidRequest,
    NotCalibrated,
    SpecError,
    SubnetActError,
)
from subnetact.latency.table import LatencyTable
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["Engine"]

KERNELS = 2**25
"""Bytes of a budget that are left to the kernels which oneDNN compiles and keeps."""


class Engine:
    """Subnets 0 .. n-1 of one supernet, each ready to run from one copy of the weights.

    It is the runner of a `Batcher` and what `profile_latency` measures. Safe to use from many threads.
    Without a budget no weight is copied outside a call. Within a budget, subnets that are pinned or used
    most get a program of their own: BatchNorm folded, activations and residual additions fused, weights
    packed. A subnet that does not fit in the budget is slower, never wrong. Outputs are
    those of `supernet(x, subnet=spec)` up to rounding: 5e-5, or 1e-3 relative and 1e-4 absolute where
    BatchNorm is folded.

    Statistics that change in the norm table, weights that change in place and `load_state_dict` are
    followed.

    Args:
        supernet: the supernet; it is moved to `device`.
        specs: the subnets to register; their ids are their positions.
        example: one input without a batch dimension, (C, H, W) for images: the shape and dtype that
            requests must have. A tuple of tensors is the network's positional arguments, a dictionary its
            named ones. None = the first tensor seen tells.
        device: where to run; None = where the supernet is.
        memory_budget_mb: MiB that programs and graphs may take beyond weights and norm table. A
            quarter, on the CPU also 32 MiB for kernels, but at most half stays free for what packing and
            running need for a moment. Each thread's activations, and what the C allocator and MKL keep per
            thread, come on top.
        accuracy: percent, one a subnet, where known; kept in bundles.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own are accepted.
        fuse: whether subnets may become fused programs within the budget. If False, only
            graphs use the budget.
        fused_dtype: what programs compute in, `torch.bfloat16` for example, to its own precision; None = the
            weights' own.
        compile: a torch.compile backend, `inductor` for example, that every subnet is compiled with
            instead of becoming a fused program; None = none.
        graph_backend: what captures graphs; None = CUDA graphs on a CUDA device.

    Attributes:
        specs: the registered subnets, in id order; removed ones included.
        keys: their readable keys.
        accuracy: theirs, percent or None.
        fingerprint: the hash of the weights they were registered with.
        tables: latency tables by name; kept in bundles.

    Raises:
        EngineError: a budget or a backend for compile that there cannot be.
        NotCalibrated: a subnet has no statistics of its own.
        SpecError: a specification is of another space, repeated, or there is none.
    """

    def __init__(
        self,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        *,
        example: Any = None,
        device: str | torch.device | None = None,
        memory_budget_mb: float = 0.0,
        accuracy: Sequence[float | None] | None = None,
        allow_uncalibrated: bool = False,
        fuse: bool = True,
        fused_dtype: torch.dtype | None = None,
        compile: str | None = None,
        graph_backend: GraphBackend | None = None,
    ) -> None:
        canonical = as_supernet(supernet).distinct(specs, "an engine")
        known = [None] * len(canonical) if accuracy is None else list(accuracy)
        if len(known) != len(canonical):
            raise SpecError(f"accuracy: {len(known)} values for {len(canonical)} subnets; give one a subnet")
        if not 0 <= memory_budget_mb < math.inf:
            raise EngineError(f"memory_budget_mb: {memory_budget_mb} must be finite and >= 0; 0 = no budget")
        self._allow_uncalibrated = allow_uncalibrated
        home = next(supernet.parameters()).device
        self.device = home if device is None else find_device(device)
        self.supernet = supernet
        self._refuse_uncalibrated(canonical)
        if self.device != home:
            supernet.to(self.device)
        supernet.eval()
        self.tables: dict[str, LatencyTable] = {}
        self.fingerprint = supernet.fingerprint()
        if example is not None:
            check_input(example, None, self.device, where="example")
        self._example = None if example is None else detach_example(example)
        self._stager = Stager(self.device)
        self._changing = Lock()
        self._budget = int(memory_budget_mb * 2**20)
        room = self._budget // 4 + (KERNELS if self.device.type == "cpu" else 0)
        self._cache = ByteCache(self._budget - min(self._budget // 2, room))
        self._compiler = None if compile is None else Compiler(compile)
        self._promoter = (
            Promoter(self._cache, supernet, fused_dtype)
            if fuse and self._cache.budget and not compile
            else None
        )
        if graph_backend is None and self.device.type == "cuda":
            graph_backend = cuda_graphs(self.device)
        self._graphs = Graphs(self._cache, graph_backend) if graph_backend and self._cache.budget else None
        self._bind_ms: list[float] = []
        self._subnets: tuple[ReadySubnet, ...] = ()
        self._served: dict[int, ReadySubnet] = {}
        for spec, percent in zip(canonical, known, strict=True):
            self.register(spec, percent)
        if example is not None:
            self._try_example()

    # -- registration ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._subnets)

    def __repr__(self) -> str:
        return f"Engine({self.supernet.space.name}, {len(self.ids)} subnets, on {self.device})"

    @property
    def specs(self) -> tuple[SubnetSpec, ...]:
        """The subnets in id order, removed ones included."""
        return tuple(subnet.spec for subnet in self._subnets)

    @property
    def keys(self) -> tuple[str, ...]:
        """The readable keys in id order, removed ones included."""
        return tuple(subnet.spec.key for subnet in self._subnets)

    @property
    def accuracy(self) -> tuple[float | None, ...]:
        """The accuracy in id order, percent or None, removed ones included."""
        return tuple(subnet.accuracy for subnet in self._subnets)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids that are served."""
        return tuple(sorted(self._served))

    @property
    def example(self) -> Any:
        """One input without a batch dimension, on the CPU: a tensor, or a tuple or dictionary of tensors.

        Raises:
            InvalidRequest: none was given, and no input was seen yet.
        """
        if self._example is None:
            raise InvalidRequest("this engine has seen no input yet; give it example=, one input (C, H, W)")
        return self._example

    def register(self, spec: SubnetSpec, accuracy: float | None = None) -> int:
        """Make one more subnet ready, while others are served, and return its id.

        A subnet that is registered already keeps its id; one that was removed gets its old id back.

        Raises:
            NotCalibrated: it has no statistics of its own.
            SpecError: the specification is malformed, or of another space.
        """
        spec = self.supernet.space.check(spec)
        self._refuse_uncalibrated([spec])
        with self._changing:
            known = next((s for s in self._subnets if s.spec == spec), None)
            subnet = known or ReadySubnet(len(self._subnets), spec, accuracy, self._run)
            if accuracy is not None:
                subnet.accuracy = accuracy
            if subnet.bound is None:
                subnet.bound = self._bind(spec)
            if known is None:
                self._subnets = (*self._subnets, subnet)
            self._served = {**self._served, subnet.id: subnet}
            return subnet.id

    def remove(self, subnet: int) -> None:
        """Stop serving a subnet; calls under way finish. Its id is not given to another.

        Raises:
            SpecError: there is no such id.
        """
        with self._changing:
            gone = self.ready(subnet)
            self._served = {i: s for i, s in self._served.items() if i != subnet}
            gone.bound = None
            gone.refused = False
        if self._promoter is not None:
            self._promoter.drop(subnet)
        if self._graphs is not None:
            self._graphs.drop(subnet)
        if self._compiler is not None:
            self._compiler.drop(subnet)

    # -- running ---------------------------------------------------------------------------------

    def ready(self, subnet: int) -> ReadySubnet:
        """Return the callable of a registered subnet.

        Raises:
            SpecError: there is no such id, or it was removed.
        """
        found = self._served.get(subnet) if type(subnet) is int else self._served.get(_id(subnet))
        if found is None:
            ids = self.ids
            span = f"0..{len(self) - 1}" if len(ids) == len(self) else ", ".join(map(str, ids))
            raise SpecError(f"no subnet {subnet}; this engine has {span}")
        return found

    def __call__(self, x: Any, subnet: int) -> Any:
        """Run a batch, x of shape (N, ...) on the engine's device, through a registered subnet.

        Raises:
            SpecError: there is no such id.
            InvalidRequest: the network does not run on x, which is not like the example.
        """
        ready = self.ready(subnet)
        try:
            return self._run(ready, x)
        except SubnetActError:
            raise
        except Exception as error:
            check_batch(x, self._example, error)
            raise

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        """Run single inputs as one batch and return one output each, on the CPU.

        A compiled engine pads to `batch_size`; graphs pad to a size they were captured for.
        """
        size = len(inputs) if self._compiler is None else batch_size
        return unstack(self(self._stager.stack(inputs, size), subnet), len(inputs))

    def check(self, x: Any, finite: bool = False) -> None:
        """Refuse an input that could not run: anything but the example's structure, shapes and dtypes.

        With `finite`, also one with values that are not.

        Raises:
            InvalidRequest: naming what is wrong.
        """
        check_input(x, self._example, self.device, finite)

    def enter_worker(self, threads: int | None) -> None:
        """Set up the calling thread to run batches, with so many CPU threads; None = as it is."""
        if threads is not None:
            torch.set_num_threads(threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    # -- speed -----------------------------------------------------------------------------------

    def pin(self, subnet: int) -> bool:
        """Make the fused program of a subnet now and keep it until `unpin`.

        Raises:
            SpecError: there is no such id.
        """
        chosen = self.ready(subnet)
        bound = self._bound(chosen)
        if self._promoter is None or not isinstance(self.example, Tensor):
            return False
        return self._promoter.pin(chosen, bound, self.example)

    def unpin(self, subnet: int) -> None:
        """Let a pinned program make room for others when it is the least recently used.

        Raises:
            SpecError: there is no such id.
        """
        if self._promoter is not None:
            self._promoter.unpin(self.ready(subnet).id)

    def is_fused(self, subnet: int) -> bool:
        """Tell whether a subnet runs as a program of its own right now."""
        return self._promoter is not None and self._promoter.holds(subnet)

    def prepare(self, batch_sizes: Sequence[int] = (1,), subnets: Sequence[int] | None = None) -> None:
        """Run every subnet once at each batch size, so that nothing is packed, captured or compiled later.

        With `compile`, a batch of another shape than those prepared is refused from then on
        (`RecompileRefused`), and all are once weights or statistics are replaced (`load_state_dict`,
        `calibrate`): prepare again then.

        Args:
            batch_sizes: the sizes to come.
            subnets: ids; None = all that are served.

        Raises:
            EngineError: a batch size is no whole number of at least 1.
        """
        given: Any = batch_sizes
        sizes: list[Any] = list(given) if isinstance(given, Iterable) else [0]
        if not all(isinstance(size, Integral) and int(size) > 0 for size in sizes):
            raise EngineError(f"batch_sizes: {batch_sizes!r} must be whole numbers of at least 1, as (1, 8)")
        chosen = [self.ready(i) for i in (self.ids if subnets is None else subnets)]
        for size in sorted(map(int, sizes), reverse=True):
            x = self._stager.stack([self.example], size)
            for subnet in chosen:
                if self._compiler is not None:
                    with self._compiler.allowed():
                        self._run(subnet, x)
                self._run(subnet, x)
        if self._compiler is not None:
            self._compiler.seal()

    def stats(self) -> EngineStats:
        """Measure how long choosing a subnet takes, and count the bytes held."""
        ids, taken = self.ids, []
        for i in (ids * (1000 // max(1, len(ids)) + 1))[:1000]:
            start = time.perf_counter_ns()
            try:
                self.ready(i)
            except SpecError:
                continue  # removed meanwhile
            taken.append(time.perf_counter_ns() - start)
        return EngineStats(
            subnets=len(ids),
            fused=0 if self._promoter is None else sum(map(self.is_fused, ids)),
            actuate_us=median(taken) / 1e3 if taken else 0.0,
            bind_ms=median(self._bind_ms),
            weights=weight_bytes(self.supernet),
            norm_table=self.supernet.norms.nbytes(),
            fused_bytes=self._cache.nbytes(Promoter.KIND),
            graphs=self._cache.nbytes(Graphs.KIND),
            budget=self._budget,
            compiled=0 if self._compiler is None else len(self._compiler),
        )

    # -- bundles ---------------------------------------------------------------------------------

    def save(self, directory: str | PathLike[str]) -> None:
        """Write weights, norm table, space, subnets, accuracy and `tables` as one bundle.

        The directory must be new, empty, or hold a bundle, which is then replaced.

        Raises:
            FileFormatError: the directory holds something else.
        """
        removed = [i for i in range(len(self)) if i not in self._served]
        bundle = Bundle(
            self.supernet,
            self.specs,
            self.accuracy,
            removed,
            self._example,
            self.tables,
            self._allow_uncalibrated,
        )
        save_bundle(bundle, directory)

    @classmethod
    def load(
        cls, directory: str | PathLike[str], *, supernet: Supernet | None = None, **options: Any
    ) -> Engine:
        """Read a bundle that `save` wrote. Nothing is unpickled.

        Args:
            directory: the bundle.
            supernet: for an own network, the same with any weights; they are replaced by the bundle's.
                None = rebuilt by its family's name.
            options: `device`, `memory_budget_mb` and others, as of `Engine`.

        Raises:
            FileFormatError: a file is missing, truncated, changed, or of a newer schema; it is named.
            ForeignSpec: the given supernet is of another space.
        """
        found = load_bundle(directory, supernet)
        served: Mapping[str, Any] = {
            "example": found.example,
            "accuracy": found.accuracy,
            "allow_uncalibrated": found.allow_uncalibrated,
        }
        engine = cls(found.supernet, found.specs, **{**served, **options})
        engine.tables.update(found.tables)
        for removed in found.removed:
            engine.remove(removed)
        return engine

    # -- inner parts -----------------------------------------------------------------------------

    def _run(self, subnet: ReadySubnet, x: Any) -> Any:
        bound = self._bound(subnet)
        with torch.inference_mode():
            if not isinstance(x, Tensor):
                if self._compiler is not None:
                    raise InvalidRequest(
                        f"input: a compiled engine serves single tensors, got {type(x).__name__}; "
                        "leave out compile="
                    )
                return call_with(bound.view, x)
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            if self._compiler is not None:
                call = self._compiler.of(subnet.id, bound)
            elif self._promoter is None:
                call = bound.view
            else:
                example = self._example if isinstance(self._example, Tensor) else None
                call = self._promoter.program(subnet, bound, example) or bound.view
            output = call(x) if self._graphs is None else self._graphs.run(subnet.id, bound, call, x)
            if self._example is None and x.dim():
                self._example = torch.zeros(x.shape[1:], dtype=x.dtype)
            return output

    def _try_example(self) -> None:
        space = self.supernet.space
        full = space.resolve(space.largest())

        def width(spec: SubnetSpec) -> float:
            return sum(size / most for size, most in zip(space.resolve(spec), full, strict=True) if most)

        narrowest = min((subnet.spec for subnet in self._subnets), key=width)
        view, _ = self.supernet.private_view(narrowest)
        try_example(view, self._stager.stack([self._example], 1), self._example, str(narrowest))

    def _bound(self, subnet: ReadySubnet) -> Bound:
        bound = subnet.bound
        if bound is None:
            raise SpecError(f"subnet {subnet.id} ({subnet.spec}) was removed; register it again")
        if not bound.current(self.supernet, subnet.spec):
            bound = self._bind(subnet.spec)
            with self._changing:
                if subnet.bound is not None:
                    subnet.bound = bound
        return bound

    def _bind(self, spec: SubnetSpec) -> Bound:
        start = time.perf_counter()
        bound = Bound.of(self.supernet, spec)
        self._bind_ms = [*self._bind_ms[-999:], (time.perf_counter() - start) * 1e3]
        return bound

    def _refuse_uncalibrated(self, specs: Sequence[SubnetSpec]) -> None:
        bare = [spec for spec in specs if not self.supernet.calibrated(spec)]
        if bare and not self._allow_uncalibrated:
            raise NotCalibrated(
                f"{len(bare)} of {len(specs)} subnets have no BatchNorm statistics of their own, "
                f"{bare[0]} first; call subnetact.calibrate(supernet, specs, batches), or pass "
                "allow_uncalibrated=True to serve them on the shared ones"
            )


def _id(subnet: Any) -> int:
    try:
        if isinstance(subnet, bool):
            raise TypeError
        return index(subnet)
    except TypeError:
        raise SpecError(f"subnet: {subnet!r} is not an id; ids are ints, 0 for the first subnet") from None
