"""OriginalStatistics: the BatchNorm statistics that a network had when it became a supernet."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor, nn

from subnetact.operators import SubnetNorm
from subnetact.supernet.generation import Moment

__all__ = ["OriginalStatistics"]


class OriginalStatistics:
    """Tells whether a network is still what it was when it became a supernet, and whether it was trained.

    The largest subnet is then the network as it was given, and its statistics are right for it.

    Args:
        network: the network with operators.
        moment: that of its weights.
    """

    def __init__(self, network: nn.Module, moment: Moment) -> None:
        self._moment = moment
        self._means = {name: mean.detach().clone() for name, (mean, _) in _statistics(network).items()}
        self._trained = any(
            bool(mean.any()) or not bool((var == 1).all()) for mean, var in _statistics(network).values()
        )

    def carried(self, network: nn.Module, moment: Moment) -> OriginalStatistics:
        """Return what the same network takes along to other tensors; then call `arrived`.

        Args:
            network: the network with operators.
            moment: that of its weights.
        """
        found = copy(self)
        found._trained = self.hold(network, moment)
        return found

    def arrived(self, moment: Moment) -> None:
        """Go on from the moment of the other tensors.

        Args:
            moment: that of the weights.
        """
        self._moment = moment

    def hold(self, network: nn.Module, moment: Moment) -> bool:
        """Tell whether the statistics were trained, and neither they nor the weights have changed since.

        Args:
            network: the network with operators, on any device.
            moment: that of its weights.
        """
        if not self._trained or not moment.same_weights(self._moment):
            return False
        now = _statistics(network)
        return now.keys() == self._means.keys() and all(
            bool(torch.equal(mean.to(self._means[name]), self._means[name]))
            for name, (mean, _) in now.items()
        )


def _statistics(network: nn.Module) -> Mapping[str, tuple[Tensor, Tensor]]:
    found = {}
    for norm in network.modules():
        if isinstance(norm, SubnetNorm):
            mean, var = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
            if mean is not None and var is not None and not mean.is_meta:
                found[norm.path] = mean, var
    return found
