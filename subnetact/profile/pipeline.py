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
from subnetact.profile.modes import MEMORY_BUDGET_MB, TimedRunner, check_mode, engine_for, run_facts
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
from subnetact.profile.sweep import Sweep, SweepSettings, environment
from subnetact.spec import SubnetSpec

__all__ = ["ProfileJob", "count_dominated", "count_stable", "outline", "run_profile"]


@dataclass(frozen=True)
class ProfileJob:
    """What to profile, how, and which files to write.

    Attributes:
        request: which subnets.
        settings: how they are measured.
        batch_sizes: ascending.
        device: cpu, cuda, cuda:1.
        mode: one of `subnetact.profile.MODES`.
        include: what a timed call includes besides the forward pass: `actuation`, `h2d`.
        memory_budget_mb: memory for fused programs and CUDA graphs, in MiB.
        calibrate_on: a .npy file of images (N, C, H, W); PKG.MOD:FUNCTION, which returns batches; or random:N
            for N random images, for latency only. If not given, subnets keep the statistics that they have.
        out: the table as measured. NAME.scheduler.json beside it is the table for a Batcher or a simulation:
            its latencies never fall as the batch grows. The folder NAME.json.work is what `resume` reads; it
            may be deleted after the run.
        csv: the table, one line per cell.
        save_bundle: a directory for weights, statistics, subnets and tables.
        plot: a directory for a heat map, and for the Pareto front if accuracies are known.
        resume: continue where an earlier run stopped.
        progress: whether to show progress bars when standard error is a terminal.
    """

    request: SelectionRequest = field(default_factory=SelectionRequest)
    settings: SweepSettings = field(default_factory=SweepSettings)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    device: str = "cpu"
    mode: str = "zero-copy"
    include: tuple[str, ...] = ()
    memory_budget_mb: float = MEMORY_BUDGET_MB
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


def check_job(job: ProfileJob, source: ProfileSource) -> None:
    """Refuse what could not be run or written, before anything is measured."""
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
        check_calibration_data(job.calibrate_on, source.sample)


def outline(job: ProfileJob, source: ProfileSource) -> str:
    """Return a description of what `run_profile` would do, in a few lines; nothing is measured or written.

    Args:
        job: what to profile.
        source: the supernet.

    Raises:
        SubnetActError: the job is impossible.
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
            f"inputs: batch sizes {sizes} of {list(source.sample.shape)}, {source.sample.dtype}",
            f"device: {find_device(job.device)}, {torch.get_num_threads()} threads, mode {job.mode}",
            f"cells: {cells}, {settings.windows} to {settings.max_windows} windows each; at least "
            f"{least_s:.0f} s",
            f"files: {job.out}, {job.scheduler_out}, progress in {job.work}"
            + "".join(f", {path}" for path in (job.csv, job.plot, job.save_bundle) if path is not None),
        ]
    )


def open_journal(job: ProfileJob, source: ProfileSource) -> Journal:
    """Open the journal of a job; that of a finished job is begun anew unless it is to be resumed."""
    path = job.work / "journal.jsonl"
    facts = environment(
        source.supernet,
        find_device(job.device),
        source.sample,
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


def run_profile(job: ProfileJob, source: ProfileSource) -> LatencyTable:
    """Select subnets, calibrate them, measure them, and write the files of the job.

    A job that was killed continues where it stopped if it is run again with `resume`.

    Args:
        job: what to profile.
        source: the supernet.

    Returns:
        The table as measured; its files are written already. Its stamp says how its subnets were selected and
        calibrated, and how many of them are dominated.

    Raises:
        ResumeMismatch: an unfinished job is not to be resumed, or was begun with another machine, other
            weights or other options.
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
            fit=partial(_quick_medians, job, source, journal),
            measure=partial(_quick_medians, job, source, None),
            progress=job.progress,
        )
        accuracy = [math.nan if percent is None else percent for percent in selection.accuracy]
        _check_table(job, [spec.key for spec in selection.specs], accuracy)
        _check_co_runner_subnet(job, len(selection.specs))
        warn_of_fractions(accuracy)
        calibrated = _calibrate(job, source, selection)
        runner = _runner(job, source, selection.specs, selection.accuracy)
        sweep = Sweep(runner, job.batch_sizes, job.settings, journal)
        sweep.run(job.progress)
    table = sweep.table(accuracy, calibrated_on=calibrated, **selection.facts)
    dominated = count_dominated(table)
    if dominated is not None:
        table = replace(table, stamp={**table.stamp, "dominated": dominated})
    _write(job, table, runner)
    (job.work / "done").touch()
    return table


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
        example=source.sample[None],
        device=find_device(job.device),
        memory_budget_mb=job.memory_budget_mb,
        accuracy=accuracy,
    )
    return TimedRunner(engine, job.mode, job.include)


def _quick_medians(
    job: ProfileJob,
    source: ProfileSource,
    journal: Journal | None,
    specs: Sequence[SubnetSpec],
    batch_sizes: Sequence[int],
) -> list[list[float]]:
    """Measure subnets in few windows, for a search; return medians in ms, NaN if the memory ran out."""
    few = min(3, job.settings.windows)
    settings = replace(
        job.settings,
        windows=few,
        max_windows=few,
        quantiles=(50,),
        statistic="p50",
        co_runners=(),
        co_runner_subnet=0,
    )
    sweep = Sweep(_runner(job, source, specs), batch_sizes, settings, journal, "fit")
    sweep.run(job.progress and len(specs) > 1, "measuring a few subnets")
    none = np.full((len(specs), len(batch_sizes)), math.nan)
    medians: list[list[float]] = sweep.statistics().get("p50", none).tolist()
    return medians


def count_stable(table: LatencyTable) -> tuple[int, int]:
    """Return how many cells ran, beside every number of co-runners, and how many of them are not stable."""
    names = ("stable", *(f"stable_with_{n:g}_co_runners" for n in table.co_runners))
    stable = np.stack([table.statistics[name] for name in names if name in table.statistics])
    return int((~np.isnan(stable)).sum()), int((stable == 0).sum())


def count_dominated(table: LatencyTable) -> int | None:
    """Return how many subnets another one dominates at all batch sizes; None if an accuracy is unknown."""
    if any(map(math.isnan, table.accuracy)):
        return None
    latency_ms = np.nan_to_num(table.latency_ms, nan=math.inf)
    costs = np.column_stack([-np.array(table.accuracy), latency_ms])
    return len(costs) - len(non_dominated(costs))


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
    batches = calibration_batches(job.calibrate_on, source.sample, job.request.seed)
    calibrate(supernet, specs, batches, job.progress, resume=job.work / "calibration")
    count = random_images(job.calibrate_on)
    return f"{count} random images: latency only, no accuracy" if count else job.calibrate_on


def _write(job: ProfileJob, table: LatencyTable, runner: TimedRunner) -> None:
    scheduler = table.monotone()
    table.save(job.out)
    scheduler.save(job.scheduler_out)
    if job.csv is not None:
        _write_csv(table, job.csv)
    if job.plot is not None:
        job.plot.mkdir(exist_ok=True)
        plot_heat_map(table, job.plot / "latency.png")
        if not any(map(math.isnan, table.accuracy)):
            plot_front(table, job.plot / "front.png")
    if job.save_bundle is not None:
        runner.engine.tables = {"measured": table, "scheduler": scheduler}
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
