"""What a mixture of experts declares: how many experts a token visits, how many there are, and how wide.

A layer is found by its structure: modules with a number of experts per token, and weights of experts, which
are parameters of three axes, the first of which counts the experts. Three axes come of it:

- experts: the experts that a token visits, from 1, or from 2 if the model's class does not run with 1, to
  the model's number.
- pool: the experts that the layer has, a prefix, at least as many as the model visits per token, so that
  every number of experts per token fits every pool. If the router chooses groups of experts first, the sizes
  count groups, which stay whole, at least as many as a token may visit.
- ffn: the neurons of every expert. Where gates and values are the halves of one weight, which transformers
  multiplies by in one piece, a subnet has a packed copy of it, once for each of its widths; all else that
  follows these axes is sliced in place.

Zeros prove the neurons, as those of any other feed-forward network. They do not stand for experts that a
router does not choose, because it chooses anew for every token. What is proved of the first two axes is their
meaning: a block with the smaller number computes what the block computes that the model's own class makes
from a configuration with this number, given the same weights (`why_not_as_configured`). This finds every
place in which a model keeps or reads the number. A pool must also be one of equals: the block computes the
same when its experts, or their groups, change places with all that belongs to them.
"""

from __future__ import annotations

import copy
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from subnetact.comparison import EXACT, ROUNDED, equal
from subnetact.device import raise_if_explained
from subnetact.errors import InsertError
from subnetact.insertion.description import Description, Group, Member
from subnetact.insertion.units import UnitGroup, full_orders, parts_of, permute_
from subnetact.operators import ElasticAttribute, WeightSlice, vocabulary
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.vocabulary import EXPERT_GROUPS, EXPERT_WIDTHS, EXPERTS, EXPERTS_PER_TOKEN, number_of
from subnetact.space import SizeRow
from subnetact.spec import grouped
from subnetact.supernet.failure import summary
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.unused_weights import private_copy, shared_view

CONFIGURED = {"experts": EXPERTS_PER_TOKEN, "pool": (*EXPERTS, *EXPERT_GROUPS)}
"""Axis that a configuration proves -> the names of its number in modules and configurations."""

ROUTING = re.compile("rout|gat|static|correction", re.IGNORECASE)
"""A pattern in the names of routers and of their classes."""
_Modules = Mapping[str, nn.Module]
"""Modules by their names in the model."""
_Stacked = list[tuple[str, str, Tensor]]
"""Names of modules and parameters, and the weights of experts there, of shape (experts, ., .)."""


# -- proposals ---------------------------------------------------------------------------------------


def expert_groups(
    modules: _Modules, block_of: Callable[[str], str | None]
) -> Iterator[tuple[str, list[Group], str]]:
    """Yield names of groups that mixtures of experts may have, variants, and why there is none, if so."""
    blocks = grouped((block, path) for path in modules if (block := block_of(path)) is not None)
    for paths in blocks.values():
        inside = {path: modules[path] for path in paths}
        routed, stacked = _routed(inside), _stacks(inside)
        if routed:
            home = posixpath.commonpath([_home(m.module, inside) for m in routed[0]]).replace("/", ".")
            most = _number(inside, routed[0][0])
            groups = [
                Group(f"{home}.experts", "experts", most, tuple(members), least=least)
                for least in range(1, min(most, 3))
                for members in routed
            ]
            yield f"{home}.experts", groups, "a token visits one expert only"
            if stacked:
                yield f"{home}.pool", *_pool(home, inside, [x for own in stacked.values() for x in own], most)
        for host, own in stacked.items():
            yield f"{host}.ffn", *_neurons(host, inside, own)


def _number(modules: _Modules, member: Member) -> int:
    """Return the number that a member says."""
    return int(attrgetter(member.part)(modules[member.module]))


def _numbers(modules: _Modules, names: Sequence[str], value: int | None = None) -> list[Member]:
    """Return the whole numbers of modules under some names, or those of a certain value."""
    numbers = {path: vocabulary.own_numbers(module, names, value) for path, module in modules.items()}
    return [Member(path, name, ElasticAttribute) for path, own in numbers.items() for name in own]


def _routed(modules: _Modules) -> list[list[Member]]:
    """Return the numbers of experts per token in a block: those of modules, or of their configurations."""
    own = _numbers(modules, EXPERTS_PER_TOKEN)
    stated = [
        Member(path, f"config.{name}", ElasticAttribute)
        for path, module in modules.items()
        if ROUTING.search(type(module).__name__)
        for name in EXPERTS_PER_TOKEN
        if number_of(vars(module).get("config"), name)
    ]
    others = _numbers(modules, EXPERTS, _number(modules, own[0])) if own else []
    variants = [own, *([own + others] if others else []), stated]
    return [found for found in variants if len({_number(modules, m) for m in found}) == 1]


def _home(path: str, modules: _Modules) -> str:
    """Return the module with the experts, as a path of a file system: that around a router, or itself."""
    router = ROUTING.search(type(modules[path]).__name__)
    return (path.rpartition(".")[0] if router else path).replace(".", "/")


def _stacks(modules: _Modules) -> dict[str, _Stacked]:
    """Return the weights of experts in a block, by the module that has all of one layer."""
    found: dict[str, _Stacked] = {}
    for path, module in modules.items():
        own = [
            (path, name, weight)
            for name, weight in module._parameters.items()
            if weight is not None and weight.dim() == 3 and weight.shape[0] in map(vars(module).get, EXPERTS)
        ]
        if own:
            host = path if len(own) > 1 else path.rpartition(".")[0]
            found.setdefault(host, []).extend(own)
    return {host: own for host, own in found.items() if len(own) > 1}


def _neurons(host: str, modules: _Modules, stacked: _Stacked) -> tuple[list[Group], str]:
    """Return how the neurons of all experts may lie in their weights, for both orders of axes."""
    *first, (path, last, weight) = stacked
    name, variants = f"{host}.ffn", []
    for axis in (2, 1):
        full = int(weight.shape[axis])
        rows = [(p, f"{n}.{3 - axis}", int(t.shape[3 - axis])) for p, n, t in first]
        biases = [(p, f"{n}_bias", modules[p]._parameters.get(f"{n}_bias")) for p, n, _ in first]
        rows += [(p, f"{n}.1", int(t.shape[1])) for p, n, t in biases if t is not None]
        if not {size for _, _, size in rows} <= {full, 2 * full}:
            continue
        end = [Member(path, f"{last}.{axis}", ElasticAttribute)]
        end += _numbers({p: modules[p] for p, _, _ in stacked}, EXPERT_WIDTHS, full)
        halves = (1, 0, 2 * full), (1, full, 2 * full)
        for packed in (halves, ((2,),)):  # Gates and values are halves, or alternate.
            members = [
                Member(p, part, ElasticAttribute, *segment)
                for p, part, size in rows
                for segment in (((1,),) if size == full else packed)
            ]
            group = Group(name, "ffn", full, (*members, *end))
            variants += [group] if group not in variants else []
    return variants, "its weights are no two layers of all experts"


def _pool(home: str, modules: _Modules, stacked: _Stacked, least: int) -> tuple[list[Group], str]:
    """Return everything in a mixture of experts that has an entry per expert, and the groups of a router."""
    full = int(stacked[0][2].shape[0])
    if least >= full:
        return [], "a token visits all experts"
    own = {path for path, _, _ in stacked}
    members: list[Member] = []
    in_groups: list[tuple[int, int, Member]] = []
    for path, module in modules.items():
        tail = path[len(home) :]
        if "shared" in tail or not f"{path}.".startswith(f"{home}."):
            continue
        routes = path == home or path in own or ROUTING.search(f"{tail} {type(module).__name__}")
        if type(module) is nn.Linear:
            members += [Member(path, "out", WeightSlice)] if routes and module.out_features == full else []
            continue
        counts = _numbers({path: module}, (*EXPERTS, *traits_of(module).sizes.values()), full)
        members += counts
        in_groups += [
            (number_of(module, n), number_of(module, "topk_group"), Member(path, n, ElasticAttribute))
            for n in EXPERT_GROUPS
            if counts and number_of(module, n) > 1
        ]
        tensors = {**module._parameters, **module._buffers} if routes else {}
        for tensor_name, tensor in tensors.items():
            axes = [i for i, n in enumerate(() if tensor is None else tensor.shape) if n == full]
            if axes:
                members.append(Member(path, f"{tensor_name}.{axes[0]}", ElasticAttribute))
    variants = [Group(f"{home}.pool", "pool", full, tuple(members), least=least)]
    for groups, chosen in {(groups, chosen) for groups, chosen, _ in in_groups if 0 < chosen < groups}:
        whole = (replace(m, multiple=full // groups) for m in members)
        together = (*whole, *(m for _, _, m in in_groups))
        variants.append(Group(f"{home}.pool", "pool", groups, together, least=chosen))
    return variants, ""


# -- proof -------------------------------------------------------------------------------------------


class Configured:
    """Makes the blocks of a model from configurations with other numbers, without weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._made: dict[tuple[str, str, Any], nn.Module] = {}

    def block(self, path: str, group: Group, size: int) -> nn.Module:
        """Return a block of the model configured with a `size` in place of the full number of a group.

        Raises:
            InsertError: no configuration says the number.
        """
        names = CONFIGURED[group.axis]
        sizes = {m.multiple * group.full: m.multiple * size for m in group.members}
        for home, module in self.model.named_modules():
            config = vars(module).get("config")
            if f"{path}.".startswith(f"{home}." if home else "") and hasattr(config, "to_dict"):
                key = home, group.axis, tuple(sizes.items())
                if key not in self._made:
                    config = copy.deepcopy(config)
                    if _restate(config, names, sizes):
                        with torch.device("meta"), torch.no_grad():
                            self._made[key] = type(module)(config).eval()
                if key in self._made:
                    return copy.deepcopy(self._made[key].get_submodule(path[len(home) :].lstrip(".")))
        full = max(sizes)
        raise InsertError(f"no configuration says the number {full}, with which a smaller one is compared")


def _restate(config: Any, names: Sequence[str], sizes: Mapping[int, int]) -> bool:
    """Say other numbers in a configuration and in those inside of it; tell whether they were there."""
    found = [_restate(inner, names, sizes) for inner in vars(config).values() if hasattr(inner, "to_dict")]
    stating = {name: sizes[number] for name in names if (number := number_of(config, name)) in sizes}
    for name, size in stating.items():
        setattr(config, name, size)
    return bool(stating) or any(found)


def why_not_as_configured(configured: Configured, path: str, network: nn.Module, group: Group) -> str:
    """Return why a block with smaller numbers is not the block configured so, or an empty string.

    `network` runs the block, its `unit`, which is at a `path` in the model.
    """
    least, full, zero = group.least, group.full, torch.zeros(())
    some = {least, min(least + 1, full - 1), (least + full) // 2}  # Groups of experts divide not all of them.
    sizes = range(least, full) if group.axis == "experts" else sorted(some)
    choices = {size: size for size in (*sizes, full)}
    description = Description("trial", [replace(group, name="trial", sizes=choices)])
    space = description.space
    elastic = put_operators_(network, space, description.elastic).network
    whole = shared_view(elastic, space.resolve(space.largest()))
    expected = outputs_of(whole, zero)
    for size in sizes:
        view: Any = shared_view(elastic, space.resolve(space.spec(**{group.axis: [size]})))
        try:
            found = outputs_of(view, zero)
        except Exception as error:
            raise_if_explained(error)
            return f"with {size} of {full}, {summary(view, error)}"
        try:
            reference = configured.block(path, group, size)
        except Exception as error:
            raise_if_explained(error)
            return str(error) if isinstance(error, InsertError) else f"no model with {size}: {error}"
        strange = _fill(reference, view.unit)
        if strange:
            return f"the weights of the model configured with {size} of {full} differ, at {strange}"
        repeated = copy.copy(view)
        repeated._modules = {"unit": reference}
        if not equal(found, outputs_of(repeated, zero), EXACT):
            return f"{size} of {full} do not compute what the model configured with {size} computes"
        if equal(found, expected, EXACT):
            return f"nothing reads the number: {size} of {full} compute what all of them compute"
    if group.axis == "pool":
        row, mixed = space.resolve(space.largest()), private_copy(elastic)
        experts = UnitGroup(tuple(parts_of(mixed, row, space.dimensions)), full)
        places = torch.randperm(full, generator=torch.Generator().manual_seed(0))
        permute_(mixed, full_orders(mixed, {experts: places}))
        if not equal(outputs_of(shared_view(mixed, row), zero), expected, ROUNDED):
            return "its experts cannot change places, as in groups of experts"
    return ""


def _fill(empty: nn.Module, filled: nn.Module) -> str:
    """Give a block without weights those of another one; return where they differ, or an empty string."""
    tensors: dict[str, Any] = dict(filled.named_parameters(remove_duplicate=False))
    tensors.update(filled.named_buffers(remove_duplicate=False))
    for path, module in empty.named_modules():
        for own in (module._parameters, module._buffers):
            for name in [name for name, tensor in own.items() if tensor is not None]:
                place = f"{path}.{name}".lstrip(".")
                if getattr(tensors.get(place), "shape", None) != own[name].shape:
                    return place
                own[name] = tensors[place]
    return ""


def expert_saliency(network: nn.Module, row: SizeRow, pool: Group, x: Any) -> Tensor:
    """Return how much each expert of a pool adds to what the largest subnet computes on a batch.

    That is the mean of weight times length of its output over the tokens that visit it (REAP, Lasby et al.,
    2025). Where the outputs are not seen apart, it is the sum of the weights with which tokens are routed.
    """
    noted: list[tuple[int, Tensor]] = []  # how good a measure is, and its scores
    count = pool.full * max(member.multiple for member in pool.members)

    def total(index: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(count).index_add(0, index.flatten().cpu(), values.flatten().float().cpu())

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim() == 2]
        given = taken + [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.dim() == 2]
        chosen = [t for t in given if not t.is_floating_point() and int(t.max()) < count]
        weighted = [(i, t) for i in chosen for t in given if t.is_floating_point() and t.shape == i.shape]
        if weighted:
            index, weights = pair = weighted[0]
            noted.append((1, total(index, weights.abs())))
            if all(any(t is part for t in taken) for part in pair) and isinstance(output, Tensor):
                lengths = torch.cat([_alone(module, args, kwargs, pair, i) for i in range(index.shape[1])], 1)
                visits = total(index, torch.ones_like(weights)).clamp(min=1)
                noted.append((2, total(index, lengths) / visits))
        elif scores := [t for t in given if t.is_floating_point() and t.shape[1] == count]:
            noted.append((0, scores[-1].float().softmax(1).sum(0).cpu()))

    view = shared_view(network, row)
    for path in dict.fromkeys(member.module for member in pool.members):
        view.get_submodule(path).register_forward_hook(note, with_kwargs=True)
    outputs_of(view, x)
    best = max((measure for measure, _ in noted), default=0)
    found = [scores for measure, scores in noted if measure == best]
    return (torch.stack(found).sum(0) if found else torch.zeros(count)).view(pool.full, -1).sum(1)


def _alone(experts: Any, args: Any, kwargs: Any, pair: tuple[Tensor, Tensor], place: int) -> Tensor:
    """Return the length, (tokens, 1), of what experts add in one place of the lists of all tokens."""

    def narrowed(given: Any) -> Any:
        return given[:, place : place + 1] if any(given is part for part in pair) else given

    args, kwargs = tree_map(narrowed, (args, kwargs))
    lengths: Tensor = experts.forward(*args, **kwargs).flatten(0, -2).norm(dim=-1, keepdim=True)
    return lengths
