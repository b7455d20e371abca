"""The supernet: one copy of the weights, from which any subnet is taken as a zero-copy view.

Which file answers which question:

- `supernet.py`: how a subnet is run, extracted or trained (`Supernet`).
- `insert.py`: how an ordinary network becomes a supernet (`insert_`).
- `generation.py`: whether the weights have changed, for everything that outlives such a change.
- `original_statistics.py`: whether the statistics are still those that the network came with.
- `norm_table.py`: where the BatchNorm statistics of subnets are kept, saved and loaded (`NormTable`).
- `failure.py`: which module raised an error, and which entry a description lacks.
- `check.py`: whether all corners of the space run and slice the right rows; `unused_weights.py`: copies in
  which all weights that a subnet does not use are NaN or zero.
- `stack_use.py`: whether a network sees the positions of its layers.
- `precision.py`: which modules run at the precision of the subnet, and how far they are off.
- `name_prefix.py`: the prefixes that wrappers add to names of tensors.
- `batches.py`: what a network is called with.
- `bind.py`: how the network of one subnet is put together from operators and a size row.
- `trace.py`: how a view's forward becomes a `torch.fx` graph; `elementwise.py`: which of its nodes are
  activations, sums and products.
"""

from subnetact.supernet.check import CheckReport
from subnetact.supernet.insert import insert_
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import InsertReport, Supernet

__all__ = ["CheckReport", "InsertReport", "NormRow", "NormTable", "Supernet", "insert_"]
