"""Checkpoints: they are read without running code from the file, and must fit the network exactly."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ofa_adapters.family import Family
from subnetact.errors import CheckpointError, FileFormatError
from subnetact.files.atomic import read_regular, require_regular
from subnetact.files.documents import StrPath, parse_json
from subnetact.files.tensors import MODEL, SHARDS, read_model, read_tensors
from subnetact.operators.tensor_version import storage_id

_WRAPPERS = ("state_dict", "model")
_IN_DIRECTORY = (SHARDS, MODEL, "pytorch_model.bin")
NAMES_SHOWN = 12
"""The most names in an error message."""
MOST_WRAPPERS = 8
"""The most mappings around a state_dict. In a hostile file, a mapping may contain itself."""
SMALL_BYTES, SHARED = 2**26, 16
"""Tensors may claim this many bytes, and this many times the size of their file, because they may overlap."""
_SCALAR: Any = np.float64(0).__reduce__()[0]
HARMLESS_TYPES: list[Any] = [
    argparse.Namespace,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
]
"""Types that training scripts save beside the weights, such as their command line or the best accuracy.
Unpickling them runs no code from the file."""


def read(path: StrPath) -> dict[str, Tensor]:
    """Read the state_dict in a file, or in a directory that transformers saved, without running its code."""
    file = Path(path)
    if (file / "elastic.json").is_file():
        raise CheckpointError(f"{path}: is a bundle, not a checkpoint; subnetact.from_pretrained reads it")
    if file.is_dir():
        found = [file / name for name in _IN_DIRECTORY if (file / name).is_file()]
        if not found:
            raise CheckpointError(f"{path}: the directory holds none of {', '.join(_IN_DIRECTORY)}")
        file = found[0]
    try:
        require_regular(file)
        if file.name == SHARDS:
            content: Any = read_model(file.parent)
        elif file.name.endswith(".safetensors"):
            content = read_tensors(file)
        else:
            with torch.serialization.safe_globals(HARMLESS_TYPES):
                content = torch.load(file, map_location="cpu", weights_only=True)
    except FileFormatError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:  # A damaged pickle can raise anything; torch's text advises to trust the file.
        refused = re.search(r"(?<=GLOBAL )[\w.]+|TorchScript", str(error))
        problem = "truncated or damaged; fetch or save it again"
        if refused:
            problem = (
                f"holds more than tensors ({refused[0]}), as torch.save(model, ...) writes; where its "
                "class is trusted, save the state_dict: torch.save(model.state_dict(), ...)"
            )
        raise CheckpointError(f"{path}: {problem}") from None
    tensors = unwrap(content, str(path))
    claimed, size = sum(tensor.nbytes for tensor in tensors.values()), file.stat().st_size
    if file.name != SHARDS and claimed > SMALL_BYTES + SHARED * size:
        raise CheckpointError(
            f"{path}: its tensors claim {claimed:,} bytes, the file has {size:,}; save contiguous tensors"
        )
    return tensors


def parsed_config(directory: StrPath, name: str = "config.json") -> dict[str, Any]:
    """Return what a JSON file holds in a directory that transformers saved."""
    path = Path(directory) / name
    try:
        return dict(parse_json(read_regular(path)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable configuration ({error})") from error


def unwrap(content: Any, subject: str) -> dict[str, Tensor]:
    """Return the state_dict in `state_dict`, `model` or the only mapping of tensors, if it can be used."""
    for _ in range(MOST_WRAPPERS):
        parts = content if isinstance(content, Mapping) else {}
        inside = [name for name in _WRAPPERS if isinstance(parts.get(name), Mapping)][:1] or [
            name
            for name, part in parts.items()
            if isinstance(part, Mapping) and part and all(isinstance(t, Tensor) for t in part.values())
        ]
        if not inside or any(isinstance(part, Tensor) and part.ndim for part in parts.values()):
            break
        if len(inside) > 1:
            raise CheckpointError(
                f"{subject}: holds several state_dicts, {some([repr(name) for name in inside])}; load one of "
                f"them: torch.load(FILE, weights_only=True)[{inside[0]!r}]"
            )
        content = content[inside[0]]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{subject}: holds no state_dict, but {type(content).__name__}")
    others = [str(k) for k, v in content.items() if not (isinstance(k, str) and isinstance(v, Tensor))]
    if others or not content:
        what = f"entries that are not tensors: {some(others)}" if others else "nothing"
        raise CheckpointError(f"{subject}: holds no state_dict, but {what}")
    unusable = [f"{key} is {fault}" for key, tensor in content.items() if (fault := _fault(tensor))]
    if unusable:
        raise CheckpointError(f"{subject}: {some(unusable)}; save ordinary dense tensors of real numbers")
    return dict(content)


def _fault(tensor: Tensor) -> str | None:
    faults = {
        "nested": tensor.is_nested,
        "without values (on the meta device)": tensor.is_meta,
        "quantised": tensor.is_quantized,
        f"of layout {tensor.layout}": tensor.layout != torch.strided,
        str(tensor.dtype): tensor.is_complex(),
    }
    return next((fault for fault, found in faults.items() if found), None)


def match(
    family: Family, constructor: Mapping[str, Any], own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors under the network's names, and what does not fit by its kind, in upstream's."""
    given: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    twice: list[str] = []
    for key, tensor in tensors.items():
        bare = key.removeprefix("module.")
        name = family.rename(bare)
        if name not in own and family.unused and re.search(family.unused, bare):
            continue
        if name in given:
            twice.append(f"{key} and {source[name]}")
        given[name], source[name] = tensor, key
    counts = {n for n in own if n.rpartition(".")[2].startswith("num_batches_tracked")}
    tied = {storage_id(own[n]) for n in given if n in own}  # Checkpoints leave out tied output layers.
    both = [(n, t, own[n]) for n, t in given.items() if n in own]
    shapes = [(n, tuple(t.shape), tuple(mine.shape)) for n, t, mine in both]
    missing = [n for n in own if n not in given and n not in counts and storage_id(own[n]) not in tied]
    wrong = {
        "missing": list(map(family.upstream(constructor), missing)),
        "extra": [source[n] for n in given if n not in own],
        "of another shape": [f"{source[n]} {a} should be {b}" for n, a, b in shapes if a != b],
        "of another kind of numbers": [
            f"{source[n]} is {t.dtype}, should be {mine.dtype}"
            for n, t, mine in both
            if n not in counts and t.is_floating_point() != mine.is_floating_point()
        ],
        "given twice": twice,
    }
    return given, {what: names for what, names in wrong.items() if names}


def require_finite(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of which some have values that are NaN or infinite."""
    wild = [n for n, t in tensors.items() if t.is_floating_point() and not t.float().isfinite().all()]
    if wild:
        raise CheckpointError(
            f"{subject}: {len(wild)} tensors have values that are NaN or infinite: {some(wild)}. "
            "The training diverged, or the file is damaged; allow_nonfinite=True loads it all the same"
        )


def some(names: list[str]) -> str:
    """Return the first of the names as text, and how many more there are."""
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
