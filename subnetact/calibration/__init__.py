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
The forward pass of every subnet is traced with `torch.fx` up to its last BatchNorm, and the graphs of all
subnets are put together into one. Two layers become one step of that graph if they have the same weights (the
same slices of the supernet), the same settings and the same inputs, so two subnets share everything up to the
first layer in which they differ. Per batch, every step is computed once, and a BatchNorm that several subnets
share is averaged once. A step computes what the subnet by itself would compute, in the same order, so the
statistics are the same bit for bit.

This needs a forward that `torch.fx` can trace, which calls no BatchNorm twice and does not overwrite a tensor
that others may read later (`hidden_writes`). A subnet for which it fails runs one at a time. Before the first
batch, one subnet runs a few inputs both by itself and in the graph; if the statistics differ, all subnets run
one at a time. The report names these subnets, each with the reason.

How memory is bounded
---------------------
Subnets run one after another, those with equal beginnings next to each other. An output is kept only as long
as a later step reads it. Outputs that only later subnets read take at most `memory_mb`; beyond that, those
that are needed last are dropped and computed again.

Networks without BatchNorm have nothing to measure there; `corrections.py` fits what narrow subnets add.
"""

from subnetact.calibration.calibrate import CalibrationReport

__all__ = ["CalibrationReport"]
