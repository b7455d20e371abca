"""Plan: which subnets run as programs of their own: fused ones, or those of another runtime (`backend=`).

The plan is made with the engine, or by the first batch if the engine was given no example, and made again
when subnets are registered, removed, pinned or unpinned, and by `prepare`. Nothing else adds to it: neither
how often a subnet is used nor how long a call takes. It goes through the subnets in order: the pinned ones
first, in the order in which they were pinned, and then the others in the order of their ids. A subnet becomes
a program if

0. something may be a program at all: not with a backend of torch.compile, with `backend="views"` or with a
   budget of 0, and not before an example is known; and the subnet is at float32 or int8;
1. it is pinned, or another runtime was asked for, or `slower_because` knows no reason why a fused program
   would be slower here than its view;
2. its program fits in what is left of the memory budget (`memory_budget_mb=`; by default 1.25 times the
   weights, at most 1 GiB: `budget.py`), of which CUDA graphs have one half on CUDA devices. Programs grow
   with new shapes of inputs, which the next plan counts; and
3. its program can be made and gives the outputs of the view, for two inputs.

`Engine.stats().unfused` says of the others why, one line per subnet. They run as views; on CPUs, the next
call makes of those with convolutions at float32 a program without weights, which packs slices in every call.

After weights or statistics have changed, the next call of a planned subnet makes its program again. The plan
stays as it is, unless the new program cannot be made or no longer gives the outputs of the view; the subnet
is then tried by the next plan after a further change. If memory is short, the view answers and the next call
tries again; a subnet that is not in the plan yet is tried with the next plan. If weights change while a
program is made, the view answers, and the next call makes the program, whether it was planned before or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.comparison import FUSED as TOLERANCE
from subnetact.comparison import equal, is_as_near
from subnetact.device import raise_if_explained, ran_out_of_memory
from subnetact.engine.budget import Budget
from subnetact.engine.config import FUSED
from subnetact.engine.finite_values import strange_samples
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.input_shapes import InputShapes
from subnetact.engine.inputs import batch_like, laid_out
from subnetact.engine.packed_conv import can_pack, plain_conv
from subnetact.engine.packed_linear import can_pack_linear, packing_pays
from subnetact.engine.ready_subnet import Bound, ReadySubnet
from subnetact.engine.runtime_program import RUNTIMES, RuntimeProgram
from subnetact.errors import StaleWeights, SubnetActError, first_line
from subnetact.files.fork import new_lock
from subnetact.operators.lowered_weight import LowConv
from subnetact.operators.outside_modes import outside_modes
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.check import SHOW_AFTER_S
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view

FUSABLE_PRECISIONS = (FLOAT32, "int8")
"""The precisions at which subnets can become fused programs."""
SMALL_INT8 = 2**20
"""Bytes of int8 kernels below which quantising the inputs takes longer than the products that it saves."""

Program: TypeAlias = FusedProgram | RuntimeProgram
"""A subnet with weights of its own. If it is `plain`, it does not want images in channels_last; if it
`swallows_nan`, the view has to answer samples of NaN, infinite or huge values."""

_log = logging.getLogger("subnetact.engine")


def slower_because(view: nn.Module, device: torch.device) -> str:
    """Return why the program of a view is not expected to be faster here; "" if it is expected to be."""
    # Shares of the view's time, measured (benchmarks/results: engine, attention, precision, linear, trials):
    # convolutions 0.45 to 0.89; linear layers 0.58 to 0.99, on AMD CPUs without AVX-512 0.89 to 1.07; int8
    # convolutions of OFA networks 0.30 to 0.91, of the digits supernet 0.77 to 2.0, by batch size.
    modules = list(view.modules())
    kernels = [p for m in modules if isinstance(m, LowConv) for p in nn.Module.parameters(m, recurse=False)]
    int8 = sum(p.numel() for p in kernels if p.dtype == torch.int8)
    if 0 < int8 < SMALL_INT8:
        return f"int8 kernels of {int8} bytes are too small to gain from a fused program; pin it nevertheless"
    if any(isinstance(module, nn.Conv2d) for module in modules) or (device.type == "cpu" and packing_pays()):
        return ""
    return "without convolutions, fused programs are not faster on this machine; pin it nevertheless"


@dataclass(frozen=True)
class PinResult:
    """The answer of `Engine.pin`. It is true if the subnet runs as a fused program now.

    Attributes:
        fused: whether the subnet is a fused program now.
        reason: why it is not, in one line. It is empty if the subnet is fused.
    """

    fused: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.fused


@dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A program, what it was made of, and when. `holder` is whose bytes the budget counts."""

    program: Program
    bound: Bound
    moment: Any
    holder: object

    def is_of(self, bound: Bound) -> bool:
        """Tell whether it was made of the weights and statistics of a view, as far as that can be seen."""
        return self.bound.statistics_row is bound.statistics_row and bool(self.moment == bound.moment())

    def __call__(self, x: Any) -> Any:
        """Run a batch; the view answers samples that the program would answer wrongly, and no others."""
        view = self.bound.view
        if isinstance(x, Tensor) and not x.numel():
            return view(x)
        refused = self.refused(x)
        if not refused:
            return self.program(x)
        x = laid_out(x)
        if len(refused) < len(x):
            at = torch.tensor(refused)
            answers = self.program(x.index_fill(0, at, 0))  # of the same size, on which rounding may depend
            # They are one tensor: `overflows` lets no other program swallow NaN.
            if answers.shape[:1] == x.shape[:1]:
                return answers.index_copy(0, at, view(laid_out(x[at])))
        return view(x)

    def refused(self, x: Any) -> list[int]:
        """Return the positions of the samples that the program would not answer as the view does."""
        checked = self.program.swallows_nan and isinstance(x, Tensor) and x.is_floating_point()
        return strange_samples(x) if checked else []


class _Reason(NamedTuple):
    """Why a subnet runs as a view; until the weights change, if it has their moment."""

    text: str
    moment: Any = None


@dataclass(eq=False)
class Plan:
    """The plan of one engine. `never` says why there are no programs at all; it is empty if there may be.

    Under autocast, which `_casts` tells, views run. What `compiles` runs only the batch sizes of `prepare`.
    """

    _supernet: Supernet
    budget: Budget
    _bind: Callable[[ReadySubnet], Bound]
    _shapes: InputShapes
    _casts: Callable[[], bool]
    never: str
    backend: str = FUSED
    pinned: tuple[int, ...] = ()
    _making: Any = field(default_factory=new_lock)
    _programs: dict[int, PlannedProgram | None] = field(default_factory=dict)  # None: made by the next call
    _reasons: dict[int, _Reason] = field(default_factory=dict)
    _slower: dict[int, str] = field(default_factory=dict)  # what `slower_because` said
    _unpacked: set[int] = field(default_factory=set)  # whose programs read their slices in every call
    _views: dict[int, Any] = field(default_factory=dict)  # the moments for which that failed
    _sizes: dict[int, int] = field(default_factory=dict)  # bytes of programs, estimated until they were made
    _level: int = logging.WARNING  # of the first failure
    compiled: dict[int, Any] = field(default_factory=dict)  # of plans that compile
    sealed: bool = False
    compiles: ClassVar[bool] = False

    def __contains__(self, subnet: int) -> bool:
        return subnet in self._programs and subnet not in self._unpacked

    def runs(self, subnet: int) -> bool:
        """Tell whether a subnet runs as a program, with weights of its own or without."""
        return subnet in self._programs

    def reason(self, subnet: int) -> str:
        """Return why a subnet runs as a view, in one line; "" if it is fused."""
        if subnet in self:
            return ""
        unknown = _Reason("the engine has seen no input yet; give it example=")
        return self.never or self._reasons.get(subnet, unknown).text

    def program(self, subnet: ReadySubnet, bound: Bound) -> PlannedProgram | None:
        """Return the program of a planned subnet, made again if necessary; None if the view has to run."""
        if self._casts():
            return None
        found = self._programs.get(subnet.id)
        if found is not None and found.is_of(bound):
            return found
        if subnet.id not in self._programs or not self._making.acquire(blocking=False):
            return None  # Another thread makes programs; views answer meanwhile.
        try:
            found = self._programs.get(subnet.id)
            if subnet.id not in self._programs or (found is not None and found.is_of(bound)):
                return found
            self._release(subnet.id)
            self._programs[subnet.id] = None
            with suppress(StaleWeights):  # During `functional_call`; the next call tries again.
                made = self._made(subnet, bound)
                if isinstance(made, PlannedProgram):
                    self._programs[subnet.id] = made
                    return made
                if made is not None and made.moment is not None and subnet.id in self:
                    self._leave_out(subnet.id, made)
                elif made is not None and made.moment is not None:
                    self._unpacked.discard(subnet.id)
                    self._views[subnet.id] = made.moment
                    del self._programs[subnet.id]
            return None
        finally:
            self._making.release()

    def prepare(self, subnet: ReadySubnet, x: Any) -> None:
        """Get ready for batches of a shape, before one runs."""

    def change(self, served: Mapping[int, ReadySubnet]) -> None:
        """Make the plan for the subnets that are served now; StaleWeights in a `functional_call`."""
        if self.backend not in (FUSED, *RUNTIMES) or not self._shapes.samples:
            return
        with self._making:
            order = [*self.pinned, *sorted(served.keys() - set(self.pinned))]
            left = self.budget.limit
            progress = any(i not in self._programs and i not in self._reasons for i in order)
            label = f"{self.backend} programs"
            bar = tqdm(order, label, delay=SHOW_AFTER_S, leave=False, disable=not progress or None)
            for place, i in enumerate(bar):
                left -= self._decide(served[i], left, order[:place:-1])

    def drop(self, subnet: int) -> None:
        """Forget a subnet that is no longer served, and its pin."""
        with self._making:
            self.pinned = tuple(i for i in self.pinned if i != subnet)
            self._release(subnet)
            for known in (self._programs, self._reasons, self._slower, self._sizes, self._views):
                known.pop(subnet, None)
            self._unpacked.discard(subnet)

    def _decide(self, subnet: ReadySubnet, left: int, behind: Sequence[int]) -> int:
        """Plan a subnet if it fits in what is `left`, and return its bytes; those `behind` make room."""
        made: PlannedProgram | _Reason | None
        unpacked, known = subnet.id in self._unpacked, self._programs.get(subnet.id)
        known, sliced = (None, known) if unpacked else (known, None)
        try:
            made = self._why_not(subnet, left)
            if made is None and known is not None and known.program.nbytes <= left:
                return known.program.nbytes
            if made is None:
                for other in behind:
                    if self.budget.used + self._sizes[subnet.id] <= self.budget.limit:
                        break
                    self._leave_out(other, _Reason(""))
                self._release(subnet.id)
                self._unpacked.discard(subnet.id)
                made = self._made(subnet, self._bind(subnet))
        except StaleWeights:
            if unpacked:
                self._unpacked.add(subnet.id)
            raise
        except SubnetActError as error:  # It has no statistics, for example.
            made = _Reason(first_line(error))
        if isinstance(made, _Reason):
            self._leave_out(subnet.id, made)
            if self._reads_slices(subnet):
                self._programs[subnet.id] = sliced
                self._unpacked.add(subnet.id)
            return 0
        self._programs[subnet.id] = made
        return self._sizes[subnet.id]

    def _why_not(self, subnet: ReadySubnet, left: int) -> _Reason | None:
        i, precision = subnet.id, subnet.spec.precision
        if self.never:
            return _Reason(self.never)
        if precision not in FUSABLE_PRECISIONS:
            return _Reason(f"a subnet at {precision} runs as a view")
        if i not in self._sizes:
            view = self._bind(subnet).view
            self._slower[i] = slower_because(view, self._supernet.device) if self.backend == FUSED else ""
            packed: Any = (m for m in view.modules() if isinstance(m, nn.Conv2d) or can_pack_linear(m))
            self._sizes[i] = 4 * sum(int(m.weight.numel()) for m in packed)  # about the bytes of its program
        if self._slower[i] and i not in self.pinned:
            return _Reason(self._slower[i])
        known = self._reasons.get(i)
        if known is not None and known.moment is not None and known.moment == self._bind(subnet).moment():
            return known
        return None if self._sizes[i] <= left else self._no_room()

    def _reads_slices(self, subnet: ReadySubnet) -> bool:
        """Tell whether a subnet without packed weights has convolutions that may gain from reading slices."""
        on_cpu = self._supernet.device.type == "cpu" and isinstance(self._shapes.follow().samples[-1], Tensor)
        if not on_cpu or subnet.spec.precision != FLOAT32 or (bound := subnet.bound) is None:
            return False
        if self._views.get(subnet.id) == bound.moment():
            return False
        modules: Any = bound.view.modules()
        return any(plain_conv(m) and can_pack(m.weight) for m in modules)

    def _leave_out(self, subnet: int, reason: _Reason) -> None:
        self._release(subnet)
        self._programs.pop(subnet, None)
        self._reasons[subnet] = reason

    def _release(self, subnet: int) -> None:
        former = self._programs.get(subnet)
        if former is not None:
            self.budget.free(former.holder)

    def _no_room(self) -> _Reason:
        mib = self.budget.limit / 2**20
        return _Reason(f"it does not fit in the budget of {mib:.4g} MiB beside the programs that come first")

    def _made(self, subnet: ReadySubnet, bound: Bound) -> PlannedProgram | _Reason | None:
        """Make a program, or say why there is none; None if the weights changed while it was made."""
        moment, why = bound.moment(), ""
        try:
            program = self._checked(subnet, bound)
        except StaleWeights:
            raise
        except Exception as error:
            why = first_line(error)
            if ran_out_of_memory(error):
                return _Reason(f"memory was short: {why}")
        if self._supernet.state or bound.moment() != moment or not bound.current:
            if not bound.changes_itself(self._probe()):
                return None
            why, moment = "its forward changes its own buffers", bound.moment()
        if why:
            _log.log(self._level, "%s runs as a view, not as a %s program: %s", subnet, self.backend, why)
            self._level = logging.DEBUG
            return _Reason(why, moment)
        holder = object()
        if subnet.id in self._unpacked:
            return PlannedProgram(program, bound, moment, holder)
        self._sizes[subnet.id] = program.nbytes
        if not self.budget.take(holder, program.nbytes):
            return self._no_room()
        program.limit(partial(self.budget.take, holder, grow=True))
        return PlannedProgram(program, bound, moment, holder)

    def _checked(self, subnet: ReadySubnet, bound: Bound) -> Program:
        """Make a program whose outputs for two inputs are those of the view."""
        x, causes, spec = self._probe(), list[Exception](), subnet.spec
        ways: list[Callable[[nn.Module, Any], Program]] = [FusedProgram] if isinstance(x, Tensor) else []
        ways.append(partial(FusedProgram, traced=False))
        if subnet.id in self._unpacked:
            ways = [partial(FusedProgram, packed=False)]
        elif self.backend != FUSED:
            ways = [partial(RuntimeProgram, runtime=self.backend, samples=self._shapes.follow().samples)]
        for way in ways:
            view, statistics_row = private_view(self._supernet, spec)
            if not bound.current or statistics_row is not bound.statistics_row:
                raise ValueError("its weights or statistics were replaced")
            with outside_modes(), torch.inference_mode():
                program = None
                try:
                    program = way(view, x)
                    if not self._outputs_are_equal(program, bound.view, x, spec):
                        raise ValueError(f"the outputs of the {self.backend} program differ from the view's")
                    return program
                except Exception as error:  # The first one says why the network cannot be traced.
                    raise_if_explained(error)
                    causes.insert(len(causes) if program is None else 0, error)
        raise causes[0]

    def _outputs_are_equal(self, program: Program, view: nn.Module, x: Any, spec: SubnetSpec) -> bool:
        output, expected = program(x), call_with(view, x)
        if spec.precision == FLOAT32:
            return equal(output, expected, TOLERANCE)
        # A number may round to another int8 number than in the view, and float32 is between the two.
        exact, _ = private_view(self._supernet, self._supernet.space.at_precision(spec, FLOAT32))
        return is_as_near(output, expected, call_with(exact, x))

    def _probe(self) -> Any:
        """Return a batch of two inputs. A single tensor is random, other inputs are the sample twice."""
        sample, device = self._shapes.follow().samples[-1], self._supernet.device
        if isinstance(sample, Tensor) and sample.is_floating_point():
            return laid_out(batch_like(sample, 2, device))
        return map_tensors(lambda t: torch.stack([t] * 2).to(device), sample)
