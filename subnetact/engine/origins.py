"""Builders of the supernets that a bundle may name: no other code is imported when a bundle is loaded.

A bundle holds the name of a builder and its constructor arguments. The name is looked up in `BUILDERS`; every
other name is a family of `ofa_adapters`, whose `load` accepts only its own list of families. So a file
chooses among the names that are listed in the code; it cannot name a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from subnetact.supernet.supernet import Supernet

__all__ = ["BUILDERS", "rebuild_supernet"]

BUILDERS: Mapping[str, tuple[str, str]] = {"digits": ("subnetact.digits", "new_digits_supernet")}
"""By name: the module and the function that builds the supernet with untrained weights."""
FAMILIES = ("ofa_adapters", "load")
"""The module and the function that builds all other supernets, given the family's name."""


def rebuild_supernet(name: str, constructor: Mapping[str, Any]) -> Supernet:
    """Build the supernet of a name, with random weights.

    Args:
        name: a key of `BUILDERS`, or a family of `ofa_adapters`.
        constructor: the keyword arguments that it was built with, as `Supernet.origin` holds them.

    Returns:
        A new supernet.

    Raises:
        ValueError: there is no such family.
        TypeError: the builder does not take these arguments.
    """
    module, function = BUILDERS.get(name, FAMILIES)
    family = () if name in BUILDERS else (name, None)
    built: Supernet = getattr(import_module(module), function)(*family, **constructor)
    return built
