"""The registry of families: their names, loading a checkpoint, and recognising its family."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ofa_adapters.checkpoint import NAMES_SHOWN, match, parsed_config, read, require_finite, some, unwrap
from ofa_adapters.family import Built, Family, Keys, Shapes
from ofa_adapters.features import Features
from ofa_adapters.layout import choices, plain
from subnetact.errors import CheckpointError, SpecError
from subnetact.insertion.key_value_cache import guard_caches_
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec
from subnetact.supernet.card import Card
from subnetact.supernet.norm_table import NormRow
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.statistics import batch_norms, statistics_of
from subnetact.supernet.supernet import Supernet, as_supernet

_MODULES = (
    "ofa_resnet50",
    "ofa_mbv3",
    "ofa_proxyless",
    "compofa_mbv3",
    "autoformer",
    "dynabert",
    "attentivenas",
    "slimmable_resnet50",
    "us_mobilenet_v2",
    "hydravit",
)
_LANGUAGE_MODELS = ("gemma3n", "nemotron_elastic")
ALL = (*_MODULES, *_LANGUAGE_MODELS)
LARGEST_ARGUMENT = 2**22
"""The largest whole number in constructor arguments, such as a number of classes or of tokens."""


def families() -> tuple[str, ...]:
    """Return the names of all families that `load` can build with torch alone."""
    return _MODULES


def language_models() -> tuple[str, ...]:
    """Return the names of all families of language models, which `load` builds with transformers."""
    return _LANGUAGE_MODELS


def family_of(name: str) -> Family:
    """Return the description of one of all families."""
    if name not in ALL:
        raise SpecError(f"unknown family {name!r}; choose from {', '.join(ALL)}")
    return import_module(f"ofa_adapters.networks.{name}").FAMILY  # type: ignore[no-any-return]


def identify(tensors: Mapping[str, Any]) -> str | None:
    """Return the family of a state_dict, judged by its names alone.

    Args:
        tensors: a state_dict with upstream's names; only the names are read.

    Returns:
        The name of the family. None if the names match no family, or if an ordinary model has the same
        names, which is so for hydravit (any vision transformer of timm) and dynabert (any BERT).
    """
    found = recognised(tensors)
    return None if found is None or family_of(found).ordinary else found


def recognised(tensors: Mapping[str, Any]) -> str | None:
    """Return the family whose names a state_dict has, also if an ordinary model has the same ones."""
    keys = Keys(key.removeprefix("module.") for key in tensors)
    return next((name for name in ALL if family_of(name).recognises(keys)), None)


def load(
    family: str,
    checkpoint: str | PathLike[str] | Mapping[str, Any] | None = None,
    *,
    allow_nonfinite: bool = False,
    ignore: str | Sequence[str] = (),
    **constructor: Any,
) -> Supernet:
    """Build the supernet of a family and fill it with a checkpoint.

    Args:
        family: one of `families()` or `language_models()`.
        checkpoint: a path (`.pth`, `.pt`, `.safetensors`, or a directory that `transformers` saved) or a
            state_dict with upstream's names. If None, the weights are random. Files are read without running
            code from them. A state_dict may be inside `state_dict` or `model`, or under any name if it is the
            only one.
        allow_nonfinite: whether weights of the checkpoint may be NaN or infinite.
        ignore: names of tensors in the checkpoint that are left out, or patterns such as "ema.*"; or one.
        constructor: upstream's constructor arguments, which `ofa_adapters.networks` and `build` in the
            family's module explain. Arguments that are not given have the values that the checkpoint's
            `config.json` states or its tensors show, such as the number of classes and the width, or else
            the family's defaults.

    Returns:
        The supernet, in evaluation mode, on the CPU.

    Raises:
        CheckpointError: the file is unreadable, its tensors are not exactly those of the family, or weights
            are NaN or infinite.
        SpecError: the family is unknown, has no such constructor argument, or cannot take its value.
        MissingExtra: the family is a language model, and transformers (the extra `hf`) is not installed.

    Example:
        >>> supernet = load("ofa_resnet50", "ofa_resnet50_d0-1-2_e0.2-0.25-0.35_w0.65-0.8-1.0")
        >>> logits = supernet(images, subnet=supernet.space.smallest())
    """
    found = family_of(family)
    known = inspect.signature(found.build).parameters
    extra = sorted(set(constructor) - set(known))
    if extra:
        raise SpecError(f"{family} has no constructor argument {', '.join(extra)}; it has {', '.join(known)}")
    subject, tensors = family, None
    if isinstance(checkpoint, str | PathLike):
        subject = f"{family}: {checkpoint}"
        tensors = read(checkpoint)
        if Path(checkpoint).is_dir():
            stated = (found.settings or parsed_config)(checkpoint)
            constructor = {**{k: v for k, v in stated.items() if k in known}, **constructor}
    elif checkpoint is not None:
        subject = f"{family}: state_dict"
        tensors = unwrap(checkpoint, subject)
    if tensors is None:
        network, space, elastic = _built(family, found, constructor)
    else:
        left_out = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        kept = {k: t for k, t in tensors.items() if not any(k == n or fnmatchcase(k, n) for n in left_out)}
        (network, space, elastic), constructor, weights = fitted(family, subject, kept, constructor)
        if not allow_nonfinite:
            require_finite(subject, weights)
        network.load_state_dict(weights, strict=False)  # Those that are tied to others may be missing.
    supernet = put_operators_(network, space, elastic).eval()
    supernet.origin = {"name": family, "constructor": constructor}
    if not found.packs:
        supernet.packs = False
    named = found.named(constructor).items()
    supernet.card = Card({name: supernet.space.parse(config) for name, config in named})
    for norm in batch_norms(supernet.network).values():
        norm.rule = found.calibration
    if tensors is not None and found.listed_statistics:
        rows = {spec: NormRow.of(statistics_of(supernet, spec)) for spec in supernet.space.enumerate()}
        supernet.norms.update(rows)
    return guard_caches_(supernet)


def upstream_state_dict(supernet: Supernet) -> dict[str, Tensor]:
    """Return the weights of a supernet under upstream's names, for upstream's own code: what `load` reads.

    It takes a supernet that was trained here, or loaded from a bundle. BatchNorms have the statistics that
    all subnets share; where a checkpoint lists statistics per width, those of calibrated subnets are listed.

    Args:
        supernet: what `load` returned, or `subnetact.from_pretrained` for a bundle of a family.

    Returns:
        Upstream's name -> tensor, on the supernet's own storage, as `state_dict` returns them. Language
        models have the names of transformers.

    Raises:
        SpecError: the supernet is of no family.

    Example:
        >>> supernet = load("ofa_mbv3", "ofa_mbv3_d234_e346_k357_w1.0")
        >>> torch.save({"state_dict": upstream_state_dict(supernet)}, "finetuned.pth")
    """
    origin = as_supernet(supernet).origin
    if origin is None or origin["name"] not in ALL:
        raise SpecError(
            f"upstream_state_dict: a supernet of one of {', '.join(ALL)} is needed, this one is of "
            f"{supernet.space.name}; supernet.save_pretrained(folder) writes any supernet for its own library"
        )
    found = family_of(origin["name"])
    state: dict[str, Tensor] = dict(supernet.state_dict())
    norms = batch_norms(supernet.network)
    for spec in supernet.space.enumerate() if found.listed_statistics else ():
        row, sizes = supernet.norms.get(spec), supernet.space.resolve(spec)
        for path, pair in row.pairs().items() if row is not None else ():
            names = norms[path].statistics_names(sizes)
            state |= {f"{path}.{name}": tensor for name, tensor in zip(names, pair, strict=True)}
    upstream = found.upstream(origin["constructor"])
    return found.completed({upstream(name): tensor for name, tensor in state.items()})


def fitted(
    family: str, subject: str, tensors: Mapping[str, Tensor], given: Mapping[str, Any]
) -> tuple[Built, dict[str, Any], dict[str, Tensor]]:
    """Build a family for a checkpoint; return it, its constructor arguments, and the tensors by its names.

    Raises:
        CheckpointError: the tensors are not those of the network.
        SpecError: the family cannot take the value of a constructor argument.
    """
    found = family_of(family)
    defaults = {name: plain(a.default) for name, a in inspect.signature(found.build).parameters.items()}
    tensors = found.convert(tensors)
    bare = {key.removeprefix("module."): tensor.shape for key, tensor in tensors.items()}
    shapes = Shapes({**bare, **{found.rename(key): shape for key, shape in bare.items()}})
    shown: dict[str, Any] = {}
    for name, rule in found.shown.items():
        with suppress(ValueError, ArithmeticError):  # The tensors that it is read from are missing.
            shown[name] = rule(shapes, given)
    largest = {n for n, v in shown.items() if isinstance(defaults[n], list) and not isinstance(v, list)}
    needed = {n: v for n, v in shown.items() if v not in (None, defaults[n]) and n not in largest}
    constructor = {**needed, **given}
    built = _built(family, found, constructor)
    weights, wrong = match(found, constructor, built[0].state_dict(), tensors)
    if wrong:
        used = {name: plain({**defaults, **constructor}[name]) for name in shown}
        biggest = {name: choices(used[name])[-1] for name in largest}
        other = {n: v for n, v in shown.items() if v not in (None, {**used, **biggest}[n])}
        better = {**constructor, **{n: [v] if n in largest else v for n, v in other.items()}}
        with suppress(SpecError), torch.device("meta"):
            _, left = match(found, better, _built(family, found, better)[0].state_dict(), tensors)
            if sum(map(len, left.values())) >= sum(map(len, wrong.values())):
                other = {}
        lines = [
            f"{n}={v!r}{' at the largest' * (n in largest)} (it was {used[n]!r})" for n, v in other.items()
        ]
        hint = _hint(recognised(tensors), family, lines, wrong)
        problems = "; ".join(f"{len(names)} {what}: {some(names)}" for what, names in wrong.items())
        raise CheckpointError(f"{subject} does not fit: {hint}. It has {problems}")
    return built, constructor, weights


def _built(family: str, found: Family, constructor: Mapping[str, Any]) -> Built:
    for name, value in constructor.items():
        whole, counts = type(plain(value)) is int, name in ("n_classes", "num_classes", "num_labels")
        if (counts and not (whole and value >= 1)) or (whole and value > LARGEST_ARGUMENT):
            raise SpecError(
                f"{family}: {name} is {value!r:.60}; give a whole number from 1 to {LARGEST_ARGUMENT}"
            )
    try:
        return found.build(**constructor)
    except SpecError:
        raise
    except (TypeError, ValueError, OverflowError, ArithmeticError, LookupError, AttributeError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in constructor.items())
        raise SpecError(f"{family}: cannot be built with {given[:200]} ({error})") from error


def _hint(looks_like: str | None, family: str, other: list[str], wrong: Mapping[str, list[str]]) -> str:
    """Return what to do about a checkpoint that does not fit; `other` are arguments that its tensors show."""
    if other and looks_like in (None, family):
        return f"give the constructor arguments that its tensors show: {', '.join(other)}"
    if looks_like is None:
        return f"it looks like no upstream checkpoint of {', '.join(ALL)}; check the family"
    if looks_like != family:
        ordinary = family_of(looks_like).ordinary
        if not ordinary:
            return f"it looks like {looks_like}: load it as that family"
        return (
            f"it has the names of {ordinary}: if it was trained as {looks_like}, load it as that family; if "
            "not, make the ordinary model elastic with subnetact.insert_(model, example=x)"
        )
    if set(wrong) == {"extra"}:
        shown = repr(wrong["extra"]) if len(wrong["extra"]) <= NAMES_SHOWN else "[their names, or a pattern]"
        return f"ignore={shown} loads it without the tensors that the family does not have"
    if set(wrong) == {"missing"}:
        return "it lacks tensors: fetch it again, or save the whole network"
    return "check the constructor arguments that it was made with, and that the file is complete"


def encode(
    space: SubnetSpace, spec: SubnetSpec, image_size: int | None = None, encoding: str | None = None
) -> Features:
    """Return the features that the family's upstream accuracy predictor reads.

    Args:
        space: the space of a supernet that `load` made.
        spec: a subnet of that space.
        image_size: height and width of the input, in pixels. Leave it out if the resolution is an axis of the
            space.
        encoding: name of the encoding; `python -m ofa_adapters` lists them. If None, the family's first one.

    Returns:
        The features, float32, of shape (n_features,).

    Raises:
        SpecError: the family's upstream publishes no such encoding, the spec is not of this space, or the
            encoding does not know the image size.
    """
    encodings = family_of(space.name).encodings
    name = encoding or next(iter(encodings), None)
    if name is None or name not in encodings:
        known = ", ".join(encodings) or "none"
        raise SpecError(f"{space.name}: no predictor encoding {encoding or ''}; upstream publishes {known}")
    return encodings[name](space, space.check(spec), image_size)
