"""Corrections of subnets, by ridge regression: what narrowed layers lack is added back, without a gradient.

A linear layer whose output is added to a stream has to bring the stream to where the largest subnet has it.
What is missing there is fitted from the inputs of the layer, layer by layer, in one forward pass of all
batches together: later layers see what earlier corrections have mended. The fit has a low rank. A skipped
layer is corrected from what it would have got. Where a correction does not help on samples that it was not
fitted to, the layer has none.

Source: the closed-form compensation of FLAP (An et al., 2024) and of low-rank residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from tqdm import tqdm

from subnetact.errors import SpecError
from subnetact.operators.base import Operator
from subnetact.operators.correction import Correction
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.layer_traits import traits_of
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input
from subnetact.supernet.bind import bind, operators_in, private_buffers
from subnetact.supernet.supernet import Supernet

ADDITIONS = ("add", "add_", "__add__", "__radd__", "__iadd__")
RIDGE = 0.3
"""The strength of the penalty, relative to the mean variance of the inputs."""
HELD_OUT = 4
"""One of so many samples is held out of the first fit, and says whether a correction helps."""
SAMPLES_PER_RANK = 8
"""Fewer samples per rank than these decide nothing."""


Joined: TypeAlias = Callable[[str, Tensor, Tensor], Tensor]
"""Gets a layer, its input and the sum that its output is in, and returns the sum."""


class _Finished(Exception):
    """All layers have their corrections; the rest of the forward is not needed."""


class _Streams(TorchFunctionMode):
    """Sees where the outputs of layers are added to something, in one forward pass of a subnet."""

    def __init__(
        self, view: nn.Module, layers: Iterable[str], joined: Callable[[str, Tensor, Tensor], Tensor]
    ):
        super().__init__()
        self._made: Any = WeakTensorKeyDictionary()  # output of a layer -> the layer and its input
        self._joined = joined
        for path in layers:
            view.get_submodule(path).register_forward_hook(self._noting(path))

    def _noting(self, path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(output, Tensor):
                self._made[output] = path, args[0]

        return note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        for tensor in [t for t in tree_leaves(args) if isinstance(t, Tensor)][:2]:
            made = self._made.get(tensor)
            if made is None:
                continue
            if getattr(func, "__name__", "") in ADDITIONS:
                del self._made[tensor]
                return self._joined(made[0], made[1], result)
            alike = (result.numel(), result.dtype) == (tensor.numel(), tensor.dtype)
            if result is not tensor and alike and torch.equal(result.flatten(), tensor.flatten()):
                self._made[result] = made  # It is passed on by dropout or a reshape.
        return result


class CorrectionRun:
    """Computes the corrections of subnets on some batches, which run together."""

    def __init__(self, supernet: Supernet, batches: Sequence[Any], rank: int) -> None:
        self._supernet, self._rank, self._frozen = supernet, rank, private_buffers()
        self._x = _together(batches)
        operators = operators_in(supernet.network)
        self._layers = [o for o in operators if traits_of(o.template).kind == "linear" and "in_" in o.parts]
        self._selects = [o for o in operators if isinstance(o, LayerSelect)]
        self._goal: dict[str, Tensor] = {}
        self._row = supernet.space.resolve(supernet.space.largest())
        view = self._view(self._row)
        blocks = [f"{o.path}.{name}".lstrip(".") for o in self._selects for name in o.dims]
        for path in blocks:
            view.get_submodule(path).register_forward_hook(self._note_block(path))
        goals: dict[str, list[Tensor]] = {}
        with _Streams(view, [o.path for o in self._layers], self._note_goal):
            for batch in batches:  # Apart, their last outputs take less memory.
                self._goal = {}
                call_with(view, batch)
                for path, goal in self._goal.items():
                    goals.setdefault(path, []).append(goal)
        self._goal = {path: torch.cat(parts) for path, parts in goals.items() if len(parts) == len(batches)}
        if not self._goal:
            raise SpecError(
                "corrections: the outputs of no elastic linear layer are added to a stream, and no layer can "
                "be skipped, so there is nothing to correct"
            )

    def corrections(self, spec: SubnetSpec) -> dict[str, Correction]:
        """Return the corrections of a subnet, by the names of its layers."""
        row = self._supernet.space.resolve(spec)
        corrections: dict[str, Correction] = {}
        narrowed = [o for o in self._layers if o.path in self._goal and _differs(o, row, self._row)]
        skipped = {
            path: path
            for o in self._selects
            for name, dim in o.dims.items()
            if not row[dim] and (path := f"{o.path}.{name}".lstrip(".")) in self._goal
        }
        view = self._view(row)
        gone = tuple(f"{path}." for path in skipped)
        left = {o.path for o in narrowed if not o.path.startswith(gone or ("\0",))} | skipped.keys()

        def correct(path: str, x: Tensor, result: Tensor) -> Tensor:
            if path not in left:
                return result
            goal = self._goal[path]
            if goal.shape == result.shape and x.shape[:-1].numel() * goal.shape[-1] == goal.numel():
                rows, missing = x.flatten(0, -2), (goal - result).reshape(-1, goal.shape[-1])
                correction = fitted(rows, missing, self._rank)
                if correction is not None:
                    corrections[path] = correction
                    result = result.add_(correction(rows).view(result.shape))
            left.discard(path)
            if not left:
                raise _Finished
            return result

        def in_place_of(path: str) -> Callable[..., Tensor]:
            return lambda *call: correct(path, call[-1], call[-1].clone())

        for path in skipped:
            view.get_submodule(path).register_forward_hook(in_place_of(path))
        try:
            with _Streams(view, [o.path for o in narrowed if o.path in left], correct):
                call_with(view, self._x)
        except _Finished:
            pass
        return corrections

    def _view(self, row: Any) -> nn.Module:
        return bind(self._supernet.network, row, lambda norm: norm.bind(row), frozen=self._frozen)

    def _note_block(self, path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and args and output.shape == getattr(args[0], "shape", None):
                self._goal[path] = output.clone()

        return note

    def _note_goal(self, path: str, _: Tensor, result: Tensor) -> Tensor:
        self._goal[path] = result.clone()
        return result


def fitted(x: Tensor, missing: Tensor, rank: int) -> Correction | None:
    """Return the correction that adds what is missing, (samples, outputs), from x, (samples, inputs).

    It is None if it does not help on samples that it is not fitted to.
    """
    if len(x) < SAMPLES_PER_RANK * rank:
        raise SpecError(
            f"corrections: {len(x)} samples are too few for rank {rank}; give batches of at least "
            f"{SAMPLES_PER_RANK * rank} samples or tokens, or a lower rank"
        )
    x, missing = x.float(), missing.float()
    runs = torch.arange(len(x), device=x.device) * 4 * HELD_OUT // len(x)  # Neighbours are alike.
    out = runs % HELD_OUT == HELD_OUT - 1
    trial = _ridge(x[~out], missing[~out], rank)
    error = (missing[out] - trial(x[out])).square().sum()
    if not bool(error < missing[out].square().sum()):
        return None
    return _ridge(x, missing, rank)


def _ridge(x: Tensor, missing: Tensor, rank: int) -> Correction:
    mean, offset = x.mean(0), missing.mean(0)
    inputs, wanted = x - mean, missing - offset
    covariance = inputs.t() @ inputs
    strength = RIDGE * covariance.diagonal().mean().clamp(min=1e-12)
    covariance.diagonal().add_(strength)
    whole = torch.linalg.solve(covariance, inputs.t() @ wanted)  # (inputs, outputs)
    fit = inputs @ whole
    basis = torch.linalg.eigh(fit.t() @ fit).eigenvectors[:, -rank:]  # (outputs, rank)
    down = (whole @ basis).t().contiguous()
    up = basis.contiguous()
    return Correction(down, up, offset - up @ (down @ mean))


def _differs(operator: Operator, row: Any, other: Any) -> bool:
    return any(row[dim] != other[dim] for dim in operator.dims.values())


def _together(batches: Sequence[Any]) -> Any:
    """Return one batch of all."""
    first = batches[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(list(batches))
        if isinstance(first, tuple):
            return tuple(map(_together, zip(*batches, strict=True)))
        if isinstance(first, dict):
            return {name: _together([batch[name] for batch in batches]) for name in first}
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        shapes = "; ".join(describe_input(batch) for batch in batches[:3])
        raise SpecError(f"corrections: batches of one shape are needed, got {shapes}") from error
    return first


def corrections_of(
    supernet: Supernet, specs: Sequence[SubnetSpec], batches: Sequence[Any], rank: int, progress: bool
) -> dict[SubnetSpec, dict[str, Correction]]:
    """Return the corrections of subnets, by subnet and layer."""
    run = CorrectionRun(supernet, batches, rank)
    bar = tqdm(specs, "correcting subnets", disable=not progress or None, leave=None)
    return {spec: run.corrections(spec) for spec in bar}
