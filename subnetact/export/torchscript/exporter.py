"""One TorchScript file that runs any registered subnet: for C++, Triton, and Python without this package."""

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

from subnetact.documents import replacing
from subnetact.engine.engine import Engine
from subnetact.errors import (
    ExportError,
    InvalidRequest,
    NotCalibrated,
    ProfileMismatch,
)
from subnetact.export.compare import compare
from subnetact.export.torchscript.layout import Layout, Traced
from subnetact.export.torchscript.module import METHODS, ScriptedSubnets, forward_source
from subnetact.export.torchscript.storage import pack, strip
from subnetact.export.torchscript.symbolic_trace import trace_network
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.space import Row
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["served_table", "to_torchscript"]

UNSUPPORTED_PYTHON = (3, 14)
RESERVED = {"List", "ValueError", "dims", "row", "self", "statistics", "str", "subnet"}
"""Names that the file's own code uses."""


def to_torchscript(
    source: Engine | Supernet,
    path: str | PathLike[str],
    subnets: Sequence[SubnetSpec] | None = None,
    *,
    table: LatencyTable | None = None,
    policy: SlackFit | None = None,
    inputs: Sequence[str] | None = None,
    example: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    freeze: bool = False,
    allow_uncalibrated: bool = False,
    progress: bool = True,
) -> torch.jit.ScriptModule:
    """Write one file that holds the weights once and runs any registered subnet, by its number.

    What it returns, `torch.jit.load(path)`, and `torch::jit::load` in C++, gives a module with

    * `forward(*inputs, subnet)`: `subnet` is int64 of shape (1,), or (B, 1) with B equal numbers;
    * `forward_row(*inputs, row)`: the control tuple itself, `supernet.space.resolve(spec)`; where the
      network has BatchNorm, of one registered subnet;
    * `num_subnets()`, `describe(i)`, `accuracy(i)` (percent, NaN where not known), `row(i)`;
    * `batch_sizes()`, `latency_ms(i, batch_size)`, and `choose(slack_ms, queued) -> (subnet, batch size)`,
      which decides as `SlackFit` does.

    Outputs equal `supernet.subnet(spec)(*inputs)` bit for bit on one CPU thread. Nothing in the module
    changes when it runs, so threads may run different subnets at once. TorchScript is in maintenance;
    PyTorch's successor is torch.export (`to_exported_programs`), which makes one program per subnet.

    A layer that a subnet skips hands on its input, so loops over elastic stacks must be `x = layer(x)`;
    where what is around the layer does more, for any of the subnets, the export is refused. What tracing
    cannot see, a branch on the type of a value for example, shows only in the comparison with `example`.

    The source is not changed; what is returned has its own copy of the weights.

    Args:
        source: an engine, or a supernet.
        path: the file to write, `model.pt` for example.
        subnets: what to register, in the order of their numbers; None = an engine's own.
        table: latencies of these subnets; None = the engine's only one, if it has one.
        policy: decides in `choose`. If None, `SlackFit(table, slo_ms=36.0)`.
        inputs: names of the network's arguments that callers give, in the order of `forward`; None = those
            of the example, or those without a default.
        example: one batch of every input, by name or in their order. The file is compared with the supernet
            for every subnet before it is written, also on random numbers where floating-point inputs are
            all one value, and refuses inputs of other ranks. None = the engine's example, if it has one;
            else nothing is compared.
        freeze: make the weights constants, and compute beforehand what depends on them alone, which is
            stored too.
        allow_uncalibrated: whether subnets without statistics of their own run on the shared ones.
        progress: if True, show a progress bar when standard error is a terminal.

    Raises:
        ExportError: something cannot be traced or scripted; it names the module. Or an argument is of no
            use, or Python is too new.
        NotCalibrated: a subnet has no BatchNorm statistics of its own.
        SpecError: there is no subnet, or one is of another space.
        ProfileMismatch: the table or policy is of other subnets, or of other weights.
        PolicyError: no latency of the table is within SlackFit's usual 36 ms; give a policy.
    """
    if sys.version_info >= UNSUPPORTED_PYTHON:
        raise ExportError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]}: TorchScript is not supported from "
            f"{'.'.join(map(str, UNSUPPORTED_PYTHON))} on; use subnetact.export.to_exported_programs, or "
            "export with an older Python: the file runs anywhere"
        )
    supernet, specs = _registered(source, subnets)
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ExportError(f"path: {path} is not a file in a folder that exists; create the folder first")
    keys = [spec.key for spec in specs]
    policy = _policy(source, table, policy, keys)
    bare = [spec for spec in specs if not supernet.calibrated(spec)]
    if bare and not allow_uncalibrated:
        raise NotCalibrated(
            f"{len(bare)} of {len(specs)} subnets have no BatchNorm statistics of their own, {bare[0]} "
            "first; call subnetact.calibrate(supernet, specs, batches), or pass allow_uncalibrated=True"
        )
    if example is None and isinstance(source, Engine):
        example = _served(source)
    names = _inputs(supernet, inputs, example)
    examples = _examples(names, example)
    layout = Layout(supernet.space.dimensions, tuple(supernet.norm_operators()))
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
        compare(scripted, supernet, specs, examples, progress)
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
    source: Engine | Supernet, table: LatencyTable | None, policy: SlackFit | None, keys: list[str]
) -> SlackFit | None:
    if policy is None:
        if table is None and isinstance(source, Engine) and len(source.tables) == 1:
            (table,) = source.tables.values()
        if table is None:
            return None
        policy = SlackFit(served_table(table, keys), slo_ms=36.0)
    if type(policy) is not SlackFit:
        raise ExportError(
            f"policy: `choose` decides as SlackFit does, got {type(policy).__name__}; give "
            "subnetact.SlackFit(table, slo_ms), or leave it out and decide outside"
        )
    if policy.table.subnets != tuple(keys):
        raise ProfileMismatch(
            "policy: it answers with other subnets than are exported; make it from their table"
        )
    stamped = policy.table.stamp.get("supernet")
    supernet = source.supernet if isinstance(source, Engine) else source
    if stamped is not None and stamped != supernet.fingerprint():
        raise ProfileMismatch(
            f"table: measured on supernet {stamped}, this one is {supernet.fingerprint()}; profile this one"
        )
    return policy


def served_table(table: LatencyTable, keys: Sequence[str]) -> LatencyTable:
    """Return the rows of these subnets, in their order.

    Raises:
        ProfileMismatch: it lacks one.
    """
    missing = [key for key in keys if key not in table.subnets]
    if missing:
        raise ProfileMismatch(
            f"table: it lacks {len(missing)} of the subnets, {missing[0]} first; profile them"
        )
    return table.select([table.subnets.index(key) for key in keys])


def _arguments(supernet: Supernet) -> dict[str, bool]:
    """Return the names of the network's arguments, and whether each must be given."""
    return {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(supernet.network.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


def _served(engine: Engine) -> dict[str, Tensor] | None:
    """Return a batch of the engine's example, by the names of the network's arguments."""
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
        raise ExportError(f"example: give one batch, a tensor, of each input: {', '.join(names)}")
    return {name: example[name] for name in names}


def _script(whole: ScriptedSubnets, source: str) -> Any:
    with _quiet():
        whole.network = _scripted(whole.network, "the network")
        scripted = torch.jit.script(whole.eval())
        scripted.define(source)
    return scripted


def _scripted(module: Any, path: str) -> Any:
    """Script a module after those in it, so that an error can tell which one."""
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


def _compared_rows(supernet: Supernet, specs: list[SubnetSpec]) -> list[Row]:
    """Return the sizes that the file must be right for, some of them where it takes any."""
    if not supernet.norm_operators():
        space = supernet.space
        specs = [*specs, *space.sample(0, 34)]
    return [supernet.space.resolve(spec) for spec in specs]


def _rows(supernet: Supernet, specs: list[SubnetSpec], layout: Layout) -> tuple[list[list[int]], Tensor]:
    """Return every subnet's row, and the statistics of all of them one after another."""
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
