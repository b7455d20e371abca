"""proof: a subnet computes what the full network computes with everything that it does not use at zero.

This is the one proof that slices fit together. `Supernet.check` asks it at the corners of a space,
`describe` and `insert_` on copies with random weights, and the search for heads and neurons in transformers
for single blocks. It runs on private copies (`unused_weights.py`); the weights of the network are only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from subnetact.comparison import EXACT, MASKED, Tolerance, equal
from subnetact.device import raise_if_out_of_memory
from subnetact.operators import LayerNormSlice
from subnetact.space import SizeRow
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import missing_entry, summary
from subnetact.supernet.unused_weights import (
    fill_unused_,
    loud_operators,
    masked_reference,
    shared_view,
)

__all__ = ["Finding", "ModuleOutput", "difference", "first_changed", "module_outputs", "outputs_of", "prove"]


class Finding(NamedTuple):
    """What the proof found.

    Attributes:
        kind: `fails` if the subnet does not run, `foreign` if it reads weights that it should not use,
            `shapes` if its outputs have other shapes than those of the full network, `differs` if they have
            other values, `unmasked` if the full network does not run with zeros, and `incomparable` if there
            is nothing to compare with.
        why: the reason, or the module where it is seen first.
        advice: what to add to the description of the network.
    """

    kind: str
    why: str
    advice: str = ""


def prove(
    network: nn.Module,
    copy: nn.Module,
    row: SizeRow,
    largest: SizeRow,
    x: Any,
    tolerance: Tolerance = MASKED,
    modules: bool = False,
    compare: bool = True,
) -> Finding | None:
    """Compare a subnet with the full network in which everything that the subnet does not use is zero.

    Args:
        network: the network with operators.
        copy: what `private_copy` returned for the network; its weights are overwritten.
        row: the size row of the subnet.
        largest: the size row of the largest subnet.
        x: a batch.
        tolerance: how far outputs may differ.
        modules: whether the outputs of all modules are compared and not only those of the network.
        compare: if False, the subnet only runs with NaN in all weights that it does not use.

    Returns:
        What is wrong; None if nothing is.
    """
    run = module_outputs if modules else _network_output
    fill_unused_(copy, network, row, float("nan"))
    view = shared_view(copy, row)
    try:
        found = run(view, x)
    except Exception as error:
        raise_if_out_of_memory(error)
        return Finding("fails", summary(view, error), missing_entry(view, error))
    finite = all(bool(tensor.isfinite().all()) for tensor in found[-1].tensors)
    reference = masked_reference(copy, network, row, largest) if compare else None
    reason = "because compare=False" if reference is None else _pad_norms(network, reference, row, largest)
    if reason or not finite:
        plain = module_outputs(shared_view(network, row), x)
        if not _alike(found[-1], plain[-1], tolerance):
            return Finding("foreign", _first_difference(found, plain, tolerance) or "its output")
    if reference is None or reason:
        return Finding("incomparable", reason or "")
    try:
        expected = run(reference, x)
    except Exception as error:
        raise_if_out_of_memory(error)
        return Finding("unmasked", summary(reference, error))
    if not modules and found[-1].shapes != expected[-1].shapes:
        return Finding("shapes", "its outputs have other shapes")
    resized = _resized(found, expected)
    if resized is not None:
        return Finding("incomparable", f"because the maps at {resized} are of another size")
    where = _first_difference(found, expected, tolerance)
    return None if where is None else Finding("differs", where)


def _pad_norms(network: nn.Module, reference: nn.Module, row: SizeRow, largest: SizeRow) -> str | None:
    """Let the norms of the reference see the kept features only; return why this is not possible."""
    places = dict(reference.named_modules())
    for loud in loud_operators(network, row, largest):
        if not isinstance(loud, LayerNormSlice) or loud.segments:
            return f"because zeros in {loud.path} ({type(loud).__name__}) do not stand for dropped weights"
        path, _, name = loud.path.rpartition(".")
        if loud.path in places:  # it is not inside a skipped block
            places[path]._modules[name] = _PaddedNorm(loud, row)
    return None


class _PaddedNorm(nn.Module):
    """A norm over the first features of its input, which fills the other features with zeros."""

    def __init__(self, operator: LayerNormSlice, row: SizeRow) -> None:
        super().__init__()
        self.norm = operator.bind(row)
        self.full = operator.full("features")
        self.kept = operator.size("features", row)
        self.first = isinstance(operator.template, nn.GroupNorm) or "2d" in type(operator.template).__name__

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the first features of the axis that has as many as the norm."""
        axis = 1 if self.first or x.shape[-1] != self.full else x.dim() - 1
        y: Tensor = self.norm(x.narrow(axis, 0, self.kept))
        padding = [0, 0] * (x.dim() - 1 - axis) + [0, self.full - self.kept]
        return F.pad(y, padding)


# -- outputs -----------------------------------------------------------------------------------------


def outputs_of(model: nn.Module, x: Any) -> list[Tensor]:
    """Run a model and return all floating-point tensors of its output, copied."""
    with torch.no_grad():
        found = call_with(model, map_tensors(Tensor.clone, x))
    return [tensor.clone() for tensor in _tensors(found)]


def difference(view: nn.Module, reference: nn.Module, x: Any, tolerance: Tolerance = MASKED) -> str | None:
    """Find where a subnet departs from a network that should compute the same.

    Every output of a module is compared with the output of the same module in the reference if both have
    the same shape. Outputs of narrowed modules are smaller than those of a masked reference.

    Returns:
        The module with the first output that differs, and the module that came before it, in words. If
        nothing differs, None.
    """
    return _first_difference(module_outputs(view, x), module_outputs(reference, x), tolerance)


def first_changed(view: nn.Module, plain: nn.Module, x: Any) -> str | None:
    """Find the first module whose output has other numbers, in whichever order, than in another network."""
    found, expected = module_outputs(view, x), module_outputs(plain, x)
    for output in (*found, *expected):
        output.tensors[:] = [tensor.flatten().sort().values for tensor in output.tensors]
    return _first_difference(found, expected, EXACT)


@dataclass(frozen=True)
class ModuleOutput:
    """What one call of a module returned: floating-point tensors, images of them at few positions only."""

    path: str
    kind: str
    shapes: list[torch.Size]
    tensors: list[Tensor]


def module_outputs(network: nn.Module, x: Any) -> list[ModuleOutput]:
    """Run a network; return what its modules returned, in the order in which they ended."""
    found: list[ModuleOutput] = []
    handles = []
    for path, module in network.named_modules():

        def note(module: nn.Module, _: Any, output: Any, path: str = path) -> None:
            if isinstance(module, nn.MultiheadAttention):
                output = output[0]  # the weights, averaged over heads, are those of other heads
            tensors = list(_tensors(output))
            kept = [t.clone() if not path else _sample(t) for t in tensors]
            found.append(ModuleOutput(path, type(module).__name__, [t.shape for t in tensors], kept))

        handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            call_with(network, map_tensors(Tensor.clone, x))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _network_output(network: nn.Module, x: Any) -> list[ModuleOutput]:
    tensors = outputs_of(network, x)
    return [ModuleOutput("", type(network).__name__, [tensor.shape for tensor in tensors], tensors)]


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy; of tensors of shape (N, C, H, W) at about 8 x 8 positions."""
    if tensor.dim() == 4:
        tensor = tensor[:, :, :: -(-tensor.shape[2] // 8) or 1, :: -(-tensor.shape[3] // 8) or 1]
    return tensor.clone()


def _first_difference(
    narrow: list[ModuleOutput], wide: list[ModuleOutput], tolerance: Tolerance
) -> str | None:
    others: dict[str, list[ModuleOutput]] = {}
    for output in wide:
        others.setdefault(output.path, []).append(output)
    before = ""
    for output in narrow:
        name = f"{output.path or 'the network itself'} ({output.kind})"
        others_here = others.get(output.path)
        if others_here and not _alike(output, others_here.pop(0), tolerance):
            return name + (f", which runs after {before}" if before else "")
        before = name
    return None


def _tensors(output: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _alike(narrow: ModuleOutput, wide: ModuleOutput, tolerance: Tolerance) -> bool:
    """Tell whether what two calls returned is equal up to rounding, where the shapes are equal."""
    if len(narrow.shapes) != len(wide.shapes):
        return True  # The modules return other things; a later module will tell.
    pairs = zip(narrow.tensors, wide.tensors, strict=True)
    return all(equal(a, b, tolerance) for a, b in pairs if a.shape == b.shape)


def _resized(narrow: list[ModuleOutput], wide: list[ModuleOutput]) -> str | None:
    """Return the first module whose images are of another size than in a reference."""
    sizes = {o.path: [shape[2:] for shape in o.shapes if len(shape) == 4] for o in wide}
    for output in narrow:
        here = [shape[2:] for shape in output.shapes if len(shape) == 4]
        if here != sizes.get(output.path, here):
            return output.path
    return None
