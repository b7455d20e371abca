"""Measures the latency of every subnet at every batch size, and writes latency tables and bundles.

Which file answers which question:

- `cli`, `options`: which options and exit statuses does `python -m subnetact.profile` have?
- `pipeline`: in which steps does one command work, what does it write, and how is it resumed?
- `source`: where do the supernet, its input and the images for calibration come from, and how is code of a
  user imported and run, here and in `subnetact.serve`?
- `selection`: which subnets are profiled, and where do their accuracies come from?
- `sweep`: `profile_latency`; how often and in which order is every cell measured? What survives a kill?
- `window`: how is a call timed?
- `stability`: when is the median of a cell known well enough?
- `modes`: how is a subnet run?
"""

from subnetact.profile.sweep import profile_latency

__all__ = ["profile_latency"]
