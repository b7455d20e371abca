"""Measures every cell of a table: `profile_latency`, and the sweep behind it.

A cell is a subnet at a batch size, in the first mode or in a further one. Every cell is measured in several
short windows. All other cells that need another one are visited between two windows of one cell,
so that a machine that speeds up or slows down does so for all of them alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, TypeAlias

import numpy as np
import torch
from tqdm import tqdm

from subnetact import __version__
from subnetact.device import machine, moment, raise_if_explained, ran_out_of_memory
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like, shapes
from subnetact.errors import SubnetActError, TableError
from subnetact.files.documents import StrPath
from subnetact.files.journal import Journal
from subnetact.latency.arrays import warn_of_fractions
from subnetact.latency.table import LatencyTable
from subnetact.profile.modes import BESIDE, ScriptedProgram, TimedRunner, engine_in_mode
from subnetact.profile.stability import is_stable, quantile_name, statistics_of
from subnetact.profile.window import CLOCKS, Window, measure
from subnetact.supernet.batches import map_tensors
from subnetact.supernet.check import check_once
from subnetact.supernet.failure import summary
from subnetact.supernet.supernet import Supernet

Cell: TypeAlias = tuple[str, int, int]
"""What one latency belongs to: (mode, index of the subnet, batch size). Only a mode that is measured beside
the first one has its name there."""
BATCH_SIZES = (1, 2, 4, 8, 16)
"""The batch sizes that are measured unless a user says otherwise."""
MOST_WINDOWS = 10
"""The most windows of an unstable cell, unless a user says otherwise."""


@dataclass(frozen=True)
class SweepSettings:
    """How the cells of a table are measured.

    Attributes:
        warmup_ms: untimed running before each window, ms.
        min_time_ms: least timed running per cell, over its first windows, ms.
        windows: the number of windows of every cell.
        max_windows: most windows of a cell whose median is not known well enough (default: 10, or `windows`).
        tolerance: a cell is stable if half the width of the 90 % confidence interval of its median is at most
            this many percent of the median. Fewer than five windows never suffice. With `compare`: the
            largest difference between two tables.
        quantiles: quantiles in the table, in percent, beside mean, standard deviation and minimum.
        statistic: the statistic that becomes the table's latency: mean, p50, p90 ...; all are kept. With
            `compare`: the statistic that is compared.
    """

    warmup_ms: float = 20.0
    min_time_ms: float = 200.0
    windows: int = 5
    max_windows: int = 0
    tolerance: float = 5.0
    quantiles: tuple[float, ...] = (50, 90, 95, 99)
    statistic: str = "p50"

    def __post_init__(self) -> None:
        if not self.max_windows:
            object.__setattr__(self, "max_windows", max(self.windows, MOST_WINDOWS))
        known = ["mean", *map(quantile_name, self.quantiles)]
        if self.statistic not in known:
            raise TableError(f"statistic: {self.statistic!r} is unknown; choose from {', '.join(known)}")
        if not self.quantiles or not all(0 < q < 100 for q in self.quantiles):
            raise TableError(f"quantiles: {list(self.quantiles)} must be between 0 and 100, at least one")
        if not 1 <= self.windows <= self.max_windows:
            raise TableError(
                f"windows: {self.windows} must be at least 1 and at most max_windows, {self.max_windows}"
            )
        for name in ("warmup_ms", "min_time_ms", "tolerance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TableError(f"{name}: {getattr(self, name)} must be finite and >= 0")


def weights_of(supernet: Supernet, fingerprint: str | None = None) -> dict[str, Any]:
    """Return the facts of a stamp about the weights."""
    return {
        "supernet": fingerprint or supernet.fingerprint(),
        "space": supernet.space.id,
        "dtype": str(next(supernet.parameters()).dtype).removeprefix("torch."),
    }


def environment(
    facts: Mapping[str, Any], device: torch.device, sample: Any, settings: SweepSettings
) -> dict[str, Any]:
    """Return what must be the same to resume a journal, and becomes the stamp of the table.

    The `facts` are those of the weights and of how subnets are run.
    """
    return {
        **machine(device),
        **facts,
        "input_shape": shapes(sample),
        "input_dtype": map_tensors(lambda part: str(part.dtype).removeprefix("torch."), sample),
        **asdict(settings),
        "subnetact": __version__,
    }


def _environment_of(runner: TimedRunner, settings: SweepSettings) -> dict[str, Any]:
    engine = runner.engine
    if hasattr(engine, "supernet"):
        weights = weights_of(engine.supernet, engine.fingerprint)
    else:
        weights = {"supernet": engine.fingerprint, "space": engine.space}
    return environment({**weights, **runner.facts}, engine.device, runner.sample, settings)


class Measurements:
    """The windows of every cell, kept in the lines of a journal that are named `record`."""

    def __init__(self, journal: Journal, record: str = "window") -> None:
        self.windows: defaultdict[Cell, list[Window]] = defaultdict(list)
        self.out_of_memory: set[Cell] = set()
        self._journal = journal
        self._record = record
        with journal.fields():
            for line in journal.of(record):
                self._put(*_read(line))

    def add(self, cell: Cell, window: Window | None) -> None:
        """Keep the times of one window; None says that the memory ran out."""
        times = {clock: np.round(values, 6) for clock, values in (window or {}).items()}
        self._journal.append(self._record, cell=list(cell), **{c: t.tolist() for c, t in times.items()})
        self._put(cell, times or None)

    def impossible(self, cell: Cell) -> bool:
        """Tell whether this cell, or a smaller batch of the same subnet, ran out of memory."""
        return any(one[:2] == cell[:2] and one[2] <= cell[2] for one in self.out_of_memory)

    def _put(self, cell: Cell, window: Window | None) -> None:
        if window is None:
            self.out_of_memory.add(cell)
        else:
            self.windows[cell].append(window)


def _read(line: Mapping[str, Any]) -> tuple[Cell, Window | None]:
    mode, subnet, batch_size = line["cell"]
    if mode not in ("", *BESIDE) or not all(type(n) is int and n >= 0 for n in (subnet, batch_size)):
        raise ValueError(f"a cell {line['cell']!r}")
    window = {name: np.array(line[name], np.float64) for name in (*CLOCKS, "busy") if name in line}
    for times in window.values():
        if times.ndim != 1 or not times.size or not np.isfinite(times).all() or times.min() < 0:
            raise ValueError("times in ms that are not finite numbers >= 0")
    return (mode, subnet, batch_size), window or None


class Sweep:
    """Measures every cell until it has the windows it needs; `record` names their lines in the journal."""

    def __init__(
        self,
        runner: TimedRunner,
        batch_sizes: Sequence[int],
        settings: SweepSettings,
        journal: Journal | None = None,
        record: str = "window",
        beside: Sequence[str] = (),
    ) -> None:
        self.runner, self.batch_sizes, self.settings = runner, tuple(batch_sizes), settings
        further = {mode: TimedRunner(runner.engine, mode, sample=runner.sample) for mode in beside}
        self._runners = {"": runner, **further}
        self.journal = journal or Journal(None, {})
        self.measurements = Measurements(self.journal, record)
        self._cells = [(n, i, b) for n in self._runners for i in runner.engine.ids for b in self.batch_sizes]

    def run(self, progress: bool = True, label: str = "profiling") -> None:
        """Measure what is not measured yet, with a progress bar when standard error is a terminal."""
        windows = self.measurements.windows
        with tqdm(total=0, desc=label, unit="window", disable=not progress or None) as bar:
            while missing := self._missing():
                bar.total = bar.n + sum(missing.values())
                fewest = min(len(windows[cell]) for cell in missing)
                for cell in [cell for cell in missing if len(windows[cell]) == fewest]:
                    if self.measurements.impossible(cell):
                        continue
                    self._measure_window(cell)
                    bar.update()

    def _missing(self) -> dict[Cell, int]:
        """Return how many more windows are needed at least, for every cell that needs one."""
        missing = {}
        for cell in self._cells:
            windows = self.measurements.windows[cell]
            left = self.settings.windows - len(windows)
            if left <= 0 and len(windows) < self.settings.max_windows:
                left = int(not is_stable(windows, self.settings.tolerance))
            if left > 0 and not self.measurements.impossible(cell):
                missing[cell] = left
        return missing

    def _measure_window(self, cell: Cell) -> None:
        settings, (mode, subnet, batch_size) = self.settings, cell
        runner = self._runners[mode]
        warmup_ms, least_ms = settings.warmup_ms, settings.min_time_ms / settings.windows
        try:
            with runner.prepared(subnet, batch_size) as call:
                window = measure(call, runner.engine.device, warmup_ms=warmup_ms, min_time_ms=least_ms)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise_if_explained(error, SubnetActError)
                bound = getattr(runner.engine.ready(subnet), "bound", None)
                where = str(error) if bound is None else summary(bound.view, error)
                raise TableError(
                    f"subnet {subnet} ({runner.engine.keys[subnet]}) does not run at batch size "
                    f"{batch_size}: {where}; give the engine an example that "
                    "the network takes, or other batch sizes"
                ) from error
            if runner.engine.device.type == "cuda":
                torch.cuda.empty_cache()
            window = None
        self.measurements.add(cell, window)

    def statistics(self, mode: str = "") -> dict[str, np.ndarray]:
        """Return arrays (subnets, batch sizes) by name, NaN where memory ran out; none if it always did."""
        found = []
        for cell in (cell for cell in self._cells if cell[0] == mode):
            windows = [] if self.measurements.impossible(cell) else self.measurements.windows[cell]
            tolerance, quantiles = self.settings.tolerance, self.settings.quantiles
            found.append(statistics_of(windows, tolerance, quantiles) if windows else {})
        names = dict.fromkeys(name for one in found for name in one)
        shape, ids = (len(self.runner.engine.keys), len(self.batch_sizes)), list(self.runner.engine.ids)
        # A subnet that was removed has no latency.
        arrays = {name: np.full(shape, math.nan) for name in names}
        for name, cells in arrays.items():
            cells[ids] = np.reshape([one.get(name, math.nan) for one in found], (-1, shape[1]))
        return {name: np.nan_to_num(a) if name in ("windows", "runs") else a for name, a in arrays.items()}

    def table(self, accuracy: Sequence[float | None], **facts: Any) -> LatencyTable:
        """Return the measurements as a table; `facts` are further facts for the stamp."""
        runner, settings = self.runner, self.settings
        found: dict[str, np.ndarray] = {}
        for mode in self._runners:
            found |= {f"{name}_of_{mode}" if mode else name: a for name, a in self.statistics(mode).items()}
        if settings.statistic not in found:
            raise TableError("no cell could be measured: the memory ran out in all; use smaller batches")
        if "fused" in runner.facts:
            fused = np.isin(range(len(runner.engine.keys)), runner.facts["fused"])[:, None]
            found["fused"] = fused + 0.0 * found[settings.statistic]  # NaN where nothing ran
        return LatencyTable(
            runner.engine.keys,
            accuracy,
            self.batch_sizes,
            found[settings.statistic],
            statistics=found,
            stamp={**_environment_of(runner, settings), "measured": self._measured_at(), **moment(), **facts},
        )

    def _measured_at(self) -> str:
        """Return the time in UTC, ISO 8601; a journal keeps the time at which its sweep ended."""
        for line in self.journal.of("measured"):
            return str(line["at"])
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.journal.append("measured", at=now)
        return now


def profile_latency(
    engine: Any,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    accuracy: Sequence[float | None] | None = None,
    statistic: str = SweepSettings.statistic,
    warmup_ms: float = SweepSettings.warmup_ms,
    min_time_ms: float = SweepSettings.min_time_ms,
    windows: int = SweepSettings.windows,
    progress: bool = True,
    max_windows: int = SweepSettings.max_windows,
    tolerance: float = SweepSettings.tolerance,
    resume: StrPath | None = None,
    shape: int = -1,
    check: bool = True,
    mode: str | None = None,
    beside: str | Sequence[str] = (),
) -> LatencyTable:
    """Measure every registered subnet at every batch size on the engine's device, all of them in one mode.

    If the engine runs all its subnets in one mode, as fused programs for example, they are measured as it
    runs them. If its memory budget suffices for the programs of some only, all are measured `zero-copy`, so
    that they can be compared with each other. A server of such an engine is better off with
    `mode="as served"`, a mixture, which has no Pareto front: its statistic `fused` says which is which.
    A table of an engine is neither the latency of a view, `supernet.subnet(spec)`, nor that of an extracted
    network; `beside=("view", "extract")` measures these, too, in turns.

    What was exported is measured as it is: `profile_latency(load_exported(path, trusted=True))`, and
    `profile_latency(torch.jit.load(path))` for a file of `to_torchscript`. The stamp of the table names the
    kind of program, and who schedules another kind refuses the table.

    The table is returned and not added to the engine. `engine.tables[name] = table` adds it, so that
    `Engine.save` writes it into the bundle.

    Times are synchronised host times of `engine.ready(subnet)(x)` with x on the device. On CUDA the table
    also has statistics of the times between CUDA events, `device_p50` for example. Every cell is measured in
    several windows, between which all other cells that need another one are visited.

    Args:
        engine: the `Engine` whose subnets are measured, an `ExportedEngine`, or the module in a file of
            `to_torchscript`.
        batch_sizes: ascending.
        accuracy: percent per subnet. If None, the accuracies of the engine, `engine.accuracy`. Accuracies
            that are not known are NaN, and schedulers refuse the table until `table.with_accuracy([...])`.
        statistic: `mean`, `p50`, `p90`, `p95` or `p99`, which becomes `table.latency_ms`.
        warmup_ms: untimed running before each window, ms.
        min_time_ms: least timed running per cell, over its first windows, ms.
        windows: the number of windows of every cell.
        max_windows: most windows of a cell whose median is not known well enough; 0 means 10, or `windows`.
        tolerance: a cell is stable if half the width of the 90 % confidence interval of its median is at most
            this many percent of the median.
        progress: whether to show a progress bar when standard error is a terminal.
        resume: a file that keeps every window as soon as it is measured. If the file exists, its windows are
            not measured again. If None, nothing is kept.
        shape: which of the shapes of the engine to measure, a position in `engine.samples`. By default the
            largest, for which a scheduler is safe with all of them. `Batcher(engine, table=tables)` takes one
            table per shape.
        check: whether to run `supernet.check` on one input of this shape, once per supernet, if there is one.
        mode: how an `Engine` runs all subnets: `zero-copy`, `fused`, `graphs` (CUDA only) or `compile`;
            `view` or `extract`, as ordinary modules; or `as served`, each as the engine runs it. An engine
            that runs otherwise is left as it is, and another one with its weights is measured.
        beside: modes `view` and `extract` that are measured in turns with the first, as statistics such as
            "p50_of_extract".

    Returns:
        The table, stamped with the machine, the versions, the weights' fingerprint and the settings. Cells
        that ran out of memory are NaN. `table.statistics` keeps all statistics; its "stable" says which
        medians are known to `tolerance` percent, and were not measured beside other work for which this
        process waited longer than that ("busy").

    Raises:
        TableError: `engine` is nothing that can be measured, no table can be made of an argument, a subnet
            does not run, or not in this mode, or all cells ran out of memory.
        DeviceError: the device has no such mode.
        InsertError: `supernet.check` fails; the message names the module.
        ResumeMismatch: the file `resume` was begun with another machine, other weights or settings.
        FileFormatError: the file `resume` is no journal.

    Example:
        >>> table = subnetact.profile_latency(engine, [1, 4], accuracy=[71.3, 76.1], resume="sweep.jsonl")
        >>> engine.tables["cpu"] = table  # engine.save(directory) writes the table too
    """
    if isinstance(engine, torch.jit.ScriptModule):
        engine = ScriptedProgram(engine)
    if not hasattr(engine, "program"):
        raise TableError(
            f"expected an Engine, got {type(engine).__name__}; make one, Engine(supernet, specs, example=x), "
            "or give what load_exported or, for a file of to_torchscript, torch.jit.load returned"
        )
    if not isinstance(batch_sizes, Iterable):
        raise TableError(f"batch_sizes: {batch_sizes} is one number; write ({batch_sizes},)")
    batch_sizes = tuple(batch_sizes)
    settings = SweepSettings(warmup_ms, min_time_ms, windows, max_windows, tolerance, statistic=statistic)
    known = engine.accuracy if accuracy is None else accuracy
    LatencyTable(engine.keys, known, batch_sizes, np.ones((len(engine.keys), len(batch_sizes))))
    warn_of_fractions(known)
    samples = engine.samples
    if type(shape) is not int or not -len(samples) <= shape < len(samples):
        raise TableError(f"shape: {shape!r} is no position among the {len(samples)} examples of the engine")
    if check and isinstance(engine, Engine):
        check_once(engine.supernet, batch_like(samples[shape], 1, engine.device))
    measured, mode = engine_in_mode(engine, mode)
    beside = (beside,) if isinstance(beside, str) else tuple(beside)
    if beside and not (set(beside) <= set(BESIDE) and isinstance(engine, Engine)):
        raise TableError(f"beside: {list(beside)}; choose from {', '.join(BESIDE)}, for an Engine")
    runner = TimedRunner(measured, mode, sample=samples[shape])
    facts = {"subnets": list(engine.keys), "batch_sizes": list(batch_sizes), "beside": list(beside)}
    journal = Journal(resume, {**_environment_of(runner, settings), **facts})
    sweep = Sweep(runner, batch_sizes, settings, journal, beside=beside)
    sweep.run(progress)
    return sweep.table(known)
