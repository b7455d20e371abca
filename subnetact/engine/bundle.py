"""Bundles: everything that an engine serves, in one directory, without pickle.

The index of a bundle is `bundle.json`; `BUNDLE` below has its kind and schema. Its fields are:

- `kind`, `schema`, `subnetact`: `"subnetact.bundle"`, the version of this format, and of the package.
- `space`: the id of the search space.
- `precision`: the arguments of `Supernet.enable_precision`, or null.
- `family`: the supernet's `origin`, with which `origins.py` rebuilds it, or null for an own network, whose
  code is not stored, and if JSON cannot hold the family's arguments.
- `subnets`, `accuracy`, `removed`, `pinned`: the specifications in id order, their accuracy in percent or
  null, the ids that are not served any more, and those that come first in the plan of fused programs.
- `sample`: `[dtype, shape]` of a tensor, `{"tuple": [...]}`, `{"dict": {...}}`, `{"list": [...]}` of one
  input per shape, or null; `padding`: a number, a list of `[name or position of an input, value]`, or null.
- `allow_uncalibrated`: whether subnets without BatchNorm statistics of their own are accepted.
- `tables`: the name of the latency table in each file `latency-0.json`, `latency-1.json`, ...
- `files`: the size in bytes and SHA-256 of `weights.safetensors` (the whole `state_dict`), of
  `norms.safetensors` (all rows of the norm table, also of subnets that are not served) and of the tables.
- `checksum`: the SHA-256 of the document without this field.

Fused programs, packed copies, copies at lower precisions, graphs and compiled code are not stored but made
again, nor are the values of the example (a loaded engine has zeros) and settings of the machine: prepared
batch sizes, `device`, `memory_budget_mb`, `fuse`, `compile`.
The checksums find accidents and edits. They are not a signature.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from subnetact import __version__
from subnetact.engine.config import EngineConfig
from subnetact.engine.origins import rebuild_supernet
from subnetact.errors import FileFormatError, ForeignSpec, NotCalibrated, PrecisionError
from subnetact.files.documents import FolderFormat
from subnetact.files.tensors import read_tensors, write_tensors
from subnetact.latency.table import LatencyTable
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["load_bundle", "save_bundle"]

INDEX, WEIGHTS, NORMS = "bundle.json", "weights.safetensors", "norms.safetensors"
_Contents = tuple[Supernet, EngineConfig, dict[str, LatencyTable]]
BUNDLE = FolderFormat("a bundle", "subnetact.bundle", 1, "give the directory that Engine.save() wrote", INDEX)


def save_bundle(
    supernet: Supernet,
    config: EngineConfig,
    tables: Mapping[str, LatencyTable],
    directory: str | PathLike[str],
) -> None:
    """Write a bundle. Readers of this package get an earlier one until it is complete."""
    try:
        origin = json.loads(json.dumps(supernet.origin))
    except (TypeError, ValueError):
        origin = None  # JSON cannot hold the arguments, so the caller of load_bundle gives the supernet.
    files = {f"latency-{i}.json": name for i, name in enumerate(tables)}
    facts = {"subnetact": __version__, "family": origin, **config.to_json(), "tables": files}
    with BUNDLE.writing(directory, facts) as folder:
        with supernet.generation.unchanged():  # All is of one checkpoint, whatever other threads load.
            if not config.allow_uncalibrated:
                supernet.require_calibrated(config.served)
            tensors = {n: t.detach().cpu().contiguous().clone() for n, t in supernet.state_dict().items()}
            norms, precision = supernet.norms.to_like(None), supernet.precision
            facts |= {"space": supernet.space.id, "precision": precision and precision.to_json()}
        write_tensors(folder / WEIGHTS, tensors)
        norms.save(folder / NORMS)
        for file, name in files.items():
            tables[name].save(folder / file)


def load_bundle(
    directory: str | PathLike[str],
    given: Supernet | None,
    mapped: bool,
    options: Mapping[str, Any],
) -> _Contents:
    """Read what `save_bundle` wrote; a supernet that is given stays as it was if that fails."""
    if given is not None:
        as_supernet(given)
    found, tensors, norms, precision = BUNDLE.read_version(
        directory, partial(_read, given=given, options=options)
    )
    supernet, folder = found[0], Path(directory)
    with BUNDLE.fields(folder / INDEX, damaged=(RuntimeError,)):
        _require_fitting(supernet, tensors, folder / WEIGHTS, own_dtype=given is not None)
        if precision is not None:
            supernet.enable_precision(*precision.pop("precisions"), **precision)
        _fill(supernet, tensors, norms, mapped)
    return found


def _read(
    folder: Path, document: dict[str, Any], given: Supernet | None, options: Mapping[str, Any]
) -> tuple[_Contents, dict[str, Tensor], NormTable, dict[str, Any] | None]:
    """Return what `load_bundle` returns, weights, statistics, and what `enable_precision` takes, or None."""
    index = folder / INDEX
    built = given is None
    passing = (PrecisionError, NotCalibrated, *(() if built else (ForeignSpec,)))
    with BUNDLE.fields(index, passing=passing, damaged=(RuntimeError,)):
        for file in (WEIGHTS, NORMS, *document["tables"]):
            if file not in document["files"]:
                raise FileFormatError(f"{index}: `files` does not list {file}; write the bundle again")
        tensors = read_tensors(folder / WEIGHTS)
        size = sum(tensor.nbytes for tensor in tensors.values())
        supernet = _rebuilt(document["family"], index, size) if given is None else given
        space, precision = supernet.space, document["precision"]
        if precision is not None:
            precision = {name: precision[name] for name in ("precisions", "keep", "last")}
        if precision is not None and supernet.precision is None:
            space = space.with_precision(*precision["precisions"])
        enabled = None if supernet.precision is None else supernet.precision.to_json()
        if space.id != document["space"] or enabled not in (None, precision):
            message = (
                f"{index}: the bundle is of space {document['space']} with precision {precision}, the "
                f"supernet is of space {space.id} with precision {enabled}; give the supernet that was saved"
            )
            raise FileFormatError(message) if built else ForeignSpec(message)
        stored = EngineConfig.from_json(document, space)
        norms = NormTable.load(folder / NORMS)
        if norms.space != space.id:
            raise FileFormatError(f"{folder / NORMS}: is of space {norms.space}; write the bundle again")
        tables = {name: LatencyTable.load(folder / file) for file, name in document["tables"].items()}
    config = replace(stored, **options)
    bare = [spec for spec in config.served if spec not in norms]
    if bare and not config.allow_uncalibrated and supernet.norm_operators():
        raise NotCalibrated(
            f"{index}: the bundle has no BatchNorm statistics of {bare[0]}; allow_uncalibrated=True uses "
            "the shared ones"
        )
    return (supernet, config, tables), tensors, norms, precision if enabled is None else None


def _rebuilt(origin: Any, index: Path, size: int) -> Supernet:
    if origin is None:
        raise FileFormatError(
            f"{index}: the bundle is of an own network, which no name can rebuild; call "
            "Engine.load(directory, supernet=insert_(network, ...)), or give --model on the command line"
        )
    try:
        return rebuild_supernet(origin["name"], origin["constructor"], size)
    except (ImportError, ValueError, TypeError) as error:
        name = origin["name"]
        raise FileFormatError(f"{index}: cannot rebuild {name!r} ({error}); update ofa_adapters") from error


def _require_fitting(supernet: Supernet, tensors: Mapping[str, Tensor], path: Path, own_dtype: bool) -> None:
    """Refuse tensors that do not fit; a supernet that was built for the bundle takes their dtype."""
    own: OrderedDict[str, Tensor] = supernet.state_dict()
    differing = sorted(set(own) ^ set(tensors)) or [
        name for name, tensor in tensors.items() if tensor.shape != own[name].shape
    ]
    if differing:
        raise FileFormatError(
            f"{path}: the tensors do not fit the supernet; the first that differs is {differing[0]}; give "
            "the supernet that was saved, made with the same arguments"
        )
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if not own_dtype and len(kinds) == 1:
        supernet.to(kinds.pop())
        own = supernet.state_dict()
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype:
            raise FileFormatError(
                f"{path}: {name} is {tensor.dtype}, the supernet's is {own[name].dtype}; give a "
                "supernet of that dtype: Engine.load(directory, supernet=...)"
            )


def _fill(supernet: Supernet, tensors: Mapping[str, Tensor], norms: NormTable, mapped: bool) -> None:
    """Give a supernet weights that fit, and their statistics."""
    if mapped:  # `read_tensors` returns views of the mapped file
        with supernet.generation.lock:
            for name, kept in supernet.state_dict(keep_vars=True).items():
                kept.data = tensors[name]
            supernet.norms = norms
            supernet.refresh()
        return
    versioned = OrderedDict(tensors)
    versioned._metadata = supernet.state_dict()._metadata  # type: ignore[attr-defined]
    supernet.load_state_dict(versioned, norms=norms)
