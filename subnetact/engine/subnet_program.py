"""SubnetProgram: one subnet as other tools take it, traced by `torch.export`, and compared with its view."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from subnetact.comparison import ROUNDED, Tolerance, equal
from subnetact.device import raise_if_explained
from subnetact.engine.input_axes import InputAxes
from subnetact.errors import ExportError, first_line
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import culprit


@dataclass(frozen=True)
class SubnetProgram:
    """One subnet to export: its name in messages, a private view, an example batch, and smaller ones."""

    name: str
    view: nn.Module
    x: Any
    smaller: tuple[Any, ...] = ()

    def traced(self, axes: InputAxes | None) -> ExportedProgram:
        """Return the program of `torch.export`, for all sizes that the axes may have; None: for one."""
        x = self.x
        args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), None)
        if not all(isinstance(part, Tensor) for part in (*args, *(kwargs or {}).values())):
            raise ExportError(
                "this format takes a tensor, or a flat tuple or dictionary of tensors; flatten the network's "
                "inputs, or serve the Engine itself"
            )
        dims = axes.dims() if axes else None
        shapes: Any = dims and (dict(zip(kwargs, dims, strict=True)) if kwargs else tuple(dims))
        with quiet(), self.blamed("torch.export"), torch.no_grad():
            call_with(self.view, x)  # computes again what follows from weights that have changed in place
            return torch.export.export(self.view, args, kwargs, dynamic_shapes=shapes, strict=False)

    def require_equal(
        self, program: Any, tool: str, tolerance: Tolerance = ROUNDED, batches: Sequence[Any] | None = None
    ) -> None:
        """Raise an `ExportError` unless a program's outputs equal those of the view.

        If `batches` is None, they are the example, its first input, and the smaller examples.
        """
        for batch in batches or (self.x, map_tensors(lambda part: part[:1], self.x), *self.smaller):
            with torch.inference_mode():
                try:
                    same, why = equal(call_with(program, batch), call_with(self.view, batch), tolerance), ""
                except Exception as error:
                    raise_if_explained(error)
                    same, why = False, f" ({(str(error).strip().splitlines() or [type(error).__name__])[-1]})"
            if not same:
                raise ExportError(
                    f"subnet {self.name}: the output of {tool} differs from the supernet's{why}, and nothing "
                    "was written; its forward does what tracing cannot see, such as a branch on the type of "
                    "a value; rewrite that, use another format, or serve the Engine itself"
                )

    @contextmanager
    def blamed(self, tool: str) -> Iterator[None]:
        """Turn an error inside the block into an `ExportError` that names the module where it happened."""
        try:
            yield
        except Exception as error:
            raise_if_explained(error, ExportError)
            path = culprit(self.view, error)
            where = f"module {path}" if path else "its graph"
            raise ExportError(
                f"subnet {self.name}: {tool} cannot take {where}: {first_line(error)}; rewrite that forward "
                "without branches on values, or serve the Engine itself"
            ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings that torch addresses to its own developers."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield
