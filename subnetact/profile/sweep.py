"""Measuring every cell, subnet x batch size x co-runners: in which order, how often, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from numbers import Integral
from os import PathLike
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from subnetact import __version__
from subnetact.device import machine, measure, ran_out_of_memory
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like, map_tensors, shapes
from subnetact.errors import TableError
from subnetact.journal import Journal
from subnetact.latency.arrays import warn_of_fractions
from subnetact.latency.table import LatencyTable
from subnetact.profile.corunners import CoRunners
from subnetact.profile.measurements import Cell, Measurements
from subnetact.profile.modes import Runner
from subnetact.profile.stability import Window, statistics_of
from subnetact.profile.sweep_settings import SweepSettings
from subnetact.supernet.supernet import Supernet

__all__ = ["environment", "make_co_runners", "measured_at", "profile_latency", "sweep", "table_of"]


def make_co_runners(runner: Runner, settings: SweepSettings) -> CoRunners:
    """Return the co-runner processes, not yet started; they run subnet `settings.co_runner_subnet`."""
    engine = runner.engine
    network = engine.supernet.extract(engine.ready(settings.co_runner_subnet).spec).to(engine.device)
    x = map_tensors(lambda part: part.to(engine.device), batch_like(engine.example, 1))
    return CoRunners(network, x, settings.co_runners[-1])


def sweep(
    runner: Runner,
    batch_sizes: Sequence[int],
    settings: SweepSettings,
    readings: Measurements,
    progress: bool = True,
    label: str = "profiling",
    measure: Callable[..., Window] = measure,
    co_runners: Callable[[Runner, SweepSettings], CoRunners] = make_co_runners,
) -> Measurements:
    """Measure until every cell has the windows it needs, and return the readings.

    Measurements that are there already are not taken again. A cell whose memory runs out is noted and
    skipped, and so are larger batches of its subnet.

    Args:
        runner: prepares the call of each cell.
        batch_sizes: ascending.
        settings: how each cell is measured, and beside how many co-runners.
        readings: where windows are kept.
        progress: whether to show a progress bar.
        label: what the progress bar says.
        measure: takes one window of a cell; it is called as `subnetact.timing.measure` is.
        co_runners: makes the co-runners, if the settings want any.
    """
    cells = [(n, i, b) for n in (0, *settings.co_runners) for i in runner.engine.ids for b in batch_sizes]
    company: CoRunners | nullcontext[None] = nullcontext()
    if settings.co_runners:
        company = co_runners(runner, settings)
    with company as others, tqdm(total=0, desc=label, unit="window", disable=not progress or None) as bar:
        for wave in _waves(cells, settings, readings):
            level = 0
            for cell in wave:
                bar.total = bar.n + _remaining(cells, settings, readings)
                if others is not None and cell[0] == level:
                    others.check()
                elif others is not None:
                    others.run(cell[0])
                    level = cell[0]
                _visit(runner, cell, settings, readings, measure)
                bar.update()
            if others is not None:
                others.run(0)
    return readings


def _waves(
    cells: Sequence[Cell], settings: SweepSettings, readings: Measurements
) -> Iterable[Iterable[Cell]]:
    """Cells in the order of their visits; who consumes a cell must visit it before asking for the next."""
    if settings.order == "sequential":
        for cell in cells:
            while readings.wants(cell, settings):
                yield [cell]
        return
    while True:
        wanting = [cell for cell in cells if readings.wants(cell, settings)]
        if not wanting:
            return
        behind = min(len(readings.windows.get(cell, ())) for cell in wanting)
        now = [cell for cell in wanting if len(readings.windows.get(cell, ())) == behind]
        yield (cell for cell in now if not readings.impossible(cell))


def _remaining(cells: Sequence[Cell], settings: SweepSettings, readings: Measurements) -> int:
    counts = ((cell, len(readings.windows.get(cell, ()))) for cell in cells)
    return sum(
        max(settings.windows - count, int(readings.wants(cell, settings)))
        for cell, count in counts
        if not readings.impossible(cell)
    )


def _visit(
    runner: Runner,
    cell: Cell,
    settings: SweepSettings,
    readings: Measurements,
    measure: Callable[..., Window],
) -> None:
    _, subnet, batch_size = cell
    try:
        with runner.prepared(subnet, batch_size) as timed:
            window = measure(
                timed.call,
                runner.device,
                warmup_ms=settings.warmup_ms,
                min_time_ms=settings.min_time_ms / settings.windows,
                min_runs=3,
                before=timed.before,
            )
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        if runner.device.type == "cuda":
            torch.cuda.empty_cache()
        readings.add(cell, None)
    else:
        readings.add(cell, window)


def environment(
    supernet: Supernet,
    device: torch.device,
    example: Any,
    running: Mapping[str, Any],
    settings: SweepSettings,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """What must be the same for two sweeps to be parts of one: machine, versions, weights, settings.

    Args:
        supernet: what is measured.
        device: where.
        example: one input without a batch dimension.
        running: `Runner.settings`.
        settings: how it is measured.
        fingerprint: the supernet's, where it is known already.
    """
    return {
        **machine(device),
        "supernet": fingerprint or supernet.fingerprint(),
        "space": supernet.space.id,
        "dtype": str(next(supernet.parameters()).dtype).removeprefix("torch."),
        "input_shape": shapes(example),
        "input_dtype": map_tensors(lambda part: str(part.dtype).removeprefix("torch."), example),
        **running,
        **settings.to_json(),
        "subnetact": __version__,
    }


def _environment_of(runner: Runner, settings: SweepSettings) -> dict[str, Any]:
    engine = runner.engine
    return environment(
        engine.supernet, engine.device, engine.example, runner.settings, settings, engine.fingerprint
    )


def measured_at(journal: Journal | None) -> str:
    """Return when a sweep ended: now, or what its journal noted the first time."""
    for line in journal.of("measured") if journal else ():
        return str(line["at"])
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if journal is not None:
        journal.append("measured", at=now)
    return now


def table_of(
    runner: Runner,
    batch_sizes: Sequence[int],
    settings: SweepSettings,
    readings: Measurements,
    accuracy: Sequence[float],
    **facts: Any,
) -> LatencyTable:
    """The readings as a table, stamped with the environment and further facts."""
    shape = len(runner.keys), len(batch_sizes)

    def statistics(level: int) -> dict[str, np.ndarray]:
        cells = [(level, i, b) for i in range(shape[0]) for b in batch_sizes]
        found = [
            {} if readings.impossible(cell) or cell not in readings.windows
            else statistics_of(readings.windows[cell], settings.stability, settings.quantiles)
            for cell in cells
        ]  # fmt: skip
        names = dict.fromkeys(name for one in found for name in one)
        return {name: np.array([one.get(name, math.nan) for one in found]).reshape(shape) for name in names}

    found = {level: statistics(level) for level in (0, *settings.co_runners)}
    alone = found[0]
    if settings.statistic not in alone:
        raise TableError("no cell could be measured: the memory ran out in all of them; use smaller batches")
    for count in ("windows", "runs"):
        for values in found.values():
            if count in values:
                values[count] = np.nan_to_num(values[count])
    levels = tuple(found) if settings.co_runners else ()
    co_runner_ms = [found[n].get(settings.statistic, np.full(shape, math.nan)) for n in levels]
    beside = {f"{name}_with_{n}_co_runners": found[n][name] for n in levels[1:] for name in found[n]}
    return LatencyTable.from_arrays(
        runner.keys,
        accuracy,
        batch_sizes,
        alone[settings.statistic],
        statistics={**alone, **beside},
        stamp={
            **_environment_of(runner, settings),
            "out_of_memory": sorted(list(cell) for cell in readings.out_of_memory),
            **facts,
        },
        co_runners=levels,
        co_runner_ms=co_runner_ms if levels else None,
    )


def profile_latency(
    engine: Engine,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    accuracy: Sequence[float] | None = None,
    statistic: str = "p50",
    warmup_ms: float = 20.0,
    min_time_ms: float = 100.0,
    rounds: int = 5,
    progress: bool = True,
    max_rounds: int | None = None,
    stability: float = 0.05,
    resume: str | PathLike[str] | None = None,
) -> LatencyTable:
    """Measure every registered subnet at every batch size on the engine's device.

    Rounds over all cells are interleaved, so that a machine that speeds up or slows down does so for
    every cell. Times are synchronised host times of `engine.ready(subnet)(x)` with x already on the
    device; on cuda the statistics of the time between CUDA events stand beside them as `device_p50` and so
    on.

    Args:
        engine: the subnets.
        batch_sizes: ascending.
        accuracy: percent, one a subnet; unknown where left out.
        statistic: which one becomes `latency_ms`: mean, p50, p90, p95 or p99. All are kept.
        warmup_ms: untimed running before each cell of each round.
        min_time_ms: timed running of each cell, over all rounds.
        rounds: how often to come back to each cell.
        progress: whether to show a progress bar.
        max_rounds: how often to come back to cells whose median is not known well; None = `rounds`.
        stability: how well it must be, relative (`subnetact.windows.stable`).
        resume: a file to keep what was measured, and to go on from; None = none.

    Raises:
        TableError: an argument that no table can be made of.
        ResumeMismatch: `resume` is of another environment.
    """
    if not isinstance(engine, Engine):
        raise TableError(
            f"expected an Engine, got {type(engine).__name__}; make one, Engine(supernet, specs, example=x)"
        )
    if isinstance(batch_sizes, Integral):
        raise TableError(f"batch_sizes: {batch_sizes} is one number; write ({batch_sizes},)")
    batch_sizes = tuple(batch_sizes)
    settings = SweepSettings(
        warmup_ms, min_time_ms, rounds, max(rounds, max_rounds or rounds), stability, statistic=statistic
    )
    known = [math.nan] * len(engine) if accuracy is None else list(accuracy)
    LatencyTable.from_arrays(engine.keys, known, batch_sizes, np.ones((len(engine), len(batch_sizes))))
    warn_of_fractions(known)
    runner = Runner(engine)
    journal = None
    if resume is not None:
        facts = {"subnets": list(engine.keys), "batch_sizes": list(batch_sizes)}
        journal = Journal(resume, {**_environment_of(runner, settings), **facts})
    readings = sweep(runner, batch_sizes, settings, Measurements(journal), progress)
    return table_of(runner, batch_sizes, settings, readings, known, measured=measured_at(journal))
