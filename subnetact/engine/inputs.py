"""Inputs: checking single inputs against a sample, stacking them into a batch, and splitting its output.

An input is a tensor, a tuple of a network's positional arguments, or a mapping, such as a dictionary or a
tokenizer's output, of its named arguments.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from subnetact.errors import EngineError, InvalidRequest
from subnetact.files.tensors import named_dtype
from subnetact.supernet.batches import as_batch, describe_input, map_tensors, tensors_of

DATATYPES = {torch.bfloat16: "BF16"} | {getattr(torch, f"float{n}"): f"FP{n}" for n in (16, 32, 64)}
DATATYPES |= {getattr(torch, f"int{n}"): f"INT{n}" for n in (8, 16, 32, 64)}
DATATYPES |= {torch.bool: "BOOL", torch.uint8: "UINT8"}
"""The names of the Open Inference Protocol, which Triton's configurations have, too."""
LARGEST_EXAMPLE = 2**28
"""Most numbers of one input."""


def parts_of(x: Any) -> Any:
    """Return the keys of a structure's parts, or None if x is not a structure."""
    if isinstance(x, tuple):
        return range(len(x))
    return x.keys() if isinstance(x, Mapping) else None


def check_input(
    x: Any, sample: Any, device: torch.device, finite: bool = False, where: str = "input"
) -> None:
    """Refuse an input that is unlike the sample, if there is one, or not finite; messages call it `where`."""
    alone = isinstance(x, Tensor)
    if sample is not None and (alone != isinstance(sample, Tensor) or parts_of(x) != parts_of(sample)):
        raise InvalidRequest(f"{where}: expected {describe_input(sample)}, got {describe_input(x)}")
    if isinstance(x, Tensor):
        _check_tensor(x, sample, device, where)
        if finite and (x.is_floating_point() or x.is_complex()) and not bool(torch.isfinite(x).all()):
            raise InvalidRequest(f"{where}: it holds values that are not finite; send finite ones")
        return
    if not isinstance(x, (tuple, Mapping)) or not x:
        raise InvalidRequest(
            f"{where}: expected a torch.Tensor, or a tuple or dictionary of them, got {type(x).__name__}"
        )
    for name in parts_of(x) or ():
        check_input(x[name], None if sample is None else sample[name], device, finite, f"{where}[{name!r}]")


def _check_tensor(x: Tensor, sample: Any, device: torch.device, where: str) -> None:
    if not x.is_cpu and x.device != device:
        raise InvalidRequest(
            f"{where}: it is on {x.device}, this engine is on {device}; send it from the CPU or from there"
        )
    if x.layout != torch.strided:
        raise InvalidRequest(f"{where}: it is of layout {x.layout}; send a dense tensor")
    if sample is not None and (x.shape != sample.shape or x.dtype != sample.dtype):
        hint = "; drop it: x[0]" if x.shape == (1, *sample.shape) else ""
        raise InvalidRequest(
            f"{where}: got {x.dtype} of shape {tuple(x.shape)}, this engine serves {sample.dtype} of shape "
            f"{tuple(sample.shape)}, without a batch dimension{hint}"
        )


def check_batch(x: Any, samples: Sequence[Any], cause: Exception) -> None:
    """Raise InvalidRequest if a batch on which the network failed is like none of the samples."""
    for sample in samples or [None]:
        with suppress(InvalidRequest, NotImplementedError):  # tensors on the meta device have no values
            check_input(samples_of(x), sample, torch.device("cpu"))
            return

    def described(part: Tensor) -> str:
        return f"{part.dtype} of shape ({', '.join(map(str, ('N', *part.shape)))}), N >= 1"

    served = " or ".join(str(map_tensors(described, sample)) for sample in samples) or "tensors"
    got = map_tensors(describe_input, as_batch(x)) if parts_of(x) else describe_input(x)
    raise InvalidRequest(f"batch: got {got}, this engine serves {served}") from cause


def samples_of(example: Any) -> Any:
    """Return the first sample of a batch, on the CPU, or of every batch in a list; None of None."""
    if example is None:
        return None
    if isinstance(example, list):
        return [samples_of(one) for one in example]
    return map_tensors(lambda t: t.detach().to("cpu", copy=True), first_of(as_batch(example), "example"))


def first_of(batch: Any, where: str) -> Any:
    """Return the first input of a batch; InvalidRequest, which calls it `where`, if it is no batch."""
    parts = [part for part in tensors_of(batch) if isinstance(part, Tensor)]
    check_input(batch, None, parts[0].device if parts else torch.device("cpu"), where=where)
    sizes = {len(t) if t.dim() else 0 for t in parts}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidRequest(
            f"{where}: expected a batch, tensors whose first axis has one size, got {describe_input(batch)}; "
            "give x[None] of one input x"
        )
    return map_tensors(lambda t: t[0], batch)


def sample_to_json(sample: Any) -> Any:
    """Describe the shapes and dtypes of a sample, or of a list of them, as JSON (see `bundle.py`)."""
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
    if not all(type(size) is int for size in shape) or math.prod(shape) > LARGEST_EXAMPLE:
        raise ValueError(f"an input of shape {shape}")
    return torch.zeros(shape, dtype=named_dtype(name))


def shapes(x: Any) -> Any:
    """Return the shape of an input as JSON: a list per tensor, in lists and objects like the input's."""
    if isinstance(x, tuple):
        return [shapes(part) for part in x]
    if isinstance(x, dict):
        return {name: shapes(part) for name, part in x.items()}
    return list(x.shape) if isinstance(x, Tensor) else describe_input(x)


def laid_out(x: Tensor) -> Tensor:
    """Return a batch in the memory format in which engines run it: images in channels_last."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def batch_like(sample: Any, size: int, device: torch.device) -> Any:
    """Return a batch like a sample: random numbers from a fixed seed, or the sample and ones."""

    def batch(part: Tensor) -> Tensor:
        shape = size, *part.shape
        if part.is_floating_point():
            return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, part.dtype)
        rows = torch.ones(shape, dtype=part.dtype)
        rows[0] = part
        return rows.to(device)

    return map_tensors(batch, sample)


class Stager:
    """Stacks single inputs into one batch on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def stack(self, inputs: Sequence[Any], size: int) -> Any:
        """Stack inputs of one structure into a batch of so many samples; padding repeats the last input."""
        first = inputs[0]
        if isinstance(first, tuple):
            return tuple(self.stack(parts, size) for parts in zip(*inputs, strict=True))
        if isinstance(first, Mapping):
            return {name: self.stack([x[name] for x in inputs], size) for name in first}
        samples = [x.detach() for x in (*inputs, *[inputs[-1]] * (size - len(inputs)))]
        dtypes = {sample.dtype for sample in samples}
        if len(dtypes) > 1:
            raise InvalidRequest(
                f"inputs: {' and '.join(sorted(map(str, dtypes)))} in one batch; convert all inputs to the "
                "dtype of the example"
            )
        if self._device.type != "cuda" or any(sample.device.type != "cpu" for sample in samples):
            return torch.stack([sample.to(self._device) for sample in samples])
        # On a stream per thread, so that copies overlap with the computation of other workers' batches.
        # torch uses page-locked memory again only when the copies out of it are done.
        shape = len(samples), *samples[0].shape
        staged = torch.stack(samples, out=torch.empty(shape, dtype=samples[0].dtype, pin_memory=True))
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._own.stream):
            batch: Tensor = staged.to(self._device, non_blocking=True)
        computing.wait_stream(self._own.stream)
        batch.record_stream(computing)
        return batch


def unstack(output: Any, count: int, size: int, where: str = "output") -> list[Any]:
    """Split the output of a batch into those of the first `count` samples, on the CPU; errors say `where`."""
    if isinstance(output, Tensor):
        if output.shape[:1] != (size,):
            raise EngineError(
                f"{where}: the network returned a tensor of shape {tuple(output.shape)} for a batch of "
                f"{size}, which cannot be split into samples; its first axis must be the batch"
            )
        # Who keeps a copy keeps neither the batch nor the answers to others, and cannot change a weight.
        return [row.clone() for row in output[:count].detach().cpu().unbind(0)]
    if isinstance(output, Mapping):
        parts = {name: part for name, part in output.items() if part is not None}
        columns = {name: unstack(part, count, size, f"{where}[{name!r}]") for name, part in parts.items()}
        return [{name: rows[i] for name, rows in columns.items()} for i in range(count)]
    if isinstance(output, (tuple, list)):
        rows = [
            [None] * count if part is None else unstack(part, count, size, f"{where}[{i}]")
            for i, part in enumerate(output)
        ]
        return [tuple(row[i] for row in rows) for i in range(count)]
    raise EngineError(
        f"{where}: the network returned {type(output).__name__}, which cannot be split into samples; return "
        "tensors, or tuples, lists or mappings of them (a language model returns its cache unless "
        "model.config.use_cache is False)"
    )
