"""ElasticKernel: depthwise convolutions whose kernel size is a choice of the subnet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from subnetact.errors import InsertError
from subnetact.operators.base import Operator


class KernelConv2d(nn.Conv2d):
    """A depthwise convolution with several kernel sizes. Without an operator around it, it uses the largest.

    Args:
        channels: the number of input and of output channels.
        kernel_sizes: the odd kernel sizes to choose from.
        stride: the stride of the convolution.
        matrices: whether a smaller kernel is the centre of the next larger one times a learned matrix
            (`7to5_matrix` of shape (25, 25) for example). If False, it is the centre of the largest kernel.

    Raises:
        InsertError: a kernel size is not odd and positive, or there is none.
    """

    def __init__(
        self, channels: int, kernel_sizes: Sequence[int], stride: int = 1, matrices: bool = False
    ) -> None:
        sizes = tuple(sorted(set(kernel_sizes)))
        if not sizes or any(k < 1 or k % 2 == 0 for k in sizes):
            raise InsertError(f"kernel sizes are odd and at least one, got {list(kernel_sizes)}")
        top = sizes[-1]
        super().__init__(channels, channels, top, stride, top // 2, groups=channels, bias=False)
        self.kernel_sizes = sizes
        self.matrices = matrices
        if matrices:
            for small, large in itertools.pairwise(sizes):
                self.register_parameter(f"{large}to{small}_matrix", nn.Parameter(torch.eye(small * small)))


class ElasticKernel(Operator):
    """Gives a depthwise convolution the kernel size and the number of channels of the subnet.

    A smaller kernel that is the centre of the largest one is a zero-copy slice. A kernel that is computed
    with matrices is computed once, for all channels, and shared by all subnets with that kernel size.

    Parts:
        channels: the channels of the convolution.
        kernel: the kernel size.

    Source:
        Once-for-All (Cai et al., 2020), section 3.3.
    """

    parts = ("channels", "kernel")

    def check(self) -> None:
        """Refuse templates that are no KernelConv2d."""
        if not isinstance(self.template, KernelConv2d):
            raise self.refuse("only KernelConv2d stands for several kernel sizes")

    @cached_property
    def shell(self) -> nn.Conv2d:
        """An ordinary convolution with the stride of the template."""
        return nn.Conv2d(1, 1, 1, self.template.stride, bias=False, device="meta")

    def full(self, part: str) -> int:
        """Return the number of channels of the full network, or the largest kernel size."""
        return int(self.template.out_channels if part == "channels" else self.template.kernel_sizes[-1])

    def legal(self, part: str) -> Sequence[int]:
        """Return the kernel sizes to choose from, or every number of channels up to the full one."""
        return self.template.kernel_sizes if part == "kernel" else super().legal(part)

    def zeroing_equals_dropping(self, part: str) -> bool:
        """A kernel computed by matrices is not zero where the weights are."""
        return part == "channels" or not self.template.matrices

    def kernel(self, size: int) -> Tensor:
        """Return the weight with a kernel size for all channels, of shape (channels, 1, size, size)."""
        weight: Any = self.weight
        sizes = self.template.kernel_sizes
        names = [f"{large}to{small}_matrix" for small, large in itertools.pairwise(sizes)]
        matrices: Any = [getattr(self, name) for name in names if self.template.matrices]
        return smaller_kernel(weight, matrices, list(sizes), size)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the weight of the first channels with the subnet's kernel size."""
        channels, size = sizes
        return {"weight": self.kernel(size)[:channels], "bias": None}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the numbers of channels, the kernel size and the padding of the subnet's module."""
        channels, size = sizes
        counts = dict.fromkeys(("in_channels", "out_channels", "groups"), channels)
        padding = {"padding": (size // 2, size // 2), "_reversed_padding_repeated_twice": [size // 2] * 4}
        return {**counts, **padding, "kernel_size": (size, size)}

    def view_tensors(self, sizes: tuple[int, ...], bits: int) -> dict[str, Tensor | None]:
        """Return slices of the one kernel of these `sizes` that matrices computed; `bits` change nothing."""
        channels, size = sizes
        if not self.template.matrices or size == self.full("kernel"):
            return super().view_tensors(sizes, bits)
        computed = self.packed(("kernel", size), lambda: {"weight": self.kernel(size)})
        return {"weight": computed.tensors["weight"][:channels], "bias": None}


def smaller_kernel(weight: Tensor, matrices: list[Tensor], sizes: list[int], size: int) -> Tensor:
    """Return a kernel (channels, 1, size, size); `matrices[i]` leads from `sizes[i + 1]` to `sizes[i]`."""
    if has_torch_function_unary(weight):
        return handle_torch_function(smaller_kernel, (weight,), weight, matrices, sizes, size)
    at = len(sizes) - 1
    while at > 0 and sizes[at] > size:
        small = sizes[at - 1]
        start = (sizes[at] - small) // 2
        weight = weight[..., start : start + small, start : start + small]
        if len(matrices) > 0:
            weight = F.linear(weight.flatten(1), matrices[at - 1]).view(-1, 1, small, small)
        at -= 1
    return weight
