"""OriginalStatistics: the BatchNorm statistics that a network had when it became a supernet."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor, nn

from subnetact.operators import SubnetNorm
from subnetact.operators.tensor_version import tensor_version

__all__ = ["OriginalStatistics"]


class OriginalStatistics:
    """Tells whether a network is still what it was when it became a supernet, and whether it was trained.

    The largest subnet is then the network as it was given, and its statistics are right for it.

    Args:
        network: the network with operators.
    """

    def __init__(self, network: nn.Module) -> None:
        self._writes = _writes(network)
        self._means = {name: mean.detach().clone() for name, (mean, _) in _statistics(network).items()}
        self._trained = any(
            bool(mean.any()) or not bool((var == 1).all()) for mean, var in _statistics(network).values()
        )

    def carried(self, network: nn.Module) -> OriginalStatistics:
        """Return what copies of the network take along; they call `arrived`.

        Args:
            network: the network with operators.
        """
        found = copy(self)
        found._trained = self.hold(network)
        return found

    def arrived(self, network: nn.Module) -> None:
        """Count the changes of a copy from now on; its tensors are new.

        Args:
            network: the copy.
        """
        self._writes = _writes(network)

    def end(self) -> None:
        """Note that other weights were loaded: the network is not the one that was given any more."""
        self._trained = False

    def hold(self, network: nn.Module) -> bool:
        """Tell whether the statistics were trained, and neither they nor the weights have changed since.

        Args:
            network: the network with operators, on any device.
        """
        if not self._trained or _writes(network) != self._writes:
            return False
        now = _statistics(network)
        return now.keys() == self._means.keys() and all(
            bool(torch.equal(mean.to(self._means[name]), self._means[name]))
            for name, (mean, _) in now.items()
        )


def _writes(network: nn.Module) -> int:
    return sum(tensor_version(parameter) for parameter in network.parameters())


def _statistics(network: nn.Module) -> Mapping[str, tuple[Tensor, Tensor]]:
    found = {}
    for norm in network.modules():
        if isinstance(norm, SubnetNorm):
            mean, var = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
            if mean is not None and var is not None and not mean.is_meta:
                found[norm.path] = mean, var
    return found
