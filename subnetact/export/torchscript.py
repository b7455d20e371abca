"""One TorchScript file that runs any registered subnet: for C++, Triton, and Python without this package."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.binding import bind
from subnetact.engine import Engine
from subnetact.errors import (
    ExportError,
    InvalidRequest,
    NotCalibrated,
    ProfileMismatch,
    SpecError,
    UncalibratedSubnetWarning,
)
from subnetact.export.scripted import METHODS, ScriptedSubnets, forward_source
from subnetact.export.symbolic import Layout, Traced, trace_network
from subnetact.files import replacing
from subnetact.hot import agree
from subnetact.latency import LatencyTable
from subnetact.operators import SubnetNorm
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.space import Row
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet

__all__ = ["served_table", "to_torchscript"]

UNSUPPORTED_PYTHON = (3, 14)
ALIGNED = 64
"""Elements that every tensor starts at a multiple of, so that it is aligned as one of its own would be."""


def to_torchscript(
    source: Engine | Supernet,
    path: str | PathLike[str],
    subnets: Sequence[SubnetSpec] | None = None,
    *,
    table: LatencyTable | None = None,
    policy: SlackFit | None = None,
    inputs: Sequence[str] | None = None,
    example: Tensor | Sequence[Tensor] | None = None,
    freeze: bool = False,
    allow_uncalibrated: bool = False,
) -> torch.jit.ScriptModule:
    """Write one file that holds the weights once and runs any registered subnet, by its number.

    What it returns, `torch.jit.load(path)`, and `torch::jit::load` in C++, gives a module with

    * `forward(*inputs, subnet)`: `subnet` is int64 of shape (1,), or (B, 1) with B equal numbers;
    * `forward_row(*inputs, row)`: the control tuple itself, `supernet.space.resolve(spec)`; where the
      network has BatchNorm, of a registered subnet;
    * `num_subnets()`, `describe(i)`, `accuracy(i)` (percent, NaN where not known), `row(i)`;
    * `batch_sizes()`, `latency_ms(i, batch_size)`, and `choose(slack_ms, queued) -> (subnet, batch size)`,
      which decides as `SlackFit` does.

    Outputs equal `supernet.subnet(spec)(*inputs)` bit for bit on one CPU thread. Nothing in the module
    changes when it runs, so threads may run different subnets at once. TorchScript is in maintenance;
    PyTorch's successor is torch.export (`to_exported_programs`), which makes one program per subnet.

    While it writes, the weights are in memory twice; what it returns has its own.

    Args:
        source: an engine, or a supernet.
        path: the file to write, `model.pt` for example.
        subnets: what to register, in the order of their numbers; None = an engine's own.
        table: latencies of these subnets; None = the engine's only one, if it has one.
        policy: decides in `choose`; None = `SlackFit(table)`.
        inputs: names of the network's arguments that callers give; None = those without a default.
        example: one batch of every input, to compare the file with the supernet before it is written, and
            to make the file refuse inputs of other ranks; None = the engine's, if it is one tensor.
        freeze: make the weights constants, and compute beforehand what depends on them alone, which is
            stored too.
        allow_uncalibrated: whether subnets without statistics of their own run on the shared ones.

    Raises:
        ExportError: something cannot be traced or scripted; it names the module. Or Python is too new.
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
    if example is None and isinstance(source, Engine) and inputs is None:
        with suppress(InvalidRequest):
            example = source.example[None] if isinstance(source.example, Tensor) else None
    keys = [spec.key for spec in specs]
    policy = _policy(source, table, policy, keys)
    bare = [spec for spec in specs if not supernet.calibrated(spec)]
    if bare and not allow_uncalibrated:
        raise NotCalibrated(
            f"{len(bare)} of {len(specs)} subnets have no BatchNorm statistics of their own, {bare[0]} "
            "first; call subnetact.calibrate(supernet, specs, batches), or pass allow_uncalibrated=True"
        )
    names = _inputs(supernet, inputs)
    examples = (example,) if isinstance(example, Tensor) else tuple(example or ())
    if examples and len(examples) != len(names):
        raise ExportError(f"example: {len(examples)} tensors for the inputs {', '.join(names)}")
    layout = Layout(supernet.space.dimensions, tuple(supernet.norm_operators()))
    network = trace_network(supernet.network, names, layout)
    rows, statistics = _rows(supernet, specs, layout)
    if policy is not None:
        accuracy = list(policy.table.accuracy)
    else:
        known = dict(zip(source.keys, source.accuracy, strict=True)) if isinstance(source, Engine) else {}
        accuracy = [math.nan if (a := known.get(key)) is None else a for key in keys]
    whole = ScriptedSubnets(network, rows, statistics, layout, keys, accuracy, policy)
    _pack(whole)
    ranks: list[int | None] = [x.dim() for x in examples]
    scripted = _script(whole, forward_source(names, ranks or [None] * len(names)))
    if freeze:
        with _quiet():
            scripted = torch.jit.freeze(scripted, preserved_attrs=METHODS[1:], optimize_numerics=False)
    if examples:
        _compare(scripted, supernet, specs, examples)
    with replacing(path) as temporary, _quiet():
        torch.jit.save(scripted, temporary)
        _strip(temporary)
    return scripted  # type: ignore[no-any-return]


def _registered(
    source: Engine | Supernet, subnets: Sequence[SubnetSpec] | None
) -> tuple[Supernet, list[SubnetSpec]]:
    supernet = source.supernet if isinstance(source, Engine) else source
    if subnets is None and isinstance(source, Engine):
        subnets = [source.specs[i] for i in source.ids]
    specs = [supernet.space.check(spec) for spec in subnets or ()]
    if not specs or len(set(specs)) != len(specs):
        raise SpecError(
            f"an export needs distinct subnets, at least one; got {len(specs)}; give subnets=[...]"
        )
    return supernet, specs


def _policy(
    source: Engine | Supernet, table: LatencyTable | None, policy: SlackFit | None, keys: list[str]
) -> SlackFit | None:
    if policy is None:
        if table is None and isinstance(source, Engine) and len(source.tables) == 1:
            (table,) = source.tables.values()
        if table is None:
            return None
        policy = SlackFit(served_table(table, keys))
    if policy.table.subnets != tuple(keys):
        raise ProfileMismatch(
            "policy: it answers with other subnets than are exported; make it from their table"
        )
    stamped = policy.table.stamp.get("supernet")
    supernet = source.supernet if isinstance(source, Engine) else source
    if stamped is not None and stamped != supernet.fingerprint():
        raise ProfileMismatch(f"table: measured on supernet {stamped}, this one is {supernet.fingerprint()}")
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


def _inputs(supernet: Supernet, given: Sequence[str] | None) -> list[str]:
    known = {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(supernet.network.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    needed = [name for name, required in known.items() if required]
    names = needed if given is None else list(given)
    reserved = {"self", "subnet", "row", "statistics"} & set(names)
    if not names or reserved or set(names) - set(known) or set(needed) - set(names):
        raise ExportError(
            f"inputs: the network takes {', '.join(known) or 'none by name'}, of which {', '.join(needed)} "
            f"must be given, and none may be called subnet, row or statistics; got {', '.join(names)}"
        )
    return names


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


def _rows(supernet: Supernet, specs: list[SubnetSpec], layout: Layout) -> tuple[list[list[int]], Tensor]:
    """Return every subnet's row, and the statistics of all of them one after another."""
    rows, flats, start = [], list[Tensor](), 0
    for spec in specs:
        sizes = supernet.space.resolve(spec)
        calibrated = supernet.norms.get(spec)
        pairs = None if calibrated is None else calibrated.pairs()
        used: dict[str, tuple[Tensor, Tensor]] = {}

        def take(norm: SubnetNorm, row: Row = sizes, pairs: Any = pairs, used: Any = used) -> nn.Module:
            used[norm.path] = norm.shared_statistics(row) if pairs is None else pairs[norm.path]
            return norm.bind_with(row, *used[norm.path])

        bind(supernet.network, sizes, take)
        starts = {}
        for name, (mean, var) in used.items():
            starts[name] = start
            start += 2 * mean.numel()
            flats += [mean, var]
        rows.append([*sizes, *(starts.get(name, 0) for name in layout.norms)])
    dtypes = {str(flat.dtype) for flat in flats}
    if len(dtypes) > 1:
        raise ExportError(
            f"BatchNorm statistics are {' and '.join(sorted(dtypes))}; a file holds them in one dtype: "
            "convert the supernet, supernet.float() for example"
        )
    return rows, torch.cat(flats) if flats else torch.empty(0)


def _pack(whole: nn.Module) -> None:
    """Copy all tensors into one storage a dtype: one record in the file instead of hundreds."""
    held = [
        (own, name, tensor)
        for module in whole.modules()
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None and tensor.is_contiguous()
    ]
    starts: dict[Any, int] = {}
    ends: Counter[Any] = Counter()
    for _, _, tensor in held:
        kind = tensor.dtype, tensor.device
        if _place(tensor) not in starts:
            starts[_place(tensor)] = ends[kind]
            ends[kind] += -(-tensor.numel() // ALIGNED) * ALIGNED
    flats = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in ends.items()}
    for own, name, tensor in held:
        start = starts[_place(tensor)]
        flat = flats[tensor.dtype, tensor.device][start : start + tensor.numel()].view(tensor.shape)
        flat.copy_(tensor.detach())
        own[name] = nn.Parameter(flat, False) if isinstance(tensor, nn.Parameter) else flat  # type: ignore[assignment]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.data_ptr(), tensor.shape


def _strip(path: Path) -> None:
    """Leave out what only maps errors to lines of generated source, much of a small network's file."""
    with replacing(path) as stripped, zipfile.ZipFile(path) as old, zipfile.ZipFile(stripped, "w") as new:
        for record in old.infolist():
            if not record.filename.endswith(".debug_pkl"):
                new.writestr(record, old.read(record))


def _compare(scripted: Any, supernet: Supernet, specs: list[SubnetSpec], example: tuple[Tensor, ...]) -> None:
    home = next(supernet.parameters()).device
    example = tuple(x.to(home) for x in example)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        for i in range(0, len(specs), -(-len(specs) // 8)):
            expected = supernet.subnet(specs[i])(*example)
            if not agree(scripted(*example, torch.tensor([i])), expected):
                raise ExportError(
                    f"subnet {i} ({specs[i]}): the scripted network's output differs from the supernet's; "
                    "its forward depends on something other than its inputs, such as how many layers it has"
                )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\..*")
        warnings.filterwarnings("ignore", r".*torch\.jit\..* is deprecated", DeprecationWarning)
        yield
