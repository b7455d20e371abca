"""The supernet: one copy of the weights, from which any subnet is taken as a zero-copy view.

Which file answers which question:

- `supernet.py`: how a subnet is run, extracted or trained (`Supernet`).
- `insert.py`: how an ordinary network becomes a supernet (`insert_`).
- `norm_table.py`: where the BatchNorm statistics of subnets are kept, saved and loaded (`NormTable`).
- `failure.py`: which module raised an error, and which entry a description lacks.
- `bind.py`: how the network of one subnet is put together from operators and a size row.
- `trace.py`: how a view's forward becomes a `torch.fx` graph; `elementwise.py`: which of its nodes are
  activations, sums and products.
"""

from subnetact.supernet.insert import insert_
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import InsertReport, Supernet

__all__ = ["InsertReport", "NormRow", "NormTable", "Supernet", "insert_"]
