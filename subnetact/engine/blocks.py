"""Layer blocks: a subnet as parts that run one after the other, so that other work can come between.

The graph of the view or program is cut in front of every layer of an elastic stack (`LayerSelect`), or of a
numbered container, where the fewest values are handed over. The outputs are those of the whole, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from subnetact.device import tolerated
from subnetact.engine.fused_program import FusedProgram
from subnetact.engine.graph_function import graph_function
from subnetact.engine.ready_subnet import Bound
from subnetact.files.fork import new_lock
from subnetact.operators import LayerSelect
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet
from subnetact.supernet.trace import trace_

Block = Callable[[Any], Any]
"""Maps the batch, or what the block before returned, to what the next block takes or the output."""


class BlockRun:
    """A batch on its way through the blocks of a subnet; it shares nothing with other runs."""

    def __init__(self, batch: Any, blocks: Sequence[Block], split: Callable[[Any], Sequence[Any]]) -> None:
        self.blocks = len(blocks)
        self.position = 0  # how many of them have run
        self._state = batch
        self._calls = blocks
        self._split = split

    def step(self, blocks: int = 1) -> bool:
        """Run the next blocks; return whether all have run."""
        with torch.inference_mode():
            for call in self._calls[self.position : self.position + blocks]:
                self._state = call(self._state)
                self.position += 1
        return self.position >= self.blocks

    def outputs(self) -> Sequence[Any]:
        """Return one output per input, on the CPU, as `Engine.run` does; all blocks must have run."""
        return self._split(self._state)


class SubnetBlocks:
    """The blocks of views and fused programs, made once for each; `bind` makes a private view."""

    def __init__(self, supernet: Supernet, bind: Callable[[SubnetSpec], Bound]) -> None:
        self._bind = bind
        modules = supernet.network.named_modules()
        self._stacks = tuple(path for path, module in modules if isinstance(module, LayerSelect))
        self._of_view: dict[SubnetSpec, tuple[Bound, list[Block], Any]] = {}
        self._lock = new_lock()

    def of_program(self, program: FusedProgram) -> list[Block]:
        """Return the blocks of a fused program; they run its own packed convolutions."""
        with self._lock:
            if program.blocks is None:
                program.blocks = [program.forward]  # what cannot be traced runs as one block
                if program.graph is not None:
                    program.blocks = _split(program.graph, program.values, self._stacks, program.paths)
            return program.blocks

    def of_view(self, spec: SubnetSpec) -> tuple[Bound, list[Block]]:
        """Return a private view of a subnet and its blocks; a single block if it cannot be traced."""
        with self._lock:
            known = self._of_view.get(spec)
            if known is not None and known[0].current and known[0].moment() == known[2]:
                return known[:2]
            bound = self._bind(spec)
            moment = bound.moment()  # A graph holds the packed copies that it reads itself.
            blocks: list[Block] = [bound.view]
            with tolerated():  # What cannot be traced runs as one block.
                graph, values = trace_(bound.view)
                blocks = _split(graph, values, self._stacks, {})
            self._of_view[spec] = bound, blocks, moment
            return bound, blocks

    def drop(self, spec: SubnetSpec) -> None:
        """Forget the blocks of a subnet."""
        with self._lock:
            self._of_view.pop(spec, None)


def _split(
    graph: fx.Graph, values: Mapping[str, Any], stacks: Sequence[str], paths: Mapping[str, str]
) -> list[Block]:
    """Cut a graph of one input into blocks; without `stacks`, numbered containers are the layers."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    (end,) = (n for n in graph.nodes if n.op == "output")
    place = {node: i for i, node in enumerate(nodes)}
    last_use = {n: max((place.get(user, len(nodes)) for user in n.users), default=-1) for n in [x, *nodes]}

    def alive(cut: int) -> list[fx.Node]:
        """Return the values that are made before a cut and used behind it."""
        return [node for node in [x, *nodes[:cut]] if last_use[node] >= cut]

    cuts = [0]
    before, seen = 0, ""
    for at, node in enumerate(nodes):
        path = str(node.target)
        layer = _layer_of(paths.get(path, path), stacks) if node.op == "call_module" else None
        if layer is None:
            continue
        if layer != seen and at:
            cuts.append(min(range(before + 1, at + 1), key=lambda cut: (len(alive(cut)), -cut)))
        before, seen = at, layer
    blocks = []
    for start, stop in itertools.pairwise([*cuts, len(nodes)]):
        given, returned = [x] if not start else alive(start), end.args[0]
        if stop < len(nodes):
            kept = alive(stop)
            returned = kept[0] if len(kept) == 1 else tuple(kept)
        blocks.append(_block(nodes[start:stop], given, returned, values))
    return blocks


def _layer_of(path: str, stacks: Sequence[str]) -> str | None:
    """Return the layer of an elastic stack that a module is in, or None."""
    inside = [stack for stack in stacks if path.startswith(f"{stack}.")]
    if inside:
        stack = min(inside, key=len)
        return f"{stack}.{path[len(stack) + 1 :].split('.')[0]}"
    if stacks:
        return None
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join(parts[: number + 1])


def _block(nodes: list[fx.Node], given: list[fx.Node], returned: Any, values: Mapping[str, Any]) -> Block:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"value_{i}") for i, node in enumerate(given)}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter that several blocks read
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(fx.node.map_arg(returned, copied))
    forward = graph_function(graph, values)
    return forward if len(given) == 1 else lambda state: forward(*state)
