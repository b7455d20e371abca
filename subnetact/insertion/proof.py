"""Proof at insertion: what a description says of a model is tried before the model is touched.

All that follows runs on copies. The structure of the model is copied and shares its weights; operators are
put into the copy.

First, the largest subnet must equal the model. Then `supernet/proof.py` compares narrow subnets with the
model in which everything that they do not use is zero.

For this, the weights are disturbed: small random numbers are added to all vectors,
and matrices are scaled up to the gain of one. Otherwise a scale that training begins at zero, such as that of
the last BatchNorm of a residual block, would hide the block, and small weights would hide which rows of
queries and keys are used. What differs is compared again in double precision, so that rounding, which some
networks amplify, is not taken for a mistake.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.comparison import EXACT, ROUNDED, equal
from subnetact.device import raise_if_out_of_memory
from subnetact.insertion.description import Description
from subnetact.space import SizeRow, SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import map_tensors
from subnetact.supernet.failure import summary
from subnetact.supernet.proof import outputs_of, prove
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.unused_weights import private_copy, shared_view, structure_copy

__all__ = ["Proof", "as_double", "disturbed_copy"]

RANDOM = ", whose output differs from run to run; make it deterministic in evaluation mode"
_FAULTS = {
    "fails": "a subnet does not run: {why}",
    "foreign": "a subnet reads weights that it should not use",
    "unmasked": "the model does not run with unused weights at zero: {why}",
    "shapes": "the outputs of a subnet have other shapes than those of the model",
    "differs": "a subnet differs from the model with unused weights at zero",
}
"""Why a group or a stage is refused, by what the proof found."""
RANDOM_SUBNETS = 2
MOST_TRIALS = 100
"""After so many subnets were tried, groups that are wrong together are not told apart any more."""


class Proof:
    """Tries a description on copies of a model.

    Args:
        model: the model, in evaluation mode; it is only read.
        description: the description.
        x: an input of the model.
        expected: what `outputs_of` returned for the model.

    Attributes:
        is_largest_right: whether `failure` found that the largest subnet equals the model.

    Raises:
        InsertError: the operators cannot be put in.
    """

    def __init__(self, model: nn.Module, description: Description, x: Any, expected: list[Tensor]) -> None:
        self.model = model
        self.description = description
        self.x = x
        self.expected = expected
        self.network = put_operators_(structure_copy(model), description.space, description.elastic).network
        self.space: SubnetSpace = description.space
        self.largest = self.space.resolve(self.space.largest())
        self.is_largest_right = False
        self._failed = self.space.smallest()
        self._failed_because: str | None = None
        self._trials = 0
        self._weights: tuple[nn.Module, nn.Module] | None = None
        self._exact: tuple[nn.Module, nn.Module] | None = None

    def failure(self) -> str | None:
        """Run all tests and return what is wrong with the description; if nothing is, None."""
        view = shared_view(self.network, self.largest)
        try:
            full = outputs_of(view, self.x)
        except Exception as error:
            raise_if_out_of_memory(error)
            return f"the largest subnet does not run: {summary(view, error)}"
        if not equal(full, self.expected, EXACT):
            again = equal(outputs_of(self.model, self.x), self.expected, EXACT)
            return f"the largest subnet differs from the model{'' if again else RANDOM}"
        self.is_largest_right = True
        rng = random.Random(0)
        drawn = [self.space.sample(rng) for _ in range(RANDOM_SUBNETS)]
        every_block = self._narrowed(n for n in self.description.slots if n not in self.description.stages)
        for spec in dict.fromkeys([self.space.smallest(), every_block, *drawn]):
            wrong = self._wrong(spec)
            if wrong is not None:
                self._failed, self._failed_because = spec, wrong
                return wrong
        return None

    def culprits(self) -> dict[str, str]:
        """Return the groups and stages that make the failed subnet wrong, each with what is wrong with it."""
        found: dict[str, str] = {}
        self._trials = 0
        self._search(list(self.description.slots), found, self._failed_because)
        return found

    # -- inner parts -------------------------------------------------------------------------------

    def _search(self, slots: Sequence[str], found: dict[str, str], known: str | None) -> None:
        """Note the culprits among some slots; `known` is what is wrong with all of them, if that is known."""
        last = len(slots) == 1 or self._trials >= MOST_TRIALS
        wrong = known
        if known is None or len(slots) == 1:
            self._trials += 1
            wrong = self._wrong(self._narrowed(slots, self._failed), located=last)
        if wrong is None:
            return
        if last:
            found.update(dict.fromkeys(slots, wrong))
            return
        before = len(found)
        self._search(slots[: len(slots) // 2], found, None)
        # If nothing is wrong with the first half, something is wrong with the second one.
        self._search(slots[len(slots) // 2 :], found, wrong if len(found) == before else None)
        if len(found) == before:
            found.update(dict.fromkeys(slots, wrong))

    def _narrowed(self, slots: Iterable[str], to: SubnetSpec | None = None) -> SubnetSpec:
        """Return the subnet that is in some slots like the smallest or another one, and otherwise full."""
        narrowed, values = set(slots), to or self.space.smallest()
        return self.space.spec(
            **{
                axis.name: [
                    choice if slot.name in narrowed and choice is not None else slot.choices[-1]
                    for slot, choice in zip(axis.slots, values[axis.name], strict=True)
                ]
                for axis in self.space.axes
            }
        )

    def _wrong(self, spec: SubnetSpec, located: bool = True) -> str | None:
        """Return what is wrong with one subnet, and where if `located`, or None."""
        row = self.space.resolve(spec)
        if self._exact is not None:
            return self._compared(*self._exact, row, map_tensors(as_double, self.x), located)
        network, spare = self._perturbed()
        wrong = self._compared(network, spare, row, self.x, located=False)
        if wrong is None or "does not run" in wrong:
            return wrong
        # Rounding grows in some networks, above all in disturbed ones; in double precision it is not seen.
        again: str | None = "does not run"
        try:
            exact = private_copy(network).double(), private_copy(spare).double()
            again = self._compared(*exact, row, map_tensors(as_double, self.x), located)
        except Exception as error:
            raise_if_out_of_memory(error)
        if again is not None and "does not run" in again:  # The network computes in a precision of its own.
            return self._compared(network, spare, row, self.x, located) if located else wrong
        self._exact = exact if again is not None else None  # The search for culprits goes on with it.
        return again

    def _compared(
        self, network: nn.Module, spare: nn.Module, row: SizeRow, x: Any, located: bool
    ) -> str | None:
        """Return what is wrong with a subnet of a network with disturbed weights, or None."""
        finding = prove(network, spare, row, self.largest, x, ROUNDED)
        if finding is None or finding.kind == "incomparable":
            return None
        if finding.kind == "differs" and located:
            exact = prove(network, spare, row, self.largest, x, ROUNDED, modules=True) or finding
            return f"{_FAULTS['differs']}, first at {exact.why}"
        return _FAULTS[finding.kind].format(why=finding.why)

    def _perturbed(self) -> tuple[nn.Module, nn.Module]:
        if self._weights is None:
            network = disturbed_copy(self.network)
            self._weights = network, private_copy(network)
        return self._weights


def as_double(value: Any) -> Any:
    """Return a tensor in double precision if it has floating-point numbers."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def disturbed_copy(network: nn.Module) -> nn.Module:
    """Return a private copy with random weights, so that all that they compute is seen in the output."""
    copied = private_copy(network)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in copied.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                _disturb_(name, tensor, generator)
    return copied


def _disturb_(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Change weights so that everything that is computed with them is seen in the output."""
    noise = torch.rand(tensor.shape, generator=generator).to(tensor)
    if tensor.numel() == max(tensor.shape, default=1):
        tensor.add_(0.2 * noise - 0.1 if "running_mean" in name else 0.2 * noise + 0.1)
        return
    gain = (tensor.shape[0] / tensor.numel()) ** 0.5
    spread = float(tensor.float().std())
    if spread < 1e-3 * gain:
        tensor.add_(gain * (2 * noise - 1))
    elif spread < gain:
        tensor.mul_(gain / spread)
