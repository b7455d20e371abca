"""`PipelineModel`: what planning knows of a pipeline, without any code to run; and its file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from subnetact.errors import PipelineError, SubnetActError
from subnetact.files.documents import DocumentFormat
from subnetact.latency.table import LatencyTable
from subnetact.serving.pipelines.graph import StageGraph, expected_work_ms
from subnetact.serving.scheduling.checks import check_accuracy, check_count, check_time

__all__ = ["PipelineModel", "StageChoice", "StageModel"]

FORMAT = DocumentFormat(
    "a pipeline description",
    "subnetact.pipeline",
    1,
    "see help(subnetact.serving.PipelineModel.load) for the fields",
)


_MOST_INPUTS = 1_000_000
"""A stage may have at most this many inputs per request."""


@dataclass(frozen=True)
class StageModel:
    """One stage of a pipeline, for planning.

    Attributes:
        name: the name.
        tables: for every type of hardware that the stage can run on, its latency table there. All have the
            same subnets.
        after: for every stage that feeds this one, the share of the requests that take the edge, in (0, 1].
        inputs: how many inputs requests have at this stage (fan-out), at most 1,000,000 each; every request
            draws one of the numbers.
        min_accuracy: the least accuracy that its subnets may have, percent.
    """

    name: str
    tables: Mapping[str, LatencyTable]
    after: Mapping[str, float] = field(default_factory=dict)
    inputs: tuple[int, ...] = (1,)
    min_accuracy: float = 0.0

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        if not self.tables:
            raise PipelineError(f"{where}: no latency table; give one per type of hardware")
        first = next(iter(self.tables.values()))
        for hardware, table in self.tables.items():
            check_accuracy(table)
            if table.subnets != first.subnets or table.accuracy != first.accuracy:
                raise PipelineError(f"{where}: the table of {hardware!r} is of other subnets than the first")
        for other, share in self.after.items():
            if not 0.0 < share <= 1.0:
                raise PipelineError(f"{where}: the share of {other!r} is {share}; it must be in (0, 1]")
        allowed = range(_MOST_INPUTS + 1)
        if not self.inputs or not all(type(count) is int and count in allowed for count in self.inputs):
            raise PipelineError(
                f"{where}: inputs {self.inputs!r} must be whole numbers from 0 to {_MOST_INPUTS:,}"
            )
        if self.min_accuracy > max(first.known_accuracy()):
            raise PipelineError(
                f"{where}: min_accuracy {self.min_accuracy} % is above the best subnet "
                f"({max(first.known_accuracy())} %)"
            )

    @property
    def mean_inputs(self) -> float:
        """How many inputs a request has on average."""
        return sum(self.inputs) / len(self.inputs)


class StageChoice(NamedTuple):
    """How one stage is provisioned.

    Attributes:
        hardware: the type of hardware.
        workers: number of workers.
        batch_size: the largest batch size.
        min_accuracy: the least accuracy of its subnets, percent.
    """

    hardware: str
    workers: int
    batch_size: int
    min_accuracy: float = 0.0


@dataclass(frozen=True)
class PipelineModel:
    """The stages of a pipeline, the prices of hardware, and the end-to-end SLO.

    Attributes:
        stages: the stages.
        prices: price of one worker on every type of hardware, in any unit per time.
        slo_ms: time from arrival to deadline, ms.

    Raises:
        PipelineError: there is a cycle, a stage has a table for hardware without a price, two stages have one
            name, or the SLO is shorter than the shortest path on the fastest hardware.
        PolicyError: the SLO is not finite and > 0.
    """

    stages: tuple[StageModel, ...]
    prices: Mapping[str, float]
    slo_ms: float

    def __post_init__(self) -> None:
        check_time(self.slo_ms, "slo_ms")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise PipelineError(f"stages: two have the same name, among {', '.join(names)}")
        for hardware, price in self.prices.items():
            if not (math.isfinite(price) and price > 0):
                raise PipelineError(f"prices: {price} of {hardware!r} must be finite and > 0")
        for stage in self.stages:
            for hardware in stage.tables:
                if hardware not in self.prices:
                    raise PipelineError(
                        f"stage {stage.name!r}: a table for {hardware!r}, which has no price; known are "
                        f"{', '.join(map(repr, self.prices))}"
                    )
        fastest = {s.name: min(table.fastest_ms for table in s.tables.values()) for s in self.stages}
        shortest = self.graph.longest_ms(fastest, always=True)
        if self.slo_ms < shortest:
            raise PipelineError(
                f"slo_ms: {self.slo_ms:g} is shorter than the shortest path through the stages "
                f"({shortest:.3g} ms on the fastest hardware); allow more"
            )

    @property
    def graph(self) -> StageGraph:
        """The graph of the stages; an edge is conditional if not all requests take it."""
        after = {s.name: {o: share < 1.0 for o, share in s.after.items()} for s in self.stages}
        return StageGraph(after)

    def chosen_tables(self, choices: Mapping[str, StageChoice]) -> dict[str, LatencyTable]:
        """Return for every stage the table of its hardware, up to its batch size.

        Args:
            choices: how every stage is provisioned.

        Raises:
            PipelineError: a stage has no choice, or no table for its hardware, or no such batch size.
        """
        found = {}
        for stage in self.stages:
            choice = choices.get(stage.name)
            if choice is None:
                raise PipelineError(f"choices: none for stage {stage.name!r}")
            table = stage.tables.get(choice.hardware)
            if table is None:
                raise PipelineError(
                    f"stage {stage.name!r}: no latency table for hardware {choice.hardware!r}; there are "
                    f"tables for {', '.join(map(repr, stage.tables))}; profile the stage there"
                )
            check_count(choice.workers, "workers")
            sizes = [size for size in table.batch_sizes if size <= choice.batch_size]
            if not sizes:
                raise PipelineError(
                    f"stage {stage.name!r}: batch size {choice.batch_size} is below the smallest of the "
                    f"table ({table.batch_sizes[0]})"
                )
            found[stage.name] = table.select(batch_sizes=sizes)
        return found

    def works_ms(self, tables: Mapping[str, LatencyTable]) -> dict[str, float]:
        """Return the expected work of every stage for one request, ms; see `expected_work_ms`.

        Args:
            tables: the table of every stage.
        """
        return {s.name: expected_work_ms(tables[s.name], s.mean_inputs) for s in self.stages}

    def cost(self, choices: Mapping[str, StageChoice]) -> float:
        """Return the price of all workers together.

        Args:
            choices: how every stage is provisioned.
        """
        return sum(choice.workers * self.prices[choice.hardware] for choice in choices.values())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelineModel:
        """Read a description from a JSON file.

        The file has the fields `kind` ("subnetact.pipeline"), `schema` (1), `slo_ms`, `hardware` (from names
        to prices) and `stages`, a list. A stage has a `name` and `tables`, which maps hardware to the path of
        a latency table, relative to the file, or to one number: the latency of a plain function in ms. It may
        have `after` (a list of names, or a mapping from names to shares), `inputs` (a list of numbers) and
        `min_accuracy`.

        Args:
            path: the file.

        Returns:
            The description.

        Raises:
            MissingFile: there is no such file, or a table is missing.
            FileFormatError: a file is damaged or of another kind.
            PipelineError: a field is missing or wrong; see also the class.
        """
        facts = FORMAT.read(path)
        folder = Path(path).parent
        try:
            stages = tuple(_stage(facts_of_one, folder) for facts_of_one in facts["stages"])
            prices = {str(name): float(price) for name, price in facts["hardware"].items()}
            slo_ms = float(facts["slo_ms"])
        except SubnetActError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise PipelineError(
                f"{os.fspath(path)}: a field is missing or wrong ({type(error).__name__}: {error}); "
                f"{FORMAT.next_step}"
            ) from error
        return cls(stages, prices, slo_ms)


def _stage(facts: Mapping[str, Any], folder: Path) -> StageModel:
    name = str(facts["name"])
    tables = {
        str(hardware): LatencyTable.load(folder / given)
        if isinstance(given, str)
        else LatencyTable([name], [100.0], [1], [[float(given)]])
        for hardware, given in facts["tables"].items()
    }
    after = facts.get("after", {})
    shares = {str(o): float(share) for o, share in after.items()} if isinstance(after, Mapping) else None
    return StageModel(
        name,
        tables,
        dict.fromkeys(map(str, after), 1.0) if shares is None else shares,
        tuple(facts.get("inputs", (1,))),
        float(facts.get("min_accuracy", 0.0)),
    )
