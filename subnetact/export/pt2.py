"""`to_pt2`: writes one file with a compiled program of every subnet over one copy of the weights.

The file is an archive that torch defines (`torch.export.pt2_archive`). Its weights are whole storages, and
every program says which slices of them it takes; so they are in the file, and in memory, once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from subnetact.comparison import FUSED
from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like
from subnetact.errors import ExportError
from subnetact.export.input_axes import InputAxes
from subnetact.export.programs import capability, tensors_by_name
from subnetact.export.subnet_program import SubnetProgram, bar, chosen_specs, quiet, subnet_programs
from subnetact.files.atomic import replacing
from subnetact.files.documents import DocumentFormat, StrPath
from subnetact.spec import SubnetSpec

PT2 = DocumentFormat("an export", "subnetact.pt2", 1, "give a file that to_pt2 wrote")
FACTS = "extra/subnetact.json"
"""The record with the inputs, the subnets and their accuracies, the weights' hash, and what compiled it."""
PROGRAMS = "data/aotinductor/"
FROZEN = "data/frozen/{}-batch-{}.pt2"
"""Records that are packages of their own: `load_pt2` would give constants to every program that it knows."""


PACKED = FUSED._replace(largest=5e-4)
"""Frozen programs also fold BatchNorm into weights: random OFA-ResNet50 is off by 1.05e-4 of the largest."""


def to_pt2(
    engine: Engine,
    path: StrPath,
    *,
    frozen_mb: float = 0.0,
    frozen_batches: Sequence[int] = (1,),
    subnets: Sequence[SubnetSpec] | None = None,
    dynamic_batch: bool = True,
    progress: bool = True,
) -> Path:
    """Compile every subnet with AOTInductor, and write all of them into one file with the weights once.

    `load_exported` runs it in Python, and `examples/cpp/subnetact_pt2.h` in C++. In both, inputs of other
    sizes or dtypes than the engine's raise an exception. torch alone loads the file, too:
    `torch.export.pt2_archive._package.load_pt2(path, load_weights_from_disk=True).aoti_runners["subnet-0"]`;
    compiled code itself checks no input, and reads outside of one that is too small.

    Batches have any size. Where the shapes of several examples of the engine differ, axes have any size from
    the smallest to the largest; nothing is padded. Every program is compared with the supernet before the
    file is written.

    Args:
        engine: the engine with the subnets and the example input, which may be a tensor, or a flat tuple or
            dictionary of tensors.
        path: the file to write, `model.pt2` for example.
        frozen_mb: MiB that frozen copies of weights may take in the file and in memory. A frozen program has
            its weights, with BatchNorm folded and packed, in its code, and is as fast as a fused program of
            the Engine. The engine's pinned subnets come first, then the others from the largest on, each if
            it fits.
        frozen_batches: the batch sizes that frozen programs are for, each with a copy of its own. Batches of
            other sizes run over the shared weights.
        subnets: specifications of the subnets to export; "subnet-0" is `subnets[0]`. If None, all that the
            engine serves.
        dynamic_batch: whether programs take batches of any size. If false, they take batches of one.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The path.

    Raises:
        ExportError: a module cannot be exported, or a program's outputs differ from the supernet's; the
            message names it. Or there is no C++ compiler, torch is too old, or an argument cannot be used.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, one is repeated, or one belongs to another space.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_pt2(engine, "model.pt2", frozen_mb=200)
        >>> exported = load_exported("model.pt2", trusted=True)
        >>> logits = exported(images, subnet=0)
    """
    chosen = chosen_specs(engine, subnets)
    if Path(path).suffix != ".pt2" or not Path(path).absolute().parent.is_dir():
        raise ExportError(f"path: {path} is not a .pt2 file in a folder that exists; name it model.pt2")
    sizes = sorted(set(frozen_batches if dynamic_batch else [1]), reverse=True)
    if not frozen_mb >= 0 or not all(type(size) is int and size > 0 for size in sizes):
        raise ExportError(
            f"frozen_mb {frozen_mb} and frozen_batches {frozen_batches}: give MiB and sizes >= 1"
        )
    archives = archive_tools()
    _need_compiler(engine.device)
    own = {"device": engine.device.type, "capability": capability(engine.device)}
    facts, axes, programs = subnet_programs(engine, chosen, dynamic_batch, own)
    frozen = _frozen(engine, chosen, programs, frozen_mb, len(sizes))
    facts["frozen"] = {str(i): sizes for i in sorted(frozen)}
    with TemporaryDirectory() as folder, replacing(path) as temporary:
        package = Path(folder) / "package.pt2"
        with quiet(), temporary.open("wb") as file, archives.PT2ArchiveWriter(file) as archive:
            archive.write_string(FACTS, json.dumps({**PT2.header, **facts}, indent=1))
            weights = dict[tuple[int, torch.dtype], tuple[str, Tensor]]()
            for i, subnet in enumerate(bar(programs, progress)):
                slices = _add_weights(archive, weights, _compile(subnet, axes, package))
                with ZipFile(package) as files:
                    for name in files.namelist():
                        if f"{PROGRAMS}model/" in name:
                            place = f"{PROGRAMS}{subnet_name(i)}/{Path(name).name}"
                            archive.write_bytes(place, files.read(name))
                archive.write_string(f"{PROGRAMS}{subnet_name(i)}/weights_config.json", json.dumps(slices))
                for size in facts["frozen"].get(str(i), ()):
                    x = batch_like(engine.sample, size, engine.device)
                    fixed = InputAxes(engine.samples, dynamic_batch=False)
                    _compile(replace(subnet, x=x, smaller=()), fixed, package, frozen=True)
                    archive.write_file(FROZEN.format(subnet_name(i), size), str(package))
    return Path(path)


def subnet_name(subnet: int) -> str:
    """Return the name of a subnet's program in the file."""
    return f"subnet-{subnet}"


def archive_tools() -> Any:
    """Return the module of torch that writes and loads archives; ExportError if this torch is too old."""
    with suppress(ImportError):
        tools = import_module("torch.export.pt2_archive._package")
        if "load_weights_from_disk" in signature(tools.load_pt2).parameters:
            return tools
    raise ExportError(
        f"torch {torch.__version__}: it cannot load a .pt2 with its weights; install a newer torch (2.13 is "
        "tested), or use subnetact.export.to_exported_programs"
    )


def _frozen(
    engine: Engine, specs: list[SubnetSpec], programs: list[SubnetProgram], budget_mb: float, copies: int
) -> set[int]:
    """Return the subnets whose frozen copies fit in a budget: pinned ones first, then the largest."""
    pinned = [engine.specs[i] for i in engine.config.pinned]
    sizes = [sum(t.nbytes for t in (*p.view.parameters(), *p.view.buffers())) for p in programs]
    order = sorted(range(len(specs)), key=lambda i: (-(specs[i] in pinned), -sizes[i]))
    chosen, left = set[int](), budget_mb * 2**20
    for i in order:
        if sizes[i] * copies <= left:
            chosen.add(i)
            left -= sizes[i] * copies
    return chosen


def _need_compiler(device: torch.device) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ExportError(
            f"a .pt2 needs a C++ compiler for {device}: apt-get install g++, or use to_exported_programs"
        ) from error


def _compile(
    subnet: SubnetProgram, axes: InputAxes, package: Path, frozen: bool = False
) -> dict[str, Tensor]:
    """Compile a subnet into a package, compare it, and return the tensors that it needs from outside."""
    options = {
        "aot_inductor.package_constants_in_so": frozen,
        "aot_inductor.check_lowerbound": False,  # torch means 2 by it, and programs run batches of one
        "aot_inductor.precompile_headers": False,  # precompiling pays only for dozens of subnets
        "cpp.dynamic_threads": True,
        "freezing": frozen,
    }
    program = subnet.traced(axes)
    tensors = tensors_by_name(program, subnet)
    with quiet(), subnet.blamed("AOTInductor"), torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
    with quiet():
        compiled = torch._inductor.aoti_load_package(str(package))
    if frozen:
        subnet.require_equal(compiled, "AOTInductor", PACKED, [subnet.x])
        return {}
    used = {name: tensors[name] for name in compiled.get_constant_fqns()}
    compiled.load_constants(used, check_full_update=True, user_managed=True)
    subnet.require_equal(compiled, "AOTInductor", FUSED)
    return used


def _add_weights(
    archive: Any, weights: dict[tuple[int, torch.dtype], tuple[str, Tensor]], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Add the storages of tensors that are not in the archive yet; return the slice that each tensor is.

    `weights` keeps the tensors, so that no other storage gets the address of one that is in the archive.
    """
    slices = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.dtype
        if key not in weights:
            weights[key] = f"weight_{len(weights)}", tensor
            size = storage.nbytes() // tensor.element_size()
            buffer = io.BytesIO()
            torch.save(
                torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,)),
                buffer,
            )
            archive.write_bytes(f"data/weights/{weights[key][0]}", buffer.getvalue())
        slices[name] = [weights[key][0], list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
    return slices
