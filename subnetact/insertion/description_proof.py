"""Proof at insertion: `supernet/proof.py` on copies, and the groups and stages that make a subnet wrong.

The weights of the copies are disturbed. The subnets are those of `subnet_cover`; all but two of them run on
as little of an example as the model takes. What no example and no input like it shows cannot be proved, and
is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from subnetact.comparison import EXACT, ROUNDED, equal
from subnetact.device import raise_if_explained, tolerated
from subnetact.insertion.description import Description
from subnetact.insertion.tensor_memo import forgotten
from subnetact.operators import ElasticAttribute
from subnetact.space import Slot, SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.failure import summary
from subnetact.supernet.forward_state import watched_buffers
from subnetact.supernet.module_outputs import Calls, outputs_and_calls, outputs_of
from subnetact.supernet.proof import TIES, as_double, in_double, prove
from subnetact.supernet.proved_inputs import ProvedInputs
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.sensitivity import NOT_SHOWN, other_inputs, showing, smaller
from subnetact.supernet.subnet_cover import subnet_cover
from subnetact.supernet.unused_weights import (
    disturbed_copy,
    private_copy,
    settle_norms_,
    shared_view,
    structure_copy,
)

Case: TypeAlias = tuple[Any, list[Tensor]]
"""An example, and what the model returned for it."""

RANDOM_OUTPUT = ", whose output differs from run to run; make it deterministic in evaluation mode"
FAULTS = {
    "fails": "a subnet does not run: {why}",
    "foreign": "a subnet reads weights that it should not use",
    "unmasked": "the model does not run with unused weights at zero: {why}",
    "shapes": "the outputs of a subnet have other shapes than those of the model",
    "branches": "the forward branches on sizes, {why}",
    "incomparable": "a subnet cannot be compared with the model with unused weights at zero, {why}",
    "differs": "a subnet differs from the model with unused weights at zero",
}
"""Why a group or a stage is refused, by what the proof found."""
ALIGNED = "multiple of 16 bytes"  # Rows of what torch multiplies in groups.
WHOLE = EXACT._replace(unequal=TIES)
MOST_VARIANTS = 2
MOST_TRIALS = 200
"""After so many subnets were tried, groups that are wrong together are not told apart any more."""


class Proof:
    """Tries a description on copies of a model, which returned something for the example of every case."""

    def __init__(self, model: nn.Module, description: Description, cases: list[Case]) -> None:
        self.model = model
        self.description = description
        self.cases, self.inputs = cases, [x for x, _ in cases]
        self.network = put_operators_(structure_copy(model), description.space, description.elastic).network
        self.few: list[Any] = []
        self.space: SubnetSpace = description.space
        self.largest = self.space.resolve(self.space.largest())
        self._disturbed = disturbed_copy(self.network)
        self._spare = private_copy(self._disturbed, torch.empty_like)  # The proof fills it.
        self._exact = self._is_double = self._modules = False
        self._tries: tuple[list[Any], bool] = self.inputs, True
        self.proved = ProvedInputs(model)
        self.proved.memos = forgotten(model)
        self._trials = 0

    def failure(self) -> tuple[str, dict[str, str]] | None:
        """Return what is wrong, and why by group and stage, or none of these if the largest subnet is."""
        view = shared_view(self.network, self.largest)
        written = watched_buffers(view)
        for x, expected in self.cases:
            try:
                full, calls = outputs_and_calls(self.network, view, x)
            except Exception as error:
                raise_if_explained(error)
                return f"the largest subnet does not run: {summary(view, error)}", {}
            if not equal(full, expected, WHOLE):
                again = equal(outputs_of(self.model, x), expected, WHOLE)
                return f"the largest subnet differs from the model{'' if again else RANDOM_OUTPUT}", {}
            variants = called_alike(self.network, view, smaller(x), calls)
            self.few.append(variants[0] if variants else x)
            self.proved.forms |= set(map(self.proved.form, [x, *variants]))
        self.proved.state = written()
        smallest, *others = subnet_cover(self.network, self.space)
        every_block = self._narrowed(n for n in self.description.slots if n not in self.description.stages)
        failure = self._tried([smallest]) or self._tried([every_block], self.few)
        if failure is None:
            hidden = self._hidden(every_block)
            if hidden:
                return next(iter(hidden.values())), hidden
            failure = self._tried([smallest, every_block], self.few) if self._modules else None
        return failure or self._tried(others, self.few, foreign=False)

    def _tried(
        self, specs: Iterable[SubnetSpec], inputs: list[Any] | None = None, foreign: bool = True
    ) -> tuple[str, dict[str, str]] | None:
        """Return what is wrong with the first bad one of some subnets, and what makes it so."""
        self._tries = self.inputs if inputs is None else inputs, foreign
        for spec in specs:
            wrong = self._wrong(spec)
            if wrong is not None:
                culprits: dict[str, str] = {}
                self._search(list(self.description.slots), culprits, spec, wrong)
                return wrong, culprits
        return None

    def _hidden(self, spec: SubnetSpec) -> dict[str, str]:
        """Return the groups that nothing shows, and why; note inputs that show more than the examples do."""
        row = self.space.resolve(spec)
        settle_norms_(self._disturbed, row, self._cast(self.few[0]))
        view = shared_view(self._disturbed, row)
        few, inputs = ([self._cast(x) for x in batches] for batches in (self.few, self.inputs))
        _, parts = showing(self.network, view, row, few)
        full = shared_view(self._disturbed, self.largest) if parts else None
        if parts:
            self._modules = True  # The proof looks at the outputs of modules then.
            _, parts = showing(self.network, view, row, few, full, parts)
        if parts:
            others = chain(inputs, other_inputs(view, inputs[0]))
            useful, parts = showing(self.network, view, row, others, full, parts)
            new = [x for x in useful if not any(x is example for example in inputs)]
            self.few += new if len(new) == len(useful) else [*self.inputs, *new]
        hidden_dimensions = {self.space.dimensions[i]: part for i, part in parts.items()}
        return {
            group.name: NOT_SHOWN.format(hidden_dimensions[name])
            for group in self.description.groups.values()
            for name in group.dimensions(group.full)
            if name in hidden_dimensions
        }

    def _search(
        self, slots: list[str], found: dict[str, str], spec: SubnetSpec, wrong: str | None, sure: bool = True
    ) -> None:
        """Note the culprits among some slots; `wrong` is what is wrong with them, if that is known.

        It may be wrong only together with others. If that is not `sure`, no culprits may be noted.
        """
        last = len(slots) == 1 or self._trials >= MOST_TRIALS
        if wrong is None or len(slots) == 1:
            self._trials += 1
            wrong = self._wrong(self._narrowed(slots, spec), located=last)
        if wrong is None:
            return
        before = len(found)
        if not last:
            half = len(slots) // 2
            self._search(slots[:half], found, spec, None)
            # If nothing is wrong with the first half, something is wrong with the second one, or with both.
            alone = len(found) == before
            self._search(slots[half:], found, spec, wrong if alone else None, sure=not alone)
        if len(found) == before and (sure or last):
            together = slots if last else self._together(slots, spec)
            if 1 < len(together) < len(slots):
                wrong += f", together with {' and '.join(together[:-1])}"
            found.update(dict.fromkeys(together, wrong))

    def _together(self, slots: list[str], spec: SubnetSpec) -> list[str]:
        """Return the fewest slots that are wrong together only, each found by halving those before it."""
        needed: list[str] = []
        rest = slots

        def fails(count: int) -> bool:
            return self._wrong(self._narrowed([*needed, *rest[:count]], spec), located=False) is not None

        while rest and not (needed and fails(0)):
            last = bisect_left(range(1, len(rest)), True, key=fails)
            needed.append(rest[last])
            rest = rest[:last]
        return sorted(needed, key=slots.index)

    def _narrowed(self, slots: Iterable[str], to: SubnetSpec | None = None) -> SubnetSpec:
        """Return the subnet that is in some slots like the smallest or another one, and otherwise full."""
        narrowed, values = set(slots), to or self.space.smallest()

        def chosen(slot: Slot, choice: Any) -> Any:
            return choice if slot.name in narrowed and choice is not None else slot.choices[-1]

        return self.space.spec(**{a.name: [*map(chosen, a.slots, values[a.name])] for a in self.space.axes})

    def _ways(self, x: Any) -> Iterator[tuple[nn.Module, Any]]:
        """Yield what is compared: an input, others like it if rounding decides there, weights as they are."""
        yield self._disturbed, x
        if self._exact:
            view = shared_view(self.network, self.largest)
            yield from ((self._disturbed, other) for other in islice(other_inputs(view, x), MOST_VARIANTS))
            plain = private_copy(self.network)
            yield plain.double() if self._is_double else plain, x

    def _cast(self, x: Any) -> Any:
        """Return a batch in the precision of the copies."""
        return as_double(x) if self._is_double else x

    def _wrong(self, spec: SubnetSpec, located: bool = True) -> str | None:
        """Return what is wrong with one subnet, and where if `located`, or None."""
        row = self.space.resolve(spec)
        inputs, foreign = self._tries
        for x in inputs:
            for network, other in self._ways(x):
                trial = network, self._spare, row, self.largest, self._cast(other), ROUNDED
                finding = prove(*trial, foreign=foreign, modules=self._modules)
                if finding is None or not finding.rounded:
                    break
            if finding is not None:
                break
        else:
            return None
        if finding.kind in ("differs", "foreign") and not self._exact:
            self._exact = True  # Disturbed networks amplify rounding: go on in double precision if it runs.
            double = in_double(self._disturbed, self.largest, inputs)
            if double is not None:
                self._disturbed, self._is_double = double[0], True
                self._spare = private_copy(self._disturbed, torch.empty_like)  # The proof fills it.
            return self._wrong(spec, located)
        if finding.kind == "differs" and located:
            exact = prove(*trial, modules=True)
            where = exact if exact is not None and exact.kind == "differs" else finding
            return f"{FAULTS['differs']}, first at {where.why}"
        return FAULTS[finding.kind].format(why=finding.why)


def called_alike(network: nn.Module, view: nn.Module, inputs: list[Any], calls: Calls) -> list[Any]:
    """Return the inputs on which a view runs, and calls the same functions as for another one."""
    found = []
    for x in inputs:
        with tolerated():
            found += [x] if outputs_and_calls(network, view, x)[1] == calls else []
    return found


def advice_on(slot: Any, why: str) -> str:
    """Return what to change if a forward states a size, or computes with an attribute that holds one."""
    if ALIGNED in why:
        return "; choose sizes that keep to this, or call model.set_experts_implementation('eager') first"
    members = getattr(slot, "members", ())
    numbers = [m.part for m in members if m.operator is ElasticAttribute and "." not in m.part]
    sizes = ", ".join(dict.fromkeys(numbers))
    if not sizes and "size" not in why:
        return ""
    return f"; where the forward shapes tensors by {sizes or 'a number'}, use the tensor's own size or -1"
