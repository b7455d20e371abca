"""InputShapes: the shapes that an engine serves; an input is padded to the smallest one that it fits in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from numbers import Real
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from subnetact.comparison import ROUNDED, equal
from subnetact.device import raise_if_explained
from subnetact.engine.inputs import Stager, check_input, parts_of, samples_of, shapes, unstack
from subnetact.errors import EngineError, InvalidRequest, SubnetActError
from subnetact.spec import SubnetSpec, grouped
from subnetact.supernet.batches import call_with, describe_input, map_tensors, tensors_of
from subnetact.supernet.check import check_once
from subnetact.supernet.failure import not_running
from subnetact.supernet.module_outputs import outputs_of
from subnetact.supernet.proof import in_double
from subnetact.supernet.sensitivity import other_inputs
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.unused_weights import shared_view
from subnetact.supernet.views import private_view

BATCH_FIRST = (
    "give a batch that the network takes, with the batch axis first: x[None] of one input x. If the network "
    "needs larger batches, leave out example=: the first batch then is the example"
)
Padding = float | Mapping[str | int, float] | None
Lengths = Sequence[Mapping[int, Sequence[tuple[int, int]]]]
"""For every tensor of an output: axis -> the tensors of the input, and their axes, that are as long."""


class InputShapes:
    """The shapes that an engine serves: `samples`, from the smallest to the largest; at first maybe none."""

    def __init__(
        self, supernet: Supernet, device: torch.device, given: Any, padding: Padding, lengths: Lengths
    ) -> None:
        self._supernet = supernet
        self._device = device
        self.stager = Stager(device)
        self.lengths = lengths
        self._several = isinstance(given, list)
        self.samples: list[Any] = given if self._several else [] if given is None else [given]
        self._generation, self._dtype = supernet.generation.number, _dtype_of(supernet)
        self._padding: dict[int, float] = {}  # by position; tensors that are missing are not padded
        if not self._several:
            if padding is not None:
                raise EngineError("padding: needs a list of examples, one per shape: example=[short, long]")
            return
        if not given:
            raise EngineError("example: an empty list; give one batch, or one per shape")
        if len({str(map_tensors(lambda t: (t.dtype, t.dim()), sample)) for sample in given}) > 1:
            raise EngineError(
                "example: the batches of a list differ in structure, dtype or number of axes; they may "
                "differ in their shapes only"
            )
        if len({str(shapes(sample)) for sample in given}) < len(given):
            raise EngineError("example: samples of two batches have the same shape; give one batch per shape")
        self.samples = sorted(given, key=lambda x: sum(t.numel() for t in tree_flatten(x)[0]))
        self._shapes = [[t.shape for t in tree_flatten(sample)[0]] for sample in self.samples]
        self._padding = _padding(self.samples[0], padding)

    @property
    def given(self) -> Any:
        """What makes the same shapes: a sample, a list of them, or None."""
        return self.samples if self._several else (self.samples or [None])[0]

    def note(self, x: Any) -> bool:
        """Take a batch that has run as the example, if there is none and it can be one; tell if it is."""
        if self.samples:
            return False
        with suppress(InvalidRequest):  # The network ran all the same: its inputs share no batch axis.
            self.samples = [samples_of(x)]
        return bool(self.samples)

    def follow(self) -> InputShapes:
        """Give the samples the dtype of the weights, if `supernet.to` has changed it since; return itself."""
        generation = self._supernet.generation.number
        if generation != self._generation:
            former, dtype = self._dtype, _dtype_of(self._supernet)
            self._generation, self._dtype = generation, dtype
            samples = map_tensors(lambda t: t.to(dtype) if t.dtype == former else t, tuple(self.samples))
            self.samples = list(samples)
        return self

    def index(self, x: Any) -> int:
        """Return the position of the smallest shape that an input fits in; 0 if there is only one."""
        if not self._several:
            return 0
        own = _leaves_like(x, self.samples[0])
        for position, wanted in enumerate(self._shapes):
            if self._fit(own, wanted):
                return position
        raise InvalidRequest(
            f"input: {shapes(x)} fits in none of the shapes that this engine serves, without a batch "
            f"dimension: {'; '.join(str(shapes(sample)) for sample in self.samples)}"
        )

    def check(self, x: Any, finite: bool = False) -> None:
        """Refuse an input that fits in no shape, or whose structure or dtypes differ from the samples'."""
        self.follow()
        check_input(x, None if self._several else self.given, self._device, finite)
        if self._several:
            check_input(self.padded([x])[0], self.samples[self.index(x)], self._device)

    def batch(self, inputs: Any, least: int = 0) -> tuple[Any, int]:
        """Return single inputs as a batch, padded to one shape, and its size, which is at `least` that."""
        if not isinstance(inputs, Sequence) or not len(inputs):
            raise InvalidRequest(f"inputs: expected a list of single inputs, got {describe_input(inputs)}")
        size = max(len(inputs), least)
        try:
            return self.stager.stack(self.padded(inputs), size), size
        except Exception as error:
            raise_if_explained(error, SubnetActError)
            for x in inputs:
                self.check(x)
            raise

    def padded(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return inputs in one shape, the smallest that all of them fit in."""
        if not self._several:
            return inputs
        first, owns = max(map(self.index, inputs)), [_leaves_like(x, self.samples[0]) for x in inputs]
        common = (wanted for wanted in self._shapes[first:] if all(self._fit(own, wanted) for own in owns))
        wanted = next(common, None)
        if wanted is None:
            raise InvalidRequest(
                "input: the inputs of this batch fit in no common shape; run inputs of one shape together"
                + ("" if self._padding else ", or give Engine(padding=...)")
            )
        structure = tree_flatten(self.samples[0])[1]
        return [tree_unflatten(list(map(self._pad, own, range(len(own)), wanted)), structure) for own in owns]

    def try_out(self, specs: Sequence[SubnetSpec], check: bool) -> None:
        """Run the smallest of some subnets on every sample, and find what outputs are cut to.

        If that is to be a `check`, refuse outputs that are no batches, and prove the supernet on the samples.
        """
        outputs, supernet, space = list[Any](), self._supernet, self._supernet.space
        for sample in self.samples if specs else ():
            batch = self.stager.stack([sample], 1)
            smallest = min(specs, key=lambda spec: sum(space.resolve(spec)))
            view, _ = private_view(supernet, smallest)
            try:
                with torch.inference_mode():
                    output = call_with(view, batch)
            except Exception as error:
                raise_if_explained(error)
                full = shared_view(supernet.network, space.resolve(space.largest()))
                what = f"one sample of it, {describe_input(sample)}"
                why, _ = not_running(view, error, batch, full, what, BATCH_FIRST)
                raise InvalidRequest(f"example: {smallest} {why}") from error
            with nullcontext() if check else suppress(EngineError):
                outputs += unstack(output, 1, 1)
            if check:
                check_once(supernet, batch)
        self._find_lengths(outputs)

    def _find_lengths(self, outputs: Sequence[Any]) -> None:
        """Note which axes of the outputs for all samples are as long as an axis of the samples."""
        sources: dict[Any, list[tuple[int, int]]] = grouped(
            (lengths, (position, axis))
            for position, sizes in enumerate(zip(*self._shapes, strict=True) if self._padding else ())
            for axis, lengths in enumerate(zip(*sizes, strict=True))
            if len(set(lengths)) > 1
        )
        tensors = zip(*(tree_flatten(output)[0] for output in outputs), strict=False)
        every = [zip(*(getattr(t, "shape", ()) for t in each), strict=False) for each in tensors]
        self.lengths = [{i: sources[n] for i, n in enumerate(sizes) if n in sources} for sizes in every]

    def split(self, inputs: Sequence[Any], size: int, output: Any) -> Sequence[Any]:
        """Return one output per input of a batch, as long as the input if that was padded."""
        outputs = unstack(output, len(inputs), size)
        return [*map(self._cut, outputs, inputs)] if any(self.lengths) else outputs

    def _cut(self, output: Any, x: Any) -> Any:
        own, (tensors, structure) = _leaves_like(x, self.samples[0]), tree_flatten(output)
        for i, axes in enumerate(self.lengths if len(tensors) == len(self.lengths) else ()):
            for axis, sources in axes.items():
                length, *others = {own[position].shape[of] for position, of in sources}
                if not others and length < tensors[i].shape[axis]:  # Other lengths: nothing tells which.
                    tensors[i] = tensors[i].narrow(axis, 0, length).clone()
        return tree_unflatten(tensors, structure)

    def require_harmless(self, specs: Sequence[SubnetSpec]) -> None:
        """Refuse padding that changes what the largest subnet computes of a short sample, in its own rows."""
        network, row = self._supernet.network, max(map(self._supernet.space.resolve, specs), key=sum)
        view = shared_view(network, row)
        x = self.stager.stack(self.samples[:1], 1)
        if not next(tensors_of(x)).any():  # Padding with zeros would change nothing.
            x = next(other_inputs(view, x), x)
        with suppress(InvalidRequest):  # No shape is longer on all axes.
            short, *_ = self.padded([map_tensors(lambda t: t[0], x), *self.samples[1:2]])
            inputs = [x, map_tensors(lambda t: t[None], short)]
            change = _change([outputs_of(view, batch) for batch in inputs])
            if change and (double := in_double(network, row, inputs)):  # There, no rounding is left.
                change = _change(double[2])
            if change:
                raise EngineError(
                    f"padding: it changes the answer to {shapes(self.samples[0])} by {change:.2g}; tell the "
                    "network of it (attention_mask in example= and, with 0, in padding=), serve exact shapes "
                    "(padding=None), or accept such answers (check=False)"
                )

    def _fit(self, own: Sequence[Any], wanted: Sequence[torch.Size]) -> bool:
        return len(own) == len(wanted) and all(
            isinstance(x, Tensor)
            and x.dim() == len(shape)
            and (x.shape == shape or (position in self._padding and all(map(le, x.shape, shape))))
            for position, (x, shape) in enumerate(zip(own, wanted, strict=True))
        )

    def _pad(self, x: Tensor, position: int, shape: torch.Size) -> Tensor:
        if x.shape == shape:
            return x
        missing = [most - size for size, most in zip(x.shape, shape, strict=True)]
        return F.pad(x, [n for size in reversed(missing) for n in (0, size)], value=self._padding[position])


def _change(outputs: Sequence[Sequence[Tensor]]) -> float:
    """Return how far two outputs differ, beyond rounding, where both have numbers."""
    change = 0.0
    for alone, padded in zip(*outputs, strict=False):
        common = tuple(map(slice, map(min, alone.shape, padded.shape)))
        if not equal(padded[common], alone[common], ROUNDED):
            change = max(float((padded[common].double() - alone[common].double()).abs().max()), change)
    return change


def _leaves_like(x: Any, sample: Any) -> list[Any]:
    """Return the tensors of an input in the order of a sample; too few if its structure differs."""
    if isinstance(sample, Tensor):
        return [x]
    if parts_of(x) != parts_of(sample):
        return []
    return [leaf for name in parts_of(sample) for leaf in _leaves_like(x[name], sample[name])]


def _dtype_of(supernet: Supernet) -> torch.dtype:
    return next((p.dtype for p in supernet.parameters() if p.is_floating_point()), torch.float32)


def _padding(sample: Any, given: Padding) -> dict[int, float]:
    """Return the value of every tensor that may be padded, by the position of the tensor."""
    if given is None:
        return {}
    tensors = {0: sample} if isinstance(sample, Tensor) else {name: sample[name] for name in parts_of(sample)}
    if not isinstance(given, Mapping):
        given = {0 if isinstance(sample, Tensor) else "": given}
    nested = not all(isinstance(part, Tensor) for part in tensors.values())
    if nested or not all(name in tensors and _holds(tensors[name], given[name]) for name in given):
        raise EngineError(
            f"padding: {given!r}; give a number for an input that is one tensor, or a dictionary from the "
            f"inputs {list(tensors)} to numbers that their dtypes can hold"
        )
    return {list(tensors).index(name): float(value) for name, value in given.items()}


def _holds(tensor: Tensor, value: Any) -> bool:
    """Tell whether a number can stand in a tensor: exactly among integers, up to rounding otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        return False
    with suppress(OverflowError, RuntimeError):
        held = torch.full((), float(value), dtype=tensor.dtype)
        return tensor.is_floating_point() or bool(held == value)
    return False
