"""reorder_: sorts channels, heads and neurons by importance, so that narrow subnets keep the best ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.errors import InsertError, SpecError, UncalibratedSubnetWarning
from subnetact.insertion.experts import expert_saliency
from subnetact.insertion.importance import MEASURES, ChannelGroup, Measure, UnitWeights
from subnetact.insertion.units import Orders, Trial, UnitGroup, full_orders, permute_, unit_groups
from subnetact.operators.layer_traits import traits_of
from subnetact.space import SizeRow
from subnetact.supernet.adapters import require_no_adapters
from subnetact.supernet.batches import as_batch, as_pair, call_with, logits
from subnetact.supernet.bind import bind
from subnetact.supernet.load import warn_caller
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.statistics import batch_norms
from subnetact.supernet.supernet import Supernet, as_supernet
from subnetact.supernet.unused_weights import fill_unused_, private_copy


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


@torch.inference_mode(False)
def reorder_(
    supernet: Supernet,
    importance: str | Measure = "l1",
    example: Any = None,
    *,
    batches: Iterable[tuple[Any, Any]] | None = None,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    output: Callable[[Any], Any] = logits,
    dimensions: Sequence[str] | None = None,
) -> ReorderReport:
    """Sort the channels, heads and neurons of a supernet in place, the most important ones first.

    A narrow subnet keeps the first channels, whichever these are. In a network that was trained as a whole
    and not as a supernet, important ones are anywhere. Call this function after `insert_`, and before narrow
    subnets are trained, calibrated or served.

    The largest subnet computes the same function as before, up to rounding, which is tried on a private copy
    with random weights first. Heads move as a whole, and query heads with the keys and values that they
    share. The neurons of every expert of a mixture move apart from those of other experts. Experts of a
    pool come in the order of REAP on the example, whichever importance is named: the mean, over the tokens
    that visit an expert, of its weight times the length of its output. What something reads that does not
    follow the dimension stays, and the report says why.

    Narrow subnets become other networks. Their BatchNorm statistics are dropped, with a warning; those of
    subnets that are only shallower are permuted. Make optimisers after this call, because their state belongs
    to the former order. Other threads that run subnets meanwhile may see weights partly in the former order.

    Args:
        supernet: the supernet.
        importance: "l1" (absolute weights), "batch_norm" (scales of BatchNorms; groups without BatchNorm stay
            as they are), "taylor" (gradients of a loss; needs `batches`), or a function that takes a
            `subnetact.insertion.ChannelGroup` and returns one score per unit, or None to leave the group as
            it is.
        example: a batch that the network takes, a tensor or a tuple or mapping of tensors. One input
            suffices; a sequence has several tokens. If None, the first of `batches`.
        batches: pairs (inputs, labels); the inputs are a batch like `example`.
        loss: maps the output and labels to a scalar, for "taylor".
        output: maps what the network returns to what the loss takes. If not given, its logits, or the first
            of several outputs.
        dimensions: the dimensions to sort. If None, all that can be sorted.

    Returns:
        What was sorted, and what was not, with the reasons.

    Raises:
        SpecError: the importance is unknown, there are no batches or no example, scores are not finite or
            of another shape, or there is no such dimension.
        InsertError: the largest subnet does not run on the example; one of the given `dimensions` cannot be
            sorted; layers have adapters; or nothing can be sorted without a change of the largest subnet. The
            supernet is then unchanged.

    Example:
        >>> supernet = subnetact.insert_(torchvision.models.resnet50(weights="DEFAULT"), example=x)
        >>> print(subnetact.reorder_(supernet, "batch_norm", example=x))
    """
    supernet = as_supernet(supernet)
    require_no_adapters(supernet.network, "reorder_")
    measure: Any = MEASURES.get(importance) if isinstance(importance, str) else importance
    if not callable(measure):
        known = ", ".join(MEASURES)
        raise SpecError(f"reorder_: no importance {importance!r}; choose from {known}, or give a function")
    every = supernet.space.dimensions
    if isinstance(dimensions, str) or not isinstance(dimensions, Iterable | None):
        raise SpecError(f"reorder_: dimensions is a list of names, got {dimensions!r}")
    unknown = sorted(str(name) for name in set(dimensions or ()) - set(every))
    if unknown:
        raise SpecError(f"reorder_: no dimensions {', '.join(unknown)}; choose from {', '.join(every[:20])}")
    given: Any = [] if batches is None else batches
    pairs = given if isinstance(given, Iterable) else [given]
    labelled = [as_pair(batch, "reorder_") for batch in pairs]
    if measure is MEASURES["taylor"] and not labelled:
        raise SpecError('reorder_: importance="taylor" needs batches, pairs (inputs, labels); got none')
    if example is None and not labelled:
        raise SpecError("reorder_ runs the network; give a batch that it takes, example=x")
    example = labelled[0][0] if example is None else as_batch(example)
    row = supernet.space.resolve(supernet.space.largest())
    trial = Trial(supernet.network, row, example)
    chosen, kept = _chosen(unit_groups(supernet, trial), dimensions)
    scores = _scores(
        supernet.network, row, chosen, measure, labelled, lambda y, labels: loss(output(y), labels)
    )
    stated = getattr(supernet.description, "groups", {}) if isinstance(importance, str) else {}
    for group in chosen:
        pool = stated.get(group.dimensions[0])
        if pool is not None and pool.axis == "pool":
            scores[group] = expert_saliency(supernet.network, row, pool, example)
    orders = {g: s.argsort(descending=True, stable=True).cpu() for g, s in scores.items()}
    kept.update({g.name: "its importance is not known" for g in chosen if g not in orders})
    moving = {g: order for g, order in orders.items() if bool((order.diff() < 0).any())}
    before = len(supernet.norms)
    _permute(supernet, moving, trial)
    dropped = before - len(supernet.norms)
    if dropped:
        warn_caller(
            f"the BatchNorm statistics of {dropped} narrow subnets are gone, because these subnets keep "
            "other channels now; call subnetact.calibrate again",
            UncalibratedSubnetWarning,
        )
    return ReorderReport({g.name: g.units for g in orders}, kept, dropped)


def _chosen(groups: list[UnitGroup], wanted: Sequence[str] | None) -> tuple[list[UnitGroup], dict[str, str]]:
    """Return the groups to sort, and the reasons for the others."""
    if wanted is not None:
        groups = [group for group in groups if set(wanted) & set(group.dimensions)]
        for group in groups:
            if group.reason is not None:
                raise InsertError(
                    f"reorder_: {group.name} (dimension {', '.join(group.dimensions)}) cannot be sorted: "
                    f"{group.reason}"
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
    groups: list[UnitGroup],
    measure: Measure,
    batches: list[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> dict[UnitGroup, Tensor]:
    """Return the score of every unit of the groups whose importance is known."""
    copied = private_copy(network).eval()
    fill_unused_(copied, network, row, 0.0)  # What no subnet uses counts for nothing.
    found: dict[UnitGroup, Tensor] = {}
    reading = {part.path for group in groups for part in group.parts if part.role == "reads"}
    for x, labels in batches if measure is MEASURES["taylor"] else [(None, None)]:
        inputs: dict[str, Tensor] = {}
        if x is not None:
            copied.zero_grad()
            with torch.enable_grad():
                for parameter in copied.parameters():
                    parameter.requires_grad_(parameter.is_floating_point())
                view = bind(copied, row, lambda norm: norm.bind(row, trainable=True), trainable=True)
                for path in reading:
                    layer = view.get_submodule(path)
                    if traits_of(layer).kind == "linear":
                        layer.register_forward_pre_hook(partial(_note_inputs, inputs, path))
                loss(call_with(view, x), labels).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for group in groups:
                own = [_described(group, copied, inputs, i) for i in range(group.stacks)]
                scores = [measure(each) for each in own or [_described(group, copied, inputs)]]
                known = [score for score in scores if score is not None]
                for score in known:
                    _check_score(score, group)
                if len(known) == len(scores):
                    score = torch.stack(known) if own else known[0]
                    found[group] = found[group] + score if group in found else score
    return found


def _note_inputs(inputs: dict[str, Tensor], path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    """Add up, for every input of a layer, what the loss would change by without it at each place."""
    x: Tensor = args[0]
    if not x.requires_grad:
        return

    def add(gradient: Tensor) -> None:
        change = (gradient * x.detach()).abs().flatten(0, -2).sum(0)
        inputs[path] = inputs[path] + change if path in inputs else change

    x.register_hook(add)  # type: ignore[no-untyped-call]


def _described(
    group: UnitGroup, network: nn.Module, inputs: Mapping[str, Tensor], expert: int | None = None
) -> ChannelGroup:
    """Return what a measure of importance is told of a group, of the weights of one expert or of all."""
    weights: list[UnitWeights] = []
    for part in group.parts:
        operator = network.get_submodule(part.path)
        for (name, axis), table in part.tables.items():
            parameter = operator._parameters.get(name)
            if parameter is not None:
                taken = partial(_by_unit, axis=axis, table=table, units=group.units)
                stack = slice(None) if expert is None else slice(expert, expert + 1)
                gradient = None if parameter.grad is None else taken(parameter.grad[stack])
                own = part.path, type(operator).__name__, name, part.role
                noted: Any = inputs.get(part.path, ()) if part.role == "reads" else ()
                fits = len(noted) == parameter.shape[axis]
                changes = _by_unit(noted, 0, table, group.units) if fits else None
                weights.append(UnitWeights(*own, taken(parameter.detach()[stack]), gradient, changes))
    return ChannelGroup(group.name, group.dimensions, group.units, tuple(weights))


def _by_unit(tensor: Tensor, axis: int, table: Tensor, units: int) -> Tensor:
    order = table.flatten()
    whole = torch.equal(order, torch.arange(tensor.shape[axis]))
    taken = tensor if whole else tensor.index_select(axis, order.to(tensor.device))
    return taken.movedim(axis, 0).reshape(units, -1)


def _check_score(score: Any, group: UnitGroup) -> None:
    if (
        not isinstance(score, Tensor)
        or score.shape != (group.units,)
        or score.is_complex()
        or not score.isfinite().all()
    ):
        got = f"of shape {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise SpecError(f"importance of {group.name}: {group.units} finite scores are needed, got {got}")


# -- the change --------------------------------------------------------------------------------------


def _permute(supernet: Supernet, units: Mapping[UnitGroup, Tensor], trial: Trial) -> None:
    """Bring the units of groups into an order, in place, if the outputs of the largest subnet stay."""
    orders = full_orders(supernet.network, units)
    table, original = _statistics(supernet, trial.row, units, orders), supernet.generation.is_original
    with torch.no_grad():
        if not trial.stays(units):
            raise InsertError(
                "reorder_: the output of the largest subnet would change by more than rounding; something "
                "that follows no dimension reads the order of channels. The supernet is unchanged; sort "
                "fewer dimensions (dimensions=[...])"
            )
        permute_(supernet.network, orders)
        supernet.norms = table
    if original:
        supernet.generation.note_original()


def _statistics(
    supernet: Supernet, row: SizeRow, units: Mapping[UnitGroup, Tensor], orders: Orders
) -> NormTable:
    """Return the statistics rows of the subnets that keep all units, permuted."""
    channels: dict[str, Tensor] = {}
    for path, norm in batch_norms(supernet.network).items():
        order = orders.get((path, "running_mean", 0))
        if order is not None:
            kept = norm.gather(row, torch.arange(len(order)))
            channels[path] = torch.searchsorted(kept, norm.gather(row, order))
    moved = {name for group in units for name in group.dimensions}
    rows: dict[Any, NormRow] = {}
    for spec, statistics in supernet.norms.rows.items():
        sizes = zip(supernet.space.dimensions, supernet.space.resolve(spec), row, strict=True)
        if not statistics.corrected and all(size == full for name, size, full in sizes if name in moved):
            rows[spec] = NormRow.of(
                {
                    name: tuple(t[channels[name].to(t.device)] if name in channels else t for t in pair)  # type: ignore[misc]
                    for name, pair in statistics.pairs().items()
                }
            )
    table = NormTable(supernet.space.id)
    table.update(rows)
    return table
