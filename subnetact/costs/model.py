"""The cost of a subnet: parameters, multiply-accumulates and bytes, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from subnetact.costs.meta_forward import COUNTS, MetaForward, Vector, feature
from subnetact.errors import SpecError
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

_PRODUCT_MACS = feature("product", "macs")


@dataclass(frozen=True)
class Cost:
    """What one forward pass of one subnet costs.

    Attributes:
        parameters: number of parameters of the extracted network.
        macs: multiply-accumulates of convolutions, linear layers and matrix products, for the batch.
        activation_bytes: bytes that modules with parameters write, for the batch. Position embeddings
            count once per input.
        weight_bytes: bytes of the parameters, each counted once.
        not_counted: ATen names of the operators whose arithmetic is not in `macs`: activations, norms,
            softmax, additions and pooling.
        product_macs: the part of `macs` that is matrix products outside any layer, as in attention.
    """

    parameters: int
    macs: int
    activation_bytes: int
    weight_bytes: int
    not_counted: tuple[str, ...]
    product_macs: int = 0


class CostModel:
    """Computes the cost of any subnet of a supernet, more than a thousand subnets per second.

    Every module runs once per combination of its sizes and the shapes of its inputs, on a copy of the
    supernet without data; a subnet with known modules is put together from these results. The counts are
    exact if what a module computes follows from these two. Only one thread at a time may use a model.

    Args:
        supernet: the supernet. It is not changed.
        example: a batch for the network, (N, C, H, W) for images, or a tuple or dictionary of its arguments.
            Only the shapes behind the batch axis and the dtypes count.

    Raises:
        SpecError: the network does not run on the example, or its forward pass needs data.

    Example:
        >>> model = CostModel(supernet, torch.empty(1, 3, 224, 224))
        >>> model(supernet.space.largest()).macs
    """

    def __init__(self, supernet: Supernet, example: Any) -> None:
        self.space = supernet.space
        self._forward = MetaForward(supernet, example)
        for spec in (self.space.largest(), self.space.smallest()):
            self._forward.run(self.space.resolve(spec))

    def __call__(self, spec: SubnetSpec, batch_size: int = 1) -> Cost:
        """Return the cost of one forward pass of a subnet over a whole batch.

        Raises:
            SpecError: the specification is malformed or of another space, or the batch size is below 1.
        """
        if batch_size < 1:
            raise SpecError(f"batch_size: {batch_size} is not at least 1")
        counts = self._forward.run(self.space.resolve(spec))
        vector = counts.vector
        macs, activation, weights = (int(vector[2 + i :: len(COUNTS)].sum()) for i in range(3))
        return Cost(
            parameters=int(vector[0]),
            macs=macs * batch_size,
            activation_bytes=activation * batch_size,
            weight_bytes=weights,
            not_counted=tuple(sorted(counts.not_counted)),
            product_macs=int(vector[_PRODUCT_MACS]) * batch_size,
        )

    def vector(self, spec: SubnetSpec) -> Vector:
        """Return the costs of the subnet `spec` for one input, in the order of `subnetact.costs.FEATURES`.

        These are the number of parameters, and per kind of layer the number of modules, multiply-accumulates,
        bytes written and bytes of weights.
        """
        return self._forward.run(self.space.resolve(spec)).vector
