"""Checks of the settings of policies, simulations and batchers."""

from __future__ import annotations

import math
from typing import Any

from subnetact.errors import PolicyError, TableError
from subnetact.latency.table import LatencyTable

__all__ = ["check_accuracy", "check_count", "check_margin", "check_policy", "check_slo"]


def check_count(value: object, name: str) -> int:
    """`value` as a positive integer.

    Raises:
        PolicyError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name}: {value!r} is not a positive integer")
    return value


def check_accuracy(table: LatencyTable) -> LatencyTable:
    """The table, if the accuracy of every subnet is known.

    Raises:
        TableError: naming a subnet whose accuracy is NaN; or it is no table.
    """
    if not isinstance(table, LatencyTable):
        raise TableError(
            f"table: expected a LatencyTable, got {type(table).__name__}; LatencyTable.load(path) reads one"
        )
    table.known_accuracy()
    return table


def check_policy(policy: object) -> None:
    """Refuse what is no policy.

    Raises:
        PolicyError: it is a name or a class, or lacks `table` or `decide`.
    """
    hint = 'make one from a table, as SlackFit(table) or make_policy("slackfit", table) do'
    if isinstance(policy, str | type):
        raise PolicyError(f"policy: {policy!r} is no policy object; {hint}")
    if not callable(getattr(policy, "decide", None)):
        raise PolicyError(f"policy: {policy!r} has no method decide(context); {hint}")
    if not isinstance(getattr(policy, "table", None), LatencyTable):
        raise PolicyError(
            f"policy: {type(policy).__name__} has no attribute 'table'; set self.table to the LatencyTable "
            "that it decides by"
        )


def check_slo(slo_ms: float, table: LatencyTable) -> float:
    """`slo_ms` as a float.

    Raises:
        PolicyError: not finite, or below the fastest option of the table.
    """
    check_accuracy(table)
    slo_ms = _number(slo_ms, "slo_ms")
    if not (math.isfinite(slo_ms) and slo_ms > 0):
        raise PolicyError(f"slo_ms: {slo_ms} must be finite and > 0")
    if slo_ms < table.fastest_ms:
        raise PolicyError(
            f"slo_ms: {slo_ms} ms is below the fastest option ({table.fastest_ms:g} ms); ask for more"
        )
    return slo_ms


def check_margin(margin: float, name: str) -> float:
    """`margin` as a float.

    Raises:
        PolicyError: negative or not finite.
    """
    margin = _number(margin, name)
    if not (math.isfinite(margin) and margin >= 0):
        raise PolicyError(f"{name}: {margin} must be finite and >= 0")
    return margin


def _number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise PolicyError(f"{name}: {value!r} must be a number")
