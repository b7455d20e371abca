"""Calibration: the BatchNorm statistics of many subnets, from one pass over data, or their corrections.

`subnetact.calibrate` is the only function to call. It fills `supernet.norms` with one statistics row per
subnet. `subnetact.calibration.calibrate` is the module that defines this function.

How the statistics are averaged
-------------------------------
Every subnet normalises every batch with that batch's own mean and variance, and averages them over the
batches (`CalibrationNorm.collect`). There are two rules, after the code of the published families:

- `weighted_biased`: means and biased variances, weighted with the batch sizes (OFA's
  `set_running_statistics`).
- `cumulative_unbiased`: means and unbiased variances, every batch with the same weight (BatchNorm with
  `momentum=None`, as AttentiveNAS and Slimmable Networks calibrate).

What is shared
--------------
On every batch, the subnets run one after another, those with equal beginnings next to each other. What a
module returned in one of them is what it returns in a later one if both give it the same sizes and equal
inputs, so two subnets share everything up to the first layer in which they differ, and a BatchNorm that
several subnets share is averaged once. Only such calls are noted as a later subnet can share
(`SharedCalls.worth_noting`). What is shared is what the subnet by itself would compute, so the statistics are
the same bit for bit; a module whose inputs or outputs were overwritten since, that leaves something in an
attribute, or whose averages differ so far runs again.

How memory is bounded
---------------------
Between two subnets, what is noted takes at most `memory_mb`; beyond that, the first layers are forgotten and
computed again.

Networks without BatchNorm have nothing to measure there; `corrections.py` fits what narrow subnets add.
"""

from subnetact.calibration.calibrate import CalibrationReport

__all__ = ["CalibrationReport"]
