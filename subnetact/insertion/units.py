"""Units: which entries of which weights move together when channels, heads or neurons change places.

The groups of a `Description` say what moves together. Published families and supernets that were described
by hand have no groups: there, the groups are those that `describe` finds in the graph of the largest subnet.
What it does not find has one order per dimension. In any case a group counts only if the outputs of the
largest subnet stay when its units change places, which is tried on a private copy with random weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from subnetact.comparison import equal
from subnetact.errors import InsertError
from subnetact.insertion.analysis import TracedModel
from subnetact.insertion.description import Group, Member
from subnetact.insertion.description_proof import WHOLE, called_alike
from subnetact.operators import ElasticAttribute, LayerSelect, Operator
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.per_width_norm import PerWidthNorm
from subnetact.operators.view_module import owned
from subnetact.operators.vocabulary import EXPERTS
from subnetact.space import SizeRow
from subnetact.spec import grouped
from subnetact.supernet.batches import map_tensors
from subnetact.supernet.failure import explained
from subnetact.supernet.module_outputs import outputs_and_calls, outputs_of
from subnetact.supernet.proof import first_changed, in_double
from subnetact.supernet.sensitivity import NOT_SHOWN, other_inputs, showing, smaller
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import disturbed_copy, private_copy, shared_view

Orders = Mapping[tuple[str, str, int], Tensor]
"""(name of a module, name of a tensor, axis) -> for every position, the one whose entries it gets.

Experts may have an order each, (experts, positions).
"""


@dataclass(eq=False)
class Part:
    """A part of an operator, or a segment of a part, that follows a dimension; its size grows in `steps`.

    Attributes:
        tables: (name of a tensor, axis) -> the positions that each step adds, (steps, positions per step).
    """

    path: str
    name: str
    role: str  # that of UnitWeights
    dimension: str
    steps: int
    tables: Mapping[tuple[str, int], Tensor]
    reason: str | None = None  # why it cannot be permuted

    def __str__(self) -> str:
        return f"{self.path}.{self.name}"


@dataclass(eq=False)
class UnitGroup:
    """Parts whose units change places together; the reason says why they cannot.

    There may be `stacks` experts, each in the first axis of all weights, which have units of their own.
    """

    parts: tuple[Part, ...]
    units: int
    reason: str | None = None
    stated: bool = False  # A description says what belongs to it.
    stacks: int = 0

    @property
    def name(self) -> str:
        """The first part that computes the channels, for example `layer1.0.conv1.out`."""
        return str(next((part for part in self.parts if part.role == "writes"), self.parts[0]))

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The dimensions that the parts follow."""
        return tuple(dict.fromkeys(part.dimension for part in self.parts))

    @property
    def lacks(self) -> str | None:
        """What the group lacks to be one, in words."""
        broken = next((part for part in self.parts if part.reason is not None), None)
        if broken is not None:
            return f"{broken.reason} ({broken})"
        if self.stated:
            return None if self.units > 1 else "it has one unit"
        if not any(part.role == "writes" for part in self.parts):
            return f"no part is known to compute what {self.parts[0]} reads"
        if not any(part.role == "reads" for part in self.parts):
            return "no layer is known to read it"
        return None if self.units > 1 else "its parts have no common units"


def unit_groups(supernet: Supernet, trial: Trial) -> list[UnitGroup]:
    """Find everything in a supernet that can be permuted, and in which units."""
    network = supernet.network
    with torch.inference_mode(False), torch.no_grad():
        parts = parts_of(network, trial.row, supernet.space.dimensions)
        known = getattr(supernet.description, "groups", {}).values()
        stated = [
            UnitGroup(tuple(own), group.full // group.unit, stated=True, stacks=_stacks(network, own))
            for group in known
            if (own := [part for part in parts if part.dimension in group.dimensions(group.full)])
        ]
        unstated = [part for part in parts if not any(part in group.parts for group in stated)]
        groups = stated + trial.shown(unstated)
        found = trial.passing(groups)
        # Two units have one other order, which half of them were tried in.
        sure = all(group.stated and group.units > 2 for group in found)
        found = found if sure else trial.passing(found, again=True)
        refused = [group for group in groups if group not in found]
        for group in refused:
            group.reason = group.lacks or trial.reason(group)
    return sorted((*found, *refused), key=lambda group: parts.index(group.parts[0]))


def _stacks(network: nn.Module, parts: list[Part]) -> int:
    """Return the number of experts if parts are axes inside of the weights of each of them."""
    tables = [(_tensor_of(network, part.path, name), axis) for part in parts for name, axis in part.tables]
    firsts = {tensor.shape[0] if axis and tensor.dim() > 1 else 0 for tensor, axis in tables}
    stacked = len(firsts) == 1 and any(tensor.dim() == 3 for tensor, _ in tables)
    own = all(isinstance(network.get_submodule(part.path), ElasticAttribute) for part in parts)
    return int(firsts.pop()) if stacked and own else 0


# -- trials ------------------------------------------------------------------------------------------


class Trial:
    """Permutes a copy with random weights, and looks whether the outputs of the largest subnet stay."""

    @torch.inference_mode(False)
    def __init__(self, network: nn.Module, row: SizeRow, x: Any) -> None:
        self._copy = disturbed_copy(network).eval()
        self.row = row
        self._mode: Callable[[], Any] = nullcontext
        self._modes: tuple[Callable[[], Any], ...] = (_Double, nullcontext)  # not tried yet
        halves = torch.float16, torch.bfloat16
        self._inputs = [map_tensors(lambda t: t.float() if t.dtype in halves else t, x)]
        if any(p.dtype in halves for p in self._copy.parameters()):
            self._copy.float()
        view = shared_view(self._copy, row)
        watched, advice = shared_view(self._copy, row), "give a batch that the network takes"
        with explained(InsertError, "the largest subnet", watched, self._inputs[0], advice):
            _, calls = outputs_and_calls(self._copy, watched, self._inputs[0])
        few = smaller(self._inputs[0])[:1]
        self._inputs = called_alike(self._copy, shared_view(self._copy, row), few, calls) or self._inputs
        self._expected = [outputs_of(view, self._inputs[0])]
        candidates = chain(self._inputs, other_inputs(view, self._inputs[0]))
        useful, self._hidden = showing(self._copy, view, row, candidates)
        others = [other for other in useful if other is not self._inputs[0]]
        self._inputs += others
        self._expected += [outputs_of(view, other) for other in others]

    def stays(self, wanted: Mapping[UnitGroup, Tensor]) -> bool:
        """Tell whether the outputs stay when the units of groups are brought into an order."""
        found = self._permuted(wanted, lambda view: [outputs_of(view, x) for x in self._inputs])
        return equal(found, self._expected, WHOLE) or (self._exact() and self.stays(wanted))

    def _exact(self) -> bool:
        """Go on in double precision, as some networks amplify rounding; tell whether that is new."""
        modes, self._modes = self._modes, ()
        for mode in modes:
            with mode():
                double = in_double(self._copy, self.row, self._inputs)
            if double is not None:
                self._copy, self._inputs, self._expected = double
                self._mode = mode
                return True
        return False

    def passing(self, groups: Sequence[UnitGroup], again: bool = False) -> list[UnitGroup]:
        """Return the groups whose units can change places."""
        fit = [g for g in groups if g.lacks is None and self._not_shown(g) is None]
        fit.sort(key=lambda group: len(group.parts))  # The large ones fail more often: they lie side by side.
        if not fit or self.stays(_shuffled(fit, again)):
            return fit
        half = len(fit) // 2
        return self.passing(fit[:half], again) + self.passing(fit[half:], again) if half else []

    def shown(self, parts: Sequence[Part]) -> list[UnitGroup]:
        """Return the groups that the graph of the largest subnet shows; others have one per dimension."""
        if not parts:
            return []
        groups, rest, whole = list[UnitGroup](), list(parts), owned(shared_view(self._copy, self.row))
        modules, traced = dict(whole.named_modules()), TracedModel(whole, self._inputs[0])
        for group in (item for item in traced.groups(traced.layers()) if isinstance(item, Group)):
            found = [p for p in rest if any(_is_of(p, modules[p.path], m, group.full) for m in group.members)]
            rest = [part for part in rest if part not in found]
            if found:
                groups.append(UnitGroup(tuple(found), math.gcd(group.full, *(p.steps for p in found))))
        homes = [path for path, module in modules.items() if traits_of(module).reads_children]
        of_home = {part: next((h for h in homes if f"{part.path}.".startswith(f"{h}.")), "") for part in rest}
        alike = grouped(((part.dimension, of_home[part]), part) for part in rest).values()
        return groups + [UnitGroup(tuple(own), math.gcd(*(p.steps for p in own))) for own in alike]

    def reason(self, group: UnitGroup) -> str:
        """Return which module sees that units of a group changed places, or that nothing shows it."""
        if (hidden := self._not_shown(group)) and self.stays(_shuffled([group])):
            return NOT_SHOWN.format(hidden)
        plain = shared_view(private_copy(self._copy), self.row)
        where = self._permuted(_shuffled([group]), lambda view: first_changed(view, plain, self._inputs[0]))
        if where is None:
            return "it reaches the output of the network"
        return f"the output would change, first at {where}, which does not follow the order of channels"

    def _not_shown(self, group: UnitGroup) -> str | None:
        """Return a part of a group of which no input shows what it computes."""
        return next((name for name in map(str, group.parts) if name in self._hidden.values()), None)

    def _permuted(self, wanted: Mapping[UnitGroup, Tensor], run: Callable[[nn.Module], Any]) -> Any:
        try:
            orders = full_orders(self._copy, wanted)
        except InsertError:  # Tied weights would need two orders.
            return None
        permute_(self._copy, orders)
        try:
            with self._mode():
                return run(shared_view(self._copy, self.row))
        finally:
            back = reversed(list(orders.items()))
            permute_(self._copy, {key: order.argsort() for key, order in back})


class _Double(TorchFunctionMode):
    """Lets a network in double precision compute in it also what its forward asks to be at float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with the wider dtype."""
        args, kwargs = tree_map_only(
            torch.dtype, lambda t: torch.float64 if t is torch.float32 else t, (args, kwargs or {})
        )
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def _shuffled(groups: Sequence[UnitGroup], again: bool = False) -> dict[UnitGroup, Tensor]:
    """Return random orders; `again` gives others, also to two units, which have one other order only."""
    rng = random.Random(again)
    return {
        group: torch.tensor(_other_places(group.units, rng) if group.units > 2 or at % 2 == again else [0, 1])
        for at, group in enumerate(groups)
    }


def _other_places(units: int, rng: random.Random) -> list[int]:
    """Return a random order that keeps no blocks of units together, which may be heads."""
    sizes = [size for size in range(2, units) if units % size == 0]
    while True:
        order = rng.sample(range(units), units)
        if order != sorted(order) and not any(_keeps_blocks(order, size) for size in sizes):
            return order


def _keeps_blocks(order: list[int], size: int) -> bool:
    blocks = (order[at : at + size] for at in range(0, len(order), size))
    return all(len({place // size for place in block}) == 1 for block in blocks)


def _is_of(part: Part, layer: nn.Module, member: Member, full: int) -> bool:
    """Tell whether a part of a supernet is that of a layer which follows a group of its largest subnet."""
    start, axes = member.start, traits_of(layer).axes
    ends = (0, math.inf) if start is None else (start, start + full * member.multiple)
    names = {part.name.partition(".")[0]}
    for name, axis in part.tables:
        names |= {f"{name}.{axis}", *axes.get(name, ())[axis : axis + 1]}
    inside = all(bool(((t >= ends[0]) & (t < ends[1])).all()) for t in part.tables.values())
    return part.path == member.module and member.part in names and inside


# -- the slicing rules -------------------------------------------------------------------------------


def parts_of(network: nn.Module, row: SizeRow, dimensions: Sequence[str]) -> list[Part]:
    """Return all parts that follow a dimension of channels, in the order of the network."""
    operators = [m for m in network.modules() if isinstance(m, Operator) and not isinstance(m, LayerSelect)]
    named = [
        (operator, name, role)
        for operator in operators
        for name, role in sorted(_roles(operator).items(), key=lambda entry: entry[1] != "reads")
    ]
    mixed = {op.dims[name] for op, name, role in named if role != "keeps"}  # others are kernel sizes, say
    following = [each for each in named if each[0].dims[each[1]] in mixed]
    return [part for each in following if (part := _part(*each, row, dimensions)) is not None]


def _roles(operator: Operator) -> dict[str, str]:
    """Return the roles of the parts of an operator."""
    wholes = {name: _whole(operator, name) for name in operator.dims}
    if isinstance(operator, ElasticAttribute):
        return {name: _role_in_stack(operator, whole) for name, whole in wholes.items()}
    if operator.template.__dict__.get("groups", 1) > 1:  # The groups move with the outputs.
        both = len(set(wholes.values())) > 1
        return {name: "keeps" for name, whole in wholes.items() if not (both and whole == "in_")}
    roles = {"out": "writes", "in_": "reads"} if traits_of(operator.template).mixes else {}
    return {name: roles.get(whole, "keeps") for name, whole in wholes.items()}


def _role_in_stack(operator: ElasticAttribute, part: str) -> str:
    """Return the role of an axis of the weights of experts; of other parameters, "keeps"."""
    name, _, axis = part.partition(".")
    shape = operator.shapes.get(name, ())
    if len(shape) != 3 or shape[0] not in map(vars(operator.template).get, EXPERTS):
        return "keeps"
    outputs = "2" if getattr(operator.template, "is_transposed", False) else "1"
    return "writes" if axis == outputs else "reads"


def _whole(operator: Operator, name: str) -> str:
    return name if name in operator.parts or not operator.parts else name.rpartition(".")[0]


def _part(operator: Operator, name: str, role: str, row: SizeRow, dimensions: Sequence[str]) -> Part | None:
    """Return a part with the entries of all tensors that belong to it, or None if it has none."""
    most = operator.size(name, row)
    legal = [size for size in operator.legal(name) if size <= most]
    part = Part(operator.path, name, role, dimensions[operator.dims[name]], len(legal), {})
    if isinstance(operator, PerWidthNorm):
        part.reason = "its checkpoint lists statistics of first channels"
        return part
    if len(legal) < 2 or legal[-1] != most:
        return None
    tables: dict[tuple[str, int], Tensor] = {}
    own = (*operator._parameters.values(), *operator._buffers.values())
    for axis in range(max((tensor.dim() for tensor in own if tensor is not None), default=1)):
        first, middle, last = (
            _kept(operator, name, size, axis) for size in (legal[0], legal[len(legal) // 2], most)
        )
        for tensor in first:
            if len(first[tensor]) == len(last[tensor]):
                continue
            table = _table(first[tensor], middle[tensor], last[tensor], len(legal))
            if table is None:
                part.reason = "its slices do not grow in equal steps"
                return part
            tables[tensor, axis] = table
    part.tables = tables
    return part if tables else None


def _kept(operator: Operator, name: str, size: int, axis: int) -> dict[str, Tensor]:
    """Return which entries of an axis belong to the first `size` of a part, in every tensor with the axis."""
    alone: Any = object.__new__(type(operator))
    alone.__dict__.update(operator.__dict__, dims={name: 0}, checks=False)
    own = {**operator._parameters, **operator._buffers}
    wide = {n: tensor for n, tensor in own.items() if tensor is not None and tensor.dim() > axis}
    shapes = {n: [-1 if i == axis else 1 for i in range(tensor.dim())] for n, tensor in wide.items()}
    # Numbered entries are sliced instead.
    tags = {n: torch.arange(t.shape[axis]).view(shapes[n]).expand(t.shape) for n, t in wide.items()}
    alone.__dict__["_parameters"] = {**operator._parameters, **tags}
    made = alone.tensors(alone.sizes((size,)))
    found = {n: _line(made[n], t.dim(), axis) for n, t in wide.items() if made.get(n) is not None}
    if name != _whole(operator, name) and size:  # What the other segments keep is no part of this one.
        others = _kept(operator, name, 0, axis)
        found = {n: entries[~torch.isin(entries, others[n])] for n, entries in found.items()}
    return {n: entries.sort().values for n, entries in found.items()}


def _line(tags: Tensor, dims: int, axis: int) -> Tensor:
    """Return the tags along an axis; a slice may have split the first axis of a parameter."""
    tags = tags.flatten(0, tags.dim() - dims)
    index: Any = tuple(slice(None) if i == axis else 0 for i in range(dims))
    return tags[index] if tags.numel() else torch.arange(tags.shape[axis])


def _table(first: Tensor, middle: Tensor, last: Tensor, steps: int) -> Tensor | None:
    """Return the entries that each of `steps` sizes adds, (steps, entries per step); None if steps differ."""
    new = last[~torch.isin(last, first)]
    runs = new.tensor_split((new.diff() != 1).nonzero().flatten() + 1)
    if any(len(run) % (steps - 1) for run in runs) or len(new) != len(first) * (steps - 1):
        return None
    table = torch.cat([first[None], torch.cat([run.view(steps - 1, -1) for run in runs], 1)])
    return table if torch.equal(table[: steps // 2 + 1].flatten().sort().values, middle) else None


# -- permutations ------------------------------------------------------------------------------------


def _tensor_of(network: nn.Module, path: str, name: str) -> Any:
    module = network.get_submodule(path)
    return module._parameters.get(name, module._buffers.get(name))


def full_orders(network: nn.Module, wanted: Mapping[UnitGroup, Tensor]) -> Orders:
    """Return how the entries of full tensors move."""
    found: dict[tuple[str, str, int], Tensor] = {}
    for group, units in wanted.items():
        for part in group.parts:
            each = part.steps // group.units
            steps = (units[..., None] * each + torch.arange(each)).flatten(-2)
            for (name, axis), table in part.tables.items():
                length = _tensor_of(network, part.path, name).shape[axis]
                plain = torch.arange(length).expand(*units.shape[:-1], length).clone()
                order = found.setdefault((part.path, name, axis), plain)
                order[..., table.flatten()] = table[steps].flatten(-2)
    shared: dict[tuple[int, int], Tensor] = {}
    for (path, name, axis), order in found.items():
        known = shared.setdefault((id(_tensor_of(network, path, name)), axis), order)
        if not torch.equal(known, order):
            raise InsertError(
                f"reorder_: {path} shares {name} with a module that would need another order; sort fewer "
                "dimensions (dimensions=[...])"
            )
    return dict(sorted(found.items(), key=lambda item: -item[1].dim()))  # before experts change places


def permute_(network: nn.Module, orders: Orders) -> None:
    """Move the entries of full tensors, in place; tied tensors move once."""
    done: set[tuple[int, int]] = set()
    with torch.inference_mode(False), torch.no_grad():
        for (path, name, axis), order in orders.items():
            tensor = _tensor_of(network, path, name)
            if (id(tensor), axis) not in done:
                done.add((id(tensor), axis))
                index = order.to(tensor.device)
                if order.dim() == 1:
                    tensor.copy_(tensor.index_select(axis, index))
                else:  # each expert has an order of its own
                    for weights, own in zip(tensor, index, strict=True):
                        weights.copy_(weights.index_select(axis - 1, own))
