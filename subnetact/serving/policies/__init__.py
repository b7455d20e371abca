"""Every scheduling policy of the library, and a registry of their names for command lines."""

from subnetact.serving.policies.fixed_subnet import CheapestFeasible, Fixed
from subnetact.serving.policies.flex import Flex, RunningBatch
from subnetact.serving.policies.greedy import MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit, Tuning
from subnetact.serving.policies.model_switching import Coarse, ModelSwitching
from subnetact.serving.policies.registry import POLICIES, make_policy, policy_names
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.serving.policies.veltair import Veltair

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
    "RunningBatch",
    "SlackFit",
    "Tuning",
    "Veltair",
    "make_policy",
    "policy_names",
]
