"""Where a profile gets its supernet, its input and its images for calibration from.

The serve command builds a user's own network with `build_model` too; it lives here and not in `command`,
because that room may not import the supernet that it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ofa_adapters import registry
from subnetact.command import import_name, user_code
from subnetact.digits import load_digits_supernet
from subnetact.engine.config import FUSED
from subnetact.engine.engine import Engine
from subnetact.errors import SpecError
from subnetact.files.tensors import named_dtype
from subnetact.latency.origin import scheduling_table
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import describe_input
from subnetact.supernet.supernet import Supernet

IMAGES_PER_BATCH = 100
"""The number of images per calibration batch, unless a function makes the batches."""
RANDOM_PREFIX = "random:"
"""How a request for random subnets or images begins; a number follows."""


@dataclass(frozen=True)
class ProfileSource:
    """A supernet, one input without batch axis, and of a bundle the accuracy (percent) of every subnet.

    `origin` has the arguments of `load_source` that were given, and `backend` is that of the bundle's engine.
    """

    supernet: Supernet
    sample: Tensor
    accuracy: Mapping[SubnetSpec, float | None] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    backend: str = FUSED


def load_source(
    family: str | None = None,
    checkpoint: str | None = None,
    model: str | None = None,
    bundle: str | None = None,
    constructor: Mapping[str, Any] | None = None,
    input_shape: Sequence[int] | None = None,
    input_dtype: str | None = None,
    dtype: str | None = None,
    precision: Sequence[str] = (),
) -> ProfileSource:
    """Load the supernet of a family, of a factory or of a bundle; if none is given, the one for digits.

    Args:
        family: a family of ofa_adapters, for example ofa_resnet50.
        checkpoint: weights of the family; if not given, random weights, which run as fast as trained ones.
        model: PKG.MOD:FACTORY, your own function that returns a Supernet; it is called with `constructor`.
        bundle: a directory that Engine.save wrote; a bundle of your own network needs `model` too, which
            makes the network for the weights of the bundle.
        constructor: keyword arguments for the family or the factory.
        input_shape: shape of one input without a batch dimension (default: that of the bundle, the family or
            the digits; `model` needs it).
        input_dtype: dtype of the input, int64 for token ids (default: that of the bundle or family, or
            `dtype`).
        dtype: dtype of the weights, for example bfloat16 (default: as they are loaded).
        precision: the precisions that subnets may choose (default: the bundle's, or float32). Subnets in
            files name theirs under the key precision; those that do not are float32.
    """
    origin = {name: value for name, value in locals().items() if value}
    given = [name for name, value in (("model", model), ("family", family), ("bundle", bundle)) if value]
    if len(given) > 1 and given != ["model", "bundle"]:
        raise SpecError(f"{' and '.join(given)} were given; give one of them")
    if checkpoint and not family:
        raise SpecError("checkpoint: say with --family whose checkpoint it is")
    if constructor and not (model or family):
        raise SpecError("constructor: these are arguments for --family or --model; give one of them")
    accuracy, backend = dict[SubnetSpec, float | None](), FUSED
    own = build_model(model, constructor, bundled=bool(bundle)) if model else None
    if bundle:
        engine = Engine.load(bundle, supernet=own, device="cpu", allow_uncalibrated=True)
        supernet, usual = engine.supernet, engine.sample
        table, backend = scheduling_table(engine.tables), engine.config.backend
        rows = () if table is None else zip(table.subnets, table.accuracy, strict=True)
        known = {key: percent for key, percent in rows if not math.isnan(percent)}
        for i in engine.ids:
            percent = engine.accuracy[i]
            accuracy[engine.specs[i]] = known.get(engine.keys[i]) if percent is None else percent
        if not isinstance(usual, Tensor):
            raise SpecError(
                f"bundle {bundle}: its input is a {type(usual).__name__}, and this command measures "
                "networks of one tensor only; use subnetact.profile_latency(engine)"
            )
    elif own is not None:
        if not input_shape:
            raise SpecError(
                f"model {model!r}: the shape of its input is not known; give one input's shape without the "
                "batch dimension, for example --input-shape 3 224 224"
            )
        supernet, usual = own, torch.zeros(input_shape, dtype=next(own.parameters()).dtype)
    elif family:
        facts = registry.family_of(family)
        supernet = registry.load(family, checkpoint, **(constructor or {}))
        usual = torch.zeros(facts.input_shape, dtype=named_dtype(facts.input_dtype))
    else:
        supernet, usual = load_digits_supernet(), torch.zeros(1, 16, 16)
    supernet.eval()
    if dtype:
        supernet.to(named_dtype(dtype))
    lower = [name for name in precision if name != FLOAT32]
    has = supernet.precision.precisions if supernet.precision else ()
    if lower and not has:
        supernet.enable_precision(*lower)
        accuracy = {supernet.space.check(spec): percent for spec, percent in accuracy.items()}
    elif precision and set(lower) != set(has):
        raise SpecError(
            f"precision: the supernet has {', '.join([*has, FLOAT32])}, got {' '.join(precision)}; leave out "
            "--precision"
        )
    name = input_dtype or (dtype if usual.is_floating_point() else None)
    sample = torch.zeros(input_shape or usual.shape, dtype=named_dtype(name) if name else usual.dtype)
    return ProfileSource(supernet, sample, accuracy, origin, backend)


def build_model(model: str, constructor: Mapping[str, Any] | None, bundled: bool = False) -> Any:
    """Return what a user's own `pkg.mod:factory` makes: a supernet, or for a bundle any network."""
    factory = import_name(model)
    with user_code(f"model {model!r}"):
        supernet = factory(**(constructor or {}))
    if not isinstance(supernet, nn.Module if bundled else Supernet):
        wanted = "the bundle's network" if bundled else "a Supernet, as subnetact.insert_(network, ...) does"
        raise SpecError(f"model {model!r} returned a {type(supernet).__name__}; it must return {wanted}")
    return supernet


def calibration_batches(calibrate_on: str, sample: Tensor, seed: int = 0) -> Iterable[Any]:
    """Refuse at once what cannot be used to calibrate; read the batches, of the sample's dtype, later."""
    if calibrate_on.startswith(RANDOM_PREFIX):
        number = calibrate_on.removeprefix(RANDOM_PREFIX)
        if not number.isdecimal() or not int(number):
            raise SpecError(f"calibrate_on: {calibrate_on} must be at least random:1")
        generator = torch.Generator().manual_seed(seed)
        sizes = (min(IMAGES_PER_BATCH, int(number) - i) for i in range(0, int(number), IMAGES_PER_BATCH))
        return (torch.randn(n, *sample.shape, generator=generator).to(sample.dtype) for n in sizes)
    if calibrate_on.endswith(".npy"):
        images = _images(calibrate_on, sample)
        starts = range(0, len(images), IMAGES_PER_BATCH)
        parts = (images[i : i + IMAGES_PER_BATCH] for i in starts)
        batches: Iterable[Any] = (torch.from_numpy(np.array(part)) for part in parts)
    else:
        batches = _own_batches(calibrate_on, import_name(calibrate_on))
    return (_converted(batch, calibrate_on, sample.dtype) for batch in batches)


def _own_batches(name: str, function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    with user_code(f"calibrate_on {name!r}"):
        yield from function()


def _images(source: str, sample: Tensor) -> np.ndarray:
    try:
        images: np.ndarray = np.load(source, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SpecError(f"{source}: not readable as an array of images ({error})") from error
    if images.shape[1:] != sample.shape or images.dtype.kind not in "fiu" or not len(images):
        raise SpecError(
            f"{source}: images are {list(images.shape[1:])}, --input-shape is {list(sample.shape)}; give "
            f"numbers of shape (N, C, H, W), at least one image, got {images.dtype} {images.shape}"
        )
    return images


def _converted(batch: Any, source: str, dtype: torch.dtype) -> Any:
    if isinstance(batch, list | tuple):
        raise SpecError(
            f"{source}: a batch is a tensor of inputs without labels, got {describe_input(tuple(batch))}; "
            "yield the inputs alone, of a DataLoader: yield from (images for images, labels in loader)"
        )
    if not isinstance(batch, Tensor):
        return batch
    if batch.is_floating_point() != dtype.is_floating_point:
        raise SpecError(
            f"{source}: images are {batch.dtype}, the network takes {dtype}; save them as they were for "
            "training, scaled and normalised"
        )
    return batch.to(dtype)
