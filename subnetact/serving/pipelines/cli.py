"""Find the cheapest workers, batch sizes and hardware for the stages of a pipeline.

With them, a percentile of the end-to-end latency on a trace of arrivals is within the SLO.
help(subnetact.serving.PipelineModel.load) describes the JSON file of the pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from subnetact.command import reported
from subnetact.files.documents import write_json
from subnetact.serving.pipelines.model import PipelineModel
from subnetact.serving.pipelines.planner import plan_pipeline
from subnetact.serving.simulation.cli import TRACE_HELP, chosen_trace, made_of, rate_text, trace_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the options of `sys.argv` if None are given; return the exit status, 2 after a printed error."""
    return reported(_plan, _parser().parse_args(arguments))


def _plan(options: argparse.Namespace) -> None:
    model = PipelineModel.load(options.pipeline)
    arrivals = chosen_trace(options)
    most, seed = options.most_workers, options.seed
    plan = plan_pipeline(arrivals, model, options.percentile, most_workers=most, seed=seed)
    if options.json is not None:
        write_json(options.json, {"plan": plan.to_json(), "made_of": made_of(options, arrivals)})
    print(
        f"{options.pipeline}: {rate_text(arrivals)}; SLO {model.slo_ms:g} ms at "
        f"percentile {options.percentile:g}\n"
        f"cost {plan.cost:g}, p{plan.percent:g} {plan.estimate.percentile_ms(plan.percent):.2f} ms, "
        f"attainment {plan.estimate.attainment:.5f} ({plan.tried} plans simulated)\n"
        f"{'stage':<16}{'hardware':<12}{'workers':>8}{'batch':>7}"
        f"{'min acc':>9}{'mean acc':>10}{'waits ms':>10}"
    )
    for stage, choice in plan.choices.items():
        found = plan.estimate.stages[stage]
        waited_ms = found.result.log.start_ms - found.arrivals_ms  # type: ignore[union-attr]
        waited_ms = waited_ms[~np.isnan(waited_ms)]
        waits = waited_ms.mean() if len(waited_ms) else np.nan
        print(
            f"{stage:<16}{choice.hardware:<12}{choice.workers:>8}{choice.batch_size:>7}"
            f"{choice.min_accuracy:>9.2f}{found.mean_accuracy:>10.2f}{waits:>10.2f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = trace_parser("python -m subnetact.plan", __doc__, scale=1.0)
    add = parser.add_argument
    add("pipeline", type=Path, help="description of the pipeline, a JSON file")
    add("trace", help=TRACE_HELP)
    add("--percentile", type=float, default=99.0, help="percentile that meets the SLO")
    add("--most-workers", type=int, default=64, help="greatest number of workers per stage")
    return parser
