"""Nemotron-H with budgets in one checkpoint, as Star Elastic and Nemotron Elastic train them.

transformers builds the network. A budget states sizes under the names of `NemotronHConfig`, each as one
number, or as a list with one number per layer of that kind:

    hidden_size                            embedding channels; Megatron's emb_int_list has the choices
    mamba_num_heads                        Mamba heads; mamba_int_list
    n_routed_experts                       experts of a layer; moe_expert_int_list
    moe_intermediate_size                  neurons of every routed expert; mlp_int_list
    num_experts_per_tok, num_key_value_heads (with their query heads), intermediate_size,
    moe_shared_expert_intermediate_size    kept whole by Megatron; budgets of your own may state them

Every subnet keeps the first entries of each, as training ranks them. If a router has groups of experts
(`n_group`), all of them stay.

The rules are those of Megatron-LM. Its hooks compute on zero-masked inputs; with a share p of the features,
they set the eps of a norm to eps * p and multiply its output by the square root of p. That is RMSNorm over
the kept features with the original eps. A dropped expert has a logit of minus infinity and no bias, so it is
not chosen while enough others have a positive sum of score and bias. Of the Mamba heads, a prefix per
tensor-parallel shard is kept, and B and C are whole. Because the gated norm works in groups, this is one rule
with ours if every group of heads keeps the same share, so heads are kept as a prefix per group here: a
checkpoint trained with one shard per group, or with one group.

No published file is known that states the budgets in a form for programs: Megatron-LM has lists of choices as
arguments of its training, and a learned router that picks from them. `load` reads `budgets.json` beside the
`config.json`, or the argument `budgets`: name of a budget -> its sizes, for example
`{"12B": {"hidden_size": 1920, "mamba_num_heads": 32}}`. What a budget leaves out is as in the full network,
whose budget is called "full". `space.parse` takes such a name, or sizes.

All budgets are views of one copy. The heads of a Mamba mixer are several runs of rows, by each of which its
layers multiply where it is (`Supernet.packs`); only biases, norms and the kernels of convolutions are copied.
To think with one budget and answer with another, let views generate: budgets with other Mamba heads have
states of other sizes, so they run the tokens again, `view(tokens, use_cache=True)`, and budgets that differ
in experts only may go on with `switch(supernet, cache, spec, allow_approximate=True)` of
`subnetact.insertion`.

MatMamba keeps a prefix of heads, with z, x and dt sliced and B and C whole, in one group, and its residual
width stays: budgets of `mamba_num_heads` alone with `n_groups=1` are its slices. Its language models
(MatMamba-LM-130M, 370M, 790M, 1.4B) consist of Mamba-2 mixers of 64 heads, each `d_model / 32` wide, and were
trained with 64, 32, 16 and 8 of them. So their weights belong into transformers' Mamba2ForCausalLM with
`num_heads=64, head_dim=d_model // 32, n_groups=1`, whose heads
`subnetact.insert_(model, example=tokens, axes=("heads",), choices=(8, 16, 32, 64))` makes elastic. Its vision
models slice in the same way, but are no models of transformers. No checkpoint of either was in reach to try.

Source: nvidia/NVIDIA-Nemotron-Labs-3-Elastic-30B-A3B, Nemotron Elastic (arXiv 2511.16664), Star Elastic
(arXiv 2605.07182), NVIDIA/Megatron-LM (megatron/elastification); MatMamba (matmamba/mamba2.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ofa_adapters.checkpoint import parsed_config
from ofa_adapters.family import Built, Family
from ofa_adapters.layout import Layout, plain
from subnetact.errors import CheckpointError, SpecError, extra_needed
from subnetact.files.documents import StrPath
from subnetact.files.tensors import named_dtype
from subnetact.insertion.description import Description, Group, Member
from subnetact.insertion.experts import expert_groups
from subnetact.insertion.state_space import state_space_group
from subnetact.operators import Elastic, ElasticAttribute, LayerNormSlice, WeightSlice
from subnetact.space import Axis, AxisValues, Slot
from subnetact.spec import grouped, shown

BUDGETS = "budgets.json"
FULL = "full"
FIELDS = (
    "hidden_size",
    "mamba_num_heads",
    "num_key_value_heads",
    "intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
"""The fields of a budget, which are axes if the network has layers of the kind that they are about."""
OF_EXPERTS = {"pool": "n_routed_experts", "experts": "num_experts_per_tok", "ffn": "moe_intermediate_size"}
"""Axis of a group of experts -> the field of a budget."""
OF_STREAM = {
    **dict.fromkeys(("in_proj", "q_proj", "k_proj", "v_proj", "up_proj", "fc1_latent_proj"), ("in_",)),
    **dict.fromkeys(("embeddings", "out_proj", "o_proj", "down_proj", "fc2_latent_proj"), ("out",)),
    **{"lm_head": ("in_",), "norm": ("features",), "norm_f": ("features",)},
    **{"gate": ("weight.1", "hidden_dim"), "experts": ("up_proj.2", "down_proj.1", "hidden_dim")},
}
"""Name of a layer -> which parts of it are as long as the stream of channels between layers."""


@dataclass(frozen=True)
class NemotronElasticLayout(Layout):
    """For every field the groups of its layers, the numbers to choose from, and the budgets by name.

    The numbers are for every group those in the configuration, ascending.
    """

    groups: Mapping[str, tuple[Group, ...]]
    numbers: Mapping[str, tuple[tuple[int, ...], ...]]
    budgets: Mapping[str, Mapping[str, tuple[int, ...]]]

    family = "nemotron_elastic"

    def axes(self) -> list[Axis]:
        return [
            Axis(field, tuple(Slot(g.name, own) for g, own in zip(groups, self.numbers[field], strict=True)))
            for field, groups in self.groups.items()
        ]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        found: dict[str, int] = {}
        for field, groups in self.groups.items():
            for group, numbers, number in zip(groups, self.numbers[field], values[field], strict=True):
                found |= group.dimensions(int(number or numbers[0]) * group.full // numbers[-1])
        return found

    def elastic(self) -> dict[str, Elastic]:
        return Description(self.family, [g for groups in self.groups.values() for g in groups]).elastic

    def parse(self, config: Any) -> Any:
        """Return the values of the axes for the name of a budget, or for its sizes."""
        if isinstance(config, str) and config not in self.budgets:
            known = ", ".join(self.budgets)
            raise SpecError(f"nemotron_elastic: no budget {shown(config)}; choose from {known}")
        if isinstance(config, str):
            return dict(self.budgets[config])
        given = config if isinstance(config, Mapping) else {}
        return {**self.budgets[FULL], **given} if given.keys() <= self.groups.keys() and given else config

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the sizes of a budget: a number where all layers have the same one, otherwise a list."""
        return {f: own[0] if len({*own}) == 1 else list(own) for f, own in values.items()}


# -- what is sliced ----------------------------------------------------------------------------------


def _groups(network: Any) -> Iterator[tuple[str, Group]]:
    """Yield the field and the group of everything elastic in the layers, in their order."""
    config = network.config
    for i, kind in enumerate(config.layers_block_type):
        path = f"model.layers.{i}.mixer"
        if kind == "linear_attention":
            for group in state_space_group(path, network.get_submodule(path))[0]:
                yield "mamba_num_heads", group
        elif kind == "full_attention":
            pairs, width = config.num_key_value_heads, config.head_dim
            queries = config.num_attention_heads // pairs * width
            rows = {"q_proj": queries, "k_proj": width, "v_proj": width}
            members = [Member(f"{path}.{name}", "out", WeightSlice, n) for name, n in rows.items()]
            members.append(Member(f"{path}.o_proj", "in_", WeightSlice, queries))
            yield "num_key_value_heads", Group(f"{path}.heads", "heads", pairs, tuple(members))
        elif kind == "mlp":
            yield "intermediate_size", _neurons(path, config.intermediate_size)
        else:
            modules = dict(network.get_submodule(path).named_modules(prefix=path))
            for _, variants, _ in expert_groups(modules, dict.fromkeys(modules, path).get):
                if variants and (variants[0].axis != "pool" or config.n_group == 1):
                    yield OF_EXPERTS[variants[0].axis], variants[0]
            shared = config.moe_shared_expert_intermediate_size
            yield "moe_shared_expert_intermediate_size", _neurons(f"{path}.shared_experts", shared)


def _neurons(path: str, full: int) -> Group:
    ends = (Member(f"{path}.up_proj", "out", WeightSlice), Member(f"{path}.down_proj", "in_", WeightSlice))
    return Group(f"{path}.ffn", "ffn", full, ends)


def _stream(network: Any) -> Group:
    """Return the group of the embedding channels, which all layers read and add to."""
    latent = network.config.moe_latent_size is not None
    slicers: dict[str, Any] = {"in_": WeightSlice, "out": WeightSlice, "features": LayerNormSlice}
    members: list[Member] = []
    for path, module in network.named_modules():
        outer, _, name = path.rpartition(".")
        inner = (outer.endswith("mixer") and name == "norm") or (name == "experts" and latent)
        for part in () if inner or isinstance(module, nn.Identity) else OF_STREAM.get(name, ()):
            members.append(Member(path, part, slicers.get(part, ElasticAttribute)))
    return Group("stream", "stream", network.config.hidden_size, tuple(members))


def _layout(network: Any, given: Mapping[str, Any]) -> NemotronElasticLayout:
    layers = grouped(_groups(network))
    groups = {"hidden_size": (_stream(network),), **{field: tuple(own) for field, own in layers.items()}}
    full = {field: (int(getattr(network.config, field)),) * len(own) for field, own in groups.items()}
    named = {name: _budget(name, own, network.config, groups) for name, own in given.items()}
    budgets = {FULL: full, **named}
    numbers = {
        field: tuple(tuple(sorted({*own})) for own in zip(*(b[field] for b in budgets.values()), strict=True))
        for field in groups
    }
    return NemotronElasticLayout(groups, numbers, budgets)


def _budget(
    name: str, given: Any, config: Any, groups: Mapping[str, tuple[Group, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the numbers of a budget for every group of every field, if they are legal."""
    subject = f"nemotron_elastic: budget {shown(name)}"
    if name == FULL or not isinstance(given, Mapping):
        raise SpecError(
            f"{subject}: give a mapping of sizes, and a name other than {FULL!r}; got {shown(given)}"
        )
    given = {field: plain(value) for field, value in given.items()}
    full = {field: getattr(config, field) for field in FIELDS}
    pairs = given.get("num_key_value_heads", config.num_key_value_heads)
    queries = config.num_attention_heads // config.num_key_value_heads
    fixed = {field: number for field, number in full.items() if field not in groups}
    fixed["num_attention_heads"] = pairs * queries if type(pairs) is int else config.num_attention_heads
    for field in given.keys() & fixed.keys():
        if given.pop(field) != fixed[field]:
            raise SpecError(f"{subject}: {field} is {fixed[field]} here, and no axis of this network")
    found = {field: (full[field],) * len(own) for field, own in groups.items()}
    for field, value in given.items():
        if field not in groups:
            raise SpecError(f"{subject}: no size {shown(field)}; choose from {', '.join((*groups, *fixed))}")
        numbers = tuple(value) if isinstance(value, list) else (value,) * len(groups[field])
        if len(numbers) != len(groups[field]):
            raise SpecError(
                f"{subject}: {field} has {len(numbers)} numbers for {len(groups[field])} layers; give one "
                "number, or one per layer of its kind"
            )
        each = config.n_groups if field == "mamba_num_heads" else 1
        for number, group in zip(numbers, groups[field], strict=True):
            least = max(each, group.least)
            if type(number) is not int or not least <= number <= full[field] or number % each:
                steps = f" in steps of {each}, because every group of the norm keeps as many" * (each > 1)
                raise SpecError(f"{subject}: {field} is {least} to {full[field]}{steps}; got {shown(number)}")
        found[field] = numbers
    return found


# -- building and loading ----------------------------------------------------------------------------


def build(
    config: Mapping[str, Any] | None = None,
    budgets: Mapping[str, Mapping[str, Any]] | None = None,
    dtype: str = "float32",
) -> Built:
    """Build the family with transformers.

    Args:
        config: the arguments of transformers' `NemotronHConfig`, or its `to_dict()`. If None, the defaults.
            Loading a checkpoint from a directory reads them from its `config.json`.
        budgets: name of a budget -> its sizes, under the names of the configuration. Loading a checkpoint
            from a directory reads them from its `budgets.json`, if there is one. If None, there is the full
            network only.
        dtype: the dtype of the weights, an attribute name of torch.
    """
    with extra_needed("Nemotron-H is built by transformers: pip install 'subnetact[hf]'"):
        from transformers import NemotronHConfig, NemotronHForCausalLM
    kind = named_dtype(dtype, "nemotron_elastic: dtype", of_weights=True)
    try:
        settings: Any = NemotronHConfig(**dict(config or {}))
        network: Any = NemotronHForCausalLM(settings)
    except Exception as error:  # The checks of transformers raise errors of their own classes.
        raise SpecError(f"nemotron_elastic: config is no configuration of Nemotron-H: {error}") from error
    if not isinstance(budgets, Mapping | None):
        raise SpecError(f"nemotron_elastic: budgets is a mapping of names to sizes, got {shown(budgets)}")
    for module in network.to(kind).modules():
        if "e_score_correction_bias" in module._buffers:  # transformers keeps it in float32
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return _layout(network, budgets or {}).built(network.eval())


def settings(directory: StrPath) -> dict[str, Any]:
    """Return the configuration and the budgets in a directory."""
    content = parsed_config(directory)
    if (kind := content.get("model_type")) != "nemotron_h":
        raise CheckpointError(f"{directory}: config.json is of {shown(kind)}, not nemotron_h")
    if isinstance(limit := content.get("time_step_limit"), list):  # transformers writes infinity as a mapping
        content["time_step_limit"] = [math.inf if isinstance(x, Mapping) else x for x in limit]
    budgets = (Path(directory) / BUDGETS).exists()
    return {"config": content, **({"budgets": parsed_config(directory, BUDGETS)} if budgets else {})}


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which the weights of all experts of a layer are one, as in transformers 5."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for key, tensor in tensors.items():
        each = re.fullmatch(r"(.*\.experts)\.(\d{1,6})\.(up_proj|down_proj)\.weight", key)
        if each is None:
            found[key] = tensor
        else:
            experts.setdefault(f"{each[1]}.{each[3]}", {})[int(each[2])] = tensor
    for key, own in experts.items():
        ordered = [own.get(i) for i in range(len(own))]
        if None in ordered or len({t.shape for t in own.values()}) > 1:
            raise CheckpointError(f"nemotron_elastic: {key}: experts are missing, or differ in their shapes")
        found[key] = torch.stack(ordered)  # type: ignore[arg-type]
    return found


FAMILY = Family(
    build,
    spellings=((r"^backbone\.", "model."), (r"^model\.embedding\.", "model.embeddings.")),
    source="huggingface/transformers, NVIDIA/Megatron-LM",
    licence="Apache-2.0",
    recognises=lambda keys: keys.have(
        r"\.mixer\.A_log$", r"\.mixer\.norm\.weight$", r"(^|\.)norm_f\.weight$"
    ),
    ordinary="a Mamba-2 or Nemotron-H of transformers",
    checkpoints=("nvidia/NVIDIA-Nemotron-Labs-3-Elastic-30B-A3B-BF16",),
    unused=r"^mtp\.",
    settings=settings,
    convert=joined,
    packs=False,
    named=lambda constructor: {name: name for name in (FULL, *(constructor.get("budgets") or ()))},
    input_shape=(8,),
    input_dtype="int64",
)
