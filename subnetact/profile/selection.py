"""Which subnets are profiled: all, those of a file, random ones, or a Pareto set that a search finds.

For a Pareto set, a few random subnets are measured first, latency predictors are fitted to them, and the
search ranks subnets by their predictions. Subnets that the search finds are measured before they are trusted,
if their accuracies are known.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from ofa_adapters import encode
from subnetact.costs.model import CostModel
from subnetact.errors import SpecError
from subnetact.files.journal import Journal
from subnetact.nas.accuracy_predictor import AccuracyPredictor
from subnetact.nas.latency_predictor import FEWEST, LatencyPredictor, require_scipy
from subnetact.nas.search import search
from subnetact.profile.source import ProfileSource, import_name, read_specs, user_code
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet

__all__ = [
    "Selection",
    "SelectionRequest",
    "expected_count",
    "fitted_latencies",
    "given_accuracies",
    "select_subnets",
]

MOST = 10_000
"""The largest number of subnets that `all` may stand for."""
NEVER_MS = 1e12
"""The latency that a search assumes for a subnet that ran out of memory."""
MeasureLatencies: TypeAlias = Callable[[Sequence[SubnetSpec], Sequence[int]], Sequence[Sequence[float]]]
"""A function (subnets, batch sizes) -> latencies in ms, one sequence per subnet; NaN if memory ran out."""
AccuracyFunction: TypeAlias = Callable[[SubnetSpec], float]
"""A function subnet -> accuracy in percent."""


@dataclass(frozen=True)
class SelectionRequest:
    """Which subnets a user asks for.

    Attributes:
        subnets: N: a Pareto set of N subnets, found by a search; FILE: a JSON list of subnets; all; random:N:
            the smallest, the largest and random ones.
        accuracy: percent per subnet; or PKG.MOD:FACTORY, a function that is called with the supernet and
            returns a function subnet -> percent; or a checkpoint of OFA's accuracy predictor. Without
            accuracies the search uses multiply-accumulates as a stand-in and prefers more of them.
        fit_subnets: subnets measured before a search, to fit its latency predictors, at least 8 (needs
            scipy); 0: the search uses multiply-accumulates as a stand-in for latency.
        evaluations: subnets that a search evaluates, at least 2.
        seed: seed of random subnets, weights and images, and of the search.

    Raises:
        SpecError: an attribute is not one of the above.
    """

    subnets: str = "8"
    accuracy: tuple[str, ...] = ()
    fit_subnets: int = 32
    evaluations: int = 1500
    seed: int = 0

    def __post_init__(self) -> None:
        number = self.subnets.removeprefix("random:")
        listed = self.subnets != "all" and not number.lstrip("-").isdigit()
        if listed and (number != self.subnets or not Path(self.subnets).is_file()):
            raise SpecError(f"subnets: {self.subnets!r} is no file; give a number, all, random:8, or a file")
        if number.lstrip("-").isdigit() and int(number) < 1:
            raise SpecError(f"subnets: {self.subnets} must be at least 1")
        if self.predictor is not None and not Path(self.predictor).is_file():
            raise SpecError(
                f"accuracy: {self.predictor} is no file; give numbers in percent, one pkg.mod:factory, or "
                "the checkpoint of an accuracy predictor"
            )
        if self.fit_subnets and self.fit_subnets < FEWEST:
            raise SpecError(
                f"--fit-subnets: {self.fit_subnets} must be 0 or at least {FEWEST}, to which latency "
                "predictors can be fitted"
            )
        if self.evaluations < 2:
            raise SpecError(f"--evaluations: {self.evaluations} must be at least 2")

    @property
    def file(self) -> str | None:
        """The file of subnets; None if subnets are asked for in another way."""
        return None if self.subnets == "all" or self.count is not None else self.subnets

    @property
    def count(self) -> int | None:
        """The number of subnets asked for; None for `all` and for a file."""
        number = self.subnets.removeprefix("random:")
        return int(number) if number.isdigit() else None

    @property
    def factory(self) -> str | None:
        """The `pkg.mod:factory` of a function subnet -> percent, or None."""
        return self.accuracy[0] if len(self.accuracy) == 1 and ":" in self.accuracy[0] else None

    @property
    def predictor(self) -> str | None:
        """The checkpoint of an accuracy predictor, or None."""
        if len(self.accuracy) != 1 or self.factory is not None:
            return None
        return None if _is_number(self.accuracy[0]) else self.accuracy[0]

    def searches(self, size: int) -> bool:
        """Tell whether a space is searched for a Pareto set.

        Args:
            size: the number of subnets in the space.
        """
        return self.subnets.isdigit() and int(self.subnets) < size

    def size(self, size: int) -> int:
        """Return how many subnets of a space are asked for, if they are not listed in a file.

        Args:
            size: the number of subnets in the space.

        Raises:
            SpecError: all subnets are asked for, and they are too many.
        """
        if self.subnets == "all" and size > MOST:
            raise SpecError(f"subnets: all {size:.3g} are too many; give a number")
        return min(size, self.count or size)


@dataclass(frozen=True)
class Selection:
    """The subnets to profile, with their accuracies in percent, None if not known, and facts for the stamp.

    Subnets of a search are in ascending order of latency.
    """

    specs: list[SubnetSpec]
    accuracy: list[float | None]
    facts: dict[str, Any] = field(default_factory=dict)


def expected_count(source: ProfileSource, request: SelectionRequest) -> int:
    """Return how many subnets are asked for; a search may find fewer."""
    if request.subnets == "all" and source.specs:
        return len(source.specs)
    if request.file is not None:
        return len(_read(source, request.file))
    return request.size(source.supernet.space.size())


def given_accuracies(source: ProfileSource, request: SelectionRequest) -> list[float] | None:
    """Return the accuracies in percent that a request lists, one per subnet; None if it lists none."""
    if request.factory is not None:
        import_name(request.factory)
    if not request.accuracy or request.factory is not None or request.predictor is not None:
        return None
    if request.searches(source.supernet.space.size()):
        raise SpecError(
            "accuracy: a search needs a function of a subnet; give one pkg.mod:factory, or the checkpoint of "
            "an accuracy predictor"
        )
    try:
        known = [float(number) for number in request.accuracy]
    except ValueError as error:
        raise SpecError(
            f"accuracy: {error}; give numbers in percent, one pkg.mod:factory, or the checkpoint of an "
            "accuracy predictor, only one of them"
        ) from error
    count = expected_count(source, request)
    if len(known) != count:
        raise SpecError(f"accuracy: {len(known)} values for {count} subnets; give one per subnet")
    return known


def select_subnets(
    source: ProfileSource,
    request: SelectionRequest,
    *,
    journal: Journal,
    batch_sizes: Sequence[int],
    fit: MeasureLatencies,
    measure: MeasureLatencies,
    progress: bool = True,
) -> Selection:
    """Return the subnets of a request, the same ones whenever the journal is resumed.

    The state of a search and the BatchNorm statistics of the selected subnets are files beside the journal.
    `fit` measures the subnets that latency predictors are fitted to, `measure` those that the search has
    found.
    """
    space = source.supernet.space
    statistics = journal.path.with_name("chosen-norms.safetensors")
    for line in journal.of("chosen"):
        with journal.fields():
            specs = [space.check(SubnetSpec.from_json(one)) for one in line["specs"]]
            accuracy, facts = list(line["accuracy"]), dict(line["facts"])
        if statistics.exists():
            source.supernet.norms = NormTable.load(statistics)
        return Selection(specs, accuracy, facts)
    if source.specs and request.subnets == "all":
        known = list(source.accuracy)
        if request.accuracy:
            known = _accuracies(source, request, source.specs, progress)
        selection = Selection(list(source.specs), known, {"subnets_chosen": "the bundle's"})
    elif request.searches(space.size()):
        selection = _search(source, request, journal, batch_sizes, fit, measure, progress)
    else:
        specs = _listed(source, request)
        known = _accuracies(source, request, specs, progress)
        selection = Selection(specs, known, {"subnets_chosen": request.subnets})
    _keep_statistics(source.supernet, selection.specs, statistics)
    journal.append(
        "chosen",
        specs=[spec.to_json() for spec in selection.specs],
        accuracy=selection.accuracy,
        facts=selection.facts,
    )
    return selection


def _keep_statistics(supernet: Supernet, specs: Sequence[SubnetSpec], path: Path) -> None:
    """Keep the statistics of the selected subnets only; save those that an evaluation has calibrated."""
    kept = {spec: statistics for spec in specs if (statistics := supernet.norms.get(spec)) is not None}
    supernet.norms = NormTable(supernet.space.id)
    supernet.norms.update(kept)
    if kept:
        supernet.norms.save(path)


def _listed(source: ProfileSource, request: SelectionRequest) -> list[SubnetSpec]:
    space = source.supernet.space
    if request.subnets.startswith("random:"):
        return space.sample(request.seed, request.size(space.size()))
    if request.file is not None:
        return _read(source, request.file)
    request.size(space.size())
    return list(space.enumerate())


def _read(source: ProfileSource, file: str) -> list[SubnetSpec]:
    return list(dict.fromkeys(read_specs(Path(file), source.supernet)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _accuracy_function(
    source: ProfileSource, request: SelectionRequest
) -> tuple[AccuracyFunction | None, str]:
    """Return the function that gives any subnet's accuracy (or None without one), and its origin."""
    if request.factory is not None:
        return _own_accuracy(request.factory, source.supernet), request.factory
    if request.predictor is None:
        return None, "not known"
    space = source.supernet.space
    encodes_size = any(axis.name == "resolution" for axis in space.axes)
    features = partial(
        encode,
        space,
        image_size=None if encodes_size else int(source.sample.shape[-1]),
    )
    predictor = AccuracyPredictor.from_checkpoint(request.predictor, features)
    return predictor, f"predicted by {Path(request.predictor).name}"


def _own_accuracy(name: str, supernet: Supernet) -> AccuracyFunction:
    factory = import_name(name)
    with user_code(f"accuracy {name!r}"):
        function = factory(supernet)

    def accuracy(spec: SubnetSpec) -> float:
        with user_code(f"the function that accuracy {name!r} returned"):
            return float(function(spec))

    return accuracy


def _accuracies(
    source: ProfileSource, request: SelectionRequest, specs: Sequence[SubnetSpec], progress: bool
) -> list[float | None]:
    function, _ = _accuracy_function(source, request)
    if function is not None:
        bar = tqdm(specs, desc="accuracy", disable=not progress or None)
        return [None if math.isnan(percent := float(function(spec))) else percent for spec in bar]
    known = given_accuracies(source, request)
    return [None] * len(specs) if known is None else [*known]


def _search(
    source: ProfileSource,
    request: SelectionRequest,
    journal: Journal,
    batch_sizes: Sequence[int],
    fit: MeasureLatencies,
    measure: MeasureLatencies,
    progress: bool,
) -> Selection:
    """Search for subnets that are not dominated, spread evenly over latency.

    Without latency predictors multiply-accumulates are a stand-in for latency; without accuracies they are a
    stand-in for accuracy. Subnets are measured before they are selected if both are known.
    """
    accuracy, origin = _accuracy_function(source, request)
    supernet, sample = source.supernet, source.sample
    latencies: list[LatencyPredictor] = []
    if request.fit_subnets:
        some = source.supernet.space.sample(request.seed, request.fit_subnets)
        latencies = fitted_latencies(source, some, sorted({batch_sizes[0], batch_sizes[-1]}), fit)
    sizes = [one.batch_size for one in latencies]

    def remeasure(spec: SubnetSpec) -> list[float]:
        return [NEVER_MS if math.isnan(ms) else ms for ms in measure([spec], sizes)[0]]

    functions: list[Callable[[SubnetSpec], float]] = [*latencies]
    if not functions:
        costs = CostModel(supernet, sample)
        functions = [lambda spec: float(costs(spec).macs)]
    size = request.size(supernet.space.size())
    result = search(
        supernet,
        accuracy,
        functions,
        size=size,
        evaluations=request.evaluations,
        seed=request.seed,
        batch_sizes=sizes or [1],
        input_shape=sample.shape,
        remeasure=remeasure if latencies and accuracy is not None else None,
        resume=journal.path.with_name(f"search-{_digest(journal, latencies)}.jsonl"),
        progress=progress,
    )
    if accuracy is None:
        origin = "not known: the search used multiply-accumulates as a stand-in and preferred more of them"
    facts: dict[str, Any] = {
        "subnets_chosen": f"Pareto set of {request.subnets}",
        "accuracy_source": origin,
        "search": result.method,
        "evaluated": len(result.evaluated),
        "search_latency": "multiply-accumulates",
        "measured_before_trusted": result.remeasured,
    }
    if latencies:
        facts["search_latency"] = {f"batch {one.batch_size}": str(one.error) for one in latencies}
    if len(result) < size:
        message = f"{size} subnets were asked for, {len(result)} of those evaluated are not dominated"
        facts["fewer"] = message
        tqdm.write(message, file=sys.stderr)
    return Selection(
        [one.spec for one in result],
        [None if math.isnan(one.accuracy) else one.accuracy for one in result],
        facts,
    )


def fitted_latencies(
    source: ProfileSource,
    specs: Sequence[SubnetSpec],
    batch_sizes: Sequence[int],
    measure: MeasureLatencies,
) -> list[LatencyPredictor]:
    """Measure subnets and fit one latency predictor per batch size at which enough of them ran."""
    require_scipy()
    costs = CostModel(source.supernet, source.sample)
    found, ran = [], []
    for size, column in zip(batch_sizes, zip(*measure(specs, batch_sizes), strict=True), strict=True):
        pairs = [(spec, ms) for spec, ms in zip(specs, column, strict=True) if not math.isnan(ms)]
        ran.append(f"{len(pairs)} ran at batch size {size}")
        if len(pairs) >= FEWEST:
            some, latency_ms = zip(*pairs, strict=True)
            found.append(LatencyPredictor.fit(source.supernet, some, latency_ms, size, costs=costs))
    if not found:
        raise SpecError(
            f"a latency predictor is fitted to at least {FEWEST} measured subnets; of {len(specs)}, "
            f"{', '.join(ran)}. Give smaller --batch-sizes, --fit-subnets 0, or --subnets all"
        )
    return found


def _digest(journal: Journal, latencies: Sequence[LatencyPredictor]) -> str:
    """Return a name for everything that the search depends on, so that no other search is resumed."""
    facts = [journal.environment, [one.weights.tolist() for one in latencies]]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
