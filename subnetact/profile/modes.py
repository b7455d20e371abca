"""How a profile runs a subnet: the modes of an engine, and what a timed call includes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like, call_with, map_tensors
from subnetact.errors import DeviceError, TableError
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["INCLUDES", "MODES", "TimedCall", "TimedRunner", "check_mode", "engine_for", "run_facts"]

MODES = {
    "eager": "call the subnet's view as a plain PyTorch module",
    "zero-copy": "an engine without a memory budget: no weight is copied, inputs are channels_last",
    "fused": "every subnet as a fused program: BatchNorm folded, activations fused; CUDA graphs on CUDA",
    "graphs": "CUDA graphs of the subnets' views (CUDA only)",
    "compile": "torch.compile (inductor) of every subnet at every batch size",
}
"""The modes of `--mode`, and what each of them does."""

MEMORY_BUDGET_MB = 2048.0
"""MiB for fused programs and CUDA graphs, in modes that have them, unless a user says otherwise."""

INCLUDES = {
    "actuation": "switching to the subnet",
    "h2d": "the copy of the input to the device (CUDA only)",
}
"""What `--include` adds to the timed call."""


def engine_for(
    supernet: Supernet,
    specs: Sequence[SubnetSpec],
    mode: str,
    *,
    example: Any,
    device: str | torch.device,
    memory_budget_mb: float = MEMORY_BUDGET_MB,
    accuracy: Sequence[float | None] | None = None,
) -> Engine:
    """Return an engine that runs its subnets in one mode; subnets without statistics are accepted."""
    check_mode(mode, (), torch.device(device))
    return Engine(
        supernet,
        specs,
        example=example,
        device=device,
        memory_budget_mb=memory_budget_mb if mode in ("fused", "graphs") else 0.0,
        accuracy=accuracy,
        allow_uncalibrated=True,
        fuse=mode == "fused",
        compile="inductor" if mode == "compile" else None,
    )


def check_mode(mode: str, include: Sequence[str], device: torch.device) -> None:
    """Refuse a mode, or an addition to the timed call, that does not exist on a device."""
    if mode not in MODES:
        raise TableError(f"mode: {mode!r} is unknown; choose from {', '.join(MODES)}")
    for name in include:
        if name not in INCLUDES:
            raise TableError(f"include: {name!r} is unknown; choose from {', '.join(INCLUDES)}")
    if mode == "graphs" and device.type != "cuda":
        raise DeviceError(f"mode 'graphs' is for cuda; on {device} choose fused or zero-copy")
    if "h2d" in include and device.type == "cpu":
        raise DeviceError("include: on a CPU no input is copied to a device; leave h2d out")


def run_facts(mode: str, include: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a table's stamp that say how its subnets were run."""
    return {
        "mode": mode,
        **{f"include_{name}": name in include for name in INCLUDES},
        "channels_last": mode != "eager",
    }


@dataclass(frozen=True)
class TimedCall:
    """A call to time; `before` is called untimed before each timed call."""

    call: Callable[[], Any]
    before: Callable[[], Any] | None = None


class TimedRunner:
    """Makes the calls to time: subnets of an engine, in one mode, on inputs like `sample`.

    The engine is one of `engine_for` for the same mode; for mode `zero-copy`, any engine. With `actuation`
    the time of choosing the subnet counts: in mode `eager` that of `supernet.actuate(spec)` after another
    subnet was active, in other modes that of the engine's look-up. With `h2d` the copy of the input counts.
    """

    def __init__(
        self, engine: Engine, mode: str = "zero-copy", include: Sequence[str] = (), sample: Any = None
    ) -> None:
        check_mode(mode, include, engine.device)
        self.engine = engine
        self._sample = sample
        self.device = engine.device
        self.keys = engine.keys
        self.mode = mode
        self.facts = run_facts(mode, include)
        self._include = tuple(include)
        self._inputs: dict[int, Any] = {}

    @property
    def sample(self) -> Any:
        """The input that batches resemble, without a batch dimension."""
        return self.engine.sample if self._sample is None else self._sample

    @contextmanager
    def prepared(self, subnet: int, batch_size: int) -> Iterator[TimedCall]:
        """Make a subnet ready at a batch size for as long as the context lasts; yield the call to time."""
        x = self._input(batch_size)
        run, before = self._run(subnet)
        if self.mode == "compile":
            self.engine.prepare([batch_size], [subnet])
        if self.mode == "fused":
            pinned = self.engine.pin(subnet)
            if not pinned:  # Those that were measured before may take its room.
                for other in self.engine.pinned:
                    self.engine.unpin(other)
                pinned = self.engine.pin(subnet)
            if not pinned:
                raise TableError(
                    f"mode 'fused': subnet {self.keys[subnet]} is no fused program: {pinned.reason}; "
                    "give more with --memory-budget-mb, or choose another mode"
                )
        with torch.inference_mode():
            if "h2d" in self._include:
                host = map_tensors(lambda part: part.cpu().pin_memory(), x)
                copied = partial(map_tensors, lambda part: part.to(self.device, non_blocking=True), host)
                yield TimedCall(lambda: run(copied()), before)
            else:
                yield TimedCall(lambda: run(x), before)

    def _run(self, subnet: int) -> tuple[Callable[[Any], Any], Callable[[], Any] | None]:
        engine, supernet = self.engine, self.engine.supernet
        actuates = "actuation" in self._include
        if self.mode != "eager":
            if actuates:
                return lambda x: engine(x, subnet=subnet), None
            return engine.ready(subnet), None
        spec = engine.specs[subnet]
        if not actuates:
            return partial(call_with, supernet.subnet(spec)), None
        other = engine.specs[engine.ids[0] if subnet != engine.ids[0] else engine.ids[-1]]
        supernet.subnet(spec)

        def actuate_and_run(x: Any) -> Any:
            supernet.actuate(spec)
            return call_with(supernet, x)

        return actuate_and_run, lambda: supernet.actuate(other)

    def _input(self, batch_size: int) -> Any:
        if batch_size not in self._inputs:
            x = batch_like(self.sample, batch_size)
            self._inputs = {batch_size: map_tensors(lambda part: part.to(self.device), x)}
        return self._inputs[batch_size]
