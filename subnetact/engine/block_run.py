"""BlockRun: a batch that runs block by block; and the blocks of an engine's subnets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx

from subnetact.engine.blocks import Block, split_graph, stacks_of
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.outputs import unstack
from subnetact.engine.ready_subnet import Bound
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.trace import trace_

__all__ = ["BlockRun", "SubnetBlocks"]


class SubnetBlocks:
    """The blocks of views and fused programs, made once for each; `bind` makes a private view."""

    def __init__(self, supernet: Supernet, bind: Callable[[SubnetSpec], Bound]) -> None:
        self._bind = bind
        self._stacks = stacks_of(supernet.network)
        self._of_program: weakref.WeakKeyDictionary[FusedProgram, list[Block]] = weakref.WeakKeyDictionary()
        self._of_view: dict[SubnetSpec, tuple[Bound, list[Block], Any]] = {}
        self._lock = Lock()

    def of_program(self, program: FusedProgram) -> list[Block]:
        """Return the blocks of a fused program; they run its own packed convolutions."""
        with self._lock:
            found = self._of_program.get(program)
            if found is None:
                module: Any = program.module
                if not isinstance(module, fx.GraphModule):  # what cannot be traced runs as one block
                    return self._of_program.setdefault(program, [Block("", module)])
                modules = dict(module.named_modules()) | dict(module.named_buffers())
                modules |= dict(module.named_parameters())
                found = split_graph(module.graph, modules, self._stacks, program.paths)
                self._of_program[program] = found
            return found

    def of_view(self, spec: SubnetSpec) -> tuple[Bound, list[Block]]:
        """Return a private view of a subnet and its blocks; a single block if it cannot be traced."""
        with self._lock:
            known = self._of_view.get(spec)
            if known is not None and known[0].current and known[0].moment() == known[2]:
                return known[:2]
            bound = self._bind(spec)
            moment = bound.moment()  # A graph holds the packed copies that it reads itself.
            tensors: dict[str, Tensor] = {}
            try:
                graph, leaves = trace_(bound.view, tensors=tensors)
                blocks = split_graph(graph, {**leaves, **tensors}, self._stacks)
            except Exception:  # what cannot be traced runs as one block
                blocks = [Block("", bound.view)]
            self._of_view[spec] = bound, blocks, moment
            return bound, blocks

    def drop(self, spec: SubnetSpec) -> None:
        """Forget the blocks of a subnet."""
        with self._lock:
            self._of_view.pop(spec, None)


class BlockRun:
    """A batch on its way through the blocks of a subnet. `Engine.start` returns one.

    Nothing that the run needs is shared, so other batches may run between two steps, on any thread. Of a
    batch of `size` samples, `count` are inputs. `position` is how many blocks have run.
    """

    def __init__(
        self, subnet: int, batch: Any, count: int, size: int, blocks: Sequence[Callable[[Any], Any]]
    ) -> None:
        self.subnet = subnet
        self.position = 0
        self._state = batch
        self._count = count
        self._size = size
        self._calls = list(blocks)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._calls)

    @property
    def done(self) -> bool:
        """Whether all blocks have run."""
        return self.position >= len(self._calls)

    def step(self, blocks: int = 1, go_on: Callable[[float], bool] | None = None) -> bool:
        """Run the next blocks.

        Args:
            blocks: how many.
            go_on: asked afterwards with the share of all blocks that have run; as long as it agrees, as many
                blocks follow.

        Returns:
            Whether all blocks have run.
        """
        calls = self._calls
        with torch.inference_mode():
            while self.position < len(calls):
                for call in calls[self.position : self.position + blocks]:
                    self._state = call(self._state)
                    self.position += 1
                if go_on is None or not go_on(self.position / len(calls)):
                    break
        return self.done

    def outputs(self) -> Sequence[Any]:
        """Return one output per input, on the CPU, as `Engine.run` does; all blocks must have run."""
        return unstack(self._state, self._count, self._size)
