"""Calibration: the statistics each subnet has on real data."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact.calibration.resume import Progress, identity
from subnetact.calibration.run import CalibrationRun
from subnetact.errors import SpecError
from subnetact.operators.subnet_norm import CALIBRATION_RULES
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["CalibrationReport", "calibrate"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration did.

    Attributes:
        batches: for each subnet, how many batches its statistics average.
        layers_computed: module calls made, up to the last BatchNorm.
        layers_alone: those of the same subnets and batches, each subnet for itself.
        one_at_a_time: subnets whose layers could not be shared, with the reason.
        kept_mb: the most that was kept of one subnet's forward pass for later ones, MiB.
        seconds: the time it took, earlier parts of a resumed one included.
    """

    batches: Mapping[SubnetSpec, int] = field(default_factory=dict)
    layers_computed: int = 0
    layers_alone: int = 0
    one_at_a_time: Mapping[SubnetSpec, str] = field(default_factory=dict)
    kept_mb: float = 0.0
    seconds: float = 0.0

    @property
    def subnets(self) -> int:
        """How many subnets were calibrated."""
        return len(self.batches)

    @property
    def saved(self) -> float:
        """The share of the module calls that sharing saved."""
        return 1 - self.layers_computed / self.layers_alone if self.layers_alone else 0.0

    def __str__(self) -> str:
        used = sorted(set(self.batches.values()))
        batches = f"{used[0]} to {used[-1]}" if len(used) > 1 else f"{used[0] if used else 0}"
        alone = f"; {len(self.one_at_a_time)} one at a time" if self.one_at_a_time else ""
        return (
            f"{self.subnets} subnets on {batches} batches in {self.seconds:.1f} s; "
            f"{self.saved:.0%} of the layers were shared{alone}"
        )


def calibrate(
    supernet: Supernet,
    specs: Iterable[SubnetSpec],
    batches: Iterable[Tensor | Sequence[Any]],
    progress: bool = True,
    rule: str | None = None,
    *,
    resume: str | PathLike[str] | None = None,
    save_every_s: float = 10.0,
    tolerance: float | None = None,
    memory_mb: float = 1024.0,
) -> CalibrationReport:
    """Fill `supernet.norms` with the statistics of every given subnet, in one pass over the data.

    Each subnet normalises each batch with that batch's own statistics. `weighted_biased` averages
    means and biased variances with the batch sizes as weights (OFA `set_running_statistics`);
    `cumulative_unbiased` gives every batch the same weight and averages unbiased variances
    (AttentiveNAS, Slimmable Networks). No subnet disturbs another, and nothing changes unless the
    whole pass succeeds.

    A layer that several subnets have, on the same input, is computed once for a batch: neighbours on
    a Pareto front share most of their beginnings. This needs a network that `torch.fx` can trace up to
    its last BatchNorm; the report names the subnets that had to run one at a time.

    Args:
        supernet: the supernet; only its norm table changes.
        specs: the subnets; those already calibrated are calibrated afresh.
        batches: inputs of shape (N, C, H, W) like those to be served; sizes may differ. A pair, as a
            DataLoader gives, stands for its first part. Read once.
        progress: if True, show a progress bar when standard error is a terminal.
        rule: `weighted_biased` or `cumulative_unbiased`; default: the rule of the supernet's family,
            `weighted_biased` for an own network.
        resume: a file that keeps unfinished work, written every `save_every_s` seconds and at the
            end. Where it exists, the work goes on from there; the statistics are those of an
            uninterrupted run, bit for bit. The same batches must be given again, in the same order.
        save_every_s: seconds of work after which unfinished work is saved to `resume`, once the current
            subnet has taken its batch; 0 saves after every subnet and batch.
        tolerance: where given, a subnet reads no further batch once the standard error of every
            BatchNorm's averaged mean is below `tolerance` times the layer's standard deviation, and
            that of its averaged variance below `tolerance` times the layer's variance; of both, the
            root mean square over the channels, estimated from how much the batches differ, after at
            least four. The pass ends with the last subnet.
        memory_mb: how much may be kept of one subnet's forward pass for later subnets, MiB. What is
            beyond is computed again; the statistics are the same. The forward pass of one subnet
            comes on top.

    Raises:
        SpecError: a specification is not of this supernet, the rule is unknown, there are no
            batches, or statistics come out NaN.
        ResumeMismatch: `resume` is of other weights, subnets, data or settings.
        FileFormatError: `resume` is truncated, of another kind, or of a newer schema.
    """
    if rule is not None and rule not in CALIBRATION_RULES:
        raise SpecError(f"{rule!r} is no calibration rule; choose from {', '.join(CALIBRATION_RULES)}")
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise SpecError(f"tolerance: {tolerance!r} is no positive number, 0.01 for example")
    if not memory_mb >= 0:
        raise SpecError(f"memory_mb: {memory_mb!r} is no number of MiB; give 0 to keep nothing")
    if not save_every_s >= 0:
        raise SpecError(f"save_every_s: {save_every_s!r} is no number of seconds; give 0 to save at once")
    as_supernet(supernet)
    if any(isinstance(given, SubnetSpec | Tensor) for given in (specs, batches)):
        raise SpecError("calibrate takes lists of specifications and of batches; write [spec] and [batch]")
    wanted = list(dict.fromkeys(supernet.space.check(spec) for spec in specs))
    if not supernet.norm_operators() or not wanted:
        return CalibrationReport(dict.fromkeys(wanted, 0))
    start = time.perf_counter()
    with torch.inference_mode(False), torch.no_grad():
        saved = None if resume is None else Progress(resume, identity(supernet, wanted, rule, tolerance))
        run = CalibrationRun(supernet, wanted, rule, tolerance, memory_mb * 2**20)
        _pass(run, batches, saved, save_every_s, start, progress)
        found = run.rows()
    rows = {spec: found[spec] for spec in wanted}
    _check_finite(rows)
    if saved is not None:
        saved.save(run, time.perf_counter() - start)
    supernet.norms.update(rows)
    report = CalibrationReport(
        batches=run.batches(),
        layers_computed=run.layers_computed,
        layers_alone=run.layers_alone,
        one_at_a_time=dict(run.one_at_a_time),
        kept_mb=run.peak / 2**20,
        seconds=time.perf_counter() - start + (0.0 if saved is None else saved.seconds),
    )
    _log.info("calibration: %s", report)
    return report


def _pass(
    run: CalibrationRun,
    batches: Iterable[Any],
    saved: Progress | None,
    save_every_s: float,
    start: float,
    progress: bool,
) -> None:
    length = len(batches) if isinstance(batches, Sized) else None
    subnets = len(run.specs)
    written = time.perf_counter()
    given = 0
    with tqdm(
        total=None if length is None else length * subnets,
        desc=f"calibrating {subnets} subnets",
        unit=" subnet batches",
        disable=not progress or None,
        leave=None,
    ) as bar:
        for batch in batches:
            x = _images(batch).to(run.device)
            given += 1
            if given == 1:
                run.prepare(x)
                if saved is not None:
                    saved.restore(run)
            if saved is not None and not saved.enters(x, given, run.finished):
                bar.update(subnets)
                continue
            if not run.active:
                break
            bar.set_postfix(batch=given, active=run.active, refresh=False)
            for _ in run.batch(x):
                bar.update()
                if saved is not None and time.perf_counter() - written >= save_every_s:
                    saved.save(run, time.perf_counter() - start)
                    written = time.perf_counter()
            if not run.active:
                break  # before another batch is read
    if not given:
        raise SpecError("calibration needs at least one batch, got none; a generator is read only once")
    if saved is not None:
        saved.check_length(given)


def _check_finite(rows: Mapping[SubnetSpec, NormRow]) -> None:
    for spec, row in rows.items():
        if row.flat.isfinite().all():
            continue
        wrong = [name for name, pair in row.pairs().items() if not all(t.isfinite().all() for t in pair)]
        raise SpecError(
            f"calibration of {spec} gave statistics that are not finite, first at {wrong[0]}; check the "
            "batches and the weights for NaN"
        )


def _images(batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(x, Tensor) or not x.numel():
        got = f"{type(x).__name__} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise SpecError(f"a calibration batch is a tensor, or a pair that begins with one, got {got}")
    return x
