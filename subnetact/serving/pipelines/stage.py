"""`Stage`: one step of a live pipeline, an engine or a plain function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subnetact.errors import PipelineError
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.runner import Runner, runner_per_worker
from subnetact.serving.scheduling.context import Policy

Condition = Callable[[Any], bool]


@dataclass(frozen=True)
class Stage:
    """One step of a `Pipeline`.

    The input of a stage is the output of the stage that feeds it, or, if several do, a dictionary from their
    names to their outputs; stages whose edge the request does not take are left out of it. A stage runs if
    the request takes at least one of the edges that lead to it.

    Attributes:
        name: the name.
        runner: an engine (a `Runner`, or a list of them, one per worker), or a function of one input.
        after: the names of the stages that feed this one. A mapping from names to conditions makes edges
            conditional: `{"find": lambda boxes: len(boxes) > 0}`; a condition of None holds always. If empty,
            the stage gets the pipeline's input.
        prepare: changes the input of the stage before it is queued; keep it short, it runs on the thread of
            another stage's worker. If None, nothing is changed.
        each: whether the input is a list whose elements the stage runs on separately (fan-out); the output
            of the stage is then the list of the outputs.
        inputs: how many inputs a request typically has at a stage with `each`; deadlines are split with it.
        table: the latency table of an engine; its batch sizes are those that the stage may run. A function
            needs none.
        policy: chooses subnets and batch sizes. If None, `HullFit` over the table.
        min_accuracy: minimum profiled accuracy of the subnets of this stage, percent. If None, any.
        workers: number of workers; of a list of engines, each is one.
        expected_ms: expected latency of a function, ms.
        options: further arguments of the stage's `Batcher`, for example `{"process": True}`.
    """

    name: str
    runner: Runner | Sequence[Runner] | Callable[[Any], Any]
    after: Collection[str] | Mapping[str, Condition | None] = ()
    prepare: Callable[[Any], Any] | None = None
    each: bool = False
    inputs: float = 1.0
    table: LatencyTable | None = None
    policy: Policy | None = None
    min_accuracy: float | None = None
    workers: int = 1
    expected_ms: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def conditions(self) -> dict[str, Condition | None]:
        """The stages that feed this one, each with the condition of its edge or None."""
        names = (self.after,) if isinstance(self.after, str) else self.after
        return dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)

    @property
    def is_function(self) -> bool:
        """Whether the stage is a plain function instead of an engine."""
        return not isinstance(self.runner, Sequence) and not hasattr(self.runner, "run")


def engines_of(stage: Stage) -> list[Any]:
    """Return what the workers of the stage run, one each: the engines, or the function as one."""
    runner: Any = _FunctionRunner(stage.name, stage.runner) if stage.is_function else stage.runner
    return runner_per_worker(runner, stage.workers)


def table_of(stage: Stage) -> LatencyTable:
    """Return the latency table of the stage."""
    if stage.table is not None:
        return stage.table
    if stage.is_function:
        return LatencyTable([stage.name], [100.0], [1], [[stage.expected_ms]])
    raise PipelineError(f"stage {stage.name!r}: no latency table of its engine; give one")


def open_stage(stage: Stage, slo_ms: float, table: LatencyTable, options: Mapping[str, Any]) -> Batcher:
    """Open the batcher of the stage, whose requests usually have `slo_ms`."""
    given = {"expired": "defer", "check_outputs": not stage.is_function, **options, **stage.options}
    slo_ms = max(slo_ms, table.fastest_ms)
    batcher = Batcher(engines_of(stage), policy=stage.policy, table=table, slo_ms=slo_ms, **given)
    if stage.is_function:  # its latency was guessed, so a difference says nothing about the machine
        batcher.corrections.threshold = math.inf
    return batcher


class _FunctionRunner:
    """Runs a plain function on the inputs of a batch, one after the other."""

    def __init__(self, name: str, function: Any) -> None:
        self.keys = (name,)
        self._function = function

    def check(self, x: Any, finite: bool = False) -> None:
        """Accept every input."""

    def enter_worker(self, threads: int | None) -> None:
        """Do nothing; functions set their own number of threads."""

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:  # noqa: ARG002
        """Return the output of the function for every input."""
        return [self._function(x) for x in inputs]
