"""What exports share: the subnets and inputs to export, and the index of the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from subnetact import __version__
from subnetact.engine.engine import Engine
from subnetact.engine.input_axes import InputAxes
from subnetact.engine.inputs import batch_like
from subnetact.engine.subnet_program import SubnetProgram
from subnetact.errors import ExportError
from subnetact.files.documents import FolderFormat
from subnetact.spec import SubnetSpec
from subnetact.supernet.statistics import require_calibrated
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.views import private_view


def subnet_programs(
    engine: Engine, subnets: Sequence[SubnetSpec] | None, program: str, **facts: Any
) -> tuple[dict[str, Any], InputAxes, list[SubnetProgram], Supernet]:
    """Return the facts of an export, the axes of its inputs, its subnets, and the supernet of their views."""
    specs, axes = chosen_specs(engine, subnets), InputAxes(engine.samples)
    *smaller, x = (batch_like(sample, 3, engine.device) for sample in engine.samples)
    supernet = deepcopy(engine.supernet)  # Everything is of one checkpoint, whatever other threads load.
    if not engine.config.allow_uncalibrated:
        require_calibrated(supernet, specs)
    programs = [
        SubnetProgram(f"{i} ({spec})", private_view(supernet, spec)[0], x, tuple(smaller))
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
