"""Generation: the one answer to whether the weights of a supernet have changed.

- Weights are exchanged or replaced (`load_state_dict`, `refresh`, a new parameter): views and copies have to
  be made again, which `number` tells, and the weights are other ones, which a `Moment` tells. `to` only moves
  the same weights.
- Weights are changed in place: zero-copy views stay as they are, a `Moment` is another one, and copies find
  out from the version counters of what they were made of.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from subnetact.errors import StaleWeights
from subnetact.files.fork import hear_of_forks, new_lock
from subnetact.operators.tensor_version import changes_of, counting
from subnetact.supernet.bind import operators_in
from subnetact.supernet.replacements import Replacements, substituted
from subnetact.supernet.views import Views

_numbers = itertools.count(1)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Moment(NamedTuple):
    """Which weights somebody reads, and how often they and the shared statistics had changed in place."""

    owner: str  # tells supernets apart
    weights: str  # what was loaded
    changes: int
    statistics: int

    def same_weights(self, other: Moment) -> bool:
        """Tell whether the weights are equal, whatever became of the shared BatchNorm statistics."""
        return self[:3] == other[:3]


class Weights:
    """The weights of a supernet until they are exchanged; copies and pickles take them if `carried`."""

    def __init__(
        self, tensors: tuple[list[Tensor], list[Tensor]], moment: Moment, carried: bool = False
    ) -> None:
        self._tensors = tuple(map(counting, tensors))
        self._carried = carried
        own, norms = map(changes_of, self._tensors)
        self._start = moment._replace(changes=moment.changes - own, statistics=moment.statistics - norms)
        self.last: Moment | None = None  # if the supernet moves on to others, or has done so

    def moment(self) -> Moment:
        """Return the present moment of these weights; the last one if the supernet has others now."""
        if self.last is not None:
            return self.last
        owner, weights, changes, statistics = self._start
        own, norms = self._tensors
        changes, statistics = changes + changes_of(own), statistics + changes_of(norms)
        return Moment(owner, weights, changes, statistics)

    def close(self, changed: bool = False) -> None:
        """Note that the supernet moves on; views may still read these weights, maybe `changed` in place."""
        last = self.moment()
        self.last = last._replace(changes=last.changes + changed)

    def of_copy(self, network: nn.Module, state: Collection[str]) -> Weights:
        """Return the weights of a network that was extracted just now, with the names of its state."""
        return Weights(weights_of(network, state), self.moment(), carried=True)

    def __reduce__(self) -> tuple[Any, ...]:
        tensors: Any = self._tensors if self._carried else ([], [])
        return Weights, (tensors, self.moment(), self._carried)


class Witness(NamedTuple):
    """Stands behind the tensors in the state of a supernet that is copied; copies get None for it."""

    generation: Generation
    number: int
    moment: Moment

    def require(self) -> None:
        """Refuse copies of weights that have changed since."""
        with self.generation.lock:
            if (self.generation.number, self.generation.moment()) != self[1:]:
                raise StaleWeights(
                    "the weights were changed while they were copied, so the copies belong to no moment; "
                    "save and export between two steps of the training"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        self.require()
        return type(None), ()


class _HalfExchanged(nullcontext[None]):
    """Stands for the lock of weights of which nobody will exchange the other part."""

    def __enter__(self) -> None:
        raise StaleWeights(
            "this process was forked while another thread loaded weights, of which it has only a part; "
            "load the model in this process, or fork when no other thread does so"
        )

    def _is_owned(self) -> bool:
        return True  # A process that is forked of this one has no more of the weights.


class Generation:
    """Tells whether weights have changed, by a `number` that grows, and drops views of exchanged ones."""

    def __init__(self, supernet: Any, views: Views, original: bool = False) -> None:
        self.number = next(_numbers)
        first = Moment(secrets.token_hex(8), secrets.token_hex(8), 0, 0)
        self.weights = Weights(weights_of(supernet.network, supernet.state), first)
        self.lock = new_lock(threading.RLock)
        hear_of_forks(self)
        self._supernet = weakref.ref(supernet)  # A cycle would delay the end of the weights.
        self._views = views
        self._replacements = Replacements()
        self._watch()
        self._original = self.moment() if original else None

    def _watch(self) -> None:
        self._replacements.note(self._present(), self._supernet())
        self._noticed = self._replacements.writes

    def moment(self) -> Moment:
        """Return the moment of the present weights. It takes about 40 ns per parameter."""
        return self.weights.moment()

    @property
    def is_original(self) -> bool:
        """Whether the largest subnet is the trained network that `insert_` was given, unchanged since.

        Networks of families were trained as supernets, so none of their subnets is.
        """
        supernet: Any = self._supernet()
        return supernet.origin is None and self._original is not None and self._original == self.moment()

    def note_original(self) -> None:
        """Declare that a change of the weights left the function of the largest subnet as it was."""
        self._original = self.moment()

    def look(self) -> None:
        """Let the next call look whether modules or tensors were replaced, or moved to other storage."""
        self._noticed = -1

    def notice_replacements(self) -> bool:
        """Move on if modules or tensors were replaced; True while `functional_call` puts its own there."""
        noted = self._replacements
        if noted.writes == self._noticed and not (noted.adapters and noted.switched()):
            return False
        with self.lock:
            writes, network = self._replacements.writes, self._present()
            if self._replacements.replaced(network):
                if substituted(network):
                    return True  # The next call looks again.
                self.move()
            self._noticed = writes
        return False

    def notice_adapters(self) -> None:
        """Let adapters that were added since follow the sizes of their layers, if there are any."""
        if self._replacements.adapters:
            self.notice_replacements()

    @contextmanager
    def own_weights(self) -> Iterator[None]:
        """Refuse that something lasting is taken while `functional_call` puts tensors for the parameters."""
        foreign = self.notice_replacements()
        writes, number = self._replacements.writes, self.number
        if not foreign:
            yield
            foreign = self.notice_replacements()
        # An exchange of the weights writes as well; who takes something sees it by the number.
        if foreign or (self._replacements.writes != writes and self.number == number):
            raise StaleWeights(
                "torch.func.functional_call runs on the supernet, and its tensors stand for the parameters; "
                "make engines and bundles before or after it, or let it have a copy.deepcopy(supernet)"
            )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context in which weights and statistics are copied: all copies are of one moment."""
        with self.lock, self.own_weights():
            witness = self.witness()
            yield
            witness.require()

    def witness(self) -> Witness:
        """Return what tells, and pickle at its place asks, whether the weights are those of now."""
        with self.lock:
            return Witness(self, self.number, self.moment())

    def begin_exchange(self) -> None:
        """Close the weights, and drop copies of them, which must not follow half an exchange; then `move`."""
        self.weights.close()
        self.drop_copies()

    def move(self, same: bool = False, in_place: bool = False) -> None:
        """Let views be taken again: of the `same` weights in other places, or of others, also `in_place`."""
        with self.lock, self._views.lock:
            former = self.weights
            former.close(changed=in_place)
            moment = former.moment()
            if not same:
                moment = Moment(moment.owner, secrets.token_hex(8), 0, 0)
            state = self._supernet().state  # type: ignore[union-attr]
            self.weights = Weights(weights_of(self._present(), state), moment)
            self.number = next(_numbers)
            self._views.clear()
            self.drop_copies()
            self._watch()

    def note_fork(self) -> None:
        """Refuse weights of which a thread that did not come along had exchanged a part."""
        if self.weights.last is not None and not self.lock._is_owned():
            self.lock, self.number = _HalfExchanged(), next(_numbers)
            self._views.clear()

    def end(self) -> None:
        """Watch the network no longer."""
        self._replacements.release()

    def _present(self) -> nn.Module:
        supernet: Any = self._supernet()
        return supernet.network  # type: ignore[no-any-return]

    def drop_copies(self) -> None:
        """Drop what operators copied from the weights."""
        for operator in operators_in(self._present()):
            operator.forget()


def weights_of(network: nn.Module, state: Collection[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a network and the BatchNorm statistics; counters and the `state` are neither."""
    weights, statistics = list[Tensor](network.parameters()), list[Tensor]()
    for path, buffer in network.named_buffers():
        if path.rpartition(".")[2].startswith(_STATISTICS):
            statistics.append(buffer)
        elif not (path in state or is_counter(buffer)):
            weights.append(buffer)
    return weights, statistics


def is_counter(buffer: Tensor) -> bool:
    """Tell whether a buffer is one integer, which networks count something with."""
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.numel() > 1)
