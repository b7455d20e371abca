"""Latency tables: the latency of every subnet at every batch size on one device, and its accuracy.

Nothing here imports torch; schedulers and simulators read tables on machines that have none.

Which file answers which question:

* `table`: `LatencyTable` and everything that can be done with it; its JSON file.
* `arrays`: which numbers make no table.
* `compare`: how far two tables are apart (`Comparison`).
* `origin`: whether a table is of the weights that are served, and of this machine.
* `pareto`: dominance, fronts and their hypervolume.
* `plot`: the front as a figure; it needs matplotlib.
"""

from subnetact.latency.compare import Comparison
from subnetact.latency.pareto import hypervolume, pareto_front
from subnetact.latency.plot import plot_front
from subnetact.latency.table import LatencyTable

__all__ = ["Comparison", "LatencyTable", "hypervolume", "pareto_front", "plot_front"]
