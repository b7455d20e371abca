"""Makes the tables and the figure of `batcher.py` from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS

OURS = ("SlackFit", "HullFit")


def report(result: dict[str, Any]) -> list[str]:
    """Plot the result, and return the lines of results/batcher.md."""
    _plot(result, RESULTS / "batcher.png")
    return [*_digits(result["digits"]), *_http(result["http"])]


def _where(section: dict[str, Any]) -> str:
    on = section["machine"]
    machine = f"{on['device_name']}, {on['cpus']} CPUs, torch {on['torch']}, Python {on['python']}"
    return f"{machine}, switch interval {section['switch_interval_ms']:g} ms"


def _cell(contender: dict[str, Any]) -> str:
    return f"{100 * contender['attainment']:.1f}, **{contender['effective_accuracy']:.1f}**"


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _best_of_bursts(contenders: dict[str, dict[str, Any]], bursts: Sequence[float]) -> list[str]:
    lines = []
    for load in (f"{burst:g}" for burst in bursts):
        best = max(
            (n for n in contenders if n not in OURS), key=lambda n: float(contenders[n]["by_burst"][load])
        )
        ours = ", ".join(f"{name} {contenders[name]['by_burst'][load]:.1f}" for name in OURS)
        lines.append(f"* burst {load}: {best} {contenders[best]['by_burst'][load]:.1f}; {ours}")
    return lines


def _ranked(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    contenders = sorted(found["contenders"].items(), key=lambda item: -float(item[1]["effective_accuracy"]))
    return dict(contenders)


def _digits(found: dict[str, Any]) -> list[str]:
    contenders, seeds, bursts = _ranked(found), found["seeds"], found["bursts"]
    lines = [
        f"**The digits supernet, live** ({_where(found)}, one torch thread). A request is a page of 16 "
        f"digits, due in {found['slo_ms']:g} ms. A trace has lulls of {2 * found['part_s']:g} s at load "
        f"{found['lull']:g} and, between them, bursts of {found['part_s']:g} s at loads "
        f"{', '.join(f'{b:g}' for b in bursts)} in random order; the gaps have CV^2 {found['cv2']:g}. Load "
        "is the arrival rate over the rate that the largest subnet sustains, "
        f"{_range([s['capacity_qps'] for s in seeds], '.0f')} pages/s. The figures are medians of "
        f"{len(seeds)} seeds. Client and server share one process. `fixed` is one subnet behind our batcher, "
        f"`FIFO` is one subnet behind a plain queue that waits {found['fifo_delay_ms']:g} ms for a batch. "
        "Our batchers start from latencies that were learned in service; SlackFit keeps "
        f"{found['margin_ms']:g} ms in reserve. The table shows attainment in percent and **effective "
        "accuracy** (the percentage of all digits that are right and in time) of the trace, effective "
        "accuracy by seed and of each burst, and the p99 latency of the answers:",
        "",
        f"| | trace | by seed | {' | '.join(f'burst {b:g}' for b in bursts)} | p99 ms |",
        f"|{'---|' * (len(bursts) + 4)}",
    ]
    for name, contender in contenders.items():
        by_burst = " | ".join(f"{contender['by_burst'][f'{b:g}']:.1f}" for b in bursts)
        each = ", ".join(f"{percent:.1f}" for percent in contender["effective_accuracy_by_seed"])
        lines.append(
            f"| {name} | {_cell(contender)} | {each} | {by_burst} | {contender['latency_p99_ms']:.0f} |"
        )
    best = next(name for name in contenders if name not in OURS)
    by_seed = {name: contender["effective_accuracy_by_seed"] for name, contender in contenders.items()}
    points = {ours: [a - b for a, b in zip(by_seed[ours], by_seed[best], strict=True)] for ours in OURS}
    ahead = [f"{ours} {_range(gained, '+.1f')}" for ours, gained in points.items()]
    lines += [
        "",
        f"Effective accuracy on the whole trace, minus that of the best fixed contender ({best}), in points: "
        f"{', '.join(ahead)}. For each burst alone, the best fixed contender is:",
        "",
        *_best_of_bursts(contenders, bursts),
    ]
    return lines


def _http(found: dict[str, Any]) -> list[str]:
    rates = found["rates"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "",
        f"**Over HTTP** ({_where(found)}, {versions}; SLO {found['slo_ms']:g} ms at the client, of which "
        f"{found['reserve_ms']:g} ms are kept for the network). `python -m subnetact.serve`, with one worker "
        "that is a thread or a process, is compared with LitServe serving one fixed subnet with batches of "
        "up to 16 and a timeout of 2 ms; client, requests and arrivals are the same. The comparison is "
        "between whole servers: the client, HTTP and JSON share the two cores with the model. "
        "Attainment in percent and **effective accuracy** in percent:",
        "",
        "| | " + " | ".join(f"{qps}/s" for qps in rates) + " |",
        f"|{'---|' * (len(rates) + 1)}",
    ]
    for name in next(iter(rates.values())):
        lines.append(f"| {name} | {' | '.join(_cell(contenders[name]) for contenders in rates.values())} |")
    return lines


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), constrained_layout=True)
    digits = {
        load: {
            name: contender["by_burst"][load] for name, contender in result["digits"]["contenders"].items()
        }
        for load in (f"{burst:g}" for burst in result["digits"]["bursts"])
    }
    http = {
        rate: {name: contender["effective_accuracy"] for name, contender in contenders.items()}
        for rate, contenders in result["http"]["rates"].items()
    }
    groups = [
        (axes[0], digits, "in process, load of the burst"),
        (axes[1], http, "over HTTP, requests per second"),
    ]
    for axis, bars, title in groups:
        names = sorted(next(iter(bars.values())), key=lambda name: ("FIFO" in name, name))
        for i, name in enumerate(names):
            at = [c + (i - len(names) / 2) * 0.85 / len(names) for c in range(len(bars))]
            heights = [contenders[name] for contenders in bars.values()]
            axis.bar(at, heights, 0.8 / len(names), label=name, color=mpl.colormaps["tab20"](i))
        axis.set_xticks(range(len(bars)), list(bars))
        axis.set_xlabel(title)
        axis.legend(fontsize=6, ncol=2, loc="lower left")
    axes[0].set_ylabel("right and in time, % of all")
    figure.savefig(path, dpi=110)
    plt.close(figure)
