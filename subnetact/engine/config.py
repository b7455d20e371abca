"""EngineConfig: everything that an engine consists of, apart from its supernet.

`Engine(...)` makes one of its arguments, and `Engine.config` is the present one. Worker processes get it
together with the supernet, and bundles hold what `to_json` returns. `Engine.from_config` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from subnetact.engine.input_shapes import Lengths, Padding
from subnetact.engine.inputs import sample_from_json, sample_to_json
from subnetact.errors import EngineError, SpecError
from subnetact.latency.arrays import warn_of_fractions
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

FUSED, VIEWS = "fused", "views"
"""The backends that need nothing but this package."""


@dataclass(frozen=True, eq=False)
class EngineConfig:
    """Everything that an engine consists of, apart from its supernet.

    Attributes:
        specs: all subnets that were registered, in id order.
        accuracy: of each subnet in percent, or None if it is not known.
        removed: the ids that are not served any more.
        pinned: the ids of pinned subnets, in the order in which they were pinned.
        prepared: the batch sizes of the last call of `Engine.prepare`.
        sample: one input without batch axis, on the CPU, the first of the example or of what ran; a list if
            the engine serves several shapes.
        lengths: for every tensor of an output, the axes that are cut to the length of an axis of the input:
            axis -> tensors of the input and their axes. The engine finds them, and no file has them.
        padding: as in `Engine`, like all that follow.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own are accepted.
        backend: what runs the subnets that are not views.
        device: where subnets run. If None, the supernet stays where it is.
        memory_budget_mb: MiB that programs and graphs may take. If None, the default.
    """

    specs: Sequence[SubnetSpec]
    accuracy: Sequence[float | None] | None = None
    removed: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    prepared: tuple[int, ...] = ()
    sample: Any = None
    lengths: Lengths = ()
    padding: Padding = None
    allow_uncalibrated: bool = False
    backend: str = FUSED
    device: str | torch.device | None = None
    memory_budget_mb: float | None = None

    @property
    def served(self) -> list[SubnetSpec]:
        """The subnets that are served."""
        removed = set(self.removed)
        return [spec for i, spec in enumerate(self.specs) if i not in removed]

    def checked(self, supernet: Supernet) -> EngineConfig:
        """Return the configuration with canonical specifications and numbers, if it fits a `supernet`.

        Raises:
            EngineError: an id is no position in `specs`.
            SpecError: there are no specifications, one is repeated or of another space, the number of
                accuracies differs from the number of subnets, or an accuracy is no percentage.
        """
        found = replace(self, specs=tuple(supernet.space.distinct(self.specs, "an engine")))._with_numbers()
        warn_of_fractions([percent for percent in found.accuracy or () if percent is not None])
        return found

    def _with_numbers(self) -> EngineConfig:
        """Return the configuration with accuracies as numbers, if ids and accuracies fit the subnets."""
        count = len(self.specs)
        given: Any = [None] * count if self.accuracy is None else self.accuracy
        for i in (*self.removed, *self.pinned):
            if type(i) is not int or not 0 <= i < count:
                raise EngineError(f"removed or pinned: {i!r} is no position of the {count} subnets")
        if isinstance(given, str) or not hasattr(given, "__len__"):
            raise SpecError(f"accuracy: expected a list, one value per subnet, got {type(given).__name__}")
        if len(given) != count:
            raise SpecError(f"accuracy: {len(given)} values for {count} subnets; give one per subnet")
        return replace(self, accuracy=tuple(map(percentage, given, self.specs)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields up to `backend`, except `prepared`, as JSON."""
        padding: Any = self.padding
        return {
            "subnets": [spec.to_json() for spec in self.specs],
            "accuracy": list(self.accuracy or [None] * len(self.specs)),
            "removed": sorted(self.removed),
            "pinned": list(self.pinned),
            "sample": sample_to_json(self.sample),
            "padding": list(map(list, padding.items())) if isinstance(padding, Mapping) else padding,
            "allow_uncalibrated": self.allow_uncalibrated,
            "backend": self.backend,
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any], space: SubnetSpace | None = None) -> EngineConfig:
        """Return what `to_json` has `described`, of subnets of a `space`, which None does not check.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is of another type.
            ValueError: ids, accuracies, subnets and the space do not belong together.
        """
        specs = tuple(map(SubnetSpec.from_json, described["subnets"]))
        padding, allow = described["padding"], described["allow_uncalibrated"]
        if type(allow) is not bool:
            raise ValueError(f"allow_uncalibrated {allow!r}")
        backend = described.get("backend", FUSED)  # Earlier bundles do not name it.
        if type(backend) is not str:
            raise ValueError(f"backend {backend!r}")
        return cls(
            specs if space is None else tuple(map(space.check, specs)),
            described["accuracy"],
            tuple(described["removed"]),
            tuple(described["pinned"]),
            sample=sample_from_json(described["sample"]),
            padding=dict(padding) if isinstance(padding, list) else padding,
            allow_uncalibrated=allow,
            backend=backend,
        )._with_numbers()


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
