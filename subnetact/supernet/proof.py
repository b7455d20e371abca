"""proof: a subnet computes what the full network computes with everything that it does not use at zero.

A subnet must not change if all weights that it does not use become NaN either; zeros also find slices of the
wrong rows. Both call the same functions in the same order, or a forward branches on sizes. Networks that
amplify rounding are proved in double precision (`in_double`). `sensitivity.py` tells what an input shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subnetact.comparison import EXACT, MASKED, Tolerance, equal
from subnetact.device import raise_if_explained, tolerated
from subnetact.operators import LayerNormSlice, WeightSlice
from subnetact.operators.segments import Kept
from subnetact.operators.view_module import view_module
from subnetact.space import SizeRow
from subnetact.spec import grouped
from subnetact.supernet.batches import map_tensors
from subnetact.supernet.bind import operators_in
from subnetact.supernet.failure import missing_entry, summary
from subnetact.supernet.module_outputs import (
    Calls,
    ModuleOutput,
    module_outputs,
    outputs_and_calls,
    outputs_of,
)
from subnetact.supernet.unused_weights import fill_unused_, masked_reference, private_copy, shared_view

ROUNDING = 1e-6
"""Where weights that are off by this share change an output, rounding decides it, as the box that is kept."""
Outputs = list[ModuleOutput]
TIES = 0.01
"""The share of whole numbers in outputs that may differ, as rounding decides between equal ones."""


class Finding(NamedTuple):
    """What is wrong, why or at which module first, what to add, and whether rounding decides the outputs."""

    kind: str
    why: str
    advice: str = ""
    rounded: bool = False


@torch.no_grad()
def prove(
    network: nn.Module,
    copy: nn.Module,
    row: SizeRow,
    largest: SizeRow,
    x: Any,
    tolerance: Tolerance = MASKED,
    modules: bool = False,  # whether the outputs of all modules are compared, and not the calls of functions
    compare: bool = True,  # if False, the subnet only runs
    foreign: bool = True,  # whether what the subnet does not use becomes NaN, and not only zero
) -> Finding | None:
    """Compare a subnet with the full network whose other weights, in the given `copy`, are zero."""

    def run(model: nn.Module) -> tuple[Outputs, Calls]:
        if modules:
            return module_outputs(model, x, _sample), []
        tensors, calls = outputs_and_calls(network, model, x)
        return [ModuleOutput("", type(model).__name__, [t.shape for t in tensors], tensors)], calls

    fill_unused_(copy, network, row, float("nan") if foreign else 0.0)
    view = shared_view(copy, row)
    try:
        found, calls = run(view)
    except Exception as error:
        raise_if_explained(error)
        return Finding("fails", summary(view, error), missing_entry(view, error))
    if foreign:
        fill_unused_(copy, network, row, 0.0)
    reference = masked_reference(copy, network, row, largest) if compare else view
    reason = _narrow_layers(network, reference, row, largest) if compare else "because compare=False"
    if reason or not all(bool(tensor.isfinite().all()) for tensor in found[-1].tensors):
        plain = module_outputs(shared_view(network, row), x, _sample)
        if not _alike(found[-1], plain[-1], tolerance):
            return Finding("foreign", _first_difference(found, plain, tolerance) or "its output")
    if reason:
        return Finding("incomparable", reason)
    try:
        expected, expected_calls = run(reference)
    except Exception as error:
        raise_if_explained(error)
        return Finding("unmasked", summary(reference, error))
    if not modules and found[-1].shapes != expected[-1].shapes:
        return Finding("shapes", "its outputs have other shapes")
    where = _first_difference(found, expected, tolerance)
    if where is None and calls == expected_calls:
        if found[-1].shapes != expected[-1].shapes:
            return Finding("incomparable", "because its outputs have other shapes than the original's")
        return None
    resized = _resized(found, expected)
    if resized is not None:
        return Finding("incomparable", f"because the maps at {resized} are of another size")
    if where is None:
        return Finding("branches", _other_call(calls, expected_calls))
    draw = torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=draw).to(parameter)
            parameter.mul_(1 + ROUNDING * noise)
    rounded = _first_difference(run(reference)[0], expected, tolerance) is not None
    return Finding("differs", where, rounded=rounded)


def _other_call(calls: Calls, others: Calls) -> str:
    """Return the first call in which two runs differ."""
    pairs = zip_longest(calls, others, fillvalue=("", "nothing more"))
    (path, name), (_, other) = next((one, other) for one, other in pairs if one != other)
    return f"{path or 'the model itself'} calls {name} where the whole model calls {other}"


def _narrow_layers(network: nn.Module, reference: nn.Module, row: SizeRow, largest: SizeRow) -> str:
    """Let the layers to which zeros matter see the kept features only; return why not, or an empty string."""
    places = dict(reference.named_modules())
    for operator in operators_in(network):
        narrowed = [part for part, i in operator.dims.items() if row[i] != largest[i]]
        if all(map(operator.zeroing_equals_dropping, narrowed)):
            continue
        if not isinstance(operator, LayerNormSlice | WeightSlice):
            kind = type(operator).__name__
            return f"because zeros in {operator.path} ({kind}) do not stand for dropped weights"
        if operator.path in places:  # it is not inside a skipped block
            places[operator.path].register_forward_hook(_Narrow(operator, row))
    return ""


class _Narrow:
    """A forward hook that gives a layer the kept features of its input only, and fills the others with zeros.

    A layer with a forward of its own may be narrowed if that is the same as with zeros, or if it normalises
    its weights over its inputs, so that twice the weights change nothing, is linear and treats all features
    alike.
    """

    def __init__(self, operator: LayerNormSlice | WeightSlice, row: SizeRow) -> None:
        self.operator = operator
        sizes = operator.sizes(row)
        kept = operator.kept_parts(sizes)
        self.out, self.inputs = kept[0], kept[-1]  # the same for a norm
        # By indices, and not by the rule of the operator, which is what is proved.
        self.tensors: dict[str, Any] = dict(operator._parameters)
        for name, tensor in self.tensors.items():
            for axis, part in enumerate(operator.axes(name) if tensor is not None else ()):
                tensor = tensor.index_select(axis, _indices(kept[operator.parts.index(part)], tensor))
            self.tensors[name] = tensor
        self.make = partial(view_module, operator.shell, **operator.attributes(sizes))
        self.layer = self.make(parameters=self.tensors)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return what the narrowed layer computes if it may, and otherwise the `output`."""
        norm = isinstance(self.operator, LayerNormSlice)
        if not isinstance(output, Tensor) or (len(args) != 1 and not norm):
            return output
        x, *gates = (self.take(x, self.inputs) for x in args if isinstance(x, Tensor))
        found = self.layer(x, *gates)
        if not norm:
            same = equal(self.take(output, self.out), found, EXACT)
            if not same and not (self.normalises(x) and self.is_linear(x, found)):
                return output
        axis = self.axis(output)
        return torch.zeros_like(output).index_copy(axis, _indices(self.out, output), found)

    def axis(self, x: Tensor) -> int:
        """Return the axis of the features; norms for images have it first, others last if it is as long."""
        template = self.operator.template
        if not isinstance(self.operator, LayerNormSlice):
            return x.dim() - 1 - len(getattr(template, "kernel_size", ()))
        first = isinstance(template, nn.GroupNorm) or "2d" in type(template).__name__
        return 1 if first or x.shape[-1] != self.operator.full("features") else x.dim() - 1

    def take(self, x: Tensor, kept: Kept) -> Tensor:
        """Return the kept features of a full tensor."""
        return x.index_select(self.axis(x), _indices(kept, x))

    def normalises(self, x: Tensor) -> bool:
        """Tell whether twice the matrices of weights change nothing, where no epsilon matters."""
        once, twice = (
            {n: t * k if t is not None and t.dim() > 1 else t for n, t in self.tensors.items()}
            for k in (1e4, 2e4)
        )
        return equal(self.make(parameters=twice)(x), self.make(parameters=once)(x), MASKED)

    def is_linear(self, x: Tensor, found: Tensor) -> bool:
        """Try whether f(x) + f(z) = f(x + z) + f(0) with inputs in another order and all outputs."""
        operator, axis = self.operator, self.axis(x)
        generator = torch.Generator().manual_seed(0)
        z = (torch.rand(x.shape, generator=generator) - 0.5).to(x) * 2 * x.abs().max()
        order = torch.randperm(x.shape[axis], generator=generator).to(x.device)
        sizes = operator.lengths("out") + self.inputs.sizes
        shuffled: dict[str, Any] = dict(operator.tensors(sizes))
        for name in (n for n, t in shuffled.items() if t is not None and "in_" in operator.axes(n)):
            shuffled[name] = shuffled[name].index_select(operator.axes(name).index("in_"), order)
        wide = view_module(operator.shell, parameters=shuffled, **operator.attributes(sizes))
        together = self.take(wide((x + z).index_select(axis, order)), self.out)
        return equal(together + self.layer(torch.zeros_like(x)), found + self.layer(z), MASKED)


def _indices(kept: Kept, x: Tensor) -> Tensor:
    """Return the positions of what is kept of a part, on the device of a tensor."""
    return torch.cat([torch.arange(start, start + n, device=x.device) for start, n in kept.runs()])


# -- outputs -----------------------------------------------------------------------------------------


def as_double(x: Any) -> Any:
    """Return a batch whose numbers are in double precision."""
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, x)


def in_double(
    network: nn.Module, row: SizeRow, inputs: Iterable[Any]
) -> tuple[nn.Module, list[Any], list[list[Tensor]]] | None:
    """Return a private copy, inputs and their outputs in double precision, or None if it does not run so."""
    double = private_copy(network).double()
    wide = [as_double(x) for x in inputs]
    with tolerated():  # The network may compute in a precision of its own.
        return double, wide, [outputs_of(shared_view(double, row), x) for x in wide]
    return None


@torch.no_grad()
def first_changed(view: nn.Module, plain: nn.Module, x: Any) -> str | None:
    """Find the first module whose output has other numbers, in whichever order, than in another network."""
    found, expected = (module_outputs(network, x, _sample) for network in (view, plain))
    for output in (*found, *expected):
        output.tensors[:] = [tensor.flatten().sort().values for tensor in output.tensors]
    return _first_difference(found, expected, EXACT)


def _sample(path: str, tensor: Tensor) -> Tensor:
    """Return a copy; of what modules inside return, if it is of shape (N, C, H, W), at 8 x 8 positions."""
    if path and tensor.dim() == 4:
        tensor = tensor[:, :, :: -(-tensor.shape[2] // 8) or 1, :: -(-tensor.shape[3] // 8) or 1]
    return tensor.clone()


def _pairs(narrow: Outputs, wide: Outputs) -> Iterator[tuple[ModuleOutput, ModuleOutput]]:
    """Yield what each call of a module returned in one network and in another, in the order of the first."""
    others = grouped((output.path, output) for output in wide[::-1])
    yield from ((output, others[output.path].pop()) for output in narrow if others.get(output.path))


def _first_difference(narrow: Outputs, wide: Outputs, tolerance: Tolerance) -> str | None:
    different = next((one for one, other in _pairs(narrow, wide) if not _alike(one, other, tolerance)), None)
    if different is None:
        return None
    before = [f", which runs after {o.path} ({o.kind})" for o in narrow[: narrow.index(different)][-1:]]
    return f"{different.path or 'the network itself'} ({different.kind})" + "".join(before)


def _alike(narrow: ModuleOutput, wide: ModuleOutput, tolerance: Tolerance) -> bool:
    """Tell whether what two calls returned is equal up to rounding, where the shapes are equal."""
    if len(narrow.shapes) != len(wide.shapes):
        return True  # The modules return other things; a later module will tell.
    pairs = zip(narrow.tensors, wide.tensors, strict=True)
    return all(equal(a, b, tolerance._replace(unequal=TIES)) for a, b in pairs if a.shape == b.shape)


def _resized(narrow: Outputs, wide: Outputs) -> str | None:
    """Return the first module whose images are of another size than in a reference."""
    for output, other in _pairs(narrow, wide):
        sizes, others = ([shape[2:] for shape in o.shapes if len(shape) == 4] for o in (output, other))
        if sizes != others:
            return output.path
    return None
