"""check: runs a supernet at its corners, and proves that slices fit together.

The corners of a space are the largest subnet, the smallest one, and for each axis the subnet that is the
smallest on this axis and the largest on all others. `unused_weights.py` has the copies that the proofs run
on; the weights of the supernet itself are only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from subnetact.device import raise_if_out_of_memory
from subnetact.errors import InsertError, SpecError
from subnetact.operators import LayerSelect, ModuleSwitch
from subnetact.space import SizeRow, SubnetSpace
from subnetact.spec import FLOAT32, PRECISION, SubnetSpec
from subnetact.supernet.batches import call_with, describe_input, map_tensors, tensors_of
from subnetact.supernet.chain import Chain
from subnetact.supernet.failure import missing_entry, summary
from subnetact.supernet.unused_weights import (
    fill_unused_,
    loud_operators,
    masked_reference,
    private_copy,
    shared_view,
)

__all__ = ["CheckReport", "check", "check_precisions", "corners", "difference", "first_changed"]

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""The largest difference of equal outputs, as a share of the largest output; 5e-2 for short dtypes."""
SHOW_AFTER_S = 2.0
"""Seconds after which a progress bar shows that a supernet is being checked."""
COARSE = 0.5
"""The largest difference of the outputs of a subnet at a lower precision, as a share of their norm."""


@dataclass(frozen=True)
class CheckReport:
    """What `Supernet.check` did.

    Attributes:
        ran: the subnets that ran, with NaN in all weights that they do not use.
        compared: the subnets that were compared with the original network, in which everything that the
            subnet does not use is zero.
        not_compared: the other subnets, each with the reason.
        seconds: how long the check took.
    """

    ran: tuple[SubnetSpec, ...]
    compared: tuple[SubnetSpec, ...] = ()
    not_compared: Mapping[SubnetSpec, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{spec}: not compared with the original, {why}" for spec, why in self.not_compared.items()]
        first = f"{len(self.ran)} subnets ran, {len(self.compared)} were compared with the original network"
        return "\n".join([f"{first}, in {self.seconds:.2f} s", *lines])


def corners(space: SubnetSpace) -> list[SubnetSpec]:
    """Return the largest subnet, the smallest one, and each axis alone at its smallest, without repetitions.

    All of them are float32.

    Args:
        space: the search space.
    """
    largest = {axis.name: tuple(slot.choices[-1] for slot in axis.slots) for axis in space.axes}
    found = [space.largest(), space.smallest()]
    for axis in space.axes:
        found.append(space.spec(**{**largest, axis.name: tuple(slot.choices[0] for slot in axis.slots)}))
    return list(dict.fromkeys(space.at_precision(spec, FLOAT32) for spec in found))


def check_precisions(space: SubnetSpace, x: Any, bind: Callable[[SubnetSpec], nn.Module]) -> None:
    """Run the smallest and the largest subnet at every lower precision, and compare them with float32.

    The comparison is coarse: it finds layers that compute something else, not those that lose accuracy.

    Args:
        space: a space with an axis of precisions.
        x: a batch.
        bind: makes a private view.

    Raises:
        InsertError: a subnet does not run at a lower precision, or computes something else.
    """
    axis = next(axis for axis in space.axes if axis.name == PRECISION)
    for spec in dict.fromkeys(space.at_precision(s, FLOAT32) for s in (space.smallest(), space.largest())):
        expected = _run_visible_outputs(bind(spec), x)
        for precision in axis.slots[0].choices[:-1]:
            low = space.at_precision(spec, str(precision))
            view = bind(low)
            try:
                outputs = _run_visible_outputs(view, x)
            except Exception as error:
                raise_if_out_of_memory(error)
                raise InsertError(
                    f"check: {low} does not run: {summary(view, error)}; at float32 it does; leave the "
                    "module at float32 with enable_precision(..., keep=[name])"
                ) from error
            for one, other in zip(outputs, expected, strict=True):
                if not bool(other.isfinite().all()):
                    continue
                if not bool((one - other).norm() <= COARSE * other.norm() + 1e-6):
                    raise InsertError(
                        f"check: {low} differs from the same subnet at float32 by more than {COARSE:.0%}; "
                        "supernet.precision_errors(spec, x) names the layers; leave those with outliers at "
                        "float32 with enable_precision(..., keep=[name])"
                    )


def _run_visible_outputs(view: nn.Module, x: Any) -> list[Tensor]:
    return list(_outputs(view, map_tensors(_visible, x))[-1].tensors)


def check(network: nn.Module, space: SubnetSpace, x: Any, compare: bool = True) -> CheckReport:
    """Run the corners of a space, as `Supernet.check` says.

    Args:
        network: a network with operators; it is only read.
        space: its search space.
        x: a batch, on the device of the network.
        compare: whether to compare subnets with their masked references.

    Raises:
        SpecError: the largest subnet does not run on the batch, or the batch is empty.
        InsertError: another subnet does not run, reads weights that it does not use, or differs from its
            masked reference; or a skipped layer cannot be an identity.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _check(network, space, x, compare)


def _check(network: nn.Module, space: SubnetSpace, x: Any, compare: bool) -> CheckReport:
    if any(isinstance(tensor, Tensor) and not tensor.numel() for tensor in tensors_of(x)):
        raise SpecError("check: the batch has a tensor without values, which shows nothing; give one input")
    start = time.perf_counter()
    full, *narrow = corners(space)
    largest = space.resolve(full)
    view = shared_view(network, largest)
    chains = [_Chain(view, stack) for stack in _stacks(network)] if compare else []
    try:
        x = _run_visible(view, x)
    except Exception as error:
        raise_if_out_of_memory(error)
        raise SpecError(
            f"check: {full} does not run on {describe_input(x)}: {summary(view, error)}; give a batch "
            "that the network takes, with a batch dimension, (N, C, H, W) for images"
        ) from error
    for chain in chains:
        chain.refuse_breaks()
    copy = private_copy(network) if narrow else network
    not_compared: dict[SubnetSpec, str] = {}
    for spec in tqdm(narrow, "checking the space", delay=SHOW_AFTER_S, leave=False, disable=None):
        row = space.resolve(spec)
        fill_unused_(copy, network, row, float("nan"))
        view = shared_view(copy, row)
        try:
            outputs = _outputs(view, x)
        except Exception as error:
            raise_if_out_of_memory(error)
            raise InsertError(
                f"check: {spec} does not run on {describe_input(x)}: {summary(view, error)}; the largest "
                f"subnet does run: {missing_entry(view, error)}"
            ) from error
        reason = _not_comparable(network, row, largest) if compare else "because compare=False"
        if reason is not None or not all(bool(t.isfinite().all()) for t in outputs[-1].tensors):
            _refuse_foreign_weights(shared_view(network, row), outputs, spec, x)
        if reason is None:
            reason = _compare(outputs, copy, network, row, largest, spec, x)
        if reason is not None:
            not_compared[spec] = reason
    compared = tuple(spec for spec in narrow if spec not in not_compared)
    return CheckReport((full, *narrow), compared, not_compared, time.perf_counter() - start)


def difference(view: nn.Module, reference: nn.Module, x: Any) -> str | None:
    """Find where a subnet departs from a network that should compute the same.

    Every output of a module is compared with the output of the same module in the reference if both have
    the same shape. Outputs of narrowed modules are smaller than those of a masked reference.

    Args:
        view: the view of a subnet, which nobody else uses.
        reference: a network with modules of the same names, which nobody else uses.
        x: a batch.

    Returns:
        The module with the first output that differs, and the module that came before it, in words. If
        nothing differs, None.

    Raises:
        Exception: what the view or the reference raises.
    """
    return _first_difference(_outputs(view, x), _outputs(reference, x))


def first_changed(view: nn.Module, plain: nn.Module, x: Any) -> str | None:
    """Find the first module of a view whose output has other numbers, in whichever order, than in a network.

    Args:
        view: the view of a subnet, which nobody else uses.
        plain: a network with modules of the same names, which nobody else uses.
        x: a batch.
    """
    found, expected = _outputs(view, x), _outputs(plain, x)
    for output in (*found, *expected):
        output.tensors[:] = [tensor.flatten().sort().values for tensor in output.tensors]
    return _first_difference(found, expected)


def _stacks(network: nn.Module) -> list[LayerSelect]:
    """Return the stacks in which skipped layers are identities in their places."""
    found = [module for module in network.modules() if isinstance(module, LayerSelect)]
    return [stack for stack in found if not isinstance(stack, ModuleSwitch)]


class _Chain(Chain):
    """The chain of a stack, noted while the largest subnet runs once.

    Args:
        view: the view of the largest subnet, which nobody else uses.
        stack: the operator of the stack.
    """

    def __init__(self, view: nn.Module, stack: LayerSelect) -> None:
        self._stack = stack
        layers = view.get_submodule(stack.path)._modules
        super().__init__(stack.path, layers, {name: stack._modules[name] or layers[name] for name in layers})

    def refuse_breaks(self) -> None:
        """Refuse a layer whose output is not the next layer's input, if either of them can be skipped."""
        for layers, what in self.breaks():
            if not layers.isdisjoint(self._stack.dims):
                raise InsertError(
                    f"check: {what}; let every layer return one tensor, which the next layer gets as it is, "
                    "never skip these layers, or accept it with compare=False"
                )


@dataclass(frozen=True)
class _Output:
    """What one call of a module returned: floating-point tensors, images of them at few positions only."""

    path: str
    kind: str
    shapes: list[torch.Size]
    tensors: list[Tensor]


def _outputs(network: nn.Module, x: Any) -> list[_Output]:
    """Run a network; return what its modules returned, in the order in which they ended."""
    found: list[_Output] = []
    handles = []
    for path, module in network.named_modules():

        def note(module: nn.Module, _: Any, output: Any, path: str = path) -> None:
            if isinstance(module, nn.MultiheadAttention):
                output = output[0]  # the weights, averaged over heads, are those of other heads
            tensors = list(_tensors(output))
            kept = [t.clone() if not path else _sample(t) for t in tensors]
            found.append(_Output(path, type(module).__name__, [t.shape for t in tensors], kept))

        handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            call_with(network, map_tensors(Tensor.clone, x))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy; of tensors of shape (N, C, H, W) at about 8 x 8 positions."""
    if tensor.dim() == 4:
        tensor = tensor[:, :, :: -(-tensor.shape[2] // 8) or 1, :: -(-tensor.shape[3] // 8) or 1]
    return tensor.clone()


def _first_difference(narrow: list[_Output], wide: list[_Output]) -> str | None:
    others: dict[str, list[_Output]] = {}
    for output in wide:
        others.setdefault(output.path, []).append(output)
    before = ""
    for output in narrow:
        name = f"{output.path or 'the network itself'} ({output.kind})"
        others_here = others.get(output.path)
        if others_here and not _alike(output, others_here.pop(0)):
            return name + (f", which runs after {before}" if before else "")
        before = name
    return None


def _tensors(output: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _alike(narrow: _Output, wide: _Output) -> bool:
    """Tell whether what two calls returned is equal up to rounding, where the shapes are equal."""
    if len(narrow.shapes) != len(wide.shapes):
        return True  # The modules return other things; a later module will tell.
    for a, b, small, large in zip(narrow.tensors, wide.tensors, narrow.shapes, wide.shapes, strict=True):
        if small != large or not a.numel():
            continue
        tolerance = TOLERANCE.get(a.dtype, 5e-2)
        if bool((a - b).abs().max() <= tolerance * b.abs().max()):
            continue
        finite = a.isfinite() & b.isfinite()
        near = (a - b).abs() <= tolerance * torch.where(finite, b, 0).abs().max()
        if not bool((near | torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)).all()):
            return False
    return True


def _resized(narrow: list[_Output], wide: list[_Output]) -> str | None:
    """Return the first module whose images are of another size than in a reference."""
    sizes = {o.path: [shape[2:] for shape in o.shapes if len(shape) == 4] for o in wide}
    for output in narrow:
        here = [shape[2:] for shape in output.shapes if len(shape) == 4]
        if here != sizes.get(output.path, here):
            return output.path
    return None


def _run_visible(view: nn.Module, x: Any) -> Any:
    """Run a network, on random values in place of zeros if it takes them; return the batch that ran."""
    visible = map_tensors(_visible, x)
    if any(given is not shown for given, shown in zip(tensors_of(x), tensors_of(visible), strict=True)):
        try:
            _outputs(view, visible)
            return visible
        except Exception as error:  # The network takes other numbers only, indices for example.
            raise_if_out_of_memory(error)
    _outputs(view, x)
    return x


def _visible(tensor: Tensor) -> Tensor:
    """Return random values instead of zeros, in which most mistakes would not be seen."""
    if not tensor.is_floating_point() or tensor.any():
        return tensor
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor)


def _refuse_foreign_weights(plain: nn.Module, outputs: list[_Output], spec: SubnetSpec, x: Any) -> None:
    expected = _outputs(plain, x)
    if not _alike(outputs[-1], expected[-1]):
        where = _first_difference(outputs, expected)
        raise InsertError(
            f"check: {spec} depends on weights that it does not use: its output changes if they become NaN, "
            f"first at {where}; let every forward read its weights from its own modules and parameters, "
            "which views replace, not from a list, a closure or a plain attribute"
        )


def _not_comparable(network: nn.Module, row: SizeRow, largest: SizeRow) -> str | None:
    for loud in loud_operators(network, row, largest):
        return f"because {loud.path} ({type(loud).__name__}) is not silent if its dropped weights are zero"
    return None


def _compare(
    outputs: list[_Output],
    copy: nn.Module,
    network: nn.Module,
    row: SizeRow,
    largest: SizeRow,
    spec: SubnetSpec,
    x: Any,
) -> str | None:
    """Compare a subnet with its masked reference; return why this is not possible, if it is not."""
    reference = masked_reference(copy, network, row, largest)
    try:
        expected = _outputs(reference, x)
    except Exception as error:
        raise_if_out_of_memory(error)
        return f"because the reference does not run: {summary(reference, error)}"
    resized = _resized(outputs, expected)
    if resized is not None:
        return f"because the maps at {resized} are of another size"
    where = _first_difference(outputs, expected)
    if where is not None:
        raise InsertError(
            f"check: {spec} differs from the original network in which everything that the subnet does not "
            f"use is zero, first at {where}; a slice there takes the wrong rows or columns. Slices keep the "
            "first ones, which is wrong behind a concatenation and for a tensor that holds several matrices "
            "in one (a fused qkv): leave these modules out of the description. If a forward normalises over "
            "the width by itself, this comparison does not apply: compare=False skips it"
        )
    return None
