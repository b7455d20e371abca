"""Makes policies from their names, for command lines and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.baselines import CheapestFeasible, Fixed, MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.policies.model_switching import ModelSwitching
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.serving.scheduling.context import Policy

POLICIES: dict[str, Callable[[LatencyTable, float, int | None], Policy]] = {
    "hullfit": lambda table, slo_ms, _: HullFit(table, slo_ms),
    "slackfit": lambda table, slo_ms, buckets: SlackFit(table, slo_ms, 8 if buckets is None else buckets),
    "maxbatch": lambda table, _, __: MaxBatch(table),
    "maxacc": lambda table, _, __: MaxAcc(table),
    "modelswitching": lambda table, slo_ms, _: ModelSwitching(table, slo_ms),
    "cheapest": lambda table, _, __: CheapestFeasible(table),
    "fixed": lambda table, _, subnet: Fixed(table, 0 if subnet is None else subnet),
}
"""For each name, a function that makes the policy from (table, slo_ms, number after the colon or None)."""

PAPER_NAMES = {"clipper+": "fixed", "infaas": "cheapest"}
"""The names that SuperServe's paper gives to policies of this package."""


def make_policy(name: str, table: LatencyTable, slo_ms: float) -> Policy:
    """Make a policy from its name.

    Args:
        name: "hullfit", "slackfit", "maxbatch", "maxacc", "modelswitching", "cheapest" or "fixed", or a name
            of SuperServe's paper: "clipper+" is "fixed", "infaas" is "cheapest". A number may follow after a
            colon: the buckets of "slackfit:4", the subnet of "fixed:2".
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.

    Returns:
        The policy.

    Raises:
        PolicyError: the name is unknown, or the policy refuses a setting.
        TableError: the accuracy of a subnet is not known.
    """
    kind, _, number = name.partition(":")
    kind = PAPER_NAMES.get(kind.lower(), kind)
    if kind not in POLICIES:
        raise PolicyError(
            f"policy: {name!r} is not known; choose from {', '.join(sorted((*POLICIES, *PAPER_NAMES)))}"
        )
    if number and not number.isdecimal():
        raise PolicyError(f"policy: {name!r} needs a whole number after the colon")
    return POLICIES[kind](table, slo_ms, int(number) if number else None)


def policy_names(table: LatencyTable) -> list[str]:
    """Return the names that `all` stands for on the command line; `Fixed` is there with every subnet."""
    names = [name for name in POLICIES if name != "fixed"]
    return [*names, *(f"fixed:{i}" for i in range(len(table.subnets)))]
