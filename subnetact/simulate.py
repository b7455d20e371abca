"""`python -m subnetact.simulate`: compare scheduling policies on a trace of arrivals.

`subnetact.simulate` is also the name of the function that runs one simulation. Whoever imports this module
gets that function, so that the import does not hide it.
"""

import sys

from subnetact.command import run_command
from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.simulator import simulate

__all__ = ["main", "simulate"]

if __name__ != "__main__":
    sys.modules[__name__] = simulate  # type: ignore[assignment]

if __name__ == "__main__":
    run_command(main)
