"""A central queue: one batcher, each of whose workers sends its batches to an idle replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from subnetact.cluster.arrays import to_arrays, to_tensors
from subnetact.engine.engine import Engine

__all__ = ["RemoteRunner", "ReplicaLost"]


class ReplicaLost(BaseException):
    """The replica died with a batch. Not an `Exception`, so that the batcher retries every request once."""


class RemoteRunner:
    """A runner whose batches run on some idle replica.

    Args:
        engine: the same engine as the replicas', which checks inputs.
        run: sends a batch to a replica and waits for its outputs, with the arguments of `EngineReplica.run`.
        died: the exceptions that say that the replica is lost.
    """

    def __init__(
        self, engine: Engine, run: Callable[..., Sequence[Any]], died: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._engine = engine
        self._run = run
        self._died = died
        self.fingerprint = engine.fingerprint
        self.sample = engine.sample

    @property
    def keys(self) -> Sequence[str]:
        """The key of every subnet, in the order of the subnet ids."""
        return self._engine.keys

    def check(self, x: Any, finite: bool = False) -> None:
        """Refuse one input that cannot run, as `Engine.check` does.

        Args:
            x: one input, without a batch dimension.
            finite: whether values must be finite.
        """
        self._engine.check(x, finite=finite)

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Run one batch on an idle replica.

        Args:
            subnet: id of the subnet.
            inputs: the inputs of the batch.
            batch_size: the planned batch size.

        Raises:
            ReplicaLost: the replica died.
        """
        try:
            return [to_tensors(y) for y in self._run(subnet, [to_arrays(x) for x in inputs], batch_size)]
        except self._died as error:
            raise ReplicaLost(f"the replica died ({type(error).__name__})") from None
