"""Builders of the supernets that a bundle may name: no other code is imported when a bundle is loaded.

A bundle holds the name of a builder and its constructor arguments. The name is looked up in `BUILDERS`; every
other name is a family of `ofa_adapters`, whose `load` accepts only its own list of families. So a file
chooses among the names that are listed in the code; it cannot name a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from subnetact.supernet.supernet import Supernet

__all__ = ["BUILDERS", "rebuild_supernet"]

BUILDERS: Mapping[str, tuple[str, str]] = {"digits": ("subnetact.digits", "new_digits_supernet")}
"""By name: the module and the function that builds the supernet with untrained weights."""
FAMILIES = ("ofa_adapters", "load")
"""The module and the function that builds all other supernets, given the family's name."""


SLACK = 4
"""A network may take this many times the bytes of its weights while it is built, and `LEAST` more."""
LEAST = 2**24


def rebuild_supernet(name: str, constructor: Mapping[str, Any], size: int) -> Supernet:
    """Build the supernet of a name, with random weights.

    Args:
        name: a key of `BUILDERS`, or a family of `ofa_adapters`.
        constructor: the keyword arguments that it was built with, as `Supernet.origin` holds them.
        size: the bytes of the weights that it will be filled with. Arguments that describe a much larger
            network are refused before its memory is taken.

    Returns:
        A new supernet, in evaluation mode.

    Raises:
        ValueError: there is no such family, or the arguments describe a larger network.
        TypeError: the builder does not take these arguments.
    """
    module, function = BUILDERS.get(name, FAMILIES)
    family = () if name in BUILDERS else (name, None)
    build = getattr(import_module(module), function)
    with _Limit(LEAST + SLACK * size):
        built: Supernet = build(*family, **constructor)
    return built.eval()


class _Limit(TorchFunctionMode):
    """Raises ValueError before the tensors that are made in the block take more than so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = self._left = limit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTORIES:
            self._left -= func(*args, **{**(kwargs or {}), "device": "meta"}).nbytes
            if self._left < 0:
                raise ValueError(f"these arguments describe a network of more than {self._limit} bytes")
        return func(*args, **(kwargs or {}))


_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye}
_FACTORIES |= {torch.arange}
