"""Searches for the subnets that are worth serving: the Pareto front of accuracy and latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
from tqdm import tqdm

from subnetact.errors import SearchError
from subnetact.files.documents import StrPath
from subnetact.files.journal import Journal
from subnetact.latency.pareto import Costs, hypervolume, non_dominated, spread
from subnetact.nas.genes import Variation, encoded
from subnetact.nas.surrogate import Surrogate, select_by_expected_improvement
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

Objectives: TypeAlias = tuple[float, ...]
"""The accuracy in percent, which is maximised, then the latencies in ms, which are minimised."""
Measured: TypeAlias = Callable[[SubnetSpec], Objectives]
Latency: TypeAlias = Callable[[SubnetSpec], float]
"""Returns the latency of a subnet in ms."""
MOST_FRUITLESS_TRIES = 100
"""A generation ends early after this many consecutive children that were evaluated before."""
ENUMERABLE_SPACE = 1_000_000
"""The most subnets of a space that an exhaustive search takes, or one that finds no new ones by chance."""
CHILDREN_PER_EVALUATION = 30
"""Children that the surrogate compares for each child that is evaluated."""
COMPARED_SPACE = 2_000
"""The most subnets of a space that the surrogate compares all in every generation, without children."""
LARGEST_TRAINING_SET = 300
"""Evaluated subnets that the surrogate is fitted to, at most: the Pareto front, then the newest ones."""
CROSSED_SHARE = 0.9
"""Share of children with two parents. The others have one."""


@dataclass(frozen=True)
class Candidate:
    """A subnet with its accuracy and its latencies.

    Attributes:
        spec: the subnet.
        accuracy: accuracy in percent; measured again if the search was given `remeasure_accuracy`.
        latency_ms: latency at the first batch size, in ms.
        latencies_ms: latency at every batch size of the search, in ms.
        chosen_accuracy: the accuracy in percent that the subnet was chosen by, which flatters it; None if
            `accuracy` is that one.
    """

    spec: SubnetSpec
    accuracy: float
    latency_ms: float
    latencies_ms: tuple[float, ...] = ()
    chosen_accuracy: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        front: the chosen Pareto-optimal subnets, in ascending latency by the first latency function, with
            the values that were measured again, if any were.
        evaluated: every evaluated subnet with the values that the search saw, in order of evaluation.
        method: "evolution", "exhaustive" or "random".
    """

    front: tuple[Candidate, ...]
    evaluated: tuple[Candidate, ...]
    method: str

    def hypervolume(self, reference: Sequence[float] | None = None) -> float:
        """Return the hypervolume of the chosen front, by which searches are compared; see `hypervolume`.

        Args:
            reference: an accuracy in percent and one latency in ms per latency function. By default the worst
                of all evaluated subnets, objective by objective; searches that are compared need the same.

        Returns:
            The hypervolume, in percent times ms for one latency function.

        Raises:
            TableError: there is not one number of the reference per objective.
        """
        latencies = zip(*(one.latencies_ms for one in self.evaluated), strict=True)
        worst = min(one.accuracy for one in self.evaluated), *map(max, latencies)
        points = [(one.accuracy, *one.latencies_ms) for one in self.front]
        return hypervolume(points, worst if reference is None else reference)


def search(
    supernet: Supernet,
    accuracy: Callable[[SubnetSpec], float],
    latency: Latency | Sequence[Latency],
    size: int = 100,
    evaluations: int = 1000,
    seed: int = 0,
    method: str | None = None,
    remeasure: Callable[[SubnetSpec], float | Sequence[float]] | None = None,
    remeasure_accuracy: Callable[[SubnetSpec], float] | None = None,
    resume: StrPath | None = None,
    progress: bool = True,
    initial: Sequence[SubnetSpec] = (),
) -> SearchResult:
    """Find the subnets with the best trade-offs between accuracy and latency: their Pareto front.

    The method "evolution" breeds many candidates from the Pareto front of the accuracy and all latencies, of
    which a surrogate selects those to evaluate; in a space of at most 2,000 subnets it selects among all, and
    hardly anything is left to chance. All evaluated subnets count for the result, and none is evaluated
    twice. From their Pareto front, `size` subnets are chosen evenly over the first latency.

    Accuracy and latency can be any functions: predictors, cost models, true evaluation, measurement. If
    they are deterministic, the search is as well.

    A search prefers subnets that its images happen to flatter, so that the accuracies it chose by are too
    high, the more so the fewer images there are (the winner's curse). `remeasure_accuracy` measures the
    chosen subnets again, on images that chose none of them, and its values are free of that. Therefore none
    is dropped for its second accuracy, which would be another choice: in these accuracies, one subnet of the
    front may be better than another one that is slower.

    Args:
        supernet: the supernet whose space is searched.
        accuracy: returns the accuracy of a subnet in percent, or a stand-in that is to be maximised.
        latency: returns the latency of a subnet in ms, or several such functions, one per batch size.
        size: number of subnets to choose; fewer are returned if the front has fewer.
        evaluations: number of subnets to evaluate, at least 2. An exhaustive search evaluates all.
        seed: seed of the random number generator.
        method: "evolution", "exhaustive" or "random". By default "exhaustive" if the space has at most
            `evaluations` subnets, otherwise "evolution".
        remeasure: measures a chosen subnet again, and returns its latency in ms or one latency per latency
            function. The front then holds only subnets that are still Pareto-optimal after their second
            measurement; others take the places of those that are not.
        remeasure_accuracy: returns the accuracy of a chosen subnet in percent on other data than `accuracy`
            used. It is called for the subnets of the front in the end, and becomes their `accuracy`; the one
            that they were chosen by stays as `chosen_accuracy`.
        resume: file to which every evaluation is written at once. If the file exists, what it holds is not
            evaluated again, and the result is the same as without the interruption.
        progress: if True, show a progress bar when standard error is a terminal.
        initial: subnets to evaluate first, those of `LayerScores.front` for example.

    Returns:
        The chosen subnets and all evaluated ones.

    Raises:
        SearchError: arguments contradict each other, or an accuracy or latency is not a finite number.
        ResumeMismatch: the evaluations in `resume` are of another space or of other settings.
        FileFormatError: `resume` is damaged.
        MissingFile: the folder of `resume` does not exist.

    Source:
        Evolutionary search of subnets: Cai et al., "Once-for-all", ICLR 2020.
        Surrogate: Lu et al., "NSGANetV2", ECCV 2020.

    Example:
        >>> choosing, judging = batches[::2], batches[1::2]  # the labelled images that do either
        >>> result = search(
        ...     supernet,
        ...     lambda spec: evaluate(supernet, [spec], choosing, calibration=images)[0],
        ...     latency_predictor,
        ...     remeasure_accuracy=lambda spec: evaluate(supernet, [spec], judging, calibration=images)[0],
        ... )
        >>> [(one.spec, one.accuracy, one.latency_ms) for one in result.front]
    """
    space, functions = supernet.space, list(latency) if isinstance(latency, Sequence) else [latency]
    for name, value, least in (("evaluations", evaluations, 2), ("size", size, 1), ("seed", seed, 0)):
        if not isinstance(value, Integral) or value < least:
            raise SearchError(f"{name}: {value!r} must be a whole number of at least {least}")
    method = method or ("exhaustive" if space.size() <= evaluations else "evolution")
    if method not in METHODS:
        raise SearchError(f"method: {method!r} is unknown; choose from {', '.join(METHODS)}")
    if method == "exhaustive" and space.size() > ENUMERABLE_SPACE:
        raise SearchError(f"method: exhaustive would evaluate all {space.size():.3g} subnets; use evolution")
    if not functions or not all(map(callable, functions)):
        raise SearchError("latency: give a function of a subnet, or a list of them, one per batch size")
    for name, function in (("remeasure", remeasure), ("remeasure_accuracy", remeasure_accuracy)):
        if not callable(function or float):
            raise SearchError(f"{name}: {function!r:.60} is no function; give a function of a subnet")
    settings = {
        "space": space.id,
        "axes": [axis.name for axis in space.axes],
        "seed": seed,
        "method": method,
        "evaluations": evaluations,
        "latencies": len(functions),
    }
    journal = Journal(resume, settings)
    state = SearchState(space, seed)

    def measured(spec: SubnetSpec) -> Objectives:
        return _finite(spec, [accuracy(spec)], [one(spec) for one in functions])

    def measured_again(spec: SubnetSpec) -> Objectives:
        given: Any = state.found[spec][1:] if remeasure is None else remeasure(spec)
        listed = np.atleast_1d(np.asarray(given, dtype=np.float64)).tolist()
        if len(listed) != len(functions):
            raise SearchError(f"remeasure: {spec} needs {len(functions)} latencies, got {len(listed)}")
        return _finite(spec, [], listed)

    evaluate = _remembered(measured, journal, "evaluated", space, 1 + len(functions))
    for spec in dict.fromkeys(map(space.check, initial)):
        state.found[spec] = evaluate(spec)
    _run(state, method, evaluations, evaluate, progress)
    kept = journal if remeasure is not None else Journal(None, {})
    again = _remembered(measured_again, kept, "remeasured", space, len(functions))
    latencies = _front(state, size, again, progress and remeasure is not None)
    ranked = sorted(latencies.items(), key=lambda item: item[1])
    front = tuple(Candidate(spec, state.found[spec][0], ms[0], ms) for spec, ms in ranked)
    if remeasure_accuracy is not None:
        judge: Measured = lambda spec: _finite(spec, [remeasure_accuracy(spec)], [])  # noqa: E731
        judge = _remembered(judge, journal, "remeasured_accuracy", space, 1)
        front = tuple(replace(c, accuracy=judge(c.spec)[0], chosen_accuracy=c.accuracy) for c in front)
    evaluated = tuple(Candidate(spec, one[0], one[1], one[1:]) for spec, one in state.found.items())
    return SearchResult(front, evaluated, method)


def _remembered(
    function: Measured, journal: Journal, record: str, space: SubnetSpace, count: int
) -> Measured:
    """Return a function that is called once for each subnet, also if the search is killed and resumed."""
    known: dict[SubnetSpec, Objectives] = {}
    with journal.fields():
        for line in journal.of(record):
            spec = space.check(SubnetSpec.from_json(line["spec"]))
            known[spec] = _finite(spec, line["objectives"], [])
            if len(known[spec]) != count:
                raise ValueError(f"{count} objectives are needed")

    def remembered(spec: SubnetSpec) -> Objectives:
        if spec not in known:
            known[spec] = function(spec)
            journal.append(record, spec=spec.to_json(), objectives=list(known[spec]))
        return known[spec]

    return remembered


def _run(state: SearchState, method: str, evaluations: int, evaluate: Measured, progress: bool) -> None:
    generation = min(max(evaluations // 10, 16), 100)
    size = state.space.size()
    total = size if method == "exhaustive" else min(size, evaluations)
    done = len(state.found)
    with tqdm(total=total, initial=done, desc="searching", disable=not progress or None) as bar:
        while len(state.found) < total:
            before = len(state.found)
            count = generation if method != "evolution" else max(generation // (4 if before else 2), 2)
            for spec in METHODS[method](state, min(count, total - before)):
                state.found[spec] = evaluate(spec)
                bar.update()
            if len(state.found) == before:
                break


def _front(state: SearchState, size: int, measure: Measured, progress: bool) -> dict[SubnetSpec, Objectives]:
    """Measure subnets of the front again until `size` of the measured ones are Pareto-optimal."""
    found, specs = state.found, list(state.found)
    front = [specs[i] for i in non_dominated(state.costs())]
    front.sort(key=lambda spec: (found[spec][1], found[spec][0]))
    pending = [front[i] for i in spread([found[spec][1] for spec in front], size)]
    again: dict[SubnetSpec, Objectives] = {}
    with tqdm(desc="measuring again", unit=" subnets", disable=not progress or None) as bar:
        while True:
            for spec in pending:
                again[spec] = measure(spec)
                bar.update()
            measured = list(again)
            costs = np.array([[-found[spec][0], *again[spec]] for spec in measured])
            trusted = [measured[i] for i in non_dominated(costs)]
            rest = [spec for spec in front if spec not in again]
            if len(trusted) == size or not rest:
                return {spec: again[spec] for spec in trusted}
            taken = [found[spec][1] for spec in trusted]
            pending = [max(rest, key=lambda spec: min(abs(found[spec][1] - ms) for ms in taken))]


def _finite(spec: SubnetSpec, accuracy: Sequence[Any], latencies: Sequence[Any]) -> Objectives:
    given = (*accuracy, *latencies)
    try:
        numbers = tuple(map(float, given))
    except (TypeError, ValueError):
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)) or min(numbers[len(accuracy) :], default=0) < 0:
        raise SearchError(
            f"{spec}: accuracy and latencies must be finite numbers, latencies of at least 0 ms, got {given}"
        )
    return numbers


# -- methods, which propose what to evaluate --------------------------------------------------------


class SearchState:
    """A search between two generations; `found` is in order of evaluation."""

    def __init__(self, space: SubnetSpace, seed: int) -> None:
        self.space = space
        self.rng = np.random.default_rng(seed)
        self.found: dict[SubnetSpec, Objectives] = {}

    def costs(self) -> Costs:
        """Return what to minimise, (subnets, objectives): the negated accuracy, then the latencies."""
        points = np.array(list(self.found.values()), dtype=np.float64)
        points[:, 0] *= -1
        return points


def exhaust(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return up to `count` new subnets in the order of the space."""
    rest = (spec for spec in state.space.enumerate() if spec not in state.found)
    return list(islice(rest, count))


def sample(state: SearchState, count: int) -> list[SubnetSpec]:
    """Return up to `count` new random subnets; a search begins with the smallest and the largest one."""
    ends = state.space.smallest(), state.space.largest()
    return _new(state, chain(ends, map(state.space.sample, repeat(state.rng))), count)


def evolve(state: SearchState, count: int, surrogate: bool = True) -> list[SubnetSpec]:
    """Return up to `count` new children of the Pareto front, selected by a surrogate unless it is False.

    In a small space the surrogate selects among all that is left.
    """
    variation = Variation(state.space, state.rng)
    if not state.found:
        return _new(state, variation.initial(max(3, count // 3)), count)
    specs, costs = list(state.found), state.costs()
    front = state.rng.permutation(non_dominated(costs))  # It may have more than the training set takes.
    if surrogate and state.space.size() <= COMPARED_SPACE:
        candidates = exhaust(state, COMPARED_SPACE)
    else:
        bred = _children(variation, [specs[i] for i in front])
        candidates = _new(state, bred, CHILDREN_PER_EVALUATION * count if surrogate else count)
    if len(candidates) <= count:
        return candidates
    newest = range(len(state.found) - 1, -1, -1)
    training_set = list(dict.fromkeys([*front, *newest]))[:LARGEST_TRAINING_SET]
    known, new = (encoded(state.space, some) for some in ([specs[i] for i in training_set], candidates))
    accuracy = Surrogate(known, costs[training_set, 0])
    predicted = [accuracy.predict(new)]
    for latency in costs[training_set, 1:].T:
        scale, inverse = (np.log, np.exp) if (latency > 0).all() else (np.positive, np.positive)
        predicted.append(inverse(Surrogate(known, scale(latency)).predict(new)))
    selected = select_by_expected_improvement(np.stack(predicted, 1), accuracy.loo_rmse, costs, count)
    return [candidates[i] for i in selected]


METHODS: dict[str, Callable[[SearchState, int], list[SubnetSpec]]]
METHODS = {"evolution": evolve, "exhaustive": exhaust, "random": sample}


def _children(variation: Variation, parents: Sequence[SubnetSpec]) -> Iterator[SubnetSpec]:
    rng = variation.rng
    while True:
        one, two = (parents[i] for i in rng.integers(len(parents), size=2))
        genes = variation.cross(one, two) if rng.random() < CROSSED_SHARE else variation.genes(one)
        yield variation.spec(variation.mutate(genes))


def _new(state: SearchState, specs: Iterator[SubnetSpec], count: int) -> list[SubnetSpec]:
    """Return the first `count` distinct subnets of an endless iterator that were not evaluated before."""
    new: dict[SubnetSpec, None] = {}
    tries = 0
    while len(new) < count and tries < MOST_FRUITLESS_TRIES:
        spec = next(specs)
        tries += 1
        if spec not in state.found and spec not in new:
            new[spec] = None
            tries = 0
    if new:
        return list(new)
    return exhaust(state, count) if state.space.size() <= ENUMERABLE_SPACE else []
