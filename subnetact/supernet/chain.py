"""Chain: whether every layer of a stack gets what the layer before it returned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from subnetact.operators.skipped_layer import first_name


class Chain:
    """What the layers of a stack pass on, noted while a network runs once, which nobody else uses."""

    def __init__(self, path: str, layers: Mapping[str, nn.Module | None]) -> None:
        self._path = path
        self._kinds: dict[str, type] = {}
        self._last: dict[str, Any] = {}
        self._passed_on: dict[str, bool] = {}
        for name, layer in layers.items():
            if layer is not None:
                layer.register_forward_hook(partial(self._note, name, first_name(layer)), with_kwargs=True)

    def _note(
        self, name: str, first: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._kinds[name] = type(output)
        before = next((one for one, other in itertools.pairwise(self._kinds) if other == name), None)
        given = args[0] if args else kwargs.get(first, next(iter(kwargs.values()), None))
        passed = self._last.pop(before or "", None)
        pointers = [t.data_ptr() for t in (given, passed) if isinstance(t, Tensor)]
        self._passed_on[name] = before is None or (len(pointers) == 2 and pointers[0] == pointers[1])
        self._last[name] = output

    def breaks(self) -> Iterator[tuple[set[str], str]]:
        """Yield the names of layers that no identity can stand for, each time with the reason."""
        path = self._path
        for name, kind in self._kinds.items():
            if not issubclass(kind, Tensor):
                yield (
                    {name},
                    f"{path}.{name} returns a {kind.__name__}, and the identity in the place of a "
                    "skipped layer returns a tensor",
                )
        for name, following in itertools.pairwise(self._kinds):
            if not self._passed_on[following]:
                yield (
                    {name, following},
                    f"the network changes the output of {path}.{name} before layer {following} gets it, and "
                    "would do so with the identity in the place of a skipped layer, too",
                )
