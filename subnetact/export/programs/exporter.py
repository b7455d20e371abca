"""`torch.export` programs and AOTInductor packages, one a subnet, over one file of weights."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from tqdm import tqdm

from subnetact.engine.engine import Engine
from subnetact.errors import ExportError
from subnetact.export.manifest import writing_folder
from subnetact.export.programs.program import (
    blamed,
    chosen_subnets,
    example_batch,
    exported_program,
    quiet,
    same_outputs,
)
from subnetact.export.programs.shared_tensors import SharedTensors, View

__all__ = ["KIND", "TOLERANCES", "WEIGHTS", "to_exported_programs"]

KIND = "subnetact.programs"
WEIGHTS = "weights.safetensors"
TOLERANCES = {"none": (5e-5, 5e-5), "aoti": (1e-3, 1e-4)}
"""Relative and absolute difference from the supernet's own outputs, by `compile`; checked at export."""


def to_exported_programs(
    engine: Engine,
    directory: str | PathLike[str],
    *,
    compile: str = "none",
    subnets: Sequence[int] | None = None,
    dynamic_batch: bool = True,
    progress: bool = True,
) -> Path:
    """Write one program a subnet, and the weights of all of them once; `load_exported` reads them.

    Program i of the export is subnet `subnets[i]` of the engine. The programs hold no weights: each of
    their tensors is a view of `weights.safetensors`. Every program is run and compared with the
    supernet before anything is written to `directory`.

    Args:
        engine: which subnets, and the example input.
        directory: new, empty, or an earlier export, which is replaced as a whole.
        compile: `none` = graphs of torch.export, run by torch's operators, on any machine with a torch
            that reads them. `aoti` = code compiled by AOTInductor for this kind of CPU or GPU and this
            torch; it needs a C++ compiler and 10 to 40 s a subnet.
        subnets: ids of the engine; None = all that are served.
        dynamic_batch: whether programs take any batch size, or batches of one only.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The directory.

    Raises:
        ExportError: naming the module that cannot be exported, or a program whose outputs differ.
        FileFormatError: the directory holds something else.
        SpecError: there is no such id.
    """
    if compile not in TOLERANCES:
        raise ExportError(f"compile: {compile!r} is not known; choose from {', '.join(TOLERANCES)}")
    chosen = chosen_subnets(engine, subnets)
    if compile == "aoti":
        _need_compiler(engine.device)
    example = engine.example
    x = example_batch(example, 3 if dynamic_batch else 1, engine.device)
    shared = SharedTensors()
    described: list[dict[str, Any]] = []
    facts = {
        "compile": compile,
        "device": engine.device.type,
        "capability": capability(engine.device),
        "space": engine.supernet.space.id,
        "fingerprint": engine.supernet.fingerprint(),
        "example": [str(example.dtype).removeprefix("torch."), list(example.shape)],
        "dynamic_batch": dynamic_batch,
        "subnets": described,
    }
    with writing_folder(Path(directory), KIND, facts) as folder:
        for i, subnet in enumerate(tqdm(chosen, desc="exporting subnets", disable=not progress or None)):
            name = f"{subnet.id} ({subnet.spec})"
            view, _ = engine.supernet.private_view(subnet.spec)
            program = exported_program(view, x, name, dynamic_batch)
            tensors = {**program.state_dict, **program.constants}
            strange = [n for n, t in tensors.items() if not isinstance(t, Tensor)]
            if strange:
                raise ExportError(f"subnet {name}: the constant {strange[0]} is no tensor; remove it")
            path = folder / f"program-{i}.pt2"
            write = _write_graph if compile == "none" else _write_package
            used = write(program, tensors, path, view, x, name)
            views: dict[str, View] = {n: shared.view(tensors[n]) for n in used}
            described.append(
                {
                    "key": subnet.spec.key,
                    "id": subnet.id,
                    "spec": subnet.spec.to_json(),
                    "accuracy": subnet.accuracy,
                    "program": path.name,
                    "tensors": views,
                }
            )
        shared.save(folder / WEIGHTS)
    return Path(directory)


def capability(device: torch.device) -> str:
    """Name the instructions that compiled code for a device may use."""
    if device.type == "cuda":
        return ".".join(map(str, torch.cuda.get_device_capability(device)))
    return str(torch.backends.cpu.get_cpu_capability())


def _need_compiler(device: torch.device) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ExportError(
            f"compile='aoti' needs a C++ compiler for {device}: apt-get install g++, or use compile='none'"
        ) from error


def _write_graph(
    program: ExportedProgram, tensors: dict[str, Tensor], path: Path, view: nn.Module, x: Tensor, name: str
) -> list[str]:
    same_outputs(program.module(), view, x, name, "torch.export", *TOLERANCES["none"])
    for owner in (program.state_dict, program.constants):
        for key, tensor in owner.items():
            empty = torch.empty(0, dtype=tensor.dtype)
            parameter = isinstance(tensor, nn.Parameter)
            owner[key] = nn.Parameter(empty, requires_grad=False) if parameter else empty
    program.example_inputs = None  # they would be pickled
    with quiet(), blamed(view, name, "torch.export.save"):
        torch.export.save(program, path)
    return list(tensors)


def _write_package(
    program: ExportedProgram, tensors: dict[str, Tensor], path: Path, view: nn.Module, x: Tensor, name: str
) -> list[str]:
    options = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": False,  # they pay only for dozens of subnets
        "cpp.dynamic_threads": True,
    }
    with quiet(), blamed(view, name, "AOTInductor"):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    with quiet():
        package = torch._inductor.aoti_load_package(str(path))
    used = package.get_constant_fqns()
    package.load_constants({n: tensors[n] for n in used}, check_full_update=True, user_managed=True)
    same_outputs(package, view, x, name, "AOTInductor", *TOLERANCES["aoti"])
    return list(used)
