"""score_layers: what every layer loses at every size, and the best subnet within a budget by these scores.

Each choice of each slot of the space is scored alone: how far the outputs of the largest subnet with only
this choice changed are from those of the largest subnet. The scores of a subnet's choices add up to what it
is expected to lose, and so do the costs, about a subnet, so that an integer program finds the best subnet
within a budget. No subnet is trained, and a second budget runs no subnet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from subnetact.calibration.calibrate import calibrate
from subnetact.calibration.shared_calls import SharedCalls
from subnetact.costs import CostModel
from subnetact.errors import SearchError, StaleWeights, extra_needed
from subnetact.files.documents import StrPath
from subnetact.files.journal import Journal
from subnetact.latency.table import LatencyTable
from subnetact.nas.latency_predictor import LatencyPredictor
from subnetact.operators import LayerSelect
from subnetact.spec import PRECISION, SubnetSpec, Value, shown
from subnetact.supernet.batches import call_with, hash_of
from subnetact.supernet.bind import operators_in
from subnetact.supernet.failure import explained
from subnetact.supernet.generation import Moment
from subnetact.supernet.statistics import batch_norms, is_calibrated
from subnetact.supernet.supernet import Supernet, as_supernet
from subnetact.supernet.views import private_view
from subnetact.training.task import TASKS, Lesson, Task

Choice: TypeAlias = tuple[str, int, Value]
"""An axis, the position of a slot in it, and a choice of the slot."""
Measured: TypeAlias = Callable[[SubnetSpec], float]

COSTS = {"macs": "macs", "parameters": "parameters", "bytes": "weight_bytes"}
"""The names of costs in a budget, and in `Cost`."""
LATENCY = "latency_ms"
ROUNDS = 12
"""So often a budget is solved with costs about the subnet before; those of neighbours may multiply."""


@dataclass(frozen=True, eq=False)
class LayerScores:
    """What every choice of every slot loses alone.

    Attributes:
        supernet: the supernet that was scored.
        example: a batch of which the shapes decide the costs, as `CostModel` takes it.
        losses: (axis, position of the slot, choice) -> how far the outputs of the largest subnet move if only
            this choice changes; what the largest subnet chooses has 0.
        moment: that of the weights that were scored.
    """

    supernet: Supernet
    example: Any
    losses: Mapping[Choice, float]
    moment: Moment = field(repr=False)

    def expected(self, spec: SubnetSpec) -> float:
        """Return the sum of the scores of the choices of `spec`; `SpecError` if it is of another space."""
        choices = self.supernet.space.values(self.supernet.space.check(spec))
        chosen = [(a, i, v) for a, own in choices.items() for i, v in enumerate(own) if v is not None]
        gone = {place for choice in chosen for place in self._skipped.get(choice, ())}
        return sum(self.losses.get(choice, 0.0) for choice in chosen if choice[:2] not in gone)

    def best(
        self,
        budget: Mapping[str, float],
        latency: Measured | LatencyTable | None = None,
        batch_size: int = 1,
    ) -> SubnetSpec:
        """Return the subnet within a budget that is expected to lose least.

        Args:
            budget: what the subnet may cost, one or several of "macs" (multiply-accumulates of one input),
                "parameters", "bytes" (of the weights) and "latency_ms". A float up to 1.0 is a share of the
                largest subnet; other numbers are absolute.
            latency: the latency of a subnet in ms, for "latency_ms": a function, such as a
                `LatencyPredictor`, or a `LatencyTable` of at least 8 subnets of this space, to which a
                predictor is fitted.
            batch_size: the batch size of the latency, if a table is given.

        Returns:
            The subnet. Costs are those of `CostModel` and of `latency`, which it keeps to exactly.

        Raises:
            SearchError: a cost is unknown or no number, the smallest subnet exceeds the budget, or a latency
                is needed and not given.
            StaleWeights: the weights are not those that were scored.
            MissingExtra: scipy is not installed (`pip install 'subnetact[nas]'`).

        Example:
            >>> spec = scores.best({"macs": 0.6})
            >>> supernet.subnet(spec)
        """
        return self._within(*self._limits(budget, self._latency(latency, batch_size)))

    def front(
        self,
        n: int,
        cost: str = "macs",
        latency: Measured | LatencyTable | None = None,
        batch_size: int = 1,
    ) -> list[SubnetSpec]:
        """Return up to `n` subnets from the smallest to the largest, the best at even steps of a cost.

        Args:
            n: the number of subnets, at least 2.
            cost: the cost that they are even in; see `best`, also for `latency` and `batch_size`.

        Returns:
            The subnets, the smallest first.

        Raises:
            SearchError: as `best` does, or `n` is no whole number of at least 2.

        Example:
            >>> engine = subnetact.Engine(supernet, scores.front(8), example=x)
        """
        if type(n) is not int or n < 2:
            raise SearchError(f"front: {shown(n)} is no whole number of at least 2")
        space = self.supernet.space
        (most,), (measure,) = self._limits({cost: 1.0}, self._latency(latency, batch_size))
        least = measure(space.smallest())
        limits = np.linspace(least, most, n)[1:-1].tolist()
        chosen = [space.smallest(), *(self._within([limit], [measure]) for limit in limits), space.largest()]
        return list(dict.fromkeys(chosen))

    # -- inner parts -------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the supernet, for the example."""
        return CostModel(self.supernet, self.example)

    def _require_weights(self) -> None:
        if not self.supernet.generation.moment().same_weights(self.moment):
            raise StaleWeights(
                "the weights have changed since the layers were scored; call score_layers again"
            )

    def _latency(self, latency: Measured | LatencyTable | None, batch_size: int) -> Measured | None:
        if not isinstance(latency, LatencyTable):
            return latency
        specs = [self.supernet.space.parse(key) for key in latency.subnets]
        measured = [latency.latency_at(key, batch_size) for key in latency.subnets]
        return LatencyPredictor.fit(self.costs, specs, measured, batch_size)

    def _limits(self, budget: Any, latency: Measured | None) -> tuple[list[float], list[Measured]]:
        """Return what a subnet may cost at most, and how the costs are measured; the scores must be valid."""
        self._require_weights()
        if not isinstance(budget, Mapping) or not budget:
            raise SearchError(f"budget: {shown(budget)} is no mapping; give costs by name, {{'macs': 0.6}}")
        limits, measures = list[float](), list[Measured]()
        space, known = self.supernet.space, {**{n: self._measure(n) for n in COSTS}, LATENCY: latency}
        for name, limit in budget.items():
            if name not in known:
                raise SearchError(f"budget: no cost {shown(name)}; choose from {', '.join(known)}")
            if not callable(measure := known[name]):
                raise SearchError(
                    "budget: latency_ms needs latency=, a LatencyTable or a function of a subnet, such as a "
                    "LatencyPredictor"
                )
            number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if not number or not math.isfinite(limit) or limit <= 0:
                raise SearchError(f"budget: {name} is a positive number, got {shown(limit)}")
            share = isinstance(limit, float) and limit <= 1.0
            absolute = limit * measure(space.largest()) if share else float(limit)
            if (least := measure(space.smallest())) > absolute:
                raise SearchError(
                    f"budget: {name} of at most {absolute:.6g} is below the smallest subnet, which has "
                    f"{least:.6g}, {least / measure(space.largest()):.3f} of the largest"
                )
            limits.append(absolute)
            measures.append(measure)
        return limits, measures

    def _measure(self, name: str) -> Measured:
        return lambda spec: float(getattr(self.costs(spec), COSTS[name]))

    def _within(self, limits: Sequence[float], measures: Sequence[Measured]) -> SubnetSpec:
        """Return the best subnet that keeps to limits, solved with costs about the subnet found before."""
        space = self.supernet.space
        point, targets = space.largest(), list(limits)
        best, seen = space.smallest(), set[SubnetSpec]()
        for _ in range(ROUNDS):
            if point in seen:
                break
            seen.add(point)
            solved = self._solved(point, targets, measures)
            if solved is None:
                break
            excess = [measure(solved) - limit for measure, limit in zip(measures, limits, strict=True)]
            if max(excess) <= 0:
                best = min(best, solved, key=self.expected)
            targets = [t - max(e, 0.0) for t, e in zip(targets, excess, strict=True)]
            point = solved
        return best

    def _solved(
        self, point: SubnetSpec, limits: Sequence[float], measures: Sequence[Measured]
    ) -> SubnetSpec | None:
        """Return the subnet of least loss whose costs, linear about a point, keep to limits."""
        with extra_needed("a budget is solved by scipy: pip install 'subnetact[nas]'"):
            from scipy.optimize import Bounds, LinearConstraint, milp
        space, menu = self.supernet.space, list(self.losses)
        index = {choice: i for i, choice in enumerate(menu)}
        slots = {(axis.name, i): slot for axis in space.axes for i, slot in enumerate(axis.slots)}
        constraints = list[Any]()

        def constrain(entries: Mapping[Choice, float], low: float, high: float) -> None:
            row = np.zeros(len(menu))
            for choice, number in entries.items():
                row[index[choice]] += number
            constraints.append(LinearConstraint(row, low, high))

        for (axis, at), slot in slots.items():
            if (axis, at, slot.choices[0]) not in index:
                continue
            one: dict[Choice, float] = {(axis, at, value): 1.0 for value in slot.choices}
            used = slot.used_when
            if used is not None:
                one |= {(used.axis, used.slot, value): -1.0 for value in used.values}
            constrain(one, *(0.0, 0.0) if used is not None else (1.0, 1.0))
        for choice, places in self._skipped.items():  # What is skipped anyway gains nothing more.
            for axis, at in places:
                smaller = slots[axis, at].choices[:-1]
                constrain({choice: 1.0, **{(axis, at, value): 1.0 for value in smaller}}, 0.0, 1.0)
        variants = [self._with(point, [choice]) for choice in menu]
        for measure, limit in zip(measures, limits, strict=True):
            base = measure(point)
            gains = {c: measure(s) - base for c, s in zip(menu, variants, strict=True) if s != point}
            scale = max(abs(limit), 1e-30)
            constrain({c: gain / scale for c, gain in gains.items()}, -np.inf, (limit - base) / scale)
        result = milp(
            list(self.losses.values()),
            constraints=constraints,
            integrality=np.ones(len(menu)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-4, "time_limit": 30},
        )
        if result.x is None:
            return None
        return self._with(
            point, [choice for choice, taken in zip(menu, result.x, strict=True) if taken > 0.5]
        )

    def _with(self, point: SubnetSpec, choices: Iterable[Choice]) -> SubnetSpec:
        """Return a subnet with other choices; slots that were not used so far get their largest choice."""
        space = self.supernet.space
        present = zip(space.axes, space.values(point).values(), strict=True)
        values = {
            axis.name: [s.choices[-1] if v is None else v for s, v in zip(axis.slots, own, strict=True)]
            for axis, own in present
        }
        for axis, at, value in choices:
            values[axis][at] = value
        return space.spec(**values)

    @cached_property
    def _skipped(self) -> dict[Choice, list[tuple[str, int]]]:
        """Choice -> the slots whose choices change nothing with it, because their layers are skipped."""
        space, operators = self.supernet.space, operators_in(self.supernet.network)
        selects = [operator for operator in operators if isinstance(operator, LayerSelect)]
        gates = [(f"{select.path_of(name)}.", dim) for select in selects for name, dim in select.dims.items()]
        followed = {dim for operator in operators for dim in operator.dims.values()}
        full, changed = space.resolve(space.largest()), dict[tuple[str, int], set[int]]()
        rows = {choice: space.resolve(self._with(space.largest(), [choice])) for choice in self.losses}
        for (axis, at, _), row in rows.items():
            changed.setdefault((axis, at), set()).update(i for i in followed if row[i] != full[i])
        skipped: dict[Choice, list[tuple[str, int]]] = {}
        for choice, row in rows.items():
            gone = tuple(path for path, dim in gates if not row[dim])
            left = {i for o in operators if not f"{o.path}.".startswith(gone) for i in o.dims.values()}
            places = [p for p, dims in changed.items() if dims and dims.isdisjoint(left) and p != choice[:2]]
            skipped |= {choice: places} if places else {}
        return skipped


def score_layers(
    supernet: Supernet,
    batches: Iterable[Any],
    *,
    task: str = "classes",
    output: Callable[[Any, Any], Any] | None = None,
    divergence: Callable[[Any, Any], Tensor] | None = None,
    resume: StrPath | None = None,
    progress: bool = True,
) -> LayerScores:
    """Score every choice of every slot by what the outputs of the largest subnet lose if only it changes.

    One forward pass per choice and batch, from the first layer that changes on: what lies before is taken
    from the largest subnet, where inputs are equal. In networks with BatchNorm, the subnets that are scored
    are calibrated on the batches, and their statistics are dropped in the end.

    Args:
        supernet: the supernet. It is afterwards as it was before. Sort its channels first (`reorder_`), so
            that narrow subnets keep the important ones.
        batches: inputs, without labels, as a list: a few hundred tokens or some dozens of images suffice.
        task: "classes", "values", "vectors" or "tokens", as `distill_` takes it; it decides what is compared
            (the divergence of predictions for classes and tokens).
        output: a function of what the network returns and of the inputs, which returns what is compared.
        divergence: your own measure, a function of the outputs of a subnet and of the largest one.
        resume: a file for every score as soon as it is measured. If it exists, what it holds is not measured
            again: where it has all, no subnet runs.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The scores.

    Raises:
        SearchError: there are no batches, the task is unknown, or a score is no finite number.
        SpecError: a subnet does not run on a batch, or outputs do not fit the task.
        ResumeMismatch: `resume` is of other weights, batches or settings.

    Source:
        Puzzle (Bercovich et al., 2024): scores per block, and an integer program.

    Example:
        >>> scores = subnetact.nas.score_layers(supernet, token_batches, task="tokens")
        >>> scores.best({"macs": 0.6})
    """
    supernet, data = as_supernet(supernet), batches if isinstance(batches, Sequence) else list(batches)
    if not len(data) or isinstance(batches, Tensor | str | Mapping):
        raise SearchError("score_layers: give a list of batches; got none")
    if task not in TASKS:
        raise SearchError(f"task: {task!r} is unknown; choose from {', '.join(TASKS)}")
    meaning = Task(task, False, output, own_divergence=divergence)
    split = [meaning.split(batch, supernet.device) for batch in data]
    moment, space = supernet.generation.moment(), supernet.space
    facts: dict[str, Any] = {}
    if resume is not None:
        names = {name: getattr(f, "__qualname__", None) for name, f in vars(meaning).items() if callable(f)}
        facts = {
            "space": space.id,
            "weights": supernet.fingerprint(),
            "batches": hash_of(x for x, _ in split),
            "task": task,
            **names,
        }
    journal = Journal(resume, facts)
    slots = ((axis.name, at, slot) for axis in space.axes for at, slot in enumerate(axis.slots))
    every = ((axis, at, value) for axis, at, slot in slots if axis != PRECISION for value in slot.choices)
    losses, largest = dict.fromkeys(every, 0.0), space.largest()
    scores = LayerScores(supernet, split[0][0], losses, moment)
    variants = {c: spec for c in losses if (spec := scores._with(largest, [c])) != largest}
    fresh = [s for s in dict.fromkeys([largest, *variants.values()]) if not is_calibrated(supernet, s)]
    with journal.fields():
        measured: dict[tuple[int, Choice], float] = {
            (int(line["batch"]), (line["axis"], int(line["slot"]), line["value"])): float(line["loss"])
            for line in journal.of("score")
        }
    try:
        if batch_norms(supernet.network) and len(measured) < len(split) * len(variants):
            calibrate(supernet, fresh, [x for x, _ in split], progress=progress)
        total = len(split) * len(variants)
        with tqdm(total=total, desc="scoring layers", disable=not progress or None) as bar, torch.no_grad():
            for i, (x, labels) in enumerate(split):
                pending = {c: spec for c, spec in variants.items() if (i, c) not in measured}
                bar.update(len(variants) - len(pending))
                run = _Runs(supernet, x, meaning, labels) if pending else None
                for choice, spec in pending.items():
                    assert run is not None
                    loss = measured[i, choice] = run.loss(spec)
                    axis, slot, value = choice
                    journal.append("score", batch=i, axis=axis, slot=slot, value=value, loss=loss)
                    bar.update()
    finally:
        supernet.norms.drop(fresh)
    losses |= {c: sum(measured[i, c] for i in range(len(split))) / len(split) for c in variants}
    scores._require_weights()
    return scores


class _Runs:
    """Runs subnets on one batch; what equals the largest subnet so far is taken from its run."""

    def __init__(self, supernet: Supernet, x: Any, task: Task, labels: Any) -> None:
        self._supernet, self._x, self._task, self._lesson = supernet, x, task, Lesson(task, labels)
        self._calls = SharedCalls(supernet.network, norms_follow=range(len(supernet.space.dimensions)))
        self._whole = self._output(supernet.space.largest(), self._calls.follows)
        self._least = float(self._lesson.divergence(self._whole, self._whole))

    def loss(self, spec: SubnetSpec) -> float:
        """Return how far the outputs of a subnet are from those of the largest one."""
        loss = float(self._lesson.divergence(self._output(spec), self._whole)) - self._least
        if not math.isfinite(loss):
            raise SearchError(f"score_layers: {spec} has the score {loss}; look for NaN in its outputs")
        return max(loss, 0.0)

    def _output(self, spec: SubnetSpec, noted: Collection[str] | None = None) -> Any:
        view = private_view(self._supernet, spec)[0]
        self._calls.share(view, self._supernet.space.resolve(spec), noted)
        with explained(SearchError, f"score_layers: {spec}", view, self._x):
            return self._task.output(call_with(view, self._x), self._x)
