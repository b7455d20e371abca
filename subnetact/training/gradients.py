"""average_gradients_: averages gradients over the processes of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn

__all__ = ["average_gradients_"]


def average_gradients_(parameters: Iterable[nn.Parameter], group: Any = None) -> None:
    """Replace every gradient by its mean over all processes, in place.

    A parameter that has a gradient in some processes only counts as zero in the others. So the processes may
    train different subnets. Every process has to call this function with the same parameters in the same
    order.

    Args:
        parameters: the parameters, for example `supernet.parameters()`.
        group: a process group of `torch.distributed`. If None, the default group.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        return
    device = wanted[0].device
    present = torch.tensor([parameter.grad is not None for parameter in wanted], dtype=torch.int32)
    present = present.to(device)
    distributed.all_reduce(present, group=group)
    used = [parameter for parameter, count in zip(wanted, present.tolist(), strict=True) if count]
    world = distributed.get_world_size(group)
    for dtype in dict.fromkeys(parameter.dtype for parameter in used):
        alike = [parameter for parameter in used if parameter.dtype == dtype]
        for parameter in alike:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads: list[Any] = [parameter.grad for parameter in alike]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        distributed.all_reduce(flat, group=group)
        flat /= world
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, parts, strict=True):
            grad.copy_(mean.view_as(grad))
