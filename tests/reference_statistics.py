"""The statistics of one subnet, computed by a network of its own as the rules of averaging define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.operators import SubnetNorm
from subnetact.spec import SubnetSpec
from subnetact.supernet.bind import bind
from subnetact.supernet.supernet import Supernet

__all__ = ["reference_statistics"]


def reference_statistics(
    supernet: Supernet, spec: SubnetSpec, batches: Sequence[Tensor], rule: str | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return mean and variance per BatchNorm; if `rule` is None, every BatchNorm has its own rule."""
    seen: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    row = supernet.space.resolve(spec)

    def watched(norm: SubnetNorm) -> nn.Module:
        module = norm.bind(row)
        biased = (rule or norm.rule) == "weighted_biased"

        def hook(module: Any, args: tuple[Tensor]) -> None:
            (x,) = args
            n = x.numel() // x.shape[1]
            var, mean = torch.var_mean(x, [axis for axis in range(x.dim()) if axis != 1], correction=0)
            stored = var if biased else var * n / (n - 1)
            seen.setdefault(norm.path, []).append((len(x) if biased else 1, mean, stored))
            module.register_buffer("running_mean", mean)
            module.register_buffer("running_var", var)

        module.register_forward_pre_hook(hook)
        return module

    network = bind(supernet.network, row, watched)
    with torch.no_grad():
        for batch in batches:
            network(batch.clone())
    found = {}
    for path, batchwise in seen.items():
        total = sum(n for n, _, _ in batchwise)
        found[path] = sum(n * m for n, m, _ in batchwise) / total, sum(n * v for n, _, v in batchwise) / total
    return found
