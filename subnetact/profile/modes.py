"""How a profile runs a subnet: the modes of an engine, or ordinary modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like
from subnetact.engine.runtime_program import RUNTIMES
from subnetact.errors import DeviceError, TableError
from subnetact.latency.table import AS_SERVED
from subnetact.supernet.batches import call_with

BACKENDS = {
    "zero-copy": "fused",
    "fused": "fused",
    "graphs": "views",
    "compile": "inductor",
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
}
BESIDE = ("view", "extract")
MODES = (*BACKENDS, *BESIDE)
"""How a subnet is run: by an engine with one of these backends, or as an ordinary module, which shares the
supernet's weights (view) or has its own (extract)."""


def mode_options(mode: str, memory_budget_mb: float | None, served: str = "fused") -> dict[str, Any]:
    """Return the arguments of an `Engine` that runs its subnets in one mode; as served, by that backend."""
    return {
        "memory_budget_mb": 0.0 if mode in ("zero-copy", "compile", *BESIDE) else memory_budget_mb,
        "backend": served if mode == AS_SERVED else BACKENDS.get(mode, "views"),
    }


def check_mode(mode: str, device: torch.device) -> None:
    """Refuse a mode that a device does not have."""
    if mode == "graphs" and device.type != "cuda":
        raise DeviceError(f"mode 'graphs' is for cuda; on {device} choose fused or zero-copy")


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
    """Return an engine that runs all subnets of another one in one mode, and the mode of a `TimedRunner`.

    If no mode is given, it is the one in which the engine runs all of them, or else zero-copy, in which every
    engine can run any. An engine that runs them so already is measured as it is served.
    """
    is_engine = isinstance(engine, Engine)
    present = {engine.mode_of(i) for i in engine.ids} if is_engine else {AS_SERVED}
    if mode == AS_SERVED or (len(present) == 1 and mode in (None, *present)):
        return engine, AS_SERVED
    mode = mode or "zero-copy"
    if mode not in MODES or not is_engine:
        allowed = ", ".join((*MODES, AS_SERVED)) if is_engine else f"{AS_SERVED}; others are for an Engine"
        raise TableError(f"mode: {mode!r} is none of {type(engine).__name__}; choose from {allowed}")
    check_mode(mode, engine.device)
    options = mode_options(mode, engine.config.memory_budget_mb)
    config = replace(engine.config, pinned=(), prepared=(), **options)
    return engine if mode in BESIDE else Engine.from_config(engine.supernet, config), mode


class TimedRunner:
    """Makes the calls to time: of an engine with the `mode_options` of a mode, or of one as it is served."""

    def __init__(self, engine: Any, mode: str = AS_SERVED, sample: Any = None) -> None:
        self.engine, self.mode = engine, mode
        self.facts = {"program": engine.program, "mode": mode}
        # What a journal of an engine that runs its subnets in another way must not have.
        if mode == AS_SERVED and isinstance(engine, Engine):
            modes = {engine.mode_of(i) for i in engine.ids}
            fused = [i for i in engine.ids if engine.is_fused(i)]
            unfused = min(modes - {engine.config.backend}, default=None)
            self.facts |= {"mode": modes.pop()} if len(modes) == 1 else {"fused": fused, "unfused": unfused}
            self.facts |= {"backend": engine.config.backend, "prepared": list(engine.config.prepared)}
        self.sample = engine.sample if sample is None else sample
        self._modules: dict[int, Any] = {}

    @contextmanager
    def prepared(self, subnet: int, batch_size: int) -> Iterator[Callable[[], Any]]:
        """Make a subnet ready at a batch size for as long as the context lasts; yield the call to time."""
        x = batch_like(self.sample, batch_size, self.engine.device)
        run = self.engine.ready(subnet)
        if self.mode in BESIDE:
            make = getattr(self.engine.supernet, "subnet" if self.mode == "view" else "extract")
            self._modules = {subnet: self._modules.get(subnet) or make(run.spec)}  # for the next batch size
            run = partial(call_with, self._modules[subnet])
        if self.mode == "compile":
            self.engine.prepare([batch_size], [subnet])
        if self.mode in ("fused", *RUNTIMES):
            self._pin(subnet)
        with torch.inference_mode():
            yield partial(run, x)

    def _pin(self, subnet: int) -> None:
        """Let a subnet run as a fused program; those that were measured before may take its room."""
        pinned = self.engine.pin(subnet)
        if not pinned:
            for other in self.engine.pinned:
                self.engine.unpin(other)
            pinned = self.engine.pin(subnet)
        if not pinned:
            raise TableError(
                f"mode {self.mode!r}: subnet {self.engine.keys[subnet]} runs as a view: {pinned.reason}; "
                "give more with --memory-budget-mb, or choose another mode"
            )
