"""check: runs a supernet at its corners, and proves that slices fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subnetact.comparison import LOW_PRECISION, equal
from subnetact.errors import InsertError, SpecError
from subnetact.operators import LayerSelect, ModuleSwitch
from subnetact.space import SizeRow, SubnetSpace
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import describe_input, map_tensors, tensors_of
from subnetact.supernet.chain import Chain
from subnetact.supernet.failure import explained
from subnetact.supernet.forward_state import note_state_, watched_buffers
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.precision import layer_errors
from subnetact.supernet.proof import in_double, prove
from subnetact.supernet.sensitivity import NOT_SHOWN, other_inputs, showing, visible
from subnetact.supernet.subnet_cover import subnet_cover
from subnetact.supernet.unused_weights import disturbed_copy, private_copy, settle_norms_, shared_view
from subnetact.supernet.views import bound_view

_FAULTS = {
    "fails": "{spec} does not run on {x}: {why}; the largest subnet does run: {advice}",
    "foreign": (
        "{spec} depends on weights that it does not use: its output changes if they become NaN, first at "
        "{why}; let every forward read its weights from its own modules and parameters, which views replace, "
        "not from a list, a closure or a plain attribute"
    ),
    "differs": (
        "{spec} differs from the original network in which everything that the subnet does not use is zero, "
        "first at {why}; a slice there takes the wrong rows or columns. Slices keep the first ones, which is "
        "wrong behind a concatenation and for a tensor that holds several matrices in one (a fused qkv): "
        "leave these modules out of the description. If a forward normalises over the width by itself, this "
        "comparison does not apply: compare=False skips it"
    ),
}
"""Why a supernet is refused, by what the proof found."""
_INCOMPARABLE = {"incomparable": "{why}", "unmasked": "because the reference does not run: {why}"}
"""Why a subnet is not compared."""
SHOW_AFTER_S = 2.0
"""Seconds after which a progress bar shows."""


@dataclass(frozen=True)
class CheckReport:
    """What `Supernet.check` did.

    Attributes:
        ran: the subnets that ran, with NaN in all weights that they do not use.
        compared: the subnets that were compared with the original network, in which everything that the
            subnet does not use is zero.
        not_compared: the other subnets, each with the reason.
    """

    ran: tuple[SubnetSpec, ...]
    compared: tuple[SubnetSpec, ...] = ()
    not_compared: Mapping[SubnetSpec, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{spec}: not compared with the original, {why}" for spec, why in self.not_compared.items()]
        first = f"{len(self.ran)} subnets ran, {len(self.compared)} were compared with the original network"
        return "\n".join([first, *lines])


def corners(space: SubnetSpace) -> list[SubnetSpec]:
    """Return the largest subnet, the smallest one, and each axis alone at its smallest, all at float32."""
    axes = ([(axis.name, i) for i in range(len(axis.slots))] for axis in space.axes)
    found = [space.largest(), space.smallest(), *map(space.narrowed, axes)]
    return list(dict.fromkeys(space.at_precision(spec, FLOAT32) for spec in found))


def check(supernet: Any, x: Any, compare: bool, thorough: bool) -> CheckReport:
    """Check a supernet, as `Supernet.check` says, and note what is found out about its forward."""
    supernet._generation.look()
    while True:
        with supernet._generation.lock:
            number = supernet.generation.number
            network = private_copy(supernet._present(), Tensor.detach, Tensor.detach)  # on the same storage
        try:
            report, written = check_slices(network, supernet.space, x, compare, thorough)
            break
        except (InsertError, SpecError):
            if number == supernet.generation.number:
                raise  # Otherwise weights were exchanged in place meanwhile.
    note_state_(supernet, written)
    if supernet.proved is not None:
        supernet.proved.forms.add(supernet.proved.form(x))
    if supernet.precision is not None:
        check_precisions(supernet, x)
    return report


@torch.inference_mode()
def check_precisions(supernet: Any, x: Any) -> None:
    """Find layers that compute something else at lower precisions, at both ends of the space."""

    def bind(spec: SubnetSpec) -> nn.Module:
        return bound_view(supernet, spec, supernet.norms.get(spec))

    space = supernet.space
    largest, smallest = (space.at_precision(s, FLOAT32) for s in (space.largest(), space.smallest()))
    x = visible(bind(largest), x)
    for spec in dict.fromkeys((smallest, largest)):
        exact = bind(spec)
        expected = outputs_of(exact, x)
        for precision in supernet.precision.precisions:
            low = space.at_precision(spec, precision)
            view = bind(low)
            kept = "at float32 it does; leave the module there with enable_precision(..., keep=[name])"
            with explained(InsertError, f"check: {low}", view, x, kept):
                outputs = outputs_of(view, x)
            for one, other in zip(outputs, expected, strict=True):
                if bool(other.isfinite().all()) and not equal(one, other, LOW_PRECISION):
                    errors = layer_errors(exact, view, x)
                    worst = ", ".join(sorted(errors, key=errors.__getitem__)[:-4:-1])
                    raise InsertError(
                        f"check: {low} differs from the same subnet at float32 by more than half of the "
                        f"largest output; farthest off are {worst}; leave those with outliers at float32 "
                        "with enable_precision(..., keep=[name])"
                    )


@torch.inference_mode(False)
@torch.no_grad()
def check_slices(
    network: nn.Module, space: SubnetSpace, x: Any, compare: bool, thorough: bool
) -> tuple[CheckReport, list[str]]:
    """Run subnets of a space, as `Supernet.check` says; only its corners if the check is not `thorough`.

    Return the names of the buffers that the forward writes as well.
    """
    if any(isinstance(tensor, Tensor) and not tensor.numel() for tensor in tensors_of(x)):
        raise SpecError("check: the batch has a tensor without values, which shows nothing; give one input")
    full, *narrow = corners(space)
    largest = space.resolve(full)
    view = shared_view(network, largest)
    written = watched_buffers(view)
    # A skipped layer is an identity in its place, unless it is one branch of a switch.
    stacks = [m for m in network.modules() if isinstance(m, LayerSelect) and not isinstance(m, ModuleSwitch)]
    chains = {s: Chain(s.path, view.get_submodule(s.path)._modules) for s in stacks if compare}
    advice = "give a batch that the network takes, with a batch dimension, (N, C, H, W) for images"
    with explained(SpecError, f"check: {full}", view, x, advice):
        outputs_of(view, x)
    for stack, layers_of in chains.items():
        for layers, what in layers_of.breaks():
            if not layers.isdisjoint(stack.dims):
                raise InsertError(
                    f"check: {what}; let every layer return one tensor, which the next layer gets as it is, "
                    "never skip these layers, or accept it with compare=False"
                )
    x = visible(view, x)
    inputs, hidden = [x], dict[int, str]()
    if thorough and compare and narrow:
        narrow = [spec for spec in dict.fromkeys([*narrow, *subnet_cover(network, space)]) if spec != full]
        disturbed = disturbed_copy(network)
        settle_norms_(disturbed, largest, x)
        shown = shared_view(disturbed, largest)
        useful, hidden = showing(network, shown, largest, chain([x], other_inputs(view, x)))
        inputs += [other for other in useful if other is not x]
    copy = private_copy(network) if narrow else network
    not_compared: dict[SubnetSpec, str] = {}
    for spec in tqdm(narrow, "checking the space", delay=SHOW_AFTER_S, leave=False, disable=None):
        row = space.resolve(spec)
        blind = next((part for i, part in hidden.items() if row[i] != largest[i]), None)
        if blind is not None:
            not_compared[spec] = f"because {NOT_SHOWN.format(blind)}"
        for batch in inputs:
            finding = prove(network, copy, row, largest, batch, modules=True, compare=compare)
            if finding is None:
                continue
            if finding.kind == "differs" and _equal_in_double(network, row, largest, batch):
                continue  # The sums of a deep network differ by their rounding.
            if finding.kind not in _INCOMPARABLE:
                facts = {"spec": spec, "x": describe_input(batch), **finding._asdict()}
                raise InsertError(f"check: {_FAULTS[finding.kind].format(**facts)}")
            not_compared[spec] = _INCOMPARABLE[finding.kind].format(why=finding.why)
    compared = tuple(spec for spec in narrow if spec not in not_compared)
    return CheckReport((full, *narrow), compared, not_compared), written()


def check_once(supernet: Any, x: Any) -> None:
    """Check the corners on the first input of `x`, unless its shapes have passed since `refresh`.

    `Engine`, `calibrate` and `profile_latency` call this function unless `check=False`. Nobody has to wait
    for it; if weights are loaded meanwhile, the former ones were checked.
    """
    x = map_tensors(lambda t: t[:1], x)
    shapes = repr(map_tensors(lambda t: (tuple(t.shape), str(t.dtype)), x))
    number = supernet.generation.number
    if supernet._checked.get(shapes) != number:
        supernet.check(x, thorough=False)
        supernet._checked[shapes] = number


def _equal_in_double(network: nn.Module, row: SizeRow, largest: SizeRow, x: Any) -> bool:
    double = in_double(network, largest, [x])
    if double is None:
        return False
    return prove(double[0], private_copy(double[0]), row, largest, double[1][0], modules=True) is None
