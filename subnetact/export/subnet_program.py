"""What exports share: the subnets and inputs to export, their comparison, and the index of the files."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from tqdm import tqdm

from subnetact import __version__
from subnetact.comparison import ROUNDED, Tolerance, equal
from subnetact.device import raise_if_explained, raise_if_out_of_memory
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like
from subnetact.errors import ExportError, first_line
from subnetact.export.input_axes import InputAxes
from subnetact.files.documents import FolderFormat
from subnetact.spec import SubnetSpec
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import culprit
from subnetact.supernet.supernet import Supernet


@dataclass(frozen=True)
class SubnetProgram:
    """One subnet to export: its name in messages, a private view, an example batch, and smaller ones."""

    name: str
    view: nn.Module
    x: Any
    smaller: tuple[Any, ...] = ()

    def traced(self, axes: InputAxes) -> ExportedProgram:
        """Return the program of `torch.export`, for all sizes that the axes may have."""
        x = self.x
        args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), None)
        if not all(isinstance(part, Tensor) for part in (*args, *(kwargs or {}).values())):
            raise ExportError(
                "this format takes a tensor, or a flat tuple or dictionary of tensors; flatten the network's "
                "inputs, or serve the Engine itself"
            )
        dims = axes.dims()
        shapes: Any = dict(zip(kwargs, dims, strict=True)) if kwargs else tuple(dims)
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
                    raise_if_out_of_memory(error)
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


def subnet_programs(
    engine: Engine, subnets: Sequence[SubnetSpec] | None, program: str, **facts: Any
) -> tuple[dict[str, Any], InputAxes, list[SubnetProgram], Supernet]:
    """Return the facts of an export, the axes of its inputs, its subnets, and the supernet of their views."""
    specs, axes = chosen_specs(engine, subnets), InputAxes(engine.samples)
    *smaller, x = (batch_like(sample, 3, engine.device) for sample in engine.samples)
    supernet = deepcopy(engine.supernet)  # Everything is of one checkpoint, whatever other threads load.
    if not engine.config.allow_uncalibrated:
        supernet.statistics.require(specs)
    programs = [
        SubnetProgram(f"{i} ({spec})", supernet.private_view(spec)[0], x, tuple(smaller))
        for i, spec in enumerate(specs)
    ]
    facts = {"program": program, "device": engine.device.type, **facts, "inputs": axes.described()}
    facts |= {"space": supernet.space.id, "fingerprint": supernet.fingerprint()}
    return described(engine, specs, facts), axes, programs, supernet


def subnet_name(subnet: int) -> str:
    """Return the name of a subnet's program in a .pt2, and of its file in a folder."""
    return f"subnet-{subnet}"


def bar(programs: list[SubnetProgram], progress: bool) -> Iterable[SubnetProgram]:
    """Return these programs, with a progress bar when standard error is a terminal."""
    return tqdm(programs, desc="exporting subnets", disable=not progress or None)


def described(engine: Engine, specs: Sequence[SubnetSpec], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return these facts with the versions and the configuration of what is exported, as JSON."""
    accuracy = dict(zip(engine.specs, engine.accuracy, strict=True))
    percents = [accuracy.get(spec) for spec in specs]
    config = replace(engine.config, specs=specs, accuracy=percents, removed=(), pinned=(), padding=None)
    return {"subnetact": __version__, "torch": torch.__version__, **facts, **config.to_json()}


def export_format(kind: str = "subnetact.export") -> FolderFormat:
    """Return the format of exported folders of one kind."""
    return FolderFormat("an export", kind, 1, "give the folder that the exporter wrote", "export.json")


def chosen_specs(engine: Engine, subnets: Sequence[SubnetSpec] | None) -> list[SubnetSpec]:
    """Return these subnets of the engine's supernet, or all that the engine serves."""
    if not isinstance(engine, Engine):
        raise ExportError(
            f"expected an Engine, got {type(engine).__name__}; make one, Engine(supernet, specs, example=x)"
        )
    given = [engine.specs[i] for i in engine.ids] if subnets is None else subnets
    return engine.supernet.space.distinct(given, "an export (subnets=[...])")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings that torch addresses to its own developers."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield
