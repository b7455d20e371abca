"""Draws the figures of the pages of results that have none of their own, from the files of the benchmarks."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

from harness import plot_bars  # noqa: E402


class Bars(NamedTuple):
    """What a figure shows, as `plot_bars` takes it."""

    groups: Sequence[Mapping[str, float]]
    labels: Sequence[str]
    title: str
    axis: str


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _machine(found: Mapping[str, Any]) -> str:
    return f"{found['device_name']}, torch {found['torch']}"


def cluster() -> Bars:
    """What every server answers right and in time, per rate."""
    found = _read("cluster")
    servers = {
        "ours, Ray, 2 replicas": "subnetact on Ray Serve, 2 replicas",
        "ours, 2 threads": "subnetact, 2 threads, without Ray",
        **{f"plain Ray Serve, subnet {i}": f"plain Ray Serve, fixed subnet {i}" for i in (5, 3, 0)},
    }
    cells: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found["live"]:
        if row["server"] in servers:
            cells[row["rate"]][servers[row["server"]]].append(row["right_in_time"])
    rates = sorted(rate for rate in cells if len(cells[rate]) > 1)
    groups = [
        {name: median(cells[rate][name]) for name in servers.values() if name in cells[rate]}
        for rate in rates
    ]
    title = f"Pages of 16 digits due in 250 ms, {_machine(found['machine'])}"
    return Bars(groups, [f"{rate:g} pages/s" for rate in rates], title, "digits right and in time, %")


def coverage() -> Bars:
    """The share of models that become elastic, per library."""
    models: dict[str, list[Any]] = defaultdict(list)
    for name, facts in _read("coverage")["models"].items():
        models[name.partition(":")[0]].append(facts)
    groups = []
    for all_ in models.values():
        axes = [len(facts.get("axes", {})) for facts in all_]
        shares = {"in one axis or more": 1, "in two axes or more": 2}
        groups.append({name: 100 * mean(n >= least for n in axes) for name, least in shares.items()})
    labels = [f"{source}\n{len(all_)} models" for source, all_ in models.items()]
    return Bars(groups, labels, "Models that insert_ makes elastic", "share of the models, %")


FIGURES: dict[str, Callable[[], Bars]] = {each.__name__: each for each in (cluster, coverage)}
"""Page of results -> what its figure shows."""


def draw(page: str, folder: Path) -> str | None:
    """Draw the figure of a page into a folder; return its name, or None if the page has none here."""
    if page not in FIGURES:
        return None
    bars = FIGURES[page]()
    folder.mkdir(exist_ok=True)
    plot_bars(bars.groups, bars.labels, bars.title, bars.axis, folder / f"{page}.png", line=0.0)
    return f"{page}.png"
