"""`python -m subnetact.simulate`: compare scheduling policies on a trace of arrivals."""

import sys

from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.simulator import simulate

if __name__ == "__main__":
    sys.exit(main())

# `subnetact.simulate` names the function as well as this command; importing the module yields the function.
sys.modules[__name__] = simulate  # type: ignore[assignment]
