"""`to_torchscript`: writes one file that runs any registered subnet, in C++, Triton, and Python.

TorchScript is in maintenance, and PyTorch does not support it from Python 3.14 on. When Python 3.13 reaches
its end of life (October 2029), this export is deleted; `to_exported_programs` is its successor. Files that
were written before keep running wherever a libtorch loads TorchScript.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from subnetact.engine.engine import Engine
from subnetact.engine.inputs import batch_like
from subnetact.errors import ExportError, ProfileMismatch
from subnetact.export.elastic_graph import record_network
from subnetact.export.scripted_subnets import ScriptedSubnets
from subnetact.export.subnet_program import quiet, require_equal
from subnetact.files.atomic import replacing
from subnetact.latency.table import LatencyTable
from subnetact.operators.base import template_of
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.batches import map_tensors
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["to_torchscript"]

UNSUPPORTED_PYTHON = (3, 14)
"""The first version of Python for which PyTorch does not support TorchScript."""


def to_torchscript(
    source: Engine | Supernet,
    path: str | PathLike[str],
    subnets: Sequence[SubnetSpec] | None = None,
    *,
    table: LatencyTable | None = None,
    slo_ms: float | None = None,
    example: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    allow_uncalibrated: bool = False,
    progress: bool = True,
) -> torch.jit.ScriptModule:
    """Write one TorchScript file that contains the weights once and runs any registered subnet by its number.

    `torch.jit.load(path)` in Python and `torch::jit::load` in C++ load the file without this package. The
    module has these methods:

    * `forward(*inputs, subnet)` runs a batch. `subnet` is int64, of shape (1,) or of shape (B, 1) with equal
      numbers.
    * `num_subnets()` and `describe(i)` name the subnets.
    * `choose(slack_ms, queued)` returns the subnet and the batch size that `SlackFit(table, slo_ms)` chooses.

    On one CPU thread, outputs equal those of `supernet.subnet(spec)(*inputs)` bit for bit. Running the module
    does not change it, so several threads may run different subnets at the same time. Tracing cannot see
    everything, for example a branch on the type of a value; therefore every subnet is compared with the
    supernet before the file is written.

    A TorchScript file is code. Its interpreter runs no Python, but it has operators that read and write files
    with the rights of the process, so load only files of people you trust. This package loads none but the
    one that it has just written.

    Args:
        source: an engine or a supernet. It is not changed, and the result has its own copy of the weights.
        path: the file to write, for example `model.pt`.
        subnets: specifications of the subnets to register, in the order of their numbers. If None, those that
            the engine serves.
        table: latencies of these subnets, `engine.tables["scheduler"]` for example. If None, the file cannot
            choose.
        slo_ms: time in ms that a request usually has; it is required with a table.
        example: one batch of every input, by name or in order: `x` of shape (N, C, H, W) for images. Outputs
            are compared on it, and on random numbers if all elements of a floating-point input are equal. The
            file refuses inputs with another number of dimensions. If None, the engine's example as a batch of
            one; a supernet has none.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own run on the shared ones.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The module in the file.

    Raises:
        ExportError: a module cannot be traced or compiled (the message names it), outputs differ, an argument
            is missing or cannot be used, or Python is too new.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, or one belongs to another space.
        ProfileMismatch: the table belongs to other subnets or other weights.
        PolicyError: `slo_ms` is below every latency of the table.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_torchscript(engine, "model.pt", table=engine.tables["scheduler"], slo_ms=30.0)
        >>> model = torch.jit.load("model.pt")
        >>> logits = model(images, torch.tensor([1]))  # subnet 1
    """
    if sys.version_info >= UNSUPPORTED_PYTHON:
        raise ExportError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]}: TorchScript is not supported from "
            f"{'.'.join(map(str, UNSUPPORTED_PYTHON))} on; use subnetact.export.to_exported_programs, or "
            "export with an older Python: the file runs anywhere"
        )
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ExportError(f"path: {path} is not a file in a folder that exists; create the folder first")
    given, specs = _registered(source, subnets)
    supernet = given.snapshot()  # Everything is of one checkpoint, whatever other threads load.
    keys = [spec.key for spec in specs]
    policy = _policy(supernet, table, slo_ms, keys)
    if not allow_uncalibrated:
        supernet.require_calibrated(specs)
    inputs = _inputs(source, supernet, example)
    views = [supernet.private_view(spec)[0] for spec in specs]
    rows, means, variances = _rows(supernet, specs)
    norms, sizes = tuple(supernet.norm_operators()), len(supernet.space.dimensions)
    columns = [] if policy is None else list(policy.table.pad_index)
    steps = [] if policy is None else policy.steps()
    slacks, decisions = [slacks for slacks, _ in steps], [decisions for _, decisions in steps]
    with quiet():
        network = record_network(supernet.network.requires_grad_(False).eval(), list(inputs), norms, sizes)
        whole = ScriptedSubnets(network, rows, means, variances, keys, columns, slacks, decisions)
        scripted: Any = torch.jit.script(whole.eval())
        scripted.define(_forward(inputs))
    for i, view in enumerate(tqdm(views, desc="comparing subnets", disable=not progress or None)):
        _compare(scripted, view, inputs, i, specs[i])
    with replacing(path) as temporary, quiet():
        torch.jit.save(scripted, temporary)
        _strip(temporary)
    return scripted  # type: ignore[no-any-return]


def _registered(
    source: Engine | Supernet, subnets: Sequence[SubnetSpec] | None
) -> tuple[Supernet, list[SubnetSpec]]:
    supernet = source.supernet if isinstance(source, Engine) else as_supernet(source)
    if subnets is None and isinstance(source, Engine):
        subnets = [source.specs[i] for i in source.ids]
    specs = supernet.distinct(() if subnets is None else subnets, "an export (subnets=[...])")
    low = [spec for spec in specs if spec.precision != FLOAT32]
    if low:
        raise ExportError(
            f"{low[0]}: a TorchScript file slices the full weights while it runs, and has no copy of them at "
            f"{low[0].precision}; export the subnet at float32, or use subnetact.export.to_exported_programs "
            "or to_onnx"
        )
    return supernet, specs


def _policy(
    supernet: Supernet, table: LatencyTable | None, slo_ms: float | None, keys: list[str]
) -> SlackFit | None:
    if table is None and slo_ms is None:
        return None
    if table is None or slo_ms is None:
        raise ExportError(
            "table and slo_ms: `choose` compares latencies with the time in ms that a request usually has; "
            "give table= and slo_ms=, or neither"
        )
    missing = [key for key in keys if key not in table.subnets]
    if missing:
        raise ProfileMismatch(
            f"table: it lacks {len(missing)} of the subnets, {missing[0]} first; profile them"
        )
    stamped = table.stamp.get("supernet")
    if stamped not in (None, supernet.fingerprint()):
        raise ProfileMismatch(
            f"table: measured on supernet {stamped}, this one is {supernet.fingerprint()}; profile this one"
        )
    return SlackFit(table.select([table.subnets.index(key) for key in keys]), slo_ms)


def _inputs(source: Engine | Supernet, supernet: Supernet, example: Any) -> dict[str, Tensor]:
    """Return the example as one batch of each input, by the names of the network's arguments."""
    if example is None and isinstance(source, Engine):
        example = map_tensors(lambda part: part[None], source.sample)
    if example is None:
        raise ExportError(
            "example: the network is traced and compared on a batch; give one, example=images of shape "
            "(N, C, H, W)"
        )
    network: Any = supernet.network
    signature = inspect.signature(template_of(network).forward)
    try:
        if isinstance(example, Mapping):
            signature.bind(**example)
            inputs = dict(example)
        else:
            parts = (example,) if isinstance(example, Tensor) else tuple(example)
            inputs = signature.bind(*parts).arguments
        tensors = all(isinstance(part, Tensor) for part in inputs.values())
        if not inputs or not tensors or "subnet" in inputs:
            raise TypeError("every input must be a tensor, and none may be called subnet")
    except TypeError as error:
        raise ExportError(
            "example: give one batch, a tensor, of each input, with the batch dimension first; the network "
            f"takes {signature}: {error}"
        ) from error
    return {name: part.to(supernet.device) for name, part in inputs.items()}


def _rows(supernet: Supernet, specs: list[SubnetSpec]) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return the integers of every subnet, and the flat means and variances of all of them."""
    norms = tuple(supernet.norm_operators())
    rows, means, variances, start = [], list[Tensor](), list[Tensor](), 0
    for spec in specs:
        starts = {}
        for name, (mean, variance) in supernet.statistics(spec).items():
            starts[name] = start
            start += mean.numel()
            means.append(mean)
            variances.append(variance)
        rows.append([*supernet.space.resolve(spec), *(starts.get(name, 0) for name in norms)])
    dtypes = {str(tensor.dtype) for tensor in means}
    if len(dtypes) > 1:
        raise ExportError(
            f"BatchNorm statistics are {' and '.join(sorted(dtypes))}; a file holds them in one dtype: "
            "convert the supernet, supernet.float() for example"
        )
    if not means:
        return rows, torch.empty(0), torch.empty(0)
    return rows, torch.cat(means), torch.cat(variances)


def _forward(inputs: Mapping[str, Tensor]) -> str:
    """Return the source of the method `forward`."""
    names = ", ".join(inputs)
    checks = [f"    self.require_dims('{name}', {name}.dim(), {x.dim()})" for name, x in inputs.items()]
    selected = f"self.select(subnet, {next(iter(inputs))}.size(0))"
    called = f"    return self.network({names}, {selected}, self.means, self.variances)"
    return "\n".join([f"def forward(self, {names}, subnet):", *checks, called]) + "\n"


def _compare(scripted: Any, view: Any, inputs: dict[str, Tensor], i: int, spec: SubnetSpec) -> None:
    """Compare a subnet on the example, and on random numbers where the example is constant."""
    name, number = f"{i} ({spec})", torch.tensor([i])

    def run(**batch: Tensor) -> Any:
        return scripted(*batch.values(), number)

    varied = {name: _random(x) for name, x in inputs.items()}
    changed = any(varied[name] is not x for name, x in inputs.items())
    for batch in (inputs, varied) if changed else (inputs,):
        try:
            with torch.inference_mode():
                view(**batch)
        except Exception as error:
            if batch is varied:
                return
            raise ExportError(
                f"example: subnet {name} does not run on it ({error}); give a batch that the network takes, "
                "(N, C, H, W) for images, or x[None] if x is one image"
            ) from error
        require_equal(run, view, batch, name, "TorchScript")


def _random(x: Tensor) -> Tensor:
    """Replace a constant batch by random numbers, because different networks may agree on a constant one."""
    if not x.is_floating_point() or x.numel() < 2 or bool((x != x.reshape(-1)[0]).any()):
        return x
    return batch_like(x[0], len(x), x.device)  # type: ignore[no-any-return]


def _strip(path: Path) -> None:
    """Remove the debug records, which map errors to generated source and fill most of a small file."""
    with replacing(path) as stripped, zipfile.ZipFile(path) as old, zipfile.ZipFile(stripped, "w") as new:
        for record in old.infolist():
            if not record.filename.endswith(".debug_pkl"):
                with old.open(record) as source, new.open(record, "w") as target:
                    shutil.copyfileobj(source, target, 2**20)
