"""One subnet as a `torch.export` program, and which module is to blame where that fails."""

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
from subnetact.supernet.trace import culprit

__all__ = ["blamed", "chosen_subnets", "example_batch", "exported_program", "quiet", "same_outputs"]


def chosen_subnets(engine: Engine, subnets: Sequence[int] | None) -> list[ReadySubnet]:
    """Return the subnets to export, all that are served where None is given.

    Raises:
        SpecError: there is no such id.
        ExportError: none, or one twice; or what is given is no engine.
    """
    if not isinstance(engine, Engine):
        raise ExportError(
            f"expected an Engine, got {type(engine).__name__}; make one, Engine(supernet, specs, example=x)"
        )
    ids = engine.ids if subnets is None else tuple(subnets)
    if not ids or len(set(ids)) != len(ids):
        raise ExportError(f"subnets: {list(ids)} must be distinct ids, at least one, of {list(engine.ids)}")
    return [engine.ready(i) for i in ids]


def example_batch(example: Any, size: int, device: torch.device) -> Tensor:
    """Return `size` different inputs of the example's shape and dtype, (size, ...); integers are 0 or 1.

    Raises:
        ExportError: the example is not one tensor.
    """
    if not isinstance(example, Tensor):
        raise ExportError(
            "this format takes networks of one tensor; "
            "use to_torchscript(supernet, path, specs, inputs=[...])"
        )
    generator = torch.Generator().manual_seed(size)
    if example.is_floating_point():
        batch = torch.randn(size, *example.shape, generator=generator).to(example.dtype)
    else:
        batch = torch.ones(size, *example.shape, dtype=example.dtype)
        batch[0] = example
    return batch.to(device)


def exported_program(view: nn.Module, x: Tensor, name: str, dynamic_batch: bool) -> ExportedProgram:
    """Trace a view with `torch.export`.

    Args:
        view: a subnet's view that nobody else changes.
        x: the example batch (N, ...), N >= 2 where the batch is to be dynamic.
        name: of the subnet, for messages.
        dynamic_batch: whether the program takes any batch size, or only x's.

    Raises:
        ExportError: naming the module that cannot be traced.
    """
    shapes = ({0: Dim("batch", min=1)},) if dynamic_batch else None
    with quiet(), blamed(view, name, "torch.export"), torch.no_grad():
        view(x)  # brings up to date what is computed from weights that have changed in place
        return torch.export.export(view, (x,), dynamic_shapes=shapes, strict=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's notes to its own developers from the caller."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield


@contextmanager
def blamed(view: nn.Module, name: str, tool: str) -> Iterator[None]:
    """Turn any error inside into an `ExportError` that names the innermost module of the view it passed."""
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
    program: object, view: nn.Module, x: Tensor, name: str, tool: str, rtol: float, atol: float
) -> None:
    """Compare a program's output with its view's, at batch sizes 1 and up to x's.

    Raises:
        ExportError: they differ.
    """
    if not callable(program):
        raise ExportError(f"subnet {name}: {tool} made nothing that can be called")
    with torch.inference_mode():
        for batch in (x,) if x.shape[0] == 1 else (x, x[:1]):
            if not agree(program(batch), view(batch), rtol, atol):
                raise ExportError(
                    f"subnet {name}: {tool} computes something else at batch {len(batch)} than the supernet; "
                    "nothing was written; serve the Engine itself, and report this"
                )
