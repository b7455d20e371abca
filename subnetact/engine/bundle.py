"""Bundles: everything that an engine serves, in one directory, without pickle.

The index of a bundle is `bundle.json`; `BUNDLE` below has its kind and schema. Its fields are:

- `kind`, `schema`, `subnetact`: `"subnetact.bundle"`, the version of this format, and of the package.
- `space`: the id of the search space.
- `precision`: the arguments of `Supernet.enable_precision`, or null.
- `family`: the supernet's `origin`, with which `origins.py` rebuilds it, or null for an own network.
- `example`: `[dtype, shape]` of a tensor, `{"tuple": [...]}`, `{"dict": {...}}`, `{"list": [...]}` of one
  input per shape, or null; `padding`: a number, a list of `[name or position of an input, value]`, or null.
- `allow_uncalibrated`: whether subnets without BatchNorm statistics of their own are accepted.
- `subnets`, `accuracy`, `removed`: the specifications in id order, their accuracy in percent or null, and
  the ids that are not served any more.
- `tables`: the name of the latency table in each file `latency-0.json`, `latency-1.json`, ...
- `files`: the size in bytes and SHA-256 of `weights.safetensors`, `norms.safetensors` and the tables.
- `checksum`: the SHA-256 of the document without this field.

The checksums find accidents and edits. They are not a signature.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from subnetact import __version__
from subnetact.engine.input_shapes import Padding
from subnetact.engine.inputs import example_from_json, example_to_json
from subnetact.engine.origins import rebuild_supernet
from subnetact.errors import FileFormatError, ForeignSpec, NotCalibrated, PrecisionError
from subnetact.files.documents import FolderFormat
from subnetact.files.tensors import read_tensors, write_tensors
from subnetact.latency.table import LatencyTable
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet, as_supernet

__all__ = ["Bundle", "load_bundle", "save_bundle"]

INDEX, WEIGHTS, NORMS = "bundle.json", "weights.safetensors", "norms.safetensors"
BUNDLE = FolderFormat("a bundle", "subnetact.bundle", 1, "give the directory that Engine.save() wrote", INDEX)


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds: everything that an engine is made of.

    Attributes:
        supernet: the network with its weights, and the space.
        specs: every subnet that was registered, in id order.
        accuracy: of each subnet, in percent, or None if it is not known.
        removed: ids of subnets that are not served any more.
        example: one input without a batch dimension, a list of inputs with one per shape, or None if it is
            not known.
        tables: latency tables by name.
        allow_uncalibrated: whether subnets without BatchNorm statistics of their own are accepted.
        norms: the statistics rows of the subnets. A bundle is written with those that the supernet has then.
        padding: the padding of the engine, as given.
    """

    supernet: Supernet
    specs: Sequence[SubnetSpec]
    accuracy: Sequence[float | None]
    removed: Sequence[int]
    example: Any
    tables: Mapping[str, LatencyTable]
    allow_uncalibrated: bool
    norms: NormTable
    padding: Padding = None


def save_bundle(bundle: Bundle, directory: str | PathLike[str]) -> None:
    """Write a bundle. It replaces an earlier one in one step, when it is complete.

    Args:
        bundle: what to write.
        directory: a new or empty directory, or one that holds a bundle.

    Raises:
        FileFormatError: the directory holds something else than a bundle.
        NotCalibrated: a subnet that is served has no BatchNorm statistics of its own.
    """
    facts: dict[str, Any] = {}
    with BUNDLE.writing(directory, facts) as folder:
        facts |= _write(bundle, folder)


def _write(bundle: Bundle, folder: Path) -> dict[str, Any]:
    supernet, padding = bundle.supernet, bundle.padding
    with supernet.generation.unchanged():  # Everything is of one checkpoint, whatever other threads load.
        if not bundle.allow_uncalibrated:
            supernet.require_calibrated([s for i, s in enumerate(bundle.specs) if i not in bundle.removed])
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in supernet.state_dict().items()}
        norms, space, precision = supernet.norms.to_like(None), supernet.space, supernet.precision
    write_tensors(folder / WEIGHTS, tensors)
    norms.save(folder / NORMS)
    tables = {f"latency-{i}.json": name for i, name in enumerate(bundle.tables)}
    for file, name in tables.items():
        bundle.tables[name].save(folder / file)
    return {
        "subnetact": __version__,
        "space": space.id,
        "precision": None if precision is None else precision.to_json(),
        "family": _portable(supernet.origin),
        "example": example_to_json(bundle.example),
        "padding": list(map(list, padding.items())) if isinstance(padding, Mapping) else padding,
        "allow_uncalibrated": bundle.allow_uncalibrated,
        "subnets": [spec.to_json() for spec in bundle.specs],
        "accuracy": list(bundle.accuracy),
        "removed": sorted(bundle.removed),
        "tables": tables,
    }


def load_bundle(
    directory: str | PathLike[str],
    supernet: Supernet | None,
    mapped: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Bundle:
    """Read a bundle.

    Args:
        directory: the bundle.
        supernet: the supernet to fill with the bundle's weights. If None, a new one is built by the name of
            its family.
        mapped: whether the supernet's weights stay in the file, which processes share.
        options: arguments of `Engine`; `allow_uncalibrated` and `removed` replace those of the bundle.

    Returns:
        The parts that an engine is made of.

    Raises:
        MissingFile: there is no bundle in the directory.
        FileFormatError: a file is missing, truncated, changed, or of a newer schema; the message names it.
        ForeignSpec: the given supernet is of another space.
        InsertError: `supernet` is not a `Supernet`.
        NotCalibrated: the bundle lacks BatchNorm statistics of a subnet. The supernet is left as it was.
        PrecisionError: this machine cannot compute at a precision of the bundle.
    """
    if supernet is not None:
        as_supernet(supernet)
    bundle, tensors, precision = BUNDLE.read_version(
        directory, partial(_read, given=supernet, options=options)
    )
    folder = Path(directory)
    with BUNDLE.fields(folder / INDEX, damaged=(RuntimeError,)):
        _require_fitting(bundle.supernet, tensors, folder / WEIGHTS, own_dtype=supernet is not None)
        if precision is not None:
            bundle.supernet.enable_precision(*precision.pop("precisions"), **precision)
        _fill(bundle.supernet, tensors, bundle.norms, mapped)
    return bundle


def _read(
    folder: Path, document: dict[str, Any], given: Supernet | None, options: Mapping[str, Any]
) -> tuple[Bundle, dict[str, Tensor], dict[str, Any] | None]:
    """Return a bundle, its weights, and the arguments of `enable_precision` that its supernet still needs."""
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
            precision = {name: precision[name] for name in ("precisions", "keep", "slots", "last")}
        if precision is not None and supernet.precision is None:
            space = space.with_precision(*precision["precisions"], slots=list(precision["slots"]))
        enabled = None if supernet.precision is None else supernet.precision.to_json()
        if space.id != document["space"] or enabled not in (None, precision):
            message = (
                f"{index}: the bundle is of space {document['space']} with precision {precision}, the "
                f"supernet is of space {space.id} with precision {enabled}; give the supernet that was saved"
            )
            raise FileFormatError(message) if built else ForeignSpec(message)
        specs = [space.check(SubnetSpec.from_json(spec)) for spec in document["subnets"]]
        example = example_from_json(document["example"])
        padding = document.get("padding")
        if isinstance(padding, list):
            padding = dict(padding)
        norms = NormTable.load(folder / NORMS)
        if norms.space != space.id:
            raise FileFormatError(f"{folder / NORMS}: is of space {norms.space}; write the bundle again")
        tables = {name: LatencyTable.load(folder / file) for file, name in document["tables"].items()}
        accuracy = [_percent(value) for value in document["accuracy"]]
        removed, allow = document["removed"], document["allow_uncalibrated"]
        if not all(type(i) is int for i in removed) or type(allow) is not bool:
            raise ValueError(f"removed ids {removed!r}, allow_uncalibrated {allow!r}")
        if not 0 < len(set(specs)) == len(specs) == len(accuracy) or set(removed) - set(range(len(specs))):
            raise ValueError("subnets, accuracy and removed ones do not belong together")
        allow, removed = options.get("allow_uncalibrated", allow), options.get("removed", removed)
        bare = [spec for i, spec in enumerate(specs) if spec not in norms and i not in removed]
        if bare and not allow and supernet.norm_operators():
            raise NotCalibrated(
                f"{index}: the bundle has no BatchNorm statistics of {bare[0]}; allow_uncalibrated=True uses "
                "the shared ones"
            )
        bundle = Bundle(supernet, specs, accuracy, removed, example, tables, allow, norms, padding)
        return bundle, tensors, precision if enabled is None else None


def _percent(value: Any) -> float | None:
    if value is None or value != value:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"an accuracy of {value!r}; it must be a percentage, or null")
    return float(value)


def _portable(origin: Any) -> Any:
    try:
        return json.loads(json.dumps(origin))
    except (TypeError, ValueError):
        return None  # JSON cannot hold the arguments, so the caller of load_bundle gives the supernet.


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
        with supernet.exclusive():
            for name, kept in supernet.state_dict(keep_vars=True).items():
                kept.data = tensors[name]
            supernet.norms = norms
            supernet.refresh()
        return
    versioned = OrderedDict(tensors)
    versioned._metadata = supernet.state_dict()._metadata  # type: ignore[attr-defined]
    supernet.load_state_dict(versioned, norms=norms)
