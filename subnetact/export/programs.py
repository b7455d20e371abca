"""`to_exported_programs`: writes one `torch.export` program or AOTInductor package per subnet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from subnetact.comparison import FUSED
from subnetact.engine.engine import Engine
from subnetact.errors import ExportError
from subnetact.export.subnet_program import SubnetProgram, chosen_specs, exporting, quiet
from subnetact.files.documents import StrPath
from subnetact.spec import SubnetSpec

PROGRAMS_KIND = "subnetact.programs"
PROGRAM_WEIGHTS = "weights.pt"
"""The file with the tensors of every program by name. torch.save writes every storage once, and slices of a
supernet's weights are views of one storage, so that the full weights are in it once for all subnets."""
COMPILERS = ("none", "aoti")


def to_exported_programs(
    engine: Engine,
    directory: StrPath,
    *,
    compile: str = "none",
    subnets: Sequence[SubnetSpec] | None = None,
    dynamic_batch: bool = True,
    progress: bool = True,
) -> Path:
    """Write one program per subnet, and one file with the weights of all of them.

    `load_exported` reads the directory. The programs contain no weights: `weights.pt` holds those of all
    subnets, each once. Every program is run and compared with the supernet before anything is written to
    `directory`. They take batches of any size; all other axes are those of the engine's example, of the
    largest one if there are several (`ExportWarning`), and nothing is padded.

    Args:
        engine: the engine with the subnets and the example input, which may be a tensor, or a flat tuple or
            dictionary of tensors.
        directory: a new or empty directory, or an earlier export, which is replaced as a whole.
        compile: "none" writes `torch.export` graphs. They run with torch's operators on any machine whose
            torch can read them. "aoti" writes code that AOTInductor compiles for this version of torch and
            this kind of CPU or GPU. It needs a C++ compiler, and 10 to 40 seconds per subnet.
        subnets: specifications of the subnets to export; program i is subnet `subnets[i]`. If None, all that
            the engine serves.
        dynamic_batch: whether programs take batches of any size. If false, they take batches of one.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The directory.

    Raises:
        ExportError: a module cannot be exported, or a program's outputs differ from the supernet's; the
            message names it. Or `compile` is unknown, or there is no C++ compiler.
        FileFormatError: the directory contains something else.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, one is repeated, or one belongs to another space.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_exported_programs(engine, "programs")
        >>> exported = load_exported("programs", trusted=True)
        >>> logits = exported(images, subnet=0)
    """
    if compile not in COMPILERS:
        raise ExportError(f"compile: {compile!r} is not known; choose from {', '.join(COMPILERS)}")
    chosen = chosen_specs(engine, subnets)
    if compile == "aoti":
        _need_compiler(engine.device)
    facts = {
        "compile": compile,
        "device": engine.device.type,
        "capability": capability(engine.device),
        "dynamic_batch": dynamic_batch,
    }
    weights: list[dict[str, Tensor]] = []
    size = 3 if dynamic_batch else 1
    with exporting(engine, directory, PROGRAMS_KIND, chosen, size, facts, progress) as (folder, programs):
        for subnet in programs:
            program = subnet.traced(dynamic_batch)
            tensors = {**program.state_dict, **program.constants}
            if strange := [n for n, t in tensors.items() if not isinstance(t, Tensor)]:
                constant = strange[0]
                raise ExportError(f"subnet {subnet.name}: the constant {constant} is not a tensor; remove it")
            write = _write_graph if compile == "none" else _write_package
            used = write(program, tensors, folder / program_name(len(weights)), subnet)
            weights.append({name: tensors[name].detach() for name in used})
        torch.save(weights, folder / PROGRAM_WEIGHTS)
    return Path(directory)


def program_name(subnet: int) -> str:
    """Return the name of the file with the program of a subnet."""
    return f"program-{subnet}.pt2"


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
    program: ExportedProgram, tensors: dict[str, Tensor], path: Path, subnet: SubnetProgram
) -> list[str]:
    subnet.require_equal(program.module(), "torch.export")
    for owner in (program.state_dict, program.constants):
        for key, tensor in owner.items():
            empty = torch.empty(0, dtype=tensor.dtype)
            parameter = isinstance(tensor, nn.Parameter)
            owner[key] = nn.Parameter(empty, requires_grad=False) if parameter else empty
    program.example_inputs = None
    with quiet(), subnet.blamed("torch.export.save"):
        torch.export.save(program, path)
    return list(tensors)


def _write_package(
    program: ExportedProgram, tensors: dict[str, Tensor], path: Path, subnet: SubnetProgram
) -> list[str]:
    options = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": False,  # precompiling pays only for dozens of subnets
        "cpp.dynamic_threads": True,
    }
    with quiet(), subnet.blamed("AOTInductor"):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    with quiet():
        package = torch._inductor.aoti_load_package(str(path))
    used = package.get_constant_fqns()
    package.load_constants({n: tensors[n] for n in used}, check_full_update=True, user_managed=True)
    subnet.require_equal(package, "AOTInductor", FUSED)
    return list(used)
