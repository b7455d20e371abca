"""From a checkpoint to a latency table and a bundle, in steps that survive a kill.

The steps are: select subnets, calibrate them, measure them, write files. All of them share one journal beside
the table: a line for every selection and every window. Larger results (BatchNorm statistics, the states of
the search and of the calibration) are files beside the journal, each written atomically.
"""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from subnetact.calibration.calibrate import calibrate
from subnetact.device import find_device
from subnetact.elastic.folder import INDEX
from subnetact.engine.budget import budget_bytes
from subnetact.engine.engine import Engine
from subnetact.errors import SubnetActError, TableError, UncalibratedSubnetWarning
from subnetact.files.documents import described
from subnetact.files.journal import Journal
from subnetact.latency.arrays import ascending_sizes, percentages, warn_of_fractions
from subnetact.latency.pareto import non_dominated
from subnetact.latency.table import LatencyTable
from subnetact.profile.modes import TimedRunner, check_mode, mode_options
from subnetact.profile.selection import SelectionRequest, Wanted, select_subnets
from subnetact.profile.source import RANDOM_PREFIX, ProfileSource, calibration_batches
from subnetact.profile.sweep import BATCH_SIZES, Sweep, SweepSettings, environment, weights_of
from subnetact.spec import SubnetSpec
from subnetact.supernet.statistics import batch_norms, is_calibrated
from subnetact.supernet.supernet import Supernet


@dataclass(frozen=True)
class ProfileJob:
    """What to profile, how, and which files to write.

    Attributes:
        request: which subnets.
        settings: how they are measured.
        batch_sizes: ascending.
        device: cpu, cuda, cuda:1.
        mode: zero-copy: an engine without a memory budget, no weight is copied; fused: every subnet as a
            fused program, on CUDA as CUDA graphs; graphs: CUDA graphs of the views; compile: torch.compile
            (inductor); view or extract: ordinary modules, with the supernet's weights or with their own; as
            served: each as the engine of the bundle runs it.
        beside: view and extract are measured too, in turns with `mode`, as statistics such as p50_of_extract.
        memory_budget_mb: memory for fused programs and CUDA graphs, in MiB (default: that of an engine, 1.25
            times the weights, at most 1024).
        calibrate_on: a .npy file of images (N, C, H, W); PKG.MOD:FUNCTION, which returns batches of inputs
            without labels; or random:N for N random images, for latency only. If not given, subnets keep the
            statistics that they have.
        out: the table as measured; only what the same command made is replaced. NAME.scheduler.json beside it
            is the table for a Batcher or a simulation: its latencies never fall as the batch grows.
            The folder NAME.json.work is what `resume` reads; it may be deleted after the run.
        save_bundle: a directory for weights, statistics, subnets and tables.
        resume: continue where an earlier run stopped.
    """

    request: SelectionRequest = field(default_factory=SelectionRequest)
    settings: SweepSettings = field(default_factory=SweepSettings)
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    device: str = "cpu"
    mode: str = "zero-copy"
    beside: tuple[str, ...] = ()
    memory_budget_mb: float | None = None
    calibrate_on: str | None = None
    out: Path = Path("latency.json")
    save_bundle: Path | None = None
    resume: bool = False

    @property
    def scheduler_out(self) -> Path:
        """The file of the table for schedulers, whose latencies never fall as the batch grows."""
        return self.out.with_name(f"{self.out.name.removesuffix('.json')}.scheduler.json")

    @property
    def work(self) -> Path:
        """The folder of the journal and the results of finished steps."""
        return self.out.with_name(f"{self.out.name}.work")


def checked(
    job: ProfileJob, source: ProfileSource, command: Sequence[str] = ()
) -> tuple[Wanted, Iterable[Any]]:
    """Return the subnets wanted and the batches to calibrate with; refuse what is impossible."""
    resumes = job.resume and job.work.exists()
    for made in filter(Path.is_file, () if resumes else (job.out, job.scheduler_out)):
        _require_own(made, command)
    check_mode(job.mode, find_device(job.device))
    ascending_sizes(job.batch_sizes)
    budget_bytes(job.memory_budget_mb)
    outputs = (("out", job.out, False), ("save-bundle", job.save_bundle, True))
    for name, path, is_folder in outputs:
        if path is not None and (not path.parent.is_dir() or (path.exists() and path.is_dir() != is_folder)):
            kind = "a folder" if is_folder else "a file"
            raise TableError(f"{name}: {path} is neither new nor {kind}, in a folder that exists")
    bundle = job.save_bundle
    if bundle is not None and bundle.exists() and any(bundle.iterdir()) and not (bundle / INDEX).exists():
        raise TableError(f"save-bundle: {bundle} is neither new nor a bundle; choose a new directory")
    batches: Iterable[Any] = ()
    if job.calibrate_on:
        batches = calibration_batches(job.calibrate_on, source.sample, job.request.seed)
    return Wanted(source, job.request), batches


def _require_own(path: Path, command: Sequence[str]) -> None:
    """Refuse to replace a file that another command made."""
    with suppress(SubnetActError):
        if command and LatencyTable.load(path).stamp.get("command") == list(command):
            return
    raise TableError(
        f"out: {path} was not made by this command with these options; choose another --out, or continue "
        "with --resume and the options that made it"
    )


def open_journal(job: ProfileJob, source: ProfileSource) -> Journal:
    """Open the journal of a job; that of a finished job is begun anew unless it is to be resumed."""
    facts = {**weights_of(source.supernet), "program": "engine", "mode": job.mode}
    facts = environment(facts, find_device(job.device), source.sample, job.settings)
    options = {"batch_sizes": job.batch_sizes, **asked(job, source)}
    if not job.resume and (job.work / "done").exists():
        before = job.work.with_name(f"{job.work.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        job.work.rename(before)
    job.work.mkdir(exist_ok=True)
    return Journal(job.work / "journal.jsonl", {**facts, **options}, job.resume, job.work)


def asked(job: ProfileJob, source: ProfileSource) -> dict[str, Any]:
    """Return what a user asked for, and hashes of the files and modules it names, for journal and stamp."""
    request, origin = vars(job.request), dict(source.origin)
    named = [origin.get("checkpoint"), origin.get("model"), request["subnets"]]
    named += [*request["accuracy"], request["remeasure_accuracy"]]
    names = [name for name in (*named, job.calibrate_on) if name and not name.startswith(RANDOM_PREFIX)]
    modules = {name: sys.modules.get(name.partition(":")[0]) for name in names if ":" in name}
    paths = {name: Path(getattr(modules.get(name), "__file__", None) or name) for name in names}
    files = {name: described(path) for name, path in paths.items() if path.is_file()}
    options = {name: getattr(job, name) for name in ("beside", "memory_budget_mb", "calibrate_on")}
    return {"request": request, "source": origin, "files": files, **options}


def run_profile(job: ProfileJob, source: ProfileSource, command: Sequence[str] = ()) -> LatencyTable:
    """Select subnets, calibrate them, measure them, and write the files of the job; return the table.

    The stamp has the options of the `command` that asks for the same again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        wanted, batches = checked(job, source, command)
        journal = open_journal(job, source)
        selection = select_subnets(wanted, journal, job.batch_sizes, partial(_quick_medians, job, source))
        accuracy = percentages(selection.accuracy, [spec.key for spec in selection.specs])
        warn_of_fractions(accuracy)
        calibrated = _calibrate(job, source.supernet, selection.specs, batches)
        runner = _runner(job, source, selection.specs, selection.accuracy)
        sweep = Sweep(runner, job.batch_sizes, job.settings, journal, beside=job.beside)
        sweep.run()
    facts = {**asked(job, source), "command": list(command), "calibrated_on": calibrated}
    table = sweep.table(accuracy, **facts, **selection.facts)
    _write(job, table, runner)
    (job.work / "done").touch()
    return table


def _runner(
    job: ProfileJob, source: ProfileSource, specs: Sequence[SubnetSpec], accuracy: Sequence[float | None] = ()
) -> TimedRunner:
    engine = Engine(
        source.supernet,
        specs,
        example=source.sample[None],
        device=job.device,
        accuracy=accuracy or None,
        allow_uncalibrated=True,
        **mode_options(job.mode, job.memory_budget_mb, source.backend),
    )
    return TimedRunner(engine, job.mode)


def _quick_medians(
    job: ProfileJob,
    source: ProfileSource,
    specs: Sequence[SubnetSpec],
    batch_sizes: Sequence[int],
    journal: Journal | None = None,
) -> list[list[float]]:
    """Measure subnets in few windows, for a search; return medians in ms, NaN if the memory ran out."""
    few = min(3, job.settings.windows)
    settings = replace(job.settings, windows=few, max_windows=few, quantiles=(50,), statistic="p50")
    sweep = Sweep(_runner(job, source, specs), batch_sizes, settings, journal, "fit")
    sweep.run(len(specs) > 1, "measuring a few subnets")
    none = np.full((len(specs), len(batch_sizes)), math.nan)
    return sweep.statistics().get("p50", none).tolist()  # type: ignore[no-any-return]


def _calibrate(job: ProfileJob, supernet: Supernet, specs: list[SubnetSpec], batches: Iterable[Any]) -> str:
    """Calibrate subnets if the job says so; return the origin of their statistics."""
    if not batch_norms(supernet.network):
        return "nothing to calibrate"
    if not job.calibrate_on:
        uncalibrated = sum(not is_calibrated(supernet, spec) for spec in specs)
        if not uncalibrated:
            return "their own statistics"
        return (
            f"not calibrated: {uncalibrated} of {len(specs)} subnets ran on the supernet's shared BatchNorm "
            "statistics; latencies are valid, accuracies are not"
        )
    supernet.to(find_device(job.device))  # a resumed job has not built an engine, which would have moved it
    calibrate(supernet, specs, batches, resume=job.work / "calibration")
    only = " images: latency only, no accuracy" if job.calibrate_on.startswith(RANDOM_PREFIX) else ""
    return job.calibrate_on + only


def _write(job: ProfileJob, table: LatencyTable, runner: TimedRunner) -> None:
    scheduler = table.monotone()
    table.save(job.out)
    scheduler.save(job.scheduler_out)
    if job.save_bundle is not None:
        _name(runner.engine, table)
        runner.engine.tables = {"measured": table, "scheduler": scheduler}
        runner.engine.save(job.save_bundle)


def _name(engine: Engine, table: LatencyTable) -> None:
    """Give subnets names, numbered from the fastest: `pareto-0`, or `subnet-0` where nothing says it is one.

    A subnet is `pareto` if a search chose the table's subnets, and none of them is at least as accurate and
    at least as fast at every batch size.
    """
    costs = np.column_stack([np.nan_to_num(table.latency_ms, nan=math.inf), -np.array(table.accuracy)])
    front = set(non_dominated(costs) if "search" in table.stamp and not np.isnan(costs).any() else ())
    ranked = sorted(enumerate(engine.specs), key=lambda pair: tuple(costs[pair[0]]))
    kinds = {spec: "pareto" if i in front else "subnet" for i, spec in ranked}
    engine.supernet.card = engine.supernet.card.with_names(kinds)
