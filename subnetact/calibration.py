"""Calibration: the statistics each subnet has on real data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.binding import bind
from subnetact.errors import SpecError
from subnetact.norm_table import NormRow
from subnetact.operators import CollectingNorm, SubnetNorm
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet

__all__ = ["calibrate"]


def calibrate(
    supernet: Supernet,
    specs: Iterable[SubnetSpec],
    batches: Iterable[Tensor],
    progress: bool = True,
) -> None:
    """Fill `supernet.norms` with the statistics of every given subnet, in one pass over the data.

    Each subnet normalises each batch with that batch's own statistics; means and biased variances
    are averaged with the batch sizes as weights (OFA `set_running_statistics`). No subnet disturbs
    another, and nothing changes unless the whole pass succeeds.

    Args:
        supernet: the supernet; only its norm table changes.
        specs: the subnets; those already calibrated are calibrated afresh.
        batches: inputs of shape (N, C, H, W) like those to be served; sizes may differ. Read once.
        progress: whether to show a progress bar.

    Raises:
        SpecError: a specification is not of this supernet, or there are no batches.
    """
    wanted = list(dict.fromkeys(supernet.space.check(spec) for spec in specs))
    if not supernet.norm_operators():
        return
    device = next(supernet.network.parameters()).device
    collectors = [_Collector(supernet, spec) for spec in wanted]
    seen = 0
    with torch.no_grad():
        for batch in tqdm(batches, desc=f"calibrating {len(wanted)} subnets", disable=not progress):
            x = batch.to(device)
            seen += 1
            for collector in collectors:
                collector.network(x)
    if not seen:
        raise SpecError("calibration needs at least one batch, got none; a generator can be read only once")
    supernet.norms.update({spec: collector.row() for spec, collector in zip(wanted, collectors, strict=True)})


class _Collector:
    """One subnet's network with its norms replaced by collecting ones."""

    def __init__(self, supernet: Supernet, spec: SubnetSpec) -> None:
        self.sizes = supernet.space.resolve(spec)
        self.norms: dict[str, tuple[SubnetNorm, CollectingNorm]] = {}
        self.network = bind(supernet.network, self.sizes, self._collecting)

    def _collecting(self, norm: SubnetNorm) -> nn.Module:
        collecting = CollectingNorm(norm, self.sizes)
        self.norms[norm.path] = norm, collecting
        return collecting

    def row(self) -> NormRow:
        statistics = {}
        for path, (norm, collecting) in self.norms.items():
            if collecting.mean is None or collecting.var is None:  # the forward pass never came by
                statistics[path] = norm.shared_statistics(self.sizes)
            else:
                statistics[path] = collecting.mean, collecting.var
        return NormRow.of(statistics)
