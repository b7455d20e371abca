"""Latency tables: the latency of every subnet at every batch size on one device, and its accuracy.

Nothing here imports torch; schedulers and simulators read tables on machines that have none.

Which file answers which question:

* `table`: `LatencyTable` and everything that can be done with it.
* `arrays`: what a table holds, and which numbers make no table.
* `file`: the JSON file, and files with names of earlier versions.
* `superserve`: the file format that SuperServe's authors publish.
* `merge`: one table from two.
* `compare`: how far two tables are apart (`Comparison`).
* `plot`: figures; they need matplotlib.
"""

from subnetact.latency.compare import Comparison
from subnetact.latency.plot import plot_front, plot_heat_map
from subnetact.latency.table import LatencyTable

__all__ = ["Comparison", "LatencyTable", "plot_front", "plot_heat_map"]
