"""`python -m subnetact.simulate`: compare scheduling policies on a trace of arrivals.

`subnetact.simulate` is also the name of the function that runs one simulation. Importing this module puts the
module in the function's place, so the module can be called like the function.
"""

import sys
from types import ModuleType
from typing import Any

from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate

__all__ = ["main", "simulate"]


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> SimulationResult:
        return simulate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
