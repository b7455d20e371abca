"""Every scheduling policy of the library, and a registry of their names for command lines."""

from subnetact.serving.policies.fixed import CheapestFeasible, Fixed
from subnetact.serving.policies.greedy import MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.policies.slackfit import SlackFit

__all__ = ["CheapestFeasible", "Fixed", "HullFit", "MaxAcc", "MaxBatch", "SlackFit"]
