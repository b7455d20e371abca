"""Tables and figure of `batcher.py`, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["report"]

BEGIN, END = "<!-- batcher: begin -->", "<!-- batcher: end -->"
OURS = ("SlackFit", "HullFit")
STALLED_MS = 5.0


def report(result: dict[str, Any], out: Path) -> None:
    """Draw what was measured, and put it into benchmarks/README.md."""
    _plot(result, out.with_suffix(".png"))
    lines = [*_null(result["null"]), *_digits(result["digits"])]
    lines += [*_replay(result["replay"]), *_http(result["http"])]
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
        "`one core`: batcher and clients share a core (the clock that wakes the clients has another), which "
        "spares Python's global lock the way between two; `no batcher`: what the measurement itself adds.",
        "",
        "| | requests/s |",
        "|---|---|",
        *(f"| {name} | {value:,.0f} |" for name, value in qps.items()),
        "",
        "| added latency, ms | p50 | p99 | p99 of every run | max |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {t['p50']:.2f} | {t['p99']:.2f} | "
            + ", ".join(f"{p99:.2f}" for _, p99, _ in found["all_added_latency_ms"][name])
            + f" | {t['max']:.1f} |"
            for name, t in added.items()
        ),
        "",
        "The naive batcher has no deadlines, no choice and no counters; ours has "
        f"{found['ratio_to_naive']:.2f} of its throughput.",
    ]


def _cell(row: dict[str, Any]) -> str:
    return f"{100 * row['attainment']:.1f}, **{row['effective_accuracy']:.1f}**"


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _best_of_bursts(rows: dict[str, dict[str, Any]], bursts: Sequence[float]) -> list[str]:
    lines = []
    for load in (f"{burst:g}" for burst in bursts):
        best = max((n for n in rows if n not in OURS), key=lambda n: float(rows[n]["by_burst"][load]))
        ours = ", ".join(f"{name} {rows[name]['by_burst'][load]:.1f}" for name in OURS)
        lines.append(f"* burst {load}: {best} {rows[best]['by_burst'][load]:.1f}; {ours}")
    return lines


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
        f"queue that waits {found['fifo_delay_ms']:g} ms for a batch. Each of ours starts from latencies "
        f"learned in service; SlackFit keeps {found['margin_ms']:g} ms in reserve. Attainment %, and "
        "**effective accuracy** % (digits right and in time, of all), of the trace and of each burst; p99 of "
        "what was answered:",
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
        f"On the whole trace ahead of the best fixed contender, {best}, in points: {', '.join(ahead)}. "
        "A choice for one burst alone would be another one:",
        "",
        *_best_of_bursts(rows, bursts),
        "",
        "**Predicted and real.** The simulator's attainment, with latencies, their noise (both of all but "
        "the slowest 3 % of the batches) and the time between two batches measured on another trace, against "
        "the batcher's own on the same arrivals; %, by seed. Under overload a few percent of speed are many "
        "points.",
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


def _replay(found: dict[str, Any]) -> list[str]:
    rows = [row for row in found["rows"] if row["client_lag_p99_ms"] <= STALLED_MS]
    loads, seeds = (list(dict.fromkeys(row[key] for row in rows)) for key in ("load", "seed"))
    left_out = len(found["rows"]) - len(rows)
    lines = [
        "",
        "The same with an engine that sleeps for the A40 latencies of SuperServe's authors, so that batches "
        f"take what their table says ({_where(found)}; bursty arrivals of CV^2 {found['cv2']:g} for "
        f"{found['seconds']:g} s, SLO {found['slo_ms']:g} ms; load is a share of what the largest subnet "
        f"sustains, {found['capacity_qps']:.0f}/s). Predicted, **real** attainment %, medians of "
        f"{len(seeds)} seeds, and the median difference in points. Of {len(found['rows'])} runs {left_out} "
        "are left out, in which the machine stood still: the client itself sent more than "
        f"{STALLED_MS:g} ms late at p99.",
        "",
        f"| | {' | '.join(f'load {load:g}' for load in loads)} |",
        f"|{'---|' * (len(loads) + 1)}",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for load in loads:
            own = [row for row in rows if (row["policy"], row["load"]) == (policy, load)]
            predicted, real = (median(row[key] for row in own) for key in ("predicted", "real"))
            off = median(abs(row["predicted"] - row["real"]) for row in own)
            cells.append(f"{predicted:.1f}, **{real:.1f}**; {off:.2f}")
        lines.append(f"| {policy} | {' | '.join(cells)} |")
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
