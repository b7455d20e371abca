"""Layer blocks: a subnet as parts that run one after the other, so that other work can come between.

The parts are cut from the traced graph of the view or of the fused program: in front of every layer of an
elastic stack (`LayerSelect`), or, in networks without one, of a numbered container, at the place where the
fewest values have to be handed over. Each operation of the graph is in exactly one part, so the outputs are
those of the whole subnet, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from subnetact.operators import LayerSelect

__all__ = ["Block", "split_graph", "stacks_of"]

State = Any
"""What a block hands to the next one: a tensor, or a tuple of values if there are several."""


class Block:
    """One part of a subnet. Calling the blocks of a subnet in order computes what the subnet computes.

    `name` is the layer of an elastic stack that the block begins with, "" for the first one. `call` is the
    block for callers that are in inference mode already.
    """

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[[Any], Any]) -> None:
        self.name = name
        self.call = call

    def __repr__(self) -> str:
        return f"Block({self.name or 'start'})"

    def __call__(self, state: State) -> State:
        """Map the batch, or what the block before returned, to what the next block takes or the output."""
        with torch.inference_mode():
            return self.call(state)


def stacks_of(network: nn.Module) -> tuple[str, ...]:
    """Return the paths of the elastic stacks of a network with operators."""
    return tuple(path for path, module in network.named_modules() if isinstance(module, LayerSelect))


def split_graph(
    graph: fx.Graph, modules: Mapping[str, Any], stacks: Sequence[str], paths: Mapping[str, str] | None = None
) -> list[Block]:
    """Cut a graph of one input into blocks; into a single one if there is nowhere to cut.

    `modules` is what the graph calls and reads, by name. Without `stacks`, numbered containers count. `paths`
    tells where in the network the modules with other names come from.
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    (end,) = (n for n in graph.nodes if n.op == "output")
    place = {node: i for i, node in enumerate(nodes)}
    last_use = {
        node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in [x, *nodes]
    }
    layers = [_layer_of((paths or {}).get(str(n.target), str(n.target)), stacks) for n in nodes]
    owners = [layer if node.op == "call_module" else None for node, layer in zip(nodes, layers, strict=True)]
    cuts: list[tuple[int, str]] = []
    before, seen = 0, ""
    for at, owner in enumerate(owners):
        if owner is None:
            continue
        if owner != seen and at:
            free = range(before + 1, at + 1)
            alive = {cut: _alive(cut, x, nodes, last_use) for cut in free}
            best = min(free, key=lambda cut: (len(alive[cut]), -cut))
            cuts.append((best, owner))
        before, seen = at, owner
    blocks = []
    starts = [(0, ""), *cuts]
    for i, (start, name) in enumerate(starts):
        stop = starts[i + 1][0] if i + 1 < len(starts) else len(nodes)
        if stop > start or len(starts) == 1:
            given = [x] if not i else _alive(start, x, nodes, last_use)
            kept = _alive(stop, x, nodes, last_use) if i + 1 < len(starts) else None
            blocks.append(_block(name, nodes[start:stop], given, kept, end, modules))
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


def _alive(cut: int, x: fx.Node, nodes: Sequence[fx.Node], last_use: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the values that are made before a cut and used behind it."""
    return [node for node in [x, *nodes[:cut]] if last_use[node] >= cut]


def _block(
    name: str,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    kept: Sequence[fx.Node] | None,
    end: fx.Node,
    modules: Mapping[str, Any],
) -> Block:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"value_{i}") for i, node in enumerate(given)}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter that several blocks read
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    if kept is None:
        graph.output(fx.node.map_arg(end.args[0], copied))
    else:
        values = tuple(map(copied, kept))
        graph.output(values[0] if len(values) == 1 else values)
    used = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
    module = fx.GraphModule({path: part for path, part in modules.items() if path in used}, graph)
    module.graph.owning_module = None  # breaks a reference circle, as in fused programs
    forward: Callable[..., Any] = module.forward
    if len(given) == 1:
        return Block(name, forward)
    return Block(name, lambda state: forward(*state))
