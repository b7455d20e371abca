"""From a checkpoint to a latency table and a bundle, in steps that survive a kill.

The steps are: select subnets, calibrate them, measure them, write files. All of them share one journal beside
the table: a line for every selection and every window. Larger results (BatchNorm statistics, the states of
the search and of the calibration) are files beside the journal, each written atomically.
"""

from __future__ import annotations

import csv
import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from subnetact.calibration.calibrate import calibrate
from subnetact.device import find_device
from subnetact.errors import TableError, UncalibratedSubnetWarning
from subnetact.files.atomic import replacing
from subnetact.files.documents import described
from subnetact.files.journal import Journal
from subnetact.latency.arrays import ascending_sizes, warn_of_fractions
from subnetact.latency.pareto import non_dominated
from subnetact.latency.plot import need_matplotlib, plot_front, plot_heat_map
from subnetact.latency.table import LatencyTable
from subnetact.nas.latency_predictor import require_scipy
from subnetact.profile.measurements import Cell, Measurements
from subnetact.profile.modes import TimedRunner, check_mode, engine_for, run_facts
from subnetact.profile.selection import (
    Selection,
    SelectionRequest,
    expected_count,
    given_accuracies,
    select_subnets,
)
from subnetact.profile.source import (
    ProfileSource,
    calibration_batches,
    check_calibration_data,
    random_images,
)
from subnetact.profile.stability import statistics_of
from subnetact.profile.sweep import SweepSettings, environment, measured_at, sweep, table_of
from subnetact.spec import SubnetSpec

__all__ = ["ProfileJob", "ProfileResult", "count_cells", "count_dominated", "outline", "run_profile"]


@dataclass(frozen=True)
class ProfileJob:
    """What to profile, how, and which files to write.

    Attributes:
        request: which subnets.
        settings: how they are measured.
        batch_sizes: ascending.
        device: the device that subnets run on.
        mode: one of `subnetact.profile.modes.MODES`.
        include: what the timed call includes besides the forward pass, some of
            `subnetact.profile.modes.INCLUDES`.
        memory_budget_mb: MiB for fused programs and CUDA graphs, in modes that have them.
        calibrate_on: images to calibrate with; see `subnetact.profile.source.calibration_batches`. If None,
            subnets keep the statistics that they have.
        out: the JSON file of the table. The table for schedulers and the folder of the journal are beside it.
        csv: a CSV file of the table. If None, it is not written.
        save_bundle: a directory for the bundle. If None, it is not written.
        plot: a directory for figures. If None, they are not drawn.
        resume: continue an earlier run.
        progress: if True, show progress bars when standard error is a terminal.
    """

    request: SelectionRequest = field(default_factory=SelectionRequest)
    settings: SweepSettings = field(default_factory=SweepSettings)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    device: str = "cpu"
    mode: str = "zero-copy"
    include: tuple[str, ...] = ()
    memory_budget_mb: float = 2048.0
    calibrate_on: str | None = None
    out: Path = Path("latency.json")
    csv: Path | None = None
    save_bundle: Path | None = None
    plot: Path | None = None
    resume: bool = False
    progress: bool = True

    @property
    def scheduler_out(self) -> Path:
        """The file of the table for schedulers, whose latencies never fall as the batch grows."""
        return self.out.with_name(f"{self.out.name.removesuffix('.json')}.scheduler.json")

    @property
    def work(self) -> Path:
        """The folder of the journal and the results of finished steps."""
        return self.out.with_name(f"{self.out.name}.work")


@dataclass(frozen=True)
class ProfileResult:
    """What a job has measured.

    Attributes:
        table: the table as measured.
        scheduler: the same table with latencies that never fall as the batch grows.
        cells: the number of cells that ran, beside every number of co-runners.
        unstable: the number of these cells whose median is not known well enough.
        dominated: the number of subnets that another subnet dominates in accuracy and in the medians measured
            without co-runners. If accuracies are not known, None.
        calibrated: the origin of the BatchNorm statistics, in words.
    """

    table: LatencyTable
    scheduler: LatencyTable
    cells: int
    unstable: int
    dominated: int | None
    calibrated: str


def check_job(job: ProfileJob, source: ProfileSource) -> None:
    """Refuse what could not be run or written, before anything is measured.

    Args:
        job: what to profile.
        source: the supernet.

    Raises:
        TableError: an option is impossible; the message names it.
        DeviceError: the mode does not exist on this device.
        MissingExtra: figures are wanted and matplotlib is not installed, or a search needs latency predictors
            and scipy is not installed.
        SpecError: there are no such subnets, no such calibration data, or not one accuracy per subnet.
    """
    check_mode(job.mode, job.include, find_device(job.device))
    ascending_sizes(job.batch_sizes)
    if not 0 <= job.memory_budget_mb < math.inf:
        raise TableError(f"memory_budget_mb: {job.memory_budget_mb} must be finite and at least 0")
    _check_co_runner_subnet(job, expected_count(source, job.request))
    known = given_accuracies(source, job.request)
    if known is not None:
        _check_table(job, [str(i) for i in range(len(known))], known)
    if job.request.searches(source.supernet.space.size()) and job.request.fit_subnets:
        require_scipy()
    if job.plot is not None:
        need_matplotlib()
    for name, path in (("out", job.out), ("csv", job.csv)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise TableError(f"{name}: {path} is not a file in a folder that exists")
    bundle = job.save_bundle
    if bundle is not None and (
        not bundle.parent.is_dir()
        or (bundle.exists() and not bundle.is_dir())
        or (bundle.is_dir() and any(bundle.iterdir()) and not (bundle / "bundle.json").exists())
    ):
        raise TableError(f"save-bundle: {bundle} is neither new nor a bundle, in a folder that exists")
    if job.plot is not None and (not job.plot.parent.is_dir() or job.plot.is_file()):
        raise TableError(f"plot: {job.plot} is not a folder, in a folder that exists")
    if job.calibrate_on:
        check_calibration_data(job.calibrate_on, source.example)


def outline(job: ProfileJob, source: ProfileSource) -> str:
    """Return a description of what `run_profile` would do, in a few lines; nothing is measured or written.

    Args:
        job: what to profile.
        source: the supernet.

    Raises:
        SubnetActError: the job is impossible; see `check_job`.
    """
    check_job(job, source)
    settings, request = job.settings, job.request
    space = source.supernet.space
    count = expected_count(source, request)
    cells = count * len(job.batch_sizes) * (1 + len(settings.co_runners))
    least_s = cells * (settings.windows * settings.warmup_ms + settings.min_time_ms) / 1e3
    sizes = ", ".join(map(str, job.batch_sizes))
    searched = ""
    if request.searches(space.size()):
        latency = f"latencies fitted to {request.fit_subnets} measured subnets"
        searched = f", {request.evaluations} evaluated by " + (
            latency if request.fit_subnets else "multiply-accumulates"
        )
    return "\n".join(
        [
            f"supernet: {space}, weights {source.supernet.fingerprint()}",
            f"subnets: {count} (--subnets {request.subnets}{searched})",
            f"accuracy: {' '.join(request.accuracy) or 'not known'}; "
            f"calibrated on {job.calibrate_on or 'nothing'}",
            f"inputs: batch sizes {sizes} of {list(source.example.shape)}, {source.example.dtype}",
            f"device: {find_device(job.device)}, {torch.get_num_threads()} threads, mode {job.mode}",
            f"cells: {cells}, {settings.windows} to {settings.max_windows} windows each; at least "
            f"{least_s:.0f} s",
            f"files: {job.out}, {job.scheduler_out}, progress in {job.work}"
            + "".join(f", {path}" for path in (job.csv, job.plot, job.save_bundle) if path is not None),
        ]
    )


def open_journal(job: ProfileJob, source: ProfileSource) -> Journal:
    """Open the journal of a job. The journal of a finished job is begun anew unless it is to be resumed.

    Args:
        job: what to profile.
        source: the supernet.

    Returns:
        The journal, with the records of the earlier run if the job is resumed.

    Raises:
        ResumeMismatch: there is the journal of an unfinished job that is not to be resumed, or the journal
            was begun with another machine, other weights or other options.
    """
    path = job.work / "journal.jsonl"
    facts = environment(
        source.supernet,
        find_device(job.device),
        source.example,
        run_facts(job.mode, job.include),
        job.settings,
    )
    files = (job.request.file, job.request.predictor)
    options = {
        "batch_sizes": list(job.batch_sizes),
        "request": vars(job.request),
        "files": {str(file): described(Path(file)) for file in files if file is not None},
        "memory_budget_mb": job.memory_budget_mb,
        "calibrate_on": job.calibrate_on,
    }
    if not job.resume and (job.work / "done").exists():
        shutil.rmtree(job.work)
    job.work.mkdir(exist_ok=True)
    return Journal(path, {**facts, **options}, job.resume, job.work)


def run_profile(job: ProfileJob, source: ProfileSource) -> ProfileResult:
    """Select subnets, calibrate them, measure them, and write the files of the job.

    A job that was killed continues where it stopped if it is run again with `resume`; only what was not
    measured yet is measured then.

    Args:
        job: what to profile.
        source: the supernet.

    Returns:
        The tables and what was found about them. The files are written already.

    Raises:
        ResumeMismatch: see `open_journal`.
        SubnetActError: the job is impossible. If that can be known beforehand, the error is raised before
            anything is measured.
    """
    check_job(job, source)
    _check_table(job, ["-"], [math.nan])
    journal = open_journal(job, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        selection = select_subnets(
            source,
            job.request,
            journal=journal,
            batch_sizes=job.batch_sizes,
            fit=partial(_quick_medians, job, source, Measurements(journal, "fit")),
            measure=lambda specs, sizes: _quick_medians(job, source, Measurements(), specs, sizes),
            progress=job.progress,
        )
        accuracy = [math.nan if percent is None else percent for percent in selection.accuracy]
        _check_table(job, [spec.key for spec in selection.specs], accuracy)
        _check_co_runner_subnet(job, len(selection.specs))
        warn_of_fractions(accuracy)
        calibrated = _calibrate(job, source, selection)
        runner = _runner(job, source, selection.specs, selection.accuracy)
        measurements = sweep(runner, job.batch_sizes, job.settings, Measurements(journal), job.progress)
    facts = {**selection.facts, "calibrated_on": calibrated, "measured": measured_at(journal)}
    dominated = count_dominated(job, measurements, accuracy)
    if dominated is not None:
        facts["dominated"] = dominated
    table = table_of(runner, job.batch_sizes, job.settings, measurements, accuracy, **facts)
    cells = count_cells(job, measurements, len(accuracy))
    result = ProfileResult(table, table.monotone(), *cells, dominated, calibrated)
    _write(job, result, runner)
    (job.work / "done").touch()
    return result


def _check_table(job: ProfileJob, keys: Sequence[str], accuracy: Sequence[float]) -> None:
    """Refuse, before measuring, keys and accuracies of which no table can be made."""
    LatencyTable.from_arrays(keys, accuracy, job.batch_sizes, [[1.0] * len(job.batch_sizes)] * len(keys))


def _check_co_runner_subnet(job: ProfileJob, count: int) -> None:
    settings = job.settings
    if settings.co_runners and not 0 <= settings.co_runner_subnet < count:
        raise TableError(
            f"co_runner_subnet: there is no subnet {settings.co_runner_subnet}; choose from 0 to {count - 1}"
        )


def _runner(
    job: ProfileJob,
    source: ProfileSource,
    specs: Sequence[SubnetSpec],
    accuracy: Sequence[float | None] | None = None,
) -> TimedRunner:
    engine = engine_for(
        source.supernet,
        specs,
        job.mode,
        example=source.example,
        device=find_device(job.device),
        memory_budget_mb=job.memory_budget_mb,
        accuracy=accuracy,
    )
    return TimedRunner(engine, job.mode, job.include)


def _quick_medians(
    job: ProfileJob,
    source: ProfileSource,
    measurements: Measurements,
    specs: Sequence[SubnetSpec],
    batch_sizes: Sequence[int],
) -> list[list[float]]:
    """Measure subnets in few windows, for a search; return medians in ms, NaN if the memory ran out."""
    few = min(3, job.settings.windows)
    settings = replace(job.settings, co_runners=(), co_runner_subnet=0, windows=few, max_windows=few)
    progress = job.progress and len(specs) > 1
    sweep(
        _runner(job, source, specs), batch_sizes, settings, measurements, progress, "measuring a few subnets"
    )

    def median(i: int, size: int) -> float:
        if measurements.impossible((0, i, size)):
            return math.nan
        return statistics_of(measurements.windows[0, i, size], settings.tolerance, [50])["p50"]

    return [[median(i, size) for size in batch_sizes] for i in range(len(specs))]


def count_cells(job: ProfileJob, measurements: Measurements, subnets: int) -> tuple[int, int]:
    """Return how many cells ran, beside every number of co-runners, and how many of them are not stable.

    Args:
        job: gives the batch sizes, the numbers of co-runners and the tolerance.
        measurements: the windows of all cells.
        subnets: the number of subnets that were measured.
    """
    numbers = (0, *job.settings.co_runners)
    cells = [(n, i, b) for n in numbers for i in range(subnets) for b in job.batch_sizes]
    ran = [cell for cell in cells if not measurements.impossible(cell)]
    return len(ran), sum(not measurements.stable(cell, job.settings.tolerance) for cell in ran)


def count_dominated(job: ProfileJob, measurements: Measurements, accuracy: Sequence[float]) -> int | None:
    """Return how many subnets another subnet dominates in accuracy and in the medians of all batch sizes.

    Args:
        job: gives the batch sizes.
        measurements: the windows of all cells; only cells without co-runners count.
        accuracy: percent per subnet; if one is NaN, the result is None.
    """
    if any(map(math.isnan, accuracy)):
        return None

    def median(cell: Cell) -> float:
        if measurements.impossible(cell):
            return math.inf
        return float(np.median(np.concatenate([window["host_ms"] for window in measurements.windows[cell]])))

    costs = [[-percent, *(median((0, i, b)) for b in job.batch_sizes)] for i, percent in enumerate(accuracy)]
    return len(costs) - len(non_dominated(np.array(costs)))


def _calibrate(job: ProfileJob, source: ProfileSource, selection: Selection) -> str:
    """Calibrate the selected subnets, if the job says so; return the origin of their statistics."""
    supernet, specs = source.supernet, selection.specs
    if not supernet.norm_operators():
        return "nothing to calibrate"
    if not job.calibrate_on:
        uncalibrated = sum(not supernet.calibrated(spec) for spec in specs)
        if not uncalibrated:
            return "their own statistics"
        return (
            f"not calibrated: {uncalibrated} of {len(specs)} subnets ran on the supernet's shared BatchNorm "
            "statistics; latencies are valid, accuracies are not"
        )
    supernet.to(find_device(job.device))  # a resumed job has not built an engine, which would have moved it
    batches = calibration_batches(job.calibrate_on, source.example, job.request.seed)
    calibrate(supernet, specs, batches, job.progress, resume=job.work / "calibration")
    count = random_images(job.calibrate_on)
    return f"{count} random images: latency only, no accuracy" if count else job.calibrate_on


def _write(job: ProfileJob, result: ProfileResult, runner: TimedRunner) -> None:
    result.table.save(job.out)
    result.scheduler.save(job.scheduler_out)
    if job.csv is not None:
        _write_csv(result.table, job.csv)
    if job.plot is not None:
        job.plot.mkdir(exist_ok=True)
        plot_heat_map(result.table, job.plot / "latency.png")
        if not any(map(math.isnan, result.table.accuracy)):
            plot_front(result.table, job.plot / "front.png")
    if job.save_bundle is not None:
        runner.engine.tables = {"measured": result.table, "scheduler": result.scheduler}
        runner.engine.save(job.save_bundle)


def _write_csv(table: LatencyTable, path: Path) -> None:
    names = list(table.statistics)
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        beside = [f"latency_ms_with_{n:g}_co_runners" for n in table.co_runners]
        writer.writerow(["id", "subnet", "accuracy", "batch_size", "latency_ms", *names, *beside])
        for i, key in enumerate(table.subnets):
            for j, size in enumerate(table.batch_sizes):
                planes = (table.latency_ms, *(table.statistics[name] for name in names), *table.co_runner_ms)
                cells = ["" if math.isnan(plane[i, j]) else float(plane[i, j]) for plane in planes]
                percent = table.accuracy[i]
                writer.writerow([i, key, "" if math.isnan(percent) else percent, size, *cells])
