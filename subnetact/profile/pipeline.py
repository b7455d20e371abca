"""From a checkpoint to a profiled bundle, in steps that can be killed and gone on with."""

from __future__ import annotations

import csv
import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnetact.calibration.calibrate import calibrate
from subnetact.device import find_device
from subnetact.documents import described, replacing
from subnetact.engine.engine import Engine
from subnetact.errors import TableError, UncalibratedSubnetWarning
from subnetact.journal import Journal
from subnetact.latency.arrays import ascending_sizes, warn_of_fractions
from subnetact.latency.plot import need_matplotlib, plot_front, plot_heat_map
from subnetact.latency.table import LatencyTable
from subnetact.pareto import non_dominated
from subnetact.profile.measurements import Cell, Measurements
from subnetact.profile.modes import (
    Runner,
    check_running,
    engine_for,
    running,
)
from subnetact.profile.selection import (
    Chosen,
    Request,
    choose,
    expected,
)
from subnetact.profile.source import ProfileSource, batches_of, check_batches
from subnetact.profile.stability import statistics_of
from subnetact.profile.sweep import (
    environment,
    measured_at,
    sweep,
    table_of,
)
from subnetact.profile.sweep_settings import SweepSettings
from subnetact.spec import SubnetSpec

__all__ = ["Job", "Profile", "count_beaten", "count_cells", "plan", "profile"]


@dataclass(frozen=True)
class Job:
    """What to profile, how, and where to leave it.

    Attributes:
        request: which subnets.
        settings: how they are measured.
        batch_sizes: ascending.
        device: where.
        mode: one of `runners.MODES`.
        include_actuation: see `Runner`.
        include_h2d: see `Runner`.
        channels_last: see `Runner`.
        budget_mb: MiB an engine may take in the modes that have a budget.
        calibrate_on: a `.npy` file or `pkg.mod:function`; None = no data.
        random_images: how many noise images to calibrate on instead, for latency only; 0 = none.
        calibration_batch: images a batch.
        out: the table, JSON; beside it the scheduler's, and a folder with the progress.
        csv: the same cell by cell; None = none.
        bundle: directory for the bundle; None = none.
        plots: directory for figures; None = none.
        resume: go on where an earlier run stopped.
        progress: whether to show progress bars.
    """

    request: Request = field(default_factory=Request)
    settings: SweepSettings = field(default_factory=SweepSettings)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    device: str = "cpu"
    mode: str = "zero-copy"
    include_actuation: bool = False
    include_h2d: bool = False
    channels_last: bool = False
    budget_mb: float = 2048.0
    calibrate_on: str | None = None
    random_images: int = 0
    calibration_batch: int = 100
    out: Path = Path("latency.json")
    csv: Path | None = None
    bundle: Path | None = None
    plots: Path | None = None
    resume: bool = False
    progress: bool = True

    @property
    def scheduler_out(self) -> Path:
        """Where the monotone table goes."""
        return self.out.with_name(f"{self.out.name.removesuffix('.json')}.scheduler.json")

    @property
    def work(self) -> Path:
        """Where progress is kept."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def running(self) -> dict[str, Any]:
        """How subnets are run, as the stamp says it."""
        return running(self.mode, self.include_actuation, self.include_h2d, self.channels_last)


@dataclass(frozen=True)
class Profile:
    """What came out.

    Attributes:
        table: as measured.
        scheduler: the same with latencies that never fall as the batch grows.
        cells: how many ran, at every number of co-runners.
        unstable: how many of them have a median that is not known well enough.
        beaten: how many subnets another one beats by the medians measured without co-runners; None where
            accuracies are not known.
        calibrated: what their BatchNorm statistics are from, in words.
    """

    table: LatencyTable
    scheduler: LatencyTable
    cells: int
    unstable: int
    beaten: int | None
    calibrated: str


def check(job: Job, subject: ProfileSource) -> None:
    """Refuse what could not be run or written, before anything is measured.

    Raises:
        TableError: naming the option.
        DeviceError: the mode is not for this device.
        MissingExtra: figures are wanted and matplotlib is not installed.
        SpecError: no such subnets.
    """
    check_running(job.mode, job.include_h2d, find_device(job.device))
    ascending_sizes(job.batch_sizes)
    _check_co_runner_subnet(job, expected(subject, job.request))
    if job.plots is not None:
        need_matplotlib()
    for name, path in (("out", job.out), ("csv", job.csv)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise TableError(f"{name}: {path} is not a file in a folder that exists")
    bundle = job.bundle
    if bundle is not None and (
        not bundle.parent.is_dir()
        or (bundle.exists() and not bundle.is_dir())
        or (bundle.is_dir() and any(bundle.iterdir()) and not (bundle / "bundle.json").exists())
    ):
        raise TableError(f"save-bundle: {bundle} is neither new nor a bundle, in a folder that exists")
    if job.plots is not None and (not job.plots.parent.is_dir() or job.plots.is_file()):
        raise TableError(f"plot: {job.plots} is not a folder, in a folder that exists")
    if job.random_images < 0 or job.calibration_batch < 1:
        raise TableError("random-images must be >= 0 and calibration-batch >= 1")
    if job.calibrate_on and job.random_images:
        raise TableError("calibrate on data or on random images, not on both")
    if job.calibrate_on:
        check_batches(job.calibrate_on, subject.example.shape)


def plan(job: Job, subject: ProfileSource) -> str:
    """Say what `profile` would do, in a few lines; nothing is measured or written.

    Raises:
        SubnetActError: what is known not to work before anything is measured.
    """
    check(job, subject)
    settings, request = job.settings, job.request
    space = subject.supernet.space
    count = expected(subject, request)
    cells = count * len(job.batch_sizes) * (1 + len(settings.co_runners))
    least_s = cells * (settings.windows * settings.warmup_ms + settings.min_time_ms) / 1e3
    sizes = ", ".join(map(str, job.batch_sizes))
    searched = ""
    if request.searches(space.size()):
        fitted = {
            "measured": f"latencies fitted to {request.fitted} measured",
            "macs": "multiply-accumulates",
        }
        searched = f", of {request.evaluations} tried, by {fitted[request.search_latency]}"
    accuracy = request.accuracy_predictor or " ".join(request.accuracy) or "not known"
    noise = f"{job.random_images} random images" if job.random_images else "nothing"
    return "\n".join(
        [
            f"supernet: {space}, weights {subject.supernet.fingerprint()}",
            f"subnets: {count} (--subnets {request.subnets}{searched})",
            f"accuracy: {accuracy}; calibrated on {job.calibrate_on or noise}",
            f"inputs: batch sizes {sizes} of {list(subject.example.shape)}, {subject.example.dtype}",
            f"on: {find_device(job.device)}, {torch.get_num_threads()} threads, mode {job.mode}",
            f"cells: {cells}, {settings.windows} to {settings.max_windows} windows each, {settings.order}; "
            f"at least {least_s:.0f} s",
            f"files: {job.out}, {job.scheduler_out}, progress in {job.work}"
            + "".join(f", {path}" for path in (job.csv, job.plots, job.bundle) if path is not None),
        ]
    )


def begin(job: Job, subject: ProfileSource) -> Journal:
    """Open the journal of a job; a finished one is begun afresh unless it is to be resumed.

    Raises:
        ResumeMismatch: an unfinished one is there and not to be resumed, or is of another environment.
    """
    path = job.work / "journal.jsonl"
    device = find_device(job.device)
    facts = environment(subject.supernet, device, subject.example, job.running, job.settings)
    read = (job.request.file, job.request.accuracy_predictor)
    request = {
        "batch_sizes": list(job.batch_sizes),
        "request": vars(job.request),
        "files": {str(path): described(Path(path)) for path in read if path is not None},
        "budget_mb": job.budget_mb,
        "calibrate_on": job.calibrate_on,
        "random_images": job.random_images,
        "calibration_batch": job.calibration_batch,
    }
    if not job.resume and (job.work / "done").exists():
        shutil.rmtree(job.work)
    job.work.mkdir(exist_ok=True)
    return Journal(path, {**facts, **request}, job.resume, job.work)


def profile(job: Job, subject: ProfileSource) -> Profile:
    """Choose subnets, calibrate them, measure them, and write what was asked for.

    Every step leaves its result in the journal or beside it, so a job that was killed goes on where it
    stopped and ends with what it would have ended with; only what was not measured yet is measured then.

    Raises:
        ResumeMismatch: progress of another environment, or of a job that is not to be resumed.
        SubnetActError: whatever cannot work; before anything is measured, where that can be known.
    """
    check(job, subject)
    _check_table(job, ["-"], [math.nan])
    journal = begin(job, subject)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        chosen = choose(
            subject,
            job.request,
            journal=journal,
            batch_sizes=job.batch_sizes,
            fit=partial(_measure, job, subject, Measurements(journal, "fit")),
            measure=lambda specs, sizes: _measure(job, subject, Measurements(), specs, sizes),
            progress=job.progress,
        )
        accuracy = [math.nan if percent is None else percent for percent in chosen.accuracy]
        _check_table(job, [spec.key for spec in chosen.specs], accuracy)
        _check_co_runner_subnet(job, len(chosen.specs))
        warn_of_fractions(accuracy)
        calibrated = _calibrate(job, subject, chosen)
        runner = _runner(job, subject, chosen.specs, chosen.accuracy)
        readings = sweep(runner, job.batch_sizes, job.settings, Measurements(journal), job.progress)
    facts = {**chosen.facts, "calibrated_on": calibrated, "measured": measured_at(journal)}
    beaten = count_beaten(job, readings, accuracy)
    if beaten is not None:
        facts["beaten"] = beaten
    table = table_of(runner, job.batch_sizes, job.settings, readings, accuracy, **facts)
    cells = count_cells(job, readings, len(accuracy))
    found = Profile(table, table.monotone(), *cells, beaten, calibrated)
    _write(job, found, runner.engine)
    (job.work / "done").touch()
    return found


def _check_table(job: Job, keys: Sequence[str], accuracy: Sequence[float]) -> None:
    """Refuse before the measuring what no table could be made of after it."""
    LatencyTable.from_arrays(keys, accuracy, job.batch_sizes, [[1.0] * len(job.batch_sizes)] * len(keys))


def _check_co_runner_subnet(job: Job, count: int) -> None:
    settings = job.settings
    if settings.co_runners and not 0 <= settings.co_runner_subnet < count:
        raise TableError(
            f"co_runner_subnet: {settings.co_runner_subnet} is no row of the table; it has 0 to {count - 1}"
        )


def _runner(
    job: Job,
    subject: ProfileSource,
    specs: Sequence[SubnetSpec],
    accuracy: Sequence[float | None] | None = None,
) -> Runner:
    engine = engine_for(
        subject.supernet,
        specs,
        job.mode,
        example=subject.example,
        device=find_device(job.device),
        memory_budget_mb=job.budget_mb,
        accuracy=accuracy,
    )
    return Runner(engine, job.mode, job.include_actuation, job.include_h2d, job.channels_last)


def _measure(
    job: Job,
    subject: ProfileSource,
    readings: Measurements,
    specs: Sequence[SubnetSpec],
    sizes: Sequence[int],
) -> list[list[float]]:
    """Measure subnets quickly, for a search; NaN where the memory runs out."""
    few = min(3, job.settings.windows)
    settings = replace(job.settings, co_runners=(), windows=few, max_windows=few)
    progress = job.progress and len(specs) > 1
    sweep(_runner(job, subject, specs), sizes, settings, readings, progress, "measuring a few subnets")

    def latency(i: int, size: int) -> float:
        if readings.impossible((0, i, size)):
            return math.nan
        return statistics_of(readings.windows[0, i, size], settings.stability, [50])["p50"]

    return [[latency(i, size) for size in sizes] for i in range(len(specs))]


def count_cells(job: Job, readings: Measurements, subnets: int) -> tuple[int, int]:
    """Return how many cells ran, at every number of co-runners, and how many of them are not stable.

    Args:
        job: gives the batch sizes, the numbers of co-runners and the stability that is required.
        readings: what was measured.
        subnets: how many subnets were measured.
    """
    levels = (0, *job.settings.co_runners)
    cells = [(n, i, b) for n in levels for i in range(subnets) for b in job.batch_sizes]
    ran = [cell for cell in cells if not readings.impossible(cell)]
    return len(ran), sum(not readings.stable(cell, job.settings) for cell in ran)


def count_beaten(job: Job, readings: Measurements, accuracy: Sequence[float]) -> int | None:
    """Return how many subnets are no better than another one in accuracy and in any batch size's median.

    Args:
        job: gives the batch sizes.
        readings: what was measured; only cells without co-runners count.
        accuracy: of each subnet, percent; if one is NaN, the result is None.
    """
    if any(map(math.isnan, accuracy)):
        return None

    def median(cell: Cell) -> float:
        if readings.impossible(cell):
            return math.inf
        return float(np.median(np.concatenate([window["host_ms"] for window in readings.windows[cell]])))

    costs = [[-percent, *(median((0, i, b)) for b in job.batch_sizes)] for i, percent in enumerate(accuracy)]
    return len(costs) - len(non_dominated(np.array(costs)))


def _calibrate(job: Job, subject: ProfileSource, chosen: Chosen) -> str:
    """Fill the supernet's norm table, once; return what with."""
    supernet = subject.supernet
    if not supernet.norm_operators():
        return "nothing to calibrate"
    if not job.calibrate_on and not job.random_images:
        bare = [spec for spec in chosen.specs if not supernet.calibrated(spec)]
        if not bare:
            return "their own statistics"
        return f"nothing: {len(bare)} of {len(chosen.specs)} subnets have the shared statistics, latency only"
    supernet.to(find_device(job.device))  # a resumed job has built no engine that would have moved it
    source = job.calibrate_on or f"{job.random_images} random images: latency only, no accuracy"
    batches = (
        batches_of(job.calibrate_on, job.calibration_batch, subject.example.dtype)
        if job.calibrate_on
        else _noise(job, subject)
    )
    calibrate(supernet, chosen.specs, batches, job.progress, resume=job.work / "calibration")
    return source


def _noise(job: Job, subject: ProfileSource) -> list[Tensor]:
    generator = torch.Generator().manual_seed(job.request.seed)
    images = torch.randn(job.random_images, *subject.example.shape, generator=generator)
    return list(torch.split(images.to(subject.example.dtype), job.calibration_batch))


def _write(job: Job, found: Profile, engine: Engine) -> None:
    found.table.save(job.out)
    found.scheduler.save(job.scheduler_out)
    if job.csv is not None:
        _write_csv(found.table, job.csv)
    if job.plots is not None:
        job.plots.mkdir(exist_ok=True)
        plot_heat_map(found.table, job.plots / "latency.png")
        if not any(map(math.isnan, found.table.accuracy)):
            plot_front(found.table, job.plots / "front.png")
    if job.bundle is not None:
        engine.tables = {"measured": found.table, "scheduler": found.scheduler}
        fresh, old = (job.bundle.with_name(f".{job.bundle.name}.{age}") for age in ("new", "old"))
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
        engine.save(fresh)
        if job.bundle.exists():
            job.bundle.rename(old)
        fresh.rename(job.bundle)
        shutil.rmtree(old, ignore_errors=True)


def _write_csv(table: LatencyTable, path: Path) -> None:
    names = list(table.statistics)
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        levels = [f"latency_ms_with_{n:g}_co_runners" for n in table.co_runners]
        writer.writerow(["id", "subnet", "accuracy", "batch_size", "latency_ms", *names, *levels])
        for i, key in enumerate(table.subnets):
            for j, size in enumerate(table.batch_sizes):
                planes = (table.latency_ms, *(table.statistics[name] for name in names), *table.co_runner_ms)
                cells = ["" if math.isnan(plane[i, j]) else float(plane[i, j]) for plane in planes]
                percent = table.accuracy[i]
                writer.writerow([i, key, "" if math.isnan(percent) else percent, size, *cells])
