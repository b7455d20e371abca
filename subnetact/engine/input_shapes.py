"""InputShapes: the shapes that an engine serves; an input is padded to the smallest one that it fits in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subnetact.engine.inputs import check_input, detached_sample, shapes
from subnetact.errors import EngineError, InvalidRequest
from subnetact.supernet.batches import as_batch, describe_input, tensors_of

__all__ = ["InputShapes", "Padding"]

Padding = float | Mapping[str | int, float] | None


class InputShapes:
    """The shapes that an engine serves, from the smallest to the largest.

    Without padding, an input must have one of the shapes. With padding, an input may be smaller: each of its
    tensors is padded at the end of every axis. Padding changes what a network computes unless the network is
    told which entries are padding, for example by an attention mask. Send the mask as one of the inputs, and
    pad the mask with the value that hides an entry.

    `padding` is a number if an input is one tensor, otherwise a mapping from names (or positions) of inputs
    to numbers; an input that the mapping lacks is not padded.
    """

    def __init__(self, samples: Sequence[Any], padding: Padding = None) -> None:
        given = [detached_sample(sample) for sample in samples]
        if not given:
            raise EngineError("example: an empty list; give one batch, or one per shape")
        kinds = {tuple((t.dtype, t.dim()) for t in tensors_of(x)) for x in given}
        if len(kinds) > 1 or len({_structure(x) for x in given}) > 1:
            raise EngineError(
                "example: the batches of a list differ in structure, dtype or number of axes; they may "
                "differ in their shapes only"
            )
        if len({str(shapes(x)) for x in given}) < len(given):
            raise EngineError("example: samples of two batches have the same shape; give one batch per shape")
        self.samples = sorted(given, key=lambda x: sum(t.numel() for t in tensors_of(x)))
        self._shapes = [tuple(t.shape for t in tensors_of(x)) for x in self.samples]
        self.given = padding
        self.padding = _padding(self.samples[0], padding)

    def index(self, x: Any) -> int:
        """Return the position of the smallest shape that an input fits in."""
        own = [part.shape if isinstance(part, Tensor) else None for part in tensors_of(as_batch(x))]
        for index in range(len(self._shapes)):
            if self._fit(own, index):
                return index
        served = "; ".join(str(shapes(sample)) for sample in self.samples)
        got = shapes(x) if all(isinstance(part, Tensor) for part in tensors_of(x)) else describe_input(x)
        raise InvalidRequest(
            f"input: {got} fits in none of the shapes that this engine serves, without a batch dimension: "
            f"{served}"
        )

    def _fit(self, own: Sequence[Any], index: int) -> bool:
        wanted = self._shapes[index]
        return len(own) == len(wanted) and all(map(self._fits, range(len(own)), own, wanted))

    def _fits(self, position: int, own: Any, wanted: torch.Size) -> bool:
        if own is None or len(own) != len(wanted) or position not in self.padding:
            return own is not None and own == wanted
        return all(size <= most for size, most in zip(own, wanted, strict=True))

    def check(self, x: Any, device: torch.device, finite: bool = False) -> None:
        """Refuse an input that fits in no shape, or whose structure or dtypes differ from the examples'."""
        check_input(x, None, device, finite)
        check_input(self.padded([x])[0], self.samples[self.index(x)], device)

    def padded(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs in one shape, the smallest that all of them fit in."""
        first = max(map(self.index, inputs))
        owns = [[part.shape for part in tensors_of(as_batch(x))] for x in inputs]
        common = (i for i in range(first, len(self.samples)) if all(self._fit(own, i) for own in owns))
        chosen = next(common, None)
        if chosen is None:
            raise InvalidRequest(
                "input: the inputs of this batch fit in no common shape; run inputs of one shape together"
                + ("" if self.padding else ", or give Engine(padding=...)")
            )
        sample = self.samples[chosen]
        return [self._pad(as_batch(x), sample, iter(range(len(self._shapes[0])))) for x in inputs]

    def _pad(self, x: Any, sample: Any, positions: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self._pad(a, b, positions) for a, b in zip(x, sample, strict=True))
        if isinstance(x, dict):
            return {name: self._pad(part, sample[name], positions) for name, part in x.items()}
        position = next(positions)
        if x.shape == sample.shape:
            return x
        missing = [most - size for size, most in zip(x.shape, sample.shape, strict=True)]
        return F.pad(x, [n for size in reversed(missing) for n in (0, size)], value=self.padding[position])


def _structure(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_structure, x))
    return tuple((name, _structure(part)) for name, part in x.items()) if isinstance(x, dict) else None


def _padding(sample: Any, given: Padding) -> dict[int, float]:
    """Return the value of every tensor that may be padded, by the position of the tensor."""
    if given is None:
        return {}
    names = list(sample) if isinstance(sample, dict) else list(range(sum(1 for _ in tensors_of(sample))))
    if not isinstance(given, Mapping):
        given = {names[0]: given} if isinstance(sample, Tensor) else {"": given}
    wrong = [name for name in given if name not in names]
    tensors = dict(zip(names, tensors_of(sample), strict=False))
    bad = [v for name, v in given.items() if name in tensors and not _holds(tensors[name], v)]
    if wrong or bad or sum(1 for _ in tensors_of(sample)) != len(names):
        raise EngineError(
            f"padding: {given!r}; give a number for an input that is one tensor, or a dictionary from the "
            f"inputs {names} to numbers that their dtypes can hold"
        )
    return {names.index(name): float(value) for name, value in given.items()}


def _holds(tensor: Tensor, value: Any) -> bool:
    """Tell whether a number can stand in a tensor: exactly among integers, up to rounding otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        held = torch.tensor(float(value)).to(tensor.dtype) if float(value) == value else None
    except (OverflowError, RuntimeError):
        return False
    if held is None or tensor.is_floating_point():
        return held is not None and (math.isinf(value) or bool(held.isfinite()))
    return bool(held == value)
