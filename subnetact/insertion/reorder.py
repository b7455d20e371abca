"""reorder_: sorts channels, heads and neurons by importance, so that narrow subnets keep the best ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from subnetact.errors import InsertError, SpecError, UncalibratedSubnetWarning
from subnetact.insertion.channel_groups import Group, extracted, flat, kept_entries
from subnetact.insertion.importance import MEASURES, ChannelGroup, Importance, UnitWeights
from subnetact.insertion.probe import find_groups
from subnetact.operators import Operator, SubnetNorm
from subnetact.operators.view_module import owned
from subnetact.space import SizeRow
from subnetact.supernet.batches import as_batch, call_with, logits, map_tensors
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["ReorderReport", "reorder_"]

SAME = 1e-5
"""The largest change of the largest subnet's outputs, as a share of the largest output."""


@dataclass(frozen=True)
class ReorderReport:
    """What `reorder_` did.

    Attributes:
        reordered: name of a group -> the number of its units, which are channels, neurons or heads.
        kept: name of a group -> why it was left as it was.
        dropped: the number of subnets whose BatchNorm statistics are gone.
    """

    reordered: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    dropped: int = 0

    def __str__(self) -> str:
        lines = [f"{name}: {units} units" for name, units in self.reordered.items()]
        lines += [f"{name}: left as it was, because {reason}" for name, reason in self.kept.items()]
        return "\n".join([*lines, f"BatchNorm statistics of {self.dropped} subnets were dropped"])


def reorder_(
    supernet: Supernet,
    importance: str | Importance = "l1",
    example: Any = None,
    *,
    batches: Iterable[tuple[Any, Any]] | None = None,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    dimensions: Sequence[str] | None = None,
) -> ReorderReport:
    """Sort the channels, heads and neurons of a supernet in place, the most important ones first.

    A narrow subnet keeps the first channels, whichever these are. In a network that was trained as a whole
    and not as a supernet, important ones are anywhere. Call this function after `insert_`, and before narrow
    subnets are trained, calibrated or served.

    The largest subnet computes the same function as before, up to rounding: everything that reads a channel
    is permuted in the same way, which is tried on a private copy first and checked at the end. Heads move as
    a whole, and query heads with the keys and values that they share. What cannot be permuted without a
    change of the output, because something that does not follow the dimension reads it, stays as it is, and
    the report says why.

    Narrow subnets become other networks. Their BatchNorm statistics are dropped, with a warning; statistics
    of subnets that are only shallower are permuted. The state of an optimiser (its momentum, for example)
    belongs to the former order: make the optimiser after this call. While other threads run subnets, they may
    see weights that are partly in the former order.

    Args:
        supernet: the supernet.
        importance: "l1" (absolute weights), "batch_norm" (scales of BatchNorms; groups without BatchNorm stay
            as they are), "taylor" (gradients of a loss; needs `batches`), or a function that takes a
            `ChannelGroup` and returns one score per unit, or None to leave the group as it is.
        example: a batch that the network takes, a tensor or a tuple or mapping of tensors. One input
            suffices; a sequence has several tokens. If None, the inputs of the first of `batches`.
        batches: pairs of a batch and its labels.
        loss: maps the network's output (its logits, if there are several outputs) and labels to a scalar.
        dimensions: the dimensions to sort. If None, all that can be sorted.

    Returns:
        What was sorted, and what was not, with the reasons.

    Raises:
        SpecError: the importance is unknown, there are no batches or no example, scores are not finite or
            of another shape, or there is no such dimension.
        InsertError: the largest subnet does not run on the example; one of the given `dimensions` cannot be
            sorted; or nothing can be sorted without a change of the largest subnet. The supernet is then
            unchanged.

    Example:
        >>> supernet = subnetact.insert_(torchvision.models.resnet50(weights="DEFAULT"), example=x)
        >>> print(subnetact.reorder_(supernet, "batch_norm", example=x))
    """
    supernet = as_supernet(supernet)
    measure = _measure(importance)
    known = supernet.space.dimensions
    if isinstance(dimensions, str) or not isinstance(dimensions, Iterable | None):
        raise SpecError(f"reorder_: dimensions is a list of names, got {dimensions!r}")
    unknown = sorted(str(name) for name in set(dimensions or ()) - set(known))
    if unknown:
        raise SpecError(f"reorder_: no dimensions {', '.join(unknown)}; choose from {', '.join(known[:20])}")
    labelled = _labelled(batches)
    if measure is MEASURES["taylor"] and not labelled:
        raise SpecError(
            'reorder_: importance="taylor" needs batches, pairs of a batch and its labels; got none'
        )
    if example is None and not labelled:
        raise SpecError("reorder_ runs the network; give a batch that it takes, example=x")
    example = labelled[0][0] if example is None else as_batch(example)
    row = supernet.space.resolve(supernet.space.largest())
    groups = find_groups(supernet.network, row, example)
    chosen, kept = _chosen(groups, known, dimensions)
    scores = _scores(supernet.network, row, chosen, known, measure, labelled, loss)
    orders = {g: s.argsort(descending=True, stable=True).cpu() for g, s in scores.items()}
    kept.update({g.name: "its importance is not known" for g in chosen if g not in orders})
    moving = {g: order for g, order in orders.items() if not torch.equal(order, torch.arange(g.units))}
    before = len(supernet.norms)
    if dimensions is not None:
        _permute(supernet, row, moving, example)
        changing = {}
    else:
        changing = _permute_most(supernet, row, moving, example)
        if moving and len(changing) == len(moving):
            raise InsertError(f"reorder_: {next(iter(changing.values()))}")
    kept |= {g.name: why for g, why in changing.items()}
    dropped = before - len(supernet.norms)
    if dropped:
        warnings.warn(
            f"the BatchNorm statistics of {dropped} narrow subnets are gone, because these subnets keep "
            "other channels now; call subnetact.calibrate again",
            UncalibratedSubnetWarning,
            stacklevel=2,
        )
    return ReorderReport({g.name: g.units for g in orders if g not in changing}, kept, dropped)


def _labelled(batches: Any) -> list[tuple[Any, Any]]:
    given: list[Any] = (
        list(batches) if isinstance(batches, Iterable) else [] if batches is None else [batches]
    )
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given):
        raise SpecError("reorder_: batches is a list of pairs of a batch and its labels")
    return [(as_batch(x), y) for x, y in given]


def _measure(importance: str | Importance) -> Importance:
    if isinstance(importance, str):
        if importance not in MEASURES:
            raise SpecError(
                f"reorder_: no importance {importance!r}; choose from {', '.join(MEASURES)}, or give a "
                "function"
            )
        return MEASURES[importance]
    if not callable(importance):
        raise SpecError(f"reorder_: importance is a name or a function, got {type(importance).__name__}")
    return importance


def _dimensions(group: Group, known: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known[part.operator.dims[part.name]] for part in group.parts))


def _chosen(
    groups: list[Group], known: Sequence[str], wanted: Sequence[str] | None
) -> tuple[list[Group], dict[str, str]]:
    """Return the groups to sort, and the reasons for the others."""
    if wanted is not None:
        groups = [group for group in groups if set(wanted) & set(_dimensions(group, known))]
        for group in groups:
            if group.reason is not None:
                raise InsertError(
                    f"reorder_: {group.name} (dimension {', '.join(_dimensions(group, known))}) cannot be "
                    f"sorted: {group.reason}"
                )
    chosen = [group for group in groups if group.reason is None]
    kept = {group.name: group.reason for group in groups if group.reason is not None}
    if not chosen:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:5])
        raise InsertError(f"reorder_: nothing in this supernet can be sorted ({why or 'nothing is elastic'})")
    return chosen, kept


# -- scores ------------------------------------------------------------------------------------------


def _scores(
    network: nn.Module,
    row: SizeRow,
    groups: list[Group],
    known: Sequence[str],
    measure: Importance,
    batches: list[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> dict[Group, Tensor]:
    """Return the score of every unit of the groups whose importance is known."""
    copy, modules = extracted(network, row)
    found: dict[Group, Tensor] = {}
    for x, labels in batches if measure is MEASURES["taylor"] else [(None, None)]:
        if x is not None:
            copy.zero_grad()
            with torch.inference_mode(False), torch.enable_grad():
                loss(logits(call_with(copy, x)), labels).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for group in groups:
                score = measure(_described(group, modules, known))
                if score is not None:
                    _check_score(score, group)
                    found[group] = found[group] + score if group in found else score
    return found


def _described(group: Group, modules: Mapping[Operator, nn.Module], known: Sequence[str]) -> ChannelGroup:
    weights: list[UnitWeights] = []
    for part in group.parts:
        module = modules.get(part.operator)
        for (name, axis), table in part.tables.items() if module is not None else ():
            parameter = module._parameters.get(name)  # type: ignore[union-attr]
            if parameter is None:
                continue
            values, gradient = (
                None if t is None else _by_unit(flat(part.operator, name, t), axis, table, group.units)
                for t in (parameter.detach(), parameter.grad)
            )
            if values is not None:
                kind = type(part.operator).__name__
                weights.append(UnitWeights(part.operator.path, kind, name, part.role, values, gradient))
    return ChannelGroup(group.name, _dimensions(group, known), group.units, tuple(weights))


def _by_unit(tensor: Tensor, axis: int, table: Tensor, units: int) -> Tensor:
    taken = tensor.index_select(axis, table.flatten().to(tensor.device))
    return taken.movedim(axis, 0).reshape(units, -1)


def _check_score(score: Any, group: Group) -> None:
    if (
        not isinstance(score, Tensor)
        or score.shape != (group.units,)
        or score.is_complex()
        or not score.isfinite().all()
    ):
        got = f"of shape {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise SpecError(f"importance of {group.name}: {group.units} finite scores are needed, got {got}")


# -- permutations ------------------------------------------------------------------------------------


@dataclass
class _Move:
    """Entries of one axis of a full tensor that change places."""

    tensor: Tensor
    axis: int
    to: Tensor
    of: Tensor

    def order(self) -> Tensor:
        """Return the positions whose entries come to the positions of the move, these in ascending order."""
        return self.of[self.to.argsort()]

    def apply(self, back: bool = False) -> None:
        to, of = (t.to(self.tensor.device) for t in ((self.of, self.to) if back else (self.to, self.of)))
        self.tensor.index_copy_(self.axis, to, self.tensor.index_select(self.axis, of))


def _permute_most(
    supernet: Supernet, row: SizeRow, orders: Mapping[Group, Tensor], example: Any
) -> dict[Group, str]:
    """Apply all orders that leave the output as it is; return the other groups, with the reasons."""
    try:
        _permute(supernet, row, orders, example)
    except InsertError as error:
        groups = list(orders)
        if len(groups) == 1:
            return {groups[0]: str(error).removeprefix("reorder_: ")}
        halves = groups[: len(groups) // 2], groups[len(groups) // 2 :]
        first, second = (
            _permute_most(supernet, row, {g: orders[g] for g in half}, example) for half in halves
        )
        return first | second
    return {}


def _permute(supernet: Supernet, row: SizeRow, orders: Mapping[Group, Tensor], example: Any) -> None:
    """Apply the orders, or none of them."""
    moves, channels = _permutations(orders, row)
    norms, table = supernet.norms, _statistics(supernet, row, orders, channels)
    before, original = _outputs(supernet, example), supernet.has_original_statistics()
    same, done = False, []

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply() -> None:
        for move in moves:
            move.apply()
            done.append(move)
        supernet.norms = table

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo() -> None:
        while done:
            done.pop().apply(back=True)
        supernet.norms = norms

    try:
        apply()
        same = _alike(_outputs(supernet, example), before)
        if not same:  # some networks amplify rounding; in double precision it is not seen
            after = _outputs(supernet, example, exact=True)
            undo()
            same = bool(after) and _alike(after, _outputs(supernet, example, exact=True))
            if same:
                apply()
    finally:
        if not same:
            undo()
        if original:
            supernet.renew_original_statistics()
    if not same:
        raise InsertError(
            "reorder_: the output of the largest subnet would change by more than rounding; something that "
            "follows no dimension reads the order of channels. The supernet is unchanged; sort fewer "
            "dimensions (dimensions=[...])"
        )


def _permutations(orders: Mapping[Group, Tensor], row: SizeRow) -> tuple[list[_Move], dict[str, Tensor]]:
    """Return the moves of full tensors, and the new order of the channels of every BatchNorm by its name."""
    found: dict[tuple[int, int, bytes], _Move] = {}
    channels: dict[str, Tensor] = {}
    for group, units in orders.items():
        for part in group.parts:
            operator = part.operator
            for (name, axis), (to, of) in part.order(units).items():
                if isinstance(operator, SubnetNorm) and name == "running_mean":
                    count = operator.channels(row)
                    order = channels.setdefault(operator.path, torch.arange(count))
                    channels[operator.path] = order.index_copy(0, to, of)
                if name in operator._parameters:
                    full: Any = operator._parameters[name]
                    entries = kept_entries(operator, operator.sizes(row), axis)[name]
                elif isinstance(operator, SubnetNorm):
                    full = operator._buffers[name]
                    entries = operator.gather(row, torch.arange(operator.full("channels")))
                else:
                    continue
                move = _Move(full, axis, entries[to], entries[of])
                places = move.to.sort().values.numpy().tobytes()
                known = found.setdefault((id(full), axis, places), move)  # Tied weights move once.
                if not torch.equal(known.order(), move.order()):
                    raise InsertError(
                        f"reorder_: {operator.path} shares {name} with a module that would need another "
                        "order; sort fewer dimensions (dimensions=[...])"
                    )
    return list(found.values()), channels


def _statistics(
    supernet: Supernet, row: SizeRow, orders: Mapping[Group, Tensor], channels: Mapping[str, Tensor]
) -> NormTable:
    """Return the statistics rows of the subnets that keep all units, permuted."""
    parts = [part for group in orders for part in group.parts]
    rows: dict[Any, NormRow] = {}
    for spec in supernet.norms:
        own, statistics = supernet.space.resolve(spec), supernet.norms.get(spec)
        narrowed = any(own[p.operator.dims[p.name]] != row[p.operator.dims[p.name]] for p in parts)
        if statistics is not None and not narrowed:
            rows[spec] = NormRow.of(
                {
                    name: tuple(t[channels[name].to(t.device)] if name in channels else t for t in pair)  # type: ignore[misc]
                    for name, pair in statistics.pairs().items()
                }
            )
    table = NormTable(supernet.space.id)
    table.update(rows)
    return table


def _outputs(supernet: Supernet, example: Any, exact: bool = False) -> list[Tensor]:
    """Return the outputs of the largest subnet; if `exact`, in double precision, or none if that fails."""
    view, _ = supernet.private_view(supernet.space.largest())
    if exact:
        view = owned(view).double()
        example = map_tensors(lambda t: t.double() if t.is_floating_point() else t, example)
    try:
        with torch.no_grad():
            outputs = tree_leaves(call_with(view, example))
    except RuntimeError:
        if not exact:
            raise
        return []
    return [t.detach().clone() for t in outputs if isinstance(t, Tensor)]


def _alike(after: list[Tensor], before: list[Tensor]) -> bool:
    for new, old in zip(after, before, strict=True):
        share = SAME if old.dtype in (torch.float32, torch.float64) else 2e-2
        if not old.is_floating_point() or not old.numel():
            continue
        if not bool((new - old).abs().max() <= share * old.abs().max()):
            return False
    return True
