"""What a transformer declares: heads, feed-forward neurons and blocks, found without tracing.

Modules and configurations state numbers of heads and their width, and blocks that can be skipped are
`GradientCheckpointingLayer`s in a `ModuleList`; timm and torch build transformers in the same way. The model
runs on the example, while the order of its linear layers and the inputs of its blocks are noted. Then rules
propose groups. A proposal is no proof: it is inserted into a copy of one block with disturbed weights, and
the narrowed block must compute what the block computes with the dropped weights at zero. This also decides
how the rows of a fused layer are packed, and which numbers a forward reads.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from subnetact.comparison import is_cache, tensors_in
from subnetact.errors import InsertError
from subnetact.insertion.analysis import TracedModel, is_rank
from subnetact.insertion.description import Description, Group, Member
from subnetact.insertion.description_proof import ALIGNED, FAULTS, advice_on
from subnetact.insertion.experts import CONFIGURED, Configured, expert_groups, why_not_as_configured
from subnetact.insertion.layer_vocabulary import layer_stacks
from subnetact.insertion.skippable import StackWatch, skippable_blocks
from subnetact.insertion.state_space import state_group
from subnetact.insertion.stream import STREAM, stream_group
from subnetact.operators import AttentionSlice, ElasticAttribute, LayerNormSlice, WeightSlice, vocabulary
from subnetact.operators.layer_traits import norm_features, traits_of
from subnetact.operators.vocabulary import number_of, own_numbers
from subnetact.spec import grouped
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.proof import prove
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.unused_weights import disturbed_copy, private_copy, structure_copy

NOT_ASKED = f"its outputs are those of the stream, which is tried if axes names it: axes=({STREAM!r}, ...)"


class Declaration(NamedTuple):
    """Groups without choices, blocks that may be skipped with the shapes of their inputs, and refusals.

    `blocks` are those of stacks of transformers; what is `observed` has all others that are residual, too.
    """

    groups: list[Group]
    blocks: dict[str, torch.Size]
    refused: dict[str, str]
    observed: Observation


def declared(model: nn.Module, example: Any, stream: bool = False) -> Declaration:
    """Return what can be elastic in a transformer, as far as the model declares it."""
    observed = Observation(model, example)
    trials = _Trials(observed)
    groups: list[Group] = []
    refused: dict[str, str] = {}

    def settle(proposals: Iterable[_Proposal]) -> None:
        for proposal in proposals:
            elastic = {m.module for g in groups for m in g.members}
            if not elastic.isdisjoint(proposal.layers):
                continue
            found = trials.first(proposal)
            if isinstance(found, Group):
                groups.append(found)
                for name in (found.name, *proposal.replaces):
                    refused.pop(name, None)
            elif proposal.name not in {group.name for group in groups}:
                refused.setdefault(proposal.name, found)

    attentions = list(_attentions(observed))
    mixers = [*_state_spaces(observed), *attentions]
    settle(mixers)
    settle(_shared_heads(observed, [a for a in attentions if a.name in refused]))
    feed_forwards = list(_feed_forwards(observed, mixers))
    settle(feed_forwards)
    experts = expert_groups(observed.modules, observed.block_of)
    settle(_Proposal(name, [], variants, reason) for name, variants, reason in experts)
    blocks = _blocks(observed, [m.module for g in groups for m in g.members], refused)
    if layer_stacks(model):
        inner = {(m.module, m.part) for group in groups for m in group.members}
        elastic = {module for module, _ in inner}
        whole = [p for p in (*mixers, *feed_forwards) if elastic.isdisjoint(p.layers)]
        inner |= {pair for proposal in whole for pair in _inner(proposal)}
        found = stream_group(model, inner, [_parent(mixer.name) for mixer in mixers])
        if not isinstance(found, Group):
            refused |= {STREAM: found} if stream else {}
        elif stream:
            groups.append(found)
        elif all(t.shape[-1:] != (found.full,) for t in tensors_in(observed.calls[""].output)):
            refused |= dict.fromkeys([m.module for m in found.members if m.part == "out"], NOT_ASKED)
    return Declaration(groups, blocks, refused, observed)


# -- what one forward pass shows ---------------------------------------------------------------------


@dataclass
class _Call:
    """The first call of a module, and the number of calls."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    count: int = 0


class Observation:
    """A forward pass: linear layers and torch's attentions in order, calls of what contains them, stacks.

    The graph is `traced`; `residual` are the blocks that it shows to be so, with the shapes of their inputs,
    and `stacks` tells how much they do.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.blocks = [b for p, m in self.modules.items() for b in _blocks_of(p, m) if b in self.modules]
        self.sides = {path: sides for path, m in self.modules.items() if (sides := _sides(m)) is not None}
        self.residual: dict[str, torch.Size] = {}
        self.traced = TracedModel(self._watched(), example)
        if self.traced.recording is not None:
            self.residual = skippable_blocks(self.modules, self.traced.recording)
        else:  # It cannot be recorded.
            outputs_of(self._watched(), example)

    def _watched(self) -> nn.Module:
        """Return a copy of the model that notes here what its modules do."""
        copied = structure_copy(self.model)
        modules = dict(copied.named_modules())
        self.order: list[str] = []
        self.calls: dict[str, _Call] = {}
        self.stacks = StackWatch(modules)
        for path in self.sides:
            modules[path].register_forward_hook(partial(self._order, path))
        for path in {p[:i] for p in self.sides for i in (0, *(m.start() for m in re.finditer(r"\.", p)))}:
            modules[path].register_forward_hook(partial(self._note, path), with_kwargs=True)
        return copied

    def block_of(self, path: str) -> str | None:
        """Return the innermost block around a module, or None."""
        inside = [b for b in self.blocks if f"{path}.".startswith(f"{b}.") and b in self.calls]
        return max(inside, key=len, default=None)

    def unit_of(self, paths: Sequence[str]) -> str:
        """Return the innermost block around some modules, or the called module if there is none."""
        unit = _common(paths)
        while unit not in self.calls:
            unit = _parent(unit)
        return self.block_of(unit) or unit

    def _order(self, path: str, *_: Any) -> None:
        if path not in self.order:
            self.order.append(path)

    def _note(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        self.calls.setdefault(path, _Call(args, dict(kwargs), output)).count += 1


def _sides(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer; None for other modules."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    traits = traits_of(module)
    if traits.kind != "linear":
        return None
    return int(getattr(module, traits.sizes["in_"])), int(getattr(module, traits.sizes["out"]))


def _blocks_of(path: str, module: nn.Module) -> list[str]:
    """Return the members of a stack; torch's containers are stacks if all members are of one class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or module._parameters or module._buffers:
        return []
    alike = len(module) > 1 and len({type(child) for child in module}) == 1
    if alike or all(map(_is_checkpointed, module)):
        return [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    return []


def _is_checkpointed(module: nn.Module) -> bool:
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _common(paths: Sequence[str]) -> str:
    """Return the name of the innermost module around some modules."""
    return posixpath.commonpath([_parent(path).replace(".", "/") for path in paths]).replace("/", ".")


# -- rules -------------------------------------------------------------------------------------------


@dataclass
class _Proposal:
    """One size that may be elastic: the first of its variants that passes its trial."""

    name: str
    layers: list[str]
    """The linear layers that a rule has looked at."""
    variants: list[Group] = field(default_factory=list)
    reason: str = ""
    """Why there is no variant."""
    replaces: list[str] = field(default_factory=list)
    """The names of refused proposals that this one stands for."""


class _Unfit(Exception):
    """A module does not fit a rule; the message is the reason."""


def _number(observed: Observation, path: str, names: Sequence[str], inherited: bool) -> int | None:
    """Return the first whole number of a name, of a module itself or of its configuration."""
    found = list(own_numbers(observed.modules[path], names).values())
    while inherited and not found:
        config = getattr(observed.modules[path], "config", None)
        found = [number for name in names if (number := number_of(config, name))]
        if not path or config is not None:
            break
        path = _parent(path)
    return next(iter(found), None)


def _attentions(observed: Observation) -> Iterator[_Proposal]:
    """Propose the heads of every attention."""
    found = [path for path in observed.order if isinstance(observed.modules[path], nn.MultiheadAttention)]
    yield from [_torch_attention(observed, path) for path in found]
    for path in observed.calls:
        layers = [layer for layer in observed.order if layer.startswith(f"{path}.")]
        named = "attention" in type(observed.modules[path]).__name__.lower()
        if layers and _number(observed, path, vocabulary.HEADS, inherited=named) is not None:
            found.append(path)
    for path in found:
        innermost = not any(other.startswith(f"{path}.") for other in found)
        if innermost and not isinstance(observed.modules[path], nn.MultiheadAttention):
            yield _attention(observed, path)


def _state_spaces(observed: Observation) -> Iterator[_Proposal]:
    """Propose the heads, or the channels, of every mixer that keeps a state."""
    for path in observed.calls:
        if (group := state_group(path, observed.modules[path])) is not None:
            layers = [layer for layer in observed.order if layer.startswith(f"{path}.")]
            yield _Proposal(f"{path}.heads", layers, *group)


def _inner(proposal: _Proposal) -> Iterator[tuple[str, str]]:
    """Yield the parts of layers that lie inside of an attention or a feed-forward network."""
    if proposal.variants:
        yield from ((m.module, m.part) for m in proposal.variants[0].members)
    else:
        yield from ((layer, "out") for layer in proposal.layers[:-1])
        yield (proposal.layers[-1], "in_")


def _torch_attention(observed: Observation, path: str) -> _Proposal:
    module: Any = observed.modules[path]
    width, out, name = int(module.head_dim), f"{path}.out_proj", f"{path}.heads"
    members = (Member(path, "out", AttentionSlice, width), Member(out, "in_", WeightSlice, width))
    if module.num_heads < 2:
        return _Proposal(name, [path, out], reason="it has one head only")
    return _Proposal(name, [path, out], [Group(name, "heads", module.num_heads, members)])


def _attention(observed: Observation, path: str) -> _Proposal:
    """Propose the heads of one attention module: its projections, and the layer that reads all heads."""
    inside = [layer for layer in observed.order if layer.startswith(f"{path}.")]
    later = observed.order[observed.order.index(inside[-1]) + 1 :]
    after = [layer for layer in later if layer.startswith(f"{_parent(path)}.") or not _parent(path)][:1]
    proposal = _Proposal(f"{path}.heads", inside)
    for out in (inside[-1], *after):
        try:
            proposal.variants += _head_groups(observed, path, [x for x in inside if x != out], out)
        except _Unfit as unfit:
            proposal.reason = proposal.reason or str(unfit)
    return proposal


def _shared_heads(observed: Observation, attentions: list[_Proposal]) -> Iterator[_Proposal]:
    """Propose one number of heads for attentions in all blocks of a stack, which share position biases."""
    blocks = [(one, observed.block_of(one.name)) for one in attentions if one.variants]
    places = (((_parent(block), one.name[len(block) :]), one) for one, block in blocks if block is not None)
    for (stack, tail), members in grouped(places).items():
        heads = {attention.variants[0].full for attention in members}
        if len(members) < 2 or len(heads) > 1:
            continue
        proposal = _Proposal(f"{stack}{tail}", [x for m in members for x in m.layers])
        proposal.replaces = [m.name for m in members]
        layers = [m.module for attention in members for m in attention.variants[0].members]
        unit, full = observed.unit_of(layers), heads.pop()
        outside = [
            Member(path, "out", WeightSlice, module.embedding_dim // full)
            for path, module in observed.modules[unit].named_modules(prefix=unit)
            if isinstance(module, nn.Embedding)
            and module.embedding_dim % full == 0
            and not path.startswith(f"{stack}.")
        ]
        for tables in [outside, []] if outside else [[]]:
            for order in range(max(len(m.variants) for m in members)):
                chosen = [m.variants[min(order, len(m.variants) - 1)] for m in members]
                together = (*(member for group in chosen for member in group.members), *tables)
                proposal.variants.append(replace(chosen[0], name=proposal.name, members=together))
        yield proposal


@dataclass(frozen=True)
class _Heads:
    """The numbers of query heads, and of key and value heads, and the features of one."""

    queries: int
    pairs: int
    width: int

    @property
    def full(self) -> int:
        """The number of independent heads: of key and value heads, unless all queries share one."""
        return self.queries if self.pairs == 1 else self.pairs

    def rows(self, shared: bool) -> int:
        """Return the rows per independent head of a projection; 0 if all queries share its heads."""
        count = self.pairs if shared else self.queries
        return 0 if count < self.full else count // self.full * self.width

    def projection(self, layer: str, outputs: int) -> Iterator[list[Member]]:
        """Yield what may follow the heads in a linear layer, for every way to pack its rows."""
        totals = {False: self.queries * self.width, True: self.pairs * self.width}
        ways = [(False,), (True,), (False, True, True), (True, True), (False, False)]
        packed = [segments for segments in ways if sum(totals[shared] for shared in segments) == outputs]
        if packed and len(packed[0]) == 1:
            rows = self.rows(*packed[0])
            yield [Member(layer, "out", WeightSlice, rows)] if rows else []
            return
        for segments in packed:
            members, start = [], 0
            for shared in segments:
                if self.rows(shared):
                    members.append(Member(layer, "out", WeightSlice, self.rows(shared), start, outputs))
                start += totals[shared]
            yield members
        if not packed and (outputs % totals[False] or not self.rows(True)):
            raise _Unfit(
                f"{layer} has {outputs} outputs, which are no queries, keys or values of {self.queries} "
                f"({self.pairs}) heads with {self.width} features"
            )
        if outputs % self.full == 0 and self.rows(True):
            yield [Member(layer, "out", WeightSlice, outputs // self.full)]


def _head_groups(observed: Observation, path: str, projections: list[str], out: str) -> Iterator[Group]:
    """Yield the groups that heads may form, for every packing of fused layers and every set of numbers."""
    module = observed.modules[path]
    latent = [layer for layer in projections if vocabulary.LATENT.search(layer)]
    heads = _heads(observed, path, out, bool(latent))
    if heads.rows(True) and (getattr(module, "is_kv_shared_layer", False) or _stores(module)):
        raise _Unfit("it shares its keys and values with other blocks, so it keeps all heads")
    all_heads, full = heads.queries * heads.width, heads.full
    outputs = {layer: observed.sides[layer][1] for layer in projections if layer not in latent}
    if latent:  # Queries, keys and values have widths of their own, and lie head by head.
        packings = [[[Member(x, "out", WeightSlice, n // full)]] for x, n in outputs.items() if n % full == 0]
    else:
        packings = [list(heads.projection(layer, n)) for layer, n in outputs.items()]
    if not packings:
        raise _Unfit("no linear layer in it makes queries, keys and values")
    rows = {heads.pairs * heads.width: heads.rows(True), all_heads: heads.rows(False)}
    norms, tables = _norms(module, path, rows), list(_tables(observed, path, heads))
    numbers = {
        **own_numbers(module, vocabulary.HEADS, heads.queries),
        **own_numbers(module, vocabulary.ALL_HEADS, all_heads),
        **own_numbers(module, vocabulary.KEY_VALUE_HEADS, heads.pairs if full == heads.pairs else -1),
        **own_numbers(module, vocabulary.QUERIES_PER_KEY, heads.queries if full != heads.pairs else -1),
    }
    config, count = vars(module).get("config"), heads.queries
    stated = {f"config.{name}": count for name in vocabulary.HEADS if number_of(config, name) == count}
    split = {n.name: all_heads for n in observed.traced.split_by if n.path == path and n == all_heads}
    more = [{}, *filter(None, (own_numbers(module, vocabulary.WIDTHS, all_heads), stated, split))]
    for order in range(max(map(len, packings))):
        members = [member for packing in packings for member in packing[min(order, len(packing) - 1)]]
        members.append(Member(out, "in_", WeightSlice, all_heads // full))
        extras = dict.fromkeys([(*norms, *tables), (*norms,), (*tables,), ()])
        for extra, further in itertools.product(extras, more):
            own = {**numbers, **further}
            attributes = [Member(path, n, ElasticAttribute, v // full) for n, v in own.items()]
            yield Group(f"{path}.heads", "heads", full, (*members, *extra, *attributes))


def _norms(module: nn.Module, path: str, rows: Mapping[int, int]) -> list[Member]:
    """Return the norms in a module over all of some features: their number -> rows per unit of a group."""
    norms = {inner: rows.get(norm_features(norm), 0) for inner, norm in module.named_modules(prefix=path)}
    return [Member(inner, "features", LayerNormSlice, each) for inner, each in norms.items() if each]


def _heads(observed: Observation, path: str, out: str, latent: bool) -> _Heads:
    """Return the heads of an attention module whose output layer is given."""
    all_heads = observed.sides[out][0]
    queries = _number(observed, path, vocabulary.HEADS, inherited=True)
    width = _number(observed, path, vocabulary.HEAD_WIDTHS, inherited=False)
    if width is not None and all_heads % width == 0 and not latent:
        queries = all_heads // width
    if queries is None or all_heads % queries:
        raise _Unfit(f"{out} has {all_heads} inputs, which is no multiple of {queries} heads")
    if queries < 2:
        raise _Unfit("it has one head only")
    if latent:
        return _Heads(queries, queries, all_heads // queries)
    per_pair = _number(observed, path, vocabulary.QUERIES_PER_KEY, inherited=False)
    pairs = _number(observed, path, vocabulary.KEY_VALUE_HEADS, inherited=True) or queries
    pairs = queries // per_pair if per_pair and queries % per_pair == 0 else pairs
    if queries % pairs:
        raise _Unfit(f"{queries} query heads are no multiple of {pairs} key and value heads")
    return _Heads(queries, pairs, all_heads // queries)


def _tables(observed: Observation, path: str, heads: _Heads) -> Iterator[Member]:
    """Yield the tables with one column per head in an attention module, of position biases for example."""
    each = heads.queries // heads.full
    for inner, module in observed.modules[path].named_modules(prefix=path):
        if isinstance(module, nn.Embedding) and module.embedding_dim == heads.queries:
            yield Member(inner, "out", WeightSlice, each)
        elif not type(module).__module__.startswith("torch.nn.") and inner not in observed.sides:
            for name, tensor in {**module._parameters, **(module._buffers if inner == path else {})}.items():
                axes = [axis for axis, n in enumerate(getattr(tensor, "shape", ())) if n == heads.queries]
                if len(axes) == 1:
                    yield Member(inner, f"{name}.{axes[0]}", ElasticAttribute, each)
            if inner != path:
                for number, value in own_numbers(module, vocabulary.HEADS, heads.queries).items():
                    yield Member(inner, number, ElasticAttribute, value // heads.full)


def _feed_forwards(observed: Observation, mixers: Sequence[_Proposal]) -> Iterator[_Proposal]:
    """Propose the neurons of every feed-forward network in a block; packed layers come last."""
    outside = {path for proposal in mixers for path in proposal.layers}
    outside |= {a for a, b in itertools.pairwise(observed.order) if is_rank(observed.modules, a, b)}
    layers = [layer for layer in observed.order if layer not in outside]
    hosts = [_parent(_parent(proposal.name)) for proposal in mixers]
    packed: list[_Proposal] = []
    for at, last in enumerate(layers):
        neurons, block = observed.sides[last][0], observed.block_of(last)
        block = block or max((h for h in hosts if last.startswith(f"{h}.")), key=len, default=None)
        before = [layer for layer in layers[:at] if layer.startswith(f"{block}.")]
        outputs = [observed.sides[layer][1] == neurons for layer in before]
        first = before[max((i + 1 for i, fits in enumerate(outputs) if not fits), default=0) :]
        if block is not None and first:
            yield _feed_forward(observed, first, last)
        elif block is not None and before and observed.sides[before[-1]][1] == 2 * neurons:
            packed.append(_feed_forward(observed, before[-1:], last))
    yield from packed


def _feed_forward(observed: Observation, first: list[str], last: str) -> _Proposal:
    """Propose the neurons between some linear layers and the one that runs after them."""
    neurons = observed.sides[last][0]
    around = _common([*first, last])
    name = f"{around}.ffn" if around not in observed.blocks else f"{first[0]}.ffn"
    proposal = _Proposal(name, [*first, last])
    end, norms = [Member(last, "in_", WeightSlice)], list[Member]()
    if around in observed.calls and around not in observed.blocks:
        inside = observed.modules[around]
        end += [Member(around, n, ElasticAttribute) for n in own_numbers(inside, vocabulary.NEURONS, neurons)]
        norms = _norms(inside, around, {neurons: 1})
        end += [
            Member(path, "out", WeightSlice)
            for path, m in inside.named_modules(prefix=around)
            if isinstance(m, nn.Conv1d | nn.Conv2d) and m.groups == m.in_channels == m.out_channels == neurons
        ]
    plain = [Member(layer, "out", WeightSlice) for layer in first]
    halves = [Member(first[0], "out", WeightSlice, 1, start, 2 * neurons) for start in (0, neurons)]
    pairs = [Member(first[0], "out", WeightSlice, 2)]
    starts = [plain] if observed.sides[first[0]][1] == neurons else [halves, pairs]
    for start, extra in itertools.product(starts, [norms, []] if norms else [[]]):
        proposal.variants.append(Group(name, "ffn", neurons, (*start, *end, *extra)))
    return proposal


def _blocks(observed: Observation, elastic: Sequence[str], refused: dict[str, str]) -> dict[str, torch.Size]:
    """Return the blocks that a subnet may skip, each with the shape of its input; note why others stay."""
    found: dict[str, torch.Size] = {}
    stacks = grouped((_parent(block), block) for block in observed.blocks)
    for stack, blocks in stacks.items():
        around = any(other.startswith(f"{stack}.") for other in stacks)
        checkpointed = all(_is_checkpointed(observed.modules[b]) for b in blocks)
        transformer = checkpointed or any(m.startswith(f"{b}.") for b in blocks for m in elastic)
        if around or not transformer or not any(b in observed.calls for b in blocks):
            continue
        storing = [block for block in blocks if _stores(observed.modules[block])]
        others = [block for block in blocks if block not in storing]
        reason = next(filter(None, (_unskippable(observed, block) for block in others)), "")
        if reason:
            refused[f"{stack}.depth".lstrip(".")] = reason
            continue
        first, staying = observed.calls[blocks[0]], dict[str, str]()
        if any(map(is_cache, (*first.args, *first.kwargs.values()))):
            why = "the position of a token is read from the cache of the first block, so it stays"
            staying[blocks[0]] = why
        staying |= dict.fromkeys(storing, "it stores keys and values that later blocks read, so it stays")
        refused |= {f"{block}.depth": why for block, why in staying.items()}
        kept = [block for block in blocks if block not in staying]
        if not kept:
            refused[f"{stack}.depth"] = "there is one block only"
        found.update({block: observed.calls[block].output.shape for block in kept})
    return found


def _unskippable(observed: Observation, block: str) -> str:
    """Return why a block cannot be the identity, or an empty string."""
    kind = type(observed.modules[block]).__name__
    call = observed.calls.get(block)
    if call is None:
        return f"{block} ({kind}) does not run on the example"
    if call.count > 1:
        return f"{block} ({kind}) runs {call.count} times per forward pass"
    given = next((v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)), None)
    if not isinstance(call.output, Tensor):
        return f"{block} ({kind}) returns a {type(call.output).__name__}, not one tensor"
    if given is None or given.shape != call.output.shape or given.dtype != call.output.dtype:
        return f"{block} ({kind}) changes the shape of its input"
    if not _parent(block):
        return "its blocks are those of the network itself; wrap it in nn.Sequential to skip some of them"
    if block not in observed.residual:
        return f"{kind} is not residual: without its layers, its output is another than its input"
    return ""


def _stores(block: nn.Module) -> bool:
    """Tell whether an attention in a block stores keys and values for others, as in Gemma 3n."""
    return any(getattr(m, "store_full_length_kv", False) for m in block.modules())


# -- trials ------------------------------------------------------------------------------------------


class _Trials:
    """Inserts proposals into copies of blocks, and compares narrowed blocks with masked ones."""

    def __init__(self, observed: Observation) -> None:
        self.observed = observed
        self.configured = Configured(observed.model)
        self._known: dict[Any, str] = {}
        self._units: dict[Any, nn.Module] = {}

    def first(self, proposal: _Proposal) -> Group | str:
        """Return the first variant of a proposal that passes, or the reason why none does."""
        why = proposal.reason
        for group in proposal.variants:
            reason = self._trial(group)
            if not reason:
                return group
            why = why or reason
        return why or "it has no elastic layers"

    def _trial(self, group: Group) -> str:
        """Return why a group is wrong, or an empty string."""
        unit = self.observed.unit_of([member.module for member in group.members])
        module, call = self.observed.modules[unit], self.observed.calls[unit]
        cut = len(unit) + 1 if unit else 0
        renamed = tuple(replace(m, module=f"unit.{m.module[cut:]}".rstrip(".")) for m in group.members)
        given = (leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor))
        shapes = tuple(p.shape for p in module.parameters())
        key = str(module), shapes, tuple(t.shape for t in given if t.is_floating_point())
        if key not in self._units:
            self._units[key] = disturbed_copy(module).float()
        known = key, renamed, group.full, group.least
        if known not in self._known:
            proved = replace(group, members=renamed)
            if group.axis in CONFIGURED:
                network = _Repeated(structure_copy(self._units[key]), call)
                why = why_not_as_configured(self.configured, unit, network, proved)
            else:
                why = _compared(self._units[key], call, proved)
            self._known[known] = why
        why = self._known[known]
        return re.sub(r"\bunit\b", unit, why if unit else why.replace("unit.", ""))


def _compared(unit: nn.Module, call: _Call, group: Group) -> str:
    """Return why half of a group, inserted into a module, is wrong, or an empty string."""
    half = {0.5: group.full // 2, 1.0: group.full}
    description = Description("trial", [replace(group, name="trial", sizes=half)])
    space = description.space
    try:
        network = put_operators_(_Repeated(structure_copy(unit), call), space, description.elastic).network
    except InsertError as error:
        return str(error)
    row, largest = space.resolve(space.smallest()), space.resolve(space.largest())
    finding = prove(network, private_copy(network), row, largest, torch.zeros(()))
    if finding is None:
        return ""
    of_library = type(unit).__module__.startswith("transformers.") and ALIGNED not in finding.why
    if finding.kind == "fails" and of_library:
        return f"half of it does not fit {finding.why.partition(': ')[0]}, which no rule narrows with it"
    why = FAULTS[finding.kind].format(why=finding.why)
    return f"with half of it, {why}{advice_on(group, why) if finding.kind == 'fails' else ''}"


class _Repeated(nn.Module):
    """Calls a module with the arguments of a call that was observed."""

    def __init__(self, unit: nn.Module, call: _Call) -> None:
        super().__init__()
        self.unit = unit
        self.call = call

    def forward(self, _: Tensor) -> Any:
        """Return what the module returns."""
        args, kwargs = tree_map(_fresh, (self.call.args, self.call.kwargs))
        return self.unit(*args, **kwargs)


def _fresh(value: Any) -> Any:
    """Return an argument for another call: copied tensors, with other numbers where all rows are alike."""
    if isinstance(value, Tensor) and value.is_floating_point():
        rows = value.float().flatten(0, -2)
        if value.dim() > 1 and bool(rows.isfinite().all()) and bool((rows == rows[:1]).all()):
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
            return noise.to(value.device) * (float(rows.square().mean().sqrt()) or 1.0)
        return value.clone().float()
    if isinstance(value, Tensor):
        return value.clone()
    return None if is_cache(value) else value
