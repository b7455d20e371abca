"""Engine: the registered subnets of a supernet, ready to run on one device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Integral
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.device import find_device, raise_if_explained
from subnetact.engine.blocks import Block, BlockRun, SubnetBlocks
from subnetact.engine.budget import Budget, budget_bytes
from subnetact.engine.bundle import load_bundle, save_bundle
from subnetact.engine.compiler import CompiledPlan
from subnetact.engine.config import FUSED, VIEWS, EngineConfig, check_weights, percentage
from subnetact.engine.cuda_graphs import Graphs, graph_backend
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.fusion_plan import PinResult, Plan, PlannedProgram
from subnetact.engine.input_shapes import InputShapes, Padding
from subnetact.engine.inputs import check_batch, laid_out, samples_of
from subnetact.engine.ready_subnet import Bound, ReadySubnet, ReadySubnets
from subnetact.engine.runtime_program import RUNTIMES, require_runtime
from subnetact.engine.stats import EngineStats, weight_bytes
from subnetact.errors import EngineError, InvalidRequest, NotCalibrated, SpecError, SubnetActError
from subnetact.files.documents import StrPath
from subnetact.files.fork import new_lock
from subnetact.latency.arrays import LARGEST_BATCH
from subnetact.latency.table import LatencyTable
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import as_batch, call_with
from subnetact.supernet.bind import packed_bytes
from subnetact.supernet.generation import Moment
from subnetact.supernet.statistics import is_calibrated, require_calibrated
from subnetact.supernet.supernet import Supernet, as_supernet


class Engine(ReadySubnets):
    """The registered subnets of one supernet, ready to run on one device from one copy of the weights.

    An engine is what a `Batcher` runs and what `profile_latency` measures. It may be used from many threads.

    When it is made, the engine plans which subnets become fused programs, which have packed weights, and
    BatchNorms, activations and residual additions merged into the convolutions: those that this makes faster
    on this kind of machine, in the order of their ids, as far as the memory budget goes. No weight of the
    others is copied outside a call: they run as views, or, if they have convolutions and the device is a CPU,
    as a program that reads their slices, which their first call makes. On CUDA devices, CUDA graphs are
    captured. What a subnet computes does not change while it serves. `engine/fusion_plan.py` has the rule.
    Under `torch.autocast` all run as views, because packed weights and graphs keep the dtypes they were made
    with.

    Outputs equal those of `supernet(x, subnet=spec)` up to rounding: within 5e-5, or for programs within
    1e-3 relative and 1e-4 absolute. The engine follows every change of the norm table, in-place
    changes of the weights, and `load_state_dict`; the next call of a fused subnet makes its program again.

    Everywhere else a subnet is named by its specification; an engine, its tables and its policies number the
    registered ones, because a latency table, a policy and a request name a subnet by its number, which is
    stable when subnets are removed. Methods that take the id of a subnet raise `SpecError` if it is not
    served. Those that run it raise `NotCalibrated` if its BatchNorm statistics were dropped with the weights
    that they belonged to.

    Args:
        supernet: the supernet; it is moved to `device`. Its training mode stays as it is; the engine runs
            subnets in evaluation mode.
        specs: the subnets to register. Their ids are their positions: 0, 1, ...
        example: a batch for the network, (N, C, H, W) for images, of which the first sample counts. It fixes
            the shape and dtype that requests must have, which are single inputs. A tuple of tensors holds
            the network's positional arguments, a dictionary its named arguments. A list of batches gives
            several shapes, for example sequence lengths. If None, the first batch that runs is the example.
        padding: how to pad inputs to the smallest shape of the examples that they fit in: a number if an
            input is one tensor, otherwise a dictionary from the names or positions of the inputs to numbers,
            for example `{"input_ids": 0, "attention_mask": 0}`. An engine whose network computes something
            else of padded inputs, because nothing such as a mask tells it of the padding, is refused; with
            `check=False`, such answers are accepted. If None, nothing is padded.
        device: where to run. If None, the supernet stays where it is.
        memory_budget_mb: MiB that programs and graphs may take beyond the weights and the norm table; 0
            means that no weight is copied outside a call. If None, 1.25 times the weights, at most 1024 MiB.
            If there are graphs, one half is for them. Not included is what packing and running need
            temporarily.
        accuracy: accuracy per subnet in percent, or None for a subnet whose accuracy is not known. Bundles
            keep these figures.
        allow_uncalibrated: whether to accept subnets that have no BatchNorm statistics of their own.
        backend: what runs the subnets. With `fused`, those that gain from it are fused programs. With
            `openvino` or `onnxruntime` (`pip install 'subnetact[openvino]'`), all that the budget has room
            for run there, by way of ONNX, if their outputs equal those of their views; each takes a few
            seconds to make, once more after its weights have changed, and the bytes of its weights in the
            budget. With `views`, none; only graphs use the budget. With a backend of torch.compile, for
            example `inductor`, every subnet is compiled.
        check: whether to run `supernet.check` on every example, once per supernet and shape (about two
            forward passes per corner of the space), to refuse outputs that a `Batcher` could not split
            into samples, and to compare the largest subnet on a short example alone and padded to a longer
            one (not when an engine is loaded).

    Attributes:
        supernet: the supernet.
        device: where subnets run.
        prepared: the batch sizes of the last call of `prepare`.
        changes: a number that grows when subnets are registered, removed, pinned or unpinned, and with
            `prepare`.
        tables: latency tables by name, a dictionary that is empty at first. `Engine.save` writes those that
            were added: `engine.tables["cpu"] = profile_latency(engine)`.

    Raises:
        DeviceError: torch cannot use the device.
        EngineError: the budget is no number, negative or infinite, there is no such backend, or not on this
            device, weights are on the meta device or not dense, the output cannot be split into samples, or
            padding changes answers.
        InvalidRequest: a subnet does not run on the example.
        MissingExtra: the packages of the backend are not installed.
        InsertError: another subnet of the space does not run on the example, or slices wrong rows; the
            message names the module.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there are no specifications, one is repeated or of another space, the number of
            accuracies differs from the number of subnets, or an accuracy is no percentage.

    Example:
        ```python
        engine = subnetact.Engine(supernet, specs, example=torch.zeros(1, 3, 224, 224))
        engine.prepare(batch_sizes=[1, 8])
        y = engine(x, subnet=0)  # x: (N, 3, 224, 224)
        ```
    """

    program = "engine"
    """The kind of program that runs, as in the stamps of latency tables."""

    def __init__(
        self,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        *,
        example: Any = None,
        padding: Padding = None,
        device: str | torch.device | None = None,
        memory_budget_mb: float | None = None,
        accuracy: Sequence[float | None] | None = None,
        allow_uncalibrated: bool = False,
        backend: str = FUSED,
        check: bool = True,
    ) -> None:
        config = EngineConfig(
            specs,
            accuracy,
            sample=samples_of(example),
            padding=padding,
            allow_uncalibrated=allow_uncalibrated,
            device=device,
            memory_budget_mb=memory_budget_mb,
            backend=backend,
        )
        self._open(supernet, config, check)
        if check and padding is not None:
            self._shapes.require_harmless(self.specs)

    @classmethod
    def from_config(cls, supernet: Supernet, config: EngineConfig) -> Engine:
        """Make the engine of a configuration, `Engine.config` of another one for example.

        Nothing is checked that was checked when the other engine was made: a subnet that lacks statistics
        refuses its own calls and no others.

        Args:
            supernet: the supernet, on the same weights.
            config: everything else.

        Returns:
            The engine.

        Raises:
            DeviceError: torch cannot use the device.
            EngineError: as in `Engine`.
            SpecError: a subnet is of another space.
        """
        engine = object.__new__(cls)
        engine._open(supernet, config, None)
        return engine

    def _open(self, supernet: Supernet, config: EngineConfig, check: bool | None) -> None:
        """Set the engine up; unless `check` is None, after a try of what it is to serve."""
        check_weights(as_supernet(supernet))
        self._budget = budget_bytes(config.memory_budget_mb, weight_bytes(supernet))
        self.device = supernet.device if config.device is None else find_device(config.device)
        config = config.checked(supernet)
        if check is not None and not config.allow_uncalibrated:
            require_calibrated(supernet, config.served)
        self._casts = partial(torch.is_autocast_enabled, self.device.type)
        self.supernet = supernet
        if self.device != supernet.device:
            supernet.to(self.device)
        self._config = config
        self.prepared: tuple[int, ...] = ()
        self.changes = 0
        self.tables: dict[str, LatencyTable] = {}
        self._fingerprints: dict[Moment | None, str] = {}  # of the weights that it is known to have had
        self._shapes = InputShapes(supernet, self.device, config.sample, config.padding, config.lengths)
        self._bind = partial(Bound.of, supernet, allow_uncalibrated=config.allow_uncalibrated)
        self._blocks = SubnetBlocks(supernet, self._bind)
        self._changing, self._rebinding = new_lock(RLock), new_lock()
        self._subnets: tuple[ReadySubnet, ...] = ()
        self._served: dict[int, ReadySubnet] = {}
        name, backend = config.backend, graph_backend(self.device)
        kind = Plan if name in (FUSED, VIEWS, *RUNTIMES) else CompiledPlan
        if name in tuple(RUNTIMES):
            require_runtime(name, self.device)
        never = "the engine was made with backend='views'" if name == VIEWS else ""
        never = never if self._budget else "the engine has no memory budget; give memory_budget_mb="
        for_graphs = self._budget if never or kind.compiles else self._budget // 2
        self._graphs = Graphs(Budget(for_graphs), backend) if backend and for_graphs else None
        programs = Budget(self._budget - (for_graphs if backend else 0))
        self._plan = kind(supernet, programs, self._bound, self._shapes, self._casts, never, name)
        if check is not None:
            self._shapes.try_out(config.served, check)
        self.follow(config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            "an engine holds locks and compiled code and cannot be pickled or copied; engine.save(directory) "
            "and Engine.load(directory) take it to another process"
        )

    # -- registration ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Engine({self.supernet.space.name}, {len(self.ids)} subnets, on {self.device})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the subnets in id order, as a bundle has them, or `subnet-0` and so on."""
        return self.supernet.card.names_of(self.specs)

    @property
    def fingerprint(self) -> str:
        """The hash of the weights that the supernet has now; it is computed once for the same weights."""
        moment = self.supernet.generation.moment()
        if moment not in self._fingerprints:  # If weights change meanwhile, the next call has another moment.
            self._fingerprints[moment] = self.supernet.fingerprint()
        return self._fingerprints[moment]

    @property
    def config(self) -> EngineConfig:
        """Everything that the engine consists of now, apart from the supernet and the latency tables."""
        subnets, served = self._subnets, self._served  # Both are replaced as a whole, so no lock is needed.
        return replace(
            self._config,
            specs=tuple(subnet.spec for subnet in subnets),
            accuracy=tuple(subnet.accuracy for subnet in subnets),
            removed=tuple(subnet.id for subnet in subnets if subnet.id not in served),
            pinned=self._plan.pinned,
            prepared=self.prepared,
            sample=self._shapes.follow().given,
            lengths=self._shapes.lengths,
        )

    @property
    def samples(self) -> list[Any]:
        """One input per shape that is served, without batch axis, on the CPU, the largest last.

        Raises:
            InvalidRequest: no example was given, and no input was seen yet.
        """
        if not self._shapes.samples:
            raise InvalidRequest("this engine has seen no input yet; give it example=, a batch (N, C, H, W)")
        return list(self._shapes.follow().samples)

    def shape_of(self, x: Any) -> int:
        """Return the position in `samples` of the smallest shape that an input fits in.

        Args:
            x: one input without a batch dimension.

        Raises:
            InvalidRequest: the engine serves several shapes, and the input fits in none of them.
        """
        return self._shapes.index(x)

    def register(self, spec: SubnetSpec, accuracy: float | None = None) -> int:
        """Make one more subnet ready. Other subnets may be served meanwhile.

        Args:
            spec: the subnet.
            accuracy: its accuracy in percent. None keeps the known accuracy.

        Returns:
            Its id. A subnet that is registered already keeps its id; one that was removed gets its id back.

        Raises:
            NotCalibrated: the subnet has no BatchNorm statistics of its own.
            SpecError: the specification is malformed, or of another space (`ForeignSpec`).
        """
        spec = self.supernet.space.check(spec)
        percent = percentage(accuracy, spec)
        with self._changing:
            if not self._config.allow_uncalibrated:
                require_calibrated(self.supernet, [spec])
            known, config = {subnet.spec: subnet.accuracy for subnet in self._subnets}, self.config
            known[spec] = known.get(spec) if percent is None else percent
            subnet = list(known).index(spec)
            removed = tuple(i for i in config.removed if i != subnet)
            self.follow(replace(config, specs=tuple(known), accuracy=[*known.values()], removed=removed))
            return subnet

    def remove(self, subnet: int) -> None:
        """Stop serving a `subnet`. Calls under way finish, and no other subnet gets the id."""
        with self._changing:
            gone, config = self.ready(subnet).id, self.config
            self.follow(replace(config, removed=(*config.removed, gone)))

    def follow(self, config: EngineConfig) -> None:
        """Register, remove, pin and prepare until the engine has the subnets of a configuration.

        Args:
            config: of another engine of the same supernet, for example. It is not checked.
        """
        with self._changing:
            first, removed = len(self._subnets), set(config.removed)
            added = [ReadySubnet(i, spec, self) for i, spec in enumerate(config.specs[first:], first)]
            subnets = (*self._subnets, *added)
            served = {subnet.id: subnet for subnet in subnets if subnet.id not in removed}
            every = config.allow_uncalibrated
            able = [s for s in served.values() if every or is_calibrated(self.supernet, s.spec)]
            for subnet in able:
                if subnet.bound is None:
                    subnet.bound = self._bind(subnet.spec)
            for subnet, percent in zip(subnets, config.accuracy or (None,) * len(subnets), strict=True):
                subnet.accuracy = percent
            gone = [self._served[i] for i in self._served.keys() - served.keys()]
            with self._rebinding:
                self._subnets, self._served = subnets, served
                for subnet in gone:
                    subnet.bound = None
            for subnet in gone:
                self._blocks.drop(subnet.spec)
                self._plan.drop(subnet.id)
                if self._graphs is not None:
                    self._graphs.drop(subnet.id)
            self._plan.pinned = tuple(i for i in dict.fromkeys(config.pinned) if i in served)
            self._plan.change(served)
            self.changes += 1
            if self._plan.compiles and config.prepared != self.prepared:
                self.prepare(config.prepared, [subnet.id for subnet in able])

    # -- running ---------------------------------------------------------------------------------

    def __call__(self, x: Any, subnet: int) -> Any:
        """Run a batch through a registered subnet.

        Args:
            x: a tensor of shape (N, ...) on the engine's device, or a tuple or dictionary of such tensors.
            subnet: the id of the subnet.

        Returns:
            The network's output, on the engine's device.

        Raises:
            InvalidRequest: the network fails on x, and x differs from the example in structure, shape or
                dtype.
            RecompileRefused: the engine is compiled and was not prepared for the shape of x.
        """
        ready, batch, single = self.ready(subnet), x, isinstance(x, Tensor)
        try:
            bound = self._bound(ready)
            planned: Any = self._plan.program(ready, bound)
            call = planned or (bound.view if single else partial(call_with, bound.view))
            with torch.inference_mode():
                if not isinstance(planned, PlannedProgram) or not planned.program.plain:
                    batch = laid_out(x) if single else as_batch(x)
                graphs = None if self._casts() else self._graphs
                output = call(batch) if graphs is None else graphs.run(ready.id, bound, call, batch)
            if not self._shapes.samples:
                with self._changing:
                    if self._shapes.note(batch):
                        self._plan.change(self._served)
                        self.changes += 1
                if self._plan.runs(ready.id):
                    return self(batch, ready.id)
            return output
        except Exception as error:
            raise_if_explained(error, SubnetActError)
            check_batch(x, self._shapes.follow().samples, error)
            raise

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        """Run single inputs as one batch. A `Batcher` calls this method.

        Args:
            subnet: the id of the subnet.
            inputs: single inputs like those of the example, without batch axis.
            batch_size: the batch size that was planned, at least the number of inputs. A compiled engine pads
                to it; other engines run just the inputs.

        Returns:
            One output per input, on the CPU. If an input was padded, outputs per token or per pixel are cut
            to its own length, on the axes whose sizes are those of an axis of the examples in every example.

        Raises:
            InvalidRequest: there are no inputs, or the network fails on them, and they differ from the
                example.
            EngineError: the network's output cannot be split into samples.
            RecompileRefused: the engine is compiled and was not prepared for this batch size.
        """
        batch, size = self._shapes.batch(inputs, batch_size if self._plan.compiles else 0)
        return self._shapes.split(inputs, size, self(batch, subnet))

    def start(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> BlockRun:
        """Begin to run single inputs as one batch, block by block. A `Batcher` that preempts calls this.

        The subnet is cut in front of every layer of an elastic stack. Its blocks, one after the other, give
        bit for bit what the whole subnet gives. A network that takes several inputs, that cannot be traced,
        or that the engine compiles is a single block, and so are the first batch of an engine without
        example, and a fused program if the batch has NaN, infinite or huge values.

        Args:
            subnet: the id of the subnet.
            inputs: as in `run`.
            batch_size: as in `run`.

        Returns:
            The run, of which no block has run yet.

        Raises:
            InvalidRequest: there are no inputs.
        """
        batch, size = self._shapes.batch(inputs, batch_size if self._plan.compiles else 0)
        ready, graphs = self.ready(subnet), None if self._casts() else self._graphs
        bound, blocks = self._bound(ready), list[Block]([ready])
        if isinstance(batch, Tensor) and self._shapes.samples and not self._plan.compiles:
            batch, planned = laid_out(batch), self._plan.program(ready, bound)
            if planned is None:
                bound, blocks = self._blocks.of_view(ready.spec)
            elif isinstance(planned.program, FusedProgram) and not planned.refused(batch):
                blocks = self._blocks.of_program(planned.program)
            if graphs is not None and len(blocks) > 1:
                # One CUDA graph per block that takes a single tensor; this has not run on hardware yet.
                numbered = enumerate(blocks, start=1)
                blocks = [partial(graphs.run, ready.id, bound, block, part=part) for part, block in numbered]
        return BlockRun(batch, blocks, partial(self._shapes.split, inputs, size))

    def check(self, x: Any, finite: bool = False) -> None:
        """Refuse an input whose structure, shapes or dtypes differ from those of the example.

        Args:
            x: one input without a batch dimension.
            finite: whether to refuse NaN and infinite values too.

        Raises:
            InvalidRequest: the message names what is wrong.
        """
        self._shapes.check(x, finite)

    def enter_worker(self, threads: int | None) -> None:
        """Set up the calling thread to run batches. A `Batcher` calls this method in each of its workers.

        Args:
            threads: the number of CPU threads that torch uses. If None, the number is left as it is.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    # -- speed -----------------------------------------------------------------------------------

    def pin(self, subnet: int) -> PinResult:
        """Put a `subnet` first in the plan of fused programs, behind those that were pinned before.

        Its program is made now, even if it is not expected to be faster than its view. Subnets that are not
        pinned run as views from now on if the budget does not suffice for all.

        Returns:
            Whether the subnet is a fused program now. If it is not, it is not pinned either, and the result's
            `reason` says why: the engine has no budget or a backend without programs, the program does not
            fit in the budget beside those that were pinned before, or the network cannot be fused.

        Raises:
            InvalidRequest: the engine has no example yet.
            StaleWeights: `functional_call` ran on the supernet, whose tensors a program must not keep.
        """
        with self._changing:
            chosen, before = self.ready(subnet), self._plan.pinned
            self._bound(chosen)
            if not self._plan.never:
                self.sample  # noqa: B018 - it raises if there is none
            try:
                self.follow(replace(self.config, pinned=(*before, chosen.id)))
            finally:
                if chosen.id not in self._plan:
                    self._plan.pinned = before
            reason = self._plan.reason(chosen.id)
            return PinResult(not reason, reason)

    def unpin(self, subnet: int) -> None:
        """Undo `pin`: the `subnet` has the place of its id in the plan again."""
        with self._changing:
            chosen, config = self.ready(subnet).id, self.config
            self.follow(replace(config, pinned=tuple(i for i in config.pinned if i != chosen)))

    @property
    def pinned(self) -> tuple[int, ...]:
        """The ids that come first in the plan of fused programs, in the order in which they were pinned."""
        return self._plan.pinned

    def is_fused(self, subnet: int) -> bool:
        """Tell whether a `subnet` runs as a program of its own, with packed weights. `stats().unfused` says
        why others do not.
        """
        return type(subnet) is int and subnet in self._plan

    def mode_of(self, subnet: int) -> str:
        """Return how a `subnet` runs.

        As a program, it is `compile`, `fused`, `openvino` or `onnxruntime`; as a view, `graphs` (of CUDA) or
        `zero-copy`.
        """
        unfused = "zero-copy" if self._graphs is None else "graphs"
        planned = self._config.backend if self.is_fused(subnet) else unfused
        return "compile" if self._plan.compiles else planned

    def prepare(self, batch_sizes: Sequence[int] = (1,), ids: Sequence[int] | None = None) -> None:
        """Run every subnet once at each batch size, so that nothing is packed, captured or compiled later.

        Fused programs that could not be made before, because memory was short for example, are tried again.

        An engine with `compile` refuses batches of other shapes from then on (`RecompileRefused`). After
        weights or statistics were replaced (`load_state_dict`, `calibrate`) it refuses every batch until it
        is prepared again.

        Args:
            batch_sizes: the batch sizes that will be used.
            ids: the ids of the subnets to prepare. If None, all that are served.

        Raises:
            EngineError: a batch size is not a whole number of at least 1, or beyond every batch.
            InvalidRequest: the engine has no example yet.
            SpecError: there is no such id, or the subnet was removed.
        """
        given: Any = batch_sizes
        sizes: list[Any] = list(given) if isinstance(given, Iterable) else [0]
        if not all(isinstance(size, Integral) and 0 < int(size) <= LARGEST_BATCH for size in sizes):
            raise EngineError(
                f"batch_sizes: {batch_sizes!r} must be whole numbers of at least 1 and at most "
                f"{LARGEST_BATCH}, as (1, 8)"
            )
        wanted: Any = self.ids if ids is None else ids
        if not isinstance(wanted, Iterable):
            raise SpecError(f"ids: expected a list of ids, got {ids!r}")
        chosen = [self.ready(i) for i in wanted]
        with self._changing:
            self._plan.change(self._served)
            self.changes += 1
        shaped = [(size, x) for size in sorted(map(int, sizes), reverse=True) for x in self.samples[::-1]]
        for size, sample in shaped:
            x = self._shapes.stager.stack([sample], size)
            for subnet in chosen:
                self._plan.prepare(subnet, x)
                subnet(x)
        self._plan.sealed = True
        self.prepared = tuple(sorted(map(int, sizes)))
        self.changes += 1

    def warm_up(self, batch_sizes: Sequence[int], limit_s: float = 2.0) -> None:
        """Run the subnets once per batch size, small ones first, until the time is used up.

        At the smallest size all of them run, however long that takes, because first calls make programs. An
        engine that compiles runs what it was prepared for and nothing else, so it is left alone.

        Args:
            batch_sizes: the batch sizes that will run.
            limit_s: the time after which no further subnet starts, in s.
        """
        end = time.monotonic() + limit_s
        for place, size in enumerate([] if self._plan.compiles else sorted(batch_sizes)):
            x = self._shapes.stager.stack([self.sample], size)
            for subnet in self.ids:
                if place and time.monotonic() > end:
                    return
                with suppress(NotCalibrated):
                    self(x, subnet)

    def stats(self) -> EngineStats:
        """Return the bytes that are held, and which subnets are fused, at this moment."""
        ids, lowered = self.ids, packed_bytes(self.supernet.network, "lowered")
        return EngineStats(
            subnets=len(ids),
            fused=sum(map(self.is_fused, ids)),
            weights=weight_bytes(self.supernet),
            packed_bytes=packed_bytes(self.supernet.network) - lowered,
            lowered_bytes=lowered,
            norm_table=self.supernet.norms.nbytes(),
            fused_bytes=self._plan.budget.used,
            graphs=0 if self._graphs is None else self._graphs.budget.used,
            budget=self._budget,
            compiled=len(self._plan.compiled),
            unfused={i: reason for i in ids if (reason := self._plan.reason(i))},
        )

    # -- bundles ---------------------------------------------------------------------------------

    def save(self, directory: StrPath) -> None:
        """Write weights, norm table, space, subnets by their `names`, accuracy and `tables` as one bundle.

        Latencies do not depend on the values of weights, so a table that was measured on other weights of
        this engine is written with the fingerprint of the present ones, as long as their dtype is the same.
        Accuracies do depend on them: those of the engine and of its tables are written as they are; replace
        them by `register(spec, accuracy)` and `table.with_accuracy([...])`.

        Args:
            directory: a new or empty directory, or one that holds a bundle, which is then replaced.

        Raises:
            FileFormatError: the directory holds something else than a bundle.
            NotCalibrated: statistics of a subnet were dropped with the weights that they belonged to. Nothing
                is then written.
            StaleWeights: another thread changed weights in place meanwhile. Nothing is then written. Weights
                that are loaded meanwhile do no harm: the bundle holds the former or the new checkpoint.
            ProfileMismatch: a table was measured on weights that this engine is not known to have had, or
                that had another dtype; profile again, or take it out of `tables`. Nothing is then written.
        """
        save_bundle(self.supernet, self.config, self.tables, directory, self._fingerprints.values())

    @classmethod
    def load(
        cls, directory: StrPath, *, supernet: nn.Module | None = None, mapped: bool = False, **options: Any
    ) -> Engine:
        """Read a bundle that `save` wrote. Nothing is unpickled.

        Args:
            directory: the bundle.
            supernet: for an own network, a network of the same class and arguments, which the bundle makes
                elastic as it was; if its axes were written by hand, its supernet. The weights of the bundle
                replace its weights. If None, the network is rebuilt by its name.
            mapped: whether the weights of a CPU engine stay in the bundle's file, mapped into memory:
                all processes of a machine that map the same bundle share one copy. A bundle that is saved
                again is another file, so a loaded engine does not change.
            options: further arguments of `Engine`, for example `device` and `memory_budget_mb`.

        Returns:
            An engine with the bundle's subnets, ids, accuracy, example and tables.

        Raises:
            MissingFile: there is no bundle in the directory.
            FileFormatError: a file is missing, truncated, changed, or of a newer schema; the message names
                it.
            ForeignSpec: the given supernet is of another space.
            InsertError: `supernet` is an ordinary network, and the axes were written by hand.
            NotCalibrated: the bundle lacks BatchNorm statistics of a subnet.
            PrecisionError: this machine cannot compute at a precision of the bundle.
        """
        check = options.pop("check", True)
        found, config, tables, fingerprint = load_bundle(directory, supernet, mapped, options)
        engine = object.__new__(cls)
        engine._open(found, config, check)
        engine.tables.update(tables)
        engine._fingerprints[None] = fingerprint
        return engine
