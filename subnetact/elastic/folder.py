"""Bundles: one folder with every size of a model, which its own library opens too.

What a bundle stores (`docs/bundle.md` describes every field):

1. the weights of the largest subnet and the configuration, as the model's own library writes them:
   `_write_network`;
2. in `elastic.json`, the space and how the model became elastic, the subnets by name with their figures, the
   precision, what an engine serves, the fingerprint of the weights, and every file with its checksum:
   `save_folder`;
3. the BatchNorm statistics of the named subnets and of the largest, and those that all others share;
4. latency tables, each with the machine that it was measured on.

Fused programs, packed copies, copies at lower precisions, graphs and compiled code are not stored but made
again, nor are the values of an engine's example (a loaded engine has zeros) and settings of the machine.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ofa_adapters.registry import ALL
from subnetact import __version__
from subnetact.elastic.factories import (
    factory_of,
    make_network,
    ordinary,
    under_runtime_names,
    without_progress_bars,
)
from subnetact.errors import (
    FileFormatError,
    ForeignSpec,
    InsertError,
    MissingExtra,
    NotCalibrated,
    PrecisionError,
    SpecError,
    extra_needed,
)
from subnetact.files.documents import FolderFormat, StrPath
from subnetact.files.tensors import MODEL, SHARD_BYTES, read_model, read_tensors, write_tensors
from subnetact.insertion.description import Description
from subnetact.insertion.key_value_cache import guard_caches_
from subnetact.latency.origin import require_measured_on, restamped
from subnetact.latency.table import LatencyTable
from subnetact.operators.tensor_version import tensor_place
from subnetact.space import SubnetSpace
from subnetact.spec import FLOAT32, PRECISION, SubnetSpec
from subnetact.supernet.card import Card
from subnetact.supernet.forward_state import note_state_
from subnetact.supernet.load import with_tied_names
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.put_operators import put_operators_
from subnetact.supernet.statistics import require_calibrated, statistics_of_largest
from subnetact.supernet.supernet import Supernet, as_supernet, fingerprint_of

INDEX, NORMS, SHARED = "elastic.json", "norms.safetensors", "shared_norms.safetensors"
ACCURACY = "accuracy"
"""The quality that engines know, in percent."""
_NEXT_STEP = "give the folder that save_pretrained() or Engine.save() wrote"
_SCHEMA = json.loads(Path(__file__).with_name("bundle.schema.json").read_text(encoding="utf-8"))
BUNDLE = FolderFormat("a bundle", "subnetact.elastic", 1, _NEXT_STEP, INDEX, _SCHEMA)
Extra = TypeVar("Extra")


def from_pretrained(
    folder: StrPath,
    subnet: Any = None,
    *,
    model: nn.Module | None = None,
    mapped: bool = True,
    verify: bool = False,
) -> nn.Module:
    """Load a bundle: the supernet, or one subnet of it. Nothing in the files is executed.

    Args:
        folder: what `save_pretrained` or `Engine.save` wrote.
        subnet: the name of a subnet (`pareto-0` is the fastest of a Pareto set that a profile found),
            a specification, or what `space.parse` takes. If None, the supernet is returned, whose `card` has
            the named subnets.
        model: for a network that no library makes: the network, or a supernet of it, made with the same
            arguments. The weights of the bundle replace its weights.
        mapped: whether the weights stay in the file and are read when they are used, so that a large bundle
            opens at once and processes share it. Training then copies what it changes. The file must not be
            written over meanwhile. Tensors in a file are aligned in other ways than in memory, so answers may
            differ in the last bits; without `mapped` they are bit-equal.
        verify: whether to compare the checksums of the weights, which reads all of them. Sizes, and
            all small files, are always checked.

    Returns:
        The supernet, or the view of the subnet: an ordinary network on the same weights.

    Raises:
        MissingFile: there is no bundle in the folder.
        FileFormatError: a file is missing, damaged, changed or of a newer schema; or the network is
            not one that a library can make.
        ForeignSpec: the given model is of another space.
        SpecError: there is no such subnet; the message lists the names.
        MissingExtra: the library of the network is not installed.

    Example:
        >>> supernet = subnetact.from_pretrained("folder")
        >>> y = supernet(x, subnet=supernet.card.subnets["small"])
        >>> small = subnetact.from_pretrained("folder", subnet="small")
    """
    supernet, *_ = load_folder(folder, model, mapped, verify, lambda *_: None)
    if subnet is None:
        return supernet
    return supernet.subnet(supernet.card.find(supernet.space, subnet))


# -- writing ----------------------------------------------------------------------------------------


def save_folder(
    supernet: Supernet,
    directory: StrPath,
    card: Card,
    tables: Mapping[str, LatencyTable],
    engine: Mapping[str, Any] | None,
    require: Sequence[SubnetSpec] = (),
    fingerprints: Collection[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a bundle. Readers of this package get an earlier one until it is complete.

    With `fingerprints`, tables of earlier weights that have these become those of the weights that are
    written, and tables of others are refused.
    """
    files = {f"latency-{i}.json": name for i, name in enumerate(tables)}
    facts: dict[str, Any] = {"subnetact": __version__}
    with BUNDLE.writing(directory, facts) as folder:
        network = ordinary(supernet.network)
        with supernet.generation.unchanged():  # All is of one checkpoint, whatever other threads load.
            require_calibrated(supernet, require)
            tensors = _copies(supernet.network.state_dict())
            norms, space, precision = supernet.norms.to_like(), supernet.space, supernet.precision
            norms.keep([*card.subnets.values(), space.largest()])
            shared = _copies(statistics_of_largest(supernet))
        fingerprint = fingerprint_of(space.id, tensors)
        own = {name: tensors[name] for name in shared}
        tensors.update(shared)  # The library's own reader gets the statistics of the largest subnet.
        model = _model_of(supernet, network, card)
        facts |= {
            "model": model,
            "space": space.id,
            "description": supernet.description and json.loads(supernet.description.to_json()),
            "precision": precision and precision.to_json(),
            "subnets": {
                name: {**_written(space, spec), "quality": card.quality.get(name, {})}
                for name, spec in card.subnets.items()
            },
            "statistics": NORMS,
            "shared_statistics": SHARED if own else None,
            "state": sorted(supernet.state),
            "tables": files,
            "engine": engine,
            "fingerprint": fingerprint,
            "licence": card.licence,
        }
        _write_network(folder, network, model, tensors, shard_bytes)
        norms.save(folder / NORMS)
        if own:
            write_tensors(folder / SHARED, own)
        for file, name in files.items():
            table = tables[name]
            if fingerprints is not None:
                dtype = str(next(supernet.parameters()).dtype).removeprefix("torch.")
                present = {"supernet": fingerprint, "space": space.id, "dtype": dtype}
                table = restamped(table, fingerprints, present)
                require_measured_on(table, None, fingerprint, f"tables[{name!r}]")
            table.save(folder / file)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU; the same tensor under two names stays one."""
    places = {name: tensor_place(tensor) for name, tensor in state.items()}
    tensors = {places[name]: tensor for name, tensor in state.items()}
    copies = {place: t.detach().cpu().contiguous().clone() for place, t in tensors.items()}
    return {name: copies[place] for name, place in places.items()}


def _model_of(supernet: Supernet, network: nn.Module, card: Card) -> dict[str, Any] | None:
    """Return what makes the network again: a family, or a factory of a library; None if nothing does."""
    origin = supernet.origin
    if origin is not None and origin["name"] in ("digits", *ALL):
        library = "subnetact" if origin["name"] == "digits" else "ofa_adapters"
        try:
            arguments = json.loads(json.dumps(origin["constructor"]))
        except (TypeError, ValueError):
            return None  # JSON cannot hold the arguments, so whoever loads the bundle gives the supernet.
        return {"library": library, "name": origin["name"], "arguments": arguments}
    return None if supernet.description is None else factory_of(network, card.factory)


def _written(space: SubnetSpace, spec: SubnetSpec) -> dict[str, Any]:
    """Return a subnet in the notation of its space, which is read again to be sure."""
    config = space.format(spec.base)
    found: dict[str, Any] = {"config": json.loads(json.dumps(config, allow_nan=False))}
    if spec.precision != FLOAT32:
        found[PRECISION] = spec.precision
    if _read_spec(space, found) != spec:
        raise SpecError(f"{spec}: `format` and `parse` of {space.name} contradict each other; got {config!r}")
    return found


def _read_spec(space: SubnetSpace, stated: Mapping[str, Any]) -> SubnetSpec:
    spec = space.parse(stated["config"])
    return space.at_precision(spec, stated[PRECISION]) if PRECISION in stated else spec


def _write_network(
    folder: Path, network: Any, model: Any, tensors: Mapping[str, Tensor], shard_bytes: int
) -> None:
    """Write configuration and weights as the network's own library does, or a plain state_dict."""
    library = type(network).__module__.split(".")[0]
    if library == "transformers" and hasattr(network, "save_pretrained"):
        with without_progress_bars():
            network.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=shard_bytes)
        return
    if library == "timm" and model is not None:
        from timm.models._hub import save_config_for_hf

        save_config_for_hf(network, str(folder / "config.json"), model_args=model["arguments"])
    once: dict[int, str] = {}
    separate = {n: t.clone() if once.setdefault(id(t), n) != n else t for n, t in tensors.items()}
    write_tensors(folder / MODEL, separate)


# -- reading ----------------------------------------------------------------------------------------


def load_folder(
    directory: StrPath,
    model: nn.Module | None,
    mapped: bool,
    verify: bool,
    extra: Callable[[dict[str, Any], SubnetSpace, NormTable, Supernet], Extra],
) -> tuple[Supernet, dict[str, LatencyTable], Extra]:
    """Read a bundle and what `extra` makes of its facts; a model that is given stays as it was on errors."""
    read = partial(_read, model=model, extra=extra)
    supernet, tables, found, norms, tensors, precision = BUNDLE.read_version(directory, read, verify)
    index = Path(directory) / INDEX
    with BUNDLE.fields(index, damaged=(RuntimeError,)):
        _require_fitting(supernet, tensors, index.parent, own_dtype=model is not None)
        if precision is not None:
            supernet.enable_precision(*precision.pop("precisions"), **precision)
        _fill(supernet, tensors, norms, mapped)
        if supernet.on_bind is None and supernet.description is not None:
            guard_caches_(supernet)
    return supernet, tables, found


def _read(folder: Path, document: dict[str, Any], model: Any, extra: Callable[..., Any]) -> Any:
    """Return a supernet, tables, `extra`, and what it gets: statistics, weights, and precisions if any."""
    index = folder / INDEX
    given = isinstance(model, Supernet)
    passing = (PrecisionError, NotCalibrated, MissingExtra, *((ForeignSpec, InsertError) if model else ()))
    with BUNDLE.fields(index, passing=passing, damaged=(RuntimeError, InsertError)):
        listed, own = document["files"], document["shared_statistics"]
        for file in (document["statistics"], *document["tables"], *((own,) if own else ())):
            if file not in listed or file == INDEX:
                raise FileFormatError(f"{index}: `files` does not list {file}; write the bundle again")
        tensors = read_model(folder)
        if own:
            tensors.update(read_tensors(folder / own))
        size = sum(tensor.nbytes for tensor in tensors.values())
        supernet = as_supernet(model) if given else _made(document, folder, size, model)
        network = ordinary(supernet.network)
        known = tensors.keys() <= supernet.network.state_dict().keys()
        if not known and type(network).__module__.startswith("transformers."):
            tensors = under_runtime_names(network, tensors)
        space, precision = supernet.space, document["precision"]
        if precision is not None:
            precision = {name: precision[name] for name in ("precisions", "keep", "last")}
        if precision is not None and supernet.precision is None:
            space = space.with_precision(*precision["precisions"])
        enabled = None if supernet.precision is None else supernet.precision.to_json()
        if space.id != document["space"] or enabled not in (None, precision):
            message = (
                f"{index}: the bundle is of space {document['space']} with precision {precision}, the "
                f"supernet is of space {space.id} with precision {enabled}; give the supernet that was "
                "saved, or the ordinary network, which the bundle makes elastic as it was: on other weights, "
                "insert_ can put the blocks in another order"
            )
            raise ForeignSpec(message) if model is not None else FileFormatError(message)
        norms = NormTable.load(folder / document["statistics"])
        if norms.space != space.id:
            raise FileFormatError(f"{folder / NORMS}: is of space {norms.space}; write the bundle again")
        tables = {name: LatencyTable.load(folder / file) for file, name in document["tables"].items()}
        card = Card.read(document, partial(_read_spec, space))
        found = extra(document | {"card": card}, space, norms, supernet)
        supernet.card = card
        note_state_(supernet, document.get("state", ()))
    return supernet, tables, found, norms, tensors, precision if enabled is None else None


def _made(document: Mapping[str, Any], folder: Path, size: int, network: nn.Module | None) -> Supernet:
    """Return the supernet that a bundle describes, on weights that are not set yet."""
    stated, described = document["model"], document["description"]
    if network is None:
        if stated is None:
            raise FileFormatError(
                f"{folder / INDEX}: the bundle is of an own network, which no name can rebuild; make "
                "one of the same class and give it: Engine.load(directory, supernet=network), "
                "from_pretrained(folder, model=network), or --model PKG.MOD:CLASS on the command line"
            )
        with extra_needed(f"{folder / INDEX}: its network is of {stated['library']}; install that"):
            try:
                network = make_network(stated, folder, size)
            except FileFormatError as error:
                raise FileFormatError(f"{folder / INDEX}: {error}") from error
    if isinstance(network, Supernet):
        return network
    if described is None:
        return as_supernet(network)  # It refuses a network, which nothing tells how to make elastic.
    description = Description.from_json(json.dumps(described))
    supernet = put_operators_(network.eval(), description.space, description.elastic)
    supernet.description = description
    if stated is not None and stated["library"] == "transformers":  # The rules of caches need no weights.
        shell = put_operators_(make_network(stated, folder, None), description.space, description.elastic)
        tokens = getattr(shell.network, "dummy_inputs", {})
        supernet.on_bind = guard_caches_(shell, {n: t.to("meta") for n, t in tokens.items()}).on_bind
    return supernet


def _require_fitting(supernet: Supernet, tensors: dict[str, Tensor], folder: Path, own_dtype: bool) -> None:
    """Refuse tensors that do not fit; a supernet that was built for the bundle takes their dtype."""
    own: dict[str, Tensor] = supernet.network.state_dict(keep_vars=True)
    tensors.update(with_tied_names(tensors, own))  # Files leave out tied output layers.
    differing = sorted(set(own) ^ set(tensors)) or [n for n, t in tensors.items() if t.shape != own[n].shape]
    if differing:
        raise FileFormatError(
            f"{folder}: the tensors do not fit the supernet; the first that differs is {differing[0]}; give "
            "the supernet that was saved, made with the same arguments"
        )
    for name, kept in own.items():
        kind = tensors[name].dtype
        if kept.dtype != kind and (own_dtype or not (kept.is_floating_point() and kind.is_floating_point)):
            raise FileFormatError(
                f"{folder}: {name} is {kind}, the supernet's is {kept.dtype}; give a "
                "supernet of that dtype: Engine.load(directory, supernet=...)"
            )
        if kept.dtype != kind:
            kept.data = torch.empty_like(kept, dtype=kind)


def _fill(supernet: Supernet, tensors: Mapping[str, Tensor], norms: NormTable, mapped: bool) -> None:
    """Give a supernet weights that fit, and their statistics."""
    if mapped:  # `read_model` returns views of the mapped files
        with supernet.generation.lock:
            for name, kept in supernet.network.state_dict(keep_vars=True).items():
                kept.data = tensors[name]
            supernet.norms = norms
            supernet.refresh()
        return
    versioned = OrderedDict(tensors)
    versioned._metadata = supernet.network.state_dict()._metadata  # type: ignore[attr-defined]
    supernet.load_state_dict(versioned, norms=norms)
