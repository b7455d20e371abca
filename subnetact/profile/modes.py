"""How a profile runs a subnet: the modes an engine offers, and what counts into the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like, call_with, map_tensors
from subnetact.errors import DeviceError, TableError
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["MODES", "Runner", "TimedCall", "check_running", "engine_for", "running"]

MODES = {
    "eager": "the subnet's view, called as the plain module it is",
    "zero-copy": "an engine without a budget: no weight copied, channels_last",
    "fused": "every subnet as a fused program: BatchNorm folded, activations fused; CUDA graphs on CUDA",
    "graphs": "CUDA graphs of the subnets' views (CUDA)",
    "compile": "torch.compile (inductor) for every subnet and batch size",
}
"""What `--mode` takes."""


def engine_for(
    supernet: Supernet,
    specs: Sequence[SubnetSpec],
    mode: str,
    *,
    example: Tensor,
    device: str | torch.device,
    memory_budget_mb: float = 2048.0,
    accuracy: Sequence[float | None] | None = None,
) -> Engine:
    """Return an engine that runs its subnets in one of `MODES`; those without statistics are accepted.

    Raises:
        TableError: the mode is unknown.
        DeviceError: the mode is not for this device.
    """
    check_running(mode, False, torch.device(device))
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


def check_running(mode: str, include_h2d: bool, device: torch.device) -> None:
    """Refuse a way of running that a device does not have.

    Raises:
        TableError: the mode is unknown.
        DeviceError: the mode is not for this device, or `include_h2d` on a CPU.
    """
    if mode not in MODES:
        raise TableError(f"mode: {mode!r} is unknown; choose from {', '.join(MODES)}")
    if mode == "graphs" and device.type != "cuda":
        raise DeviceError(f"mode 'graphs' is for cuda; on {device} choose fused or zero-copy")
    if include_h2d and device.type == "cpu":
        raise DeviceError("include_h2d: on a CPU the input is already there; leave it out")


def running(mode: str, include_actuation: bool, include_h2d: bool, channels_last: bool) -> dict[str, Any]:
    """How subnets are run, as a stamp says it; the arguments are `Runner`'s."""
    return {
        "mode": mode,
        "include_actuation": include_actuation,
        "include_h2d": include_h2d,
        "channels_last": channels_last or mode != "eager",
    }


@dataclass(frozen=True)
class TimedCall:
    """What is timed, and what is done untimed before each time."""

    call: Callable[[], Any]
    before: Callable[[], Any] | None = None


class Runner:
    """Calls of an engine's subnets in one mode, on inputs of the engine's example's shape.

    Inputs are normally distributed, from a fixed seed; zeros where they are not floating point.

    Args:
        engine: as `engine_for` made it, or any other with mode `zero-copy`.
        mode: one of `MODES`.
        include_actuation: time choosing the subnet too: `supernet.actuate(spec)` with another one active
            before in mode `eager`, the engine's look-up elsewhere.
        include_h2d: time the copy of the input to the device too, from pinned memory.
        channels_last: memory format of the weights and inputs in mode `eager`; engines always use it.

    Raises:
        DeviceError: `include_h2d` on a CPU.
    """

    def __init__(
        self,
        engine: Engine,
        mode: str = "zero-copy",
        include_actuation: bool = False,
        include_h2d: bool = False,
        channels_last: bool = False,
    ) -> None:
        check_running(mode, include_h2d, engine.device)
        self.engine = engine
        self.device = engine.device
        self.keys = engine.keys
        self.mode = mode
        self.settings = running(mode, include_actuation, include_h2d, channels_last)
        self._actuates = include_actuation
        self._copies = include_h2d
        self._last = channels_last
        self._inputs: dict[int, Any] = {}
        if mode == "eager" and channels_last:
            engine.supernet.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            engine.supernet.refresh()

    @contextmanager
    def prepared(self, subnet: int, batch_size: int) -> Iterator[TimedCall]:
        """Make a subnet ready at a batch size, for as long as the context lasts.

        Raises:
            TableError: it cannot run in this mode.
        """
        x = self._input(batch_size)
        run, before = self._run(subnet)
        if self.mode == "compile":
            self.engine.prepare([batch_size], [subnet])
        if self.mode == "fused" and not self.engine.pin(subnet):
            raise TableError(
                f"mode 'fused': subnet {self.keys[subnet]} cannot become a fused program within the budget; "
                "give more with --budget-mb, or choose another mode"
            )
        try:
            with torch.inference_mode():
                if self._copies:
                    host = map_tensors(lambda part: part.cpu().pin_memory(), x)
                    copied = partial(map_tensors, lambda part: part.to(self.device, non_blocking=True), host)
                    yield TimedCall(lambda: run(copied()), before)
                else:
                    yield TimedCall(lambda: run(x), before)
        finally:
            if self.mode == "fused":
                self.engine.unpin(subnet)

    def _run(self, subnet: int) -> tuple[Callable[[Any], Any], Callable[[], Any] | None]:
        engine, supernet = self.engine, self.engine.supernet
        if self.mode != "eager":
            if self._actuates:
                return lambda x: engine(x, subnet=subnet), None
            return engine.ready(subnet), None
        spec = engine.specs[subnet]
        if not self._actuates:
            return partial(call_with, supernet.subnet(spec)), None
        other = engine.specs[engine.ids[0] if subnet != engine.ids[0] else engine.ids[-1]]
        supernet.subnet(spec)

        def actuate_and_run(x: Any) -> Any:
            supernet.actuate(spec)
            return call_with(supernet, x)

        return actuate_and_run, lambda: supernet.actuate(other)

    def _placed(self, x: Tensor) -> Tensor:
        if self._last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.to(self.device)

    def _input(self, batch_size: int) -> Any:
        if batch_size not in self._inputs:
            self._inputs = {
                batch_size: map_tensors(self._placed, batch_like(self.engine.example, batch_size))
            }
        return self._inputs[batch_size]
