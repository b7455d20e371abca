"""ProvedInputs: the forms of the inputs for which subnets were proved; a view warns once at another one.

A forward may take another path for one input alone, without a mask, or with an argument that no example
had. A form is the names of the tensors, their numbers of axes, and whether the batch is one input alone.
Calls with a key-value cache, and those of a compiler or a trace, are not looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.comparison import is_cache
from subnetact.errors import UnprovedInputWarning
from subnetact.operators.base import template_of
from subnetact.supernet.load import warn_caller

MOST_UNNAMED = 20
"""So many arguments without a name are told apart."""


class ProvedInputs:
    """The forms of inputs that were proved, by the names of the arguments of a `network`."""

    def __init__(self, network: nn.Module) -> None:
        names = inspect.signature(template_of(network).forward).parameters
        self.names = [*names, *map(str, range(1, MOST_UNNAMED))]  # of `*args`, too
        self.forms: set[Hashable] = set()
        self.state: list[str] = []  # the buffers that the forward wrote
        self.memos: list[tuple[str, str]] = []  # the dictionaries in which it kept tensors: path, attribute
        self.warned = False

    def form(self, x: Any) -> tuple[Any, bool]:
        """Return the names and numbers of axes of the tensors of a batch, and whether it is one input."""
        args = x if isinstance(x, tuple) else (x,)
        named = x if isinstance(x, dict) else dict(zip(self.names, args, strict=False))
        tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
        alone = next((len(t) == 1 for t in tensors.values() if t.dim()), False)
        return tuple(sorted((name, t.dim()) for name, t in tensors.items())), alone

    def look(self, view: nn.Module, args: Any, kwargs: Any) -> None:
        """Warn once if a view, whose forward pre-hook this is, is called with a form that was not proved."""
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if self.warned or traced or any(map(is_cache, named.values())):
            return
        form = tensors, alone = self.form(named)
        if tensors and form not in self.forms:
            self.warned = True
            shown = ", ".join(f"{name} with {axes} axes" for name, axes in tensors)
            warn_caller(
                f"a subnet of {type(view).__name__} is called with {shown}, for "
                f"{'one input alone' if alone else 'several inputs at once'}. No example had this form, for "
                "which a forward may take a path that was not proved. Run supernet.check(batch) once, or "
                "give insert_ such an example, too: example=[one, other]",
                UnprovedInputWarning,
            )
