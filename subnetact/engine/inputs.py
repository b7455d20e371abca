"""Inputs: checking single inputs against an example, and stacking them into a batch on a device.

An input is a tensor, or a tuple or mapping of inputs. A tuple holds a network's positional arguments, a
mapping, such as a dictionary or a tokenizer's output, its named arguments. `outputs.py` splits the output of
a batch.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subnetact.errors import InvalidRequest, UncalibratedSubnetWarning
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import as_batch, call_with, describe_input, map_tensors, tensors_of
from subnetact.supernet.failure import failure, missing_entry, summary
from subnetact.supernet.supernet import Supernet

__all__ = [
    "Stager",
    "batch_like",
    "call_with",
    "check_batch",
    "check_input",
    "describe_input",
    "detached_sample",
    "dtype_of",
    "map_tensors",
    "sample_from_json",
    "sample_to_json",
    "samples_of",
    "shapes",
    "to_dtype",
    "try_sample",
]


LARGEST_EXAMPLE = 2**28
"""Most numbers of one input."""


def check_input(
    x: Any, sample: Any, device: torch.device, finite: bool = False, where: str = "input"
) -> None:
    """Refuse a single input whose structure, shapes or dtypes differ from those of the sample.

    Without a sample, all tensors are accepted; `finite` refuses NaN and infinite values too. Tensors may be
    on the CPU or on `device`. Messages call the input `where`.
    """
    if isinstance(x, Tensor):
        _check_tensor(x, sample, device, where)
        if finite and (x.is_floating_point() or x.is_complex()) and not bool(torch.isfinite(x).all()):
            raise InvalidRequest(f"{where}: it holds values that are not finite; send finite ones")
        return
    if sample is not None and (isinstance(sample, Tensor) or _parts(x) != _parts(sample)):
        raise InvalidRequest(f"{where}: expected {describe_input(sample)}, got {describe_input(x)}")
    if not isinstance(x, (tuple, Mapping)) or not x:
        raise InvalidRequest(
            f"{where}: expected a torch.Tensor, or a tuple or dictionary of them, got {type(x).__name__}"
        )
    for name in _parts(x) or ():
        check_input(x[name], None if sample is None else sample[name], device, finite, f"{where}[{name!r}]")


def _check_tensor(x: Tensor, sample: Any, device: torch.device, where: str) -> None:
    if x.device.type != "cpu" and x.device != device:
        raise InvalidRequest(
            f"{where}: it is on {x.device}, this engine is on {device}; send it from the CPU or from there"
        )
    if x.layout != torch.strided:
        raise InvalidRequest(f"{where}: it is of layout {x.layout}; send a dense tensor")
    if sample is None:
        return
    if not isinstance(sample, Tensor):
        raise InvalidRequest(f"{where}: expected {describe_input(sample)}, got {describe_input(x)}")
    if x.shape != sample.shape or x.dtype != sample.dtype:
        hint = "without a batch dimension"
        if x.shape == (1, *sample.shape):
            hint = "without a batch dimension; drop it: x[0]"
        raise InvalidRequest(
            f"{where}: got {x.dtype} of shape {tuple(x.shape)}, this engine serves {sample.dtype} of shape "
            f"{tuple(sample.shape)}, {hint}"
        )


def check_batch(x: Any, sample: Any, cause: Exception, where: str = "batch") -> None:
    """Raise InvalidRequest if a batch on which the network failed differs from the example."""
    served = "tensors"
    like = isinstance(x, Tensor | tuple | Mapping)
    if isinstance(sample, Tensor):
        shape = ", ".join(map(str, ("N", *sample.shape)))
        served = f"{sample.dtype} of shape ({shape}), N >= 1"
        like = isinstance(x, Tensor) and x.dim() == sample.dim() + 1 and len(x) > 0
        like = like and x.shape[1:] == sample.shape and x.dtype == sample.dtype
        like = like and x.layout == torch.strided and not x.is_meta
    elif sample is not None:
        served = f"batches of {describe_input(sample)}"
        like = _parts(x) == _parts(sample)
        for name in _parts(sample) if like else ():
            check_batch(x[name], sample[name], cause, f"{where}[{name!r}]")
    if not like:
        raise InvalidRequest(f"{where}: got {describe_input(x)}, this engine serves {served}") from cause


def try_sample(supernet: Supernet, spec: SubnetSpec, x: Any, sample: Any) -> Any:
    """Run a subnet on a batch `x` of one sample, and return its output.

    If it fails, an InvalidRequest says what the elastic description lacks, or what to give as an example.
    """
    view, _ = supernet.private_view(spec)
    try:
        with torch.inference_mode():
            return call_with(view, x)
    except Exception as raised:
        error = raised
    fact = (
        f"example: {spec} does not run on one sample of it, {describe_input(sample)}: {summary(view, error)}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        full, _ = supernet.private_view(supernet.space.largest())
    if failure(full, x) is None:
        advice = f"the largest subnet does run: {missing_entry(view, error)}"
    else:
        advice = (
            "give a batch that the network takes, with the batch axis first: x[None] of one input x. If the "
            "network needs larger batches, leave out example=: the first batch then is the example"
        )
    raise InvalidRequest(f"{fact}; {advice}") from error


def samples_of(example: Any) -> Any:
    """Return the first sample of a batch, of every batch in a list, or None of None.

    Raises InvalidRequest if it is no batch: tensors whose first axis has the same size, at least 1.
    """
    if example is None:
        return None
    if isinstance(example, list):
        return [samples_of(one) for one in example]
    batch = as_batch(example)
    parts = [part for part in tensors_of(batch) if isinstance(part, Tensor)]
    check_input(batch, None, parts[0].device if parts else torch.device("cpu"), where="example")
    sizes = {len(t) if t.dim() else 0 for t in parts}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidRequest(
            f"example: expected a batch, tensors whose first axis has one size, got {describe_input(batch)}; "
            "give x[None] of one input x"
        )
    return map_tensors(lambda t: t[0], batch)


def detached_sample(sample: Any) -> Any:
    """Return a sample with its tensors on the CPU and without gradients."""
    return map_tensors(lambda t: t.detach().to("cpu"), as_batch(sample))


def to_dtype(sample: Any, former: torch.dtype, dtype: torch.dtype) -> Any:
    """Return a sample, or a list of them, with the tensors of one dtype in another one."""
    if isinstance(sample, list):
        return [to_dtype(one, former, dtype) for one in sample]
    return map_tensors(lambda t: t.to(dtype) if t.dtype == former else t, sample)


def dtype_of(supernet: Supernet) -> torch.dtype:
    """Return the dtype of the weights of a supernet."""
    return next((p.dtype for p in supernet.parameters() if p.is_floating_point()), torch.float32)


def sample_to_json(sample: Any) -> Any:
    """Describe the shapes and dtypes of a sample, or of a list of them, as JSON.

    A tensor is `[dtype, shape]`; parts are in `{"tuple": [...]}`, `{"list": [...]}` or `{"dict": {...}}`.
    """
    if isinstance(sample, tuple | list):
        kind = "tuple" if isinstance(sample, tuple) else "list"
        return {kind: [sample_to_json(part) for part in sample]}
    if isinstance(sample, dict):
        return {"dict": {name: sample_to_json(part) for name, part in sample.items()}}
    return None if sample is None else [str(sample.dtype).removeprefix("torch."), list(sample.shape)]


def sample_from_json(described: Any) -> Any:
    """Return the sample of zeros that `sample_to_json` described; else raise a TypeError or ValueError."""
    if described is None:
        return None
    if isinstance(described, dict):
        if "tuple" in described:
            return tuple(map(sample_from_json, described["tuple"]))
        if "list" in described:
            return list(map(sample_from_json, described["list"]))
        return {name: sample_from_json(part) for name, part in described["dict"].items()}
    name, shape = described
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    if not all(type(size) is int for size in shape) or math.prod(shape) > LARGEST_EXAMPLE:
        raise ValueError(f"an input of shape {shape}")
    return torch.zeros(shape, dtype=dtype)


def shapes(sample: Any) -> Any:
    """Return the shape of an input as JSON: a list per tensor, in lists and objects like the input's."""
    if isinstance(sample, tuple):
        return [shapes(part) for part in sample]
    if isinstance(sample, dict):
        return {name: shapes(part) for name, part in sample.items()}
    return list(sample.shape)


def batch_like(sample: Any, size: int) -> Any:
    """Return a batch like a sample, on the CPU: random numbers from a fixed seed, and integer zeros."""

    def batch(part: Tensor) -> Tensor:
        shape = size, *part.shape
        if not part.is_floating_point():
            return torch.zeros(shape, dtype=part.dtype)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(part.dtype)

    return map_tensors(batch, sample)


class Stager:
    """Stacks single inputs into one batch on a device.

    On CUDA devices every thread has its own page-locked memory and its own stream for copies. So with two
    workers, the copies of one overlap with the computation of the other; all computation stays on the common
    stream. This part has not run on hardware yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def stack(self, inputs: Sequence[Any], size: int) -> Any:
        """Stack inputs of one structure into a batch of so many samples; padding repeats the last input."""
        samples = [*inputs, *[inputs[-1]] * (size - len(inputs))]
        return self._stack(samples, ())

    def _stack(self, samples: Sequence[Any], path: tuple[Any, ...]) -> Any:
        first = samples[0]
        if isinstance(first, tuple):
            return tuple(
                self._stack([sample[i] for sample in samples], (*path, i)) for i in range(len(first))
            )
        if isinstance(first, Mapping):
            return {name: self._stack([sample[name] for sample in samples], (*path, name)) for name in first}
        samples = [sample.detach() for sample in samples]
        dtypes = {sample.dtype for sample in samples}
        if len(dtypes) > 1:
            raise InvalidRequest(
                f"inputs: {' and '.join(sorted(map(str, dtypes)))} in one batch; convert all inputs to the "
                "dtype of the example"
            )
        if self._device.type != "cuda" or any(sample.device.type != "cpu" for sample in samples):
            return torch.stack([sample.to(self._device) for sample in samples])
        return self._copied(samples, path)

    def _copied(self, samples: list[Tensor], path: tuple[Any, ...]) -> Tensor:
        own = self._own.__dict__
        if not own:
            own.update(stream=torch.cuda.Stream(self._device), staged={})  # type: ignore[no-untyped-call]
        key = path, samples[0].shape, samples[0].dtype
        memory, copied = own["staged"].get(key, (None, None))
        if copied is not None:
            copied.synchronize()  # Wait until the last batch was copied out of this memory.
        if memory is None or len(memory) < len(samples):
            memory = torch.empty((len(samples), *samples[0].shape), dtype=samples[0].dtype, pin_memory=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            own["staged"][key] = memory, copied
        staged = memory[: len(samples)]
        torch.stack(samples, out=staged)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(own["stream"]):
            batch: Tensor = staged.to(self._device, non_blocking=True)
            copied.record(own["stream"])
        computing.wait_event(copied)
        batch.record_stream(computing)
        return batch


def _parts(x: Any) -> Any:
    """Return the keys of a structure's parts, or None if x is not a structure."""
    if isinstance(x, tuple):
        return range(len(x))
    return x.keys() if isinstance(x, Mapping) else None
