"""plot_bars: bars in groups side by side, for example of times as multiples of one contender's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["plot_bars"]


def plot_bars(
    groups: Sequence[Mapping[str, float]],
    labels: Sequence[str],
    title: str,
    axis: str,
    out: Path,
    top: float | None = None,
    line: float = 1.0,
) -> None:
    """Draw groups of bars.

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
