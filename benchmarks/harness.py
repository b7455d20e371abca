"""What benchmarks share: options, results that are kept after every part, contenders in turns, and pages.

    python benchmarks/NAME.py [--only PART ...]   # measures, and writes results/NAME.json after every part
    python benchmarks/NAME.py --report            # writes the figures of results/NAME.md from it

Words around the figures of a page are written by hand: only what stands between its two comments is made.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().with_name("results")
sys.path += [str(ROOT / folder) for folder in ("tests", "examples")]  # Some measure what is made there.
Facts = dict[str, Any]


# -- results -------------------------------------------------------------------------------------------


def read(path: Path) -> Facts:
    """Return the results so far; none if there is no file."""
    found: Facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def save(path: Path, known: Facts) -> None:
    """Write the results; a file is whole at all times."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def header(packages: Iterable[str] = (), device: str = "cpu") -> Facts:
    """Return the machine, its load, and the versions of torch and of other packages that are installed."""
    import torch

    from subnetact.device import machine

    facts: Facts = {**machine(torch.device(device)), "load": round(os.getloadavg()[0], 2)}
    for name in packages:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


# -- options and parts ---------------------------------------------------------------------------------


class Run:
    """One run of a benchmark.

    Attributes:
        args: its options.
        known: its results, those of earlier runs among them.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.known = read(args.out)

    def save(self) -> None:
        """Write the results so far, from within a part that takes long."""
        save(self.args.out, self.known)


Part = Callable[[Run], Any]


def options_of(doc: str | None, name: str, parts: Iterable[str] = ()) -> ArgumentParser:
    """Return a parser with the options that benchmarks share.

    Args:
        doc: what the benchmark does.
        name: the name of its results.
        parts: what may be measured by itself.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(only=None)
    if parts:
        parser.add_argument("--only", nargs="+", choices=[*parts], help="measure these parts; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="the results")
    parser.add_argument("--report", action="store_true", help="write the page from the results, and stop")
    return parser


def run(
    parser: ArgumentParser,
    name: str,
    parts: Mapping[str, Part],
    report: Callable[[Facts], Iterable[str]] | None = None,
    packages: Iterable[str] = (),
    machine_of_each: bool = True,
) -> None:
    """Measure the parts that the options ask for, or write the page.

    Args:
        parser: from `options_of`.
        name: the name of the page.
        parts: name -> what measures it. What it returns is kept under the name; nothing, if it keeps its
            figures itself.
        report: makes the lines of the page; None for a benchmark without a page.
        packages: those whose versions matter.
        machine_of_each: whether each part has the machine with its figures, or all have it in common.
    """
    this = Run(parser.parse_args())
    if this.args.report:
        if report is None:
            raise SystemExit(f"{name} has no page; its results are in {this.args.out}")
        write_section(name, report(this.known))
        return
    import torch

    torch.set_num_threads(this.args.threads)
    facts = header(packages, getattr(this.args, "device", "cpu"))
    if not machine_of_each:
        this.known["machine"] = facts
    for part in this.args.only or parts:
        found = parts[part](this)
        if found is not None:
            this.known[part] = {**found, "machine": facts} if machine_of_each else found
            print(json.dumps(this.known[part], indent=1), flush=True)
        this.save()


# -- measuring -----------------------------------------------------------------------------------------


def interleaved_ms(
    runs: Mapping[str, Callable[[], Any]],
    seconds: float,
    passes: int = 7,
    wait: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run all contenders, pass by pass in a random order: the machine is equally fast for all of them.

    Args:
        runs: name of a contender -> what is timed.
        seconds: time in s after which no further pass begins.
        passes: the least number of passes.
        wait: returns as soon as the device has done what a run has asked of it.
        clock: `time.process_time` or `time.thread_time` for CPU time.

    Returns:
        Name of a contender -> the time of each of its runs, in ms.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, end, rng, done = list(runs), time.perf_counter() + seconds, random.Random(0), 0
    while done < passes or time.perf_counter() < end:
        rng.shuffle(order)
        for name in order:
            start = clock()
            runs[name]()
            wait()
            times[name].append((clock() - start) * 1e3)
        done += 1
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return the median, over the passes, of the time of every contender divided by that of the base."""
    return {
        name: median(a / b for a, b in zip(taken, times[base], strict=True)) for name, taken in times.items()
    }


def resident_mb() -> float:
    """Return the memory that is resident now, in MiB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- pages ---------------------------------------------------------------------------------------------


def write_section(name: str, lines: Iterable[str]) -> None:
    """Replace the lines between the two comments of a page, `results/NAME.md`."""
    page = RESULTS / f"{name}.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    _, tail = rest.split(end)
    page.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def plot_bars(
    groups: Sequence[Mapping[str, float]],
    labels: Sequence[str],
    title: str,
    axis: str,
    out: Path,
    top: float | None = None,
    line: float = 1.0,
) -> None:
    """Draw groups of bars side by side, for example of times as multiples of one contender's time.

    Args:
        groups: per group, for example a network, name of a contender -> its value.
        labels: what is written below every group.
        title: the title.
        axis: what the values are, in words, with their unit.
        out: the file to write, a PNG.
        top: where the axis of values ends; longer bars are cut. If None, above the longest bar.
        line: the value at which a line is drawn, for example that of the base that others are divided by.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for group in groups for name in group))
    figure, axes = plt.subplots(figsize=(12, 4.2))
    for i, name in enumerate(names):
        at = [c + (i - len(names) / 2) * 0.85 / len(names) for c in range(len(groups))]
        axes.bar(at, [group.get(name, 0.0) for group in groups], 0.8 / len(names), label=name)
    axes.axhline(line, color="black", linewidth=0.6)
    axes.set_xticks(range(len(groups)), labels, fontsize=7)
    axes.set_ylabel(axis)
    axes.margins(y=0.2)  # room for the legend
    if top is not None:
        axes.set_ylim(0, top)
    axes.set_title(title, fontsize=10)
    axes.legend(ncol=min(len(names), 8), fontsize=7, loc="upper center")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
