"""describe and insert_: what can be elastic in an ordinary model, and how the model becomes a supernet.

Why a model is refused:

1. the model itself, which is wrapped or quantised for example: `_check_model` and `_obstacle`, here; or it
   has hooks or parametrisations: `_unseen`, here;
2. the arguments: their combination, `insert_`; an option or a pattern without a module, `describe` and
   `_patterns`; all here;
3. it is in training mode, does not run on the example, returns no floating-point tensors or nothing finite,
   or answers by what earlier calls have left in a dictionary: `_runs` and `_cases`, here;
4. it cannot be traced, and it declares nothing: `TracedModel` in `analysis.py`;
5. nothing is elastic: `_nothing`, here, with the reasons of `analysis.py`, `declaration.py`, `skippable.py`;
6. choices that are no legal sizes or name no group or stage, segments that overlap, and names or parts that
   occur twice: `description.py`;
7. a description does not fit a module: `supernet/put_operators.py`, and `check` of its operator;
8. on copies of the model, the largest subnet does not run or differs, its output is random, or a group or a
   stage fails. `describe` leaves such a one out, and refuses if nothing is left; a description that is given
   or overridden (`elastic=`) is refused: `_proved`, here, with the texts of `description_proof.py`.

With a description that is given, these are 1, the combination in 2, 3, overlapping segments, 7 and 8; with
`elastic=` and no space, all, and then 3, 7 and 8 again. By hand (`insert_(model, space, elastic)`), they are
1 without `_unseen`, the combination in 2, 7 and, if there is an example, `Supernet.check`; training mode is
no obstacle then, because only views run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from subnetact.comparison import EXACT, equal
from subnetact.device import tolerated
from subnetact.errors import InsertError, SubnetActError
from subnetact.insertion.analysis import computes_channels
from subnetact.insertion.declaration import around, declared
from subnetact.insertion.description import AXES, DepthStage, Description, Group, without_numbers
from subnetact.insertion.description_proof import Case, Proof, advice_on
from subnetact.insertion.fold import computed_tensors
from subnetact.insertion.key_value_cache import guard_caches_
from subnetact.insertion.layer_vocabulary import embedding_of, layer_stacks, vocabulary_of
from subnetact.insertion.skippable import stages_of
from subnetact.insertion.tensor_memo import forget_, tensor_memos
from subnetact.operators import Elastic
from subnetact.operators.base import Operator, template_of
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.shards import shards
from subnetact.operators.skipped_layer import RECORDING
from subnetact.operators.view_module import is_view
from subnetact.space import SubnetSpace
from subnetact.supernet.adapters import adapted, is_adapter, take_off_adapters_
from subnetact.supernet.batches import as_batch
from subnetact.supernet.failure import explained
from subnetact.supernet.forward_state import note_state_
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.proved_inputs import ProvedInputs
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.statistics import adopt_statistics_
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import private_copy, structure_copy

_log = logging.getLogger(__name__)
SHARES = (0.5, 0.75, 1.0)
"""The choices of every group and stage if none are given."""
HARMLESS = (RECORDING, "transformers.modeling_utils")
"""Homes of hooks of transformers, which note hidden states or let outputs require gradients, and no more."""
ADAPTED = ("peft.peft_model", "peft.tuners.lora.model")
"""Homes of the modules that PEFT puts around a model whose layers have adapters."""
BYTES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)  # of quantised weights
LOOSE = "the parameters {} belong to no known layer: use nn.Linear, or describe them with ElasticAttribute"
UNTRACED = "everything else"
"""The name under which a description says why the graph was not analysed, whatever `only` selects."""


def describe(
    model: nn.Module,
    example: Any,
    *,
    axes: Sequence[str] | None = None,
    choices: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    only: str | Sequence[str] = "*",
    fixed: str | Sequence[str] = (),
    each_block: bool = False,
    proof: bool = True,
) -> Description:
    """Find out what can be elastic in a model. The model is not changed.

    Args:
        model: an ordinary model, in evaluation mode.
        example: a batch for the model: a tensor, a tuple of arguments or a dictionary of named arguments. Of
            a list of such batches (a short one, a long one, one with padding), what the first one shows
            becomes elastic, and all are proved.
        axes: the kinds of sizes to look for: "depth" (skippable blocks), "width" (channels that one layer
            computes, inside a block for example), "stream" (channels that several layers share, because
            their outputs are added or concatenated), "ffn" (neurons between two linear layers, and those of
            all experts of a layer), "heads" (heads of an attention or a state space), "pool" (the experts
            that a layer has, at least as many as the model visits per token) and "experts" (those that it
            visits per token). If None, all of them, but not the stream of a language model, which only
            training makes useful.
        choices: axis, or name or pattern of groups and stages -> choices: shares of the full size if one of
            them is a float, otherwise sizes. A list is meant for all axes. What is not named has the shares
            0.5, 0.75 and 1.0; "experts" has every number from 1.
        only: a pattern of names of modules with `*`, `?` and `[...]`, or several, "layer[34].*" for example.
            A pattern means everything inside a module, too. Only the outputs of such modules become elastic,
            and only such blocks can be skipped.
        fixed: patterns of modules that stay as they are.
        each_block: whether every skippable block has a slot of its own, with the choices 0 and 1. If False,
            a slot per stage says how many blocks are kept, the most important ones.
        proof: whether to try the description on copies of the model. What fails is left out and listed in
            `refused`.

    Returns:
        The description. `refused` has what cannot be elastic, with the reasons. The space of a language
        model of Hugging Face reads and writes subnets as `per_layer_config` (`parse` and `format`).

    Raises:
        InsertError: the example does not run, the model cannot be traced, is in training mode, already has
            operators, is wrapped or quantised or has hooks, a choice is not legal, a pattern matches nothing,
            or nothing can be elastic.

    Example:
        >>> print(subnetact.describe(torchvision.models.resnet18().eval(), torch.randn(1, 3, 224, 224)))
    """
    named: Any = AXES if axes is None else (axes,) if isinstance(axes, str) else axes
    unknown = [axis for axis in named if axis not in AXES] if isinstance(named, Collection) else named
    if unknown or not named:
        raise InsertError(f"axes: {unknown or 'none'} is unknown; choose from {', '.join(AXES)}")
    stream = axes is not None and "stream" in named
    axes, chosen = tuple(named), cast(Any, choices)
    if chosen is not None and not isinstance(chosen, Mapping | Sequence):
        raise InsertError(f"choices: {choices!r} is neither a list nor a mapping from axes or names to lists")
    model, examples = _specimen(model), _examples(example)
    patterns = _patterns(model, "only", only), _patterns(model, "fixed", fixed)
    cases = _cases(model, examples)
    candidates = _found(model, examples[0], axes, each_block, stream)
    kept, stages, refused = _selected(model, candidates, axes, *patterns)
    words = vocabulary_of(model, [*kept, *stages])
    description = Description(type(model).__name__, kept, stages, refused, vocabulary=words)
    if not description.slots:
        raise InsertError(_nothing(model, description))
    routed = [group for group in description.groups.values() if group.axis == "experts"]
    asked: list[tuple[str, Any]] = [("*", SHARES), *((g.name, range(g.least, g.full + 1)) for g in routed)]
    by_name = chosen.items() if isinstance(chosen, Mapping) else [("*", chosen)]
    asked += [] if chosen is None else sorted(by_name, key=lambda pair: pair[0] not in AXES)
    for pattern, wanted in asked:  # Names count more than axes, and later ones most.
        description = description.with_choices(pattern, wanted)
    return _proved(model, description, cases) if proof else description


def insert_(
    model: nn.Module,
    description: Description | SubnetSpace | None = None,
    elastic: Mapping[str, Elastic] | None = None,
    *,
    example: Any = None,
    **options: Any,
) -> Supernet:
    """Make a model elastic in place and return the supernet around it.

    `insert_(model, example=x)` finds out what can be elastic; `insert_(model, description, example=x)` takes
    a `Description`, which may have been edited or read. Both are tried on copies of the model first: the
    largest subnet equals the model, and subnets equal the model in which everything that they do not use is
    zero and skipped blocks are identities; norms, and layers that normalise their weights, see the features
    of the subnet only. What cannot be compared is refused. `insert_(model, space, elastic)` takes a space and
    an elastic description written by hand, which is tried if there is an example.

    Every BatchNorm with running statistics becomes a SubnetNorm, even if it is not described, because a
    subnet changes the values that flow through all of them. Quantised weights are refused; what a quantiser
    has left beside weights that are numbers, in the configuration for example, is dropped.

    Args:
        model: an ordinary model. Its modules are replaced; its parameters keep their names.
        description: a description, or a search space. If None, `describe` finds one.
        elastic: name of a module -> operator, with the dimension of the space that each of its parts
            follows. What consumes a narrowed output is named as well: the BatchNorm after a convolution
            (`channels=`), and the next layer (`in_=`). Without a space, the entries replace what `describe`
            finds.
        example: a batch for the model: a tensor, a tuple of arguments or a dictionary of named arguments. Of
            a list of such batches (a short one, a long one, one with padding), what the first one shows
            becomes elastic, and all are proved.
        options: the further arguments of `describe`.

    Returns:
        The supernet. Its `report` says what became elastic and which modules with weights stayed fixed. The
        largest subnet is calibrated: its BatchNorm statistics are those of the model.

    Raises:
        InsertError: a module or a dimension does not exist, a module cannot be made elastic, a size of the
            largest subnet exceeds it, the proof fails, or for the reasons that `describe` names. The model is
            then unchanged.

    Example:
        >>> supernet = insert_(torchvision.models.resnet18().eval(), example=torch.randn(1, 3, 224, 224))
        >>> print(supernet.report)
    """
    examples = [] if example is None else _examples(example)
    if isinstance(description, SubnetSpace) and elastic is not None and not options:
        _check_model(model)
        supernet = _inserted(model, description, elastic)
        try:
            for x in examples:
                report = supernet.check(x)
                if report.not_compared:
                    _log.warning("insert_: %s", report)
        except SubnetActError:
            supernet.remove()  # This gives the model back.
            raise
        return guard_caches_(supernet, *examples[:1])
    if "proof" in options:
        raise InsertError("proof: insert_ tries every description; give the option to describe")
    proved = description is None and elastic is None
    if description is None and example is not None:
        description = describe(model, example, **options)
        if elastic is not None:
            description = description.override(elastic)
    elif not isinstance(description, Description) or example is None or elastic is not None or options:
        raise InsertError(
            "insert_ takes a model and an example (insert_(model, example=x)), also with a description "
            "(insert_(model, description, example=x)), or a model, a space and an elastic description "
            "(insert_(model, space, elastic))"
        )
    if not proved:
        specimen = _specimen(model)
        description = _proved(specimen, description, _cases(specimen, examples), leave_out=False)
    supernet = _inserted(model, description.space, description.elastic)
    proved_inputs = cast(ProvedInputs, description.proved)
    supernet.description, supernet.proved = description, proved_inputs
    note_state_(supernet, proved_inputs.state)
    forget_((adapted(supernet.network.get_submodule(path)), name) for path, name in proved_inputs.memos)
    adopt_statistics_(supernet)
    return guard_caches_(supernet, examples[0])


def _specimen(model: nn.Module) -> nn.Module:
    """Return a copy of the structure of a model, without adapters, for all trials; refuse others."""
    _check_model(model)
    copied = structure_copy(model)
    _refuse(copied, _unseen)
    take_off_adapters_(copied)
    return copied


def _inserted(model: nn.Module, space: SubnetSpace, elastic: Mapping[str, Elastic]) -> Supernet:
    """Put operators into a model, unless its own `train` would not freeze then what it freezes now."""
    frozen = _frozen(model)
    supernet = put_operators_(model, space, elastic)
    if frozen and (differing := sorted(frozen ^ _frozen(supernet.network))):
        raise InsertError(
            f"{_called(supernet.remove(), differing[0])} stays in evaluation mode in model.train(), but not "
            "with operators; let train() find modules by isinstance or by name"
        )
    for holder in (model, getattr(model, "config", None)):
        # Its weights are numbers; what a quantiser has left would keep others from saving and opening it.
        for name in ("hf_quantizer", "quantization_method", "quantization_config"):
            getattr(holder, "__dict__", {}).pop(name, None)
    return supernet


def _frozen(model: nn.Module) -> set[str]:
    """Return what a `train` of its own leaves in evaluation mode, on a copy without its numbers."""
    with tolerated():  # A model may refuse to be trained.
        if any(type(template_of(module)).train is not nn.Module.train for module in model.modules()):
            copied = private_copy(model, *[lambda tensor: tensor.to("meta")] * 2)
            copied.train()
            return {path for path, module in copied.named_modules() if not module.training}
    return set()


# -- finding ----------------------------------------------------------------------------------------

_Found = tuple[list[Group], list[DepthStage], dict[str, str]]


def _found(model: nn.Module, example: Any, axes: Sequence[str], each_block: bool, stream: bool) -> _Found:
    """Return groups and stages without choices, and what is refused; `stream`: also that of a decoder."""
    depth = "depth" in axes
    groups, blocks, refused, observed = declared(model, example, stream)
    traced = observed.traced
    if traced.failure is not None:
        if not groups and not blocks:
            raise traced.failure
        refused[UNTRACED] = str(traced.failure)
    else:
        known = {(m.module, m.part) for group in groups for m in group.members}
        operators = {m.module: m.operator for group in groups for m in group.members}
        reached = traced.layers()
        unseen = [n for n, m in model.named_modules() if computes_channels(m) and n not in reached]
        alike = {without_numbers(name): name for name in unseen}
        layers = [n for n in reached if (n, "out") not in known] if axes != ("depth",) else []
        for item in traced.groups(layers):
            if not isinstance(item, Group):
                refused.setdefault(*item)
            elif not known.isdisjoint((m.module, m.part) for m in item.members):
                continue  # a declared group has its members
            elif not (stream and item.axis == "stream") and _outside_of_layers(model, item):
                continue
            elif any(operators.get(m.module, m.operator) is not m.operator for m in item.members):
                refused[item.name] = "a module in it already has another operator"
            elif same := [n for m in item.members if (n := without_numbers(m.module)) in alike]:
                refused[item.name] = f"{alike[same[0]]} may read the same, and does not run on the example"
            else:
                groups.append(item)
        inside = {member.module for group in groups for member in group.members}
        whole = [name for name in unseen if name not in inside and name not in refused]
        refused |= dict.fromkeys(whole, "it does not run on the example, so it stays whole")
        if depth:
            stacks = inside | {block.rpartition(".")[0] for block in blocks}
            blocks |= {
                path: shape
                for path, shape in observed.residual.items()
                if path.rpartition(".")[0] not in stacks
                and not any(inner.startswith(f"{path}.") for inner in observed.residual)
            }
    stages: list[DepthStage] = []
    if depth and blocks:
        holders = Counter(id(child) for module in model.modules() for child in module._modules.values())
        twice = (path for path in blocks if holders[id(model.get_submodule(path))] > 1)
        broken = dict.fromkeys(twice, "it has two names; give it one") | observed.stacks.broken(blocks)
        blocks = {path: shape for path, shape in blocks.items() if path not in broken}
        refused |= {f"{path}.depth": why for path, why in broken.items()}
        alone = [DepthStage(f"{block}.depth", (block,)) for block in blocks]
        stages = alone if each_block else stages_of(blocks, observed.stacks.influence)
    elastic = {group.name for group in groups}  # Another rule, or the graph, may have found what one refused.
    return groups, stages, {name: why for name, why in refused.items() if name not in elastic}


def _outside_of_layers(model: nn.Module, group: Group) -> bool:
    """Tell whether a group of a language model is in more than its layers: no configuration describes it."""
    embedding = embedding_of(model)
    if embedding is None:
        return False
    modules, stacks = [m.module for m in group.members], layer_stacks(model)
    within = [any(f"{module}.".startswith(f"{stack}.") for stack in stacks) for module in modules]
    if stacks:
        return not all(within) or group.axis == "width"
    return any(model.get_submodule(m) is embedding for m in modules)


def _selected(
    model: nn.Module, found: _Found, axes: Sequence[str], only: list[str], fixed: list[str]
) -> _Found:
    """Return what the axes and the patterns leave."""
    groups, stages, refused = found

    def left(changed: Sequence[str], touched: Iterable[str]) -> bool:
        return all(_means(only, n) for n in changed) and not any(_means(fixed, n) for n in touched)

    def skippable(block: str) -> bool:
        return left([block], (p for p, _ in model.named_modules() if f"{p}.".startswith(f"{block}.")))

    def narrows(group: Group) -> bool:
        inside = [m.module for m in group.members]
        outputs = [m.module for m in group.members if m.part == "out"] or inside
        return group.axis in axes and left(outputs, inside)

    shorter = [replace(stage, blocks=tuple(filter(skippable, stage.blocks))) for stage in stages]
    said = {name: why for name, why in refused.items() if name == UNTRACED or left([name], [name])}
    return list(filter(narrows, groups)), [stage for stage in shorter if stage.blocks], said


def _means(patterns: Sequence[str], name: str) -> bool:
    """Tell whether one of the patterns means a module, or a module around it."""
    return any(fnmatchcase(path, pattern) for path in around(name)[:-1] for pattern in patterns)


def _nothing(model: nn.Module, description: Description) -> str:
    reasons = "; ".join(description.refusals()[:5])
    unknown = {path for path, module in model.named_modules() if traits_of(module).kind == "unknown"}
    loose = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in unknown]
    if loose:
        reasons += "; " * bool(reasons) + LOOSE.format(", ".join(loose[:5]))
    return f"nothing in {type(model).__name__} can be elastic; {reasons or 'no layer or block is in reach'}"


# -- proof ------------------------------------------------------------------------------------------


def _proved(
    model: nn.Module, description: Description, cases: list[Case], leave_out: bool = True
) -> Description:
    """Return the description without what fails its proof; otherwise refuse the description."""
    while True:
        proof = Proof(model, description, cases)
        failure = proof.failure()
        if failure is None:
            description.proved = proof.proved
            return description
        wrong, culprits = failure
        culprits = {n: why + advice_on(description.slots.get(n), why) for n, why in culprits.items()}
        if not culprits:
            raise InsertError(f"{type(model).__name__}: {wrong}")
        if not leave_out:
            raise InsertError("; ".join(f"{name}: {why}" for name, why in culprits.items()))
        for name, why in culprits.items():
            description = description.without(name, why)
        if not description.slots:
            raise InsertError(_nothing(model, description))


def _examples(example: Any) -> list[Any]:
    """Return the batches of a list of examples, or the one batch that is given."""
    if isinstance(example, list) and not example:
        raise InsertError("example: the list is empty; give a batch for the model, or several in a list")
    return [as_batch(x) for x in (example if isinstance(example, list) else [example])]


# -- bad input --------------------------------------------------------------------------------------


def _runs(model: nn.Module, example: Any) -> list[Tensor]:
    _refuse(model, lambda m: "is in training mode; call model.eval() first" if m.training else None)
    kind = type(model).__name__
    advice = "give what the model takes: a tensor, a tuple of arguments or a dictionary of named arguments"
    with explained(InsertError, kind, model, example, advice):
        found = outputs_of(model, example)
    numbers = [t for t in found if t.is_floating_point() or t.is_complex()]
    if not numbers:
        raise InsertError(
            f"{kind} returns no floating-point tensors that can be compared; "
            "return some, in tuples, lists or dictionaries"
        )
    if not any(bool(t.isfinite().any()) for t in numbers):
        what, search = "nothing but NaN and infinity", "look for them in the example and in the weights"
        if not any(t.numel() for t in found):
            what, search = "empty outputs", "give an example in which it finds something"
        raise InsertError(f"{kind} returns {what}, with which no subnet can be compared; {search}")
    return found


def _cases(model: nn.Module, examples: list[Any]) -> list[Case]:
    """Return the examples with what the model returns, which from then on keeps no tensors in dictionaries.

    A model is refused whose answers depend on what its constructor or earlier calls left there.
    """
    cases = [(x, _runs(model, x)) for x in examples]
    memos = tensor_memos(model)
    kept = [outputs_of(model, x) for x in examples if memos]
    forget_((module, name) for _, module, name in memos)
    for x, expected in zip(examples, kept, strict=False):
        alike = False
        with tolerated():  # It may need what it does not compute.
            alike = equal(outputs_of(model, x), expected, EXACT)
        if not alike:
            path, _, name = memos[0]
            raise InsertError(
                f"{_called(model, path)} keeps tensors between calls, in {name!r}, and answers otherwise or "
                "not at all without them; what a subnet answers must not depend on earlier calls: compute "
                "them in every forward, or register them as buffers"
            )
    return cases


def _patterns(model: nn.Module, what: str, given: str | Sequence[str]) -> list[str]:
    patterns: Any = [given] if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise InsertError(f"{what}: {given!r} is neither a pattern of names of modules nor a list of them")
    names = [name for name, _ in model.named_modules()]
    first = ", ".join(names[1:8])
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InsertError(f"{what}: no module matches {pattern!r}; the model has {first}, ...")
    return list[str](patterns)


def _check_model(model: nn.Module) -> None:
    """Refuse models that cannot become supernets, before anything is done."""
    if not isinstance(model, nn.Module):
        raise InsertError(f"expected a model, got {type(model).__name__}; give an nn.Module")
    if isinstance(model, Supernet) or any(isinstance(m, Operator) or is_view(m) for m in model.modules()):
        raise InsertError(
            f"{type(model).__name__} already has operators; give the ordinary model (supernet.remove()), and "
            "describe everything in one call"
        )
    if "cache_writer" in vars(model):
        raise InsertError(
            f"{type(model).__name__} was extracted, and notes whose weights fill its key-value caches; give "
            "subnetact.insertion.as_pretrained(extracted, example), which is an ordinary model"
        )
    _refuse(model, _obstacle)


def _refuse(model: nn.Module, reason_of: Callable[[nn.Module], str | None]) -> None:
    for path, module in model.named_modules():
        if (reason := reason_of(module)) is not None:
            raise InsertError(f"{_called(model, path)} {reason}")


def _called(model: nn.Module, path: str) -> str:
    return f"{type(model).__name__}.{path}".rstrip(".")


def _obstacle(module: nn.Module) -> str | None:
    """Return why no subnet can be made of a module itself."""
    wrapped = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch._dynamo.OptimizedModule)
    if isinstance(module, wrapped):
        inner = "_orig_mod" if isinstance(module, wrapped[2]) else "module"
        return (
            f"is wrapped in {type(module).__name__}; give the model inside, .{inner}, and wrap the supernet "
            "instead"
        )
    if shards(module):
        return "is sharded; call insert_ first, then fully_shard (FSDP2) on its layers and supernet.network"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a scripted module; give the model that it was made from"
    own = ("torchao." in type(t).__module__ or t.dtype in BYTES for t in module.parameters(False))
    quantised = "quantized" in type(module).__module__ or hasattr(module, "qweight") or any(own)
    if quantised or any(t.is_quantized for t in module.buffers(False)):
        return "is quantised; dequantise it first (model.dequantize()), and quantise subnets afterwards"
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            return (
                f"cannot have subnets: its attribute {name!r} holds a method bound to the module, which "
                "would run the full network from inside of them; define it in the class instead"
            )
    if module._compiled_call_impl is not None:
        return (
            "is compiled in place, by compile(); give a model that is not compiled, and compile its subnets "
            "instead: Engine(..., backend='inductor')"
        )
    if any(nn.parameter.is_lazy(t) for t in (*module.parameters(False), *module.buffers(False))):
        return "has no weights yet; run the model once, so that its sizes are known"
    return None


def _unseen(module: nn.Module) -> str | None:
    """Return why it cannot be found out what a module does; who describes it by hand knows that."""
    home = type(module).__module__
    if home.startswith("peft.") and home not in ADAPTED and not is_adapter(module):
        return (
            "is of PEFT: merge its adapters first (merge_and_unload), load them onto supernet.network, or "
            "put them on supernet.extract(spec)"
        )
    computed = ", ".join(name for name, _ in computed_tensors(module))
    if computed:
        return (
            f"computes its {computed} from other parameters in every call (a weight or spectral norm, or "
            "another parametrisation); make that permanent first, with subnetact.insertion.fold_(model)"
        )
    held = (vars(module)[f"_{when}_hooks"] for when in ("forward", "forward_pre", "backward", "backward_pre"))
    if any(getattr(hook, "__module__", "") not in HARMLESS for hooks in held for hook in hooks.values()):
        undo = "with remove() of their handles, and register them after insert_"
        return f"has hooks, which subnets would run as well; remove them first, {undo}"
    return None
