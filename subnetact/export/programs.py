"""`to_exported_programs`: writes one `torch.export` program per subnet, over one file of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from subnetact.engine.engine import Engine
from subnetact.engine.subnet_program import SubnetProgram, quiet
from subnetact.errors import ExportError
from subnetact.export.subnet_program import bar, export_format, subnet_name, subnet_programs
from subnetact.files.documents import StrPath
from subnetact.spec import SubnetSpec

PROGRAM_WEIGHTS = "weights.pt"
"""The file with the tensors of every program by name. torch.save writes every storage once, and slices of a
supernet's weights are views of one storage, so that the full weights are in it once for all subnets."""


def to_exported_programs(
    engine: Engine,
    directory: StrPath,
    *,
    subnets: Sequence[SubnetSpec] | None = None,
    progress: bool = True,
) -> Path:
    """Write one program per subnet, and one file with the weights of all of them.

    `load_exported` reads the directory. The programs contain no weights: `weights.pt` holds those of all
    subnets, each once. They run with torch's operators; `to_pt2` writes compiled ones. Every program is run
    and compared with the supernet before anything is written to `directory`. They take batches of any size,
    and on the other axes the sizes of the engine's example. If there are several, axes where they differ take
    all sizes from the smallest to the largest one. Nothing is padded.

    Args:
        engine: the engine with the subnets and the example input, which may be a tensor, or a flat tuple or
            dictionary of tensors.
        directory: a new or empty directory, or an earlier export, which is replaced as a whole.
        subnets: specifications of the subnets to export; program i is subnet `subnets[i]`. If None, all that
            the engine serves.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The directory.

    Raises:
        ExportError: a module cannot be exported, or a program's outputs differ from the supernet's; the
            message names it.
        FileFormatError: the directory contains something else.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, one is repeated, or one belongs to another space.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_exported_programs(engine, "programs")
        >>> exported = load_exported("programs", trusted=True)
        >>> logits = exported(images, subnet=0)
    """
    facts, axes, programs, _ = subnet_programs(engine, subnets, "torch.export")
    weights: list[dict[str, Tensor]] = []
    with export_format().writing(directory, facts) as folder:
        for i, subnet in enumerate(bar(programs, progress)):
            program = subnet.traced(axes)
            weights.append(tensors_by_name(program, subnet))
            _write_graph(program, folder / f"{subnet_name(i)}.pt2", subnet)
        torch.save(weights, folder / PROGRAM_WEIGHTS)
    return Path(directory)


def tensors_by_name(program: ExportedProgram, subnet: SubnetProgram) -> dict[str, Tensor]:
    """Return the weights, statistics and constants of a program by name."""
    tensors = {**program.state_dict, **program.constants}
    for name, constant in tensors.items():
        if not isinstance(constant, Tensor):
            raise ExportError(f"subnet {subnet.name}: the constant {name} is not a tensor; remove it")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _write_graph(program: ExportedProgram, path: Path, subnet: SubnetProgram) -> None:
    subnet.require_equal(program.module(), "torch.export")
    for owner in (program.state_dict, program.constants):
        for key, tensor in owner.items():
            empty = torch.empty(0, dtype=tensor.dtype)
            parameter = isinstance(tensor, nn.Parameter)
            owner[key] = nn.Parameter(empty, requires_grad=False) if parameter else empty
    program._example_inputs = None  # whose setter in torch 2.6 takes no None
    with quiet(), subnet.blamed("torch.export.save"):
        torch.export.save(program, path)
