"""`Runner`: what a batcher runs batches with, and the checks that one fits the table and the policy."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from subnetact.errors import PolicyError, ProfileMismatch
from subnetact.latency.origin import require_measured_on, require_program
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count
from subnetact.serving.scheduling.context import Policy


class Runner(Protocol):
    """What the batcher needs of an engine. `Engine` and `ExportedEngine` are runners.

    `check` is called by the thread that submits a request, `run` by the worker threads. A runner may have
    two more members: `fingerprint`, which must equal the fingerprint in the table's stamp, and
    `enter_worker(threads)`, which is called once in every worker thread and which `threads_per_worker` needs.
    """

    @property
    def keys(self) -> Sequence[str]:
        """The key of every subnet, in the order of the subnet ids."""
        ...

    def check(self, x: Any) -> None:
        """Refuse one input that cannot run, before it is queued.

        If the batcher was opened with `check_finite=True`, the call is `check(x, finite=True)`.

        Args:
            x: one input, without a batch dimension.

        Raises:
            InvalidRequest: The input cannot run.
        """
        ...

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        """Run one batch.

        Args:
            subnet: id of the subnet.
            inputs: the inputs of the batch, each without a batch dimension.
            batch_size: the planned batch size, at least `len(inputs)`. A runner that is compiled for fixed
                batch sizes pads to it.

        Returns:
            One output per input, in the same order.
        """
        ...


def runner_per_worker(engine: Any, workers: int) -> list[Runner]:
    """Return one runner per worker for what a user gave as the engine."""
    check_count(workers, "workers")
    if isinstance(engine, str | os.PathLike):
        from subnetact.engine.engine import Engine  # It imports torch.

        engine = Engine.load(engine)
    if isinstance(engine, (list, tuple)):
        if not engine:
            raise PolicyError("engine: an empty list; give one engine, or one per device")
        if workers not in (1, len(engine)):
            raise PolicyError(f"workers: {workers} for {len(engine)} engines; each engine is one worker")
        return list(engine)
    return [engine] * workers


def check_runner(engine: Any, tables: Sequence[LatencyTable], threads: int | None, finite: bool) -> None:
    """Refuse a runner that cannot do what a batcher needs of it."""
    if not callable(getattr(engine, "run", None)) or not hasattr(engine, "keys"):
        raise PolicyError(
            f"engine: {type(engine).__name__} has no run(...) and keys; give Engine(supernet, specs), an "
            "ExportedEngine, or a class of your own, see help(subnetact.serving.Runner)"
        )
    for table in tables:
        own = getattr(engine, "fingerprint", table.stamp.get("supernet"))
        require_measured_on(table, engine.keys, own)
        if program := getattr(engine, "program", ""):
            require_program(table, program, "measure what runs: profile_latency(engine), with this engine")
    if threads is not None and not callable(getattr(engine, "enter_worker", None)):
        raise PolicyError(
            f"threads_per_worker: {type(engine).__name__} has no method enter_worker(threads); add it, or "
            "leave threads_per_worker out"
        )
    if finite:
        try:
            inspect.signature(engine.check).bind(None, finite=True)
        except TypeError as error:
            raise PolicyError(
                f"check_finite: {type(engine).__name__}.check(x) takes no `finite`; add it, or leave "
                "check_finite out"
            ) from error
    served = len(getattr(engine, "samples", [None])) if hasattr(engine, "shape_of") else 1
    if len(tables) > 1 and len(tables) != served:
        raise ProfileMismatch(
            f"table: {len(tables)} tables, but the engine serves {served} input shapes; give one table, or "
            "one per shape: profile_latency(engine, shape=i)"
        )


def check_start(policy: Policy, engine: Any, in_processes: bool) -> None:
    """Refuse a policy that interrupts batches if the runner cannot `start` them, or processes run them."""
    if not hasattr(policy, "preempt"):
        return
    name = type(policy).__name__
    if in_processes:
        raise PolicyError(
            f"policy: {name} interrupts batches between two blocks, which worker processes run as a whole; "
            "use threads (process=False), or a policy that does not preempt"
        )
    if not callable(getattr(engine, "start", None)):
        raise PolicyError(
            f"policy: {name} interrupts batches between two blocks, and {type(engine).__name__} has no "
            "start(subnet, inputs, batch_size); serve an Engine, or use a policy that does not preempt"
        )


def open_processes(
    engines: Sequence[Any], stack: ExitStack, threads: int | None, batch_sizes: Sequence[int], spares: int
) -> list[Any]:
    """Open one pool per distinct engine, which `stack` closes, and return one runner per worker."""
    from subnetact.workers.pool import ProcessPool  # It imports torch, which threads do not need.

    runners: list[Any] = []
    for engine in {id(engine): engine for engine in engines}.values():
        count = sum(one is engine for one in engines)
        pool = ProcessPool(engine, count, threads=threads, batch_sizes=batch_sizes, spares=spares)
        stack.callback(pool.close)
        runners += pool.runners
    return runners
