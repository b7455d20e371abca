"""Chain: whether every layer of a stack gets what the layer before it returned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from subnetact.operators.skipped_layer import first_name

__all__ = ["Chain"]


class Chain:
    """What the layers of a stack pass on, noted while a network runs once, until `close`."""

    def __init__(self, path: str, layers: Mapping[str, nn.Module | None]) -> None:
        self._path = path
        self._given: dict[str, Any] = {}
        self._returned: dict[str, Any] = {}
        self._handles = []
        for name, layer in layers.items():
            if layer is not None:
                note = partial(self._note, name, first_name(layer))
                self._handles.append(layer.register_forward_hook(note, with_kwargs=True))

    def _note(
        self, name: str, first: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._given[name] = args[0] if args else kwargs.get(first, next(iter(kwargs.values()), None))
        self._returned[name] = output

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def breaks(self) -> Iterator[tuple[set[str], str]]:
        """Yield the names of layers that no identity can stand for, each time with the reason."""
        path = self._path
        for name, output in self._returned.items():
            if not isinstance(output, Tensor):
                yield (
                    {name},
                    f"{path}.{name} returns a {type(output).__name__}, and the identity in the place of a "
                    "skipped layer returns a tensor",
                )
        for name, following in itertools.pairwise(self._returned):
            output, given = self._returned[name], self._given[following]
            tensors = isinstance(given, Tensor) and isinstance(output, Tensor)
            if not (tensors and given.data_ptr() == output.data_ptr()):
                yield (
                    {name, following},
                    f"the network changes the output of {path}.{name} before layer {following} gets it, and "
                    "would do so with the identity in the place of a skipped layer, too",
                )
