"""Tables and figure of `batcher.py`, from its JSON."""

from __future__ import annotations

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


def _best_fixed(rows: dict[str, Any]) -> tuple[str, float]:
    fixed = {name: float(row["effective_accuracy"]) for name, row in rows.items() if name not in OURS}
    best = max(fixed, key=lambda name: fixed[name])
    return best, fixed[best]


def _cell(row: dict[str, Any]) -> str:
    return f"{100 * row['attainment']:.1f}, **{row['effective_accuracy']:.1f}**"


def _digits(found: dict[str, Any]) -> list[str]:
    levels: dict[str, dict[str, Any]] = found["levels"]
    overall = {
        name: sum(rows[name]["effective_accuracy"] for rows in levels.values()) / len(levels)
        for name in next(iter(levels.values()))
    }
    heads = " | ".join(f"burst {level}" for level in levels)
    lines = [
        "",
        f"**The digits supernet, live** ({_where(found)}, one torch thread; SLO {found['slo_ms']:g} ms, "
        f"{found['seconds']:g} s of arrivals: a lull of load {found['lull']:g}, a burst, a lull, each with "
        f"gaps of CV^2 {found['cv2']:g}; medians over the seeds). Client and server share one process. Load "
        f"is a share of what the largest subnet sustains, {found['capacity_qps']:,.0f} requests/s. `fixed` "
        "is one subnet behind our batcher, `FIFO` one behind a plain queue that waits "
        f"{found['fifo_delay_ms']:g} ms for a batch; SlackFit has 4 buckets and 4 ms in reserve. Attainment "
        "%, and "
        "**effective accuracy** % (right label and in time, of all):",
        "",
        f"| | {heads} | mean |",
        f"|{'---|' * (len(levels) + 2)}",
    ]
    for name in sorted(overall, key=lambda name: -overall[name]):
        cells = " | ".join(_cell(rows[name]) for rows in levels.values())
        lines.append(f"| {name} | {cells} | {overall[name]:.1f} |")
    lines += ["", "The best of all fixed contenders at each burst, and how far ahead of it we are:", ""]
    for level, rows in levels.items():
        name, best = _best_fixed(rows)
        ahead = ", ".join(f"{ours} {rows[ours]['effective_accuracy'] - best:+.2f}" for ours in OURS)
        lines.append(f"* burst {level}: {name} has {best:.2f}; {ahead} points")
    fixed = max((name for name in overall if name not in OURS), key=lambda name: overall[name])
    ahead = ", ".join(f"{ours} {overall[ours] - overall[fixed]:+.2f}" for ours in OURS)
    lines.append(f"* one choice for all bursts: {fixed} has {overall[fixed]:.2f}; {ahead} points")
    live = found["in_service"]
    lines += [
        "",
        f"**Predicted and real.** In service a batch takes {live['factor']:.2f} x its profiled time + "
        f"{live['added_ms']:.2f} ms, with a noise of {100 * live['noise']:.0f} %, and "
        f"{live['overhead_ms']:.2f} ms lie between two batches; measured on a trace of its own. The "
        "simulator's attainment with these figures against the batcher's own on the same arrivals, points "
        "apart (median over the seeds; largest):",
        "",
        f"| | {heads} |",
        f"|{'---|' * (len(levels) + 1)}",
    ]
    for name in (name for name in overall if not name.startswith("FIFO")):
        cells = " | ".join(
            f"{rows[name]['off_points']:.2f}; {rows[name]['worst_off_points']:.2f}"
            for rows in levels.values()
        )
        lines.append(f"| {name} | {cells} |")
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
    groups = [
        (axes[0], result["digits"]["levels"], "in process, burst over what the largest subnet sustains"),
        (axes[1], result["http"]["rates"], "over HTTP, requests a second"),
    ]
    for axis, levels, title in groups:
        names = sorted(next(iter(levels.values())), key=lambda name: ("FIFO" in name, name))
        for i, name in enumerate(names):
            at = [c + (i - len(names) / 2) * 0.85 / len(names) for c in range(len(levels))]
            heights = [rows[name]["effective_accuracy"] for rows in levels.values()]
            axis.bar(at, heights, 0.8 / len(names), label=name, color=mpl.colormaps["tab20"](i))
        axis.set_xticks(range(len(levels)), list(levels))
        axis.set_xlabel(title)
        axis.legend(fontsize=6, ncol=2, loc="lower left")
    axes[0].set_ylabel("right and in time, % of all")
    figure.savefig(path, dpi=110)
    plt.close(figure)
