"""EngineConfig: everything that an engine consists of, apart from its supernet.

`Engine(...)` makes one of its arguments, and `Engine.config` is the present one. Worker processes get it
together with the supernet, and bundles hold what `to_json` returns. `Engine.from_config` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from subnetact.device import find_device
from subnetact.engine.cuda_graphs import GraphBackend
from subnetact.engine.input_shapes import Padding
from subnetact.engine.inputs import sample_from_json, sample_to_json
from subnetact.errors import EngineError, SpecError
from subnetact.latency.arrays import warn_of_fractions
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["EngineConfig", "budget_bytes", "check_weights", "percentage"]


@dataclass(frozen=True, eq=False)
class EngineConfig:
    """Everything that an engine consists of, apart from its supernet.

    Attributes:
        specs: all subnets that were registered, in id order.
        accuracy: of each subnet in percent, or None if it is not known.
        removed: the ids that are not served any more.
        pinned: the ids of pinned subnets, in the order in which they were pinned.
        prepared: the batch sizes of the last call of `Engine.prepare`.
        sample: one input without batch axis, the first of the example or of what ran; a list if the engine
            serves several shapes.
        padding: as in `Engine`, like all that follow.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own are accepted.
        device: where subnets run. If None, the supernet stays where it is.
        memory_budget_mb: MiB that fused programs and graphs may take. If None, the default.
        fuse: whether subnets may become fused programs.
        fused_dtype: what fused programs compute in. If None, the dtype of the weights.
        compile: a torch.compile backend, or None.
        graph_backend: what captures graphs, or None.
    """

    specs: Sequence[SubnetSpec]
    accuracy: Sequence[float | None] | None = None
    removed: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    prepared: tuple[int, ...] = ()
    sample: Any = None
    padding: Padding = None
    allow_uncalibrated: bool = False
    device: str | torch.device | None = None
    memory_budget_mb: float | None = None
    fuse: bool = True
    fused_dtype: torch.dtype | None = None
    compile: str | None = None
    graph_backend: GraphBackend | None = None

    def checked(self, supernet: Supernet) -> EngineConfig:
        """Return the configuration with canonical specifications and numbers, if it fits a supernet.

        Args:
            supernet: the supernet.

        Raises:
            DeviceError: torch cannot use the device.
            EngineError: an id is no position in `specs`, the budget is no number of MiB, or `fused_dtype` no
                floating-point dtype.
            SpecError: there are no specifications, one is repeated or of another space, the number of
                accuracies differs from the number of subnets, or an accuracy is no percentage.
        """
        specs = tuple(supernet.distinct(self.specs, "an engine"))
        for i in (*self.removed, *self.pinned):
            if type(i) is not int or not 0 <= i < len(specs):
                raise EngineError(f"removed or pinned: {i!r} is no position of the {len(specs)} subnets")
        budget_bytes(self.memory_budget_mb, 0)
        if self.device is not None:
            find_device(self.device)
        dtype: Any = self.fused_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise EngineError(
                f"fused_dtype: {dtype!r} is no floating-point dtype of torch; give torch.bfloat16 for "
                "example, or None for the dtype of the weights"
            )
        return replace(self, specs=specs, accuracy=_percentages(self.accuracy, specs))

    def to_json(self) -> dict[str, Any]:
        """Return what does not depend on the machine, as JSON: the fields up to `allow_uncalibrated`."""
        return {
            "subnets": [spec.to_json() for spec in self.specs],
            "accuracy": list(self.accuracy or [None] * len(self.specs)),
            "removed": sorted(self.removed),
            "pinned": list(self.pinned),
            "sample": sample_to_json(self.sample),
            "padding": list(map(list, self.padding.items()))
            if isinstance(self.padding, Mapping)
            else self.padding,
            "allow_uncalibrated": self.allow_uncalibrated,
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any], space: SubnetSpace) -> EngineConfig:
        """Return what `to_json` described.

        Args:
            described: the document.
            space: the search space of the subnets.

        Raises:
            KeyError: a field is missing.
            SpecError: a subnet is not of this space.
            TypeError: a field is of another type.
            ValueError: ids, accuracies and subnets do not belong together.
        """
        specs = tuple(space.check(SubnetSpec.from_json(spec)) for spec in described["subnets"])
        accuracy = tuple(map(_stored_percentage, described["accuracy"]))
        removed, pinned = tuple(described["removed"]), tuple(described["pinned"])
        if not all(type(i) is int and 0 <= i < len(specs) for i in (*removed, *pinned)):
            raise ValueError(f"removed ids {removed!r}, pinned ids {pinned!r}")
        if not 0 < len(set(specs)) == len(specs) == len(accuracy):
            raise ValueError("subnets and accuracy do not belong together")
        padding, allow = described["padding"], described["allow_uncalibrated"]
        if type(allow) is not bool:
            raise ValueError(f"allow_uncalibrated {allow!r}")
        return cls(
            specs,
            accuracy,
            removed,
            pinned,
            sample=sample_from_json(described["sample"]),
            padding=dict(padding) if isinstance(padding, list) else padding,
            allow_uncalibrated=allow,
        )


def _percentages(accuracy: Any, specs: Sequence[SubnetSpec]) -> tuple[float | None, ...]:
    if accuracy is None:
        return (None,) * len(specs)
    if isinstance(accuracy, str) or not hasattr(accuracy, "__len__"):
        raise SpecError(f"accuracy: expected a list, one value per subnet, got {type(accuracy).__name__}")
    if len(accuracy) != len(specs):
        raise SpecError(f"accuracy: {len(accuracy)} values for {len(specs)} subnets; give one per subnet")
    found = tuple(percentage(value, spec) for value, spec in zip(accuracy, specs, strict=True))
    warn_of_fractions([value for value in found if value is not None])
    return found


def percentage(value: Any, spec: SubnetSpec) -> float | None:
    """Return an accuracy as a number; None stays None."""
    if value is None:
        return None
    try:
        percent = -1.0 if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        percent = -1.0
    if not 0 <= percent <= 100:
        raise SpecError(f"accuracy of {spec}: {value!r} is not a percentage; give 0 to 100, or None")
    return percent


def _stored_percentage(value: Any) -> float | None:
    if value is None or value != value:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"an accuracy of {value!r}; it must be a percentage, or null")
    return float(value)


def budget_bytes(mebibytes: Any, default: int) -> int:
    """Return a memory budget in bytes."""
    if mebibytes is None:
        return default
    if not isinstance(mebibytes, int | float) or not 0 <= mebibytes < 2**40:
        raise EngineError(
            f"memory_budget_mb: {mebibytes!r} must be a number of MiB of at least 0; 0 means views only, and "
            "None the default"
        )
    return int(mebibytes * 2**20)


def check_weights(supernet: Supernet) -> None:
    """Refuse weights that no subnet can be sliced out of and run."""
    for name, parameter in supernet.network.named_parameters():
        if parameter.is_meta:
            raise EngineError(
                f"{name} is on the meta device and has no data; make the supernet on a real device, or call "
                "supernet.to_empty(device=...) and load weights"
            )
        if parameter.layout != torch.strided or parameter.is_nested or parameter.is_quantized:
            raise EngineError(
                f"{name} is of layout {parameter.layout}; an engine slices dense weights: call .to_dense() "
                "or .dequantize() on it first"
            )
