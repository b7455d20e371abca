"""plot_bars: bars of times, as multiples of one contender's time, in groups side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["plot_bars"]


def plot_bars(
    groups: Sequence[Mapping[str, float]],
    labels: Sequence[str],
    title: str,
    base: str,
    out: Path,
    top: float | None = None,
) -> None:
    """Draw a group of bars per network.

    Args:
        groups: per network, name of a contender -> its time divided by that of the base.
        labels: what is written below every group.
        title: the title.
        base: what the times are divided by, in words.
        out: the file to write, a PNG.
        top: where the axis of times ends; longer bars are cut. If None, above the longest bar.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for group in groups for name in group))
    figure, axis = plt.subplots(figsize=(12, 4.2))
    for i, name in enumerate(names):
        at = [c + (i - len(names) / 2) * 0.85 / len(names) for c in range(len(groups))]
        axis.bar(at, [group.get(name, 0.0) for group in groups], 0.8 / len(names), label=name)
    axis.axhline(1.0, color="black", linewidth=0.6)
    axis.set_xticks(range(len(groups)), labels, fontsize=7)
    axis.set_ylabel(f"time / {base}")
    axis.set_ylim(0, top)
    axis.set_title(title, fontsize=10)
    axis.legend(ncol=min(len(names), 8), fontsize=7, loc="upper center")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)
