"""What a profile is of: a family's checkpoint, an own network, a bundle, or the embedded digits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnetact.engine.engine import Engine
from subnetact.errors import SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["ProfileSource", "batches_of", "check_batches", "find", "load_source", "read_specs"]


@dataclass(frozen=True)
class ProfileSource:
    """A supernet, one input, and, of a bundle, the subnets it registers.

    Attributes:
        supernet: on the CPU.
        example: one input without a batch dimension.
        specs: the subnets to profile; empty where they are to be chosen.
        accuracy: theirs, percent or None.
    """

    supernet: Supernet
    example: Tensor
    specs: tuple[SubnetSpec, ...] = ()
    accuracy: tuple[float | None, ...] = ()


def load_source(
    model: str | None = None,
    family: str | None = None,
    checkpoint: str | None = None,
    constructor: Mapping[str, Any] | None = None,
    bundle: str | None = None,
    input_shape: Sequence[int] | None = None,
    input_dtype: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> ProfileSource:
    """Load a model, a family or a bundle; the embedded digits supernet where none is given.

    A bundle of an own network needs the model too: it gives the network, the bundle its weights.

    Args:
        model: `pkg.mod:factory`; called with `constructor`, it returns a `Supernet`.
        family: a name of `ofa_adapters.families()`.
        checkpoint: the family's weights; None = random ones, the same for the same seed.
        constructor: arguments of the factory or of the family.
        bundle: a directory that `Engine.save` wrote.
        input_shape: of one input; None = the bundle's or family's, 1 16 16 of the digits, otherwise
            3 224 224.
        input_dtype: of the input where it is not `dtype`, int64 for token ids; None = the bundle's or
            family's, or `dtype`.
        dtype: what weights are cast to; None = the bundle's own, otherwise float32.
        seed: of random weights.

    Raises:
        SpecError: the model is no supernet, its input is no single tensor, or the arguments do not go
            together.
    """
    given = [name for name, value in (("model", model), ("family", family), ("bundle", bundle)) if value]
    if len(given) > 1 and given != ["model", "bundle"]:
        raise SpecError(f"{' and '.join(given)} were given; give one of them")
    if checkpoint and not family:
        raise SpecError("checkpoint: say with --family what it is a checkpoint of")
    if constructor and not (model or family):
        raise SpecError("constructor: its arguments are those of --family or --model; give one of them")
    torch.manual_seed(seed)
    specs: tuple[SubnetSpec, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    shape = [1, 16, 16] if not given else [3, 224, 224]
    cast = _dtype(dtype or "float32")
    input_cast = cast
    if bundle:
        own = _built(model, constructor) if model else None
        engine = Engine.load(bundle, supernet=own, device="cpu", allow_uncalibrated=True)
        supernet = engine.supernet
        specs, accuracy = zip(*((engine.specs[i], engine.accuracy[i]) for i in engine.ids), strict=True)
        if not isinstance(engine.example, Tensor):
            raise SpecError(
                f"bundle {bundle}: its input is a {type(engine.example).__name__}, this command measures "
                "networks of one tensor; use subnetact.profile_latency(engine)"
            )
        shape = list(engine.example.shape)
        if dtype is None or not engine.example.is_floating_point():
            input_cast = engine.example.dtype
    elif model:
        supernet = _built(model, constructor)
    elif family:
        registry = import_module("ofa_adapters.registry")
        supernet = registry.load(family, checkpoint, **(constructor or {}))
        usual = registry.family_of(family)
        shape = list(usual.input_shape)
        if not _dtype(usual.input_dtype).is_floating_point:
            input_cast = _dtype(usual.input_dtype)
    else:
        supernet = import_module("subnetact.digits").load_digits_supernet()
    supernet.eval()
    if dtype is not None or not bundle:
        supernet.to(cast)
    if input_dtype is not None:
        input_cast = _dtype(input_dtype)
    example = torch.zeros(list(input_shape or shape), dtype=input_cast)
    return ProfileSource(supernet, example, specs, accuracy)


def _built(model: str, constructor: Mapping[str, Any] | None) -> Supernet:
    supernet = find(model)(**(constructor or {}))
    if not isinstance(supernet, Supernet):
        raise SpecError(
            f"model {model!r} gave a {type(supernet).__name__}; it must return a Supernet, as "
            "subnetact.insert_(network, ...) does"
        )
    return supernet


def find(name: str) -> Any:
    """Import `pkg.mod:attribute`.

    Raises:
        SpecError: there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(f"{name!r} cannot be imported ({error}); write pkg.mod:name") from error


def read_specs(path: Path, supernet: Supernet) -> list[SubnetSpec]:
    """Read a JSON list of subnets, each in the family's own notation or as `SubnetSpec.to_json` writes it.

    Raises:
        SpecError: the file is no such list, or a subnet is outside the space.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: not a readable file of subnets ({error})") from error
    if not isinstance(listed, list) or not listed:
        raise SpecError(f"{path}: expected a JSON list of subnets, at least one")
    space = supernet.space
    return [
        space.check(SubnetSpec.from_json(one))
        if isinstance(one, dict) and set(one) == {"space", "values"}
        else space.parse(one)
        for one in listed
    ]


def batches_of(source: str, batch_size: int, dtype: torch.dtype) -> Iterator[Any]:
    """Yield calibration batches from a `.npy` file of images (N, C, H, W), or from `pkg.mod:function()`.

    Args:
        source: which of the two.
        batch_size: images of the file in a batch.
        dtype: what the network takes; floating-point images are converted to it.

    Raises:
        SpecError: the source is neither, or holds integers for a floating-point network, or the reverse.
    """
    if not source.endswith(".npy"):
        for batch in find(source)():
            yield _converted(batch, source, dtype)
        return
    images = _images(source)
    for start in range(0, len(images), batch_size):
        yield _converted(torch.from_numpy(np.array(images[start : start + batch_size])), source, dtype)


def check_batches(source: str, shape: Sequence[int]) -> None:
    """Refuse a source of calibration batches that does not exist, or images of another shape.

    Args:
        source: see `batches_of`; a function is found but not called.
        shape: of one input.

    Raises:
        SpecError: what is wrong with it.
    """
    if not source.endswith(".npy"):
        find(source)
        return
    images = _images(source)
    if list(images.shape[1:]) != list(shape):
        raise SpecError(f"{source}: images are {list(images.shape[1:])}, --input-shape is {list(shape)}")


def _images(source: str) -> np.ndarray:
    try:
        images: np.ndarray = np.load(source, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SpecError(f"{source}: not readable as an array of images ({error})") from error
    if images.ndim < 2 or images.dtype.kind not in "fiu" or not len(images):
        raise SpecError(
            f"{source}: expected numbers of shape (N, C, H, W), got {images.dtype} {images.shape}"
        )
    return images


def _converted(batch: Any, source: str, dtype: torch.dtype) -> Any:
    if isinstance(batch, list | tuple) and batch:
        return [_converted(batch[0], source, dtype), *batch[1:]]
    if not isinstance(batch, Tensor):
        return batch
    if batch.is_floating_point() != dtype.is_floating_point:
        raise SpecError(
            f"{source}: images are {batch.dtype}, the network takes {dtype}; save them as they were for "
            "training, scaled and normalised"
        )
    return batch.to(dtype)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SpecError(f"dtype: {name!r} is none of torch's; float32, bfloat16 or float16 for weights")
    return found
