"""ProvedInputs: the forms of the inputs for which subnets were proved; a view warns once at another one.

A forward may take another path for one input alone, without a mask, or with an argument that no example
had. A form is the names of the tensors, their numbers of axes, and whether the batch is one input alone.
Calls with a key-value cache, and those of a compiler or a trace, are not looked at.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.comparison import is_cache
from subnetact.errors import UnprovedInputWarning
from subnetact.operators.base import template_of
from subnetact.supernet.load import callers_level

__all__ = ["ProvedInputs"]


class ProvedInputs:
    """The forms of inputs that were proved, by the names of the arguments of a `network`."""

    def __init__(self, network: nn.Module) -> None:
        self.names = list(inspect.signature(template_of(network).forward).parameters)
        self.forms: set[Any] = set()
        self.warned = False

    def add(self, x: Any) -> None:
        """Note that an input was proved."""
        args = () if isinstance(x, dict) else x if isinstance(x, tuple) else (x,)
        self.forms.add(self._form(args, x if isinstance(x, dict) else {}))

    def watch(self, view: nn.Module) -> None:
        """Let a new view look at the inputs that it is called with."""
        view.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, view: nn.Module, args: Any, kwargs: Any) -> None:
        if self.warned or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        form = self._form(args, kwargs)
        if form is None or form in self.forms or not form[0]:
            return
        self.warned = True
        shown = ", ".join(f"{name} with {axes} axes" for name, axes in form[0])
        alone = "one input alone" if form[1] else "several inputs at once"
        warnings.warn(
            f"a subnet of {type(view).__name__} is called with {shown}, for {alone}. No example had this "
            "form, for which a forward may take a path that was not proved. Run supernet.check(batch) once, "
            "or give insert_ such an example, too: example=[one, other]",
            UnprovedInputWarning,
            stacklevel=callers_level(),
        )

    def _form(self, args: Any, kwargs: Any) -> Any:
        """Return names and numbers of axes of tensors, and whether there is one input; None with a cache."""
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if any(is_cache(value) for value in named.values()):
            return None
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        alone = next((t.shape[0] == 1 for t in tensors.values() if t.dim()), False)
        return tuple(sorted((name, t.dim()) for name, t in tensors.items())), alone
