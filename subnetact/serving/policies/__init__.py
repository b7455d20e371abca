"""The scheduling policies, and their names for command lines (`make_policy`).

A policy decides which subnet and batch size an idle worker runs next.

* `fronts`: the best subnet within a time at a batch size, for all policies.
* `hullfit`: HullFit; `slackfit`: SlackFit; `model_switching`: ModelSwitching.
* `baselines`: Fixed, CheapestFeasible, MaxBatch and MaxAcc.
* `preemptive`: Preemptive, which lets running batches of any policy give way to urgent requests.
"""

from subnetact.serving.policies.baselines import CheapestFeasible, Fixed, MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.policies.model_switching import ModelSwitching
from subnetact.serving.policies.preemptive import Preemptive
from subnetact.serving.policies.registry import POLICIES, make_policy, policy_names
from subnetact.serving.policies.slackfit import SlackFit

__all__ = [
    "POLICIES",
    "CheapestFeasible",
    "Fixed",
    "HullFit",
    "MaxAcc",
    "MaxBatch",
    "ModelSwitching",
    "Preemptive",
    "SlackFit",
    "make_policy",
    "policy_names",
]
