"""Training of a supernet: one step of the sandwich rule, for a loop and an optimiser of your own.

* `sandwich`: `sandwich_step`, which adds the gradients of several subnets.
* `gradients`: averages gradients over the processes of `torch.distributed`.

`examples/finetune_own_model.py` has a complete recipe: learning rate, progressive shrinking, calibration.
"""

from subnetact.training.gradients import average_gradients_
from subnetact.training.sandwich import SandwichLosses, sandwich_step

__all__ = ["SandwichLosses", "average_gradients_", "sandwich_step"]
