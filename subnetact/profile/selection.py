"""Which subnets are profiled: all, those of a file, random ones, or a Pareto set that a search finds.

For a Pareto set, a few random subnets are measured first, latency predictors are fitted to them, and the
search ranks subnets by their predictions. Subnets that the search finds are measured before they are trusted,
if their accuracies are known.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from ofa_adapters import encode
from subnetact.command import import_name, user_code
from subnetact.costs import CostModel
from subnetact.errors import SpecError
from subnetact.files.documents import parse_json
from subnetact.files.journal import Journal
from subnetact.latency.arrays import percentages
from subnetact.nas.accuracy_predictor import AccuracyPredictor
from subnetact.nas.latency_predictor import LatencyPredictor
from subnetact.nas.prediction_error import FEWEST_SUBNETS, require_scipy
from subnetact.nas.search import search
from subnetact.profile.source import RANDOM_PREFIX, ProfileSource
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet

MOST = 10_000
"""The largest number of subnets that are profiled."""
NEVER_MS = 1e12
"""The latency that a search assumes for a subnet that ran out of memory."""
ACCURACIES = "give numbers in percent, one pkg.mod:factory, or the checkpoint of an accuracy predictor"
AccuracyFunction: TypeAlias = Callable[[SubnetSpec], float]
"""A function subnet -> accuracy in percent; NaN if it is not known."""
Measure: TypeAlias = Callable[..., list[list[float]]]
"""A function (subnets, batch sizes, journal=) -> ms, one list per subnet; NaN if memory ran out."""


@dataclass(frozen=True)
class SelectionRequest:
    """Which subnets a user asks for.

    Attributes:
        subnets: N: a Pareto set of N subnets, found by a search; FILE: a JSON list of subnets; all; random:N:
            the smallest, the largest and random ones (default: 8; of a bundle, all its subnets).
        accuracy: percent per subnet; or PKG.MOD:FACTORY, a function that is called with the supernet and
            returns a function subnet -> percent; or a checkpoint of OFA's accuracy predictor. Without
            accuracies the search uses multiply-accumulates as a stand-in and prefers more of them.
        remeasure_accuracy: PKG.MOD:FACTORY as for `accuracy`, but on data that did not choose: the subnets
            that the search found get these accuracies, because those that chose them flatter them.
        fit_subnets: subnets measured before a search, to fit its latency predictors, at least 8 (needs
            scipy); 0: the search uses multiply-accumulates as a stand-in for latency.
        evaluations: subnets that a search evaluates, at least 2.
        seed: seed of random subnets, weights and images, and of the search.
    """

    subnets: str = "8"
    accuracy: tuple[str, ...] = ()
    remeasure_accuracy: str | None = None
    fit_subnets: int = 32
    evaluations: int = 1500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise SpecError(f"subnets: {self.subnets} must be at least 1")
        if self.file is not None and not Path(self.file).is_file():
            raise SpecError(f"subnets: {self.file!r} is no file; give a number, all, random:8, or a file")
        if self.fit_subnets and self.fit_subnets < FEWEST_SUBNETS:
            raise SpecError(
                f"--fit-subnets: {self.fit_subnets} must be 0 or at least {FEWEST_SUBNETS}, to which latency "
                "predictors can be fitted"
            )
        if self.evaluations < 2:
            raise SpecError(f"--evaluations: {self.evaluations} must be at least 2")

    @property
    def count(self) -> int | None:
        """The number of subnets asked for; None for `all` and for a file."""
        found = re.fullmatch(rf"(?:{RANDOM_PREFIX})?(-?\d+)", self.subnets)
        return int(found[1]) if found else None

    @property
    def file(self) -> str | None:
        """The file of subnets; None if subnets are asked for in another way."""
        return None if self.subnets == "all" or self.count is not None else self.subnets


class Wanted:
    """What a request comes to; `specs` is None if they are to be searched, `accuracy` if none is known."""

    def __init__(self, source: ProfileSource, request: SelectionRequest) -> None:
        """Refuse what is impossible."""
        self.source, self.request, self.specs = source, request, _listed(source, request)
        if self.specs is None and request.fit_subnets:
            require_scipy()
        self.accuracy, self.origin = _accuracy(source, request, self.specs)
        self.remeasure_accuracy: AccuracyFunction | None = None
        if again := request.remeasure_accuracy:
            if self.specs is not None or self.accuracy is None:
                raise SpecError(f"remeasure_accuracy: {again} is for a search, --subnets N, with --accuracy")
            self.remeasure_accuracy = _named_accuracy(again, source)[0]
            self.origin += f", then {again}"


@dataclass(frozen=True)
class Selection:
    """The subnets to profile, with accuracies in percent, None if not known, and facts for the stamp."""

    specs: list[SubnetSpec]
    accuracy: list[float | None]
    facts: dict[str, Any]


def _listed(source: ProfileSource, request: SelectionRequest) -> list[SubnetSpec] | None:
    space = source.supernet.space
    if request.file is not None:
        return list(dict.fromkeys(_read(Path(request.file), source.supernet)))
    if request.subnets == "all" and source.accuracy:
        return list(source.accuracy)
    size = space.size()
    count = min(size, request.count or size)
    if count > MOST:
        raise SpecError(f"subnets: {count:.3g} are too many; give a number up to {MOST}")
    if request.subnets.startswith(RANDOM_PREFIX):
        return space.sample(request.seed, count)
    return list(space.enumerate()) if count == size else None


def _read(path: Path, supernet: Supernet) -> list[SubnetSpec]:
    """Read a JSON list of subnets, each in the notation of its space or as `SubnetSpec.to_json` writes it."""
    try:
        listed = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: not a readable file of subnets ({error})") from error
    if not isinstance(listed, list) or not listed:
        raise SpecError(f"{path}: expected a JSON list of subnets, at least one")
    space = supernet.space
    return [
        space.check(SubnetSpec.from_json(one))
        if isinstance(one, dict) and set(one) == {"space", "values"}
        else space.parse(one)
        for one in listed
    ]


def _accuracy(
    source: ProfileSource, request: SelectionRequest, specs: Sequence[SubnetSpec] | None
) -> tuple[AccuracyFunction | None, str]:
    """Return the function that gives a subnet's accuracy, None if none is known, and its origin."""
    given = request.accuracy
    known = {spec: p for spec, p in source.accuracy.items() if p is not None}
    if not given and known and specs is not None:
        return (lambda spec: known.get(spec, math.nan)), "the bundle's"
    if not given:
        stand_in = ": the search used multiply-accumulates as a stand-in and preferred more of them"
        return None, f"not known{stand_in * (specs is None)}"
    try:
        numbers = [float(number) for number in given]
    except ValueError as error:
        if len(given) > 1:
            raise SpecError(f"accuracy: {error}; {ACCURACIES}, only one of them") from error
        return _named_accuracy(given[0], source)
    if specs is None:
        raise SpecError(f"accuracy: a search needs a function of a subnet; {ACCURACIES}")
    percents = percentages(numbers, [spec.key for spec in specs])
    return dict(zip(specs, percents, strict=True)).__getitem__, "given"


def _named_accuracy(name: str, source: ProfileSource) -> tuple[AccuracyFunction, str]:
    """Return the function of a user's `pkg.mod:factory`, or the predictor of a checkpoint; and its origin."""
    supernet = source.supernet
    if ":" in name:
        factory = import_name(name)
        with user_code(f"accuracy {name!r}"):
            function = factory(supernet)

        def accuracy(spec: SubnetSpec) -> float:
            with user_code(f"the function that accuracy {name!r} returned"):
                return float(function(spec))

        return accuracy, name
    if not Path(name).is_file():
        raise SpecError(f"accuracy: {name} is no file; {ACCURACIES}")
    encodes_size = any(axis.name == "resolution" for axis in supernet.space.axes)
    size = None if encodes_size else int(source.sample.shape[-1])
    features = partial(encode, supernet.space, image_size=size)
    return AccuracyPredictor.from_checkpoint(name, features), f"predicted by {Path(name).name}"


def select_subnets(
    wanted: Wanted, journal: Journal, batch_sizes: Sequence[int], measure: Measure
) -> Selection:
    """Return the subnets of a request, the same ones whenever the journal is resumed."""
    source, request = wanted.source, wanted.request
    statistics = journal.path.with_name("chosen-norms.safetensors")
    for line in journal.of("chosen"):
        with journal.fields():
            chosen = [source.supernet.space.check(SubnetSpec.from_json(one)) for one in line["specs"]]
            selection = Selection(chosen, list(line["accuracy"]), dict(line["facts"]))
        if statistics.exists():
            source.supernet.norms = NormTable.load(statistics)
        return selection
    if wanted.specs is None:
        selection = _search(wanted, journal, batch_sizes, measure)
    else:
        function = wanted.accuracy or (lambda _: math.nan)
        percents = map(function, tqdm(wanted.specs, desc="accuracy", disable=None))
        which = "the bundle's" if source.accuracy and request.subnets == "all" else request.subnets
        facts = {"subnets_chosen": which, "accuracy_source": wanted.origin}
        known = [None if math.isnan(percent) else percent for percent in percents]
        selection = Selection(wanted.specs, known, facts)
    source.supernet.norms.keep(selection.specs)
    if len(source.supernet.norms):  # An evaluation has calibrated them.
        source.supernet.norms.save(statistics)
    specs = [spec.to_json() for spec in selection.specs]
    journal.append("chosen", specs=specs, accuracy=selection.accuracy, facts=selection.facts)
    return selection


def _search(wanted: Wanted, journal: Journal, batch_sizes: Sequence[int], measure: Measure) -> Selection:
    """Search for subnets that are not dominated; they are measured first if accuracies are known."""
    request, supernet = wanted.request, wanted.source.supernet
    count = request.count or 0
    costs = CostModel(supernet, wanted.source.sample[None])
    latencies: list[LatencyPredictor] = []
    if request.fit_subnets:
        some = supernet.space.sample(request.seed, request.fit_subnets)
        ends = sorted({batch_sizes[0], batch_sizes[-1]})
        latencies = fitted_latencies(costs, some, ends, partial(measure, journal=journal))
    sizes = [one.batch_size for one in latencies]

    def remeasure(spec: SubnetSpec) -> list[float]:
        return [NEVER_MS if math.isnan(ms) else ms for ms in measure([spec], sizes)[0]]

    def macs(spec: SubnetSpec) -> float:
        return float(costs(spec).macs)

    measured = bool(latencies) and wanted.accuracy is not None
    result = search(
        supernet,
        wanted.accuracy or macs,
        latencies or macs,
        size=count,
        evaluations=request.evaluations,
        seed=request.seed,
        remeasure=remeasure if measured else None,
        remeasure_accuracy=wanted.remeasure_accuracy,
        resume=journal.path.with_name("search.jsonl"),
    )
    facts: dict[str, Any] = {
        "subnets_chosen": f"Pareto set of {request.subnets}",
        "accuracy_source": wanted.origin,
        "search": result.method,
        "evaluated": len(result.evaluated),
        "search_latency": {f"batch {one.batch_size}": str(one.error) for one in latencies}
        or "multiply-accumulates",
        "measured_before_trusted": measured,
    }
    if len(result.front) < count:
        fewer = f"{count} subnets were asked for, {len(result.front)} of those evaluated are not dominated"
        facts["fewer"] = fewer
        tqdm.write(fewer, file=sys.stderr)
    accuracies = [None if wanted.accuracy is None else one.accuracy for one in result.front]
    return Selection([one.spec for one in result.front], accuracies, facts)


def fitted_latencies(
    costs: CostModel, specs: Sequence[SubnetSpec], batch_sizes: Sequence[int], measure: Measure
) -> list[LatencyPredictor]:
    """Measure subnets and fit one latency predictor per batch size at which enough of them ran."""
    found, ran = [], []
    for size, column in zip(batch_sizes, zip(*measure(specs, batch_sizes), strict=True), strict=True):
        pairs = [(spec, ms) for spec, ms in zip(specs, column, strict=True) if not math.isnan(ms)]
        ran.append(f"{len(pairs)} ran at batch size {size}")
        if len(pairs) >= FEWEST_SUBNETS:
            some, latency_ms = zip(*pairs, strict=True)
            found.append(LatencyPredictor.fit(costs, some, latency_ms, size))
    if not found:
        raise SpecError(
            f"a latency predictor is fitted to at least {FEWEST_SUBNETS} measured subnets; of {len(specs)}, "
            f"{', '.join(ran)}. Give smaller --batch-sizes, --fit-subnets 0, or --subnets all"
        )
    return found
