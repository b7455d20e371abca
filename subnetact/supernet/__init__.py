"""The supernet: one copy of the weights, from which any subnet is taken as a zero-copy view.

Which file answers which question:

- `supernet.py`: how a subnet is run, extracted or trained (`Supernet`).
- `put_operators.py`: how an ordinary network becomes a supernet.
- `bind.py`: how the network of one subnet is put together from operators and a size row; `views.py`: what
  makes it a view of the supernet, and which views are kept.
- `generation.py`: whether the weights have changed, for everything that outlives such a change;
  `replacements.py`: whether modules or tensors were replaced.
- `load.py`: how other weights are loaded, into which memory, and which statistics rows stay.
- `statistics.py`: which BatchNorm statistics a subnet runs on; `norm_table.py`: where those of subnets are
  kept, saved and loaded (`NormTable`).
- `failure.py`: which module raised an error, and which entry a description lacks.
- `check.py`: whether all corners of the space run and slice the right rows; `proof.py`: the one proof that
  slices fit together; `unused_weights.py`: copies in which what a subnet does not use is NaN or zero.
- `chain.py`: whether every layer of a stack gets what the one before it returned.
- `precision.py`: which modules run at the precision of the subnet, and how far they are off.
- `batches.py`: what a network is called with.
- `trace.py`: how a view's forward becomes a `torch.fx` graph; `elementwise.py`: which of its nodes
  compute every element by itself, and which write over their operands.
"""

from subnetact.supernet.check import CheckReport
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.statistics import batch_norms, statistics_of
from subnetact.supernet.supernet import InsertReport, Supernet

__all__ = ["CheckReport", "InsertReport", "NormRow", "NormTable", "Supernet", "batch_norms", "statistics_of"]
