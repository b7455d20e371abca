"""Every scheduling policy of the library, and their names for command lines (`make_policy`).

A policy decides which subnet and batch size an idle worker runs next. One file per policy or pair of
policies:

* `slackfit`: SlackFit; `hullfit`: HullFit, with `hull_table`, `time_budget` and `floor_planner`.
* `fixed_subnet`: Fixed and CheapestFeasible; `greedy`: MaxBatch and MaxAcc.
* `model_switching`: ModelSwitching and Coarse; `flex`: Flex; `veltair`: Veltair.
"""

from subnetact.serving.policies.fixed_subnet import CheapestFeasible, Fixed
from subnetact.serving.policies.flex import Flex
from subnetact.serving.policies.greedy import MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit, Tuning
from subnetact.serving.policies.model_switching import Coarse, ModelSwitching
from subnetact.serving.policies.preemptive import Preemptive
from subnetact.serving.policies.registry import POLICIES, make_policy, policy_names
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.serving.policies.veltair import Veltair
from subnetact.serving.scheduling.context import RunningBatch

__all__ = [
    "POLICIES",
    "CheapestFeasible",
    "Coarse",
    "Fixed",
    "Flex",
    "HullFit",
    "MaxAcc",
    "MaxBatch",
    "ModelSwitching",
    "Preemptive",
    "RunningBatch",
    "SlackFit",
    "Tuning",
    "Veltair",
    "make_policy",
    "policy_names",
]
