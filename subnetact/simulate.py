"""`python -m subnetact.simulate`: compare scheduling policies on a trace of arrivals.

`subnetact.simulate` is also the name of the function that runs one simulation. Importing this module puts the
module in the function's place, so the module can be called like the function, and `help` and
`inspect.signature` show the function's documentation and arguments.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from subnetact.command import run_command
from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate

__all__ = ["main", "simulate"]


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> SimulationResult:
        return simulate(*args, **kwargs)


_this = sys.modules[__name__]
_this.__class__ = _CallableModule
if __name__ != "__main__":
    _this.__doc__ = simulate.__doc__
    _this.__signature__ = inspect.signature(simulate)  # type: ignore[attr-defined]

if __name__ == "__main__":
    run_command(main)
