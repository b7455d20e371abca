"""The true accuracy of subnets on labelled data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact.calibration.calibrate import calibrate
from subnetact.errors import SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["evaluate"]


@overload
def evaluate(
    supernet: Supernet,
    specs: SubnetSpec,
    loader: Iterable[Any],
    calibration: Iterable[Tensor | Sequence[Any]] | None = None,
    progress: bool = True,
) -> float: ...
@overload
def evaluate(
    supernet: Supernet,
    specs: Sequence[SubnetSpec],
    loader: Iterable[Any],
    calibration: Iterable[Tensor | Sequence[Any]] | None = None,
    progress: bool = True,
) -> list[float]: ...
def evaluate(
    supernet: Supernet,
    specs: SubnetSpec | Sequence[SubnetSpec],
    loader: Iterable[Any],
    calibration: Iterable[Tensor | Sequence[Any]] | None = None,
    progress: bool = True,
) -> float | list[float]:
    """Return the top-1 accuracy of subnets on labelled data.

    Args:
        supernet: the supernet. If subnets are calibrated, its norm table changes; nothing else does.
        specs: one subnet, or several.
        loader: batches (x, labels) with x of shape (N, ...) and integer labels of shape (N,). The loader
            is read once for all subnets.
        calibration: batches of inputs to calibrate those subnets with that have no statistics of their
            own. If None, these subnets run on the statistics of the whole supernet, and warn once with
            `UncalibratedSubnetWarning`.
        progress: if True, show a progress bar when standard error is a terminal and the work takes
            more than a second.

    Returns:
        The accuracy in percent: one number for one subnet, a list of numbers for several.

    Raises:
        SpecError: a specification is not of this supernet, or the loader gives no (x, labels) pairs.

    Example:
        As the accuracy of a search:

            search(supernet, lambda spec: evaluate(supernet, spec, loader, calibration=batches), latency)
    """
    given = [specs] if isinstance(specs, SubnetSpec) else list(specs)
    wanted = [supernet.space.check(spec) for spec in given]
    if calibration is not None:
        fresh = [spec for spec in wanted if not supernet.calibrated(spec)]
        if fresh:
            calibrate(supernet, fresh, calibration, progress=progress)
    device = next(supernet.network.parameters()).device
    views = [supernet.subnet(spec) for spec in wanted]
    right, seen = [0] * len(wanted), 0
    with torch.inference_mode():
        for batch in tqdm(
            loader,
            desc=f"evaluating {len(wanted)} subnets",
            disable=not progress or None,
            leave=None,
            delay=1,
        ):
            x, labels = _pair(batch)
            x, labels = x.to(device), labels.to(device)
            seen += len(labels)
            for i, view in enumerate(views):
                right[i] += int((view(x).argmax(1) == labels).sum())
    if not seen:
        raise SpecError("evaluation needs at least one batch, got none; a generator is read only once")
    percent = [100 * count / seen for count in right]
    return percent[0] if isinstance(specs, SubnetSpec) else percent


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    legal = isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)
    if not legal or batch[1].dim() != 1 or len(batch[0]) != len(batch[1]):
        raise SpecError(
            f"a batch for evaluation is a pair of inputs (N, ...) and labels (N,), got {type(batch).__name__}"
        )
    return batch[0], batch[1]
