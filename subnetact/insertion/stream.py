"""The stream of a decoder: the channels of its token embeddings, which all layers read and add to.

There is one group for the whole model. Its members are the columns of the embeddings, the inputs of all
layers that read the stream, the outputs of all that write it, and the norms over it, which see the channels
of the subnet only. Everything else stays as it is, so the scale of Gemma's embeddings is that of the full
model; a configuration with fewer channels would have another scale.

A layer belongs to the stream if one of its sides is as long as the stream and lies not inside of an
attention, a state space or a feed-forward network. So does an axis of the weights of experts that is as long,
and is neither that of the experts nor that of their neurons, which other groups hold. No block can be tried
alone, so the proof of the whole description is what shows that nothing else reads the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from subnetact.errors import InsertError
from subnetact.insertion.description import Group, Member
from subnetact.insertion.layer_vocabulary import embedding_of
from subnetact.operators import ElasticAttribute, LayerNormSlice, WeightSlice
from subnetact.operators.layer_traits import norm_features, traits_of
from subnetact.operators.vocabulary import WIDTHS, number_of, own_numbers

STREAM = "stream"
"""The name of the group, and of its axis."""


def stream_group(
    model: nn.Module, inner: Collection[tuple[str, str]], mixers: Collection[str]
) -> Group | str:
    """Return the group of the stream, or why there is none.

    `inner` are the parts of layers that lie inside of a mixer or a feed-forward network, and `mixers` the
    modules whose own parameters and norms do.
    """
    config: Any = getattr(model, "config", None)
    embedding: Any = embedding_of(model)
    if config is None or embedding is None or config.is_encoder_decoder:
        return "the model is no decoder of transformers with token embeddings"
    full = embedding.embedding_dim
    if number_of(config.get_text_config(), "hidden_size") != full:
        return f"the token embeddings have {full} channels, and the layers others"
    members: list[Member] = []
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(f"{mixer}.") for mixer in mixers)
        parts = [m for m in _members(path, module, full, inside) if (path, m.part) not in inner]
        for member in parts:
            if member.operator is WeightSlice and traits_of(module).kind == "convolution":
                return f"{path} is a convolution over the stream, which no rule knows"
            try:
                member.operator(module, path, {member.part: 0}).check()
            except InsertError as error:
                return str(error)
        axes = Counter(m.part.partition(".")[0] for m in parts if "." in m.part)
        if twice := [name for name, count in axes.items() if count > 1]:
            return f"{path}.{twice[0]} has two axes of {full} entries, and which one is the stream is unknown"
        members += parts
    return Group(STREAM, STREAM, full, tuple(members))


def _members(path: str, module: nn.Module, full: int, inside: bool) -> Iterator[Member]:
    """Yield the parts of a module that are as long as the stream."""
    traits = traits_of(module)
    parts = {part: getattr(module, attribute) for part, attribute in traits.sizes.items()}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if traits.mixes and traits.sizes:
        held = ("out",) if traits.kind == "embedding" else ("in_", "out")
        yield from (Member(path, part, WeightSlice) for part in held if parts[part] == full)
    elif inside:
        return
    elif norm_features(module) == full:
        yield Member(path, "features", LayerNormSlice)
    elif traits.kind == "unknown" and not norm_features(module):
        # own parameters, of a router or of all experts, and numbers of what is around them
        axes = [f"{name}.{i}" for name, shape in shapes.items() for i, n in enumerate(shape) if n == full]
        yield from (Member(path, axis, ElasticAttribute) for axis in axes)
        numbers = WIDTHS if axes else ("input_size",)
        yield from (Member(path, n, ElasticAttribute) for n in own_numbers(module, numbers, full))
