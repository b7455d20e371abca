"""Where a profile gets its supernet, its input and its images for calibration from.

The supernet is that of a published family, of a user's own factory, of a bundle, or the embedded one for
digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ofa_adapters import registry
from subnetact.digits import load_digits_supernet
from subnetact.engine.engine import Engine
from subnetact.errors import SpecError, UserCodeError
from subnetact.files.documents import parse_json
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = [
    "ProfileSource",
    "build_model",
    "calibration_batches",
    "check_calibration_data",
    "import_name",
    "load_source",
    "random_images",
    "read_specs",
    "user_code",
]

IMAGES_PER_BATCH = 100
"""The number of images per calibration batch, unless a function makes the batches."""


@dataclass(frozen=True)
class ProfileSource:
    """A supernet to profile, with one input; if it comes from a bundle, with the bundle's subnets.

    Attributes:
        supernet: the supernet, on the CPU.
        sample: one input without batch axis.
        specs: the subnets of the bundle; empty if there is no bundle.
        accuracy: percent per subnet of the bundle, or None for a subnet whose accuracy is not known.
    """

    supernet: Supernet
    sample: Tensor
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
    precision: Sequence[str] = (),
) -> ProfileSource:
    """Load the supernet of a family, of a factory or of a bundle; if none is given, the one for digits.

    Args:
        model: your own function that returns a Supernet; it is called with `constructor`.
        family: a family of ofa_adapters, for example ofa_resnet50.
        checkpoint: weights of the family; if not given, random weights, which run as fast as trained ones.
        constructor: keyword arguments for the family or the factory.
        bundle: a directory that Engine.save wrote; a bundle of your own network needs `model` too, which
            makes the network for the weights of the bundle.
        input_shape: shape of one input without a batch dimension (default: that of the bundle, the family or
            the digits; `model` needs it).
        input_dtype: dtype of the input, int64 for token ids (default: that of the bundle or family, or
            `dtype`).
        dtype: dtype of the weights: float32, bfloat16, float16 (default: the bundle's, or float32).
        seed: seed of random weights.
        precision: the precisions that subnets may choose: float32, int8, bfloat16 (default: the bundle's, or
            float32). Subnets in files name theirs under the key precision; those that do not are float32.

    Returns:
        The supernet in evaluation mode on the CPU, one input, and the subnets of the bundle if there is one.

    Raises:
        UserCodeError: the factory raises an error.
        SpecError: the factory returns no `Supernet`, the input is not a single tensor, the shape of the input
            is not known, a dtype is unknown, or the arguments exclude each other.
        CheckpointError: the checkpoint does not fit the family.
        FileFormatError: the directory is no bundle.
        PrecisionError: the network or this machine cannot compute at a precision.
    """
    given = [name for name, value in (("model", model), ("family", family), ("bundle", bundle)) if value]
    if len(given) > 1 and given != ["model", "bundle"]:
        raise SpecError(f"{' and '.join(given)} were given; give one of them")
    if checkpoint and not family:
        raise SpecError("checkpoint: say with --family whose checkpoint it is")
    if constructor and not (model or family):
        raise SpecError("constructor: these are arguments for --family or --model; give one of them")
    torch.manual_seed(seed)
    specs: tuple[SubnetSpec, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    shape = list(input_shape or ())
    cast = _dtype(dtype or "float32")
    input_cast = cast
    if bundle:
        own = build_model(model, constructor) if model else None
        engine = Engine.load(bundle, supernet=own, device="cpu", allow_uncalibrated=True)
        supernet = engine.supernet
        specs, accuracy = zip(*((engine.specs[i], engine.accuracy[i]) for i in engine.ids), strict=True)
        if not isinstance(engine.sample, Tensor):
            raise SpecError(
                f"bundle {bundle}: its input is a {type(engine.sample).__name__}, and this command measures "
                "networks of one tensor only; use subnetact.profile_latency(engine)"
            )
        shape = shape or list(engine.sample.shape)
        if dtype is None or not engine.sample.is_floating_point():
            input_cast = engine.sample.dtype
    elif model:
        supernet = build_model(model, constructor)
        if not shape:
            raise SpecError(
                f"model {model!r}: the shape of its input is not known; give one input's shape without the "
                "batch dimension, for example --input-shape 3 224 224"
            )
    elif family:
        supernet = registry.load(family, checkpoint, **(constructor or {}))
        usual = registry.family_of(family)
        shape = shape or list(usual.input_shape)
        if not _dtype(usual.input_dtype).is_floating_point:
            input_cast = _dtype(usual.input_dtype)
    else:
        supernet = load_digits_supernet()
        shape = shape or [1, 16, 16]
    supernet.eval()
    if dtype is not None or not bundle:
        supernet.to(cast)
    lower = [name for name in precision if name != FLOAT32]
    if lower and supernet.precision is None:
        supernet.enable_precision(*lower)
        specs = tuple(map(supernet.space.check, specs))
    elif precision and set(lower) != set(getattr(supernet.precision, "precisions", ())):
        has = supernet.precision.precisions if supernet.precision else ()
        raise SpecError(
            f"precision: the supernet has {', '.join([*has, FLOAT32])}, got {' '.join(precision)}; leave out "
            "--precision"
        )
    if input_dtype is not None:
        input_cast = _dtype(input_dtype)
    sample = torch.zeros(shape, dtype=input_cast)
    return ProfileSource(supernet, sample, specs, accuracy)


def build_model(model: str, constructor: Mapping[str, Any] | None) -> Supernet:
    """Return the supernet that a user's own function `pkg.mod:factory` builds."""
    factory = import_name(model)
    with user_code(f"model {model!r}"):
        supernet = factory(**(constructor or {}))
    if not isinstance(supernet, Supernet):
        raise SpecError(
            f"model {model!r} returned a {type(supernet).__name__}; it must return a Supernet, as "
            "subnetact.insert_(network, ...) does"
        )
    return supernet


def import_name(name: str) -> Any:
    """Return what `pkg.mod:attribute` names."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SpecError(f"{name!r} cannot be imported: write pkg.mod:name, a module and a name in it")
    try:
        with user_code(f"importing {module!r}", passing=(ImportError,)):
            imported = import_module(module)
        return getattr(imported, attribute)
    except ImportError as error:
        raise SpecError(
            f"{name!r} cannot be imported ({error}); run this in the folder of the module, or name the "
            "folder in PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise SpecError(f"{name!r} cannot be imported ({error})") from error


@contextmanager
def user_code(what: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise UserCodeError for every error inside the block, apart from those of `passing`; `what` was run."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserCodeError, *passing)):
            raise
        raise UserCodeError(f"{what} raised {type(error).__name__}: {error}") from error


def read_specs(path: Path, supernet: Supernet) -> list[SubnetSpec]:
    """Read a JSON list of subnets, each in the notation of its space or as `SubnetSpec.to_json` writes it."""
    try:
        listed = parse_json(path.read_bytes())
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


def calibration_batches(calibrate_on: str, sample: Tensor, seed: int = 0) -> Iterable[Any]:
    """Return batches to calibrate with, converted to the dtype of the example.

    They come from a `.npy` file of images (N, C, H, W), from a function `pkg.mod:function`, or are
    `random:N`.
    """
    count = random_images(calibrate_on)
    if count is None:
        return _loaded(calibrate_on, sample.dtype)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, *sample.shape, generator=generator)
    return torch.split(images.to(sample.dtype), IMAGES_PER_BATCH)


def check_calibration_data(calibrate_on: str, sample: Tensor) -> None:
    """Refuse calibration data that does not exist, or images of another shape; call no function."""
    if random_images(calibrate_on) is not None:
        return
    if not calibrate_on.endswith(".npy"):
        import_name(calibrate_on)
        return
    images = _images(calibrate_on)
    if list(images.shape[1:]) != list(sample.shape):
        raise SpecError(
            f"{calibrate_on}: images are {list(images.shape[1:])}, --input-shape is {list(sample.shape)}"
        )


def random_images(calibrate_on: str) -> int | None:
    """Return N if the calibration data is `random:N`, otherwise None."""
    if not re.fullmatch(r"random:-?\d+", calibrate_on):
        return None
    count = int(calibrate_on.removeprefix("random:"))
    if count < 1:
        raise SpecError(f"calibrate_on: {calibrate_on} must be at least random:1")
    return count


def _loaded(calibrate_on: str, dtype: torch.dtype) -> Iterator[Any]:
    if not calibrate_on.endswith(".npy"):
        for batch in _own_batches(calibrate_on):
            yield _converted(batch, calibrate_on, dtype)
        return
    images = _images(calibrate_on)
    for start in range(0, len(images), IMAGES_PER_BATCH):
        batch = torch.from_numpy(np.array(images[start : start + IMAGES_PER_BATCH]))
        yield _converted(batch, calibrate_on, dtype)


def _own_batches(calibrate_on: str) -> Iterator[Any]:
    function = import_name(calibrate_on)
    with user_code(f"calibrate_on {calibrate_on!r}"):
        yield from function()


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
        raise SpecError(
            f"dtype: {name!r} is no dtype of torch; choose float32, bfloat16 or float16 for weights"
        )
    return found
