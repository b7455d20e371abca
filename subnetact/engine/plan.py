"""Plan: which subnets are fused.

The plan is made with the engine, and made again when subnets are registered, removed, pinned or unpinned,
and by `prepare`. Nothing else changes it: neither how often a subnet is used nor how long a call takes. It
goes through the subnets in order: the pinned ones first, in the order in which they were pinned, and then the
others in the order of their ids. A subnet becomes a fused program if

1. it is pinned, or `slower_because` knows no reason why its program would be slower here than its view;
2. its program fits in what is left of the memory budget; and
3. its program gives the outputs of the view.

The others run as views. `Engine.stats().unfused` says why, one line per subnet.

After weights or statistics have changed, the next call of a planned subnet makes its program again. The plan
stays as it is, unless the new program no longer gives the outputs of the view.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.comparison import FUSED, SHORT, Tolerance, equal, is_as_near
from subnetact.device import machine_facts, ran_out_of_memory
from subnetact.engine.budget import Budget
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.outputs import replaced_samples
from subnetact.engine.packed_linear import can_pack_linear, is_intel
from subnetact.engine.ready_subnet import Bound, ReadySubnet
from subnetact.errors import StaleWeights, SubnetActError
from subnetact.operators.lowered_weight import LowConv
from subnetact.operators.subnet_norm import BATCH_NORMS
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.generation import is_counter
from subnetact.supernet.storage import checksum
from subnetact.supernet.supernet import Supernet

__all__ = ["PinResult", "Plan", "default_budget", "slower_because"]

BUDGET_PER_WEIGHT = 1.25
"""Bytes of the default budget per byte of the weights: enough for the program of the largest subnet."""
LARGEST_BUDGET = 2**30
"""The default budget is at most so many bytes."""
PRECISIONS = (FLOAT32, "int8")
"""The precisions at which subnets can become fused programs."""
SMALL_INT8 = 2**20
"""Bytes of int8 kernels below which quantising the inputs takes longer than the products that it saves."""
FARTHER = 2.0
"""A program at int8 may be this many times as far from the float32 outputs as the view is, by the norm."""
LOW = Tolerance(2 * SHORT.largest, own=2 * SHORT.largest, least=1.0)
"""How far a program may be from the view if it computes in a dtype that the user chose."""
SHOW_AFTER_S = 2.0
"""Seconds after which a progress bar shows that programs are being made."""

_DIFFERENT = "the outputs of the fused program differ from those of the view"
_log = logging.getLogger("subnetact.engine")


def default_budget(weights: int) -> int:
    """Return the default memory budget, in bytes, of a supernet whose weights take so many bytes."""
    return min(int(BUDGET_PER_WEIGHT * weights), LARGEST_BUDGET)


def slower_because(view: nn.Module, device: torch.device) -> str:
    """Return why the fused program of a view is not expected to be faster here; "" if it is expected to be.

    Measured, as shares of the view's time (`benchmarks/results`: `engine.json`, `attention.json` and
    `precision.json`, there and in `epyc_avx2` and `epyc_vnni`; `linear.json`; `small_int8_programs` in
    `trials.json`): convolutional networks 0.45 to 0.89 on all CPUs; networks of linear layers 0.64 to 0.99 on
    Intel CPUs, 0.58 to 0.82 on AMD CPUs with AVX-512 and 0.89 to 1.07 on those without; int8 convolutions of
    OFA networks 0.30 to 0.91, of the digits supernet 0.71 to 2.2, depending on the batch size.
    """
    modules = list(view.modules())
    kernels = [p for m in modules if isinstance(m, LowConv) for p in nn.Module.parameters(m, recurse=False)]
    int8 = sum(p.numel() for p in kernels if p.dtype == torch.int8)
    if 0 < int8 < SMALL_INT8:
        return f"int8 kernels of {int8} bytes are too small to gain from a fused program; pin it nevertheless"
    convolutional = any(isinstance(module, nn.Conv2d) for module in modules)
    if convolutional:
        return ""
    if device.type == "cpu" and (is_intel() or machine_facts("cpu").aten.startswith("AVX512")):
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
    """A fused program, what it was made of, and when."""

    program: FusedProgram
    bound: Bound
    moment: Any
    sums: Sequence[int]
    holder: object
    """Whose bytes the budget counts; the program itself would hold itself."""

    def is_of(self, bound: Bound) -> bool:
        """Tell whether it was made of the weights and statistics of a view, as far as that can be seen."""
        return self.bound.statistics_row is bound.statistics_row and bool(self.moment == bound.moment())

    def __call__(self, x: Any) -> Any:
        """Run a batch; the view answers samples that the program would answer wrongly, and no others."""
        view = self.bound.view
        if self.program.accepts(x):
            return self.program(x)
        strange = self.program.strange(x) if x.numel() and x.dim() else None
        if strange is None or len(strange) == len(x):
            return call_with(view, x)
        if not len(strange):
            return self.program(x)
        # The batch keeps its size, on which rounding may depend.
        answers = self.program(x.index_fill(0, strange, 0))
        part = x[strange].contiguous(memory_format=_layout(x))
        joined = replaced_samples(answers, call_with(view, part), strange, len(x))
        return call_with(view, x) if joined is None else joined


class Plan:
    """The plan of one engine. `never` says why nothing is fused at all; it is empty if something may be."""

    def __init__(
        self,
        supernet: Supernet,
        budget: Budget,
        dtype: torch.dtype | None,
        bind: Callable[[ReadySubnet], Bound],
        never: str,
    ) -> None:
        self.pinned: tuple[int, ...] = ()
        self.budget = budget
        self._supernet = supernet
        self._dtype = dtype
        self._bind = bind
        self.never = never
        self._making = Lock()
        self._programs: dict[int, PlannedProgram | None] = {}  # None: the next call makes it again
        self._reasons: dict[int, str] = {}
        self._unusable: dict[int, tuple[Any, str]] = {}  # since which moment, and why
        self._slower: dict[int, str] = {}  # what `slower_because` said
        self._sizes: dict[int, int] = {}  # bytes of the programs, estimated until they were made
        self._warned = False

    def __contains__(self, subnet: int) -> bool:
        return subnet in self._programs

    def reason(self, subnet: int) -> str:
        """Return why a subnet runs as a view, in one line; "" if it is fused."""
        unknown = "the engine has seen no input yet; give it example="
        return "" if subnet in self._programs else self.never or self._reasons.get(subnet, unknown)

    def program(self, subnet: ReadySubnet, bound: Bound, sample: Any) -> PlannedProgram | None:
        """Return the program of a planned subnet, made again if necessary; None if the view has to run."""
        if subnet.id not in self._programs:
            return None
        found = self._programs.get(subnet.id)
        if found is not None and found.is_of(bound):
            return found
        with self._making:
            found = self._programs.get(subnet.id)
            if subnet.id not in self._programs or (found is not None and found.is_of(bound)):
                return found
            self._release(subnet.id)
            self._programs[subnet.id] = found = None
            with suppress(StaleWeights):  # During `functional_call`; the next call tries again.
                found, why = self._made(subnet, bound, sample)
                if subnet.id in self._unusable:
                    self._leave_out(subnet.id, why)
                else:
                    self._programs[subnet.id] = found
            return found

    def change(self, served: Mapping[int, ReadySubnet], sample: Any) -> None:
        """Make the plan for the subnets that are served and pinned now.

        Raises:
            StaleWeights: `functional_call` runs on the supernet, whose tensors a program must not keep.
        """
        if self.never or sample is None:
            return
        with self._making:
            order = [*self.pinned, *sorted(served.keys() - set(self.pinned))]
            left = self.budget.limit
            progress = any(i not in self._programs and i not in self._reasons for i in order)
            for place, i in enumerate(
                tqdm(order, "fused programs", delay=SHOW_AFTER_S, leave=False, disable=not progress or None)
            ):
                left -= self._decide(served[i], left, order[:place:-1], sample)

    def drop(self, subnet: int) -> None:
        """Forget a subnet that is no longer served, and its pin."""
        with self._making:
            self.pinned = tuple(i for i in self.pinned if i != subnet)
            self._leave_out(subnet, "")
            for known in (self._reasons, self._unusable, self._slower, self._sizes):
                known.pop(subnet, None)

    def stale(self) -> list[int]:
        """Return the ids whose programs do not match the weights although they look fresh."""
        kept = [(i, made) for i, made in list(self._programs.items()) if made is not None]
        kept = [(i, made) for i, made in kept if made.bound.current and made.is_of(made.bound)]
        return [i for i, made in kept if checksum(_read_by(made.bound)) != made.sums]

    def make_again(self, subnets: Iterable[int]) -> None:
        """Let the next calls of planned subnets make their programs again."""
        with self._making:
            for i in self._programs.keys() & set(subnets):
                self._release(i)
                self._programs[i] = None

    def _decide(self, subnet: ReadySubnet, left: int, behind: Sequence[int], sample: Any) -> int:
        """Put a subnet into the plan if it fits in the bytes that are left, and return what it takes of them.

        `behind` are the subnets behind it in the plan, which make room, the last one first.
        """
        known, made = self._programs.get(subnet.id), None
        try:
            why = self._why_not(subnet, left)
            if not why and known is not None and known.program.nbytes <= left:
                return known.program.nbytes
            if not why:
                for other in behind:
                    if self.budget.used + self._sizes[subnet.id] <= self.budget.limit:
                        break
                    self._leave_out(other, "")
                self._release(subnet.id)
                made, why = self._made(subnet, self._bind(subnet), sample)
        except StaleWeights:
            raise
        except SubnetActError as error:  # It has no statistics, for example.
            why = " ".join(str(error).split())
        if made is None:
            self._leave_out(subnet.id, why)
            return 0
        self._programs[subnet.id] = made
        return made.program.nbytes

    def _why_not(self, subnet: ReadySubnet, left: int) -> str:
        i, precision = subnet.id, subnet.spec.precision
        if precision not in PRECISIONS:
            return f"a subnet at {precision} runs as a view"
        if i not in self._sizes:
            bound = self._bind(subnet)
            self._slower[i], self._sizes[i] = slower_because(bound.view, bound.device), self._size(bound.view)
        if self._slower[i] and i not in self.pinned:
            return self._slower[i]
        if i in self._unusable and self._unusable[i][0] == self._bind(subnet).moment():
            return self._unusable[i][1]
        return "" if self._sizes[i] <= left else self._no_room()

    def _leave_out(self, subnet: int, why: str) -> None:
        self._release(subnet)
        self._programs.pop(subnet, None)
        self._reasons[subnet] = why

    def _release(self, subnet: int) -> None:
        former = self._programs.get(subnet)
        if former is not None:
            self.budget.free(former.holder)

    def _no_room(self) -> str:
        mib = self.budget.limit / 2**20
        return f"it does not fit in the budget of {mib:.4g} MiB beside the programs that come first"

    def _size(self, view: nn.Module) -> int:
        """Return about how many bytes the program of a view takes."""
        modules: Iterable[Any] = view.modules()
        layers = [m for m in modules if isinstance(m, nn.Conv2d) or can_pack_linear(m)]
        size: int = 4 if self._dtype is None else self._dtype.itemsize
        return size * sum(int(layer.weight.numel()) for layer in layers)

    def _made(self, subnet: ReadySubnet, bound: Bound, sample: Any) -> tuple[PlannedProgram | None, str]:
        """Make a program, or say why there is none; `_unusable` keeps what only other weights can change."""
        self._unusable.pop(subnet.id, None)
        moment, sums, why = bound.moment(), checksum(_read_by(bound)), ""
        try:
            program = self._checked(subnet.spec, bound, sample)
        except StaleWeights:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            if ran_out_of_memory(error):
                return None, f"memory was short: {why}"
        if bound.moment() != moment or not bound.current:
            if not bound.changes_itself(_probe(sample, bound.device)):
                return None, "weights changed while it was made"
            why, moment = "its forward changes its own buffers", bound.moment()
        if why:
            self._unusable[subnet.id] = moment, why
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(level, "%s runs as a view, not as a fused program: %s", subnet, why)
            return None, why
        self._sizes[subnet.id] = program.nbytes
        holder = object()
        if not self.budget.take(holder, program.nbytes):
            return None, self._no_room()
        program.limit(partial(self.budget.take, holder, grow=True))
        return PlannedProgram(program, bound, moment, sums, holder), ""

    def _checked(self, spec: SubnetSpec, bound: Bound, sample: Any) -> FusedProgram:
        """Make a program whose outputs for two random inputs are those of the view."""
        x = _probe(sample, bound.device)
        causes: list[Exception] = []
        for traced in (True, False) if isinstance(x, Tensor) else (False,):
            view, statistics_row = self._supernet.private_view(spec)
            if not bound.current or statistics_row is not bound.statistics_row:
                raise ValueError("its weights or statistics were replaced")
            with torch.inference_mode():
                try:
                    program = FusedProgram(view, self._dtype, x, traced)
                except Exception as error:  # The first one says why the network cannot be traced.
                    causes.append(error)
                    continue
                try:
                    if self._outputs_are_equal(program, bound.view, x, spec):
                        return program
                    causes.insert(0, ValueError(_DIFFERENT))
                except Exception as error:
                    causes.insert(0, error)
        raise causes[0]

    def _outputs_are_equal(self, program: FusedProgram, view: nn.Module, x: Any, spec: SubnetSpec) -> bool:
        output, expected = program(x), call_with(view, x)
        if spec.precision == FLOAT32:
            return equal(output, expected, FUSED if self._dtype is None else LOW)
        # A number may round to another int8 number than in the view, and float32 is between the two.
        exact, _ = self._supernet.private_view(self._supernet.space.at_precision(spec, FLOAT32))
        return is_as_near(output, expected, call_with(exact, x), FARTHER)


def _read_by(bound: Bound) -> list[Tensor]:
    """Return the tensors that a program depends on; what a packed copy is made of, for that is never late."""
    row = bound.statistics_row
    found: list[Any] = list(bound.view.parameters())
    for module in bound.view.modules():
        if row is None or not isinstance(module, BATCH_NORMS):
            found += [b for b in module._buffers.values() if b is not None and not is_counter(b)]
    found += [] if row is None else [row.flat]
    return [source for t in found for source in (t.packed.sources if hasattr(t, "packed") else [t])]


def _layout(x: Tensor) -> torch.memory_format:
    """Return the memory format in which engines run a batch of single tensors."""
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def _probe(sample: Any, device: torch.device) -> Any:
    """Return a batch of two inputs. A single tensor is random, other inputs are the example twice."""
    if isinstance(sample, Tensor) and sample.is_floating_point():
        shape, generator = (2, *sample.shape), torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator, dtype=sample.dtype).to(device)
        return x.contiguous(memory_format=_layout(x))
    return map_tensors(lambda t: torch.stack([t] * 2).to(device), sample)
