"""Generation: the one answer to whether the weights of a supernet have changed.

Whatever outlives a change of the weights asks it: views, packed copies and fused programs, calibrations,
bundles and exports that are being written, generators and key-value caches. Two things move it:

- Weights are exchanged or replaced (`load_state_dict`, `refresh`, a new parameter): views and copies have to
  be made again, which `number` tells, and the weights are other ones, which a `Moment` tells.
- Weights are changed in place: zero-copy views stay as they are, a `Moment` is another one, and copies find
  out from the version counters of what they were made of.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Generation", "Moment", "Weights", "is_counter", "weights_of"]

_numbers = itertools.count(1)
_version = attrgetter("_version")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Moment(NamedTuple):
    """The weights that somebody reads, at one moment. Equal moments have equal weights.

    Attributes:
        owner: tells supernets apart.
        weights: tells apart what was loaded into a supernet.
        changes: how often these weights were changed in place.
        statistics: how often the shared BatchNorm statistics were changed in place, by training for example.
    """

    owner: str
    weights: str
    changes: int
    statistics: int

    def same_weights(self, other: Moment) -> bool:
        """Tell whether the weights are equal, whatever became of the shared BatchNorm statistics."""
        return self[:3] == other[:3]


class Weights:
    """The weights of a supernet from one exchange to the next one. Every view has the one that it reads.

    Args:
        tensors: the weights, and then the shared BatchNorm statistics.
        moment: their present moment.
        carried: whether copies and pickles take the tensors along: those of a network of its own do.
    """

    def __init__(
        self, tensors: tuple[list[Tensor], list[Tensor]], moment: Moment, carried: bool = False
    ) -> None:
        # Tensors that were made in inference mode count no changes.
        self._tensors = tuple([t for t in part if not t.is_inference()] for part in tensors)
        self._carried = carried
        self._start = moment._replace(
            changes=moment.changes - sum(map(_version, self._tensors[0])),
            statistics=moment.statistics - sum(map(_version, self._tensors[1])),
        )
        self._last: Moment | None = None

    def moment(self) -> Moment:
        """Return the present moment of these weights; the last one if the supernet has others now."""
        if self._last is not None:
            return self._last
        owner, weights, changes, statistics = self._start
        own, norms = self._tensors
        changes, statistics = changes + sum(map(_version, own)), statistics + sum(map(_version, norms))
        return Moment(owner, weights, changes, statistics)

    def close(self) -> None:
        """Note that the supernet moves on to other weights; views that read these ones may still run."""
        self._last = self.moment()

    def note_change(self) -> None:
        """Note that these closed weights were changed beneath the views that still read them."""
        last = self.moment()
        self._last = last._replace(changes=last.changes + 1)

    def of_copy(self, network: nn.Module) -> Weights:
        """Return the weights of a network that was extracted just now.

        Args:
            network: the network, with its own copy of the weights.
        """
        return Weights(weights_of(network), self.moment(), carried=True)

    def __reduce__(self) -> tuple[Any, ...]:
        tensors: Any = self._tensors if self._carried else ([], [])
        return Weights, (tensors, self.moment(), self._carried)


class Generation:
    """Tells whether the weights of a supernet have changed.

    Args:
        network: the network with operators.

    Attributes:
        number: another one whenever views have to be taken again. It grows, and no two supernets of a process
            have the same one.
        weights: what views read that are bound now.
    """

    def __init__(self, network: nn.Module) -> None:
        self.number = next(_numbers)
        first = Moment(secrets.token_hex(8), secrets.token_hex(8), 0, 0)
        self.weights = Weights(weights_of(network), first)

    def moment(self) -> Moment:
        """Return the moment of the present weights. It takes about 40 ns per parameter."""
        return self.weights.moment()

    def next(self, network: nn.Module, same: bool = False, beneath: bool = False) -> None:
        """Move on: views have to be taken again.

        Args:
            network: the network, as it is now.
            same: whether the weights have the same values as before, in other places for example.
            beneath: whether the tensors that former views read may have changed as well.
        """
        former = self.weights
        former.close()
        moment = former.moment()
        if not same:
            moment = Moment(moment.owner, secrets.token_hex(8), 0, 0)
        if beneath:
            former.note_change()
        self.weights = Weights(weights_of(network), moment)
        self.number = next(_numbers)


def weights_of(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a network, and the shared BatchNorm statistics, which training changes.

    Buffers are weights, too, apart from those with one integer, which networks count something with.

    Args:
        network: any network.
    """
    weights: dict[int, Tensor] = {id(parameter): parameter for parameter in network.parameters()}
    statistics: dict[int, Tensor] = {}
    for name, buffer in _buffers(network):
        if name.startswith(_STATISTICS):
            statistics[id(buffer)] = buffer
        elif not is_counter(buffer):
            weights[id(buffer)] = buffer
    return list(weights.values()), list(statistics.values())


def is_counter(buffer: Tensor) -> bool:
    """Tell whether a buffer is one integer, which networks count something with."""
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.numel() > 1)


def _buffers(network: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield name, buffer
