"""Blocks that a subnet may skip: residual blocks in stacks, found in a traced graph, and their importance.

A block is skippable if the identity can stand in its place: it has matrices of weights, its stack has no
weights of its own, others read one tensor of it, and a way from its first input, of the same shape and type,
to this output passes additions and otherwise nothing but activations, norms, scales, dropout and shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import groupby
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from subnetact.insertion.description import DepthStage
from subnetact.insertion.recorder import Recording, assigned, is_leaf
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.operation_traits import operation_of
from subnetact.spec import grouped
from subnetact.supernet.chain import Chain
from subnetact.supernet.elementwise import ADDITIONS, PRODUCTS


def skippable_blocks(modules: Mapping[str, nn.Module], recording: Recording) -> dict[str, torch.Size]:
    """Return the blocks that the identity can replace, in the order they run, with the shape of the input."""
    nodes = grouped(
        (path, node)
        for node in recording.graph.nodes
        for path, _ in node.meta.get("nn_module_stack", {}).values()
    )
    found: dict[str, torch.Size] = {}
    for path, inside in nodes.items():
        entry = recording.entries.get(path)
        matrices = _in_stack(path, modules) and any(p.dim() > 1 for p in modules[path].parameters())
        if matrices and entry is not None and _is_residual(inside, entry, modules):
            found[path] = entry.meta["tensor_meta"].shape
    return found


def _in_stack(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether a module is inside of one, but not of the network, that has no weights of its own."""
    stack = modules.get(path.rpartition(".")[0]) if "." in path else None
    return stack is not None and not stack._parameters and not stack._buffers


def stages_of(blocks: Mapping[str, torch.Size], influence: Mapping[str, float]) -> list[DepthStage]:
    """Return the stages, without choices: runs of blocks of one stack whose inputs have one shape."""
    runs = [list(run) for _, run in groupby(blocks, lambda path: (path.rpartition(".")[0], blocks[path]))]
    stacks = [run[0].rpartition(".")[0] for run in runs]
    names = [s if stacks.count(s) == 1 else run[0] for s, run in zip(stacks, runs, strict=True)]
    orders = [tuple(sorted(run, key=lambda path: -influence.get(path, 0.0))) for run in runs]
    return [DepthStage(f"{name}.depth", order) for name, order in zip(names, orders, strict=True)]


class StackWatch:
    """What the members of stacks do to their inputs, noted while a network runs that nobody else uses.

    The influence of a block is one minus the cosine of input and output (ShortGPT, Men et al., 2024).
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.influence: dict[str, float] = {}
        members = {path: m for path, m in modules.items() if _in_stack(path, modules) and not is_leaf(m)}
        stacks = dict.fromkeys(path.rpartition(".")[0] for path in members)
        self._chains = {path: Chain(path, modules[path]._modules) for path in stacks}
        for path, module in members.items():
            module.register_forward_hook(partial(self._measure, path))

    def broken(self, blocks: Collection[str]) -> dict[str, str]:
        """Return why some blocks cannot be skipped: what is between them changes what they pass on."""
        broken: dict[str, str] = {}
        for path, chain in self._chains.items():
            for layers, what in chain.breaks():
                for name in sorted({f"{path}.{layer}" for layer in layers}.intersection(blocks)):
                    broken.setdefault(name, what)
        return broken

    def _measure(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if args and all(isinstance(t, Tensor) and t.shape == args[0].shape for t in (args[0], output)):
            with torch._C.DisableTorchFunction():  # A recording notes nothing of this.
                a, b = (t.detach().float().flatten(1) for t in (args[0], output))
                self.influence[path] = 1.0 - float(F.cosine_similarity(a, b).mean())


def _is_residual(inside: list[fx.Node], entry: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether some nodes add to the numbers of an entry, and return them in their places."""
    members, facts = set(inside), entry.meta["tensor_meta"]
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    if len(outputs) != 1:
        return False
    places = torch.arange(facts.shape.numel()).view(facts.shape)
    arriving = {entry: (places, False)}  # where the numbers of the input are, and whether some are added
    for node in inside:
        sources = [arriving[n] for n in node.all_input_nodes if n in arriving]
        if not sources or "tensor_meta" not in node.meta:
            continue
        moved, added = sources[0]
        if node.target in ADDITIONS and moved.shape == node.meta["tensor_meta"].shape:
            arriving[node] = moved, True
        elif node.all_input_nodes[0] in arriving and _is_transparent(node, modules):
            arriving[node] = moved, added
        elif (function := _moving(node)) is not None and len(sources) == len(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: arriving[n][0])
            arriving[node] = function(*args, **kwargs), all(added for _, added in sources)
    moved, added = arriving.get(outputs[0], (places, False))
    end = outputs[0].meta.get("tensor_meta", facts)
    same = (end.shape, end.dtype) == (facts.shape, facts.dtype)
    return added and same and torch.equal(moved, places)


def _moving(node: fx.Node) -> Any:
    """Return the function of a node that only moves numbers of tensors to other places; None for others."""
    target: Any = node.target
    name = getattr(target, "__name__", target)
    if node.op != "call_module" and operation_of(name).kind == "reshape":
        # Convolutions return other strides on some machines, so what was viewed is reshaped.
        return getattr(Tensor, "reshape" if name == "view" else name)
    by_tensors = len(node.all_input_nodes) != len(node.args) - 1
    return target if target is torch.cat or (target in (getitem, assigned) and not by_tensors) else None


def _is_transparent(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return traits_of(modules[str(node.target)]).transparent
    if node.target in PRODUCTS:
        return all(other.op == "get_attr" for other in node.all_input_nodes[1:])  # the scale of a norm
    return operation_of(node.target).transparent
