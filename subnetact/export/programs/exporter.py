"""`to_exported_programs`: writes one `torch.export` program or AOTInductor package per subnet."""

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
from subnetact.engine.inputs import example_to_json
from subnetact.errors import ExportError, FileFormatError
from subnetact.export.manifest import writing_folder
from subnetact.export.programs.graph_program import GraphProgram
from subnetact.export.programs.program import (
    blamed,
    chosen_subnets,
    example_batch,
    exported_program,
    quiet,
    same_outputs,
    snapshot_of,
)
from subnetact.export.programs.shared_tensors import SharedTensors, TensorPosition
from subnetact.supernet.batches import tensors_of

__all__ = ["KIND", "TOLERANCES", "WEIGHTS", "to_exported_programs"]

KIND = "subnetact.programs"
WEIGHTS = "weights.safetensors"
TOLERANCES = {"none": (5e-5, 5e-5), "aoti": (1e-3, 1e-4)}
"""Relative and absolute tolerance for the difference from the supernet's outputs, by `compile`."""


def to_exported_programs(
    engine: Engine,
    directory: str | PathLike[str],
    *,
    compile: str = "none",
    subnets: Sequence[int] | None = None,
    dynamic_batch: bool = True,
    progress: bool = True,
) -> Path:
    """Write one program per subnet, and one file with the weights of all of them.

    `load_exported` reads the directory. The programs contain no weights: each of their tensors is a view of
    `weights.safetensors`. Every program is run and compared with the supernet before anything is written to
    `directory`.

    Args:
        engine: the engine with the subnets and the example input, which may be a tensor, or a flat tuple or
            dictionary of tensors.
        directory: a new or empty directory, or an earlier export, which is replaced as a whole.
        compile: "none" writes `torch.export` graphs. They run with torch's operators on any machine whose
            torch can read them. "aoti" writes code that AOTInductor compiles for this version of torch and
            this kind of CPU or GPU. It needs a C++ compiler, and 10 to 40 seconds per subnet.
        subnets: ids of the engine's subnets, whole numbers; program i is subnet `subnets[i]`. If None, all
            that are served. (`to_torchscript` takes specifications instead.)
        dynamic_batch: whether programs take batches of any size. If false, they take batches of one.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The directory.

    Raises:
        ExportError: a module cannot be exported, or a program's outputs differ from the supernet's; the
            message names it. Or `compile` is unknown, or there is no C++ compiler.
        FileFormatError: the directory contains something else.
        NotCalibrated: BatchNorm statistics of a subnet were dropped with the weights that they belonged to.
        SpecError: the engine has no such id.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_exported_programs(engine, "programs")
        >>> exported = load_exported("programs")
        >>> logits = exported(images, subnet=0)
    """
    if compile not in TOLERANCES:
        raise ExportError(f"compile: {compile!r} is not known; choose from {', '.join(TOLERANCES)}")
    chosen = chosen_subnets(engine, subnets)
    if compile == "aoti":
        _need_compiler(engine.device)
    example = engine.example
    x = example_batch(example, 3 if dynamic_batch else 1, engine.device)
    shared = SharedTensors()
    supernet = snapshot_of(engine, chosen)
    described: list[dict[str, Any]] = []
    facts = {
        "compile": compile,
        "device": engine.device.type,
        "capability": capability(engine.device),
        "space": supernet.space.id,
        "fingerprint": supernet.fingerprint(),
        "example": example_to_json(example),
        "dynamic_batch": dynamic_batch,
        "subnets": described,
    }
    with writing_folder(Path(directory), KIND, facts) as folder:
        for i, subnet in enumerate(tqdm(chosen, desc="exporting subnets", disable=not progress or None)):
            name = f"{subnet.id} ({subnet.spec})"
            view, _ = supernet.private_view(subnet.spec)
            program = exported_program(view, x, name, dynamic_batch)
            tensors = {**program.state_dict, **program.constants}
            strange = [n for n, t in tensors.items() if not isinstance(t, Tensor)]
            if strange:
                raise ExportError(f"subnet {name}: the constant {strange[0]} is not a tensor; remove it")
            path = folder / f"program-{i}.pt2"
            write = _write_graph if compile == "none" else _write_package
            used = write(program, tensors, path, view, x, name)
            views: dict[str, TensorPosition] = {n: shared.view(tensors[n]) for n in used}
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
    """Return the instruction set of a CPU, or the compute capability of a GPU, that compiled code uses."""
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
    program: ExportedProgram, tensors: dict[str, Tensor], path: Path, view: nn.Module, x: Any, name: str
) -> list[str]:
    for owner in (program.state_dict, program.constants):
        for key, tensor in owner.items():
            empty = torch.empty(0, dtype=tensor.dtype)
            parameter = isinstance(tensor, nn.Parameter)
            owner[key] = nn.Parameter(empty, requires_grad=False) if parameter else empty
    program.example_inputs = None  # example inputs would be pickled
    with quiet(), blamed(view, name, "torch.export.save"):
        torch.export.save(program, path)
    try:
        written = GraphProgram(path, tensors, next(tensors_of(x)).device)
    except FileFormatError as error:
        raise ExportError(
            f"subnet {name}: load_exported could not read the graph ({error.__cause__}); use "
            "compile='aoti', or serve the Engine itself"
        ) from error
    same_outputs(written, view, x, name, "torch.export", *TOLERANCES["none"])
    return list(tensors)


def _write_package(
    program: ExportedProgram, tensors: dict[str, Tensor], path: Path, view: nn.Module, x: Any, name: str
) -> list[str]:
    options = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": False,  # precompiling pays only for dozens of subnets
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
