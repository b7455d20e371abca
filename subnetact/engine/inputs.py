"""Single inputs to batches on a device, and back: tensors, and tuples or dictionaries of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import InvalidRequest
from subnetact.supernet.trace import culprit

__all__ = [
    "Stager",
    "batch_like",
    "call_with",
    "check_batch",
    "check_input",
    "describe_input",
    "detach_example",
    "map_tensors",
    "shapes",
    "try_example",
]


def check_input(
    x: Any, example: Any, device: torch.device, finite: bool = False, where: str = "input"
) -> None:
    """Refuse an input that could not run: anything but the example's structure, shapes and dtypes.

    Args:
        x: one input without a batch dimension: a tensor, or a tuple or dictionary of tensors.
        example: what it must be like; None = any tensors.
        device: where it may be, besides the CPU.
        finite: also refuse NaN and infinities.
        where: the name of this part in messages.

    Raises:
        InvalidRequest: naming the part, what it is, and what is served.
    """
    if isinstance(x, Tensor):
        _check_tensor(x, example, device, where)
        if finite and (x.is_floating_point() or x.is_complex()) and not bool(torch.isfinite(x).all()):
            raise InvalidRequest(f"{where}: it holds values that are not finite; send finite ones")
        return
    if example is not None and (isinstance(example, Tensor) or _parts(x) != _parts(example)):
        raise InvalidRequest(f"{where}: expected {describe_input(example)}, got {describe_input(x)}")
    if not isinstance(x, (tuple, dict)) or not x:
        raise InvalidRequest(
            f"{where}: expected a torch.Tensor, or a tuple or dictionary of them, got {type(x).__name__}"
        )
    for name in _parts(x) or ():
        check_input(x[name], None if example is None else example[name], device, finite, f"{where}[{name!r}]")


def _check_tensor(x: Tensor, example: Any, device: torch.device, where: str) -> None:
    if x.device.type != "cpu" and x.device != device:
        raise InvalidRequest(
            f"{where}: it is on {x.device}, this engine is on {device}; send it from the CPU or from there"
        )
    if x.layout != torch.strided:
        raise InvalidRequest(f"{where}: it is of layout {x.layout}; send a dense tensor")
    if example is None:
        return
    if not isinstance(example, Tensor):
        raise InvalidRequest(f"{where}: expected {describe_input(example)}, got {describe_input(x)}")
    if x.shape != example.shape or x.dtype != example.dtype:
        hint = "without a batch dimension"
        if x.shape == (1, *example.shape):
            hint = "without a batch dimension; drop it: x[0]"
        raise InvalidRequest(
            f"{where}: got {x.dtype} of shape {tuple(x.shape)}, this engine serves {example.dtype} of shape "
            f"{tuple(example.shape)}, {hint}"
        )


def check_batch(x: Any, example: Any, cause: Exception, where: str = "batch") -> None:
    """Say what is wrong with a batch that a network has failed on, if it is not like the example.

    Args:
        x: the batch.
        example: one input without a batch dimension; None = not known.
        cause: what the network raised.
        where: the name of this part in messages.

    Raises:
        InvalidRequest: naming what was given and what is served.
    """
    served = "tensors"
    like = isinstance(x, Tensor | tuple | dict)
    if isinstance(example, Tensor):
        shape = ", ".join(map(str, ("N", *example.shape)))
        served = f"{example.dtype} of shape ({shape}), N >= 1"
        like = isinstance(x, Tensor) and x.dim() == example.dim() + 1 and len(x) > 0
        like = like and x.shape[1:] == example.shape and x.dtype == example.dtype
    elif example is not None:
        served = f"batches of {describe_input(example)}"
        like = _parts(x) == _parts(example)
        for name in _parts(example) if like else ():
            check_batch(x[name], example[name], cause, f"{where}[{name!r}]")
    if not like:
        raise InvalidRequest(f"{where}: got {describe_input(x)}, this engine serves {served}") from cause


def try_example(view: nn.Module, x: Any, example: Any, subnet: str) -> None:
    """Run a view on a batch of one example.

    Raises:
        InvalidRequest: naming the module that cannot.
    """
    try:
        with torch.inference_mode():
            call_with(view, x)
    except Exception as error:
        where = culprit(view, error)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidRequest(
            f"example: {subnet} does not run on a batch of one input of {describe_input(example)}: "
            f"{where + ': ' if where else ''}{first}; give one input as requests have it, without a batch "
            "dimension; for an own network, see that its elastic description covers what every narrowed "
            "module feeds. One that needs larger batches learns its example from the first: leave it out"
        ) from error


def detach_example(example: Any) -> Any:
    """Return a copy of an example's structure on the CPU, without gradients."""
    return map_tensors(lambda t: t.detach().to("cpu"), example)


def shapes(example: Any) -> Any:
    """Return the shape of a tensor, or those of the parts, as JSON holds them."""
    if isinstance(example, tuple):
        return [shapes(part) for part in example]
    if isinstance(example, dict):
        return {name: shapes(part) for name, part in example.items()}
    return list(example.shape)


def batch_like(example: Any, size: int) -> Any:
    """Return `size` rows like an example: floating point numbers are random, the same every time."""

    def rows(part: Tensor) -> Tensor:
        shape = size, *part.shape
        if not part.is_floating_point():
            return torch.zeros(shape, dtype=part.dtype)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(part.dtype)

    return map_tensors(rows, example)


def call_with(network: Callable[..., Any], x: Any) -> Any:
    """Call a network with a batch: a tuple is its positional arguments, a dictionary its named ones."""
    if isinstance(x, tuple):
        return network(*x)
    return network(**x) if isinstance(x, dict) else network(x)


class Stager:
    """Stacks single inputs into one batch on a device.

    On CUDA each thread stages through its own page-locked memory and copies on its own stream, so that with
    two workers the copies of one overlap with the computation of the other, which stays on the common
    stream. Not yet seen on hardware.

    Args:
        device: where batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def stack(self, inputs: Sequence[Any], size: int) -> Any:
        """Return one batch of `size` rows (>= len(inputs)); rows of the padding repeat the last input."""
        rows = [*inputs, *[inputs[-1]] * (size - len(inputs))]
        return self._stack(rows, ())

    def _stack(self, rows: Sequence[Any], path: tuple[Any, ...]) -> Any:
        first = rows[0]
        if isinstance(first, tuple):
            return tuple(self._stack([row[i] for row in rows], (*path, i)) for i in range(len(first)))
        if isinstance(first, dict):
            return {name: self._stack([row[name] for row in rows], (*path, name)) for name in first}
        rows = [row.detach() for row in rows]
        if self._device.type != "cuda" or any(row.device.type != "cpu" for row in rows):
            return torch.stack([row.to(self._device) for row in rows])
        return self._copied(rows, path)

    def _copied(self, rows: list[Tensor], path: tuple[Any, ...]) -> Tensor:
        own = self._own.__dict__
        if not own:
            own.update(stream=torch.cuda.Stream(self._device), staged={})  # type: ignore[no-untyped-call]
        key = path, rows[0].shape, rows[0].dtype
        memory, copied = own["staged"].get(key, (None, None))
        if copied is not None:
            copied.synchronize()  # the last batch has left this memory
        if memory is None or len(memory) < len(rows):
            memory = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            own["staged"][key] = memory, copied
        staged = memory[: len(rows)]
        torch.stack(rows, out=staged)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(own["stream"]):
            batch: Tensor = staged.to(self._device, non_blocking=True)
            copied.record(own["stream"])
        computing.wait_event(copied)
        batch.record_stream(computing)
        return batch


def _parts(x: Any) -> Any:
    """What a structure is indexed by; None for what is none."""
    if isinstance(x, tuple):
        return range(len(x))
    return x.keys() if isinstance(x, dict) else None


def map_tensors(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Apply a function to a tensor, or to each part of a tuple or dictionary of tensors."""
    if isinstance(x, tuple):
        return tuple(map_tensors(function, part) for part in x)
    if isinstance(x, dict):
        return {name: map_tensors(function, part) for name, part in x.items()}
    return function(x)


def describe_input(x: Any) -> str:
    """Name the type and shape of an input, for messages."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a dictionary of {', '.join(map(repr, x))}" if isinstance(x, dict) else type(x).__name__
