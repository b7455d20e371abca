"""How a profile runs a subnet: the modes of an engine, and what a timed call includes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like
from subnetact.errors import DeviceError, TableError
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, map_tensors

MODES = ("zero-copy", "fused", "graphs", "compile", "view", "extract")
"""How a subnet is run: by an engine in four ways, or as an ordinary module, with the supernet's weights or its own."""
AS_SERVED = "as served"
"""Each subnet as the engine runs it, some as fused programs and others not: a mixture."""
BY_ENGINE, BESIDE = MODES[:4], MODES[4:]
INCLUDES = ("h2d",)


def mode_options(mode: str, memory_budget_mb: float | None) -> dict[str, Any]:
    """Return the arguments of an `Engine` that runs its subnets in one mode."""
    return {
        "memory_budget_mb": memory_budget_mb if mode in ("fused", "graphs") else 0.0,
        "fuse": mode == "fused",
        "compile": "inductor" if mode == "compile" else None,
    }


def check_mode(mode: str, include: Sequence[str], device: torch.device) -> None:
    """Refuse a mode, or an addition to the timed call, that a device does not have."""
    if mode not in (*MODES, AS_SERVED):
        raise TableError(f"mode: {mode!r} is unknown; choose from {', '.join((*MODES, AS_SERVED))}")
    if mode == "graphs" and device.type != "cuda":
        raise DeviceError(f"mode 'graphs' is for cuda; on {device} choose fused or zero-copy")
    if "h2d" in include and device.type == "cpu":
        raise DeviceError("include: on a CPU no input is copied to a device; leave h2d out")


def check_beside(beside: Sequence[str], engine: Any) -> None:
    """Refuse what is not measured beside another mode: only ordinary modules of an Engine's subnets are."""
    wrong = [mode for mode in beside if mode not in BESIDE or not isinstance(engine, Engine)]
    if wrong or len(set(beside)) < len(beside):
        raise TableError(f"beside: {list(beside)}; choose from {', '.join(BESIDE)}, of the subnets of an Engine")


def run_facts(mode: str, include: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a table's stamp that say how its subnets were run."""
    return {"program": "engine", "mode": mode, "include_h2d": "h2d" in include}


class ScriptedProgram:
    """What `to_torchscript` wrote and `torch.jit.load` returned, as `profile_latency` runs it."""

    program = "torchscript"

    def __init__(self, module: Any) -> None:
        if not hasattr(module, "limits"):
            raise TableError(
                "this TorchScript module does not say what it takes; load a file that to_torchscript wrote"
            )
        self._module = module
        self.keys = tuple(module.keys)
        self.ids = tuple(range(len(self.keys)))
        self.accuracy = tuple(None if math.isnan(percent) else percent for percent in module.accuracy)
        self.device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        self.fingerprint, self.space = module.facts["fingerprint"], module.facts["space"]
        dtypes = [getattr(torch, line.split()[1]) for line in module.inputs]
        largest = [[most for _, _, most in limits[1:]] for limits in module.limits]
        self.samples = [
            tuple(torch.ones(size, dtype=dtype) for size, dtype in zip(largest, dtypes, strict=True))
        ]

    def ready(self, subnet: int) -> Callable[[Any], Any]:
        """Return the callable of a subnet, a function of a tuple of tensors, one batch."""
        number = torch.tensor([subnet])
        return lambda x: self._module(*x, number)


def engine_in_mode(engine: Any, mode: str | None) -> tuple[Any, str]:
    """Return an engine that runs all subnets of another one in one mode, and the mode.

    If none is given, it is the one in which the engine runs all of them, or else zero-copy, in which every
    engine can run any. An engine that does so already is returned itself.
    """
    if not isinstance(engine, Engine):
        if mode not in (None, AS_SERVED):
            raise TableError(f"mode: {mode!r} is for an Engine; what was exported runs {AS_SERVED}")
        return engine, AS_SERVED
    present = {engine.mode_of(i) for i in engine.ids}
    mode = mode or (present.pop() if len(present) == 1 else "zero-copy")
    check_mode(mode, (), engine.device)
    if mode not in BY_ENGINE or {engine.mode_of(i) for i in engine.ids} == {mode}:
        return engine, mode
    options = mode_options(mode, engine.config.memory_budget_mb)
    return Engine.from_config(engine.supernet, replace(engine.config, pinned=(), prepared=(), **options)), mode


class TimedRunner:
    """Makes the calls to time, in one mode, of an engine with its `mode_options`, or as the engine is served."""

    def __init__(
        self,
        engine: Any,
        mode: str = AS_SERVED,
        include: Sequence[str] = (),
        sample: Any = None,
        prepares: bool = True,
    ) -> None:
        self.engine, self.mode, self.facts = engine, mode, run_facts(mode, include)
        self.facts["program"] = engine.program
        # What a journal of an engine that runs its subnets in another way must not have.
        if isinstance(engine, Engine) and mode in (AS_SERVED, "compile"):
            config = engine.config
            self.facts |= {"compile": config.compile, "prepared": list(config.prepared)}
        if isinstance(engine, Engine) and mode == AS_SERVED:
            self.facts["fused"] = [i for i in engine.ids if engine.is_fused(i)]
        self.sample = engine.sample if sample is None else sample
        self._prepares = prepares and mode == "compile"
        self._inputs: dict[int, Any] = {}
        self._network: dict[int, Any] = {}

    @contextmanager
    def prepared(self, subnet: int, batch_size: int) -> Iterator[Callable[[], Any]]:
        """Make a subnet ready at a batch size for as long as the context lasts; yield the call to time."""
        if batch_size not in self._inputs:
            self._inputs = {batch_size: batch_like(self.sample, batch_size, self.engine.device)}
        x = self._inputs[batch_size]
        run = self.engine.ready(subnet)
        if self.mode in BESIDE:
            run = partial(call_with, self._module(subnet, run.spec))
        elif self._prepares:
            self.engine.prepare([batch_size], [subnet])
        elif self.mode == "fused" and not self.engine.is_fused(subnet):
            self._pin(subnet)
        with torch.inference_mode():
            if self.facts["include_h2d"]:
                host, device = map_tensors(lambda part: part.cpu().pin_memory(), x), self.engine.device
                yield lambda: run(map_tensors(lambda part: part.to(device, non_blocking=True), host))
            else:
                yield lambda: run(x)

    def _module(self, subnet: int, spec: SubnetSpec) -> Any:
        """Return the ordinary module of a subnet; the last one is kept, for the next batch size."""
        if subnet not in self._network:
            supernet = self.engine.supernet
            self._network = {subnet: supernet.subnet(spec) if self.mode == "view" else supernet.extract(spec)}
        return self._network[subnet]

    def _pin(self, subnet: int) -> None:
        """Let a subnet run as a fused program; those that were measured before may take its room."""
        pinned = self.engine.pin(subnet)
        if not pinned:
            for other in self.engine.pinned:
                self.engine.unpin(other)
            pinned = self.engine.pin(subnet)
        if not pinned:
            raise TableError(
                f"mode 'fused': subnet {self.engine.keys[subnet]} is no fused program: {pinned.reason}; "
                "give more with --memory-budget-mb, or choose another mode"
            )
