"""Finite values: which samples have NaN or infinite values, and whether a network can make some of others.

Some operations of fused programs turn NaN into a number, so a program may use them only if no NaN can reach
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from subnetact.operators.layer_traits import runs_as, traits_of
from subnetact.operators.lowered_weight import LowConv, LowLinear
from subnetact.operators.operation_traits import operation_of
from subnetact.operators.weight_runs import LinearInRuns
from subnetact.supernet.elementwise import has_hooks

LIMIT = 1e8
"""Inputs up to this absolute value count as ordinary; `overflows` probes a network with values as large."""


def stays_finite(graph: fx.Graph, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether finite values stay finite in a traced network, unless they overflow."""
    return all(_keeps_finite(node, leaves) for node in graph.nodes if node.op.startswith("call_"))


def _keeps_finite(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        layer = leaves[str(node.target)]
        known = isinstance(layer, LowConv | LowLinear | LinearInRuns) or runs_as(layer)
        return known and traits_of(layer).finite and not has_hooks(layer)
    operation = operation_of(node.target)
    by_number = operation.kind == "division" and isinstance(node.args[1], int | float) and node.args[1] != 0
    return operation.finite or by_number


def strange_samples(x: Tensor) -> list[int]:
    """Return the positions of the samples of a batch that have NaN, infinite or huge values."""
    if torch.linalg.vector_norm(x).item() <= LIMIT:  # NaN is not.
        return []
    rows = x.reshape(len(x), x.shape[1:].numel())
    norms: list[float] = torch.linalg.vector_norm(rows, dim=1).tolist()
    return [i for i, norm in enumerate(norms) if not norm <= LIMIT]


def overflows(view: nn.Module, probe: Tensor | None) -> bool:
    """Tell whether weights, or the output for a probe of values up to `LIMIT`, are not finite tensors."""
    tensors = (*view.parameters(), *view.buffers())
    if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
        return True
    if probe is None or not probe.is_floating_point():
        return False
    output = view(probe * (LIMIT / max(1.0, float(probe.abs().amax()))))
    return not isinstance(output, Tensor) or not bool(output.isfinite().all())
