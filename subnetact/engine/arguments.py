"""Arguments of an engine: accuracies, the dtype of fused programs, and weights that can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from subnetact.errors import EngineError, SpecError
from subnetact.latency.arrays import warn_of_fractions
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["budget_bytes", "check_dtype", "check_weights", "percentage", "percentages"]


def percentages(accuracy: Sequence[Any] | None, specs: Sequence[SubnetSpec]) -> list[float | None]:
    """Return accuracies as numbers, and warn if they look like fractions of 1.

    Args:
        accuracy: percent per subnet, or None for a subnet whose accuracy is not known. If None, no accuracy
            is known.
        specs: the subnets.

    Raises:
        SpecError: there is not one value per subnet, or a value is no percentage.
    """
    if accuracy is None:
        return [None] * len(specs)
    if isinstance(accuracy, str) or not hasattr(accuracy, "__len__"):
        raise SpecError(f"accuracy: expected a list, one value per subnet, got {type(accuracy).__name__}")
    if len(accuracy) != len(specs):
        raise SpecError(f"accuracy: {len(accuracy)} values for {len(specs)} subnets; give one per subnet")
    found = [percentage(value, spec) for value, spec in zip(accuracy, specs, strict=True)]
    warn_of_fractions([value for value in found if value is not None])
    return found


def percentage(value: Any, spec: SubnetSpec) -> float | None:
    """Return an accuracy as a number.

    Args:
        value: percent, or None if the accuracy is not known.
        spec: the subnet, for the message.

    Raises:
        SpecError: the value is no percentage.
    """
    if value is None:
        return None
    try:
        percent = -1.0 if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        percent = -1.0
    if not 0 <= percent <= 100:
        raise SpecError(f"accuracy of {spec}: {value!r} is not a percentage; give 0 to 100, or None")
    return percent


def budget_bytes(mebibytes: Any) -> int:
    """Return a memory budget in bytes.

    Args:
        mebibytes: the budget in MiB.

    Raises:
        EngineError: this is no number of MiB from 0 on.
    """
    if not isinstance(mebibytes, int | float) or not 0 <= mebibytes < 2**40:
        raise EngineError(
            f"memory_budget_mb: {mebibytes!r} must be a number of MiB of at least 0; 0 means no budget"
        )
    return int(mebibytes * 2**20)


def check_dtype(dtype: Any) -> None:
    """Refuse what fused programs cannot compute in.

    Args:
        dtype: a dtype, or None for that of the weights.

    Raises:
        EngineError: this is no floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EngineError(
            f"fused_dtype: {dtype!r} is no floating-point dtype of torch; give torch.bfloat16 for example, "
            "or None for the dtype of the weights"
        )


def check_weights(supernet: Supernet) -> None:
    """Refuse weights that no subnet can be sliced out of and run.

    Args:
        supernet: the supernet.

    Raises:
        EngineError: a weight has no data, or is no dense tensor.
    """
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
