"""The model card of a bundle: a table of the subnets, and how to load them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from subnetact.elastic.cut_out import opening
from subnetact.elastic.folder import BUNDLE, INDEX, load_folder
from subnetact.errors import FileFormatError
from subnetact.files.documents import StrPath
from subnetact.files.tensors import read_model
from subnetact.latency.origin import require_measured_on, scheduling_table
from subnetact.latency.table import LatencyTable
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.supernet import Supernet

_Tables = dict[str, LatencyTable]


def validated(folder: StrPath) -> tuple[dict[str, Any], _Tables, Supernet | None]:
    """Check a bundle as a whole, with all checksums, and return its index, its tables and its supernet.

    The supernet of a network that no library makes is None; its weights are read all the same.

    Raises:
        FileFormatError: a file is missing, damaged or changed, or the files do not belong together.
    """

    def facts(place: Path, document: dict[str, Any]) -> tuple[dict[str, Any], _Tables]:
        with BUNDLE.fields(place / INDEX):
            read_model(place)
            NormTable.load(place / document["statistics"])
            return document, {n: LatencyTable.load(place / file) for file, n in document["tables"].items()}

    document, tables = BUNDLE.read_version(folder, facts)
    if document.get("model") is None:
        return document, tables, None
    supernet, tables, _ = load_folder(folder, None, True, False, lambda *_: None)
    found = supernet.fingerprint()
    if found != document.get("fingerprint"):
        raise FileFormatError(
            f"{Path(folder) / INDEX}: the fingerprint is {document.get('fingerprint')!r:.60}, that of the "
            f"weights {found}; save the bundle again"
        )
    return document, tables, supernet


def require_servable(document: Mapping[str, Any], tables: _Tables, supernet: Supernet | None) -> None:
    """Refuse the bundle that `validated` returned if a server would refuse the table that it plans with."""
    table, keys = scheduling_table(tables), None
    if supernet is not None:
        subnets, engine = supernet.card.subnets, document["engine"] or {"subnets": None}
        keys = list(dict.fromkeys(subnets[name].key for name in engine["subnets"] or subnets))
    if table is not None:
        require_measured_on(table, keys, document["fingerprint"])
        table.known_accuracy()


def model_card(document: Mapping[str, Any], tables: _Tables, supernet: Supernet | None) -> str:
    """Return the model card of a bundle in Markdown, from what `validated` returned."""
    return "\n".join(_lines(document, tables, supernet)) + "\n"


def _lines(document: Mapping[str, Any], tables: _Tables, supernet: Supernet | None) -> Iterator[str]:
    model, subnets = document["model"] or {"library": "torch", "name": "own network"}, document["subnets"]
    tags = ["elastic", *([model["library"]] if model["library"] in ("transformers", "timm") else ())]
    yield from ("---", *([f"license: {json.dumps(document['licence'])}"] if document["licence"] else ()))
    yield from ("library_name: subnetact", f"tags: [{', '.join(tags)}]", "---", "")
    yield f"# {model['name']}, elastic"
    yield from ("", f"One copy of the weights holds every size; {len(subnets)} of them have names.", "")
    known = sorted({what for stated in subnets.values() for what in stated["quality"]})
    keys = ["" if supernet is None else supernet.card.subnets[name].key for name in subnets]
    timed: dict[str, list[str]] = {}
    for name, table in tables.items():  # A profile's table for schedulers is of the same measurement.
        size = table.batch_sizes[int(np.isfinite(table.latency_ms).any(0).argmax())]  # the smallest that ran
        stamp, where = table.stamp, table.select(batch_sizes=[size]).conditions
        facts = (f"{fact} {stamp[fact]}" for fact in ("statistic", "dtype", "input_shape") if fact in stamp)
        heading = ", ".join(["ms", where if "device" in stamp else f"{where}, {name}", *facts])
        cells = [_shown(table.latency_at(key, size)) if key in table.subnets else "" for key in keys]
        timed[heading if timed.get(heading, cells) == cells else f"{heading}, {name}"] = cells
    rows = [["subnet", "parameters", *known, *timed]]
    for i, (name, stated) in enumerate(subnets.items()):
        figures = [_shown(stated["quality"].get(what, {}).get("value")) for what in known]
        view = None if supernet is None else supernet.subnet(supernet.card.subnets[name])
        own = "?" if view is None else f"{sum(p.numel() for p in view.parameters()):,}"
        rows.append([name, own, *figures, *(column[i] for column in timed.values())])
    rows.insert(1, ["---"] * len(rows[0]))
    yield from ("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)
    sources = {q["source"] for stated in subnets.values() for q in stated["quality"].values() if q["source"]}
    yield from ("", *(f"Measured: {source}." for source in sorted(sources)))
    stamps = [table.stamp for table in tables.values()]
    calibrated = dict.fromkeys(stamp["calibrated_on"] for stamp in stamps if "calibrated_on" in stamp)
    yield from (f"BatchNorm statistics: {source}." for source in calibrated)
    first = json.dumps(next(iter(subnets), "smallest"))
    given = "" if document["model"] else ", model=network"
    yield from ("", "```python", "import subnetact", "", "# every size, from one copy of the weights")
    yield f'supernet = subnetact.from_pretrained("folder"{given})'
    yield f'small = subnetact.from_pretrained("folder", subnet={first}{given})'
    if lines := opening(model):
        yield from ("", "# the largest, without subnetact", *lines)
    yield "```"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
