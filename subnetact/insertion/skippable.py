"""Blocks that a subnet may skip: residual blocks in stacks, found in a traced graph, and their importance.

A block is skippable if the identity can stand in its place: it has matrices of weights, its stack has no
weights of its own, it takes one tensor and returns one of the same shape and type, and a way from its input
to its output passes additions and otherwise nothing but activations, norms and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from subnetact.insertion.description import DepthStage
from subnetact.operators.layer_traits import traits_of
from subnetact.supernet.batches import call_with, map_tensors
from subnetact.supernet.chain import Chain
from subnetact.supernet.elementwise import ADDITIONS

__all__ = ["skippable_blocks", "stages_of", "watched_blocks"]

TRANSPARENT_CALLS = (F.relu, torch.relu, F.gelu, F.silu, F.dropout, F.layer_norm, "relu", "relu_", "clone")
"""What may lie on the way from the input of a block to its output, beside additions and some layers."""


def skippable_blocks(model: nn.Module, graph: fx.Graph) -> dict[str, torch.Size]:
    """Return the blocks that the identity can replace, in the order they run, with the shape of the input."""
    modules = dict(model.named_modules())
    nodes: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            nodes.setdefault(path, []).append(node)
    found: dict[str, torch.Size] = {}
    for path, inside in nodes.items():
        block, stack = modules.get(path), modules.get(path.rpartition(".")[0]) if "." in path else None
        if block is None or stack is None or stack._parameters or stack._buffers:
            continue
        shape = _residual_shape(inside, modules) if any(p.dim() > 1 for p in block.parameters()) else None
        if shape is not None:
            found[path] = shape
    outer = {path for path in found for other in found if other.startswith(f"{path}.")}
    return {path: shape for path, shape in found.items() if path not in outer}


def stages_of(blocks: Mapping[str, torch.Size], influence: Mapping[str, float]) -> list[DepthStage]:
    """Return the stages, without choices: runs of blocks of one stack whose inputs have one shape."""
    runs = [list(run) for _, run in groupby(blocks, lambda path: (path.rpartition(".")[0], blocks[path]))]
    stacks = [run[0].rpartition(".")[0] for run in runs]
    return [
        DepthStage(
            f"{stack if stacks.count(stack) == 1 else run[0]}.depth",
            tuple(sorted(run, key=lambda path: -influence.get(path, 0.0))),
        )
        for stack, run in zip(stacks, runs, strict=True)
    ]


def watched_blocks(
    model: nn.Module, x: Any, blocks: Collection[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Run the model; return the influence of blocks, and why some of them cannot be skipped.

    The influence is one minus the cosine of input and output (ShortGPT, Men et al., 2024). A block stays if
    the model changes its input or output on the way from or to the block beside it.
    """
    influence: dict[str, float] = {}

    def measure(path: str, _: nn.Module, args: Any, output: Any) -> None:
        if args and all(isinstance(t, Tensor) and t.shape == args[0].shape for t in (args[0], output)):
            a, b = (t.detach().float().flatten(1) for t in (args[0], output))
            influence[path] = 1.0 - float(F.cosine_similarity(a, b).mean())

    with ExitStack() as hooks, torch.no_grad():
        stacks = sorted({path.rpartition(".")[0] for path in blocks})
        chains = {path: Chain(path, model.get_submodule(path)._modules) for path in stacks}
        for chain in chains.values():
            hooks.callback(chain.close)
        for path in blocks:
            hooks.enter_context(model.get_submodule(path).register_forward_hook(partial(measure, path)))
        call_with(model, map_tensors(Tensor.clone, x))
    broken: dict[str, str] = {}
    for path, chain in chains.items():
        for layers, what in chain.breaks():
            names = {f"{path}.{layer}" for layer in layers}
            broken |= {name: what for name in sorted(names.intersection(blocks)) if name not in broken}
    return influence, broken


def _residual_shape(inside: list[fx.Node], modules: Mapping[str, nn.Module]) -> torch.Size | None:
    """Return the shape of the input of a residual block that consists of some nodes, or None for others."""
    members = set(inside)
    given = {n for node in inside for n in node.all_input_nodes if n not in members and _kind(n)}
    inputs = {n for n in given if n.op != "get_attr"}
    outputs = {node for node in inside if any(user not in members for user in node.users)}
    if len(inputs) != 1 or len(outputs) != 1:
        return None
    (entry,), (end,) = inputs, outputs
    same = _kind(entry) == _kind(end) and _shortcut(end, entry, members, modules)
    return entry.meta["tensor_meta"].shape if same else None


def _kind(node: fx.Node) -> tuple[torch.Size, torch.dtype] | None:
    """Return the shape and the type of a tensor, or None for other values."""
    facts: Any = node.meta.get("tensor_meta")
    return (facts.shape, facts.dtype) if hasattr(facts, "shape") else None


def _shortcut(end: fx.Node, entry: fx.Node, members: set[fx.Node], modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether a way leads from the entry to the end, with an addition and nothing that computes."""
    ways: list[tuple[fx.Node, bool]] = [(end, False)]
    seen: set[tuple[fx.Node, bool]] = set()
    while ways:
        node, added = ways.pop()
        if node is entry and added:
            return True
        if node not in members or (node, added) in seen:
            continue
        seen.add((node, added))
        if node.target in ADDITIONS:
            ways += [(source, True) for source in node.all_input_nodes]
        elif _transparent(node, modules):
            ways += [(source, added) for source in node.all_input_nodes[:1]]
    return False


def _transparent(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules.get(str(node.target))
        return module is not None and (traits_of(module).transparent or type(module).__name__ == "DropPath")
    target: str | Callable[..., Any] = node.target
    return target in TRANSPARENT_CALLS
