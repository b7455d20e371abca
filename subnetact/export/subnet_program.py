"""`SubnetProgram`: one subnet on its way into a `torch.export` program; errors name the module at fault."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from tqdm import tqdm

from subnetact.comparison import ROUNDED, Tolerance, equal
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import sample_to_json
from subnetact.engine.ready_subnet import ReadySubnet
from subnetact.errors import ExportError
from subnetact.export.manifest import writing_folder
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import culprit

__all__ = ["SubnetProgram", "batch_of", "chosen_subnets", "exporting", "quiet", "require_equal"]


@dataclass(frozen=True)
class SubnetProgram:
    """One subnet to export.

    Attributes:
        name: its name in error messages.
        view: a private view of it.
        x: an example batch, a tensor (N, ...), or a flat tuple or dictionary of such tensors.
        facts: its entry in the manifest.
    """

    name: str
    view: nn.Module
    x: Any
    facts: dict[str, Any]

    def traced(self, dynamic_batch: bool) -> ExportedProgram:
        """Return the program of `torch.export`, for batches of any size or for those of the example's."""
        x = self.x
        args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), None)
        if not all(isinstance(part, Tensor) for part in (*args, *(kwargs or {}).values())):
            raise ExportError(
                "this format takes a tensor, or a flat tuple or dictionary of tensors; flatten the network's "
                "inputs, or serve the Engine itself"
            )
        batch = {0: Dim("batch", min=1)}
        shapes: Any = dict.fromkeys(kwargs, batch) if kwargs else (batch,) * len(args)
        with quiet(), self.blamed("torch.export"), torch.no_grad():
            call_with(
                self.view, x
            )  # recomputes what was derived from weights that have changed in place since
            return torch.export.export(
                self.view, args, kwargs, dynamic_shapes=shapes if dynamic_batch else None, strict=False
            )

    def require_equal(self, program: Any, tool: str, tolerance: Tolerance = ROUNDED) -> None:
        """Compare a program's outputs with those of the view, for the whole batch and for its first input."""
        batches = [self.x, map_tensors(lambda part: part[:1], self.x)]
        require_equal(program, self.view, batches, self.name, tool, tolerance)

    @contextmanager
    def blamed(self, tool: str) -> Iterator[None]:
        """Turn an error inside the block into an `ExportError` that names the module where it happened."""
        try:
            yield
        except ExportError:
            raise
        except Exception as error:
            path = culprit(self.view, error)
            where = f"module {path}" if path else "its graph"
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise ExportError(
                f"subnet {self.name}: {tool} cannot take {where}: {first[0]}; rewrite that forward without "
                "branches on values, try dynamic_batch=False, or serve the Engine itself"
            ) from error


def require_equal(
    program: Any,
    view: nn.Module,
    batches: Sequence[Any],
    name: str,
    tool: str,
    tolerance: Tolerance = ROUNDED,
) -> None:
    """Raise an `ExportError` unless a program's outputs for these batches equal those of a subnet's view."""
    with torch.inference_mode():
        for batch in batches:
            try:
                same, why = equal(call_with(program, batch), call_with(view, batch), tolerance), ""
            except Exception as error:
                same, why = False, f" ({(str(error).strip().splitlines() or [type(error).__name__])[-1]})"
            if not same:
                raise ExportError(
                    f"subnet {name}: the output of {tool} differs from the supernet's{why}, and nothing was "
                    "written; its forward does what tracing cannot see, such as a branch on the type of a "
                    "value; rewrite that, use another format, or serve the Engine itself"
                )


@contextmanager
def exporting(
    engine: Engine,
    directory: str | PathLike[str],
    kind: str,
    chosen: Sequence[ReadySubnet],
    batch_size: int,
    facts: dict[str, Any],
    progress: bool,
) -> Iterator[tuple[Path, Iterator[SubnetProgram]]]:
    """Yield a folder to write into and the subnets to write, which the manifest of the folder will list."""
    sample = engine.sample
    x = batch_of(sample, batch_size, engine.device)
    supernet = engine.supernet.snapshot()  # Everything is of one checkpoint, whatever other threads load.
    if not engine.config.allow_uncalibrated:
        supernet.require_calibrated([subnet.spec for subnet in chosen])
    described: list[dict[str, Any]] = []

    def programs() -> Iterator[SubnetProgram]:
        for subnet in tqdm(chosen, desc="exporting subnets", disable=not progress or None):
            spec = subnet.spec
            own = {"key": spec.key, "id": subnet.id, "spec": spec.to_json(), "accuracy": subnet.accuracy}
            described.append(own)
            yield SubnetProgram(f"{subnet.id} ({spec})", supernet.private_view(spec)[0], x, own)

    known = {
        "space": supernet.space.id,
        "fingerprint": supernet.fingerprint(),
        "sample": sample_to_json(sample),
        "subnets": described,
    }
    with writing_folder(directory, kind, {**facts, **known}) as folder:
        yield folder, programs()


def chosen_subnets(engine: Engine, subnets: Sequence[int] | None) -> list[ReadySubnet]:
    """Return the subnets with these ids, or all that the engine serves."""
    if not isinstance(engine, Engine):
        raise ExportError(
            f"expected an Engine, got {type(engine).__name__}; make one, Engine(supernet, specs, example=x)"
        )
    ids = engine.ids if subnets is None else tuple(subnets)
    if not ids or len(set(ids)) != len(ids):
        raise ExportError(f"subnets: {list(ids)} must be distinct ids, at least one, of {list(engine.ids)}")
    return [engine.ready(i) for i in ids]


def batch_of(sample: Any, size: int, device: torch.device) -> Any:
    """Return a batch of different inputs like one sample without batch axis.

    Floating-point inputs are random. Of integer inputs the first is the sample and the others are ones.
    """
    generator = torch.Generator().manual_seed(size)

    def stacked(part: Tensor) -> Tensor:
        if part.is_floating_point():
            return torch.randn(size, *part.shape, generator=generator).to(device, part.dtype)
        batch = torch.ones(size, *part.shape, dtype=part.dtype)
        batch[0] = part
        return batch.to(device)

    return map_tensors(stacked, sample)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings that torch addresses to its own developers."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield
