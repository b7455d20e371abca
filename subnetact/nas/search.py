"""Searches for the subnets that are worth serving: the Pareto front of accuracy and latency."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np
from tqdm import tqdm

from subnetact.costs.model import CostModel
from subnetact.errors import SearchError
from subnetact.files.journal import Journal
from subnetact.latency.pareto import non_dominated, spread
from subnetact.nas.nsga2 import METHODS, Objectives, SearchState, survivors
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["Candidate", "SearchResult", "search"]

Latency: TypeAlias = Callable[[SubnetSpec], float]
"""Returns the latency of a subnet in ms."""
MOST_EXHAUSTIVE = 10_000_000
"""Subnets that an exhaustive search evaluates, at most."""


@dataclass(frozen=True)
class Candidate:
    """A subnet with its accuracy and its latencies.

    Attributes:
        spec: the subnet.
        accuracy: accuracy in percent; NaN if the search had no accuracies.
        latency_ms: latency at the first batch size, in ms.
        latencies_ms: latency at every batch size of the search, in ms.
    """

    spec: SubnetSpec
    accuracy: float
    latency_ms: float
    latencies_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class SearchResult(Sequence[Candidate]):
    """The chosen Pareto-optimal subnets, in ascending latency at the first batch size.

    Attributes:
        front: the chosen subnets. The result itself is a sequence of the same candidates.
        evaluated: every evaluated subnet with the values that the search saw, in order of evaluation.
        method: "evolution", "exhaustive" or "random".
        batch_sizes: the batch sizes of `Candidate.latencies_ms`.
        remeasured: whether the latencies of `front` were measured again after the search.
    """

    front: tuple[Candidate, ...]
    evaluated: tuple[Candidate, ...]
    method: str
    batch_sizes: tuple[int, ...]
    remeasured: bool = False

    def __len__(self) -> int:
        return len(self.front)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self.front[index]

    def __repr__(self) -> str:
        return f"SearchResult({len(self.front)} of {len(self.evaluated)} subnets, by {self.method})"


def search(
    supernet: Supernet,
    accuracy: Callable[[SubnetSpec], float] | None,
    latency: Latency | Sequence[Latency],
    size: int = 100,
    evaluations: int = 1000,
    population: int | None = None,
    seed: int = 0,
    method: str | None = None,
    batch_sizes: Sequence[int] = (),
    input_shape: Sequence[int] | None = None,
    remeasure: Callable[[SubnetSpec], float | Sequence[float]] | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> SearchResult:
    """Find the subnets with the best trade-offs between accuracy and latency: their Pareto front.

    The method "evolution" is NSGA-II on the accuracy and all latencies, with a surrogate that selects
    among many candidate subnets bred from the best. All evaluated subnets count for the result, and none is
    evaluated twice. From their Pareto front, `size` subnets are chosen evenly over the latency at the first
    batch size.

    Accuracy and latency can be any functions: predictors, cost models, true evaluation, measurement. If
    they are deterministic, the search is as well.

    Args:
        supernet: the supernet whose space is searched.
        accuracy: returns the accuracy of a subnet in percent. If None, the search uses
            multiply-accumulates as a stand-in and prefers more of them; the accuracies in the result
            are then NaN.
        latency: returns the latency of a subnet in ms, or several such functions, one per batch size.
        size: number of subnets to choose; fewer are returned if the front has fewer.
        evaluations: number of subnets to evaluate, at least 2. An exhaustive search evaluates all.
        population: number of subnets that the next generation is bred from. A generation evaluates a
            quarter as many new subnets. By default the population is a tenth of the evaluations, but
            between 16 and 100.
        seed: seed of the random number generator.
        method: "evolution", "exhaustive" or "random". By default "exhaustive" if the space has at most
            `evaluations` subnets, otherwise "evolution".
        batch_sizes: the batch sizes of the latencies, which are noted in the result. They may be left
            out for a single latency, which is then taken for batch size 1.
        input_shape: shape of one input, without the batch dimension; needed only if accuracy is None.
        remeasure: measures a chosen subnet again, and returns its latency in ms or one latency per batch
            size. The result holds only subnets that are still Pareto-optimal after their second
            measurement; others of the front take the places of those that are not.
        resume: file to which every evaluation is written at once. If the file exists, what it holds is not
            evaluated again, and the result is the same as without the interruption.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The chosen subnets, in ascending latency at the first batch size.

    Raises:
        SearchError: arguments contradict each other, or an accuracy or latency is not a finite number.
        ResumeMismatch: the evaluations in `resume` are of another space or of other settings.
        FileFormatError: `resume` is damaged.
        MissingFile: the folder of `resume` does not exist.

    Source:
        NSGA-II: Deb et al., 2002. Evolutionary search of subnets: Cai et al., "Once-for-all", ICLR 2020.
        Surrogate: Lu et al., "NSGANetV2", ECCV 2020.

    Example:
        >>> found = search(supernet, accuracy_predictor, latency_predictor, size=20)
        >>> [candidate.spec for candidate in found]
    """
    functions = list(latency) if isinstance(latency, Sequence) else [latency]
    sizes = tuple(batch_sizes) or ((1,) if len(functions) == 1 else ())
    method = method or ("exhaustive" if supernet.space.size() <= evaluations else "evolution")
    if population is None:
        population = min(max(evaluations // 10, 16), 100)
    _check(supernet.space.size(), method, evaluations, population, size, functions, sizes)
    if accuracy is None:
        if input_shape is None:
            raise SearchError(
                "accuracy: without accuracies the search counts multiply-accumulates; give input_shape, the "
                "shape of one input"
            )
        costs = CostModel(supernet, input_shape)
        gain: Callable[[SubnetSpec], float] = lambda spec: costs(spec).macs  # noqa: E731
    else:
        gain = accuracy
    settings = {
        "space": supernet.space.id,
        "axes": [axis.name for axis in supernet.space.axes],
        "seed": seed,
        "method": method,
        "evaluations": evaluations,
        "population": population,
        "batch_sizes": list(sizes),
        "accuracy": accuracy is not None,
    }
    journal = None if resume is None else Journal(resume, settings)
    state = SearchState(supernet.space, seed)

    def measured(spec: SubnetSpec) -> Objectives:
        return _finite(spec, gain(spec), *(one(spec) for one in functions))

    total = supernet.space.size() if method == "exhaustive" else min(supernet.space.size(), evaluations)
    evaluate = _Remembered(measured, journal, "evaluated", supernet.space, 1 + len(functions))
    _run(state, method, population, total, evaluate, progress)
    front = _front(state)
    if remeasure is None:
        chosen = [front[i] for i in spread([state.found[spec][1] for spec in front], size)]
        latencies = {spec: state.found[spec][1:] for spec in chosen}
    else:

        def measured_again(spec: SubnetSpec) -> Objectives:
            return _latencies(spec, remeasure(spec), len(functions))

        again = _Remembered(measured_again, journal, "remeasured", supernet.space, len(functions))
        latencies = _remeasured(state.found, front, size, again, progress)
    known = accuracy is not None

    def candidate(spec: SubnetSpec, ms: Objectives) -> Candidate:
        return Candidate(spec, state.found[spec][0] if known else math.nan, ms[0], ms)

    return SearchResult(
        tuple(candidate(spec, ms) for spec, ms in sorted(latencies.items(), key=lambda item: item[1])),
        tuple(candidate(spec, objectives[1:]) for spec, objectives in state.found.items()),
        method,
        sizes,
        remeasure is not None,
    )


def _check(
    subnets: int,
    method: str,
    evaluations: int,
    population: int,
    size: int,
    functions: Sequence[Latency],
    batch_sizes: Sequence[int],
) -> None:
    if method not in METHODS:
        raise SearchError(f"method: {method!r} is unknown; choose from {', '.join(METHODS)}")
    if method == "exhaustive" and subnets > MOST_EXHAUSTIVE:
        raise SearchError(f"method: exhaustive would evaluate all {subnets:.3g} subnets; use evolution")
    if evaluations < 2:
        raise SearchError(f"evaluations: {evaluations} subnets cannot make a front; give at least 2")
    if population < 2 or size < 1:
        raise SearchError(f"population must be at least 2 and size at least 1, got {population} and {size}")
    if not functions or not all(map(callable, functions)):
        raise SearchError("latency: give a function of a subnet, or a list of them, one per batch size")
    if len(functions) != len(batch_sizes):
        raise SearchError(
            f"batch_sizes: give one batch size per latency function; got {len(functions)} functions and the "
            f"batch sizes {list(batch_sizes)}"
        )


class _Remembered:
    """A function of subnets that is called once for each, also if the search is killed and resumed."""

    def __init__(
        self,
        function: Callable[[SubnetSpec], Objectives],
        journal: Journal | None,
        record: str,
        space: SubnetSpace,
        count: int,
    ) -> None:
        self._function, self._journal, self._record = function, journal, record
        self._known: dict[SubnetSpec, Objectives] = {}
        if journal is not None:
            with journal.fields():
                for line in journal.of(record):
                    spec = space.check(SubnetSpec.from_json(line["spec"]))
                    self._known[spec] = _finite(spec, *line["objectives"])
                    if len(self._known[spec]) != count:
                        raise ValueError(f"{count} objectives are needed")

    def __call__(self, spec: SubnetSpec) -> Objectives:
        if spec not in self._known:
            self._known[spec] = self._function(spec)
            if self._journal is not None:
                self._journal.append(self._record, spec=spec.to_json(), objectives=list(self._known[spec]))
        return self._known[spec]


def _run(
    state: SearchState,
    method: str,
    population: int,
    total: int,
    evaluate: Callable[[SubnetSpec], Objectives],
    progress: bool,
) -> None:
    with tqdm(total=total, desc="searching", disable=not progress or None) as bar:
        while len(state.found) < total:
            before = len(state.found)
            count = population if method != "evolution" else max(population // (4 if before else 2), 2)
            for spec in METHODS[method](state, min(count, total - before)):
                state.found[spec] = evaluate(spec)
                bar.update()
            if len(state.found) == before:
                break
            pool = [*state.population, *range(before, len(state.found))]
            state.population = survivors(state.costs(), pool, population)


def _finite(spec: SubnetSpec, *values: float) -> Objectives:
    numbers = tuple(float(value) for value in values)
    if not all(map(math.isfinite, numbers)):
        raise SearchError(f"{spec}: accuracy and latencies must be finite numbers, got {numbers}")
    return numbers


def _front(state: SearchState) -> list[SubnetSpec]:
    specs = list(state.found)
    front = [specs[i] for i in non_dominated(state.costs())]
    return sorted(front, key=lambda spec: (state.found[spec][1], state.found[spec][0]))


def _remeasured(
    found: Mapping[SubnetSpec, Objectives],
    front: Sequence[SubnetSpec],
    size: int,
    remeasure: Callable[[SubnetSpec], Objectives],
    progress: bool,
) -> dict[SubnetSpec, Objectives]:
    """Measure the chosen subnets again until `size` of the measured ones are Pareto-optimal.

    Subnets that turn out to be dominated are replaced by subnets of the front that are not yet measured.
    """
    pending = [front[i] for i in spread([found[spec][1] for spec in front], size)]
    again: dict[SubnetSpec, Objectives] = {}
    with tqdm(desc="measuring again", unit=" subnets", disable=not progress or None) as bar:
        while True:
            for spec in pending:
                again[spec] = remeasure(spec)
                bar.update()
            measured = list(again)
            costs = np.array([[-found[spec][0], *again[spec]] for spec in measured])
            trusted = sorted((measured[i] for i in non_dominated(costs)), key=again.__getitem__)
            rest = [spec for spec in front if spec not in again]
            if len(trusted) == size or not rest:
                return {spec: again[spec] for spec in trusted}
            pending = _farthest(rest, trusted, size - len(trusted), found)


def _latencies(spec: SubnetSpec, given: float | Sequence[float], count: int) -> Objectives:
    listed = np.atleast_1d(np.asarray(given, dtype=np.float64)).tolist()
    if len(listed) != count:
        raise SearchError(f"remeasure: {count} latencies are needed for {spec}, got {len(listed)}")
    return _finite(spec, *listed)


def _farthest(
    rest: Sequence[SubnetSpec],
    trusted: Sequence[SubnetSpec],
    count: int,
    found: Mapping[SubnetSpec, Objectives],
) -> list[SubnetSpec]:
    """Choose subnets whose latencies in the search are farthest from those of the trusted subnets."""
    rest, taken = list(rest), [found[spec][1] for spec in trusted]
    chosen: list[SubnetSpec] = []
    while rest and len(chosen) < count:
        best = max(rest, key=lambda spec: min(abs(found[spec][1] - ms) for ms in taken))
        rest.remove(best)
        taken.append(found[best][1])
        chosen.append(best)
    return chosen
