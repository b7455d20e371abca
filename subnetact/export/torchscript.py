"""`to_torchscript`: writes one file that runs any registered subnet, in C++, Triton, and Python.

TorchScript is in maintenance, and PyTorch does not support it from Python 3.14 on. When Python 3.13 reaches
its end of life (October 2029), this export is deleted; `to_pt2` is its successor. Files that
were written before keep running wherever a libtorch loads TorchScript.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.device import machine
from subnetact.engine.engine import Engine
from subnetact.engine.subnet_program import quiet
from subnetact.errors import ExportError
from subnetact.export.elastic_graph import record_network
from subnetact.export.scripted_subnets import ScriptedSubnets, decide_by
from subnetact.export.subnet_program import bar, chosen_specs, subnet_programs
from subnetact.files.atomic import replacing
from subnetact.files.documents import StrPath
from subnetact.latency.origin import require_measured_on, require_program
from subnetact.latency.table import LatencyTable
from subnetact.operators.base import template_of
from subnetact.profile.modes import ScriptedProgram
from subnetact.profile.sweep import BATCH_SIZES, profile_latency
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.failure import failure
from subnetact.supernet.statistics import batch_norms, statistics_of
from subnetact.supernet.supernet import Supernet

UNSUPPORTED_PYTHON = (3, 14)
"""The first version of Python for which PyTorch does not support TorchScript."""


def to_torchscript(
    engine: Engine,
    path: StrPath,
    *,
    subnets: Sequence[SubnetSpec] | None = None,
    table: LatencyTable | None = None,
    slo_ms: float | None = None,
    batch_sizes: Sequence[int] | None = None,
    progress: bool = True,
) -> torch.jit.ScriptModule:
    """Write one TorchScript file that contains the weights once and runs any registered subnet by its number.

    `torch.jit.load(path)` in Python and `torch::jit::load` in C++ load the file without this package. The
    module has these methods:

    * `forward(*inputs, subnet)` runs a batch. `subnet` is int64, of shape (1,) or of shape (B, 1) with equal
      numbers. Or its shape tells the number: bool of shape (B, number + 1), for batchers that, as
      Triton's, join inputs of equal shapes.
    * `num_subnets()` and `describe(i)` name the subnets.
    * `choose(slack_ms, queued, min_accuracy=0.0, slo_ms=0.0)` returns the subnet and the batch size that
      `SlackFit(table, slo_ms)` chooses for a request that needs this accuracy in percent; `slo_ms` of 0 is
      that of the file. It decides by the latencies of the file itself, which are measured if `slo_ms` is
      given, and the accuracies of the engine.

    Its attributes (`ScriptedSubnets`) say what it is: names, dtypes and sizes of the inputs, accuracies,
    batch sizes, latencies, fingerprint, machine and versions, `model.facts` in Python and
    `model.attr("facts")` in C++.

    On one CPU thread, outputs equal those of `supernet.subnet(spec)(*inputs)` bit for bit. Running the module
    does not change it, so several threads may run different subnets at the same time. Tracing cannot see
    everything, for example a branch on the type of a value; therefore every subnet is compared with the
    supernet, on the engine's example and on random numbers, before the file is written. The file refuses
    inputs of other dtypes and sizes than those of the engine's examples. Only the batch is free, and axes in
    which examples differ, between their sizes.

    A TorchScript file is code. Its interpreter runs no Python, but it has operators that read and write files
    with the rights of the process, so load only files of people you trust. This package loads none.

    Args:
        engine: the engine with the subnets and the example input. It is not changed, and the result has its
            own copy of the weights.
        path: the file to write, for example `model.pt`.
        subnets: specifications of the subnets to register, in the order of their numbers. If None, those that
            the engine serves.
        table: latencies of this file that were measured before, `profile_latency(torch.jit.load(path))`. If
            None, they are measured now, if there is `slo_ms`.
        slo_ms: time in ms that a request usually has. If None, the file cannot choose.
        batch_sizes: the batch sizes to measure, ascending. If None, 1, 2, 4, 8 and 16.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The module in the file.

    Raises:
        ExportError: a module cannot be traced or compiled (the message names it), outputs differ, an argument
            is missing or cannot be used, or Python is too new.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, one is repeated, or one belongs to another space.
        ProfileMismatch: the table belongs to other subnets or other weights, or to another kind of program,
            such as the engine.
        PolicyError: `slo_ms` is below every latency of the table.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_torchscript(engine, "model.pt", slo_ms=30.0, batch_sizes=[1, 2, 4])
        >>> model = torch.jit.load("model.pt")
        >>> subnet, batch_size = model.choose(12.5, 3)  # 12.5 ms are left, and 3 requests wait
        >>> logits = model(images, torch.tensor([1]))  # subnet 1
    """
    if sys.version_info >= UNSUPPORTED_PYTHON:
        raise ExportError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]}: TorchScript is not supported from "
            f"{'.'.join(map(str, UNSUPPORTED_PYTHON))} on; use subnetact.export.to_pt2 or to_onnx, or "
            "export with an older Python: the file runs anywhere"
        )
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ExportError(f"path: {path} is not a file in a folder that exists; create the folder first")
    specs = chosen_specs(engine, subnets)
    low = [spec for spec in specs if spec.precision != FLOAT32]
    if low:
        raise ExportError(
            f"{low[0]}: a TorchScript file slices the full weights while it runs, and has no copy of them at "
            f"{low[0].precision}; export the subnet at float32, or use subnetact.export.to_onnx or to_pt2"
        )
    if (table, batch_sizes).count(None) < (2 if slo_ms is None else 1):
        raise ExportError(
            "table, slo_ms, batch_sizes: `choose` compares latencies with the time in ms that a request "
            "usually has; give slo_ms=, and batch_sizes= to measure the file, or table= if that was done"
        )
    here = machine(engine.device)
    facts, axes, programs, supernet = subnet_programs(engine, specs, ScriptedProgram.program, **here)
    keys, accuracy = [spec.key for spec in specs], facts["accuracy"]
    if corrected := [spec for spec in specs if (row := supernet.norms.get(spec)) and row.corrected]:
        raise ExportError(
            f"{corrected[0]} has corrections, which a TorchScript file does not hold; use to_onnx or to_pt2, "
            "or drop them with supernet.norms.drop([spec])"
        )
    if table is not None:
        require_measured_on(table, keys, facts["fingerprint"])
        require_program(table, ScriptedProgram.program, "leave table= out, and the file is measured")
    elif slo_ms is not None and None in accuracy:
        raise ExportError(
            f"slo_ms: `choose` compares accuracies, and that of {keys[accuracy.index(None)]!r} is not known; "
            "give them to the engine, Engine(..., accuracy=[...])"
        )
    x = map_tensors(lambda part: part[None].to(engine.device), engine.sample)
    inputs = _inputs(supernet.network, x)
    rows, means, variances = _rows(supernet, specs)
    norms, sizes = tuple(batch_norms(supernet.network)), len(supernet.space.dimensions)
    description = {"rows": rows, "keys": keys, "inputs": axes.described(inputs), "limits": axes.limits}
    description["accuracy"] = [math.nan if percent is None else percent for percent in accuracy]
    description["facts"] = _texts(facts)
    with quiet():
        network = record_network(supernet.network.requires_grad_(False).eval(), list(inputs), norms, sizes)
        scripted: Any = torch.jit.script(ScriptedSubnets(network, means, variances, description).eval())
        scripted.define(_forward(inputs))
    for i, subnet in enumerate(bar(programs, progress)):
        batches = [one for one in (subnet.x, *subnet.smaller) if failure(subnet.view, one) is None]
        run = partial(_call, scripted, torch.tensor([i]))
        subnet.require_equal(run, "TorchScript", batches=[x, *batches])
    if slo_ms is not None:
        if table is None:
            table = profile_latency(scripted, batch_sizes or BATCH_SIZES, progress=progress)
        decide_by(scripted, table, slo_ms)
        scripted.facts = _texts({**facts, **table.stamp})
    with replacing(path) as temporary, quiet():
        torch.jit.save(scripted, temporary)
    return scripted  # type: ignore[no-any-return]


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that one word tells, as texts."""
    return {name: str(fact) for name, fact in facts.items() if isinstance(fact, str | int | float)}


def _inputs(network: nn.Module, example: Any) -> dict[str, Tensor]:
    """Return an example by the names of the network's arguments."""
    signature = inspect.signature(template_of(network).forward)
    inputs = example if isinstance(example, dict) else call_with(signature.bind, example).arguments
    if "subnet" in inputs or not all(isinstance(part, Tensor) for part in inputs.values()):
        raise ExportError(
            f"example: this format takes a tensor per input, and none may be called subnet; the network "
            f"takes {signature}"
        )
    return inputs


def _rows(supernet: Supernet, specs: list[SubnetSpec]) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return the integers of every subnet, and the flat means and variances of all of them."""
    norms = tuple(batch_norms(supernet.network))
    rows, means, variances, start = [], list[Tensor](), list[Tensor](), 0
    for spec in specs:
        starts = dict.fromkeys(norms, 0)
        for name, (mean, variance) in statistics_of(supernet, spec).items():
            starts[name], start = start, start + mean.numel()
            means.append(mean)
            variances.append(variance)
        rows.append([*supernet.space.resolve(spec), *starts.values()])
    nothing = [torch.empty(0)]
    return rows, torch.cat(means or nothing), torch.cat(variances or nothing)


def _forward(inputs: Mapping[str, Tensor]) -> str:
    """Return the source of the method `forward`."""
    names = ", ".join(inputs)
    dtypes = ", ".join(f"{name}.dtype == {x.dtype}" for name, x in inputs.items())
    selected = f"self.select(subnet, {next(iter(inputs))}.size(0))"
    called = f"self.network({names}, {selected}, self.means, self.variances)"
    return (
        f"def forward(self, {names}, subnet):\n    self.check([{names}], [{dtypes}])\n    return {called}\n"
    )


def _call(scripted: Any, subnet: Tensor, *args: Tensor, **kwargs: Tensor) -> Any:
    return scripted(*args, *kwargs.values(), subnet)
