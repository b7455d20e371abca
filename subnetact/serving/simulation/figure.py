"""The figure of a comparison, in the style of SuperServe (NSDI'25, Figs. 8-10). It needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping

from subnetact.files.documents import StrPath
from subnetact.latency.plot import need_matplotlib
from subnetact.serving.simulation.result import SimulationResult


def plot_comparison(
    results: Mapping[str, SimulationResult], path: StrPath, title: str, bound: float | None = None
) -> None:
    """Draw SLO attainment over mean serving accuracy, one point per policy.

    Args:
        results: name of a policy -> what `simulate` returned; a policy that met no request has no point.
        path: the image file; its ending selects the format.
        title: the title.
        bound: a bound on effective accuracy, percent, drawn as a line; None for no line.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure = need_matplotlib()(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for at, (name, result) in enumerate(results.items()):
        if result.met:
            axes.scatter(result.mean_accuracy, result.attainment, marker="o" if at % 2 else "D", label=name)
    if bound is not None:
        axes.axvline(bound, color="0.6", linestyle=":", label="fluid bound (effective accuracy)")
    axes.set(xlabel="mean serving accuracy (%)", ylabel="SLO attainment", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="best")
    figure.savefig(path, dpi=130)
