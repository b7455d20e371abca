"""Which subnets to profile: all, those of a file, random ones, or a Pareto set that a search finds."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from subnetact.errors import SpecError
from subnetact.journal import Journal
from subnetact.nas.latency_predictor import LatencyPredictor
from subnetact.profile.pareto_set import (
    Measure,
    accuracy_of,
    find_pareto_set,
    fitted_latencies,
    searched_sizes,
)
from subnetact.profile.source import ProfileSource, read_specs
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet

__all__ = ["Chosen", "Request", "choose", "expected"]

MOST = 10_000
"""Subnets that `all` stands for at the most."""


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        subnets: `all`, a number (a Pareto set of that size), `random:N`, or a JSON file of subnets.
        accuracy: numbers, percent, one a subnet; or one `pkg.mod:factory`, which called with the supernet
            returns a callable, spec -> percent; empty where it is not known.
        accuracy_predictor: a checkpoint of an accuracy predictor; None = none.
        accuracy_encoding: what that was trained on: `tutorial`; None = the family's own encoding.
        search_latency: what the search goes by: `measured` (a predictor fitted to subnets measured here) or
            `macs`.
        fitted: how many subnets that predictor is fitted to.
        evaluations: how many subnets the search looks at.
        seed: of everything that is drawn.
    """

    subnets: str = "8"
    accuracy: tuple[str, ...] = ()
    accuracy_predictor: str | None = None
    accuracy_encoding: str | None = None
    search_latency: str = "measured"
    fitted: int = 32
    evaluations: int = 1500
    seed: int = 0

    def __post_init__(self) -> None:
        number = self.subnets.removeprefix("random:")
        listed = self.subnets != "all" and not number.lstrip("-").isdigit()
        if listed and (number != self.subnets or not Path(self.subnets).is_file()):
            raise SpecError(f"subnets: {self.subnets!r} is no file; give a number, all, random:8, or a file")
        if number.lstrip("-").isdigit() and int(number) < 1:
            raise SpecError(f"subnets: {self.subnets} must be at least 1")
        if self.accuracy and self.accuracy_predictor:
            raise SpecError("accuracy: give numbers, a callable or a predictor, only one of them")
        if self.accuracy_encoding and not self.accuracy_predictor:
            raise SpecError("accuracy-encoding: it is what --accuracy-predictor reads; give that too")
        if self.accuracy_predictor and not Path(self.accuracy_predictor).is_file():
            raise SpecError(f"accuracy-predictor: {self.accuracy_predictor} is no file")
        if self.fitted < 8 or self.evaluations < 2:
            raise SpecError(
                f"a search fits to at least 8 subnets and tries at least 2, got {self.fitted} and "
                f"{self.evaluations}"
            )

    @property
    def file(self) -> str | None:
        """The file of subnets; None where they are asked for in another way."""
        return None if self.subnets == "all" or self.count is not None else self.subnets

    @property
    def count(self) -> int | None:
        """How many subnets were asked for; None for all and for a file."""
        number = self.subnets.removeprefix("random:")
        return int(number) if number.isdigit() else None

    def searches(self, size: int) -> bool:
        """Tell whether a space of that size is searched for a Pareto set."""
        return self.subnets.isdigit() and int(self.subnets) < size

    def size(self, size: int) -> int:
        """How many subnets of a space of that size it asks for, if not those of a file.

        Raises:
            SpecError: it asks for all of too many.
        """
        if self.subnets == "all" and size > MOST:
            raise SpecError(f"subnets: all {size:.3g} are too many; give a number")
        return min(size, self.count or size)


@dataclass(frozen=True)
class Chosen:
    """The subnets to profile.

    Attributes:
        specs: in ascending latency, as far as that was known.
        accuracy: percent or None, one a subnet.
        facts: how they were chosen, for the stamp.
    """

    specs: list[SubnetSpec]
    accuracy: list[float | None]
    facts: dict[str, Any] = field(default_factory=dict)


def expected(subject: ProfileSource, request: Request) -> int:
    """Return how many subnets a request is for; a search may find fewer.

    Raises:
        SpecError: it asks for too many, or for a file that holds no list of this supernet's subnets.
    """
    if request.subnets == "all" and subject.specs:
        return len(subject.specs)
    if request.file is not None:
        return len(_read(subject, request.file))
    return request.size(subject.supernet.space.size())


def choose(
    subject: ProfileSource,
    request: Request,
    *,
    journal: Journal,
    batch_sizes: Sequence[int],
    fit: Measure,
    measure: Measure,
    progress: bool = True,
) -> Chosen:
    """Return the subnets of a request, the same ones every time the journal is resumed.

    Args:
        subject: what they are of.
        request: which ones.
        journal: where the choice is kept, and beside it the state of a search.
        batch_sizes: what they will be measured at.
        fit: measures the subnets that latencies are fitted to.
        measure: measures what a search has chosen.
        progress: whether to show progress bars.

    Raises:
        SpecError: the request makes no sense for this supernet.
    """
    space = subject.supernet.space
    statistics = journal.path.with_name("chosen-norms.safetensors")
    for line in journal.of("chosen"):
        specs = [space.check(SubnetSpec.from_json(one)) for one in line["specs"]]
        if statistics.exists():
            subject.supernet.norms = NormTable.load(statistics)
        return Chosen(specs, line["accuracy"], line["facts"])
    if subject.specs and request.subnets == "all":
        known = list(subject.accuracy)
        if request.accuracy or request.accuracy_predictor:
            known = _accuracies(subject, request, subject.specs, progress)
        chosen = Chosen(list(subject.specs), known, {"subnets_chosen": "the bundle's"})
    elif request.searches(space.size()):
        chosen = _pareto_set(subject, request, journal, batch_sizes, fit, measure, progress)
    else:
        specs = _listed(subject, request)
        chosen = Chosen(
            specs, _accuracies(subject, request, specs, progress), {"subnets_chosen": request.subnets}
        )
    _keep_statistics(subject.supernet, chosen.specs, statistics)
    journal.append(
        "chosen",
        specs=[spec.to_json() for spec in chosen.specs],
        accuracy=chosen.accuracy,
        facts=chosen.facts,
    )
    return chosen


def _keep_statistics(supernet: Supernet, specs: Sequence[SubnetSpec], path: Path) -> None:
    """Leave statistics to the chosen subnets only, and keep what evaluating them has calibrated."""
    rows = {spec: row for spec in specs if (row := supernet.norms.get(spec)) is not None}
    supernet.norms = NormTable(supernet.space.id)
    supernet.norms.update(rows)
    if rows:
        supernet.norms.save(path)


def _listed(subject: ProfileSource, request: Request) -> list[SubnetSpec]:
    space = subject.supernet.space
    if request.subnets.startswith("random:"):
        return _random(subject, request.size(space.size()), request.seed)
    if request.file is not None:
        return _read(subject, request.file)
    request.size(space.size())
    return list(space.enumerate())


def _read(subject: ProfileSource, file: str) -> list[SubnetSpec]:
    return list(dict.fromkeys(read_specs(Path(file), subject.supernet)))


def _random(subject: ProfileSource, count: int, seed: int) -> list[SubnetSpec]:
    return subject.supernet.space.sample(seed, count)


def _accuracies(
    subject: ProfileSource, request: Request, specs: Sequence[SubnetSpec], progress: bool
) -> list[float | None]:
    function, _ = accuracy_of(
        subject, request.accuracy, request.accuracy_predictor, request.accuracy_encoding
    )
    if function is not None:
        bar = tqdm(specs, desc="accuracy", disable=not progress or None)
        return [None if math.isnan(percent := float(function(spec))) else percent for spec in bar]
    if not request.accuracy:
        return [None] * len(specs)
    try:
        known = [float(number) for number in request.accuracy]
    except ValueError as error:
        raise SpecError(f"accuracy: {error}; give numbers in percent, or one pkg.mod:factory") from error
    if len(known) != len(specs):
        raise SpecError(f"accuracy: {len(known)} values for {len(specs)} subnets; give one a subnet")
    return list(known)


def _pareto_set(
    subject: ProfileSource,
    request: Request,
    journal: Journal,
    batch_sizes: Sequence[int],
    fit: Measure,
    measure: Measure,
    progress: bool,
) -> Chosen:
    accuracy, source = accuracy_of(
        subject, request.accuracy, request.accuracy_predictor, request.accuracy_encoding
    )
    if accuracy is None and request.accuracy:
        raise SpecError("accuracy: a search needs a function of a subnet; give one pkg.mod:factory")
    latencies: list[LatencyPredictor] = []
    if request.search_latency == "measured":
        some = _random(subject, request.fitted, request.seed)
        latencies = fitted_latencies(subject, some, searched_sizes(batch_sizes), fit)
    size = request.size(subject.supernet.space.size())
    found, facts = find_pareto_set(
        subject,
        accuracy,
        latencies,
        size,
        request.evaluations,
        request.seed,
        measure,
        journal.path.with_name(f"search-{_digest(journal, latencies)}.json"),
        progress,
    )
    if accuracy is None:
        source = "not known: the search took more multiply-accumulates for better"
    if len(found) < size:
        message = f"{size} subnets were asked for, {len(found)} of those tried are beaten by no other"
        facts["fewer"] = message
        tqdm.write(message, file=sys.stderr)
    return Chosen(
        [one.spec for one in found],
        [None if math.isnan(one.accuracy) else one.accuracy for one in found],
        {"subnets_chosen": f"Pareto set of {request.subnets}", "accuracy_source": source, **facts},
    )


def _digest(journal: Journal, latencies: Sequence[LatencyPredictor]) -> str:
    """Name what a search's objectives depend on, so that no other search is taken up."""
    facts = [journal.environment, [one.weights.tolist() for one in latencies]]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
