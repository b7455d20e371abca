"""Calibration: the statistics each subnet has on real data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.binding import bind
from subnetact.errors import SpecError
from subnetact.norm_table import NormRow
from subnetact.operators import CollectingNorm, SubnetNorm
from subnetact.operators.subnet_norm import CALIBRATION_RULES
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet

__all__ = ["calibrate"]


def calibrate(
    supernet: Supernet,
    specs: Iterable[SubnetSpec],
    batches: Iterable[Tensor | Sequence[Any]],
    progress: bool = True,
    rule: str | None = None,
) -> None:
    """Fill `supernet.norms` with the statistics of every given subnet, in one pass over the data.

    Each subnet normalises each batch with that batch's own statistics. `weighted_biased` averages
    means and biased variances with the batch sizes as weights (OFA `set_running_statistics`);
    `cumulative_unbiased` gives every batch the same weight and averages unbiased variances
    (AttentiveNAS, Slimmable Networks). No subnet disturbs another, and nothing changes unless the
    whole pass succeeds.

    Args:
        supernet: the supernet; only its norm table changes.
        specs: the subnets; those already calibrated are calibrated afresh.
        batches: inputs of shape (N, C, H, W) like those to be served; sizes may differ. A pair, as a
            DataLoader gives, stands for its first part. Read once.
        progress: whether to show a progress bar.
        rule: `weighted_biased` or `cumulative_unbiased`; default: the rule of the supernet's family,
            `weighted_biased` for an own network.

    Raises:
        SpecError: a specification is not of this supernet, the rule is unknown, there are no
            batches, or statistics come out NaN.
    """
    if rule is not None and rule not in CALIBRATION_RULES:
        raise SpecError(f"{rule!r} is no calibration rule; choose from {', '.join(CALIBRATION_RULES)}")
    wanted = list(dict.fromkeys(supernet.space.check(spec) for spec in specs))
    if not supernet.norm_operators():
        return
    device = next(supernet.network.parameters()).device
    collectors = [_Collector(supernet, spec, rule) for spec in wanted]
    seen = 0
    with torch.inference_mode(False), torch.no_grad():
        for batch in tqdm(batches, desc=f"calibrating {len(wanted)} subnets", disable=not progress):
            x = _images(batch).to(device)
            seen += 1
            for collector in collectors:
                collector.network(x)
        if not seen:
            raise SpecError("calibration needs at least one batch, got none; a generator is read only once")
        rows = {spec: collector.row() for spec, collector in zip(wanted, collectors, strict=True)}
    for spec, row in rows.items():
        wrong = [name for name, pair in row.pairs().items() if not all(t.isfinite().all() for t in pair)]
        if wrong:
            raise SpecError(
                f"calibration of {spec} gave statistics that are not finite, first at {wrong[0]}; check the "
                "batches and the weights for NaN"
            )
    supernet.norms.update(rows)


def _images(batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(x, Tensor) or not x.numel():
        got = f"{type(x).__name__} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise SpecError(f"a calibration batch is a tensor, or a pair that begins with one, got {got}")
    return x


class _Collector:
    """One subnet's network with its norms replaced by collecting ones."""

    def __init__(self, supernet: Supernet, spec: SubnetSpec, rule: str | None) -> None:
        self.rule = rule
        self.sizes = supernet.space.resolve(spec)
        self.norms: dict[str, tuple[SubnetNorm, CollectingNorm]] = {}
        self.network = bind(supernet.network, self.sizes, self._collecting)

    def _collecting(self, norm: SubnetNorm) -> nn.Module:
        collecting = CollectingNorm(norm, self.sizes, self.rule or norm.rule)
        self.norms[norm.path] = norm, collecting
        return collecting.module

    def row(self) -> NormRow:
        statistics = {}
        for path, (norm, collecting) in self.norms.items():
            if collecting.mean is None or collecting.var is None:  # the forward pass never came by
                statistics[path] = norm.shared_statistics(self.sizes)
            else:
                statistics[path] = collecting.mean, collecting.var
        return NormRow.of(statistics)
