"""Saver: what `save_pretrained` of a subnet does, whose class knows the sizes of the full network only."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from subnetact.files import late


class Saver:
    """Writes a subnet as a model of its own library, or refuses; it takes the place of `save_pretrained`.

    It holds the subnet weakly, so that nothing delays the end of the weights, and copies with it.
    """

    def __init__(self, subnet: nn.Module) -> None:
        self._subnet = weakref.ref(subnet)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write the subnet; the arguments are those of the library's own method."""
        return late.find("save_alone")(self._subnet(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Saver, (self._subnet(),)
