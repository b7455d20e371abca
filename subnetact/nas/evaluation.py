"""The true accuracy of subnets on labelled data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact.calibration.calibrate import calibrate
from subnetact.errors import SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import as_pair, call_with, describe_input, logits, map_tensors, tensors_of
from subnetact.supernet.failure import explained
from subnetact.supernet.statistics import is_calibrated
from subnetact.supernet.supernet import Supernet

CHECK = "supernet.check(x) tells whether the description of the supernet lacks a module"


def evaluate(
    supernet: Supernet,
    specs: Sequence[SubnetSpec],
    batches: Iterable[Any],
    calibration: Iterable[Tensor | Sequence[Any] | Mapping[str, Tensor]] | None = None,
    progress: bool = True,
) -> list[float]:
    """Return the top-1 accuracy of subnets on labelled data.

    Args:
        supernet: the supernet. It is afterwards as it was before.
        specs: distinct subnets, one or more.
        batches: pairs (inputs, labels). The inputs are what the network takes: a tensor of shape (N, ...), or
            a tuple or a dictionary of such tensors. The labels are integers of shape (N,). The batches are
            read once for all subnets.
        calibration: inputs, without labels, to calibrate those subnets with that have no statistics of their
            own; these statistics are dropped in the end, and `calibrate` makes those that stay. If None,
            these subnets run on the statistics of the whole supernet, and warn once with
            `UncalibratedSubnetWarning`.
        progress: if True, show a progress bar when standard error is a terminal and the work takes
            more than a second.

    Returns:
        The accuracy of every subnet in percent.

    Raises:
        SpecError: a specification is not of this supernet, a subnet does not run on a batch, `batches` gives
            no pairs (inputs, labels), or the network returns no class scores of shape (N, classes), as a
            tensor, as `logits` or as the first of several outputs.

    Example:
        As the accuracy of a search, which chooses on one half of the images and is judged on the other:

            def accuracy(spec, on=batches[::2]):
                return evaluate(supernet, [spec], on, calibration=others)[0]

            search(supernet, accuracy, latency, remeasure_accuracy=partial(accuracy, on=batches[1::2]))
    """
    wanted = supernet.space.distinct(specs, "evaluate")
    if not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise SpecError(f"evaluate: expected batches (inputs, labels), got {kind}; write [(inputs, labels)]")
    fresh = [spec for spec in wanted if not is_calibrated(supernet, spec)]
    try:
        if calibration is not None and fresh:
            calibrate(supernet, fresh, calibration, progress=progress)
        device = supernet.device
        views = [supernet.subnet(spec) for spec in wanted]
        right, seen = [torch.zeros((), dtype=torch.int64, device=device) for _ in wanted], 0
        title = f"evaluating {len(wanted)} subnets"
        bar = tqdm(batches, title, disable=not progress or None, leave=None, delay=1)
        with torch.inference_mode():
            for batch in bar:
                x, labels = _pair(batch)
                x, labels = map_tensors(lambda t: t.to(device), x), labels.to(device)
                seen += len(labels)
                for view, spec, count in zip(views, wanted, right, strict=True):
                    with explained(SpecError, f"evaluate: {spec}", view, x, CHECK):
                        output = call_with(view, x)
                    count.add_((_scores(output).argmax(1) == labels).sum())
        if not seen:
            raise SpecError("evaluation needs at least one batch, got none; a generator is read only once")
        return [100 * int(count) / seen for count in right]
    finally:
        supernet.norms.drop(fresh)


def _pair(batch: Any) -> tuple[Any, Tensor]:
    x, labels = as_pair(batch, "evaluate")
    parts = list(tensors_of(x))
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in (*parts, labels)):
        raise SpecError(f"evaluate: inputs and labels of a batch are tensors, got {describe_input(x)}")
    if labels.dim() != 1 or any(len(part) != len(labels) for part in parts):
        shapes = [tuple(part.shape) for part in parts]
        raise SpecError(
            "evaluate: a batch has labels of shape (N,) for inputs of shape (N, ...), got "
            f"{tuple(labels.shape)} for {', '.join(map(str, shapes))}"
        )
    return x, labels


def _scores(output: Any) -> Tensor:
    scores = logits(output)
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        got = describe_input(scores)
        raise SpecError(f"evaluation needs class scores of shape (N, classes), the network returns {got}")
    return scores
