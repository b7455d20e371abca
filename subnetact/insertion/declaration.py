"""What a transformer declares: heads, feed-forward neurons and blocks, found without tracing.

Modules and configurations state numbers of heads and their width, and blocks that can be skipped are
`GradientCheckpointingLayer`s in a `ModuleList`; timm and torch build transformers in the same way. The model
runs on the example, while the inputs of its blocks are noted. Then rules
propose groups. A proposal is no proof: it is inserted into a copy of one block with disturbed weights, and
the narrowed block must compute what the block computes with the dropped weights at zero. This also decides
how the rows of a fused layer are packed, and which numbers a forward reads.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from subnetact.comparison import is_cache, tensors_in
from subnetact.errors import InsertError
from subnetact.insertion.analysis import TracedModel
from subnetact.insertion.description import Description, Group, Member
from subnetact.insertion.description_proof import ALIGNED, FAULTS, advice_on
from subnetact.insertion.experts import CONFIGURED, Configured, expert_groups, why_not_as_configured
from subnetact.insertion.layer_vocabulary import embedding_of, layer_stacks
from subnetact.insertion.skippable import StackWatch, skippable_blocks
from subnetact.insertion.state_space import state_group
from subnetact.operators import AttentionSlice, ElasticAttribute, LayerNormSlice, WeightSlice, vocabulary
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.skipped_layer import is_transformer_block
from subnetact.operators.vocabulary import number_of, own_numbers
from subnetact.spec import grouped
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.proof import prove
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.unused_weights import disturbed_copy, private_copy, structure_copy

STREAM = "stream"
"""The name of the group of the channels between layers, and of its axis."""
NOT_ASKED = f"its outputs are those of the stream, which is tried if axes names it: axes=({STREAM!r}, ...)"


def declared(
    model: nn.Module, example: Any, stream: bool = False
) -> tuple[list[Group], dict[str, torch.Size], dict[str, str], Observation]:
    """Return what can be elastic in a transformer, as far as the model declares it, and what was observed.

    That are groups without choices, blocks of stacks of transformers that may be skipped, with the shapes of
    their inputs, and refusals. What was observed has all other blocks that are residual, too.
    """
    observed = Observation(model, example)
    trials = _Trials(observed)
    groups: list[Group] = []
    refused: dict[str, str] = {}
    mixers = [*_state_spaces(observed), *_torch_attentions(observed)]
    inside = [*_inside_of_blocks(observed, {layer for mixer in mixers for layer in mixer.layers})]
    mixers += [proposal for proposal in inside if proposal.variants[0].axis == "heads"]
    homes = [f"{_parent(mixer.name)}." for mixer in mixers]
    others = [p for p in inside if p not in mixers and not p.layers[0].startswith(tuple(homes))]
    experts = (_Proposal(*group) for group in expert_groups(observed.modules, observed.block_of))
    for proposal in (*mixers, *others, *experts):
        if {m.module for g in groups for m in g.members}.isdisjoint(proposal.layers):
            found = trials.first(proposal)
            if isinstance(found, Group):
                groups.append(found)
            else:
                refused.setdefault(proposal.name, found)
    blocks = _blocks(observed, [m.module for g in groups for m in g.members], refused)
    if layer_stacks(model):
        channels = _stream(observed)
        if isinstance(channels, str):
            refused |= {STREAM: channels} if stream else {}
        elif stream:
            groups.append(channels)
        elif all(t.shape[-1:] != (channels.full,) for t in tensors_in(observed.calls[""].output)):
            refused |= dict.fromkeys([m.module for m in channels.members if m.part == "out"], NOT_ASKED)
    return groups, blocks, refused, observed


# -- what one forward pass shows ---------------------------------------------------------------------


@dataclass
class _Call:
    """The first call of a module, and the number of calls."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    count: int = 0


class Observation:
    """A forward pass: linear layers and torch's attentions, calls of what contains them, stacks.

    The graph is `traced`; `residual` are the blocks that it shows to be so, with the shapes of their inputs,
    and `stacks` tells how much they do.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.blocks = [b for p, m in self.modules.items() for b in _blocks_of(p, m) if b in self.modules]
        kinds = {path: traits_of(module).kind for path, module in self.modules.items()}
        self.layers = [path for path, kind in kinds.items() if kind in ("linear", "attention")]
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
        self.calls: dict[str, _Call] = {}
        self.stacks = StackWatch(modules)
        for path in {p[:i] for p in self.layers for i in (0, *(m.start() for m in re.finditer(r"\.", p)))}:
            modules[path].register_forward_hook(partial(self._note, path), with_kwargs=True)
        return copied

    def block_of(self, path: str) -> str | None:
        """Return the innermost block around a module, or None."""
        return next((p for p in around(path) if p in self.blocks and p in self.calls), None)

    def unit_of(self, paths: Sequence[str]) -> str:
        """Return the innermost block around some modules, or the called module if there is none."""
        unit = next(path for path in around(_common(paths)) if path in self.calls)
        return self.block_of(unit) or unit

    def _note(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        self.calls.setdefault(path, _Call(args, dict(kwargs), output)).count += 1


def _blocks_of(path: str, module: nn.Module) -> list[str]:
    """Return the members of a stack; torch's containers are stacks if all members are of one class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or module._parameters or module._buffers:
        return []
    alike = len(module) > 1 and len({type(child) for child in module}) == 1
    if alike or all(map(is_transformer_block, module)):
        return [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    return []


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _common(paths: Sequence[str]) -> str:
    """Return the name of the innermost module around some modules."""
    return posixpath.commonpath([_parent(path).replace(".", "/") for path in paths]).replace("/", ".")


# -- rules -------------------------------------------------------------------------------------------


@dataclass
class _Proposal:
    """One size that may be elastic: the first of its variants that passes its trial.

    Attributes:
        reason: why there is no variant, if there is none.
        layers: the linear layers that a rule has looked at.
    """

    name: str
    variants: list[Group]
    reason: str = ""
    layers: Sequence[str] = ()


def _number(observed: Observation, path: str, names: Sequence[str], inherited: bool) -> int:
    """Return the first whole number of a name, of a module itself or of the configuration around it, or 0."""
    configs = (getattr(observed.modules[home], "config", None) for home in around(path) if inherited)
    config = next((one for one in configs if one is not None), None)
    own = [*own_numbers(observed.modules[path], names).values()]
    return next(iter(own or filter(None, (number_of(config, name) for name in names))), 0)


def _state_spaces(observed: Observation) -> Iterator[_Proposal]:
    """Propose the heads, or the channels, of every mixer that keeps a state."""
    for path in observed.calls:
        if (group := state_group(path, observed.modules[path])) is not None:
            layers = [layer for layer in observed.layers if layer.startswith(f"{path}.")]
            yield _Proposal(f"{path}.heads", *group, layers)


def _stream(observed: Observation) -> Group | str:
    """Return the channels of the token embeddings of a decoder, which all layers add to, or a reason.

    Everything else stays as it is, so the scale of Gemma's embeddings is that of the full model.
    """
    config: Any = getattr(observed.model, "config", None)
    embedding: Any = embedding_of(observed.model)
    if config is None or embedding is None or config.is_encoder_decoder:
        return "the model is no decoder of transformers with token embeddings"
    full = embedding.embedding_dim
    if number_of(config.get_text_config(), "hidden_size") != full:
        return f"the token embeddings have {full} channels, and the layers others"
    path = next(path for path, module in observed.modules.items() if module is embedding)
    if observed.traced.recording is None:
        return str(observed.traced.failure)
    (group,) = observed.traced.groups([path])
    if not isinstance(group, Group):
        return group[1]
    weighted = {m.module for m in group.members if "." in m.part}  # routers, and all experts of a layer
    names = {path: vocabulary.WIDTHS if path in weighted else ("input_size",) for path in observed.modules}
    unknown = (path for path, module in observed.modules.items() if traits_of(module).kind == "unknown")
    ends = [
        Member(path, name, ElasticAttribute)
        for path in unknown
        for name in own_numbers(observed.modules[path], names[path], full)
    ]
    return Group(STREAM, STREAM, full, tuple(dict.fromkeys((*group.members, *ends))))


def _torch_attentions(observed: Observation) -> Iterator[_Proposal]:
    """Propose the heads of torch's own attentions."""
    for path in observed.calls:
        module: Any = observed.modules[path]
        if isinstance(module, nn.MultiheadAttention):
            width, out, name = int(module.head_dim), f"{path}.out_proj", f"{path}.heads"
            members = (Member(path, "out", AttentionSlice, width), Member(out, "in_", WeightSlice, width))
            variants = [Group(name, "heads", module.num_heads, members)] * (module.num_heads > 1)
            yield _Proposal(name, variants, "it has one head only", [path, out])


def _inside_of_blocks(observed: Observation, taken: Collection[str]) -> Iterator[_Proposal]:
    """Propose the heads and the feed-forward neurons that the graph shows, with the numbers that say so."""
    layers = [layer for layer in observed.traced.layers() if layer in observed.layers and layer not in taken]
    for group in observed.traced.groups(layers):
        if isinstance(group, Group):
            linear = [m for m in group.members if m.module in observed.layers]
            writers = [m.module for m in linear if m.part == "out"]
            blocks = list(dict.fromkeys(filter(None, map(observed.block_of, writers))))
            variants: list[Group] = []
            multiples = {m.multiple for m in linear}
            if max(multiples) > 1:
                variants = [*_with_heads(observed, group, writers, blocks)]
            neurons = not variants and 1 in multiples and len(blocks) == 1 and group.axis != "width"
            if neurons and _is_within(observed, group, blocks[0]):
                variants = [_with_neurons(observed, group, linear)]
            if variants:
                yield _Proposal(variants[0].name, variants, layers=[m.module for m in linear])


def _is_within(observed: Observation, group: Group, block: str) -> bool:
    """Tell whether a group lies between linear layers in a block, beside what neurons may pass."""
    inside = all(m.module.startswith(f"{block}.") for m in group.members)
    plain = all(m.module in observed.layers or m.operator is LayerNormSlice for m in group.members)
    return inside and (plain or group.axis == "ffn")


def _with_neurons(observed: Observation, group: Group, linear: Sequence[Member]) -> Group:
    """Return the group of a feed-forward network, with the numbers of neurons that its module states."""
    home = _common([m.module for m in linear])
    if home in observed.blocks:
        first = next(m.module for m in linear if m.part == "out")
        return replace(group, name=f"{first}.ffn", axis="ffn")
    numbers = own_numbers(observed.modules[home], vocabulary.NEURONS, group.full)
    end = [Member(home, name, ElasticAttribute) for name in numbers if home in observed.calls]
    return replace(
        group, name=f"{home}.ffn", axis="ffn", members=tuple(dict.fromkeys((*group.members, *end)))
    )


def around(path: str) -> list[str]:
    """Return the names of a module, of those around it, the innermost first, and at last of the model."""
    return [path, *(around(_parent(path)) if path else [])]


def _with_heads(
    observed: Observation, group: Group, writers: Sequence[str], blocks: Sequence[str]
) -> Iterator[Group]:
    """Yield a group of heads with the numbers that modules state of them, those of widths at last."""
    block = blocks[0] if blocks else ""
    path = _common([w for w in writers if observed.block_of(w) == block] if blocks else writers)
    named = ((p, "attention" in type(observed.modules[p]).__name__.lower()) for p in around(path))
    heads = ((p, _number(observed, p, vocabulary.HEADS, inherited)) for p, inherited in named)
    home = next((p for p, number in heads if number and number % group.full == 0), None)
    if home is None:
        return
    name = f"{_parent(block)}{home[len(block) :]}.heads" if len(blocks) > 1 else f"{home}.heads"
    totals = {m.multiple * group.full for m in group.members if m.module in observed.layers}
    numbers: dict[tuple[str, str], int] = {}
    places = [place for b in blocks or [block] if (place := b + home[len(block) :]) in observed.modules]
    for path, inner in (pair for p in places for pair in observed.modules[p].named_modules(prefix=p)):
        stated = {
            **{n: v for n, v in own_numbers(inner, vocabulary.HEADS).items() if v % group.full == 0},
            **{n: v for n, v in own_numbers(inner, vocabulary.ALL_HEADS).items() if v in totals},
            **own_numbers(inner, vocabulary.KEY_VALUE_HEADS, group.full),
        }
        if _number(observed, path, vocabulary.KEY_VALUE_HEADS, inherited=True) == 1:
            stated |= own_numbers(inner, vocabulary.QUERIES_PER_KEY, group.full)
        numbers |= {(path, number): value for number, value in stated.items()}
    module = observed.modules[home]
    config = {f"config.{n}": number_of(vars(module).get("config"), n) for n in vocabulary.HEADS}
    for more in (
        {},
        {n: v for n, v in own_numbers(module, vocabulary.WIDTHS).items() if v in totals},
        {n: v for n, v in config.items() if v and v % group.full == 0},
    ):
        every = numbers | {(place, number): value for place in places for number, value in more.items()}
        ends = [Member(at, n, ElasticAttribute, value // group.full) for (at, n), value in every.items()]
        yield replace(group, name=name, axis="heads", members=tuple(dict.fromkeys((*group.members, *ends))))


def _blocks(observed: Observation, elastic: Sequence[str], refused: dict[str, str]) -> dict[str, torch.Size]:
    """Return the blocks that a subnet may skip, each with the shape of its input; note why others stay."""
    found: dict[str, torch.Size] = {}
    stacks = grouped((_parent(block), block) for block in observed.blocks)
    for stack, blocks in stacks.items():
        contains = any(other.startswith(f"{stack}.") for other in stacks)
        checkpointed = all(is_transformer_block(observed.modules[b]) for b in blocks)
        transformer = checkpointed or any(m.startswith(f"{b}.") for b in blocks for m in elastic)
        if contains or not transformer or not any(b in observed.calls for b in blocks):
            continue
        keeps = "store_full_length_kv"  # An attention stores keys and values for others, as in Gemma 3n.
        storing = [b for b in blocks if any(getattr(m, keeps, False) for m in observed.modules[b].modules())]
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
        reasons: list[str] = []
        for group in proposal.variants:
            reasons.append(self._trial(group))
            if not reasons[-1]:
                return group
        return reasons[0] if reasons else proposal.reason

    def _trial(self, group: Group) -> str:
        """Return why a group is wrong, or an empty string."""
        why = ""
        for unit in around(self.observed.unit_of([member.module for member in group.members])):
            if unit in self.observed.calls:
                why = self._trial_in(unit, group)
                if FAULTS["shapes"] not in why:
                    break  # What a block returns beside its output, as probabilities, may go no further.
        return why

    def _trial_in(self, unit: str, group: Group) -> str:
        """Return why a group is wrong in a module around it, or an empty string."""
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
