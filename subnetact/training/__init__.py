"""Training of a supernet: one step of the sandwich rule, for a loop and an optimiser of your own.

`examples/finetune_own_model.py` has a complete recipe: learning rate, progressive shrinking, calibration.
"""

from subnetact.training.sandwich import sandwich_step

__all__ = ["sandwich_step"]
