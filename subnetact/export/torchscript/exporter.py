"""`to_torchscript`: writes one file that runs any registered subnet, in C++, Triton, and Python."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subnetact.engine.engine import Engine
from subnetact.errors import (
    ExportError,
    InvalidRequest,
    ProfileMismatch,
)
from subnetact.export.torchscript.comparison import compare_with_views
from subnetact.export.torchscript.module import METHODS, RowLayout, ScriptedSubnets, forward_source
from subnetact.export.torchscript.storage import pack, strip
from subnetact.export.torchscript.symbolic_trace import Traced, trace_network
from subnetact.files.atomic import replacing
from subnetact.latency.table import LatencyTable
from subnetact.operators.base import Operator
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.space import SizeRow
from subnetact.spec import FLOAT32, SubnetSpec
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["engines_table", "to_torchscript"]

UNSUPPORTED_PYTHON = (3, 14)
"""The first version of Python for which PyTorch does not support TorchScript."""
SCHEDULER = "scheduler"
"""The name of the table in a bundle whose latencies never fall as the batch grows."""
RESERVED = {"List", "ValueError", "dims", "row", "self", "size_row", "statistics", "str", "subnet"}
"""Names that the code of the file uses, so that no input may have them."""


def to_torchscript(
    source: Engine | Supernet,
    path: str | PathLike[str],
    subnets: Sequence[SubnetSpec] | None = None,
    *,
    table: LatencyTable | None = None,
    policy: SlackFit | None = None,
    slo_ms: float | None = None,
    inputs: Sequence[str] | None = None,
    example: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    freeze: bool = False,
    allow_uncalibrated: bool = False,
    progress: bool = True,
) -> torch.jit.ScriptModule:
    """Write one TorchScript file that contains the weights once and runs any registered subnet by its number.

    `torch.jit.load(path)` in Python and `torch::jit::load` in C++ load the file without this package. The
    module has these methods:

    * `forward(*inputs, subnet)` runs a batch. `subnet` is int64, of shape (1,) or of shape (B, 1) with equal
      numbers.
    * `forward_size_row(*inputs, size_row)` runs a batch with the sizes `supernet.space.resolve(spec)`. If the
      network has BatchNorm, they must be those of one registered subnet.
    * `num_subnets()`, `describe(i)`, `accuracy(i)` (percent, NaN if unknown) and `size_row(i)` describe the
      subnets.
    * `batch_sizes()` and `latency_ms(i, batch_size)` return the latency table.
    * `choose(slack_ms, queued)` returns the subnet and the batch size that `SlackFit` chooses.

    On one CPU thread, outputs equal those of `supernet.subnet(spec)(*inputs)` bit for bit. Running the module
    does not change it, so several threads may run different subnets at the same time.

    In the file a skipped layer is the identity, as in a view. If the network around a layer treats the
    identity in another way than a layer, the export is refused. Tracing cannot see everything, for example a
    branch on the type of a value; only the comparison with `example` detects such differences.

    A TorchScript file is code. Its interpreter runs no Python, but it has operators that read and write files
    with the rights of the process, so load only files of people you trust. This package loads none but the
    one that it has just written.

    TorchScript is in maintenance and ends with Python 3.14. Its successor is `to_exported_programs`, which
    writes one `torch.export` program per subnet.

    Args:
        source: an engine or a supernet. It is not changed, and the result has its own copy of the weights.
        path: the file to write, for example `model.pt`.
        subnets: specifications (`SubnetSpec`) of the subnets to register, in the order of their numbers. If
            None, those that the engine serves. (`to_onnx` and `to_exported_programs` take ids instead.)
        table: latencies of these subnets. If None, the engine's table called "scheduler", as the bundles of
            `python -m subnetact.profile` have it, or else the engine's only table.
        policy: the policy of `choose`. If None, `SlackFit(table, slo_ms)`.
        slo_ms: time in ms that a request usually has, for that `SlackFit`. Required if there is a table but
            no policy.
        inputs: names of the network's arguments that callers give, in the order of `forward`. If None, those
            of the example, or those without a default.
        example: one batch of every input, by name or in order: `x` of shape (N, C, H, W) for images, with the
            batch dimension that the `example` of an `Engine` does not have. Before the file is written, it is
            compared with the supernet for every subnet on this batch, and on random numbers if all elements
            of a floating-point input are equal. The file then refuses inputs with another number of
            dimensions. If None, the engine's example; without one, nothing is compared.
        freeze: whether to make the weights constants, and to compute and store beforehand what depends on
            them alone.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own run on the shared ones.
        progress: if True, show a progress bar when standard error is a terminal.

    Returns:
        The module in the file.

    Raises:
        ExportError: a module cannot be traced or compiled (the message names it), an argument cannot be used
            (such as `slo_ms` without a single table), or Python is too new.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, or one belongs to another space.
        ProfileMismatch: the table or the policy belongs to other subnets or other weights.
        PolicyError: `slo_ms` is below every latency of the table.
        StaleWeights: another thread changed weights in place while they were copied.

    Example:
        >>> to_torchscript(engine, "model.pt", slo_ms=30.0)
        >>> model = torch.jit.load("model.pt")
        >>> logits = model(images, torch.tensor([1]))  # subnet 1
    """
    if sys.version_info >= UNSUPPORTED_PYTHON:
        raise ExportError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]}: TorchScript is not supported from "
            f"{'.'.join(map(str, UNSUPPORTED_PYTHON))} on; use subnetact.export.to_exported_programs, or "
            "export with an older Python: the file runs anywhere"
        )
    given, specs = _registered(source, subnets)
    low = [spec for spec in specs if spec.precision != FLOAT32]
    if low:
        raise ExportError(
            f"{low[0]}: a TorchScript file slices the full weights while it runs, and has no copy of them at "
            f"{low[0].precision}; export the subnet at float32, or use subnetact.export.to_exported_programs "
            "or to_onnx"
        )
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ExportError(f"path: {path} is not a file in a folder that exists; create the folder first")
    keys = [spec.key for spec in specs]
    supernet = given.snapshot()  # Everything is of one checkpoint, whatever other threads load.
    policy = _policy(source, supernet, table, policy, slo_ms, keys)
    if not allow_uncalibrated:
        supernet.require_calibrated(specs)
    if example is None and isinstance(source, Engine):
        example = _served(source)
    names = _inputs(supernet, inputs, example)
    examples = _examples(names, example)
    layout = RowLayout(supernet.space.dimensions, tuple(supernet.norm_operators()))
    network = trace_network(supernet.network, names, layout, _compared_rows(supernet, specs))
    rows, statistics = _rows(supernet, specs, layout)
    if policy is not None:
        accuracy = list(policy.table.accuracy)
    else:
        known = dict(zip(source.keys, source.accuracy, strict=True)) if isinstance(source, Engine) else {}
        accuracy = [math.nan if (a := known.get(key)) is None else a for key in keys]
    whole = ScriptedSubnets(network, rows, statistics, layout, keys, accuracy, policy)
    pack(whole)
    ranks = [examples[name].dim() if examples else None for name in names]
    scripted = _script(whole, forward_source(names, ranks))
    if freeze:
        with _quiet():
            scripted = torch.jit.freeze(scripted, preserved_attrs=METHODS[1:], optimize_numerics=False)
    if examples:
        compare_with_views(scripted, supernet, specs, examples, progress)
    with replacing(path) as temporary, _quiet():
        torch.jit.save(scripted, temporary)
        strip(temporary)
    return scripted  # type: ignore[no-any-return]


def _registered(
    source: Engine | Supernet, subnets: Sequence[SubnetSpec] | None
) -> tuple[Supernet, list[SubnetSpec]]:
    supernet = source.supernet if isinstance(source, Engine) else as_supernet(source)
    if subnets is None and isinstance(source, Engine):
        subnets = [source.specs[i] for i in source.ids]
    return supernet, supernet.distinct(() if subnets is None else subnets, "an export (subnets=[...])")


def _policy(
    source: Engine | Supernet,
    supernet: Supernet,
    table: LatencyTable | None,
    policy: SlackFit | None,
    slo_ms: float | None,
    keys: list[str],
) -> SlackFit | None:
    if policy is None:
        if table is None:
            table = engines_table(source, slo_ms)
        if table is None:
            return None
        served = _served_table(table, keys)
        if slo_ms is None:
            raise ExportError(
                "slo_ms: with a latency table, `choose` also needs the time in ms that a request usually "
                "has; give slo_ms=, or policy="
            )
        policy = SlackFit(served, slo_ms)
    if type(policy) is not SlackFit:
        raise ExportError(
            f"policy: `choose` decides as SlackFit does, got {type(policy).__name__}; give "
            "subnetact.SlackFit(table, slo_ms), or leave it out and decide outside"
        )
    if policy.table.subnets != tuple(keys):
        raise ProfileMismatch(
            "policy: its table has other subnets than are exported; make it from the table of these subnets"
        )
    stamped = policy.table.stamp.get("supernet")
    if stamped is not None and stamped != supernet.fingerprint():
        raise ProfileMismatch(
            f"table: measured on supernet {stamped}, this one is {supernet.fingerprint()}; profile this one"
        )
    return policy


def engines_table(source: Engine | Supernet, slo_ms: float | None) -> LatencyTable | None:
    """Return the latency table by which an exported engine schedules if none is given.

    Args:
        source: an engine; a supernet has no tables.
        slo_ms: the time in ms that a request usually has; if given, there must be a table.

    Returns:
        The engine's table called "scheduler", or else its only table; None if there is no such table.

    Raises:
        ExportError: `slo_ms` is given, and the engine has no table or several.
    """
    tables = source.tables if isinstance(source, Engine) else {}
    if SCHEDULER in tables:
        return tables[SCHEDULER]
    if len(tables) == 1:
        return next(iter(tables.values()))
    if slo_ms is not None:
        found = f"has {len(tables)} tables ({', '.join(tables)})" if tables else "has no latency table"
        raise ExportError(
            f"slo_ms: it is compared with a latency table, and the {type(source).__name__.lower()} {found}; "
            "give table="
        )
    return None


def _served_table(table: LatencyTable, keys: Sequence[str]) -> LatencyTable:
    """Return the part of a latency table that has these subnets, in their order.

    Args:
        table: the latency table.
        keys: readable keys of the subnets.

    Raises:
        ProfileMismatch: the table lacks a subnet.
    """
    missing = [key for key in keys if key not in table.subnets]
    if missing:
        raise ProfileMismatch(
            f"table: it lacks {len(missing)} of the subnets, {missing[0]} first; profile them"
        )
    return table.select([table.subnets.index(key) for key in keys])


def _arguments(supernet: Supernet) -> dict[str, bool]:
    """Return for each argument of the network's forward whether it must be given."""
    network: Any = supernet.network
    network = network.template if isinstance(network, Operator) else network
    return {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(network.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


def _served(engine: Engine) -> dict[str, Tensor] | None:
    """Return the engine's example as a batch of one, by the names of the network's arguments."""
    try:
        example = engine.example
    except InvalidRequest:
        return None
    if not isinstance(example, dict):
        parts = example if isinstance(example, tuple) else (example,)
        example = dict(zip(_arguments(engine.supernet), parts, strict=False))
    return {name: part[None] for name, part in example.items()}


def _inputs(supernet: Supernet, given: Sequence[str] | None, example: Any) -> list[str]:
    known = _arguments(supernet)
    needed = [name for name, required in known.items() if required]
    if given is not None:
        names = list(given)
    elif isinstance(example, Mapping):
        names = list(example)
    else:
        names = needed if example is None or isinstance(example, Tensor) else list(known)[: len(example)]
    if not names or RESERVED & set(names) or set(names) - set(known) or set(needed) - set(names):
        raise ExportError(
            f"inputs: the network takes {', '.join(known) or 'none by name'}, of which "
            f"{', '.join(needed) or 'none'} must be given, and no input may be called "
            f"{', '.join(sorted(RESERVED))}; got {', '.join(names) or 'none'}"
        )
    return names


def _examples(names: list[str], example: Any) -> dict[str, Tensor]:
    if example is None:
        return {}
    if isinstance(example, Tensor):
        example = (example,)
    if not isinstance(example, Mapping):
        example = dict(zip(names, example, strict=True)) if len(example) == len(names) else {}
    if set(names) - set(example) or not all(isinstance(example[name], Tensor) for name in names):
        raise ExportError(
            f"example: give one batch, a tensor, of each input: {', '.join(names)}, with the batch dimension "
            "first"
        )
    return {name: example[name] for name in names}


def _script(whole: ScriptedSubnets, source: str) -> Any:
    with _quiet():
        whole.network = _scripted(whole.network, "the network")
        scripted = torch.jit.script(whole.eval())
        scripted.define(source)
    return scripted


def _scripted(module: Any, path: str) -> Any:
    """Compile a module after its submodules, so that an error can name the innermost module that fails."""
    if isinstance(module, Traced):
        for name, inner in module.__dict__.pop("paths").items():
            setattr(module, name, _scripted(getattr(module, name), inner))
    try:
        return torch.jit.script(module)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ExportError(
            f"{path} ({type(module).__name__}): TorchScript cannot compile it ({' '.join(lines[:3])}); "
            "rewrite it with what TorchScript knows, or use subnetact.export.to_exported_programs"
        ) from error


def _compared_rows(supernet: Supernet, specs: list[SubnetSpec]) -> list[SizeRow]:
    """Return the size rows for which skipping is checked; without BatchNorm, samples are added."""
    if not supernet.norm_operators():
        space = supernet.space
        specs = [*specs, *space.sample(0, 34)]
    return [supernet.space.resolve(spec) for spec in specs]


def _rows(supernet: Supernet, specs: list[SubnetSpec], layout: RowLayout) -> tuple[list[list[int]], Tensor]:
    """Return the full row of every subnet, and the BatchNorm statistics of all of them as one flat tensor."""
    rows, flats, start = [], list[Tensor](), 0
    for spec in specs:
        starts = {}
        for name, (mean, var) in supernet.statistics(spec).items():
            starts[name] = start
            start += 2 * mean.numel()
            flats += [mean, var]
        rows.append([*supernet.space.resolve(spec), *(starts.get(name, 0) for name in layout.norms)])
    dtypes = {str(flat.dtype) for flat in flats}
    if len(dtypes) > 1:
        raise ExportError(
            f"BatchNorm statistics are {' and '.join(sorted(dtypes))}; a file holds them in one dtype: "
            "convert the supernet, supernet.float() for example"
        )
    return rows, torch.cat(flats) if flats else torch.empty(0)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\..*")
        warnings.filterwarnings("ignore", r".*torch\.jit\..* is deprecated", DeprecationWarning)
        yield
