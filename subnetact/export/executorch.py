"""`to_executorch`: writes one ExecuTorch program, for phones, with a method per subnet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_unflatten

from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like
from subnetact.engine.subnet_program import SubnetProgram, quiet
from subnetact.errors import extra_needed
from subnetact.export.subnet_program import bar, subnet_programs
from subnetact.files.atomic import replacing
from subnetact.files.documents import StrPath
from subnetact.spec import SubnetSpec


def to_executorch(
    engine: Engine,
    path: StrPath,
    *,
    subnets: Sequence[SubnetSpec] | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> Path:
    """Write one `.pte` file with the methods `subnet_0`, `subnet_1`, ..., for batches of one size.

    The methods run in XNNPACK what it can run. Its file shares weights that are equal as a whole, and no
    slices, so the file is about as large as all subnets together. Seen with ExecuTorch 1.5 on a CPU of a
    server, and not on a phone yet.

    Args:
        engine: the engine with the subnets and the example input; of several examples, the largest counts.
        path: the file, which is replaced if there is one.
        subnets: specifications of the subnets to export; method i has subnet `subnets[i]`. If None, those
            that the engine serves.
        batch_size: the number of inputs that every call takes.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The path.

    Raises:
        MissingExtra: the package `executorch` is not installed.
        ExportError: a module cannot be exported, the message names it; or the outputs of a method differ from
            the supernet's, and nothing is written.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, one is repeated, or one belongs to another space.

    Example:
        >>> to_executorch(engine, "model.pte")
        >>> method = executorch.runtime.Runtime.get().load_program("model.pte").load_method("subnet_0")
        >>> (logits,) = method.execute([image])
    """
    with extra_needed("ExecuTorch files need ExecuTorch: pip install executorch"):
        exir: Any = import_module("executorch.exir")
        runtime: Any = import_module("executorch.runtime").Runtime.get()
        xnnpack: Any = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    _, _, programs, _ = subnet_programs(engine, subnets, "executorch", device="cpu")
    x = batch_like(engine.sample, batch_size, torch.device("cpu"))
    exported = {}
    for i, subnet in enumerate(bar(programs, progress)):
        exported[f"subnet_{i}"] = SubnetProgram(subnet.name, subnet.view, x).traced(None)
    with quiet(), programs[0].blamed("ExecuTorch"):
        lowered = exir.to_edge_transform_and_lower(exported, partitioner=[xnnpack.XnnpackPartitioner()])
        made = lowered.to_executorch()
    loaded = runtime.load_program(made.buffer)
    for (name, program), subnet in zip(exported.items(), programs, strict=True):
        run = partial(_outputs, loaded.load_method(name), program)
        subnet.require_equal(run, "ExecuTorch", batches=[x])
    with replacing(path) as file:
        file.write_bytes(made.buffer)
    return Path(path)


def _outputs(method: Any, program: ExportedProgram, *args: Any, **kwargs: Any) -> Any:
    """Run a method, and return its outputs in the structure that the network's have."""
    return tree_unflatten(method.execute(tree_leaves((args, kwargs))), program.call_spec.out_spec)
