"""Makes policies from their names, for command lines and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fixed_subnet import CheapestFeasible, Fixed
from subnetact.serving.policies.flex import Flex
from subnetact.serving.policies.greedy import MaxAcc, MaxBatch
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.policies.model_switching import Coarse, ModelSwitching
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.serving.policies.veltair import Veltair
from subnetact.serving.scheduling.context import Policy

__all__ = ["POLICIES", "make_policy", "policy_names"]

Make = Callable[[LatencyTable, float, int | None], Policy]

POLICIES: dict[str, Make] = {
    "hullfit": lambda table, slo_ms, _: HullFit(table, slo_ms),
    "slackfit": lambda table, slo_ms, buckets: SlackFit(table, slo_ms, 8 if buckets is None else buckets),
    "maxbatch": lambda table, _, __: MaxBatch(table),
    "maxacc": lambda table, _, __: MaxAcc(table),
    "modelswitching": lambda table, slo_ms, _: ModelSwitching(table, slo_ms),
    "coarse": lambda table, slo_ms, delay: Coarse(table, slo_ms, 100.0 if delay is None else delay),
    "cheapest": lambda table, _, __: CheapestFeasible(table),
    "flex": lambda table, _, subnet: Flex(table, subnet),
    "fixed": lambda table, _, subnet: Fixed(table, 0 if subnet is None else subnet),
    "veltair": lambda table, slo_ms, _: Veltair(table, lambda measured: HullFit(measured, slo_ms)),
}
"""For each name, a function that makes the policy from (table, slo_ms, number after the colon or None)."""


def make_policy(name: str, table: LatencyTable, slo_ms: float) -> Policy:
    """Make a policy from its name.

    Args:
        name: "hullfit", "slackfit", "maxbatch", "maxacc", "modelswitching", "coarse", "cheapest", "flex",
            "fixed" or "veltair". A number may follow after a colon: the buckets of "slackfit:4", the subnet
            of "fixed:2" and "flex:2", the delay of "coarse:100" in ms.
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.

    Returns:
        The policy.

    Raises:
        PolicyError: the name is unknown, or the policy refuses a setting.
        TableError: the accuracy of a subnet is not known.
    """
    kind, _, number = name.partition(":")
    if kind not in POLICIES:
        raise PolicyError(f"policy: {name!r} is not known; choose from {', '.join(sorted(POLICIES))}")
    if number and not number.isdecimal():
        raise PolicyError(f"policy: {name!r} needs a whole number after the colon")
    return POLICIES[kind](table, slo_ms, int(number) if number else None)


def policy_names(table: LatencyTable) -> list[str]:
    """Return the names that `all` stands for on the command line.

    These are all policies except Flex, which the table supports (Veltair needs co-runners), and `Fixed` with
    every subnet.
    """
    names = [name for name in POLICIES if name not in ("fixed", "flex", "veltair")]
    if table.co_runners:
        names.append("veltair")
    return [*names, *(f"fixed:{i}" for i in range(len(table.subnets)))]
