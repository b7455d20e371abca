"""What subnets cost, computed from their sizes: parameters, multiply-accumulates, bytes.

- `model`: `CostModel`, `Cost` and `cost`, which callers use.
- `layers`: the kinds of layers, and the vector of counts per kind (`FEATURES`).
- `meta_forward`: counts operations with forward passes over meta tensors, which hold no data.
"""

from subnetact.costs.layers import FEATURES, Vector
from subnetact.costs.model import Cost, CostModel, cost

__all__ = ["FEATURES", "Cost", "CostModel", "Vector", "cost"]
