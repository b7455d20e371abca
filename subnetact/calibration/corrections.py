"""Corrections of subnets, by ridge regression: what narrowed layers lack is added back, without a gradient.

A linear layer whose output is added to a stream has to bring the stream to where the largest subnet has it.
What is missing there is fitted from the inputs of the layer, layer by layer, in one forward pass of all
batches together: later layers see what earlier corrections have mended. The fit has a low rank. A skipped
layer is corrected from what it would have got. Where a correction does not help on samples that it was not
fitted to, the layer has none; where all together do not bring the outputs of the network nearer, the subnet.

Source: the closed-form compensation of FLAP (An et al., 2024) and of low-rank residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from subnetact.comparison import tensors_in
from subnetact.errors import SpecError
from subnetact.insertion.recorder import target_of
from subnetact.operators.correction import Correction, correct_
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.layer_traits import traits_of
from subnetact.space import SizeRow
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, describe_input, logits, map_tensors, tensors_of
from subnetact.supernet.bind import bind, operators_in, private_buffers
from subnetact.supernet.elementwise import ADDITIONS
from subnetact.supernet.supernet import Supernet

RIDGE = 0.3
"""The strength of the penalty, relative to the mean variance of the inputs."""
HELD_OUT = 4
"""One of so many samples is held out of the fit, and says whether a correction helps."""
SAMPLES_PER_RANK = 8
"""Fewer samples per rank than these decide nothing."""

Joined: TypeAlias = Callable[[str, Tensor, Tensor], Tensor]
"""Gets a layer, its input and the sum that its output is in, and returns the sum."""


class _Finished(Exception):
    """All layers have their corrections; the rest of the forward is not needed."""


class _Streams(TorchFunctionMode):
    """Sees where the outputs of layers are added to something, in one forward pass of a subnet."""

    def __init__(self, view: nn.Module, layers: Iterable[str], joined: Joined) -> None:
        super().__init__()
        self._made: Any = WeakTensorKeyDictionary()  # output of a layer -> the layer and its input
        self._joined = joined
        for path in layers:
            view.get_submodule(path).register_forward_hook(partial(self._note, path))

    def _note(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(output, Tensor):
            self._made[output] = path, args[0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        for tensor in [t for t in tree_leaves(args) if isinstance(t, Tensor)][:2]:
            made = self._made.get(tensor)
            if made is None:
                continue
            if target_of(func, args)[1] in ADDITIONS:
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
        mask = self._x.get("attention_mask") if isinstance(self._x, dict) else None
        self._kept = mask.flatten().bool() if isinstance(mask, Tensor) else None  # Padding teaches nothing.
        operators = operators_in(supernet.network)
        self._layers = [o for o in operators if traits_of(o.template).kind == "linear" and "in_" in o.parts]
        self._selects = [o for o in operators if isinstance(o, LayerSelect)]
        self._goal: dict[str, Tensor] = {}
        self._row = supernet.space.resolve(supernet.space.largest())
        view = self._view(self._row)
        blocks = [select.path_of(name) for select in self._selects for name in select.dims]
        for path in blocks:
            view.get_submodule(path).register_forward_hook(partial(self._note_block, path))
        samples = len(next(t for t in tensors_of(self._x) if isinstance(t, Tensor) and t.dim()))
        out = held_out(samples).to(supernet.device)
        self._held = map_tensors(lambda t: t[out] if bool(out.any()) and len(t) == samples else t, self._x)
        self._whole = call_with(view, self._held)
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
        """Return the corrections of a subnet, by the names of its layers; none if they do not help it."""
        row = self._supernet.space.resolve(spec)
        corrections, view = self._fitted(row), self._view(row)
        plain = self._apart(view)
        for path, correction in corrections.items():
            correct_(view.get_submodule(path), correction)
        return corrections if corrections and self._apart(view) < plain else {}

    def _apart(self, view: nn.Module) -> float:
        """Return how far the outputs of a subnet are from the largest one's, on samples that no fit saw."""
        output, whole = call_with(view, self._held), self._whole
        if isinstance(output, Mapping) and "logits" in output:
            scores, wanted = (logits(part).float().log_softmax(-1) for part in (output, whole))
            return float(F.kl_div(scores, wanted, log_target=True, reduction="sum"))
        pairs = zip(tensors_in(output), tensors_in(whole), strict=True)
        return sum(float((a - b).float().square().sum()) for a, b in pairs if a.is_floating_point())

    def _fitted(self, row: SizeRow) -> dict[str, Correction]:
        """Fit the corrections of a subnet, one layer after the other."""
        corrections: dict[str, Correction] = {}
        names = ((o.path_of(name), dim) for o in self._selects for name, dim in o.dims.items())
        skipped = [path for path, dim in names if not row[dim] and path in self._goal]
        gone = tuple(f"{path}." for path in skipped)
        narrowed = [
            o.path for o in self._layers if any(row[dim] != self._row[dim] for dim in o.dims.values())
        ]
        narrowed = [path for path in narrowed if path in self._goal and not path.startswith(gone)]
        left, view = {*narrowed, *skipped}, self._view(row)

        def correct(path: str, x: Tensor, result: Tensor) -> Tensor:
            goal = self._goal[path]
            if path not in left or goal.shape != result.shape:
                return result
            rows, missing = x.reshape(-1, x.shape[-1]), (goal - result).reshape(-1, goal.shape[-1])
            kept = self._kept if self._kept is not None and len(self._kept) == len(rows) else slice(None)
            if len(rows) == len(missing):
                correction = fitted(rows[kept], missing[kept], self._rank)
                if correction is not None:
                    corrections[path] = correction
                    result = result.add_(correction(rows).view(result.shape))
            left.discard(path)
            if not left:
                raise _Finished
            return result

        def correct_skipped(path: str, _: nn.Module, __: Any, output: Tensor) -> Tensor:
            return correct(path, output, output.clone())

        for path in skipped:
            view.get_submodule(path).register_forward_hook(partial(correct_skipped, path))
        with suppress(_Finished), _Streams(view, narrowed, correct):
            call_with(view, self._x)
        return corrections

    def _view(self, row: SizeRow) -> nn.Module:
        return bind(self._supernet.network, row, lambda norm: norm.bind(row), frozen=self._frozen)

    def _note_block(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and args and output.shape == getattr(args[0], "shape", None):
            self._goal[path] = output.clone()

    def _note_goal(self, path: str, _: Tensor, result: Tensor) -> Tensor:
        self._goal[path] = result.clone()
        return result


def held_out(count: int) -> Tensor:
    """Return which of so many samples no correction is fitted to; neighbours are alike, so they are runs."""
    return torch.arange(count) * 4 * HELD_OUT // max(count, 1) % HELD_OUT == HELD_OUT - 1


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
    out = held_out(len(x)).to(x.device)
    correction = _ridge(x[~out], missing[~out], rank)
    error = (missing[out] - correction(x[out])).square().sum()
    return correction if bool(error < missing[out].square().sum()) else None


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


def _together(batches: Sequence[Any]) -> Any:
    """Return one batch of all."""
    try:
        return tree_map(
            lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *batches
        )
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        shapes = "; ".join(describe_input(batch) for batch in batches[:3])
        raise SpecError(f"corrections: batches of one shape are needed, got {shapes}") from error
