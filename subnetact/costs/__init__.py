"""What subnets cost, computed from their sizes: parameters, multiply-accumulates, bytes."""

from subnetact.costs.meta_forward import FEATURES, Vector
from subnetact.costs.model import Cost, CostModel

__all__ = ["FEATURES", "Cost", "CostModel", "Vector"]
