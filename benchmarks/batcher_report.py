"""Tables and figure of `batcher.py`, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["report"]

BEGIN, END = "<!-- batcher: begin -->", "<!-- batcher: end -->"
OURS = ("SlackFit", "HullFit")


def report(result: dict[str, Any], out: Path) -> None:
    """Draw what was measured, and put it into benchmarks/README.md."""
    _plot(result, out.with_suffix(".png"))
    lines = [*_null(result["null"]), *_digits(result["digits"]), *_http(result["http"])]
    readme = Path(__file__).with_name("README.md")
    head, _, rest = readme.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    readme.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")


def _where(section: dict[str, Any]) -> str:
    on = section["machine"]
    machine = f"{on['device_name']}, {on['cpus']} CPUs, torch {on['torch']}, Python {on['python']}"
    return f"{machine}, switch interval {section['switch_interval_ms']:g} ms"


def _null(found: dict[str, Any]) -> list[str]:
    qps, added = found["requests_per_second"], found["added_latency_ms"]
    repeats = len(found["all_requests_per_second"]["asyncio"])
    return [
        f"**A model that does nothing** ({_where(found)}; medians of {repeats} runs). {found['clients']} "
        f"coroutines, or {found['threads']} threads; inputs are stacked, every answer is checked against its "
        "input, SlackFit decides. Added latency counts from when a request of an even open loop was due; "
        "`one core`: the server's threads share a core (`taskset -c 0`), which spares Python's global lock "
        "the way between two; `no batcher`: what the measurement itself adds.",
        "",
        "| | requests/s |",
        "|---|---|",
        *(f"| {name} | {value:,.0f} |" for name, value in qps.items()),
        "",
        "| added latency, ms | p50 | p99 | max |",
        "|---|---|---|---|",
        *(f"| {name} | {t['p50']:.2f} | {t['p99']:.2f} | {t['max']:.1f} |" for name, t in added.items()),
        "",
        "The naive batcher has no deadlines, no choice and no counters; ours has "
        f"{found['ratio_to_naive']:.2f} of its throughput.",
    ]


def _cell(row: dict[str, Any]) -> str:
    return f"{100 * row['attainment']:.1f}, **{row['effective_accuracy']:.1f}**"


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _ranked(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = sorted(found["contenders"].items(), key=lambda item: -float(item[1]["effective_accuracy"]))
    return dict(rows)


def _digits(found: dict[str, Any]) -> list[str]:
    rows, seeds, bursts = _ranked(found), found["seeds"], found["bursts"]
    lines = [
        "",
        f"**The digits supernet, live** ({_where(found)}, one torch thread). A request is a page of 16 "
        f"digits, due in {found['slo_ms']:g} ms. The trace: lulls of {2 * found['part_s']:g} s at load "
        f"{found['lull']:g}, between them bursts of {found['part_s']:g} s at loads "
        f"{', '.join(f'{b:g}' for b in bursts)} in random order; gaps have CV^2 {found['cv2']:g}. Load is a "
        "share of what the largest subnet sustains, "
        f"{_range([s['capacity_qps'] for s in seeds], '.0f')} pages/s; {len(seeds)} seeds, medians. Client "
        "and server share one process. `fixed` is one subnet behind our batcher, `FIFO` one behind a plain "
        f"queue that waits {found['fifo_delay_ms']:g} ms for a batch. Every batcher starts from latencies "
        f"learned in service; SlackFit keeps {found['margin_ms']:g} ms in reserve. Attainment %, and "
        "**effective accuracy** % (digits right and in time, of all), of the trace and of each burst:",
        "",
        f"| | trace | by seed | {' | '.join(f'burst {b:g}' for b in bursts)} | p99 ms |",
        f"|{'---|' * (len(bursts) + 4)}",
    ]
    for name, row in rows.items():
        by_burst = " | ".join(f"{row['by_burst'][f'{b:g}']:.1f}" for b in bursts)
        each = ", ".join(f"{percent:.1f}" for percent in row["effective_accuracy_by_seed"])
        lines.append(f"| {name} | {_cell(row)} | {each} | {by_burst} | {row['latency_p99_ms']:.0f} |")
    best = next(name for name in rows if name not in OURS)
    by_seed = {name: row["effective_accuracy_by_seed"] for name, row in rows.items()}
    points = {ours: [a - b for a, b in zip(by_seed[ours], by_seed[best], strict=True)] for ours in OURS}
    ahead = [f"{ours} {_range(gained, '+.1f')}" for ours, gained in points.items()]
    lines += [
        "",
        f"Ahead of the best fixed contender, {best}, in points: {', '.join(ahead)}.",
        "",
        "**Predicted and real.** The simulator's attainment, with latencies, their noise and the time "
        "between two batches measured in service on another trace, against the batcher's own on the same "
        "arrivals; %, by seed. Under overload a few percent of speed are many points.",
        "",
        "| | predicted | real | largest difference |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "predicted_attainment" not in row:
            continue
        predicted, real = row["predicted_attainment"], row["attainment_in_batcher"]
        shown = (", ".join(f"{100 * value:.1f}" for value in values) for values in (predicted, real))
        off = max(abs(p - r) for p, r in zip(predicted, real, strict=True))
        lines.append(f"| {name} | {' | '.join(shown)} | {100 * off:.1f} |")
    return lines


def _http(found: dict[str, Any]) -> list[str]:
    rates = found["rates"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "",
        f"**Over HTTP** ({_where(found)}, {versions}; SLO {found['slo_ms']:g} ms at the client, of which "
        f"{found['reserve_ms']:g} are kept for the way). `examples/fastapi_server.py` against LitServe with "
        "one fixed subnet, a largest batch of 16 and a timeout of 2 ms; the same client, requests and "
        "arrivals. What is compared is whole servers: HTTP and JSON cost more than the model, and LitServe "
        "runs its model in a second process, ours in the server's. Attainment %, and **effective "
        "accuracy** %:",
        "",
        "| | " + " | ".join(f"{qps}/s" for qps in rates) + " |",
        f"|{'---|' * (len(rates) + 1)}",
    ]
    for name in next(iter(rates.values())):
        lines.append(f"| {name} | {' | '.join(_cell(rows[name]) for rows in rates.values())} |")
    return lines


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), constrained_layout=True)
    digits = {
        load: {name: row["by_burst"][load] for name, row in result["digits"]["contenders"].items()}
        for load in (f"{burst:g}" for burst in result["digits"]["bursts"])
    }
    http = {
        rate: {name: row["effective_accuracy"] for name, row in rows.items()}
        for rate, rows in result["http"]["rates"].items()
    }
    groups = [
        (axes[0], digits, "in process, burst over what the largest subnet sustains"),
        (axes[1], http, "over HTTP, requests a second"),
    ]
    for axis, levels, title in groups:
        names = sorted(next(iter(levels.values())), key=lambda name: ("FIFO" in name, name))
        for i, name in enumerate(names):
            at = [c + (i - len(names) / 2) * 0.85 / len(names) for c in range(len(levels))]
            heights = [rows[name] for rows in levels.values()]
            axis.bar(at, heights, 0.8 / len(names), label=name, color=mpl.colormaps["tab20"](i))
        axis.set_xticks(range(len(levels)), list(levels))
        axis.set_xlabel(title)
        axis.legend(fontsize=6, ncol=2, loc="lower left")
    axes[0].set_ylabel("right and in time, % of all")
    figure.savefig(path, dpi=110)
    plt.close(figure)
