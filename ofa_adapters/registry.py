"""The families, and how one is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Any

from torch import Tensor, nn

from ofa_adapters.checkpoint import fill, read
from subnetact.insert import insert_
from subnetact.operators import Elastic
from subnetact.space import SubnetSpace
from subnetact.supernet import Supernet

__all__ = ["Family", "families", "load"]

_MODULES = ("ofa_resnet50",)


@dataclass(frozen=True)
class Family:
    """One published family.

    Attributes:
        build: constructor arguments, by upstream's names -> (plain network, space, elastic description).
        rename: an upstream state_dict key -> the plain network's key.
        source: where the architecture is published.
    """

    build: Callable[..., tuple[nn.Module, SubnetSpace, Mapping[str, Elastic]]]
    rename: Callable[[str], str]
    source: str


def families() -> tuple[str, ...]:
    """Return the names `load` takes."""
    return _MODULES


def load(
    family: str,
    checkpoint: str | PathLike[str] | Mapping[str, Tensor] | None = None,
    **constructor: Any,
) -> Supernet:
    """Build a family's supernet and fill it with a checkpoint.

    Args:
        family: a name of `families()`.
        checkpoint: a path (`.pth`, `.pt` or `.safetensors`), a state_dict with upstream's names, or
            None for random weights. Files are read without unpickling code.
        constructor: upstream's constructor arguments; the published network where left out.

    Raises:
        CheckpointError: the file is unreadable, or its tensors are not exactly the family's.
        ValueError: the family is unknown.
        TypeError: the family has no such constructor argument.
    """
    if family not in _MODULES:
        raise ValueError(f"unknown family {family!r}; choose from {', '.join(_MODULES)}")
    found: Family = import_module(f"ofa_adapters.{family}").FAMILY
    known = inspect.signature(found.build).parameters
    unknown = sorted(set(constructor) - set(known))
    if unknown:
        raise TypeError(f"{family} has no constructor argument {', '.join(unknown)}; it has {', '.join(known)}")
    network, space, elastic = found.build(**constructor)
    if checkpoint is not None:
        is_path = isinstance(checkpoint, str | PathLike)
        tensors = read(checkpoint) if is_path else checkpoint  # type: ignore[arg-type]
        fill(network, tensors, found.rename, f"{family}: {checkpoint if is_path else 'state_dict'}")  # type: ignore[arg-type]
    return insert_(network, space, elastic).eval()
