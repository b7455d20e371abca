"""Rebuilds the supernet that a bundle names, with constructor arguments.

The name is `digits`, or a family of `ofa_adapters`, whose `load` accepts only its own list of families. So a
file chooses among names that are listed in the code; it cannot name a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from subnetact.supernet.supernet import Supernet

__all__ = ["rebuild_supernet"]

BYTES_PER_WEIGHT_BYTE = 4
"""A network may take this many times the bytes of its weights while it is built, and `EXTRA_BYTES` more."""
EXTRA_BYTES = 2**24


def rebuild_supernet(name: str, constructor: Mapping[str, Any], size: int) -> Supernet:
    """Build a supernet with random weights; ValueError if it is much larger than weights of `size` bytes."""
    import ofa_adapters
    from subnetact.digits import new_digits_supernet

    build = new_digits_supernet if name == "digits" else partial(ofa_adapters.load, name, None)
    with _Limit(EXTRA_BYTES + BYTES_PER_WEIGHT_BYTE * size):
        return build(**constructor).eval()


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
