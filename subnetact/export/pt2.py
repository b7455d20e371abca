"""`to_pt2`: writes one file with a compiled program of every subnet over one copy of the weights.

The file is an archive that torch defines (`torch.export.pt2_archive`). Its weights are whole storages, and
every program says which slices of them it takes; so they are in the file, and in memory, once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from subnetact.comparison import FUSED
from subnetact.engine.engine import Engine
from subnetact.engine.input_axes import InputAxes
from subnetact.engine.subnet_program import SubnetProgram, quiet
from subnetact.errors import ExportError
from subnetact.export.subnet_program import bar, subnet_name, subnet_programs
from subnetact.files.atomic import replacing
from subnetact.files.documents import DocumentFormat, StrPath
from subnetact.spec import SubnetSpec

PT2 = DocumentFormat("an export", "subnetact.pt2", 1, "give a file that to_pt2 wrote")
FACTS = "subnetact.json"
"""The extra file: the inputs, the subnets and their accuracies, the weights' hash, and what compiled it."""


def to_pt2(
    engine: Engine,
    path: StrPath,
    *,
    subnets: Sequence[SubnetSpec] | None = None,
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
        subnets: specifications of the subnets to export; "subnet-0" is `subnets[0]`. If None, all that the
            engine serves.
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
        >>> to_pt2(engine, "model.pt2")
        >>> exported = load_exported("model.pt2", trusted=True)
        >>> logits = exported(images, subnet=0)
    """
    if Path(path).suffix != ".pt2" or not Path(path).absolute().parent.is_dir():
        raise ExportError(f"path: {path} is not a .pt2 file in a folder that exists; name it model.pt2")
    tools, here = archive_tools(), capability(engine.device)
    facts, axes, programs, _ = subnet_programs(engine, subnets, "aotinductor", capability=here)
    with TemporaryDirectory() as folder, replacing(path) as temporary, quiet():
        compiled = {
            subnet_name(i): _compiled(subnet, axes, f"{folder}/{subnet_name(i)}")
            for i, subnet in enumerate(bar(programs, progress))
        }
        archive = f"{folder}/model.pt2"
        about = {FACTS: json.dumps({**PT2.header, **facts}, indent=1)}
        tools.package_pt2(archive, aoti_files=compiled, extra_files=about)
        runners = tools.load_pt2(archive, load_weights_from_disk=True).aoti_runners
        for i, subnet in enumerate(programs):
            subnet.require_equal(runners[subnet_name(i)], "AOTInductor", FUSED)
        copyfile(archive, temporary)
    return Path(path)


def archive_tools() -> Any:
    """Return the module of torch that writes and loads archives; ExportError if this torch is too old."""
    with suppress(ImportError, AttributeError):
        import_module("torch._inductor.config").aot_inductor.package_constants_on_disk_format  # noqa: B018
        return import_module("torch.export.pt2_archive._package")
    raise ExportError(
        f"torch {torch.__version__}: it cannot load a .pt2 with its weights; install a newer torch (2.13 is "
        "tested), or use subnetact.export.to_onnx"
    )


def capability(device: torch.device) -> str:
    """Return the instruction set of a CPU, or the compute capability of a GPU, that compiled code uses."""
    if device.type == "cuda":
        return ".".join(map(str, torch.cuda.get_device_capability(device)))
    return str(torch.backends.cpu.get_cpu_capability())


def _compiled(subnet: SubnetProgram, axes: InputAxes, folder: str) -> list[Any]:
    """Compile a subnet into a folder; return its files, and which tensors it takes."""
    packing = import_module("torch.export.pt2_archive._package_weights")
    options = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": folder,  # else processes that compile the same subnet share files
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
        "aot_inductor.check_lowerbound": False,  # torch means 2 by it, and programs run batches of one
        "aot_inductor.precompile_headers": False,  # precompiling pays only for dozens of subnets
        "cpp.dynamic_threads": True,
    }
    program = subnet.traced(axes)
    tensors = {**program.state_dict, **program.constants}
    with subnet.blamed("AOTInductor"), torch.no_grad():
        files: Any = torch._inductor.aot_compile(program.module(), *program.example_inputs, options=options)
    return [
        packing.Weights({name: _whole(tensors[name].detach(), packing) for name in file})
        if isinstance(file, packing.Weights)
        else file
        for file in files
    ]


def _whole(tensor: Tensor, packing: Any) -> tuple[Tensor, Any]:
    """Return the tensor of a whole storage, which torch packs, and the properties of the slice of it."""
    storage, properties = tensor.untyped_storage(), packing.TensorProperties(tensor)
    properties.is_complete = lambda: True  # else torch would join slices, and forget where they begin
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,)), properties
