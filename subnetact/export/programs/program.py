"""Traces one subnet into a `torch.export` program; errors name the module that cannot be traced."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from subnetact.engine.engine import Engine
from subnetact.engine.outputs import agree
from subnetact.engine.ready_subnet import ReadySubnet
from subnetact.errors import ExportError
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import culprit
from subnetact.supernet.supernet import Supernet

__all__ = [
    "blamed",
    "chosen_subnets",
    "example_batch",
    "exported_program",
    "quiet",
    "same_outputs",
    "snapshot_of",
]


def chosen_subnets(engine: Engine, subnets: Sequence[int] | None) -> list[ReadySubnet]:
    """Return the subnets to export.

    Args:
        engine: the engine.
        subnets: ids of its subnets. If None, all that are served.

    Raises:
        SpecError: the engine has no such id.
        ExportError: there is no id, or an id is given twice, or `engine` is not an engine.
    """
    if not isinstance(engine, Engine):
        raise ExportError(
            f"expected an Engine, got {type(engine).__name__}; make one, Engine(supernet, specs, example=x)"
        )
    ids = engine.ids if subnets is None else tuple(subnets)
    if not ids or len(set(ids)) != len(ids):
        raise ExportError(f"subnets: {list(ids)} must be distinct ids, at least one, of {list(engine.ids)}")
    return [engine.ready(i) for i in ids]


def snapshot_of(engine: Engine, chosen: Sequence[ReadySubnet]) -> Supernet:
    """Return a copy of an engine's supernet, of one checkpoint, whatever other threads load.

    Args:
        engine: the engine.
        chosen: the subnets that will be exported.

    Raises:
        NotCalibrated: the engine refuses one of them, for its BatchNorm statistics were dropped.
        StaleWeights: another thread changed weights in place while they were copied.
    """
    supernet = engine.supernet.snapshot()
    if not engine.config.allow_uncalibrated:
        supernet.require_calibrated([subnet.spec for subnet in chosen])
    return supernet


def example_batch(example: Any, size: int, device: torch.device) -> Any:
    """Return a batch of different inputs that have the example's structure, shapes and dtypes.

    Args:
        example: one input without a batch dimension.
        size: the batch size.
        device: the device of the batch.

    Returns:
        The batch: tensors of shape (size, ...) in the structure of the example. Floating-point inputs are
        random. Of integer inputs the first is the example and the others are ones.
    """
    generator = torch.Generator().manual_seed(size)

    def batch_of(part: Tensor) -> Tensor:
        if part.is_floating_point():
            return torch.randn(size, *part.shape, generator=generator).to(device, part.dtype)
        batch = torch.ones(size, *part.shape, dtype=part.dtype)
        batch[0] = part
        return batch.to(device)

    return map_tensors(batch_of, example)


def exported_program(view: nn.Module, x: Any, name: str, dynamic_batch: bool) -> ExportedProgram:
    """Trace a view with `torch.export`.

    Args:
        view: a private view of the subnet.
        x: the example batch, a tensor (N, ...) with N >= 2 if `dynamic_batch`, or a flat tuple or dictionary
            of such tensors.
        name: name of the subnet, for error messages.
        dynamic_batch: whether the program takes batches of any size. If false, it takes batches of N.

    Returns:
        The program.

    Raises:
        ExportError: a module cannot be traced; the message names it.
    """
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), None)
    if not all(isinstance(part, Tensor) for part in (*args, *(kwargs or {}).values())):
        raise ExportError(
            "this format takes a tensor, or a flat tuple or dictionary of tensors; flatten the network's "
            "inputs, or serve the Engine itself"
        )
    batch = {0: Dim("batch", min=1)}
    shapes: Any = dict.fromkeys(kwargs, batch) if kwargs else (batch,) * len(args)
    with quiet(), blamed(view, name, "torch.export"), torch.no_grad():
        call_with(view, x)  # recomputes what was derived from weights that have changed in place since
        return torch.export.export(
            view, args, kwargs, dynamic_shapes=shapes if dynamic_batch else None, strict=False
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings that torch addresses to its own developers."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield


@contextmanager
def blamed(view: nn.Module, name: str, tool: str) -> Iterator[None]:
    """Turn an error inside the block into an `ExportError` that names the module where it happened.

    Args:
        view: the view that is exported.
        name: name of the subnet, for the message.
        tool: name of the exporting tool, for the message.

    Raises:
        ExportError: there was an error inside the block.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        path = culprit(view, error)
        where = f"module {path}" if path else "its graph"
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(
            f"subnet {name}: {tool} cannot take {where}: {first[0]}; rewrite that forward without "
            "branches on values, try dynamic_batch=False, or serve the Engine itself"
        ) from error


def same_outputs(
    program: object, view: nn.Module, x: Any, name: str, tool: str, rtol: float, atol: float
) -> None:
    """Compare the outputs of a program with those of its view, for the whole batch and for its first input.

    Args:
        program: the program.
        view: the view that it was made from.
        x: the batch, a tensor (N, ...), or a tuple or dictionary of such tensors.
        name: name of the subnet, for the message.
        tool: name of the exporting tool, for the message.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Raises:
        ExportError: the outputs differ, or the program cannot be called.
    """
    if not callable(program):
        raise ExportError(f"subnet {name}: {tool} made an object that cannot be called; report this")
    with torch.inference_mode():
        for batch in (x, map_tensors(lambda part: part[:1], x)):
            if not agree(call_with(program, batch), call_with(view, batch), rtol, atol):
                raise ExportError(
                    f"subnet {name}: {tool} differs from the supernet for a batch of {len(batch)}; "
                    "nothing was written; serve the Engine itself, and report this"
                )
